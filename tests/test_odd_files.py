"""Files that are no plain ones: pipes, links around, images of 16 bits, numbers without end."""

import faulthandler
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder, refusal, refused
from support import make_femnist, make_imagenet, make_sent140, make_tiny_imagenet

import fedavg
from extras import images


def folder_flags(root):
    return [*TINY, "--dataset", "folder", "--data-dir", root, "--partition", "iid"]


# --- images of more than 8 bits


def png16(path, color_type, channels):
    """Write a PNG of 32x32 pixels of 16 bits a channel, which Pillow cannot write."""
    pixels = np.random.default_rng(0).integers(65536, size=(32, 32 * channels)).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", 32, 32, 16, color_type, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        content += struct.pack(">I", len(data)) + kind + data + crc
    path.write_bytes(content)


DEEP = {
    "RGB.png": lambda path: png16(path, 2, 3),
    "grey.png": lambda path: png16(path, 0, 1),
    "RGB.ppm": lambda path: path.write_bytes(b"P6\n32 32\n65535\n" + bytes(32 * 32 * 6)),
}


@pytest.mark.parametrize("name", DEEP)
def test_grey_images_of_16_bits_are_refused(tmp_path, name):
    """Pillow would clip them to 8 bits; of those in colour it keeps the upper 8."""
    root = make_folder(tmp_path / "images", (32, 32))
    path = root / "train" / "ape" / name
    DEEP[name](path)
    if name == "grey.png":
        line = refusal(images.folder, root)
        assert line == f"{path}: not a readable image (more than 8 bits a pixel)"
        return
    pixels = images.folder(root).x[3].permute(1, 2, 0)
    upper = np.random.default_rng(0).integers(65536, size=(32, 32, 3)) >> 8
    assert (pixels.numpy() == (upper if name == "RGB.png" else 0)).all()


# --- links


LOOPS = [  # and an image that is seen in a client's place
    ([("train/ape/loop", "train/ape")], "ape/loop/0.png"),
    ([("train/ape/loop", "train")], None),
    ([("train/ape/loop", ".")], None),
    ([("train/ape/a", "elsewhere"), ("elsewhere/b", "elsewhere")], None),
    ([("train/ape/a", "train/ape"), ("train/ape/b", "train/ape")], "ape/a/0.png"),  # 2**40 folders
]


@pytest.mark.parametrize("links, seen", LOOPS)
def test_links_around_repeat_nothing(tmp_path, capsys, links, seen):
    root = make_folder(tmp_path / "images", (32, 32))
    (root / "elsewhere").mkdir()
    for link, target in links:
        (root / link).symlink_to(root / target)
    if seen:
        refused(capsys, fedavg, folder_flags(root), seen, "images lie in")
    else:
        assert images.folder(root).y.tolist() == [0] * 3 + [1] * 3


# --- pipes, of which a read never ends


@pytest.fixture(autouse=True)
def no_hang():
    """End the tests' process where one waits for a pipe."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def streamed(tmp_path, monkeypatch):
    for path in make_imagenet(tmp_path, monkeypatch).glob("train/*/*"):
        pipe(path)


def folder_of(tmp_path, monkeypatch):
    make_folder(tmp_path, (32, 32))


FOLDER = "--dataset folder --data-dir TMP --partition iid"
STREAMED = "--dataset imagenet-200 --partition iid --clients 2 --batch-size 4 --image-size 24"
TWEETS = "--dataset sent140 --model lstm --vectors random --data-dir TMP"
PIPES = [  # what is made, the file in whose place a pipe lies, the words of a command
    (folder_of, "train/ape/1.png", FOLDER),
    (streamed, None, f"{STREAMED} --data-dir TMP"),
    (make_femnist, "femnist/train/all_data_0_train.json", "--dataset femnist --data-dir TMP"),
    (
        make_tiny_imagenet,
        "tiny-imagenet-200/val/val_annotations.txt",
        "--dataset tiny-imagenet --data-dir TMP",
    ),
    (make_sent140, "sent140/tweets.csv", TWEETS),
    (None, "pipe", "--partition file --split-file TMP/pipe"),
    (make_sent140, "pipe", f"{TWEETS} --partition iid --vectors TMP/pipe"),
]


@pytest.mark.parametrize("make, file, words", PIPES)
def test_a_pipe_is_refused(tmp_path, monkeypatch, capsys, make, file, words):
    if make:
        make(tmp_path, *[monkeypatch] * (make in (streamed, folder_of)))
    expected = "not a regular file"
    if file:
        pipe(tmp_path / file)
        expected = f"{tmp_path / file}: {'no such file' if file == 'pipe' else expected}"
    refused(capsys, fedavg, [*TINY, *words.replace("TMP", str(tmp_path)).split()], expected)


def test_a_pipe_as_a_cache(tmp_path):
    root = make_folder(tmp_path / "images", (32, 32))
    expected = images.folder(root)
    path = pipe(next(root.glob(".cache-*.pt")))
    assert torch.equal(images.folder(root).x, expected.x)
    assert path.is_file()  # made again
