"""Image data sets in their own formats on disk: FEMNIST, Tiny-ImageNet, ImageNet-200, EMNIST."""

import json

import numpy as np
import pytest
import torch
from conftest import IMAGENET, TINY, check_graph, flags, needs_gpu, same
from PIL import Image
from support import make_femnist, make_imagenet, make_tiny_imagenet
from torchvision import datasets, transforms
from torchvision.transforms import functional as tv

import common
import engine
import extras.glyphs
import fedavg
import rfedavg
from extras import readers

# --- FEMNIST: LEAF's JSON


def test_femnist(tmp_path, monkeypatch):
    content = make_femnist(tmp_path)
    root = tmp_path / "femnist"
    data = readers.femnist(root)
    assert data.x.shape == (56, 1, 28, 28)
    assert data.classes == 62
    assert len(data.y_test) == len(data.writers_test)
    for user, name in enumerate(sorted(content["test"])):  # numbered in the order of their names
        for part, x, y, writers in (
            ("train", data.x, data.y, data.writers),
            ("test", data.x_test, data.y_test, data.writers_test),
        ):
            expected = content[part].get(name, {"x": np.zeros((0, 784)), "y": []})
            assert y[writers == user].tolist() == expected["y"]
            pixels = data.normalise(x[writers == user]).numpy().reshape(-1, 784)
            assert np.allclose(pixels, 2 * np.reshape(expected["x"], (-1, 784)) - 1, atol=1e-6)
    (path,) = (root / "test").glob("*.json")
    shard = json.loads(path.read_text())  # a user may have nothing
    shard["num_samples"].append(0)
    shard["users"].append("nobody")
    shard["user_data"]["nobody"] = {"x": [], "y": []}
    path.write_text(json.dumps(shard))
    assert torch.equal(readers.femnist(root).x_test, data.x_test)
    monkeypatch.setattr(readers, "read_leaf", None)  # read once
    assert torch.equal(readers.femnist(root).x, data.x)


# --- Tiny-ImageNet


def test_tiny_imagenet(tmp_path, monkeypatch):
    root = make_tiny_imagenet(tmp_path)
    argv = ["--dataset", "tiny-imagenet", "--data-dir", str(tmp_path)]
    data = common.load_data(flags(*argv))
    assert data.x.shape == (9, 3, 64, 64)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.classes == 3
    pixels = np.array(Image.open(root / "train/n03/images/n03_1.JPEG"))
    assert torch.equal(data.x[7], torch.from_numpy(pixels).permute(2, 0, 1))
    assert data.y_test.tolist() == [2, 0, 1]
    assert data.x_test.double().mean((1, 2, 3)).round().tolist() == [0, 50, 100]
    assert data.mean.flatten().tolist() == pytest.approx([0.4802, 0.4481, 0.3975])
    assert data.std.flatten().tolist() == pytest.approx([0.2770, 0.2691, 0.2821])
    monkeypatch.setattr(readers, "decode_images", None)  # decoded once
    half = common.load_data(flags(*argv, "--normalise", "half", "--image-size", "32"))
    assert half.x.shape == (9, 3, 32, 32)
    extremes = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    assert half.normalise(extremes)[:, 0, 0, 0].tolist() == [-1, 1]
    none = common.load_data(flags(*argv, "--normalise", "none"))
    assert none.normalise(extremes)[:, 0, 0, 0].tolist() == [0, 1]
    torch.testing.assert_close(none.normalise(data.x), data.x.float() / 255)
    cifar = common.load_data(flags("--normalise", "cifar10"))
    assert cifar.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    assert cifar.std.flatten().tolist() == pytest.approx([0.2470, 0.2435, 0.2616])


# --- ImageNet-200


def imagenet_flags(root, size, *argv):
    """Return the words of a command line on make_imagenet's files."""
    words = "--dataset imagenet-200 --partition iid --clients 2 --batch-size 4".split()
    return [*words, "--data-dir", str(root), "--image-size", str(size), *argv]


