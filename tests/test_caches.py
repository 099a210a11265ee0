"""What is kept of decoded data sets: nothing that is damaged or of other files is read."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import make_folder
from support import make_femnist, make_imagenet

import run_folder
from extras import images, readers


@pytest.fixture
def folder(tmp_path):
    """A folder of images with its cache."""
    root = make_folder(tmp_path)
    images.folder(root)
    return root


def cache_of(root):
    return next(path for path in root.glob(".cache-*.pt") if "mine" not in path.name)


def change(root, edit):
    """Write the cache of root anew, with its tensors changed by edit(tensors)."""
    content = run_folder.load(cache_of(root))
    edit(content["tensors"])
    run_folder.save(content, cache_of(root))


WRONG = {
    "fewer": lambda tensors: tensors.update(images=tensors["images"][:-1]),
    "smaller": lambda tensors: tensors.update(images=tensors["images"][:, :, :-1, :-1]),
    "four channels": lambda tensors: tensors.update(images=torch.zeros(10, 4, 12, 12).byte()),
    "floats": lambda tensors: tensors.update(images=tensors["images"].float()),
    "no tensor": lambda tensors: tensors.update(images=[1, 2]),
    "none": lambda tensors: tensors.clear(),
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG)
def test_a_wrong_cache_is_made_again(tmp_path, edit):
    root = make_folder(tmp_path)
    expected = images.folder(root, 8)
    change(root, edit)
    data = images.folder(root, 8)
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.x_test, expected.x_test)


def test_the_cache_of_other_files_is_made_again(folder, tmp_path):
    """As after a copy of one cache over another."""
    expected = images.folder(folder).x
    other = make_folder(tmp_path / "other", classes=("cat", "dog"))
    images.folder(other)
    content = run_folder.load(cache_of(other))
    content["tensors"]["images"].zero_()
    run_folder.save(content, cache_of(folder))
    assert torch.equal(images.folder(folder).x, expected)


def test_leftovers_of_kills_are_removed(folder):
    """Where a cache is read and where it is made; of nobody else's files."""
    name = cache_of(folder).name
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = [".cache-mine.pt", ".cache-mine.pt.1.tmp", "x.tmp", f"{name}.{os.getppid()}.tmp"]
    kept += [f"{name}.{'9' * 30}.tmp", f"{name}.tmp"]
    for file in kept:
        (folder / file).write_text("kept")
    for size in (None, 8):
        leftovers = [folder / f"{old}.{ended.pid}.tmp" for old in (name, ".cache-01234567.pt")]
        for path in leftovers:
            path.write_bytes(b"cut")
        images.folder(folder, size)
        assert not any(path.exists() for path in leftovers)
        assert all((folder / file).read_text() == "kept" for file in kept)
    assert not (folder / name).exists()  # another size has taken its place


WRONG_CHARACTERS = {
    "fewer": lambda tensors: tensors.update(y=tensors["y"][:-1]),
    "no label": lambda tensors: tensors["y_test"].fill_(62),
    "int32": lambda tensors: tensors.update(writers=tensors["writers"].int()),
    "writers": lambda tensors: tensors.update(writers=tensors["writers"][1:]),
    "coloured": lambda tensors: tensors.update(x=tensors["x"].expand(-1, 3, -1, -1)),
}


@pytest.mark.parametrize("edit", WRONG_CHARACTERS.values(), ids=WRONG_CHARACTERS)
def test_a_wrong_cache_of_femnist_is_made_again(tmp_path, edit):
    make_femnist(tmp_path)
    root = tmp_path / "femnist"
    expected = readers.femnist(root)
    change(root, edit)
    data = readers.femnist(root)
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.y_test, expected.y_test)
    assert (data.writers == expected.writers).all()


def test_a_wrong_cache_of_imagenet_is_made_again(tmp_path, monkeypatch):
    root = make_imagenet(tmp_path, monkeypatch)
    expected = readers.imagenet_200(root, 28).x_test
    change(root, lambda tensors: tensors.update(x_test=tensors["x_test"][:, :, :20, :20]))
    assert torch.equal(readers.imagenet_200(root, 28).x_test, expected)


def test_a_cache_with_flipped_bits_is_made_again(folder):
    expected = images.folder(folder).x
    path = cache_of(folder)
    raw = path.read_bytes()
    for place in range(0, len(raw), len(raw) // 40):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert torch.equal(images.folder(folder).x, expected), place
