"""Images: files and folders of them, the cache of what was decoded, their size and scale."""

import contextlib
import dataclasses
import os
import pathlib
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import NATURAL, Data, UserError, checksum, file_status
from run_folder import load as load_file, save

CACHE = ".cache-" + "[0-9a-f]" * 8  # the names of caches


def load(args):
    """Return the data set of --dataset folder."""
    by_client = args.partition in NATURAL
    return folder(pathlib.Path(args.data_dir), args.image_size, by_client)


def folder(root, image_size=None, by_client=False):
    """Return the images under root in torchvision's ImageFolder layout, decoded once.

    root: a path that holds train/CLASS/* and test/CLASS/* (or val/CLASS/*). image_size: pixels of a
    side to which they are resized; without it all must be of one size. by_client: train/CLIENT/
    CLASS/* is accepted too, and the data set then names the clients as writers, by numbers in the
    order of their names. UserError where folders or classes are missing or an image is damaged."""
    train_folder = _part(root, ("train",))
    test_folder = _part(root, ("test", "val"))
    train_clients, test_clients = (
        _clients(root, part, by_client) for part in (train_folder, test_folder)
    )
    if by_client and not train_clients:
        raise UserError(
            f"--data-dir {root}: does not say who made each image; --partition natural and "
            "natural-iid read train/CLIENT/CLASS/*"
        )
    train, classes, writers = _samples(root, train_folder, train_clients, train_clients)
    test, test_classes, writers_test = _samples(root, test_folder, test_clients, train_clients)
    if classes != test_classes:
        names = sorted(set(classes) ^ set(test_classes))
        raise UserError(
            f"--data-dir {root}: train and test hold different classes; "
            f"class {names[0]!r} is in one of them only"
        )
    data = load_images(root, train, test, len(classes), image_size)
    data.names = classes
    if train_clients:
        data.writers = writers
        data.writers_test = writers_test if test_clients else None
    return data


def _part(root, names):
    """Return the folder under root that has one of the names; UserError if there is none."""
    paths = [root / name for name in names if (root / name).is_dir()]
    if not paths:
        raise UserError(
            f"--data-dir {root}: no folder {' or '.join(names)} in it; "
            "--dataset folder reads train/CLASS/* and test/CLASS/*"
        )
    return paths[0]


