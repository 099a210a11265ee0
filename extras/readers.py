"""Data sets in their own formats on disk: Tiny-ImageNet, ImageNet-200 and LEAF's FEMNIST."""

import itertools
import json
import os
import pathlib
import warnings

import numpy as np
import torch
from tqdm import tqdm

import common
from common import UserError
from extras.images import (
    check_images,
    decode_images,
    load_images,
    open_image,
    read_cached,
    read_text,
)


def load(args):
    """Return the data set args.dataset from its folder under args.data_dir, as common.load_data."""
    root = pathlib.Path(args.data_dir)
    if args.dataset == "femnist":
        return femnist(root / "femnist")
    if args.dataset == "tiny-imagenet":
        return tiny_imagenet(root / "tiny-imagenet-200")
    return imagenet_200(root / "imagenet", args.image_size or 224)


# --------------------------------------------------------------------------------------------------
# Tiny-ImageNet
# --------------------------------------------------------------------------------------------------


def tiny_imagenet(root):
    """Return Tiny-ImageNet as its archive holds it under root, 64x64 RGB images of 200 classes.

    The files are wnids.txt, train/WNID/images/*, val/images/* and val/val_annotations.txt. The test
    set is val, as the archive's test has no labels. UserError for a missing or damaged file."""
    annotations = root / "val" / "val_annotations.txt"
    try:
        wnids = sorted(set(read_text(root / "wnids.txt").split()))
        lines = read_text(annotations).splitlines()
    except FileNotFoundError as e:
        raise UserError(
            f"{e.filename}: no such file; unzip http://cs231n.stanford.edu/tiny-imagenet-200.zip "
            "so that it is there"
        ) from None
    labels = {wnid: i for i, wnid in enumerate(wnids)}
    train = []
    for wnid, label in labels.items():
        images = root / "train" / wnid / "images"
        paths = sorted(images.glob("*"))
        if not paths:
            raise UserError(f"{images}: no images of this class, which wnids.txt names")
        train += [(path, label) for path in paths]
    test = _annotated(annotations, lines, labels)
    missing = set(labels.values()) - {label for _, label in test}
    if missing:
        raise UserError(f"{annotations}: no image of class {wnids[min(missing)]}")
    statistics = common.STATISTICS["tiny-imagenet"]
    return load_images(root, train, test, len(labels), statistics=statistics)


def _annotated(annotations, lines, labels):
    """Return (path, label) of each line, "FILE<tab>WNID<tab>...", of val_annotations.txt."""
    samples = []
    for i, line in enumerate(lines, 1):
        name, wnid = (*line.split("\t"), "", "")[:2]
        path = annotations.parent / "images" / name
        if wnid not in labels:
            raise UserError(f"{annotations}, line {i}: class {wnid!r} is not in wnids.txt")
        if not path.is_file():
            raise UserError(f"{annotations}, line {i}: {path} is missing")
        samples.append((path, labels[wnid]))
    return samples


# --------------------------------------------------------------------------------------------------
# ImageNet-200, decoded while it is trained on
# --------------------------------------------------------------------------------------------------

IMAGENET = (1000, 200, 500)  # folders, classes drawn of them, and training images drawn of each


def imagenet_200(root, image_size=224):
    """Return FedAlign's ImageNet-200, drawn from ImageNet-1k.

    root holds train/WNID/* and val/WNID/*. By numpy's seed 1993, 200 classes and 500 training
    images of each are drawn. Which classes is their choice exactly; which images depended on their
    machine's directory order, so ours, in order of names, are others. Training images are decoded
    while training (stream); the validation ones, all of those classes, are scaled to 256/224 of
    image_size, cut to their centre and kept. UserError for missing folders or damaged images."""
    _, classes, _ = IMAGENET
    train, test = _drawn_files(root)
    paths = [path for path, _ in test]

    def read():
        return {"x_test": decode_images(paths, lambda i: _centre(i, image_size), "RGB")}

    def check(tensors):
        check_images(tensors["x_test"], len(paths), image_size)

    return common.Data(
        torch.empty(0, 3, image_size, image_size, dtype=torch.uint8),
        torch.tensor([label for _, label in train]),
        read_cached(root, paths, image_size, read, check)["x_test"],
        torch.tensor([label for _, label in test]),
        classes,
        *common.STATISTICS["imagenet-200"],
        paths=[str(path) for path, _ in train],
    )


