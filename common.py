"""What every method script shares: flags, data, partitions, networks, the local-training engine and the round loop.

A method script hands run() one generator function, and the engine calls it for each client of each round:

    def local_update(worker, client, server, args):
        ...                     # worker.net holds the global weights w, worker.opt a fresh optimizer
        def step(x, y): ...     # one optimizer step on one batch; returns the loss
        yield step              # the engine runs step on every batch of this client
        ...                     # worker.net holds the local weights w_k
        return message          # dict of tensors uploaded beside the weights; may be left out

client.download(tensors) counts what a client receives beside the model.

The one rule: whatever step reads besides x and y lives in tensors obtained from the worker (its net, worker.frozen(),
worker.pin()), whose storage is refreshed in place for each client, and step takes no decision that differs between
clients or rounds. On a GPU the step of a worker's first client is captured as a CUDA graph and replayed for all others.
"""
import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import platform
import queue
import subprocess
import sys
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm


CORES = torch.get_num_threads()  # before a run divides them among its workers


class UserError(ValueError):
    """A mistake in flags, files or data: shown as one line, exit code 2."""


def keyed(stream, *key):
    """A numpy Generator that depends on its name and its non-negative integer keys alone, never on what was drawn before."""
    return np.random.default_rng([*stream.encode(), *key])


# ----------------------------------------------------------------------------------------------------------------------
# Flags
# ----------------------------------------------------------------------------------------------------------------------

ALIASES = {  # spellings of the papers' repositories; underscores and hyphens are interchangeable in every flag
    "client-number": "clients", "n-parties": "clients", "num-of-clients": "clients",
    "client-sample": "sample", "sample-fraction": "sample", "participation-rate": "sample",
    "comm-round": "rounds", "partition-alpha": "alpha", "beta": "alpha", "dirichlet-alpha": "alpha",
    "wd": "weight-decay", "local-epochs": "epochs",
}
# Flags that may change when a run is resumed; all others decide the result.
FREE_ON_RESUME = {"rounds", "out", "resume", "quiet", "data_dir", "checkpoint_every", "save_clients"}


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, the aliases above, and a --resume that takes the run's own flags as defaults."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args(self, argv=None):
        argv = [_canonical(word) for word in (sys.argv[1:] if argv is None else argv)]
        args = super().parse_args(argv)
        if args.resume:
            try:
                args = self._resumed(argv, args.out)
            except UserError as e:
                self.error(str(e))
        if args.partition == "file" and not args.split_file:
            self.error("argument --split-file: needed by --partition file")
        if args.split_file and args.partition != "file":
            self.error("argument --split-file: only read by --partition file")
        if args.server_lr is None:
            args.server_lr = 0.01 if args.server == "adam" else 1.0
        if args.server_momentum is None:
            args.server_momentum = 0.9 if args.server == "adam" else 0.4
        return args

    def _resumed(self, argv, out):
        if not out:
            raise UserError("argument --resume: name the run to continue with --out")
        flags = read_config(pathlib.Path(out))["flags"]
        args = super().parse_args([*self._words(flags), *argv])
        for k, v in vars(args).items():
            if k not in FREE_ON_RESUME and k in flags and v != flags[k]:
                raise UserError(f"argument --{k.replace('_', '-')}: {v} differs from the {flags[k]} of the run in {out}; "
                                "leave it out, or start a new run with another --out")
        if args.rounds < flags["rounds"]:
            raise UserError(f"argument --rounds: {args.rounds} is less than the run's {flags['rounds']}")
        return args

    def _words(self, flags):
        """flags, a dict, as the words of a command line, so that they are checked like any other."""
        for action in self._actions:
            value, option = flags.get(action.dest), action.option_strings[-1 if flags.get(action.dest) is False else 0]
            if value is None or action.dest in ("out", "resume") or value is False and not option.startswith("--no-"):
                continue
            value = ",".join(map(str, value)) if isinstance(value, list) else value
            yield option if isinstance(value, bool) else f"{option}={value}"


def _canonical(word):
    if not word.startswith("--"):
        return word
    name, eq, value = word[2:].partition("=")
    name = name.replace("_", "-")
    return "--" + ALIASES.get(name, name) + eq + value


def number(kind, low, high=None, open_low=False):
    """An argparse type: an int or a finite float in [low, high], or (low, high] with open_low."""
    top = high or (2**31 - 1 if kind is int else sys.float_info.max)

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low < value <= top if open_low else low <= value <= top):
            kind_, lower = "an integer" if kind is int else "a number", "above" if open_low else "of at least"
            upper = f" and at most {top}" if high or value > top else ""
            raise argparse.ArgumentTypeError(f"must be {kind_} {lower} {low}{upper}, not {text[:40]!r}")
        return value
    return parse


def integers(low, high=None):
    """An argparse type: integers in [low, high], separated by commas."""
    return lambda text: [number(int, low, high)(word) for word in text.split(",")]


def _augment(text):
    names = [] if text in ("none", "auto") else text.split(",")
    for name in names:
        degrees = name.removeprefix("rotate")
        if name not in ("crop", "flip") and not (name.startswith("rotate") and degrees.isdigit() and 0 < int(degrees) <= 180):
            raise argparse.ArgumentTypeError("takes auto, none, or a list of crop, flip and rotateDEGREES, such as "
                                             f"rotate10,crop,flip, not {text!r}")
    return text


def _workers(text):
    return text if text == "auto" else number(int, 1)(text)


def _device(text):
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    index = text[5:] if text.startswith("cuda:") else "0"
    if text not in ("cpu", "cuda", f"cuda:{index}") or not index.isdigit():
        raise argparse.ArgumentTypeError(f"takes auto, cpu, cuda or cuda:N, not {text!r}")
    if text == "cpu":
        return text
    if int(index) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text} asked for, but torch finds {torch.cuda.device_count() or 'no'} GPU")
    return f"cuda:{index}"