def _clients(root, part, by_client):
    """Return the names of the clients where images lie in part/CLIENT/CLASS/*, else none.

    UserError where they lie otherwise than there or in part/CLASS/*, and unless by_client."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    try:
        _refuse_loops(part)
    except OSError as e:
        raise UserError(f"--data-dir {root}: {e}") from None
    walk = os.walk(part, followlinks=True)
    files = (pathlib.Path(folder, name) for folder, _, names in walk for name in names)
    files = sorted(file for file in files if file.suffix.lower() in IMG_EXTENSIONS)
    first = {len(file.relative_to(part).parts): file for file in reversed(files)}
    if set(first) <= {2}:
        return []
    layout = f"{part.name}/CLASS/*, or in {part.name}/CLIENT/CLASS/* with --partition natural"
    if set(first) != {3} or not by_client:
        odd = first[max(set(first) - {2})]
        others = f", and {first[2]} otherwise" if 2 in first else ""
        raise UserError(f"--data-dir {root}: {odd} lies so{others}; images lie in {layout}")
    return sorted(path.name for path in part.iterdir() if path.is_dir())


def _samples(root, part, clients, train_clients):
    """Return [(path, label), ...], the names of the classes, and each sample's writer's number.

    clients: the folders in part that hold the classes, none if part itself does. Writers are
    numbered as in train_clients; those that are not there share the number behind them."""
    from torchvision.datasets import ImageFolder

    try:
        trees = [ImageFolder(part / client) for client in clients] or [ImageFolder(part)]
    except OSError as e:
        raise UserError(f"--data-dir {root}: {e}") from None
    classes = sorted({name for tree in trees for name in tree.classes})
    samples, writers = [], []
    for tree, client in zip(trees, clients or [None]):
        samples += [(path, classes.index(tree.classes[label])) for path, label in tree.samples]
        known = client in train_clients
        number = train_clients.index(client) if known else len(train_clients)
        writers += [number] * len(tree.samples)
    return samples, classes, np.array(writers)


def _refuse_loops(top):
    """Raise UserError for a link to a folder around it, which would repeat images many times.

    OSError for a folder that cannot be read, which ImageFolder would pass over."""

    def stop(error):
        raise error

    for folder, names, _ in os.walk(top, followlinks=True, onerror=stop):
        for path in (os.path.join(folder, name) for name in names):
            if not os.path.islink(path):
                continue
            target, inside = pathlib.Path(path).resolve(), pathlib.Path(folder)
            around = [inside, *inside.parents[: len(inside.relative_to(top).parts)]]
            if any(place.resolve().is_relative_to(target) for place in around):
                raise UserError(f"{path}: a link to a folder that holds it")


def load_images(root, train, test, classes, image_size=None, statistics=(None, None)):
    """Return the data set of two lists of (path, label), decoded once and kept in root.

    image_size: pixels of a side, None for as they are. statistics: mean and std of Data."""
    paths = [path for path, _ in (*train, *test)]

    def read():
        return {"images": decode_images(paths, _scaling(image_size))}

    def check(tensors):
        check_images(tensors["images"], len(paths), image_size)

    x = read_cached(root, paths, image_size, read, check)["images"]
    y, y_test = (torch.tensor([label for _, label in part]) for part in (train, test))
    x, x_test = x.split([len(train), len(test)])
    return Data(x, y, x_test, y_test, classes, *statistics)


def _scaling(size):
    """Return a function that scales a Pillow image to size x size pixels; None for no size."""
    from PIL import Image

    if not size:
        return None
    return lambda image: image.resize((size, size), Image.Resampling.BILINEAR)


def check_normalise(normalise, channels):
    """Raise UserError where --normalise is for images of other channels."""
    if normalise == "cifar10" and channels != 3:
        raise UserError(f"--normalise cifar10: for images of three channels, not {channels}")


def with_statistics(data, normalise):
    """Return data with the mean and std that --normalise asks for: half, cifar10 or none."""
    channels = data.x.shape[1]
    check_normalise(normalise, channels)
    mean, std = {
        "half": ([0.5] * channels, [0.5] * channels),
        "cifar10": common.STATISTICS["cifar10"],
        "none": ([0.0] * channels, [1.0] * channels),
    }[normalise]
    return dataclasses.replace(data, mean=mean, std=std)


def resized(data, size):
    """Return data with images of size x size pixels."""
    if data.x.shape[-2:] == (size, size):
        return data

    def resize(images):
        parts = []
        for x in images.split(2000):  # as floats they need more memory
            x = F.interpolate(x.float(), (size, size), mode="bilinear", antialias=True)
            parts.append(x.round().clamp(0, 255).byte())
        return torch.cat(parts)

    names = [name for name in ("x", "x_test", "x_val") if getattr(data, name) is not None]
    return dataclasses.replace(data, **{name: resize(getattr(data, name)) for name in names})


def read_cached(root, paths, key, read, check):
    """Return what read() makes of the files at paths, a dict of tensors, and keep it in root.

    The file root/.cache-*.pt is named after key and every file's name, size and time of change, and
    holds that name too, so that it is made again when one of them changes. So is one that is
    damaged, or that check(tensors) rejects by an exception."""
    files = []
    for path in paths:
        status = file_status(path)
        files.append((os.path.relpath(path, root), status.st_size, status.st_mtime_ns))
    digest = checksum([], (files, key))
    cache = root / f".cache-{digest}.pt"
    _remove_leftovers(root)
    if cache.is_file():
        with contextlib.suppress(Exception):
            return _checked_cache(load_file(cache, "cache"), digest, check)
    tensors = read()
    try:
        for old in root.glob(f"{CACHE}.pt"):
            old.unlink()
        save({"name": digest, "tensors": tensors}, cache)
    except OSError as e:
        print(
            f"what was read from {root} is not cached, so the next start reads it again: {e}",
            file=sys.stderr,
        )
    return tensors


def _remove_leftovers(root):
    """Remove from root what killed writers of caches have left, each as large as the data set."""
    for path in root.glob(f"{CACHE}.pt.*.tmp"):
        writer = path.name.split(".")[-2]
        if not writer.isdecimal() or os.name != "posix":
            continue
        try:
            os.kill(int(writer), 0)  # only asks whether there is such a process
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, OverflowError):
            pass


def _checked_cache(content, digest, check):
    """Return the tensors of a cache of this name; any exception where it is none."""
    if content["name"] != digest:
        raise ValueError("the cache of other files")
    check(content["tensors"])
    return content["tensors"]


def check_images(x, count, size=None):
    """Raise ValueError unless x, (count, 1 or 3, height, width) uint8, is of images of that size.

    size: pixels of a side, None for any."""
    sides = (size, size) if size else tuple(x.shape[2:])
    if x.dtype != torch.uint8 or tuple(x.shape) not in [(count, c, *sides) for c in (1, 3)]:
        raise ValueError("not these images")


def read_text(path):
    """Return the text of a UTF-8 file; UserError names the line of a byte that is not UTF-8."""
    file_status(path)
    raw = path.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise UserError(f"{path}, line {raw[: e.start].count(10) + 1}: not UTF-8") from None


@contextlib.contextmanager
def _image_file(path):
    """Yield a file's Pillow image; UserError if it cannot be read or has over 8 bits a channel."""
    from PIL import Image

    try:
        file_status(path)
        with Image.open(path) as image:
            if _is_deep(image):
                raise UserError(f"{path}: pixels of more than 8 bits, which would be cut off")
            yield image
    except UserError:
        raise
    except Exception as e:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path}: not a readable image ({e})") from None