def _drawn_files(root):
    """Return two lists of (path, label): training images, drawn, and validation images, all."""
    folders, classes, count = IMAGENET
    wnids = sorted(path.name for path in root.glob("train/*") if path.is_dir())
    if len(wnids) != folders:  # the draw is among all of them
        raise UserError(
            f"{root / 'train'}: {len(wnids)} folders of classes, where ImageNet-1k has {folders}; "
            f"download it from image-net.org (ILSVRC2012) and unpack it to {root}/train/WNID/* "
            f"and {root}/val/WNID/*"
        )
    rng = np.random.RandomState(1993)
    wnids = rng.choice(wnids, classes, replace=False).tolist()
    labels = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    train, test = [], []
    for wnid in wnids:
        folder = root / "train" / wnid
        names = sorted(os.listdir(folder))
        if len(names) < count:
            raise UserError(f"{folder}: {len(names)} images, and {count} of each class are wanted")
        names = rng.choice(names, count, replace=False).tolist()
        train += [(folder / name, labels[wnid]) for name in names]
        paths = sorted((root / "val" / wnid).glob("*"))
        if not paths:
            raise UserError(f"{root / 'val' / wnid}: no images of this class")
        test += [(path, labels[wnid]) for path in paths]
    return train, test


def stream(paths, size, batches, seeds=None):
    """Yield training images, (batch, 3, size, size) uint8, for each index array of batches.

    They are decoded ahead by processes. paths: of all training images. seeds: arrays like the
    indices, by which each image is cropped, recoloured and flipped; without seeds each is cut to
    its centre. UserError for a damaged image."""
    if seeds is None:
        items = [[(i, None) for i in index.tolist()] for index in batches]
    else:
        items = [list(zip(index.tolist(), seed.tolist())) for index, seed in zip(batches, seeds)]
    loader = torch.utils.data.DataLoader(
        _Files(paths, size),
        batch_sampler=items,
        collate_fn=_stack,
        num_workers=max(1, common.CORES // 4),
    )
    for x in loader:
        if isinstance(x, UserError):
            raise x
        yield x


class _Files(torch.utils.data.Dataset):
    """Image files. Item (i, seed) is file i as (3, size, size) uint8, augmented by seed.

    seed None: its centre. A damaged file's item is the UserError that says so."""

    def __init__(self, paths, size):
        from torchvision import transforms

        self.paths = paths
        self.size = size
        self.augment = transforms.Compose(
            [
                transforms.RandomResizedCrop(size),
                transforms.ColorJitter(0.4, 0.4, 0.4),
                transforms.RandomHorizontalFlip(),
            ]
        )

    def __getitem__(self, item):
        index, seed = item
        warnings.filterwarnings("ignore", module="PIL")
        try:
            image = open_image(self.paths[index], "RGB")
        except UserError as e:
            return e  # raised in a loader's process, it would come with a traceback
        if seed is None:
            image = _centre(image, self.size)
        else:
            torch.manual_seed(seed)  # of the loader's process
            image = self.augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _stack(items):
    """Return images as one tensor, or the first error among them."""
    for item in items:
        if isinstance(item, UserError):
            return item
    return torch.stack(items)


def _centre(image, size):
    """Return the central size x size pixels of an image scaled to 256/224 of size.

    image: of Pillow; its shorter side is scaled to that."""
    from torchvision.transforms import functional

    return functional.center_crop(functional.resize(image, size * 256 // 224), size)


# --------------------------------------------------------------------------------------------------
# LEAF: JSON shards by user
# --------------------------------------------------------------------------------------------------


def femnist(root):
    """Return FEMNIST by writer from the JSON shards that LEAF (Caldas et al., 2018) makes of it.

    They are root/train/*.json and root/test/*.json, read once, with 28x28 images in [0, 1], white
    paper 1, and labels 0-9, 10-35 for A-Z, 36-61 for a-z. UserError for a damaged shard."""
    advice = (
        "LEAF (github.com/TalwalkarLab/leaf) makes data/femnist/data/train and test by, say, "
        "data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample (--sf: share of the 3,500 "
        f"writers); copy both folders into {root}"
    )

    def read():
        names = ("x", "y", "x_test", "y_test", "writers", "writers_test")
        arrays = read_leaf(root, _characters, advice)
        return {name: torch.from_numpy(v) for name, v in zip(names, arrays)}

    if root.is_dir():
        fields = read_cached(root, sorted(root.glob("t*/*.json")), None, read, _check_characters)
    else:
        fields = read()
    for name in ("writers", "writers_test"):
        fields[name] = fields[name].numpy()
    mean, std = common.STATISTICS["femnist"]
    return common.Data(**fields, classes=62, mean=mean, std=std)


def _check_characters(tensors):
    """Raise ValueError unless tensors are what femnist() reads."""
    for part in ("", "_test"):
        x, y, writers = (tensors[name + part] for name in ("x", "y", "writers"))
        check_images(x, len(y), 28)
        of_one_kind = y.dtype == writers.dtype == torch.int64 and y.shape == writers.shape
        if not of_one_kind or x.shape[1] != 1 or not 0 <= y.min() <= y.max() < 62:
            raise ValueError("not FEMNIST")


def _characters(x, y):
    """Return a FEMNIST user's lists as images (n, 1, 28, 28) uint8 and labels (n,) int64."""
    x = np.asarray(x, np.float32).reshape(len(y), -1 if y else 784)
    y = np.asarray(y, None if y else np.int64)
    if x.shape[1] != 784 or not ((x >= 0) & (x <= 1)).all():
        raise ValueError("an image is not 784 numbers from 0 to 1")
    if y.dtype.kind != "i" or not ((y >= 0) & (y < 62)).all():
        raise ValueError("a label is not an integer from 0 to 61")
    return (x * 255).round().astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)


def read_leaf(root, read, advice):
    """Return x, y, x_test, y_test, writers and writers_test of LEAF's shards, six arrays.

    The shards are root/train/*.json and root/test/*.json. read(x, y): makes two arrays of a user's
    lists, or raises ValueError. advice: what to do when they are not there, for the message.
    Users are numbered in order of their names. UserError for a missing or damaged shard."""
    x, y, users = _leaf_part(root / "train", read, advice)
    x_test, y_test, users_test = _leaf_part(root / "test", read, advice)
    number = {user: i for i, user in enumerate(sorted({*users, *users_test}))}
    writers = np.array([number[user] for user in users])
    writers_test = np.array([number[user] for user in users_test])
    return x, y, x_test, y_test, writers, writers_test


def _leaf_part(folder, read, advice):
    """Return x, y and the user of each sample of the shards folder/*.json."""
    xs, ys, users = [], [], []
    for path, user, x, y in _shards(folder, advice):
        try:
            x, y = read(x, y)
        except (ValueError, TypeError, OverflowError) as e:
            raise UserError(f"{path}: user {user!r}: {e}") from None
        xs.append(x)
        ys.append(y)
        users += [user] * len(y)
    if not users:
        raise UserError(f"{folder}: no samples in it; {advice}")
    return np.concatenate(xs), np.concatenate(ys), users


def _shards(folder, advice):
    """Yield (path, user, x, y) of each user in the shards folder/*.json; x, y: lists."""
    paths, seen = sorted(folder.glob("*.json")), {}
    if not paths:
        raise UserError(f"{folder}: no *.json in it; {advice}")
    for path in tqdm(paths, f"reading {folder}", leave=False, disable=None):
        shard = _parse(path)
        try:
            users = list(shard["users"])
            counts = list(shard["num_samples"])
            samples = [(shard["user_data"][u]["x"], shard["user_data"][u]["y"]) for u in users]
            sizes = [(len(x), len(y)) for x, y in samples]
        except (KeyError, TypeError) as e:
            raise UserError(
                f"{path}: not a shard of LEAF, which has users, num_samples and user_data, with "
                f"x and y of each user ({type(e).__name__}: {e})"
            ) from None
        for user, sample, size, count in itertools.zip_longest(users, samples, sizes, counts):
            if user in seen:
                raise UserError(f"{path}: user {user!r} is listed twice, in {seen[user]} first")
            seen[user] = path.name
            if size != (count, count):
                raise UserError(
                    f"{path}: user {user!r} has {size} x and y where num_samples says {count}"
                )
            yield path, user, *sample


def _parse(path):
    """Return what a JSON file holds."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise UserError(
            f"{path}, line {e.lineno}, column {e.colno}: damaged or cut short ({e.msg})"
        ) from None
    except (ValueError, RecursionError) as e:  # thousands of digits or of brackets
        raise UserError(f"{path}: not a shard of LEAF ({e})") from None
