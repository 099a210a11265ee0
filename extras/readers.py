"""Data sets in their own formats on disk: Tiny-ImageNet, ImageNet-200 and LEAF's FEMNIST."""

import json
import os
import pathlib
import warnings

import numpy as np
import torch
from tqdm import tqdm

import common
from common import UserError
from extras.images import decode_images, load_images, read_cached, read_image, read_text


def load(args):
    """Return the data set args.dataset from its folder under args.data_dir, as common.load_data."""
    root = pathlib.Path(args.data_dir)
    if args.dataset == "femnist":
        return femnist(root / "femnist")
    if args.dataset == "tiny-imagenet":
        return tiny_imagenet(root / "tiny-imagenet-200")
    if args.augment not in ("auto", "none"):
        raise UserError("argument --augment: takes auto or none for imagenet-200")
    return imagenet_200(root / "imagenet", args.image_size or 224)


# --- Tiny-ImageNet


def tiny_imagenet(root):
    """Return Tiny-ImageNet as its archive holds it under root, 64x64 RGB images of 200 classes.

    The files are wnids.txt, train/WNID/images/*, val/images/* and val/val_annotations.txt. The test
    set is val, as the archive's test has no labels. UserError for a missing or damaged file."""
    annotations = root / "val" / "val_annotations.txt"
    try:
        wnids = sorted(set(read_text(root / "wnids.txt").split()))
        lines = read_text(annotations).splitlines()
    except FileNotFoundError as e:
        source = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
        raise UserError(f"{e.filename}: no such file; unzip {source} there") from None
    train, test, labels = [], [], {wnid: i for i, wnid in enumerate(wnids)}
    for wnid, label in labels.items():
        paths = sorted((root / "train" / wnid / "images").glob("*"))
        if not paths:
            raise UserError(f"{root / 'train' / wnid}: no images of a class that wnids.txt names")
        train += [(path, label) for path in paths]
    for i, line in enumerate(lines, 1):  # FILE<tab>WNID<tab>...
        name, wnid = (*line.split("\t"), "")[:2]
        if wnid not in labels:
            raise UserError(f"{annotations}, line {i}: class {wnid!r} is not in wnids.txt")
        test.append((root / "val" / "images" / name, labels[wnid]))
    if not test:
        raise UserError(f"{annotations}: names no image")
    statistics = common.STATISTICS["tiny-imagenet"]
    return load_images(root, train, test, len(labels), statistics=statistics)


# --- ImageNet-200, decoded while it is trained on

IMAGENET = (1000, 200, 500)  # folders, classes drawn of them, and training images drawn of each


def imagenet_200(root, image_size=224):
    """Return FedAlign's ImageNet-200, drawn from ImageNet-1k.

    root holds train/WNID/* and val/WNID/*. By numpy's seed 1993, 200 classes and 500 training
    images of each are drawn: their classes exactly, but other images, for which theirs depended on
    a directory's order. Training images are decoded while training (stream); the validation ones
    are scaled to 256/224 of image_size, cut to their centre and kept."""
    train, test = _drawn_files(root)
    paths = [path for path, _ in test]

    def read():
        return {"x_test": decode_images(paths, lambda image: _centre(image, image_size), "RGB")}

    return common.Data(
        torch.empty(0, 3, image_size, image_size, dtype=torch.uint8),
        torch.tensor([label for _, label in train]),
        read_cached(root, paths, image_size, read)["x_test"],
        torch.tensor([label for _, label in test]),
        IMAGENET[1],
        *common.STATISTICS["imagenet-200"],
        paths=[str(path) for path, _ in train],
    )


def _drawn_files(root):
    """Return two lists of (path, label): training images, drawn, and validation images, all."""
    folders, classes, count = IMAGENET
    wnids = sorted(path.name for path in root.glob("train/*") if path.is_dir())
    if len(wnids) != folders:  # the draw is among all of them
        found = f"{len(wnids)} folders of classes, where ImageNet-1k has {folders}"
        advice = f"unpack ILSVRC2012 of image-net.org to {root}/train/WNID/* and {root}/val/WNID/*"
        raise UserError(f"{root / 'train'}: {found}; {advice}")
    rng = np.random.RandomState(1993)
    wnids = rng.choice(wnids, classes, replace=False).tolist()
    labels = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    train, test = [], []
    for wnid in wnids:
        folder = root / "train" / wnid
        names = sorted(os.listdir(folder))
        paths = sorted((root / "val" / wnid).glob("*"))
        if len(names) < count or not paths:
            found = f"{len(names)} images, and {len(paths)} in val/{wnid}"
            raise UserError(f"{folder}: {found}, where {count} and at least one are needed")
        names = rng.choice(names, count, replace=False).tolist()
        train += [(folder / name, labels[wnid]) for name in names]
        test += [(path, labels[wnid]) for path in paths]
    return train, test


