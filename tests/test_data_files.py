"""Image data sets in their own formats on disk: FEMNIST, Tiny-ImageNet, ImageNet-200, EMNIST."""

import importlib
import json

import numpy as np
import pytest
import torch
from conftest import TINY, flags, needs_gpu, same
from PIL import Image
from support import make_femnist, make_imagenet, make_tiny_imagenet, refused
from torchvision import transforms
from torchvision.transforms import functional as tv

import common
import engine
import extras.glyphs
import fedavg
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


def cut(path):
    """Cut a file in half."""
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


def edit(change):
    """Return a damage to a file: change(shard, data of its second user, that user's name)."""

    def apply(path):
        shard = json.loads(path.read_text())
        user = shard["users"][1]
        change(shard, shard["user_data"][user], user)
        path.write_text(json.dumps(shard))

    return apply


def repeat_a_user(shard, data, user):
    """List a user with all of its data twice."""
    shard["users"].append(user)
    shard["num_samples"].append(len(data["y"]))


def write(text):
    return lambda path: path.write_text(text)


DAMAGED_SHARDS = [
    (cut, ["user None: not a shard of LEAF (JSONDecodeError", "line 1 column"]),
    (lambda path: path.write_bytes(b"\xff"), ["not UTF-8"]),
    (write("[" * 99999), ["not a shard", "RecursionError"]),
    (write("[1, 2]"), ["not a shard", "TypeError"]),
    (edit(lambda shard, data, user: shard["num_samples"].pop()), ["not a shard", "shorter"]),
    (edit(lambda shard, data, user: shard["user_data"].pop(user)), ["f01_3", "KeyError"]),
    (edit(lambda shard, data, user: data["x"].pop()), ["f01_3", "2 x and 3 y", "says 3"]),
    (edit(repeat_a_user), ["f01_3", "listed twice"]),
    (edit(lambda shard, data, user: data.update(x=[[0.5] * 100] * 3)), ["f01_3", "reshape"]),
    (edit(lambda shard, data, user: data["x"][0].__setitem__(5, 255)), ["f01_3", "0 to 1"]),
    (edit(lambda shard, data, user: data["y"].__setitem__(0, 62)), ["f01_3", "0 to 61"]),
    (edit(lambda shard, data, user: data["y"].__setitem__(0, "a")), ["f01_3"]),
    (lambda path: path.unlink(), ["no samples in *.json", "TalwalkarLab/leaf", "femnist"]),
]


@pytest.mark.parametrize("damage, words", DAMAGED_SHARDS)
def test_damaged_shards(tmp_path, capsys, damage, words):
    make_femnist(tmp_path, users=(2, 3, 1, 2))
    folder = tmp_path / "femnist" / "train"
    (folder / "all_data_1_train.json").unlink()
    path = folder / "all_data_0_train.json"
    damage(path)
    where = folder if words[0].startswith("no samples") else path
    refused(capsys, ["--dataset", "femnist", "--data-dir", str(tmp_path)], str(where), *words)


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


def annotate(raw):
    """Return a damage: raw, bytes, instead of the annotations."""
    return lambda root: (root / "val/val_annotations.txt").write_bytes(raw)


def make_narrow(root):
    Image.new("RGB", (48, 64)).save(root / "train/n01/images/n01_1.JPEG")


def make_unreadable(root):
    (root / "train/n01/images/n01_1.JPEG").write_bytes(b"no jpeg")


DAMAGED_TINY_IMAGENET = [
    (annotate(b"val_0.JPEG\tn03\t0\t0\t1\t1\nval_1.JPEG\n"), ["annotations.txt, line 2", "''"]),
    (lambda root: (root / "val/images/val_1.JPEG").unlink(), ["val_1.JPEG", "No such file"]),
    (make_narrow, ["n01_1.JPEG", "48x64", "64x64"]),
    (make_unreadable, ["n01_1.JPEG", "not a readable image"]),
]


@pytest.mark.parametrize("damage, words", DAMAGED_TINY_IMAGENET)
def test_damaged_tiny_imagenet(tmp_path, capsys, damage, words):
    damage(make_tiny_imagenet(tmp_path))
    refused(capsys, ["--dataset", "tiny-imagenet", "--data-dir", str(tmp_path)], *words)


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


def test_imagenet_200_classes():
    """The first classes that FedAlign's authors list, by their place in the order of all 1000:
    n01729322, n01514668, n04550184, ..."""
    wnids = np.random.RandomState(1993).choice(np.arange(1000), 200, replace=False)
    assert wnids[:5].tolist() == [54, 7, 894, 512, 126]
    assert readers.IMAGENET == (1000, 200, 500)


def test_imagenet_200(tmp_path, monkeypatch):
    root = make_imagenet(tmp_path, monkeypatch)
    data = common.load_data(flags(*imagenet_flags(tmp_path, 28)))
    names = [f"n{i:08d}" for i in range(9)]
    wnids = np.random.RandomState(1993).choice(names, 3, replace=False).tolist()
    assert data.classes == 3
    assert len(data.paths) == len(data.y) == len(set(data.paths)) == 12
    assert data.x_test.shape == (6, 3, 28, 28)
    assert data.x.shape == (0, 3, 28, 28)
    assert [path.split("/")[-2] for path in data.paths] == np.repeat(wnids, 4).tolist()
    labels = [sorted(wnids).index(wnid) for wnid in wnids]
    assert data.y.tolist() == np.repeat(labels, 4).tolist()
    assert data.image_size == 28
    assert torch.equal(data.x_test[3], centre(root / "val" / wnids[1] / "1.JPEG"))


