"""A run goes on with the data that it began with."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder, refusal
from PIL import Image
from support import make_imagenet

import common
import run_folder
import fedavg

SMALL = [*TINY, *"--clients 2 --batch-size 4 --local-steps 1 --rounds 1".split()]
PARTS = np.arange(600).reshape(2, 300).tolist()


def swap(root):
    (root / "split").write_text(json.dumps([[300, *PARTS[0][1:]], [0, *PARTS[1][1:]]]))


def paint(*paths, size=32):
    for path in paths:
        Image.new("RGB", (size, size)).save(path)


FOLDER = "--dataset folder --data-dir . --partition iid"
IMAGENET = "--dataset imagenet-200 --data-dir . --partition iid --image-size 24"
CHANGES = [  # of a run on these, a change, and what the line names
    (FOLDER, lambda root: paint(root / "train/ape/7.png"), "labels"),
    (IMAGENET, lambda root: paint(*root.glob("imagenet/train/*/2.JPEG"), size=90), "samples"),
    ("--partition file --split-file split", swap, "another partition of the data"),
]


@pytest.mark.parametrize("words, change, what", CHANGES)
def test_changed_files(tmp_path, monkeypatch, words, change, what):
    """A run of one round is not resumed, and nothing of it changes."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path, (32, 32))
    make_imagenet(tmp_path)
    (tmp_path / "split").write_text(json.dumps(PARTS))
    fedavg.main([*SMALL, *words.split(), "--out", "run"])
    change(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    line = refusal(fedavg.main, ["--out", "run", "--resume", "--rounds", "2"])
    assert line.startswith("run") and what in line and "\n" not in line
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")} == before


def other(tensor, *index):
    return tensor.index_put([torch.tensor(i) for i in index], tensor[index] + 1)


X = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8)
Y = torch.arange(30) % 5
OWN = {"x": X[:20], "y": Y[:20], "x_test": X[20:], "y_test": Y[20:], "classes": 5}
CHANGED = [
    ({"x": other(X[:20], 17, 2, 31, 31)}, "samples"),
    ({"x": X[torch.arange(20) ^ 1]}, "samples"),
    ({"x_test": other(X[20:], 0, 0, 0, 0)}, "samples"),
    ({"x": X[:20].float(), "x_test": X[20:].float()}, "samples"),
    ({"mean": [0.1] * 3, "std": [0.2] * 3}, "samples"),
    ({"y": other(Y[:20], 3)}, "labels"),
    ({"y_test": other(Y[20:], 3)}, "labels"),
    ({"classes": 6}, "labels"),
]


@pytest.mark.parametrize("change, what", CHANGED)
def test_changed_tensors(change, what):
    parts = np.split(np.arange(20), 4)
    data = common.Data(**OWN), common.Data(**OWN | change)
    before, after = (run_folder.data_digests(d, parts) for d in data)
    assert [k for k in before if before[k] != after[k]] == [what]
