"""A run goes on with the data that it began with, or not at all."""

import functools
import json
import shutil
import time

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder
from PIL import Image
from runs import config_of
from support import make_imagenet

import common
import fedavg

SMALL = [*TINY, *"--partition iid --clients 2 --batch-size 4 --local-steps 1".split()]


def content_of(out):
    """Return {file: its bytes} of a run's folder."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def resumed(capsys, out, *words, more=(), run=common.run):
    """Check that a run of one round is not resumed, and that nothing of it changes."""
    before = content_of(out)
    with pytest.raises(SystemExit) as stop:
        fedavg.main(["--out", str(out), "--resume", "--rounds", "2", *more], run=run)
    _, err = capsys.readouterr()
    assert stop.value.code == 2
    assert len(err.splitlines()) == 1, err
    for word in ("--resume", str(out), *words):
        assert word in err, err
    assert content_of(out) == before


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of images, a run of one round on it and one on own(), not to be changed."""
    top = tmp_path_factory.mktemp("originals")
    root = make_folder(top / "images", (32, 32))
    words = [*SMALL, "--rounds", "1", "--dataset", "folder", "--data-dir", str(root)]
    fedavg.main([*words, "--out", str(top / "run")])
    run = functools.partial(common.run, data=own())
    fedavg.main([*SMALL, "--rounds", "1", "--out", str(top / "own")], run=run)
    return top


@pytest.fixture
def folder_run(originals, tmp_path):
    """A copy of the run on images, to be changed: (the images' folder, the run's)."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    return tmp_path / "images", tmp_path / "run"


def at(root):
    return ["--data-dir", str(root)]


def blacken(root, name):
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(root / name)


CHANGES = [
    (lambda root: blacken(root, "train/ape/7.png"), "labels"),
    (lambda root: (root / "test/bee/1.png").unlink(), "labels"),
    (lambda root: (root / "train/ape/1.png").rename(root / "train/bee/9.png"), "labels"),
    (lambda root: blacken(root, "train/ape/1.png"), "samples"),
    (lambda root: blacken(root, "test/bee/0.png"), "samples"),
    (lambda root: (root / "train/ape/0.png").rename(root / "train/ape/9.png"), "samples"),
]


@pytest.mark.parametrize("change, what", CHANGES)
def test_changed_images(folder_run, capsys, change, what):
    change(folder_run[0])
    resumed(capsys, folder_run[1], what, more=at(folder_run[0]))


def test_touched_and_moved_images_are_the_same(folder_run, tmp_path):
    """Neither times nor places count."""
    root, out = folder_run
    (root / "train/ape/0.png").touch()
    root.rename(tmp_path / "moved")
    words = ["--out", str(out), "--resume", "--rounds", "2"]
    _, rows = fedavg.main([*words, *at(tmp_path / "moved")])
    assert len(rows) == 2


def test_a_run_without_digests_is_resumed(folder_run):
    """As one that an older version of the code began."""
    root, out = folder_run
    config = config_of(out)
    del config["data"]
    (out / "config.json").write_text(json.dumps(common.sealed(config)))
    blacken(root, "train/ape/1.png")
    _, rows = fedavg.main(["--out", str(out), "--resume", "--rounds", "2", *at(root)])
    assert len(rows) == 2


@pytest.mark.parametrize("damage", [[1], 5, {}, {"labels": 5}])
def test_damaged_digests(folder_run, capsys, damage):
    config = config_of(folder_run[1])
    config = common.sealed({**config, "data": damage})
    (folder_run[1] / "config.json").write_text(json.dumps(config))
    resumed(capsys, folder_run[1], "labels", more=at(folder_run[0]))


def test_an_edited_split_file(tmp_path, capsys):
    path, out = tmp_path / "split.json", tmp_path / "run"
    parts = np.arange(600).reshape(2, 300).tolist()
    path.write_text(json.dumps(parts))
    words = ["--partition", "file", "--split-file", str(path), "--rounds", "1", "--out", str(out)]
    fedavg.main([*SMALL, "--local-steps", "1", *words])
    parts[0][3], parts[1][4] = parts[1][4], parts[0][3]
    path.write_text(json.dumps(parts))
    resumed(capsys, out, "--partition file")


def own(**changes):
    """Return data of 20 training and 10 test images, but for changes."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=rng)
    y = torch.arange(30) % 5
    fields = {"x": x[:20], "y": y[:20], "x_test": x[20:], "y_test": y[20:], "classes": 5}
    return common.Data(**{**fields, **changes})


def changed(tensor, index, value):
    """Return a copy of tensor with one value in it changed."""
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


OWN = own()
CHANGED = [
    (own(x=changed(OWN.x, (17, 2, 31, 31), 255 - OWN.x[17, 2, 31, 31])), "samples"),
    (own(x=OWN.x[torch.arange(20) ^ 1]), "samples"),
    (own(x_test=changed(OWN.x_test, (0, 0, 0, 0), 1)), "samples"),
    (own(x=OWN.x.float(), x_test=OWN.x_test.float()), "samples"),
    (own(mean=[0.1] * 3, std=[0.2] * 3), "samples"),
    (own(y=changed(OWN.y, 3, 0)), "labels"),
    (own(y_test=changed(OWN.y_test, 3, 0)), "labels"),
    (own(classes=6), "labels"),
]


@pytest.mark.parametrize("data, what", CHANGED)
def test_changed_tensors(originals, tmp_path, capsys, data, what):
    out = shutil.copytree(originals / "own", tmp_path / "run")
    resumed(capsys, out, what, run=functools.partial(common.run, data=data))


def test_changed_streamed_images(tmp_path, monkeypatch, capsys):
    root, out = make_imagenet(tmp_path, monkeypatch), tmp_path / "run"
    words = ["--dataset", "imagenet-200", "--data-dir", str(tmp_path), "--image-size", "24"]
    fedavg.main([*SMALL, *words, "--rounds", "1", "--out", str(out)])
    for path in root.glob("train/*/2.JPEG"):
        Image.new("RGB", (90, 90)).save(path)
    resumed(capsys, out, "samples")


def test_digests_take_no_time():
    """Of as many images as CIFAR-10 has, and of a million clients."""
    x = torch.zeros(60_000, 3, 32, 32, dtype=torch.uint8)
    y = torch.zeros(60_000).long()
    data = common.Data(x, y, x[:10_000], y[:10_000], 10, [0.5] * 3, [0.5] * 3)
    parts = np.split(np.arange(60_000), 10)
    assert min(seconds(data, parts) for _ in range(5)) < 0.2
    y = torch.zeros(1_000_000).long()
    x = torch.zeros(1_000_000, 2)
    data = common.Data(x, y, x[:10], y[:10], 10)
    assert seconds(data, list(np.arange(1_000_000)[:, None])) < 3


def seconds(data, parts):
    start = time.perf_counter()
    common.data_digests(data, parts)
    return time.perf_counter() - start