def flags(doc):
    """The parser of the shared flags; doc, the script's docstring, opens its --help. Defaults: FedAlign's main setting."""
    spellings = ", ".join(f"--{a} is --{b}" for a, b in ALIASES.items())
    parser = Parser(description=doc, formatter_class=_Help, allow_abbrev=False,
                    epilog=f"Other spellings: {spellings}; _ and - are interchangeable in flags.")
    add = parser.add_argument_group("data and partition").add_argument
    add("--dataset", default="cifar100", choices=["cifar100", "cifar10", "mnist", "folder", "glyphs"],
        help="folder: your images, train/CLASS/* and test/CLASS/* in --data-dir; glyphs: drawn on the fly, no download")
    add("--data-dir", default="data", help="where data sets are downloaded to, or the image folder itself")
    add("--image-size", type=number(int, 8), metavar="PIXELS",
        help="resize images to PIXELS x PIXELS; without it they stay as they are")
    add("--augment", type=_augment, default="auto", metavar="LIST",
        help="training augmentation: none, or a list of crop (zero-pad by 1/8, random crop), flip and rotateDEGREES; "
             "auto: crop,flip, but nothing for characters (mnist, glyphs)")
    add("--partition", default="dirichlet", choices=["dirichlet", "dirichlet-balanced", "iid", "similarity", "natural", "file"],
        help="how training samples go to clients; natural: a writer a client; file: read --split-file")
    add("--alpha", type=number(float, 0, open_low=True), default=0.5, help="Dirichlet concentration; smaller is more non-IID")
    add("--similarity", type=number(float, 0, 100), default=0.0, metavar="PERCENT",
        help="share of IID samples in --partition similarity; 0: each client holds consecutive labels")
    add("--split-file", metavar="FILE",
        help="client indices for --partition file: {client: [index, ...]} as JSON or a Python literal")
    add("--data-seed", type=number(int, 0), default=0, help="seed of the partition (and of the drawing of glyphs)")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="resnet56", choices=list(NETS), help="network")
    add("--projection", type=number(int, 0), default=0, metavar="WIDTH",
        help="put a two-layer projection head before the classifier; 0: none")

    add = parser.add_argument_group("federation").add_argument
    add("--clients", type=number(int, 1), default=16, help="number of clients")
    add("--sample", type=number(float, 0, 1, open_low=True), default=1.0, help="fraction of clients sampled each round")
    add("--rounds", type=number(int, 1), default=25, help="communication rounds")
    add("--weighting", default="samples", choices=["samples", "uniform"], help="weights of the average of the clients' models")
    add("--server", default="avg", choices=["avg", "avgm", "adam"], help="server optimizer: none, FedAvgM, FedADAM")
    add("--server-lr", type=number(float, 0, open_low=True), help="server learning rate; without it 1, for adam 0.01")
    add("--server-momentum", type=number(float, 0, 1), help="momentum of avgm, beta1 of adam; without it 0.4 and 0.9")
    add("--server-beta2", type=number(float, 0, 1), default=0.99, help="beta2 of adam")
    add("--server-tau", type=number(float, 0, open_low=True), default=1e-3, help="tau of adam, added to the root of v")

    add = parser.add_argument_group("local training").add_argument
    add("--epochs", type=number(int, 1), default=20, help="local epochs a round")
    add("--local-steps", type=number(int, 1), metavar="STEPS", help="local optimizer steps a round, instead of --epochs")
    add("--batch-size", type=number(int, 1), default=64, help="images a step")
    add("--drop-last", action="store_true",
        help="leave the last short batch out of each epoch, and out of the client's weight (FedAlign's code)")
    add("--lr", type=number(float, 0, open_low=True), default=0.01, help="learning rate")
    add("--lr-decay", type=number(float, 0, open_low=True), default=1.0, help="factor on the learning rate after each round")
    add("--momentum", type=number(float, 0, 0.9999), default=0.9, help="SGD momentum")
    add("--nesterov", action=argparse.BooleanOptionalAction, default=True, help="Nesterov momentum")
    add("--weight-decay", type=number(float, 0), default=1e-4, help="weight of the L2 penalty, in the optimizer")
    add("--clip", type=number(float, 0), default=0.0, metavar="NORM", help="clip the gradient norm; 0 is off")
    add("--persist-opt", action=argparse.BooleanOptionalAction, default=False,
        help="keep each client's momentum between rounds")

    add = parser.add_argument_group("machine").add_argument
    add("--seed", type=number(int, 0), default=0, help="seed of initial weights, client sampling, batches and augmentation")
    add("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    add("--workers", type=_workers, default="auto", help="clients trained at once: threads on the CPU, streams on a GPU")
    add("--precision", default="fp32", choices=["fp32", "tf32", "bf16"],
        help="of the networks; tf32: in convolutions on a GPU; bf16: autocast; losses are in fp32 anyway")
    add("--graph", action=argparse.BooleanOptionalAction, default=True,
        help="replay the training step as a CUDA graph; no effect on the CPU")
    add("--deterministic", action="store_true", help="bitwise repeatable on a GPU, at some cost in speed; the CPU is anyway")

    add = parser.add_argument_group("run folder").add_argument
    add("--out", metavar="RUN", help="the run's folder; by default a new one under runs/")
    add("--resume", action="store_true", help="continue the run in --out; its own flags are the defaults, --rounds may grow")
    add("--eval-every", type=number(int, 1), default=1, metavar="ROUNDS", help="evaluate every so many rounds, and in the last")
    add("--checkpoint-every", type=number(int, 1), default=1, metavar="ROUNDS", help="so many rounds are lost at most")
    add("--save-clients", action="store_true", help="keep the client models of the last round")
    add("--quiet", action="store_true", help="print nothing but errors")
    return parser


# ----------------------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------------------

STATISTICS = {  # mean and standard deviation per channel, pixels in [0, 1]
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "mnist": ((0.1307,), (0.3081,)),
}


@dataclasses.dataclass
class Data:
    """A data set in memory: images (n, channels, height, width) uint8, labels (n,) int64."""
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: torch.Tensor = None  # (channels, 1, 1), pixels in [0, 1]; computed from x when not given
    std: torch.Tensor = None
    writers: np.ndarray = None  # (n,) who made each training image, for --partition natural

    def __post_init__(self):
        if self.mean is None:
            pixels = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in self.x.unbind(1)]).double()  # histograms
            pixels, values = pixels / pixels.sum(1, keepdim=True), torch.arange(256.0, dtype=torch.float64) / 255
            self.mean = pixels @ values
            self.std = (pixels @ values.square() - self.mean.square()).clamp(min=1e-6).sqrt()
        self.mean, self.std = (torch.as_tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (self.mean, self.std))

    def to(self, device):
        return dataclasses.replace(self, **{k: v.to(device) for k, v in vars(self).items() if torch.is_tensor(v)})

    def normalise(self, x):
        """(batch, channels, height, width) uint8 -> float32 of zero mean and unit variance."""
        return (x.float() / 255 - self.mean) / self.std