def test_imagenet_200_is_cut_to_its_centre_without_augmentation(tmp_path, monkeypatch):
    make_imagenet(tmp_path, monkeypatch)
    args = flags(*imagenet_flags(tmp_path, 28))
    data = common.load_data(args)
    worker = engine.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8)
    client = common.Client(0, np.array([7, 2, 11]), {})
    ((x, y),) = worker.batches(client)
    expected = torch.stack([centre(data.paths[i]) for i in client.index])
    assert torch.equal(x, data.normalise(expected))
    assert y.tolist() == data.y[client.index].tolist()


def test_imagenet_200_is_augmented_by_its_draws(tmp_path, monkeypatch):
    """Two epochs in batches of 2 and 1 at --batch-size 2: each image by its own draws, which follow
    seed, round and client."""
    make_imagenet(tmp_path, monkeypatch)
    args = flags(*imagenet_flags(tmp_path, 28, "--batch-size", "2", "--epochs", "2"))
    data = common.load_data(args)
    worker = engine.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8)
    client = common.Client(0, np.array([7, 2, 11]), {})
    batches = []

    def local_update(worker, client, server, args):
        def step(x, y):
            batches.append((x.clone(), y.clone()))
            return worker.net(x).sum() * 0

        yield step

    list(worker.train(client, {"round": 2}, worker.net.state_dict(), local_update))
    rng = common.seeded_rng("batches", args.seed, 2, 0)
    tables = common.batch_tables(client.index, 4, args, worker.net, data, rng)
    augment = [
        transforms.RandomResizedCrop(28),
        transforms.ColorJitter(0.4, 0.4, 0.4),
        transforms.RandomHorizontalFlip(),
    ]
    assert [len(x) for x, _ in batches] == [2, 1, 2, 1]
    for row, (x, y) in enumerate(batches):
        for i in range(len(x)):
            index = tables["index"][row, i]
            image = Image.open(data.paths[index])
            torch.manual_seed(tables["seed"][row, i])
            for transform in augment:
                image = transform(image)
            assert torch.equal(x[i : i + 1], data.normalise(tensor(image)[None]))
            assert y[i] == data.y[index]


@pytest.mark.parametrize(
    "script, more",
    [
        ("fedavg", ["--workers", "2"]),
        ("rfedavg", []),
        ("fedavg", ["--augment", "none"]),
    ],
)
def test_training_on_streamed_images(tmp_path, monkeypatch, script, more):
    make_imagenet(tmp_path, monkeypatch)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, *more)]
    run = importlib.import_module(script).main
    net, rows = run([*argv, "--out", str(tmp_path / "a")])
    run([*argv, "--rounds", "1", "--out", str(tmp_path / "b")])
    resumed_net, _ = run(["--out", str(tmp_path / "b"), "--resume", "--rounds", "2", "--quiet"])
    assert rows[1]["samples"] == 12
    assert same(net.state_dict(), resumed_net.state_dict())


@needs_gpu
def test_streamed_images_on_a_gpu(tmp_path, monkeypatch):
    make_imagenet(tmp_path, monkeypatch)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, "--device", "cuda", "--deterministic")]
    weights = {}
    for flag in ("--graph", "--no-graph"):
        net, _ = fedavg.main([*argv, flag, "--out", str(tmp_path / flag)])
        weights[flag] = net.state_dict()
    for k, v in weights["--graph"].items():
        assert torch.allclose(v, weights["--no-graph"][k], rtol=1e-4, atol=1e-5), k


def damage_files(root, pattern):
    for path in root.glob(pattern):
        path.write_bytes(b"no")


def remove_files(root, pattern):
    for path in root.glob(pattern):
        path.unlink()


DAMAGED_IMAGENET = [
    (lambda root: damage_files(root, "train/*/*"), ["train/n", "not a readable image"]),
    (lambda root: remove_files(root, "val/*/*"), ["6 images, and 0 in val/n"]),
    (lambda root: remove_files(root, "train/*/[0-2]*"), ["3 images", "where 4"]),
    (
        lambda root: (root / "train").rename(root / "moved"),
        ["imagenet/train", "0 folders", "image-net.org"],
    ),
]


@pytest.mark.parametrize("damage, words", DAMAGED_IMAGENET)
def test_damaged_imagenet(tmp_path, monkeypatch, capsys, damage, words):
    damage(make_imagenet(tmp_path, monkeypatch))
    refused(capsys, imagenet_flags(tmp_path, 28, "--out", str(tmp_path / "run")), *words)
    other = imagenet_flags(tmp_path, 28, "--out", str(tmp_path / "b"), "--augment", "crop")
    refused(capsys, other, "--augment", "imagenet-200")


# --- EMNIST


def test_emnist_is_turned_upright(monkeypatch):
    from torchvision import datasets

    x = torch.arange(3 * 28 * 28).view(3, 28, 28).to(torch.uint8)

    class Fake:
        data = x
        targets = torch.tensor([0, 61, 9])
        classes = list(extras.glyphs.CHARACTERS)

    def fake(root, train, download, split):
        assert download
        assert split == "byclass"
        return Fake()

    monkeypatch.setattr(datasets, "EMNIST", fake)
    data = common.load_data(flags("--dataset", "emnist"))
    assert data.x.shape == (3, 1, 28, 28)
    assert data.classes == 62
    assert data.x[1, 0, 2, 20] == x[1, 20, 2]
    assert common.resolve_augment(flags("--dataset", "emnist")) == []
    assert common.resolve_augment(flags("--dataset", "femnist")) == []
