"""Files that are no plain ones: pipes, links around, images of 16 bits, numbers without end."""

import faulthandler
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder, refusal, refused
from PIL import Image
from support import make_femnist, make_imagenet, make_sent140, make_tiny_imagenet, text_flags

import common
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


def tiff16(path):
    """Write a TIFF of 32x32 pixels of 16 bits in colour."""
    size = 32 * 32 * 6
    fields = [(256, 3, 32), (257, 3, 32), (258, 3, 122), (259, 3, 1), (262, 3, 2), (273, 4, 128)]
    fields += [(277, 3, 3), (278, 3, 32), (279, 4, size)]
    content = b"II*\0" + struct.pack("<IH", 8, len(fields))
    for tag, kind, value in fields:
        content += struct.pack("<HHII", tag, kind, 3 if tag == 258 else 1, value)
    path.write_bytes(content + struct.pack("<IHHH", 0, 16, 16, 16) + bytes(size))


DEEP = {
    "RGB.png": lambda path: png16(path, 2, 3),
    "grey.png": lambda path: png16(path, 0, 1),
    "grey and alpha.png": lambda path: png16(path, 4, 2),
    "RGBA.png": lambda path: png16(path, 6, 4),
    "RGB.tif": tiff16,
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
    else:
        assert len(images.folder(root).x) == 7
    if name == "RGB.png":
        upper = np.random.default_rng(0).integers(65536, size=(32, 32, 3)) >> 8
        pixels = images.folder(root).x[3].permute(1, 2, 0)
        assert (pixels.numpy() == upper).all()


def test_formats_of_8_bits_are_read(tmp_path):
    """With any maximum up to 255, as PPM has it."""
    root = make_folder(tmp_path / "images", (4, 4))
    for form in ("ppm", "bmp", "tif", "webp", "jpg"):
        Image.new("RGB", (4, 4)).save(root / "train" / "ape" / f"a.{form}")
    (root / "train" / "ape" / "b.ppm").write_bytes(b"P6\n4 4\n100\n" + bytes(48))
    assert len(images.folder(root).x) == 12


def test_pillow_does_not_warn(tmp_path, monkeypatch):
    """Of an image of over 89 million pixels, twice as many of which are an error."""
    root = make_folder(tmp_path / "images", (32, 32))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert len(images.folder(root).x) == 6
    assert found == []
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    (root / "train/ape/1.png").touch()
    with pytest.raises(common.UserError, match="not a readable image .*decompression bomb"):
        images.folder(root)


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


def test_other_links_are_followed(tmp_path):
    """A class that lies elsewhere, and an image."""
    root = make_folder(tmp_path / "images", (32, 32))
    (root / "train" / "ape").rename(tmp_path / "ape")
    (root / "train" / "ape").symlink_to(tmp_path / "ape")
    (tmp_path / "ape" / "5.png").symlink_to(root / "train" / "bee" / "1.png")
    assert images.folder(root).y.tolist() == [0] * 4 + [1] * 3


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


def is_refused(capsys, path, *argv):
    refused(capsys, fedavg, [*TINY, *argv], f"{path}: not a regular file")


def test_a_pipe_as_an_image(tmp_path, capsys):
    root = make_folder(tmp_path / "images", (32, 32))
    path = pipe(root / "train/ape/1.png")
    is_refused(capsys, path, *folder_flags(root))


def test_a_pipe_as_a_streamed_image(tmp_path, monkeypatch, capsys):
    for path in make_imagenet(tmp_path, monkeypatch).glob("train/*/*"):
        pipe(path)
    words = "--dataset imagenet-200 --partition iid --clients 2 --batch-size 4 --image-size 24"
    is_refused(capsys, "JPEG", *words.split(), "--data-dir", tmp_path)


def test_a_pipe_as_a_cache(tmp_path):
    root = make_folder(tmp_path / "images", (32, 32))
    expected = images.folder(root)
    path = pipe(next(root.glob(".cache-*.pt")))
    assert torch.equal(images.folder(root).x, expected.x)
    assert path.is_file()  # made again


def test_a_pipe_as_a_shard(tmp_path, capsys):
    make_femnist(tmp_path)
    path = pipe(tmp_path / "femnist/train/all_data_0_train.json")
    is_refused(capsys, path, "--dataset", "femnist", "--data-dir", tmp_path)


def test_a_pipe_as_annotations(tmp_path, capsys):
    path = pipe(make_tiny_imagenet(tmp_path) / "val/val_annotations.txt")
    is_refused(capsys, path, "--dataset", "tiny-imagenet", "--data-dir", tmp_path)


def test_a_pipe_as_tweets(tmp_path, capsys):
    make_sent140(tmp_path)
    path = pipe(tmp_path / "sent140/tweets.csv")
    is_refused(capsys, path, *text_flags(tmp_path))


def test_pipes_as_files_of_flags(tmp_path, capsys):
    path = pipe(tmp_path / "pipe")
    refused(capsys, fedavg, [*TINY, "--partition", "file", "--split-file", path], "no such file")
    make_sent140(tmp_path)
    words = [*text_flags(tmp_path), "--partition", "iid", "--vectors", path]
    refused(capsys, fedavg, [*TINY, *words], "no such file")