def tensor(image):
    """Return a Pillow image as (3, height, width) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def centre(path):
    """Return an image of 64 x 48 pixels scaled to 42 x 32, then its central 28 x 28."""
    return tensor(tv.center_crop(tv.resize(Image.open(path), 32), 28))


def test_imagenet_200(tmp_path):
    root = make_imagenet(tmp_path)
    data = common.load_data(flags(*imagenet_flags(tmp_path, 28)))
    names = [f"n{i:08d}" for i in range(9)]
    wnids = np.random.RandomState(1993).choice(names, 3, replace=False).tolist()
    assert (data.classes, data.image_size) == (3, 28)
    assert len(data.paths) == len(data.y) == len(set(data.paths)) == 12
    assert data.x_test.shape == (6, 3, 28, 28)
    assert data.x.shape == (0, 3, 28, 28)
    assert [path.split("/")[-2] for path in data.paths] == np.repeat(wnids, 4).tolist()
    labels = [sorted(wnids).index(wnid) for wnid in wnids]
    assert data.y.tolist() == np.repeat(labels, 4).tolist()
    assert torch.equal(data.x_test[3], centre(root / "val" / wnids[1] / "1.JPEG"))
    assert IMAGENET == (1000, 200, 500)


def worker_on_imagenet(tmp_path, *argv):
    """Return a worker, and a client of three images."""
    make_imagenet(tmp_path)
    args = flags(*imagenet_flags(tmp_path, 28, *argv))
    data = common.load_data(args)
    worker = engine.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8)
    return worker, common.Client(0, np.array([7, 2, 11]), {})


def test_imagenet_200_is_cut_to_its_centre_without_augmentation(tmp_path):
    worker, client = worker_on_imagenet(tmp_path)
    ((x, y),) = worker.batches(client)
    expected = torch.stack([centre(worker.data.paths[i]) for i in client.index])
    assert torch.equal(x, worker.data.normalise(expected))
    assert y.tolist() == worker.data.y[client.index].tolist()


def test_imagenet_200_is_augmented_by_its_draws(tmp_path):
    """Two epochs in batches of 2 and 1, each image by draws of seed, round and client."""
    worker, client = worker_on_imagenet(tmp_path, "--batch-size", "2", "--epochs", "2")
    data, args, batches = worker.data, worker.args, []

    def local_update(worker, client, server, args):
        def step(x, y):
            batches.append((x.clone(), y.clone()))
            return worker.net(x).sum() * 0

        yield step

    list(worker.train(client, {"round": 2}, worker.net.state_dict(), local_update))
    rng = common.seeded_rng("batches", args.seed, 2, 0)
    tables = common.batch_tables(client.index, 4, args, worker.net, data, rng)
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(28),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.RandomHorizontalFlip(),
        ]
    )
    assert [len(x) for x, _ in batches] == [2, 1, 2, 1]
    for row, (x, y) in enumerate(batches):
        for i in range(len(x)):
            index = tables["index"][row, i]
            torch.manual_seed(tables["seed"][row, i])
            image = augment(Image.open(data.paths[index]))
            assert torch.equal(x[i : i + 1], data.normalise(tensor(image)[None]))
            assert y[i] == data.y[index]


@pytest.mark.parametrize(
    "script, more",
    [(fedavg, ["--workers", "2"]), (rfedavg, []), (fedavg, ["--augment", "none"])],
)
def test_training_on_streamed_images(tmp_path, script, more):
    make_imagenet(tmp_path)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, *more)]
    net, rows = script.main([*argv, "--out", str(tmp_path / "a")])
    script.main([*argv, "--rounds", "1", "--out", str(tmp_path / "b")])
    on = ["--out", str(tmp_path / "b"), "--resume", "--rounds", "2", "--quiet"]
    assert rows[1]["samples"] == 12
    assert same(net.state_dict(), script.main(on)[0].state_dict())


@needs_gpu
def test_streamed_images_on_a_gpu(tmp_path):
    make_imagenet(tmp_path)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, "--device", "cuda")]
    check_graph(tmp_path, fedavg, argv, 1e-4)


# --- EMNIST


def test_emnist_is_turned_upright(monkeypatch):
    x = torch.arange(3 * 28 * 28).view(3, 28, 28).to(torch.uint8)

    class Fake:
        data, targets, classes = x, torch.tensor([0, 61, 9]), list(extras.glyphs.CHARACTERS)

    def fake(root, train, download, split):
        assert download and split == "byclass"
        return Fake()

    monkeypatch.setattr(datasets, "EMNIST", fake)
    data = common.load_data(flags("--dataset", "emnist"))
    assert data.x.shape == (3, 1, 28, 28)
    assert data.classes == 62
    assert data.x[1, 0, 2, 20] == x[1, 20, 2]
    for name in ("emnist", "femnist"):
        assert common.resolve_augment(flags("--dataset", name)) == []
