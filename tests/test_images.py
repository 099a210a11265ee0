"""Data sets of images: glyphs, folders, torchvision's; caches; augmentation."""

import json
import os
import pickle
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import GLYPHS, TINY, flags, make_folder
from PIL import Image
from support import make_mnist
from test_docs import ROOT, blocks_of
from torchvision import datasets
from torchvision.transforms import functional as tv

import common
import run_folder
import extras.glyphs
import fedavg
from extras import images


def test_glyphs_follow_the_seed_and_have_writers():
    assert GLYPHS == (20_000, 4_000)
    a, other = extras.glyphs.glyphs(), extras.glyphs.glyphs(seed=1)
    again = extras.glyphs._glyphs.__wrapped__((600, 200), 0)
    assert (a.x.shape, a.x_test.shape) == ((600, 3, 32, 32), (200, 3, 32, 32))
    assert (a.x.dtype, a.classes, len(a.writers)) == (torch.uint8, 62, 600)
    assert torch.equal(a.x, again.x) and torch.equal(a.y_test, again.y_test)
    assert not torch.equal(a.x, other.x)
    # a writer's paper has one colour: corners vary less within a writer than between writers
    corner = a.x[:, :, :3, :3].double().mean((2, 3)).numpy()
    within = np.mean([corner[a.writers == w].var(0) for w in set(a.writers)])
    assert within < 0.5 * corner.var(0).mean()


def test_folder_decodes_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    root = make_folder(tmp_path)
    before = images.folder(root).x
    decode = mock.Mock(wraps=images.decode_images)
    monkeypatch.setattr(images, "decode_images", decode)
    assert torch.equal(images.folder(root).x, before) and decode.call_count == 0
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(root / "train/bee/1.png")
    assert images.folder(root).x[4].max() == 0 and decode.call_count == 1
    cache = next(root.glob(".cache-*.pt"))
    cache.write_bytes(b"damaged")
    assert images.folder(root).x[4].max() == 0 and decode.call_count == 2
    cache.unlink()
    os.mkfifo(cache)
    assert images.folder(root).x[4].max() == 0 and decode.call_count == 3 and cache.is_file()


def test_folder_keeps_grey_images_grey(tmp_path):
    root = make_folder(tmp_path, mode="L")
    assert images.folder(root).x.shape == (6, 1, 12, 12)
    Image.fromarray(np.full((12, 12, 3), (1, 2, 3), np.uint8)).save(root / "train/bee/2.png")
    data = images.folder(root)  # one in colour: all are read so
    assert data.x[5, :, 0, 0].tolist() == [1, 2, 3] and (data.x[0, 0] == data.x[0, 2]).all()


def test_cifar_is_kept_as_rows_of_pixels(monkeypatch):
    """torchvision's is an array (n, height, width, channels) and a list of labels."""
    pixels = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3)).astype(np.uint8)
    found = SimpleNamespace(data=pixels, targets=[1] * 6, classes=list("0123456789"))
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, train, download: found)
    data = common.load_data(flags("--dataset", "cifar10"))
    assert np.array_equal(data.x.permute(0, 2, 3, 1), pixels) and data.classes == 10
    assert data.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])


def test_svhn(monkeypatch):
    """torchvision's is an array in another order than its memory's, normalised by its pixels."""
    pixels = np.random.default_rng(0).integers(256, size=(32, 32, 3, 6)).astype(np.uint8)
    pixels = pixels.transpose(3, 2, 0, 1)

    def svhn(root, split, download):
        n = {"train": 6, "test": 2}[split]
        return SimpleNamespace(data=pixels[:n], labels=np.arange(n) + 4)

    monkeypatch.setattr(datasets, "SVHN", svhn)
    data = common.load_data(flags("--dataset", "svhn"))
    assert np.array_equal(data.x, pixels) and data.x.is_contiguous()
    assert (data.y.tolist(), data.y_test.tolist()) == ([4, 5, 6, 7, 8, 9], [4, 5])
    assert data.classes == len(data.names) == 10
    for found, wanted in (data.mean, pixels.mean((0, 2, 3))), (data.std, pixels.std((0, 2, 3))):
        assert found.flatten().numpy() == pytest.approx(wanted / 255)
    assert common.resolve_augment(flags("--dataset", "svhn"), data) == []


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist(tmp_path, name):
    make_mnist(tmp_path, {"mnist": "MNIST"}.get(name, "FashionMNIST"), 8, 4)
    argv = ["--dataset", name, "--data-dir", str(tmp_path), "--image-size", "16"]
    data = common.load_data(flags(*argv))
    assert (data.x.shape, data.x.dtype, len(data.y_test)) == ((8, 1, 16, 16), torch.uint8, 4)
    assert data.names[9] == ("9 - nine" if name == "mnist" else "Ankle boot")


