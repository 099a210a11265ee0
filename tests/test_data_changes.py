"""A run goes on with the data that it began with, or not at all."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder
from PIL import Image
from support import make_imagenet

import common
import run_folder
import fedavg

SMALL = [*TINY, *"--partition iid --clients 2 --batch-size 4 --local-steps 1".split()]


def content_of(out):
    """Return {file: its bytes} of a run's folder."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def resumed(out, *words, more=()):
    """Check that a run of one round is not resumed, and that nothing of it changes."""
    before = content_of(out)
    with pytest.raises(common.UserError) as stop:
        fedavg.main(["--out", str(out), "--resume", "--rounds", "2", *more])
    err = str(stop.value)
    assert len(err.splitlines()) == 1, err
    for word in (str(out), *words):
        assert word in err, err
    assert content_of(out) == before


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of images and a run of one round on it, not to be changed."""
    top = tmp_path_factory.mktemp("originals")
    root = make_folder(top / "images", (32, 32))
    words = [*SMALL, "--rounds", "1", "--dataset", "folder", "--data-dir", str(root)]
    fedavg.main([*words, "--out", str(top / "run")])
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
def test_changed_images(folder_run, change, what):
    change(folder_run[0])
    resumed(folder_run[1], what, more=at(folder_run[0]))


def test_an_edited_split_file(tmp_path):
    path, out = tmp_path / "split.json", tmp_path / "run"
    parts = np.arange(600).reshape(2, 300).tolist()
    path.write_text(json.dumps(parts))
    words = ["--partition", "file", "--split-file", str(path), "--rounds", "1", "--out", str(out)]
    fedavg.main([*SMALL, "--local-steps", "1", *words])
    parts[0][3], parts[1][3] = parts[1][3], parts[0][3]
    path.write_text(json.dumps(parts))
    resumed(out, "another partition of the data")


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
def test_changed_tensors(data, what):
    parts = np.split(np.arange(20), 4)
    before, after = (run_folder.data_digests(d, parts) for d in (OWN, data))
    assert [k for k in before if before[k] != after[k]] == [what]


def test_changed_streamed_images(tmp_path, monkeypatch):
    root, out = make_imagenet(tmp_path, monkeypatch), tmp_path / "run"
    words = ["--dataset", "imagenet-200", "--data-dir", str(tmp_path), "--image-size", "24"]
    fedavg.main([*SMALL, *words, "--rounds", "1", "--out", str(out)])
    for path in root.glob("train/*/2.JPEG"):
        Image.new("RGB", (90, 90)).save(path)
    resumed(out, "samples")
