"""Images: files and folders of them, the cache of what was decoded, their size and scale."""

import contextlib
import dataclasses
import os
import pathlib
import stat
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

import common
from common import NATURAL, Data, UserError
from run_folder import checksum, load as load_file, save

CACHE = ".cache-" + "[0-9a-f]" * 8 + ".pt"  # the names of caches
BY_CLASS, BY_CLIENT = "*/*", "*/*/*"  # the layouts CLASS/* and CLIENT/CLASS/*


def file_status(path):
    """Return a file's os.stat(); UserError for a pipe or a device, of which no read may end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path}: not a regular file")
    return status


def load(args):
    """Return the data set of --dataset folder."""
    return folder(pathlib.Path(args.data_dir), args.image_size, args.partition in NATURAL)


def folder(root, image_size=None, by_client=False):
    """Return the images under root in torchvision's ImageFolder layout, decoded once.

    root: a path that holds train/CLASS/* and test/CLASS/* (or val/CLASS/*). image_size: pixels of a
    side to which they are resized; without it all must be of one size. by_client: the layout is
    train/CLIENT/CLASS/*, and test/CLIENT/CLASS/* or test/CLASS/*; clients are the writers, in the
    order of their names. UserError for another layout, other classes, or a damaged image."""
    test_folder = root / ("test" if (root / "test").is_dir() else "val")
    train = _files(root / "train", {BY_CLIENT if by_client else BY_CLASS})
    test = _files(test_folder, {BY_CLASS, BY_CLIENT} if by_client else {BY_CLASS})
    names = sorted({path.parent.name for path in train})
    odd = {path.parent.name for path in test}.symmetric_difference(names)
    if odd:
        raise UserError(f"--data-dir {root}: class {min(odd)!r} is in train or in test alone")
    label = {name: i for i, name in enumerate(names)}
    labelled = [[(path, label[path.parent.name]) for path in files] for files in (train, test)]
    data = load_images(root, *labelled, len(names), image_size)
    data.names = names
    if by_client:
        clients = sorted({path.parts[-3] for path in train})
        number = {name: i for i, name in enumerate(clients)}
        data.writers = np.array([number[path.parts[-3]] for path in train])
        if test[0].parents[2] == test_folder:  # who does not train takes no part
            data.writers_test = np.array([number.get(p.parts[-3], len(clients)) for p in test])
    return data


def _files(part, layouts):
    """Return the image files in part, all of one of the layouts, sorted.

    UserError where there is none, or one of another layout: a client would pass for a class."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    found = {}
    for layout in (BY_CLASS, BY_CLIENT):
        paths = [path for path in part.glob(layout) if path.suffix.lower() in IMG_EXTENSIONS]
        if paths:
            found[layout] = sorted(paths)
    if len(found) != 1 or not found.keys() <= layouts:
        those = " and ".join(str(paths[0]) for paths in found.values()) or "no images"
        wanted = f"{part.name}/CLASS/*, or with --partition natural {part.name}/CLIENT/CLASS/*"
        raise UserError(f"--data-dir {part.parent}: {those} found; images lie in {wanted}")
    return next(iter(found.values()))


def load_images(root, train, test, classes, image_size=None, statistics=(None, None)):
    """Return the data set of two lists of (path, label), decoded once and kept in root.

    image_size: pixels of a side, None for as they are. statistics: mean and std of Data."""
    paths = [path for path, _ in (*train, *test)]

    def scale(image):
        side = (image_size, image_size)
        return image.resize(side, Image.Resampling.BILINEAR) if image_size else image

    x = read_cached(root, paths, image_size, lambda: {"images": decode_images(paths, scale)})
    x, x_test = x["images"].split([len(train), len(test)])
    y, y_test = (torch.tensor([label for _, label in part]) for part in (train, test))
    return Data(x, y, x_test, y_test, classes, *statistics)


def prepared(data, args):
    """Return data scaled and resized as --normalise and --image-size say."""
    channels = data.x.shape[1]
    if args.normalise == "cifar10" and channels != 3:
        raise UserError(f"--normalise cifar10: for images of three channels, not {channels}")
    mean, std = {
        "dataset": (data.mean, data.std),
        "half": ([0.5] * channels, [0.5] * channels),
        "cifar10": common.STATISTICS["cifar10"],
        "none": ([0.0] * channels, [1.0] * channels),
    }[args.normalise]
    data = dataclasses.replace(data, mean=mean, std=std)
    return resized(data, args.image_size) if args.image_size else data


def resized(data, size):
    """Return data with images of size x size pixels."""
    if data.x.shape[-2:] == (size, size):
        return data

    def resize(x):
        x = F.interpolate(x.float(), (size, size), mode="bilinear", antialias=True)
        return x.round().clamp(0, 255).byte()

    parts = {k: getattr(data, k).split(2000) for k in ("x", "x_test")}  # large as floats
    return dataclasses.replace(data, **{k: torch.cat([*map(resize, v)]) for k, v in parts.items()})


def read_cached(root, paths, key, read):
    """Return what read() makes of the files at paths, a dict of tensors, and keep it in root.

    The file root/.cache-*.pt is named after key and every file's name, size and time of change, so
    that it is made again when one of them changes. There is one at a time: others are removed."""
    files = []
    for path in paths:
        status = file_status(path)
        files.append((os.path.relpath(path, root), status.st_size, status.st_mtime_ns))
    name = checksum([], (files, key))
    cache = root / f".cache-{name}.pt"
    if cache.is_file():
        with contextlib.suppress(Exception):
            content = load_file(cache, "cache")
            if content["name"] == name:
                return content["tensors"]
    tensors = read()
    try:
        for old in root.glob(f"{CACHE}*"):
            old.unlink(missing_ok=True)
        save({"name": name, "tensors": tensors}, cache)
    except OSError as e:
        print(f"{root} is not cached, so the next start reads it again: {e}", file=sys.stderr)
    return tensors


def read_text(path):
    """Return the text of a UTF-8 file; UserError where it is none."""
    file_status(path)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 ({e})") from None


def read_image(path, read):
    """Return read(image) of a file's Pillow image.

    UserError where it cannot be read, or is grey and has over 8 bits, which Pillow would clip."""
    file_status(path)
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":
                raise ValueError("more than 8 bits a pixel")
            return read(image)
    except Exception as e:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path}: not a readable image ({e})") from None


def decode_images(paths, resize, mode=None):
    """Return image files as one uint8 tensor (n, channels, height, width).

    resize: a function of a Pillow image, such as one that scales it. mode: "L" or "RGB"; None: "L"
    if all images are grey. UserError for a damaged image or one of another size."""

    def pixels(path):
        image = resize(read_image(path, lambda image: image.convert(mode)))
        return np.asarray(image).reshape(image.height, image.width, -1).transpose(2, 0, 1)

    warnings.filterwarnings("ignore", module="PIL")  # of large images, odd palettes and the like
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if mode is None:
            modes = set(pool.map(lambda path: read_image(path, lambda image: image.mode), paths))
            mode = "L" if modes <= {"1", "L"} else "RGB"
        first = pixels(paths[0])
        x = np.empty((len(paths), *first.shape), np.uint8)
        images = pool.map(pixels, paths)
        images = tqdm(images, "decoding images", len(paths), leave=False, disable=None)
        for path, row, image in zip(paths, x, images):
            if image.shape != first.shape:
                height, width = first.shape[1:]
                found = f"{image.shape[2]}x{image.shape[1]} pixels, not {width}x{height}"
                raise UserError(f"{path}: {found} as {paths[0]}; --image-size makes them one size")
            row[:] = image
    return torch.from_numpy(x)