def test_the_folder_that_the_page_writes(tmp_path, monkeypatch):
    """docs/data.md's lines on batches of CIFAR-10's format: by class, then by file name."""
    from torchvision.datasets import cifar

    rng, written = np.random.default_rng(0), {"train": {}, "test": {}}
    raw, classes = tmp_path / "data" / "cifar-10-batches-py", [f"class{c}" for c in "jihgfedcba"]
    raw.mkdir(parents=True)
    (raw / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    for file in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels, labels = rng.integers(256, size=(20, 3072)).astype(np.uint8), [*range(10)] * 2
        names = [f"{rng.choice(['a', 'b'])}_s_{i:06}.png" for i in rng.permutation(10**6)[:20]]
        batch = {"data": pixels, "labels": labels, "filenames": names}
        (raw / file).write_bytes(pickle.dumps(batch))
        part = written["test" if file == "test_batch" else "train"]
        part |= {(classes[y], name): x for y, name, x in zip(labels, names, pixels)}
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    monkeypatch.chdir(tmp_path)
    [block] = [b for b in blocks_of(ROOT / "docs" / "data.md") if "CIFAR10" in b.text]
    exec(block.text, {})
    data = images.folder(tmp_path / "data" / "cifar10")
    for part, x, y in (("train", data.x, data.y), ("test", data.x_test, data.y_test)):
        keys = sorted(written[part])
        assert np.array_equal(x.flatten(1), np.stack([written[part][key] for key in keys]))
        assert [data.names[label] for label in y] == [key[0] for key in keys]


def test_the_cache_of_other_files_is_made_again(tmp_path):
    """As after a copy of one cache over another."""
    roots = [make_folder(tmp_path / "a"), make_folder(tmp_path / "b", classes=("cat", "dog"))]
    expected, _ = (images.folder(root).x for root in roots)
    cache, other = (next(root.glob(images.CACHE)) for root in roots)
    content = run_folder.load(other)
    content["tensors"]["images"].zero_()
    run_folder.save(content, cache)
    assert torch.equal(images.folder(roots[0]).x, expected)


def test_one_cache_is_kept(tmp_path):
    """Other sizes and what kills have left go when one is written; other files stay."""
    root = make_folder(tmp_path)
    images.folder(root)
    [cache] = root.glob(images.CACHE)
    kept = [".cache-mine.pt", ".cache-mine.pt.1.tmp", "x.tmp"]
    for file in [*kept, f"{cache.name}.1.tmp", ".cache-01234567.pt"]:
        (root / file).touch()
    images.folder(root, 8)
    [new] = root.glob(images.CACHE)
    assert {path.name for path in root.iterdir() if path.is_file()} == {*kept, new.name}
    assert new != cache


def one_by_one(images, draws):
    found = []
    for i, image in enumerate(images):
        draw = {name: values[i].tolist() for name, values in draws.items()}
        image = tv.rotate(image, draw.get("rotate", 0))
        for name, mode in (("crop", "constant"), ("reflect-crop", "reflect")):
            if name in draw:
                image = tv.crop(tv.pad(image, 4, padding_mode=mode), *draw[name], 32, 32)
        found.append(tv.hflip(image) if draw.get("flip") else image)
    return torch.stack(found)


@pytest.mark.parametrize("names", ["flip", "reflect-crop flip", "rotate15 crop flip"])
def test_augmentation_equals_a_loop_over_images(names):
    """In a rotation a source position on the border of two pixels may round either way."""
    images = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    drawn = common.draw_augment(names.split(), np.random.default_rng(0), (40,))
    draws = {k: torch.from_numpy(v) for k, v in drawn.items()}
    for name, values in draws.items():
        least, most = {"flip": (0, 1), "rotate": (-15, 15)}.get(name, (0, 8))
        assert least <= values.min() < least + 5 and most - 5 < values.max() <= most
    fast, slow = common.apply_augment(images, draws), one_by_one(images, draws)
    same = (fast == slow).float().mean()
    assert same > 0.999 if "rotate" in names else same == 1


def test_augment_flag():
    """A mirrored glyph is another character."""
    words = ["--augment rotate10,crop,flip", "--augment none", "", "--dataset cifar10"]
    found = [common.resolve_augment(flags(*argv.split())) for argv in words]
    assert found == [["rotate10", "crop", "flip"], [], [], ["crop", "flip"]]


@pytest.mark.parametrize("mode, augment", [("L", "none"), ("RGB", "crop,flip")])
def test_auto_leaves_grey_images_alone(tmp_path, capsys, mode, augment):
    """A folder of digits: the batches are as they are read; the line and config.json say so."""
    root, out = make_folder(tmp_path / "data", mode=mode), tmp_path / "run"
    words = f"--dataset folder --data-dir {root} --min-size 1 --model simple-cnn --image-size 16"
    words = [*TINY, *f"{words} --clients 2 --clip 2 --out {out}".split()]
    fedavg.main([word for word in words if word != "--quiet"])
    line = capsys.readouterr().out.splitlines()[0]
    assert f"lr 0.01, momentum 0.9, weight decay 0.0001, clip 2, augment {augment}; on cpu" in line
    assert line.endswith(f"workers: {min(2, common.CORES)}")
    assert json.loads((out / "config.json").read_text())["augment"] == augment
    args = flags(*words)
    data, client = common.load_data(args), common.Client(0, np.arange(6))
    worker = common.PlainWorker(common.prepare_net(data, args), data, args, client, {"round": 1})
    [(x, _)] = worker.local_batches(client)
    plain = data.normalise(data.x).sum().item()
    assert (x.sum().item() == pytest.approx(plain, abs=1e-2)) == (mode == "L")
