"""A run goes on with the data that it began with, and reads whole files, or not at all."""

import json
import os
import random
import zlib

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder, refusal, same
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
    (FOLDER, lambda root: paint(root / "train/ape/1.png"), "samples"),
    (FOLDER, lambda root: paint(root / "test/bee/0.png"), "samples"),
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


TREE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1]), "c": torch.ones(3).bfloat16()}


@pytest.mark.parametrize("known", [False, True])
def test_a_flipped_bit_is_found(tmp_path, known):
    """What still loads holds what was saved; of a file whose checksum is known nothing loads."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    good, rng, found = path.read_bytes(), random.Random(0), 0
    more = ["model", zlib.crc32(good)] if known else []
    assert same(run_folder.load(path, *more), TREE)
    for i in range(0, len(good), 9):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1 :])
        try:
            assert same(run_folder.load(path, *more), TREE) and not known, i
        except common.UserError as e:
            assert str(e).startswith(f"{path}: not a readable ") and "\n" not in str(e), i
            found += 1
    assert found > len(good) // 27
    path.write_bytes(good[: len(good) // 2])
    assert refusal(run_folder.load, path, *more).startswith(f"{path}: not a readable ")


def test_a_record_marked_as_a_folder_is_found(tmp_path):
    """One bit of the list at the end, and torch reads nothing: the tensor is what memory held."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"archive/data/0") - 8] ^= 16
    path.write_bytes(content)
    assert "checksums are not those" in refusal(run_folder.load, path)


@pytest.mark.parametrize(
    "make, words", [(os.mkfifo, "not a file"), (os.mkdir, "not a file"), (str, "no such model")]
)
def test_what_is_no_file_is_refused(tmp_path, make, words):
    """A pipe would be waited for, for ever."""
    make(tmp_path / "a.pt")
    assert words in refusal(run_folder.load, tmp_path / "a.pt", "model")