def stream(paths, size, batches, seeds=None):
    """Yield training images, (batch, 3, size, size) uint8, for each index array of batches.

    They are decoded ahead by processes. paths: of all training images. seeds: as of Data.images().
    UserError for a damaged image."""
    if seeds is None:
        seeds = [np.full(len(index), None) for index in batches]
    items = [list(zip(index.tolist(), seed.tolist())) for index, seed in zip(batches, seeds)]
    files, processes = _Files(paths, size), max(1, common.CORES // 4)
    loader = torch.utils.data.DataLoader(files, None, sampler=items, num_workers=processes)
    for x in loader:
        if isinstance(x, Exception):
            raise x
        yield x


class _Files(torch.utils.data.Dataset):
    """Image files. Item [(i, seed), ...] is files i as (batch, 3, size, size) uint8.

    Each is augmented by its seed; None: cut to its centre. Where a file cannot be read, the item is
    the error that says so: raised in a loader's process, it would come with a traceback."""

    def __init__(self, paths, size):
        from torchvision import transforms

        self.paths, self.size = paths, size
        crop, colours = transforms.RandomResizedCrop(size), transforms.ColorJitter(0.4, 0.4, 0.4)
        self.augment = transforms.Compose([crop, colours, transforms.RandomHorizontalFlip()])

    def __getitem__(self, items):
        warnings.filterwarnings("ignore", module="PIL")
        try:
            return torch.stack([self.image(*item) for item in items])
        except (UserError, OSError) as e:
            return e

    def image(self, index, seed):
        """Return one image as a tensor."""
        image = read_image(self.paths[index], lambda image: image.convert("RGB"))
        if seed is None:
            image = _centre(image, self.size)
        else:
            torch.manual_seed(seed)  # of the loader's process
            image = self.augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _centre(image, size):
    """Return the central size x size pixels of an image scaled to 256/224 of size.

    image: of Pillow; its shorter side is scaled to that."""
    from torchvision.transforms import functional

    return functional.center_crop(functional.resize(image, size * 256 // 224), size)


# --- LEAF: JSON shards by user


def femnist(root):
    """Return FEMNIST by writer from the JSON shards that LEAF (Caldas et al., 2018) makes of it.

    They are root/train/*.json and root/test/*.json, read once, with 28x28 images in [0, 1], white
    paper 1, and labels 0-9, 10-35 for A-Z, 36-61 for a-z. UserError for a damaged shard."""
    make = "data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample of TalwalkarLab/leaf"
    advice = f"{make} writes data/train and data/test there; copy both into {root}"

    def read():
        names = ("x", "y", "x_test", "y_test", "writers", "writers_test")
        return dict(zip(names, map(torch.from_numpy, read_leaf(root, _characters, advice))))

    fields = read_cached(root, sorted(root.glob("t*/*.json")), None, read)
    fields |= {name: fields[name].numpy() for name in ("writers", "writers_test")}
    mean, std = common.STATISTICS["femnist"]
    return common.Data(**fields, classes=62, mean=mean, std=std)


def _characters(x, y):
    """Return a FEMNIST user's lists as images (n, 1, 28, 28) uint8 and labels (n,) int64."""
    x = np.asarray(x, np.float32).reshape(len(y), 1, 28, 28)
    y = np.asarray(y, None if y else np.int64)
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError("a pixel is not a number from 0 to 1")
    if y.dtype.kind != "i" or not ((y >= 0) & (y < 62)).all():
        raise ValueError("a label is not an integer from 0 to 61")
    return (x * 255).round().astype(np.uint8), y.astype(np.int64)


def read_leaf(root, read, advice):
    """Return x, y, x_test, y_test, writers and writers_test of LEAF's shards, six arrays.

    The shards are root/train/*.json and root/test/*.json. read(x, y): makes two arrays of a user's
    lists, or raises ValueError. advice: what to do when they are not there, for the message.
    Users are numbered in order of their names. UserError for a missing or damaged shard."""
    x, y, users = _leaf_part(root / "train", read, advice)
    x_test, y_test, users_test = _leaf_part(root / "test", read, advice)
    writers = np.unique(users + users_test, return_inverse=True)[1]
    return x, y, x_test, y_test, *np.split(writers, [len(users)])


def _leaf_part(folder, read, advice):
    """Return x, y and the user of each sample of the shards folder/*.json."""
    arrays, sizes = [], {}  # of each user
    for path in tqdm(sorted(folder.glob("*.json")), f"reading {folder}", leave=False, disable=None):
        text, user = read_text(path), None
        try:
            shard = json.loads(text)
            for user, count in zip(shard["users"], shard["num_samples"], strict=True):
                x, y = (shard["user_data"][user][key] for key in "xy")
                if user in sizes or not len(x) == len(y) == count:
                    found = f"{len(x)} x and {len(y)} y where num_samples says {count}"
                    raise ValueError(f"listed twice, or {found}")
                sizes[user] = len(y)
                arrays.append(read(x, y))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as e:
            why = f"not a shard of LEAF ({type(e).__name__}: {e})"
            raise UserError(f"{path}, user {user!r}: {why}") from None
    if not any(sizes.values()):
        raise UserError(f"{folder}: no samples in *.json; {advice}")
    xs, ys = zip(*arrays)
    return np.concatenate(xs), np.concatenate(ys), [u for u, n in sizes.items() for _ in range(n)]