def load_data(args):
    """The data set that args.dataset names, on the CPU. UserError when it cannot be had."""
    root = pathlib.Path(args.data_dir)
    if args.dataset == "glyphs":
        return _resize(glyphs(seed=args.data_seed), args.image_size)
    if args.dataset == "folder":
        return folder(root, args.image_size)
    from torchvision import datasets
    kind = {"cifar100": datasets.CIFAR100, "cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[args.dataset]
    try:
        train, test = (kind(root, train=part, download=True) for part in (True, False))
    except Exception as e:  # no network, a damaged archive, files that are not what their names say
        raise UserError(f"--dataset {args.dataset} could not be loaded from or downloaded into {root} ({e}); "
                        "put torchvision's files there, or use --dataset folder or glyphs") from None
    images = [torch.as_tensor(part.data) for part in (train, test)]
    images = [x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous() for x in images]
    labels = [torch.as_tensor(part.targets) for part in (train, test)]
    data = Data(images[0], labels[0], images[1], labels[1], len(train.classes), *STATISTICS[args.dataset])
    return _resize(data, args.image_size)


def _resize(data, size):
    if not size or data.x.shape[-2:] == (size, size):
        return data

    def resize(x):
        return F.interpolate(x.float(), (size, size), mode="bilinear", antialias=True).round().clamp(0, 255).byte()
    x, x_test = (torch.cat([resize(part) for part in images.split(2000)]) for images in (data.x, data.x_test))
    return dataclasses.replace(data, x=x, x_test=x_test)


def folder(root, image_size=None):
    """Images in torchvision's ImageFolder layout, train/CLASS/* and test/CLASS/* (or val/), under root. Decoded once: the
    result is kept in root/.cache-*.pt, whose name changes with any file's name, size or time of change."""
    from torchvision.datasets import ImageFolder
    parts = []
    for names in (("train",), ("test", "val")):
        found = next((root / name for name in names if (root / name).is_dir()), None)
        if found is None:
            raise UserError(f"--data-dir {root}: no folder {' or '.join(names)} in it; "
                            "--dataset folder reads train/CLASS/* and test/CLASS/*")
        try:
            parts.append(ImageFolder(found))
        except OSError as e:
            raise UserError(f"--data-dir {root}: {e}") from None
    train, test = parts
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(f"--data-dir {root}: train and test hold different classes; class {odd[0]!r} is in one of them only")
    listing = [(path, os.stat(path)) for part in parts for path, _ in part.samples]
    key = repr([(os.path.relpath(path, root), stat.st_size, stat.st_mtime_ns) for path, stat in listing] + [image_size])
    cache = root / f".cache-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.pt"
    if cache.exists():
        with contextlib.suppress(Exception):  # a damaged cache is made again
            return Data(**torch.load(cache, weights_only=True))
    x, x_test = _decode(listing, image_size).split([len(train), len(test)])
    y, y_test = (torch.tensor(part.targets) for part in parts)
    fields = {"x": x.clone(), "y": y, "x_test": x_test.clone(), "y_test": y_test, "classes": len(train.classes)}
    try:
        for old in root.glob(".cache-*.pt"):
            old.unlink()
        save(fields, cache)
    except OSError as e:
        print(f"the decoded images are not cached, so the next start decodes them again: {e}", file=sys.stderr)
    return Data(**fields)


def _decode(listing, image_size):
    from PIL import Image

    def open_(path, mode=None):
        """The image in that mode; without one, the mode it asks for: L or RGB."""
        try:
            with Image.open(path) as image:
                if image.mode[0] in "IF":
                    raise UserError(f"{path}: pixels of more than 8 bits, which would be cut off")
                if mode is None:
                    return "L" if image.mode in ("1", "L") else "RGB"
                image = image.convert(mode)
                return image.resize((image_size, image_size), Image.Resampling.BILINEAR) if image_size else image
        except UserError:
            raise
        except Exception as e:  # Pillow raises many kinds for a damaged file
            raise UserError(f"{path}: not a readable image ({e})") from None

    paths = [path for path, _ in listing]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mode = "RGB" if "RGB" in pool.map(open_, paths) else "L"
    first = open_(paths[0], mode)
    shape = (len(mode), first.height, first.width)

    def pixels(path):
        image = open_(path, mode)
        if (image.height, image.width) != shape[1:]:
            raise UserError(f"{path}: {image.width}x{image.height} pixels where {paths[0]} has {shape[2]}x{shape[1]}; "
                            "--image-size makes them all one size")
        return np.asarray(image).reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)

    x = np.empty((len(listing), *shape), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(pixels, paths)
        for i, image in enumerate(tqdm(decoded, "decoding images", len(listing), leave=False, disable=None)):
            x[i] = image
    return torch.from_numpy(x)


CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
GLYPHS = (20_000, 4_000)  # training and test images


@functools.lru_cache(1)
def _glyphs(sizes, seed):
    from PIL import Image, ImageDraw, ImageFont
    font, side = ImageFont.load_default(size=44), 64
    stencils = np.zeros((62, 1, side, side), np.float32)
    for i, character in enumerate(CHARACTERS):
        image = Image.new("L", (side, side))
        ImageDraw.Draw(image).text((side / 2, side / 2), character, 255, font, anchor="mm")
        stencils[i, 0] = np.asarray(image) / 255
    stencils = torch.from_numpy(stencils)
    bold = F.max_pool2d(stencils, 3, 1, 1)
    n, writers = sum(sizes), max(2, sum(sizes) // 120)
    rng = keyed("glyphs", seed)
    y, writer = rng.integers(62, size=n), rng.integers(writers, size=n)

    def style(spread_writers, spread_images):  # a writer's habit, and how closely each image follows it
        return (rng.normal(0, spread_writers, writers)[writer] + rng.normal(0, spread_images, n)).astype(np.float32)

    slant, turn, weight = style(0.25, 0.08), style(0.12, 0.08), style(0.4, 0.1) + 0.5
    grow, stretch, right, down = 1.1 + style(0.12, 0.06), 1 + style(0.10, 0.05), style(0.03, 0.06), style(0.03, 0.06)
    ink, paper = (rng.uniform(0, 0.35, (writers, 3)), rng.uniform(0.6, 1, (writers, 3)))
    ink, paper = (torch.from_numpy((c[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32)) for c in (ink, paper))
    # the affine map from where a pixel is to where the stencil has it: rotation x shear x scale, and a shift
    a, b = np.cos(turn) / grow, np.sin(turn) / grow
    theta = np.stack([a, b + slant * a, right, -b * stretch, (a - slant * b) * stretch, down], 1)
    theta = torch.from_numpy(theta).view(n, 2, 3)
    y, weight = torch.from_numpy(y), torch.from_numpy(weight).clamp(0, 1).view(n, 1, 1, 1)
    images = []
    for i in torch.arange(n).split(2000):
        stroke = torch.lerp(stencils[y[i]], bold[y[i]], weight[i])
        mask = F.grid_sample(stroke, F.affine_grid(theta[i], (len(i), 1, 32, 32), align_corners=False), align_corners=False)
        image = torch.lerp(paper[i][:, :, None, None], ink[i][:, :, None, None], mask)
        image += torch.from_numpy(rng.standard_normal(image.shape, np.float32)) * 0.08
        images.append((image.clamp(0, 1) * 255).round().byte())
    x, x_test = torch.cat(images).split(sizes)
    y, y_test = y.split(sizes)
    return Data(x.clone(), y, x_test.clone(), y_test, 62, writers=writer[:sizes[0]])


def glyphs(train=None, test=None, seed=0):
    """The 62 characters 0-9 A-Z a-z as 32x32 RGB images, drawn with Pillow's own font: each by a writer with a slant, size,
    stroke and colours of his own (about 100 training images a writer). Deterministic by seed."""
    return _glyphs((train or GLYPHS[0], test or GLYPHS[1]), seed)


def resolve_augment(args):
    """The augmentations in force: a dict of crop, flip -> True and rotate -> degrees."""
    auto = "" if args.dataset in ("mnist", "glyphs") else "crop,flip"  # a mirrored character is another one
    names = {"auto": auto, "none": ""}.get(args.augment, args.augment).split(",")
    return {name.rstrip("0123456789"): int(name[6:]) if name.startswith("rotate") else True for name in names if name}


def draw_augment(augment, rng, shape, size):
    """The random numbers of an augmentation, one entry an image: {name: array of the given shape}; size in pixels."""
    pad, draws = size // 8, {}
    if "rotate" in augment:
        draws["rotate"] = rng.uniform(-augment["rotate"], augment["rotate"], shape).astype(np.float32)
    if "crop" in augment:
        draws["crop"] = rng.integers(2 * pad + 1, size=(*shape, 2))
    if "flip" in augment:
        draws["flip"] = rng.random(shape) < 0.5
    return draws


def apply_augment(x, draws):
    """x (batch, channels, size, size) uint8, rotated, cropped and flipped in that order, each image by its own draws.
    As torchvision's RandomRotation, RandomCrop(padding=size // 8) and RandomHorizontalFlip on each image."""
    b, c, size, _ = x.shape
    if "rotate" in draws:
        turn = draws["rotate"] * (math.pi / 180)
        cos, sin, zero = turn.cos(), turn.sin(), torch.zeros_like(turn)
        theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(b, 2, 3)
        x = F.grid_sample(x.float(), F.affine_grid(theta, x.shape, align_corners=False), "nearest", align_corners=False).byte()
    if "crop" in draws:
        pad, steps = size // 8, torch.arange(size, device=x.device)
        rows = draws["crop"][:, 0, None] + steps  # (batch, size)
        columns = draws["crop"][:, 1, None] + steps
        at = (rows[:, :, None] * (size + 2 * pad) + columns[:, None, :]).view(b, 1, -1)
        x = F.pad(x, (pad,) * 4).flatten(2).gather(2, at.expand(b, c, -1)).view(b, c, size, size)
    if "flip" in draws:
        x = torch.where(draws["flip"].view(b, 1, 1, 1), x.flip(3), x)
    return x


# ----------------------------------------------------------------------------------------------------------------------
# Partition: functions of the labels; each returns one int64 index array a client
# ----------------------------------------------------------------------------------------------------------------------

def _group(owner, clients, rng):
    """Sample indices by owner, each client's in random order."""
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def dirichlet_partition(labels, clients, alpha, seed, min_size=10):
    """Label skew with unequal sizes: each class is cut among the clients in proportions p ~ Dir(alpha), where clients that
    already hold n / clients samples get nothing more; drawn anew until every client has min_size samples
    (FedAlign sec. 3.2, MOON, FedMLB; the balancing rule is in their code). UserError when 1000 draws do not get there."""
    labels = np.asarray(labels)
    n, rng = len(labels), keyed("dirichlet", seed)
    counts = np.bincount(labels)
    advice = f"use fewer --clients, a larger --alpha{'' if min_size <= 1 else f' or a smaller minimum than {min_size}'}"
    if clients * min_size > n:
        raise UserError(f"{n} samples cannot give {clients} clients {min_size} each; {advice}")
    for _ in range(1000):
        sizes = np.zeros(clients, np.int64)
        cuts = []
        for count in counts:
            p = rng.dirichlet(np.full(clients, alpha)) * (sizes < n / clients)
            if not p.sum() > 0:  # all of the mass fell on full clients: share among the others
                p = (sizes < n / clients).astype(float)
            ends = np.floor(np.cumsum(p / p.sum()) * count).astype(np.int64)
            ends[-1] = count
            cuts.append(np.diff(ends, prepend=0))
            sizes += cuts[-1]
        if sizes.min() >= min_size:
            break
    else:
        raise UserError(f"none of 1000 draws from Dirichlet({alpha}) gave {clients} clients {min_size} samples each; {advice}")
    owner = np.empty(n, np.int64)
    for label, cut in enumerate(cuts):
        owner[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(clients), cut)
    return _group(owner, clients, rng)


def balanced_dirichlet_partition(labels, clients, alpha, seed):
    """Label skew with equal sizes (FedMLB's): each client in turn draws p ~ Dir(alpha) over classes, then n / clients of the
    samples that are left, without replacement, sample i with weight p[label_i]. The first n mod clients get one more.

    Drawing m of weighted items without replacement is keeping the m smallest of independent Exp(weight) keys, and the
    order statistics of the r equal-weight keys of one class are running sums of Exp(1) / (weight (r - j)), j = 0, 1, ..."""
    labels = np.asarray(labels)
    n, rng = len(labels), keyed("dirichlet-balanced", seed)
    if clients > n:
        raise UserError(f"{n} samples cannot go to {clients} clients; use fewer --clients")
    stock = [rng.permutation(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    left = np.array([len(s) for s in stock])
    parts = []
    for client in range(clients):
        m = n // clients + (client < n % clients)
        p = np.maximum(rng.dirichlet(np.full(len(stock), alpha)), 1e-30)
        rate = p[:, None] * (left[:, None] - np.arange(min(m, left.max())))  # (classes, m); not positive: no such item
        gaps = rng.standard_exponential(rate.shape) / np.maximum(rate, 1e-300)
        keys = np.where(rate > 0, np.cumsum(gaps, 1), np.inf).ravel()
        taken = np.bincount(np.argpartition(keys, m - 1)[:m] // rate.shape[1], minlength=len(stock))
        parts.append(rng.permutation(np.concatenate([s[r - t:r] for s, r, t in zip(stock, left, taken)])))
        left = left - taken
    return parts


def iid_partition(labels, clients, seed):
    """Random parts of equal size, give or take one."""
    return np.array_split(keyed("iid", seed).permutation(len(labels)), clients)


def similarity_partition(labels, clients, similarity, seed):
    """rFedAvg's split (ICDE 2023, sec. VI-A): similarity percent of the samples dealt at random, the rest sorted by label and
    cut into consecutive chunks, one a client; remainders are spread, not dropped."""
    labels, rng = np.asarray(labels), keyed("similarity", seed)
    order = rng.permutation(len(labels))
    shared, rest = np.split(order, [round(similarity / 100 * len(labels))])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    # array_split's larger chunks come first; those of the sorted part go to the last clients, so that sizes stay even
    chunks = zip(np.array_split(shared, clients), np.array_split(rest[::-1], clients)[::-1])
    return [rng.permutation(np.concatenate(pair)) for pair in chunks]


def natural_partition(writers, clients, seed):
    """One client a writer, for clients writers chosen at random; the other writers' samples are left out."""
    names, owner = np.unique(writers, return_inverse=True)
    if clients > len(names):
        raise UserError(f"--clients {clients}: the data set has {len(names)} writers")
    chosen = keyed("natural", seed).choice(len(names), clients, replace=False)
    parts = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    return [parts[i] for i in chosen]


def file_partition(path, samples, clients):
    """A split read from a file: {client: [index, ...], ...} or [[index, ...], ...] as JSON or as a Python literal (FedMLB's
    client_data). Every sample must belong to exactly one client."""
    def wrong(message):
        return UserError(f"--split-file {path}: {message}")
    try:
        text = pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise wrong(f"cannot be read ({e})") from None
    try:
        split = json.loads(text)
    except (ValueError, RecursionError):
        try:
            split = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise wrong("neither JSON nor a Python literal") from None
    if isinstance(split, dict):
        if not all(str(k).isdecimal() for k in split):
            raise wrong("must name its clients by numbers")
        split = [split[k] for k in sorted(split, key=int)]
    parts = list(split) if isinstance(split, (list, tuple)) else None
    if parts is None or not all(isinstance(part, (list, tuple, set)) for part in parts):
        raise wrong("must map each client to a list of indices")
    if len(parts) != clients:
        raise wrong(f"has {len(parts)} clients, not {clients}; pass --clients {len(parts)}")
    owner = np.full(samples, -1)
    for k, part in enumerate(parts):
        part = parts[k] = list(part)
        if not all(type(i) is int and 0 <= i < samples for i in part):
            raise wrong(f"client {k} has an index that is not an integer from 0 to {samples - 1}")
        if len(set(part)) < len(part) or (owner[part] >= 0).any():
            raise wrong(f"client {k} has an index that was given before")
        owner[part] = k
    if (owner < 0).any():
        raise wrong(f"leaves out {(owner < 0).sum()} of {samples} samples, the first of them {owner.argmin()}")
    return [np.array(part, np.int64) for part in parts]


def partition(data, args):
    """The clients' training indices as args say: a list of int64 arrays."""
    labels, seed = data.y.numpy(), args.data_seed
    if args.partition == "dirichlet":
        parts = dirichlet_partition(labels, args.clients, args.alpha, seed)
    elif args.partition == "dirichlet-balanced":
        parts = balanced_dirichlet_partition(labels, args.clients, args.alpha, seed)
    elif args.partition == "iid":
        parts = iid_partition(labels, args.clients, seed)
    elif args.partition == "similarity":
        parts = similarity_partition(labels, args.clients, args.similarity, seed)
    elif args.partition == "file":
        parts = file_partition(args.split_file, len(labels), args.clients)
    elif data.writers is None:
        raise UserError(f"--partition natural: --dataset {args.dataset} does not say who wrote each image; glyphs does")
    else:
        parts = natural_partition(data.writers, args.clients, seed)
    for k, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(f"--partition {args.partition}: client {k} of {args.clients} gets no sample; use fewer --clients")
    return parts


# ----------------------------------------------------------------------------------------------------------------------
# Networks: each an nn.Sequential of its blocks; net[:-1](x) are the features, net[-1](z) the logits
# ----------------------------------------------------------------------------------------------------------------------

class Classifier(nn.Linear):
    """The last layer: keeps all its outputs in every sub-network."""


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch, shortcut):
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x):
        return F.relu(self.branch(x) + self.shortcut(x))


def _conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _bottleneck(inputs, planes, stride, norm):
    branch = nn.Sequential(_conv(inputs, planes, 1), norm(planes), nn.ReLU(),
                           _conv(planes, planes, 3, stride), norm(planes), nn.ReLU(),
                           _conv(planes, 4 * planes, 1), norm(4 * planes))
    return branch, 4 * planes


def _basic(inputs, planes, stride, norm):
    branch = nn.Sequential(_conv(inputs, planes, 3, stride), norm(planes), nn.ReLU(), _conv(planes, planes, 3), norm(planes))
    return branch, planes


def _resnet(stem, block, depths, planes, norm=nn.BatchNorm2d):
    """The blocks of a residual network and the width of its features: stem, stages, global average pooling."""
    blocks, width = [("stem", stem)], stem[0].out_channels
    for i, depth in enumerate(depths):
        stage = []
        for j in range(depth):
            stride = 2 if i and not j else 1
            branch, outputs = block(width, planes * 2**i, stride, norm)
            shortcut = nn.Identity()
            if stride != 1 or width != outputs:
                shortcut = nn.Sequential(_conv(width, outputs, 1, stride), norm(outputs))
            stage.append(Residual(branch, shortcut))
            width = outputs
        blocks.append((f"stage{i + 1}", nn.Sequential(*stage)))
    return [*blocks, ("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))], width


def _he(blocks, width):
    for module in nn.Sequential(OrderedDict(blocks)).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return blocks, width


def _stem(channels, width, norm=nn.BatchNorm2d):
    return nn.Sequential(_conv(channels, width, 3), norm(width), nn.ReLU())


def resnet56(channels, size):
    """FedML's bottleneck ResNet56, FedAlign's network for CIFAR; not the ResNet-56 of He et al."""
    return _he(*_resnet(_stem(channels, 16), _bottleneck, (6, 6, 6), 16))


def resnet18(channels, size):
    """ResNet-18 with the ImageNet stem (FedAlign, ImageNet-200)."""
    stem = nn.Sequential(_conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return _he(*_resnet(stem, _basic, (2, 2, 2, 2), 64))


def resnet18_gn(channels, size):
    """ResNet-18 with a 3x3 stem and GroupNorm of two groups (FedMLB)."""
    norm = functools.partial(nn.GroupNorm, 2)
    return _resnet(_stem(channels, 64, norm), _basic, (2, 2, 2, 2), 64, norm)


def resnet50(channels, size):
    """ResNet-50 with a 3x3 stem (MOON, FedCKA)."""
    return _he(*_resnet(_stem(channels, 64), _bottleneck, (3, 4, 6, 3), 64))


def _plain(channels, size, widths, kernel, padding, hidden):
    """Convolutions, each after the pooling of the one before, so that a block's output is post-ReLU and pre-pooling; then
    fully connected layers, the last of them without ReLU when there are several."""
    blocks = []
    for i, width in enumerate(widths):
        pool = [nn.MaxPool2d(2)] if i else []
        blocks.append((f"conv{i + 1}", nn.Sequential(*pool, nn.Conv2d(channels, width, kernel, padding=padding), nn.ReLU())))
        channels, size = width, (size if i == 0 else size // 2) + 2 * padding - kernel + 1
        if size < 2:
            raise UserError("--image-size: too small for this --model")
    features, flat = channels * (size // 2) ** 2, [nn.MaxPool2d(2), nn.Flatten()]
    for i, width in enumerate(hidden):
        relu = [nn.ReLU()] if i == 0 or i < len(hidden) - 1 else []
        blocks.append((f"fc{i + 1}", nn.Sequential(*(flat if i == 0 else []), nn.Linear(features, width), *relu)))
        features = width
    return blocks, features


def cnn(channels, size):
    """FedCKA's seven-layer CNN; its last hidden layers are a projection head."""
    return _plain(channels, size, (16, 32), 5, 0, (120, 84, 84, 256))


def cnn_moon(channels, size):
    """MOON's simple CNN; its last hidden layers are a projection head."""
    return _plain(channels, size, (6, 16), 5, 0, (120, 84, 84, 256))


def cnn_mcmahan(channels, size):
    """The CNN of McMahan et al. (AISTATS 2017), rFedAvg's for images."""
    return _plain(channels, size, (32, 64), 5, 2, (512,))


NETS = {"resnet56": resnet56, "resnet18": resnet18, "resnet18-gn": resnet18_gn, "resnet50": resnet50,
        "cnn": cnn, "cnn-moon": cnn_moon, "cnn-mcmahan": cnn_mcmahan}


def build_net(name, classes, channels=3, size=32, projection=0):
    """The network called name as an nn.Sequential of its blocks, the last of them the classifier. projection: width of the
    output of a two-layer head before the classifier (MOON), 0 for none."""
    blocks, features = NETS[name](channels, size)
    if projection:
        blocks.append(("projection", nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection))))
        features = projection
    return nn.Sequential(OrderedDict([*blocks, ("classifier", Classifier(features, classes))]))


def has_batch_norm(net):
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


def make_divisible(channels, width):
    """Channels of a layer at a fraction of its width: a multiple of 8, not under 90% of the exact value, at most all."""
    if width >= 1:
        return channels
    exact = channels * width
    new = max(8, int(exact + 4) // 8 * 8)
    return min(channels, new + 8 if new < 0.9 * exact else new)


def at_width(module, x, width):
    """module(x) by the narrow sub-network that uses the leading make_divisible(c, width) of every layer's c channels; x has
    as many as the sub-network takes. Batch norm uses batch statistics and leaves the running ones alone. Gradients reach
    the leading slices of the weights. At width 1 and in training mode the result equals module(x) bit for bit."""
    tensors, previous = {}, None
    for name, layer in module.named_modules():
        prefix = name + "." if name else ""
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            if getattr(layer, "groups", 1) != 1:
                raise UserError("a sub-network of grouped convolutions is not defined; use another --model")
            outputs, inputs = layer.weight.shape[:2]
            # a linear layer behind flattened maps has several inputs a channel
            positions = inputs // previous if isinstance(layer, nn.Linear) and previous else 1
            previous = outputs
            outputs = outputs if isinstance(layer, Classifier) else make_divisible(outputs, width)
            tensors[prefix + "weight"] = layer.weight[:outputs, :make_divisible(inputs // positions, width) * positions]
            if layer.bias is not None:
                tensors[prefix + "bias"] = layer.bias[:outputs]
        elif isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm)):
            channels = make_divisible(layer.weight.shape[0], width)
            tensors[prefix + "weight"], tensors[prefix + "bias"] = layer.weight[:channels], layer.bias[:channels]
            tensors |= {prefix + buffer: None for buffer, _ in layer.named_buffers(recurse=False)}
        elif next(layer.parameters(recurse=False), None) is not None:
            raise UserError(f"a sub-network of {type(layer).__name__} is not defined; use another --model")
    return torch.func.functional_call(module, tensors, (x,))


# ----------------------------------------------------------------------------------------------------------------------
# Engine: a worker trains one client after the other
# ----------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Client:
    """What a method sees of a client: id, its training indices, and state, a dict of tensors (or lists and dicts of them)
    that it keeps between rounds. len(client) is its number of samples."""
    id: int
    index: np.ndarray
    state: dict
    bytes_down: int = 0  # received and sent beside the model
    bytes_up: int = 0

    def __len__(self):
        return len(self.index)

    def upload(self, tree):
        """As download, for what a second synchronisation sends."""
        self.bytes_up += nbytes(tree)
        return tree

    def download(self, tree):
        """tree (tensors, or lists and dicts of them), counted as received from the server beside the model."""
        self.bytes_down += nbytes(tree)
        return tree


@dataclasses.dataclass
class Upload:
    """What a client sends: its state_dict, the message that local_update returned, and its weight alpha_k in the average."""
    client: Client
    weight: float
    weights: dict
    message: dict
    loss: torch.Tensor  # mean over the samples it saw
    finite: torch.Tensor  # whether all weights and the loss are
    samples: int  # seen in training, repeats counted


def tensors_in(tree):
    """All tensors in nested dicts, lists and tuples."""
    if torch.is_tensor(tree):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [t for child in children for t in tensors_in(child)]


def tree_map(f, tree):
    """The same nest of dicts, lists and tuples with f applied to each tensor."""
    if isinstance(tree, dict):
        return {k: tree_map(f, v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [tree_map(f, v) for v in tree]
    return f(tree) if torch.is_tensor(tree) else tree


def nbytes(tree):
    return sum(t.numel() * t.element_size() for t in tensors_in(tree))


def autocast(args, device):
    """--precision bf16; no weight cache, which would go stale in a CUDA graph."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16", cache_enabled=False)


def cast_blocks(net, args, device):
    """Run each block of net under autocast and pass on fp32, so that losses and whatever else a method computes outside of
    blocks, Gram matrices and power iterations say, are in fp32, forward and backward. Not to be copied afterwards."""
    def wrapped(forward):
        def cast(*inputs):
            with autocast(args, device):
                out = forward(*inputs)
            return out.float()
        return cast
    if args.precision == "bf16":
        for block in net:
            block.forward = wrapped(block.forward)
    return net


def epoch_sizes(n, args, batch_norm):
    """Sizes of the batches in which a client of n samples visits each of them once. A last batch of a single sample is
    skipped where there is batch norm, which needs two; so is every short batch with --drop-last."""
    full, rest = divmod(n, args.batch_size)
    if args.drop_last or batch_norm and rest == 1:
        rest = 0
    return [args.batch_size] * full + [rest] * (rest > 0)


def batch_sizes(n, args, batch_norm):
    """Sizes of the batches on which a client of n samples trains in one round: --epochs epochs, or --local-steps batches."""
    epoch = epoch_sizes(n, args, batch_norm)
    if args.local_steps and epoch:
        return (epoch * math.ceil(args.local_steps / len(epoch)))[:args.local_steps]
    return epoch * args.epochs


def learning_rate(args, round_):
    """Of a round, counted from 1."""
    return args.lr * args.lr_decay ** (round_ - 1)


def sgd(net, args):
    """SGD whose momentum buffers exist from the start and whose step clips the gradient norm first (--clip)."""
    device = next(net.parameters()).device
    cuda = device.type == "cuda"
    lr = torch.tensor(args.lr, device=device) if cuda else args.lr  # a float would be baked into a CUDA graph
    opt = torch.optim.SGD(net.parameters(), lr, args.momentum, weight_decay=args.weight_decay,
                          nesterov=args.nesterov and args.momentum > 0, fused=cuda or None)
    if args.momentum:
        for p in net.parameters():
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
    if args.clip:
        def clip(*_):
            nn.utils.clip_grad_norm_(net.parameters(), args.clip, error_if_nonfinite=False)
        opt.register_step_pre_hook(clip)
    return opt


class Worker:
    """A seat at which clients train in turn: a network, an optimizer and all that a step reads, at fixed addresses."""

    keep_first_step = False  # tests: on the CPU too, run the first client's closure for all later clients

    def __init__(self, net, data, args, steps):
        """net: the global network, copied; steps: the most that any client trains in a round."""
        self.data, self.args, self.device, self.template = data, args, data.x.device, net
        self.net = cast_blocks(copy.deepcopy(net), args, self.device)
        self.opt = sgd(self.net, args)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.augment, self.batch_norm = resolve_augment(args), has_batch_norm(net)
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)  # the step within the client's round
        self.draws = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # summed over samples
        self.pins, self.nets, self.graphs, self.step, self.steps = {}, {}, {}, None, steps
        # host-drawn random numbers of a client's round: one row a step, read through t
        self.tables = {name: torch.from_numpy(row).new_zeros(steps, *row.shape[1:], device=self.device)
                       for name, row in self._draw(np.zeros(1, np.int64), 1, keyed("shapes")).items()}

    # --- what a method may use

    def pin(self, name, value):
        """value (a tensor, a number, or a list of tensors) copied into storage of this name that stays where it is."""
        if isinstance(value, (list, tuple)):
            return [self.pin(f"{name}.{i}", v) for i, v in enumerate(value)]
        value = torch.as_tensor(value, device=self.device).detach()
        if name not in self.pins:
            self.pins[name] = value.clone()
        return self.pins[name].copy_(value)

    def frozen(self, name, weights=None):
        """A copy of the network in eval mode and without gradients, holding weights (a state_dict), by default those that
        worker.net holds now."""
        if name not in self.nets:
            frozen = copy.deepcopy(self.template).eval().requires_grad_(False)
            self.nets[name] = cast_blocks(frozen, self.args, self.device)
        _load(self.nets[name], self.net.state_dict() if weights is None else weights)
        return self.nets[name]

    def keyed(self, name):
        """A numpy Generator of this client's round for the method's own draws; each name has its own stream."""
        return keyed(name, *self.key)

    def draw(self, name, f):
        """Random numbers of the client's round: f(rng, steps) returns an array with one row a step, row(name) is the current
        one. The stream of each name is its own, so methods share clients, batches and augmentation."""
        rows = torch.from_numpy(np.ascontiguousarray(f(self.keyed(name), max(1, len(self.sizes)))))
        if name not in self.draws:
            self.draws[name] = rows.new_zeros(self.steps, *rows.shape[1:], device=self.device)
        self._fill(self.draws[name], rows)

    def row(self, name):
        return self.draws[name].index_select(0, self.t)[0]

    @torch.no_grad()
    def batches(self, client):
        """(x, y) over all samples of the client in order, not augmented, outside training."""
        for index in torch.from_numpy(client.index).to(self.device).split(500):
            x = self.data.normalise(self.data.x[index]).contiguous(memory_format=torch.channels_last)
            yield x, self.data.y[index]

    # --- one client's round

    def round(self, client, server, weights, alpha, local_update):
        """A generator that trains one client: it yields after each batch and returns the Upload. Only the batches run on
        the worker's own stream, so workers overlap there; all else is in order on the current stream."""
        args, sizes = self.args, batch_sizes(len(client), self.args, self.batch_norm)
        self._begin(client, server, weights, sizes)
        method = local_update(self, client, server, args)
        step = next(method)
        if self.keep_first_step:
            step = self.step = self.step or step
        on_stream = torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for i, size in enumerate(sizes):
            self.shape = self.shapes[i] if self.shapes else None
            with on_stream:
                if self._graphed(size):
                    if self.shape not in self.graphs:
                        self._capture(step)
                    self.graphs[self.shape].replay()
                else:
                    self._step(step, size)
            yield
        if self.stream:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        try:
            next(method)
        except StopIteration as stop:
            message = tree_map(lambda t: t.detach().clone(), stop.value or {})
        else:
            raise RuntimeError("local_update yields once, its step")
        if args.persist_opt:
            client.state["momentum"] = self._momentum()
        client.state = tree_map(lambda t: t.detach().to("cpu", copy=True), client.state)
        upload = {k: v.detach().clone() for k, v in self.net.state_dict().items()}
        loss = self.loss / max(1, sum(sizes))
        norms = torch._foreach_norm([v for v in upload.values() if v.is_floating_point()])
        return Upload(client, alpha, upload, message, loss, torch.stack([*norms, loss.float()]).isfinite().all(), sum(sizes))

    def _begin(self, client, server, weights, sizes):
        args = self.args
        _load(self.net, weights)
        self.net.train()
        momentum, kept = self._momentum(), client.state.get("momentum")
        for i, buffer in enumerate(momentum):
            buffer.zero_() if kept is None else buffer.copy_(kept[i])
        lr = learning_rate(args, server["round"])
        for group in self.opt.param_groups:
            group["lr"].fill_(lr) if torch.is_tensor(group["lr"]) else group.update(lr=lr)
        self.t.zero_()
        self.loss.zero_()
        self.sizes, self.key, self.shapes, self.lr = sizes, (args.seed, server["round"], client.id), None, lr
        for name, rows in self._draw(client.index, len(sizes), keyed("batches", *self.key)).items():
            self._fill(self.tables[name], torch.from_numpy(rows))

    def _fill(self, table, rows):
        table[:len(rows)].copy_(rows.pin_memory() if self.stream else rows, non_blocking=True)

    def _momentum(self):
        return [state["momentum_buffer"] for state in self.opt.state.values() if "momentum_buffer" in state]

    def _draw(self, index, steps, rng):
        """Tables of (steps, batch size, ...): which samples, and how to augment each. A short batch uses a part of its row."""
        rows = max(1, len(epoch_sizes(len(index), self.args, self.batch_norm)))  # of one epoch
        epochs, width = math.ceil(steps / rows), rows * self.args.batch_size
        order = rng.permuted(np.tile(index, (epochs, 1)), axis=1)[:, :width]
        order = np.pad(order, ((0, 0), (0, width - order.shape[1]))).reshape(epochs * rows, self.args.batch_size)
        return {"index": order[:steps], **draw_augment(self.augment, rng, (steps, self.args.batch_size), self.data.x.shape[-2])}

    def _step(self, step, size):
        rows = {name: table.index_select(0, self.t)[0, :size] for name, table in self.tables.items()}
        index = rows.pop("index")
        x = self.data.normalise(apply_augment(self.data.x.index_select(0, index), rows))
        x = x.contiguous(memory_format=torch.channels_last)
        loss = step(x, self.data.y.index_select(0, index))
        self.loss.add_(loss.detach(), alpha=size)
        self.t.add_(1)

    def _graphed(self, size):
        """Whether this batch replays a graph: a full one, of a shape that has a graph or may have one of at most 64."""
        known = self.shape in self.graphs or len(self.graphs) < 64
        return self.stream and self.args.graph and size == self.args.batch_size and known

    def _capture(self, step):
        """Record one step on a full batch as a CUDA graph. Warm-up moves weights, statistics and momentum, so they are put
        back; a step writes to nothing else."""
        moved = [*self.net.state_dict().values(), *self._momentum(), self.t, self.loss]
        before = [v.clone() for v in moved]
        for _ in range(3):
            self.t.zero_()
            self._step(step, self.args.batch_size)
        self.t.zero_()
        graph = self.graphs[self.shape] = torch.cuda.CUDAGraph()
        # graphs of a worker run one at a time and leave nothing behind in their memory, so they share it
        pool = next(iter(self.graphs.values())).pool() if len(self.graphs) > 1 else None
        with torch.cuda.graph(graph, pool, stream=self.stream):
            self._step(step, self.args.batch_size)
        for tensor, value in zip(moved, before):
            tensor.copy_(value)


def _load(net, weights):
    """Copy weights (a state_dict) into net, in place."""
    with torch.no_grad():
        names = net.state_dict()
        torch._foreach_copy_(list(names.values()), [weights[k] for k in names])


class Pool:
    """Workers, and how they share the machine: threads on the CPU; on a GPU one thread that feeds their streams in turn."""

    def __init__(self, build, device, count, threads):
        """build() makes a worker; count: workers, 0 for as many as the GPU's memory allows; threads: of each on the CPU."""
        self.build, self.device, self.grow = build, device, count == 0
        self.workers = [build() for _ in range(max(1, count))]
        torch.set_num_threads(threads)
        several = device.type == "cpu" and count > 1
        self.threads = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(threads,)) if several else None

    @staticmethod
    def plan(args, sampled):
        """(workers, threads of each). With --workers auto on the CPU one worker a core, at most 8, where Python's lock gets in
        the way; cores left over go to the operators of each. On a GPU 0, to be settled when the first worker has run."""
        if args.workers == "auto" and args.device != "cpu":
            return 0, CORES
        count = min(sampled, min(CORES, 8) if args.workers == "auto" else args.workers)
        return count, max(1, CORES // count) if args.device == "cpu" else CORES

    def close(self):
        if self.threads:
            self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(CORES)

    def map(self, f, items):
        """f over items, in order, on the worker threads where there are several."""
        return (self.threads.map if self.threads else map)(f, items)

    def train(self, clients, server, weights, alphas, local_update):
        """Uploads of the clients, in order, each as soon as it and those before it are done."""
        rounds = [functools.partial(Worker.round, client=c, server=server, weights=weights, alpha=a, local_update=local_update)
                  for c, a in zip(clients, alphas)]
        return self._threaded(rounds) if self.threads else self._interleaved(rounds)

    def _threaded(self, rounds):
        free, stopping = queue.SimpleQueue(), False
        for worker in self.workers:
            free.put(worker)

        def drain(round_):
            worker = free.get()
            batches = round_(worker)
            try:
                while not stopping:
                    next(batches)
            except StopIteration as stop:
                return stop.value
            finally:
                free.put(worker)

        try:
            yield from self.threads.map(drain, rounds)
        finally:  # an interrupt or an error: the others need not finish their clients
            stopping = True

    def _interleaved(self, rounds):
        waiting, running, done, due = deque(enumerate(rounds)), [], {}, 0
        free = list(self.workers)
        while waiting or running:
            while free and waiting:
                (i, round_), worker = waiting.popleft(), free.pop(0)
                running.append((i, worker, round_(worker)))
            for item in list(running):
                i, worker, batches = item
                try:
                    next(batches)
                except StopIteration as stop:
                    done[i] = stop.value
                    running.remove(item)
                    free.append(worker)
            if self.grow:
                free += self._grow(len(waiting))
            while due in done:
                yield done.pop(due)
                due += 1

    def _grow(self, waiting):
        """More workers, now that the first has shown what one takes of the GPU's memory: at most 8, in 80% of what is free."""
        self.grow = False
        torch.cuda.synchronize(self.device)
        free, one = torch.cuda.mem_get_info(self.device)[0], torch.cuda.max_memory_reserved(self.device)
        new = [self.build() for _ in range(min(waiting, 7, int(0.8 * free / one)))]
        self.workers += new
        return new


# ----------------------------------------------------------------------------------------------------------------------
# Aggregation and evaluation
# ----------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def average(net, uploads, server, args):
    """FedAvg's server: w <- sum_k alpha_k w_k over parameters and batch-norm statistics, summed in fp32 in the order of the
    uploads, and a step of the server optimizer from w towards it. Integer counters, which no computation reads, are those
    of the last upload."""
    mean = {k: torch.zeros_like(v) for k, v in net.state_dict().items() if v.is_floating_point()}
    for upload in uploads:
        torch._foreach_add_(list(mean.values()), [upload.weights[k] for k in mean], alpha=upload.weight)
    _load(net, {**upload.weights, **mean, **server_step(dict(net.named_parameters()), mean, server, args)})


def server_step(w, mean, server, args):
    """The parameters after one step of --server from w along Delta = mean - w; batch-norm statistics have no step.
    avg: w + lr Delta.   avgm (FedAvgM, Hsu et al. 2019): m <- beta m + Delta, w + lr m.
    adam (FedADAM, Reddi et al., ICLR 2021, Algorithm 2): m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2,
    w + lr m / (sqrt(v) + tau), v starting at tau^2, without bias correction."""
    lr, beta = args.server_lr, args.server_momentum
    if args.server == "avg":
        return {k: mean[k] for k in w} if lr == 1 else {k: v + lr * (mean[k] - v) for k, v in w.items()}
    adam = args.server == "adam"
    m = server.setdefault("m", {k: torch.zeros_like(v) for k, v in w.items()})
    v = server.setdefault("v", {k: torch.full_like(x, args.server_tau**2) for k, x in w.items()}) if adam else {}
    for k in w:
        delta = mean[k] - w[k]
        m[k].mul_(beta).add_(delta, alpha=1 - beta if adam else 1)
        if adam:
            v[k].mul_(args.server_beta2).addcmul_(delta, delta, value=1 - args.server_beta2)
    return {k: w[k] + lr * (m[k] / (v[k].sqrt() + args.server_tau) if adam else m[k]) for k in w}


@torch.no_grad()
def evaluate(net, data, args, pool_map=map):
    """Accuracy in percent and mean cross-entropy of net, in eval mode, on the whole test set."""
    net.eval()

    def batch(xy):
        x = data.normalise(xy[0]).contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), autocast(args, x.device):
            out = net(x).float()
        return torch.stack([(out.argmax(1) == xy[1]).sum().double(), F.cross_entropy(out, xy[1], reduction="sum").double()])

    size = 2000 if data.x.is_cuda else 250
    correct, loss = torch.stack(list(pool_map(batch, zip(data.x_test.split(size), data.y_test.split(size))))).sum(0).tolist()
    return 100 * correct / len(data.y_test), loss / len(data.y_test)


# ----------------------------------------------------------------------------------------------------------------------
# Run folder: config.json, metrics.jsonl, checkpoint.pt, model.pt, best.pt, states/ and clients/
# ----------------------------------------------------------------------------------------------------------------------

def _write(path, content):
    """Write bytes so that a kill or a full disk at any moment leaves the old file or the new one, whole."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        folder_ = os.open(path.parent, os.O_RDONLY)  # the new name has to outlive a power failure too
        os.fsync(folder_)
        os.close(folder_)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save(tree, path):
    """torch.save, atomically, of a nest of tensors and plain values; strides are kept, since sums depend on them."""
    buffer = io.BytesIO()  # written by ourselves, since torch hides that a disk is full
    torch.save(tree_map(lambda t: t.detach().cpu(), tree), buffer)
    _write(path, buffer.getbuffer())


def load(path, what="checkpoint"):
    """What save() wrote. UserError for anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except Exception as e:  # torch raises many kinds for a damaged file
        raise UserError(f"{path}: not a readable {what} ({str(e).splitlines()[0] if str(e) else type(e).__name__})") from None


def read_config(out):
    """config.json of the run in the folder out. UserError if out is no run."""
    if not (out / "config.json").is_file():
        raise UserError(f"--out {out}: no run to --resume there, since it has no config.json")
    try:
        config = json.loads((out / "config.json").read_text())
        right = isinstance(config["flags"]["rounds"], int) and all(type(config[k]) is int for k in ("workers", "threads"))
        if right and isinstance(config["script"], str):
            return config
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"--out {out}: config.json is damaged, or not of a run of this project")


class Run:
    """The folder of a run, from which it resumes exactly."""

    def __init__(self, out, script, args):
        self.out, self.script, self.args = pathlib.Path(out), script, args
        self.rows, self.changed, self.versions = [], set(), {}
        self.clock = time.perf_counter()  # when the last round was evaluated
        self.lock = None

    def check(self):
        """UserError, before any long work, when the folder can't be used."""
        if self.args.resume:
            config = read_config(self.out)
            if config["script"] != self.script:
                raise UserError(f"--out {self.out}: a run of {config['script']}.py, not of {self.script}.py")
            self._lock()
            return config
        # what a kill before the first complete file leaves is no run
        if self.out.exists() and (not self.out.is_dir() or any(path.suffix != ".tmp" for path in self.out.iterdir())):
            raise UserError(f"--out {self.out}: exists already; continue that run with --resume, or name another folder")

    def create(self, workers, threads):
        """Make the folder, and write down all that the run depends on."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock()
        gpu = torch.cuda.get_device_name(self.args.device) if self.args.device != "cpu" else None
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        self.config = {"script": self.script, "flags": vars(self.args), "workers": workers, "threads": threads,
                       "device": gpu or f"{platform.machine()}, {CORES} cores", "versions": versions, "commit": _commit()}
        self.write_config()

    def _lock(self):
        """Keep the folder from other processes until close(), or until this one ends however it does."""
        import fcntl
        self.lock = os.open(self.out, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {self.out}: another process is writing to this run") from None

    def close(self):
        if self.lock is not None:
            import fcntl
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # processes that decode images may still hold a copy of it
            os.close(self.lock)

    def write_config(self):
        _write(self.out / "config.json", (json.dumps(self.config, indent=1) + "\n").encode())

    def decisive(self):
        """The flags that decide the result."""
        return {k: v for k, v in vars(self.args).items() if k not in FREE_ON_RESUME}

    def append(self, row):
        self.rows.append(row)
        with open(self.out / "metrics.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
            f.flush()
            os.fsync(f.fileno())

    def checkpoint(self, net, server, states):
        """Commit the state after the last appended row. Client states lie in files of their own, a new one whenever they
        change; the checkpoint names those that count, and the others are deleted once it is written."""
        (self.out / "states").mkdir(exist_ok=True)
        for k in self.changed:
            save(states[k], self.out / "states" / f"{k}-{server['round']}.pt")
            self.versions[k] = server["round"]
        self.changed.clear()
        state = {"script": self.script, "flags": self.decisive(), "net": net.state_dict(), "server": server,
                 "clients": self.versions}
        save(state, self.out / "checkpoint.pt")
        kept = {f"{k}-{version}.pt" for k, version in self.versions.items()}
        for path in (self.out / "states").iterdir():
            if path.name not in kept:
                path.unlink()

    def restore(self, config, net, server, states):
        """Fill net, server and states from the checkpoint, if there is one, and forget the rounds after it."""
        path, metrics = self.out / "checkpoint.pt", self.out / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        if path.exists():
            found = load(path)
            try:
                if found["script"] != self.script:
                    raise UserError(f"{path}: made by {found['script']}.py, not by {self.script}.py")
                for k, v in self.decisive().items():
                    if found["flags"][k] != v:
                        raise UserError(f"{path}: of another run, with {found['flags'][k]} for --{k.replace('_', '-')}")
                net.load_state_dict(found["net"])
                server.update(tree_map(lambda t: t.to(next(net.parameters()).device), found["server"]))
                if type(server["round"]) is not int or server["round"] < 1:
                    raise ValueError("no round")
                self.versions = dict(found["clients"])
            except UserError:
                raise
            except Exception as e:  # any shape that a foreign file may have
                raise UserError(f"{path}: not a checkpoint of this run ({e})") from None
            for k, version in self.versions.items():
                states[k] = load(self.out / "states" / f"{k}-{version}.pt", "client state")
        elif len(lines) > self.args.checkpoint_every or (self.out / "model.pt").exists():
            raise UserError(f"{path}: missing, though metrics.jsonl has {len(lines)} rounds")
        lines = lines[:server["round"]]
        try:
            self.rows = [json.loads(line) for line in lines]
            right = [row["round"] for row in self.rows if row["test_acc"] != ""] == list(range(1, server["round"] + 1))
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            raise UserError(f"{metrics}: damaged; it should hold rounds 1 to {server['round']} of the checkpoint")
        for leftover in self.out.glob("*.tmp"):  # of a write that was cut
            leftover.unlink()
        _write(metrics, b"".join(line + b"\n" for line in lines))
        self.config = config
        config["flags"]["rounds"] = self.args.rounds
        self.write_config()


def _commit():
    """The commit of the code, with + if it was changed since; None outside a git repository."""
    def git(*words):
        here = pathlib.Path(__file__).parent
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None


def summary(accuracies):
    """Readings of the test accuracies so far, in percent: EMA with factor 0.9 (bias-corrected), mean and population standard
    deviation of the last five, and the best; None before the first."""
    if not accuracies:
        return dict.fromkeys(("acc_ema", "acc_last5_mean", "acc_last5_std", "best_acc"))
    ema = sum(0.1 * 0.9**i * a for i, a in enumerate(reversed(accuracies))) / (1 - 0.9 ** len(accuracies))
    last = accuracies[-5:]
    return {"acc_ema": ema, "acc_last5_mean": float(np.mean(last)), "acc_last5_std": float(np.std(last)),
            "best_acc": max(accuracies)}


# ----------------------------------------------------------------------------------------------------------------------
# The round loop
# ----------------------------------------------------------------------------------------------------------------------

def run(args, local_update, aggregate=average, after_round=None, adapt=None):
    """Federated training as args say, in a run folder. local_update: see the top of this file. aggregate(net, uploads,
    server, args): enters with the old global weights in net and an iterator of Uploads, trained while it is read; leaves
    with the new weights in net. server: a dict for what the server keeps between rounds; server["round"] counts from 1.
    after_round(worker, clients, server, args): a second synchronisation; worker.net holds the new global weights, in eval
    mode. server["report"], a dict, is added to the round's row. adapt(net, args): changes the network before it is copied.
    Returns the global network and the rows of metrics.jsonl. Exits with one line and code 2 for a user's mistake."""
    script = pathlib.Path(local_update.__code__.co_filename).stem
    with one_line_errors(script, args, "use fewer --workers, a smaller --batch-size or --device cpu"):
        return _run(args, script, local_update, aggregate, after_round, adapt)


@contextlib.contextmanager
def one_line_errors(script, args=None, memory_advice="use a smaller --batch-size or --device cpu"):
    """Turns a mistake of the user's, a full memory and an interrupt into one line on stderr and an exit code. args: those of
    a run that could be resumed."""
    try:
        yield
        return
    except (UserError, OSError) as e:
        message, code = str(e), 2
    except FloatingPointError as e:
        message, code = str(e), 1
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(e):
            raise
        message, code = f"the memory is full; {memory_advice}", 2
    except KeyboardInterrupt:
        started = args and args.out and pathlib.Path(args.out, "config.json").exists()
        message, code = "interrupted" + (f"; continue with --out {args.out} --resume" if started else ""), 130
    print(f"{script}.py: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _run(args, script, local_update, aggregate, after_round, adapt):
    args.out = args.out or f"runs/{script}-{args.dataset}-{args.model}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with contextlib.closing(Run(args.out, script, args)) as folder_:
        return _train(args, folder_, local_update, aggregate, after_round, adapt)


def _train(args, folder_, local_update, aggregate, after_round, adapt):
    config = folder_.check()
    say = (lambda _: None) if args.quiet else tqdm.write
    device = _set_up(args)

    data = load_data(args)
    if data.x.shape[-1] != data.x.shape[-2]:
        raise UserError(f"the images are {data.x.shape[-1]}x{data.x.shape[-2]} pixels; --image-size makes them square")
    parts = partition(data, args)
    torch.manual_seed(args.seed)
    net = build_net(args.model, data.classes, data.x.shape[1], data.x.shape[-1], args.projection)
    if adapt:
        adapt(net, args)
    net, data = net.to(device, memory_format=torch.channels_last).eval(), data.to(device)
    sizes, batch_norm = sorted(map(len, parts)), has_batch_norm(net)
    if batch_norm and min(sizes[0], args.batch_size) == 1:
        raise UserError("a batch or a client has a single sample, and batch norm needs two; "
                        "use a larger --batch-size, fewer --clients or another --model")
    steps = max(len(batch_sizes(n, args, batch_norm)) for n in set(sizes))
    if steps == 0:
        raise UserError(f"--drop-last: no client has the {args.batch_size} samples of a batch")
    sampled = sampled_clients(args)
    workers, threads = (config["workers"], config["threads"]) if config else Pool.plan(args, sampled)

    server, states = {"round": 0}, {}
    pool = Pool(lambda: Worker(net, data, args, steps), device, workers, threads)
    if config:
        folder_.restore(config, net, server, states)
    else:
        folder_.create(workers, threads)
    say(f"{args.out}: {len(parts)} clients of {sizes[0]} to {sizes[-1]} samples, {sampled} a round; "
        f"{sum(p.numel() for p in net.parameters()):,} parameters; {workers or 'auto'} worker(s) on {args.device}")
    bar = tqdm(total=args.rounds * sampled, initial=server["round"] * sampled, unit="client", disable=args.quiet or None)
    with contextlib.closing(pool), bar:
        while server["round"] < args.rounds:
            server["round"] += 1
            row = _round(args, net, data, parts, server, states, pool, local_update, aggregate, after_round, folder_, bar)
            accuracy = "" if row["test_acc"] is None else f"  acc {row['test_acc']:5.2f}%  test loss {row['test_loss']:.4f}"
            if not workers:  # settled in the first round
                folder_.config["workers"] = workers = len(pool.workers)
                folder_.write_config()
            say(f"round {row['round']:3d}/{args.rounds}{accuracy}  train loss {row['train_loss']:.4f}  "
                f"{row['samples_per_s']:,.0f} samples/s")
    save(net.state_dict(), folder_.out / "model.pt")
    last = folder_.rows[-1]
    say("accuracy: last {test_acc:.2f}%, best {best_acc:.2f}%, EMA {acc_ema:.2f}%, "
        "last five {acc_last5_mean:.2f} +- {acc_last5_std:.2f}%".format(**last))
    return net, folder_.rows


def sampled_clients(args):
    """How many clients take part in a round."""
    return max(1, int(args.clients * args.sample + 0.5))


def _set_up(args):
    """Precision and determinism of the process; returns the device."""
    device = torch.device(args.device)
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # Gram matrices and power iterations need it, also in backward
    torch.backends.cudnn.conv.fp32_precision = "ieee" if args.precision == "fp32" else "tf32"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = not args.deterministic
    torch.use_deterministic_algorithms(args.deterministic)
    return device


def _round(args, net, data, parts, server, states, pool, local_update, aggregate, after_round, folder_, bar):
    """One communication round; returns its row of metrics.jsonl."""
    t, last, sampled = server["round"], server["round"] == args.rounds, sampled_clients(args)
    chosen = sorted(keyed("sample", args.seed, t).choice(len(parts), sampled, replace=False).tolist())
    server["clients"] = chosen
    clients = [Client(k, parts[k], states.get(k, {})) for k in chosen]
    shares = np.array([n // args.batch_size * args.batch_size if args.drop_last else n for n in map(len, clients)])
    if args.weighting == "uniform":
        shares = np.minimum(shares, 1)  # without training, no weight
    if shares.sum() == 0:
        raise UserError(f"--drop-last: no client sampled in round {t} has the {args.batch_size} samples of a batch")
    alphas = (shares / shares.sum()).tolist()
    weights, start, waited, seen = net.state_dict(), time.perf_counter(), 0.0, []

    def uploads():
        nonlocal waited
        trained = pool.train(clients, server, weights, alphas, local_update)
        while True:
            before = time.perf_counter()
            with torch.enable_grad():  # aggregate, which runs training by reading on, may be under no_grad
                upload = next(trained, None)
            if upload is None and pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            waited += time.perf_counter() - before
            if upload is None:
                return
            seen.append((upload.loss, upload.finite, upload.samples, nbytes(upload.weights) + nbytes(upload.message)))
            if upload.client.state:
                states[upload.client.id] = upload.client.state
                folder_.changed.add(upload.client.id)
            if last and args.save_clients:
                (folder_.out / "clients").mkdir(exist_ok=True)
                save(upload.weights, folder_.out / "clients" / f"{upload.client.id}.pt")
            bar.update()
            yield upload

    aggregate(net, uploads(), server, args)
    for client, (_, finite, _, _) in zip(clients, seen):
        if not finite:
            kept = f"; {args.out} keeps the checkpoint of an earlier round" if t > args.checkpoint_every else ""
            raise FloatingPointError(f"round {t}, client {client.id}: the local model holds NaN or infinity{kept}; "
                                     "a smaller --lr or a --clip may help")
    if not torch.stack(torch._foreach_norm(list(net.parameters()))).isfinite().all():
        raise FloatingPointError(f"round {t}: the global model holds NaN or infinity; a smaller --server-lr may help")
    aggregated = time.perf_counter()
    if after_round:
        worker = pool.workers[0]
        _load(worker.net.eval(), net.state_dict())
        after_round(worker, clients, server, args)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
    trained = time.perf_counter()
    accuracy, loss = evaluate(net, data, args, pool.map) if last or t % args.eval_every == 0 else (None, None)
    evaluated = time.perf_counter()

    samples = sum(n for _, _, n, _ in seen)
    history = [row["test_acc"] for row in folder_.rows if row["test_acc"] is not None] + [accuracy] * (accuracy is not None)
    if accuracy is not None and accuracy > max(history[:-1], default=-1):
        save(net.state_dict(), folder_.out / "best.pt")
    row = {"round": t, "test_acc": accuracy, "test_loss": loss,
           "train_loss": sum(float(loss) * n for loss, _, n, _ in seen) / max(1, samples),
           "lr": learning_rate(args, t), "clients": chosen, "samples": samples,
           "seconds": {"train": waited, "aggregate": aggregated - start - waited, "evaluate": evaluated - trained,
                       "other": start - folder_.clock},
           "samples_per_s": samples / waited,
           "bytes_down": sampled * nbytes(weights) + sum(client.bytes_down for client in clients),
           "bytes_up": sum(b for *_, b in seen) + sum(client.bytes_up for client in clients),
           "peak_memory": _peak_memory(pool.device), **summary(history), **server.pop("report", {})}
    if after_round:
        row["seconds"]["synchronise"] = trained - aggregated
    folder_.clock = evaluated
    folder_.append(row)
    if last or t % args.checkpoint_every == 0:
        folder_.checkpoint(net, server, states)
    latest = f"acc {history[-1]:.2f}%, " if history else ""
    bar.set_postfix_str(f"round {t}, {latest}loss {row['train_loss']:.3f}, {row['samples_per_s']:,.0f} samples/s")
    return row


def _peak_memory(device):
    """Most bytes held so far: of the GPU's memory by tensors, or of the host's by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
