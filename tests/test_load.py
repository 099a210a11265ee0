"""run_folder.load(): damage in the files that save() writes is found, whichever byte it hits."""

import os
import random
import zlib

import pytest
import torch
from conftest import same

import common
import run_folder

TREE = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1, 2]),
    "c": torch.ones(3, dtype=torch.bfloat16),
}


def test_a_flipped_bit_is_found(tmp_path):
    """A bit of every byte: of the records, of the headers, of the list at the end.

    What still loads, flips in dates and paddings, holds what was saved."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    good = path.read_bytes()
    rng, found = random.Random(0), 0
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1 :])
        try:
            assert same(run_folder.load(path), TREE), i
        except common.UserError as e:
            assert str(e).startswith(f"{path}: not a readable checkpoint ("), i
            assert len(str(e).splitlines()) == 1, i
            found += 1
    assert found > len(good) // 3


@pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
def test_another_number_is_found(tmp_path, at):
    """torch alone loads it: it does not look at the checksums."""
    path = tmp_path / "a.pt"
    run_folder.save({"w": torch.zeros(10_000)}, path)
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 64
    path.write_bytes(content)
    assert torch.load(path)["w"].any()
    with pytest.raises(common.UserError, match="model .*checksum"):
        run_folder.load(path, "model")


def test_a_record_marked_as_a_folder_is_found(tmp_path):
    """One bit of the list at the end, and torch reads nothing: the tensor is what memory held."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"archive/data/0") - 46
    content[entry + 38] ^= 16
    path.write_bytes(content)
    with pytest.raises(common.UserError, match="checksums are not those"):
        run_folder.load(path)


@pytest.mark.parametrize("cut", [0, 0.5, 0.99])
def test_a_cut_file_is_found(tmp_path, cut):
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
    with pytest.raises(common.UserError, match="not a readable checkpoint"):
        run_folder.load(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(tmp_path, make):
    """A pipe would be waited for, for ever."""
    make(tmp_path / "a.pt")
    with pytest.raises(common.UserError, match="a.pt: not a file"):
        run_folder.load(tmp_path / "a.pt")
    with pytest.raises(common.UserError, match="no such model"):
        run_folder.load(tmp_path / "b.pt", "model")


def test_a_file_of_a_known_checksum(tmp_path):
    """A flipped bit is found whichever it is, of paddings too."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    good = path.read_bytes()
    assert same(run_folder.load(path, "model", zlib.crc32(good)), TREE)
    for at in range(0, len(good), 19):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(common.UserError, match="a.pt: not a readable model .*checkpoint.pt"):
            run_folder.load(path, "model", zlib.crc32(good))
