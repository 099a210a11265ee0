"""run_folder.load(): damage in the files that save() writes is found, whichever byte it hits."""

import os
import random
import zlib

import pytest
import torch
from conftest import same

import common
import run_folder

TREE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1]), "c": torch.ones(3).bfloat16()}


@pytest.mark.parametrize("known", [False, True])
def test_a_flipped_bit_is_found(tmp_path, known):
    """A bit of every third byte: of the records, of the headers, of the list at the end.

    What still loads, flips in dates and paddings, holds what was saved; of a file whose checksum
    is known nothing loads."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    good, rng, found = path.read_bytes(), random.Random(0), 0
    more = ["model", zlib.crc32(good)] if known else []
    assert same(run_folder.load(path, *more), TREE)
    for i in range(0, len(good), 3):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1 << rng.randrange(8)]) + good[i + 1 :])
        try:
            assert same(run_folder.load(path, *more), TREE) and not known, i
        except common.UserError as e:
            assert str(e).startswith(f"{path}: not a readable ") and "\n" not in str(e), i
            found += 1
    assert found > len(good) // 9
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(common.UserError, match="a.pt: not a readable "):
        run_folder.load(path, *more)


def test_a_record_marked_as_a_folder_is_found(tmp_path):
    """One bit of the list at the end, and torch reads nothing: the tensor is what memory held."""
    path = tmp_path / "a.pt"
    run_folder.save(TREE, path)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"archive/data/0") - 8] ^= 16
    path.write_bytes(content)
    with pytest.raises(common.UserError, match="checksums are not those"):
        run_folder.load(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(tmp_path, make):
    """A pipe would be waited for, for ever."""
    make(tmp_path / "a.pt")
    with pytest.raises(common.UserError, match="a.pt: not a file"):
        run_folder.load(tmp_path / "a.pt")
    with pytest.raises(common.UserError, match="no such model"):
        run_folder.load(tmp_path / "b.pt", "model")
