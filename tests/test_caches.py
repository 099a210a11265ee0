"""What is kept of decoded data sets: nothing that is damaged or of other files is read."""

import pytest
import torch
from conftest import make_folder

import run_folder
from extras import images


@pytest.fixture
def folder(tmp_path):
    """A folder of images with its cache."""
    root = make_folder(tmp_path)
    images.folder(root)
    return root


def cache_of(root):
    (path,) = root.glob(images.CACHE)
    return path


def test_the_cache_of_other_files_is_made_again(folder, tmp_path):
    """As after a copy of one cache over another."""
    expected = images.folder(folder).x
    other = make_folder(tmp_path / "other", classes=("cat", "dog"))
    images.folder(other)
    content = run_folder.load(cache_of(other))
    content["tensors"]["images"].zero_()
    run_folder.save(content, cache_of(folder))
    assert torch.equal(images.folder(folder).x, expected)


def test_one_cache_is_kept(folder):
    """Other sizes and what kills have left go when one is written; other files stay."""
    name = cache_of(folder).name
    kept = [".cache-mine.pt", ".cache-mine.pt.1.tmp", "x.tmp"]
    for file in [*kept, f"{name}.1.tmp", ".cache-01234567.pt"]:
        (folder / file).write_text("some")
    images.folder(folder, 8)
    found = {path.name for path in folder.iterdir() if path.is_file()}
    assert found == {*kept, cache_of(folder).name}
    assert name not in found


def test_a_cache_with_flipped_bits_is_made_again(folder):
    expected = images.folder(folder).x
    path = cache_of(folder)
    raw = path.read_bytes()
    for place in range(0, len(raw), len(raw) // 40):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert torch.equal(images.folder(folder).x, expected), place