def _is_deep(image):
    """Return whether a Pillow image has more than 8 bits a channel, as its decoder is told.

    Those in colour come as 8 bits without a word."""
    maximum = image.tile[0][3][1] if image.tile and image.tile[0][0].startswith("ppm") else 255
    return image.mode[0] in "IF" or ";16" in str(image.tile) or maximum > 255


def open_image(path, mode):
    """Return an image file as a Pillow image, mode "L" or "RGB". UserError if it is damaged."""
    with _image_file(path) as image:
        return image.convert(mode)


def _image_mode(path):
    """Return the mode in which an image file is to be read: "L" if it is grey, else "RGB"."""
    with _image_file(path) as image:
        return "L" if image.mode in ("1", "L") else "RGB"


def decode_images(paths, resize=None, mode=None):
    """Return image files as one uint8 tensor (n, channels, height, width).

    resize: a function of a Pillow image, such as one that scales it, or None. mode: "L" or "RGB";
    None: "L" if all images are grey. UserError for a damaged image or one of another size."""

    def read(path):
        image = open_image(path, mode)
        return resize(image) if resize else image

    warnings.filterwarnings("ignore", module="PIL")  # of large images, odd palettes and the like
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mode = mode or ("RGB" if "RGB" in pool.map(_image_mode, paths) else "L")
    first = read(paths[0])
    channels, height, width = len(mode), first.height, first.width

    def pixels(path):
        image = read(path)
        if (image.height, image.width) != (height, width):
            raise UserError(
                f"{path}: {image.width}x{image.height} pixels where {paths[0]} has "
                f"{width}x{height}; --image-size makes them all one size"
            )
        return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)

    x = np.empty((len(paths), channels, height, width), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = pool.map(pixels, paths)
        images = tqdm(images, "decoding images", len(paths), leave=False, disable=None)
        for i, image in enumerate(images):
            x[i] = image
    return torch.from_numpy(x)
