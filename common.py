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
import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import platform
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
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
    "client-number": "clients",
    "n-parties": "clients",
    "num-of-clients": "clients",
    "client-sample": "sample",
    "sample-fraction": "sample",
    "participation-rate": "sample",
    "comm-round": "rounds",
    "partition-alpha": "alpha",
    "beta": "alpha",
    "dirichlet-alpha": "alpha",
    "wd": "weight-decay",
    "local-epochs": "epochs",
}
DATASETS = [
    "cifar100",
    "cifar10",
    "mnist",
    "emnist",
    "femnist",
    "tiny-imagenet",
    "imagenet-200",
    "sent140",
]
NATURAL = ("natural", "natural-iid")  # partitions that ask who made each sample
# Flags that may change when a run is resumed; all others decide the result.
FREE_ON_RESUME = {
    "rounds",
    "out",
    "resume",
    "quiet",
    "data_dir",
    "checkpoint_every",
    "save_clients",
}


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class PlainParser(argparse.ArgumentParser):
    """argparse with one-line errors, whose --help opens with the description."""

    def __init__(self, doc, **options):
        options = {"usage": argparse.SUPPRESS, "formatter_class": _Help, **options}
        super().__init__(description=doc, allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


class Parser(PlainParser):
    """The parser of a method script, with the aliases above.

    args.script is the script's name, args.argv the words of the command line without --out and
    --resume. With --resume the words of the run's own command come first.
    """

    def __init__(self, doc, script, **options):
        self.script = pathlib.Path(script).stem
        super().__init__(doc, prog=f"{self.script}.py", **options)

    def parse_args(self, argv=None):
        words = [canonical(word) for word in (sys.argv[1:] if argv is None else argv)]
        args = super().parse_args(words)
        try:
            if args.resume:
                words = [*recorded_words(args.out, self.script), *words]
                args = super().parse_args(words)
            args.script, args.argv = self.script, without_place(words)
            if args.server_lr is None:
                args.server_lr = 0.01 if args.server == "adam" else 1.0
            if args.server_momentum is None:
                args.server_momentum = 0.9 if args.server == "adam" else 0.4
            check_flags(args)
        except UserError as e:
            self.error(str(e))
        return args


def check_flags(args):
    """Raise UserError where flags do not go together."""
    text = args.dataset == "sent140"
    by_writer = args.partition in NATURAL
    vectors = "glove.6B.300d.txt is in https://nlp.stanford.edu/data/glove.6B.zip; or say random"
    mistakes = {
        "--split-file: needed by --partition file": args.partition == "file"
        and not args.split_file,
        "--split-file: only read by --partition file": args.split_file and args.partition != "file",
        "--leak: only for --dataset sent140 with --partition natural": args.leak
        and not (text and args.partition == "natural"),
        "--image-size: of images, and sent140 is text": text and args.image_size,
        "--augment: of images, and sent140 is text": text and args.augment not in ("auto", "none"),
        "--normalise: of images, and sent140 is text": text and args.normalise != "dataset",
        "--augment: takes auto or none for imagenet-200": args.dataset == "imagenet-200"
        and args.augment not in ("auto", "none"),
        "--users: only read by --partition natural and natural-iid": args.users and not by_writer,
        f"--users: {args.users} is less than the {args.clients} --clients": args.users
        and args.users < args.clients,
        "--model: --dataset sent140 is text; use lstm": text and args.model != "lstm",
        f"--model: --dataset {args.dataset} is of images, and lstm is for text (sent140)": not text
        and args.model == "lstm",
        "--vectors: only read by --model lstm": args.vectors and args.model != "lstm",
        f"--vectors: needed by --model lstm; {vectors}": args.model == "lstm" and not args.vectors,
    }
    for message, mistaken in mistakes.items():
        if mistaken:
            raise UserError(f"argument {message}")


def recorded_words(out, script):
    """Return the words of the command that began the run in the folder out, a run of script."""
    if not out:
        raise UserError("argument --resume: name the run to continue with --out")
    config = read_config(pathlib.Path(out))
    if config["script"] != script:
        raise UserError(f"--out {out}: a run of {config['script']}.py, not of {script}.py")
    return config["argv"]


def flag_values(args):
    """Return the flags of args as {name: value}, without what else the parser noted there."""
    return {k: v for k, v in vars(args).items() if k not in ("script", "argv")}


def without_place(words):
    """Return words without --out, its value and --resume."""
    others, skip = [], False
    for word in words:
        if not skip and word != "--resume" and word.partition("=")[0] != "--out":
            others.append(word)
        skip = word == "--out"
    return others


def canonical(word):
    """Return a flag as this project spells it; other words stay as they are."""
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
            kind_, lower = (
                "an integer" if kind is int else "a number",
                "above" if open_low else "of at least",
            )
            upper = f" and at most {top}" if high or value > top else ""
            raise argparse.ArgumentTypeError(
                f"must be {kind_} {lower} {low}{upper}, not {text[:40]!r}"
            )
        return value

    return parse


def integers(low, high=None):
    """An argparse type: integers in [low, high], separated by commas."""
    return lambda text: [number(int, low, high)(word) for word in text.split(",")]


def _augment(text):
    names = [] if text in ("none", "auto") else text.split(",")
    for name in names:
        degrees = name.removeprefix("rotate")
        if name not in ("crop", "flip") and not (
            name.startswith("rotate") and degrees.isdigit() and 0 < int(degrees) <= 180
        ):
            raise argparse.ArgumentTypeError(
                "takes auto, none, or a list of crop, flip and rotateDEGREES, such as "
                f"rotate10,crop,flip, not {text!r}"
            )
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
        raise argparse.ArgumentTypeError(
            f"{text} asked for, but torch finds {torch.cuda.device_count() or 'no'} GPU"
        )
    return f"cuda:{index}"


def flags(doc, script):
    """Return the parser of the shared flags, whose defaults are FedAlign's main setting.

    doc: the script's docstring, which opens --help; script: its __file__, or a name for the run.
    """
    spellings = ", ".join(f"--{a} is --{b}" for a, b in ALIASES.items())
    parser = Parser(
        doc, script, epilog=f"Other spellings: {spellings}; _ and - are interchangeable in flags."
    )
    add = parser.add_argument_group("data and partition").add_argument
    add(
        "--dataset",
        default="cifar100",
        choices=[*DATASETS, "folder", "glyphs"],
        help="folder: your images, train/CLASS/* and test/CLASS/* in --data-dir; glyphs: drawn on the fly, no download",
    )
    add(
        "--data-dir",
        default="data",
        help="where data sets are, or are downloaded to; or the image folder itself",
    )
    add(
        "--image-size",
        type=number(int, 8),
        metavar="PIXELS",
        help="resize images to PIXELS x PIXELS; without it they stay as they are",
    )
    add(
        "--normalise",
        default="dataset",
        choices=["dataset", "half", "cifar10"],
        help="mean and deviation of pixels: the data set's, 0.5 (rFedAvg's CIFAR-10, MOON's Tiny-ImageNet), or those of "
        "CIFAR-10 (FedMLB's CIFAR-100)",
    )
    add(
        "--augment",
        type=_augment,
        default="auto",
        metavar="LIST",
        help="training augmentation: none, or a list of crop (zero-pad by 4, random crop), flip and rotateDEGREES; "
        "auto: crop,flip, but nothing for characters (mnist, emnist, femnist, glyphs); of imagenet-200 crops of "
        "random size, colour jitter and flip",
    )
    add(
        "--partition",
        default="dirichlet",
        choices=["dirichlet", "dirichlet-balanced", "iid", "similarity", *NATURAL, "file"],
        help="how training samples go to clients; natural: by writer, natural-iid: the same writers' samples at random; "
        "file: read --split-file",
    )
    add(
        "--leak",
        action="store_true",
        help="Sent140 with --partition natural: clients train on their test tweets too, as in "
        "the code of rFedAvg's authors",
    )
    add(
        "--users",
        type=number(int, 1),
        metavar="USERS",
        help="writers chosen by --partition natural and natural-iid, grouped into --clients; without it as many as clients; "
        "of Sent140 the most active",
    )
    add(
        "--alpha",
        type=number(float, 0, open_low=True),
        default=0.5,
        help="Dirichlet concentration; smaller is more non-IID",
    )
    add(
        "--similarity",
        type=number(float, 0, 100),
        default=0.0,
        metavar="PERCENT",
        help="share of IID samples in --partition similarity; 0: each client holds consecutive labels",
    )
    add(
        "--split-file",
        metavar="FILE",
        help="client indices for --partition file: {client: [index, ...]} as JSON or a Python literal",
    )
    add(
        "--client-test",
        action="store_true",
        help="test the global model on each client's share of the test set too; worst, best, 10th percentile, variance",
    )
    add(
        "--data-seed",
        type=number(int, 0),
        default=0,
        help="seed of the partition (and of the drawing of glyphs)",
    )

    add = parser.add_argument_group("model").add_argument
    add("--model", default="resnet56", choices=list(NETS), help="network")
    add(
        "--vectors",
        metavar="FILE",
        help="word vectors of --model lstm: a text file as GloVe's (glove.6B.300d.txt), or random",
    )
    add(
        "--projection",
        type=number(int, 0),
        default=0,
        metavar="WIDTH",
        help="put a two-layer projection head before the classifier; 0: none",
    )

    add = parser.add_argument_group("federation").add_argument
    add("--clients", type=number(int, 1), default=16, help="number of clients")
    add(
        "--sample",
        type=number(float, 0, 1, open_low=True),
        default=1.0,
        help="fraction of clients sampled each round",
    )
    add("--rounds", type=number(int, 1), default=25, help="communication rounds")
    add(
        "--weighting",
        default="samples",
        choices=["samples", "uniform"],
        help="weights of the average of the clients' models",
    )
    add(
        "--server",
        default="avg",
        choices=["avg", "avgm", "adam"],
        help="server optimizer: none, FedAvgM, FedADAM",
    )
    add(
        "--server-lr",
        type=number(float, 0, open_low=True),
        help="server learning rate; without it 1, for adam 0.01",
    )
    add(
        "--server-momentum",
        type=number(float, 0, 1),
        help="momentum of avgm, beta1 of adam; without it 0.4 and 0.9",
    )
    add("--server-beta2", type=number(float, 0, 1), default=0.99, help="beta2 of adam")
    add(
        "--server-tau",
        type=number(float, 0, open_low=True),
        default=1e-3,
        help="tau of adam, added to the root of v",
    )

    add = parser.add_argument_group("local training").add_argument
    add("--epochs", type=number(int, 1), default=20, help="local epochs a round")
    add(
        "--local-steps",
        type=number(int, 1),
        metavar="STEPS",
        help="local optimizer steps a round, instead of --epochs",
    )
    add("--batch-size", type=number(int, 1), default=64, help="images a step")
    add(
        "--drop-last",
        action="store_true",
        help="leave the last short batch out of each epoch, and out of the client's weight (FedAlign's code)",
    )
    add("--lr", type=number(float, 0, open_low=True), default=0.01, help="learning rate")
    add(
        "--lr-decay",
        type=number(float, 0, open_low=True),
        default=1.0,
        help="factor on the learning rate after each round",
    )
    add(
        "--optimizer",
        default="sgd",
        choices=["sgd", "rmsprop"],
        help="of clients; rmsprop: smoothing 0.99, epsilon 1e-8",
    )
    add("--momentum", type=number(float, 0, 0.9999), default=0.9, help="momentum of the optimizer")
    add(
        "--nesterov",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Nesterov momentum, of sgd",
    )
    add(
        "--weight-decay",
        type=number(float, 0),
        default=1e-4,
        help="weight of the L2 penalty, in the optimizer",
    )
    add(
        "--clip",
        type=number(float, 0),
        default=0.0,
        metavar="NORM",
        help="clip the gradient norm; 0 is off",
    )
    add(
        "--persist-opt",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep each client's optimizer state between rounds",
    )

    add = parser.add_argument_group("machine").add_argument
    add(
        "--seed",
        type=number(int, 0),
        default=0,
        help="seed of initial weights, client sampling, batches and augmentation",
    )
    add("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    add(
        "--workers",
        type=_workers,
        default="auto",
        help="clients trained at once: threads on the CPU, streams on a GPU",
    )
    add(
        "--precision",
        default="fp32",
        choices=["fp32", "tf32", "bf16"],
        help="of the networks; tf32: in convolutions and LSTM on a GPU; bf16: autocast; losses are in fp32 anyway",
    )
    add(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replay the training step as a CUDA graph; no effect on the CPU",
    )
    add(
        "--deterministic",
        action="store_true",
        help="bitwise repeatable on a GPU, at some cost in speed; the CPU is anyway",
    )

    add = parser.add_argument_group("run folder").add_argument
    add("--out", metavar="RUN", help="the run's folder; by default a new one under runs/")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out; its own flags are the defaults, --rounds may grow",
    )
    add(
        "--eval-every",
        type=number(int, 1),
        default=1,
        metavar="ROUNDS",
        help="evaluate every so many rounds, and in the last",
    )
    add(
        "--checkpoint-every",
        type=number(int, 1),
        default=1,
        metavar="ROUNDS",
        help="so many rounds are lost at most",
    )
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
    "emnist": ((0.5,), (0.5,)),
    "femnist": ((0.5,), (0.5,)),  # of rFedAvg's code for EMNIST
    "imagenet-200": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}


@dataclasses.dataclass
class Data:
    """A data set in memory: images (n, channels, height, width) uint8, labels (n,) int64. Of text x is (n, steps) int16:
    numbers of words, 0 behind the last. With paths the training images stay on disk, and x is empty."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: torch.Tensor = None  # (channels, 1, 1), pixels in [0, 1]; computed from x when not given
    std: torch.Tensor = None
    writers: np.ndarray = (
        None  # (n,) who made each training sample, a number, for --partition natural
    )
    writers_test: np.ndarray = None
    paths: list = None  # (n,) of files
    words: list = None  # of text, those with numbers 2, 3, ...; 1 stands for all others

    def __post_init__(self):
        if self.words is not None:
            return
        if self.mean is None:
            pixels = torch.stack(
                [torch.bincount(c.flatten(), minlength=256) for c in self.x.unbind(1)]
            ).double()  # histograms
            pixels, values = (
                pixels / pixels.sum(1, keepdim=True),
                torch.arange(256.0, dtype=torch.float64) / 255,
            )
            self.mean = pixels @ values
            self.std = (pixels @ values.square() - self.mean.square()).clamp(min=1e-6).sqrt()
        self.mean, self.std = (
            torch.as_tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (self.mean, self.std)
        )

    def images(self, batches, seeds=None):
        """x[index] for each index (an integer tensor or array) of batches. Of images on disk on the CPU, decoded ahead by
        processes; seeds: arrays like the indices, by which each is cropped, recoloured and flipped; else its centre."""
        if not self.paths:
            yield from (self.x[torch.as_tensor(index).to(self.x.device)] for index in batches)
            return
        seeds = (
            [[None] * len(index) for index in batches]
            if seeds is None
            else [seed.tolist() for seed in seeds]
        )
        items = [list(zip(index.tolist(), seed)) for index, seed in zip(batches, seeds)]
        for x in torch.utils.data.DataLoader(
            _Files(self.paths, self.image_size),
            batch_sampler=items,
            collate_fn=_stacked,
            num_workers=max(1, CORES // 4),
        ):
            if isinstance(x, UserError):
                raise x
            yield x

    @property
    def image_size(self):
        """Pixels of a side."""
        if self.words is not None:
            raise UserError("the data set is text, and this method needs images")
        return self.x.shape[-1]

    def to(self, device):
        return dataclasses.replace(
            self, **{k: v.to(device) for k, v in vars(self).items() if torch.is_tensor(v)}
        )

    def normalise(self, x):
        """(batch, channels, height, width) uint8 -> float32 of zero mean and unit variance. Text stays as it is, but for the
        padding that no text of the batch needs, where that costs no synchronisation."""
        if self.words is not None:
            return x if x.is_cuda else x[:, : max(1, int((x != 0).sum(1).max()))]
        return (x.float() / 255 - self.mean) / self.std


def load_data(args):
    """The data set that args.dataset names, on the CPU; for --partition natural with the test samples of the chosen writers
    only. UserError when it cannot be had."""
    root = pathlib.Path(args.data_dir)
    if args.dataset == "glyphs":
        data = glyphs(seed=args.data_seed)
    elif args.dataset == "folder":
        data = folder(root, args.image_size)
    elif args.dataset == "femnist":
        data = femnist(root / "femnist")
    elif args.dataset == "sent140":
        data = sent140(root / "sent140", args)
    elif args.dataset == "imagenet-200":
        data = imagenet_200(root / "imagenet", args.image_size or 224)
    elif args.dataset == "tiny-imagenet":
        data = tiny_imagenet(root / "tiny-imagenet-200")
    else:
        data = _torchvision(args.dataset, root)
    if args.normalise != "dataset":
        channels = data.x.shape[1]
        if args.normalise == "cifar10" and channels != 3:
            raise UserError(f"--normalise cifar10: for images of three channels, not {channels}")
        mean, std = (
            STATISTICS["cifar10"] if args.normalise == "cifar10" else ([0.5] * channels,) * 2
        )
        data = dataclasses.replace(data, mean=mean, std=std)
    if args.partition in NATURAL and data.writers_test is not None:
        chosen = np.concatenate(
            natural_groups(data.writers, args.clients, args.data_seed, args.users)
        )
        kept = np.flatnonzero(np.isin(data.writers_test, chosen))
        if not len(kept):
            raise UserError(f"--users: the {len(chosen)} chosen have no test sample; choose more")
        data = dataclasses.replace(
            data,
            x_test=data.x_test[kept],
            y_test=data.y_test[kept],
            writers_test=data.writers_test[kept],
        )
    data = _resize(data, args.image_size)
    if data.words is None and data.x.shape[-1] != data.x.shape[-2]:
        raise UserError(
            f"the images are {data.x.shape[-1]}x{data.x.shape[-2]} pixels; --image-size makes them square"
        )
    return data


def _torchvision(name, root):
    from torchvision import datasets

    kind = {
        "cifar100": datasets.CIFAR100,
        "cifar10": datasets.CIFAR10,
        "mnist": datasets.MNIST,
        "emnist": functools.partial(datasets.EMNIST, split="byclass"),
    }[name]
    try:
        train, test = (kind(root, train=part, download=True) for part in (True, False))
    except Exception as e:  # no network, a damaged archive, files that are not what their names say
        raise UserError(
            f"--dataset {name} could not be loaded from or downloaded into {root} ({e}); "
            "put torchvision's files there, or use --dataset folder or glyphs"
        ) from None
    images = [torch.as_tensor(part.data) for part in (train, test)]
    images = [x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous() for x in images]
    if name == "emnist":  # whose files hold columns first
        images = [x.transpose(2, 3).contiguous() for x in images]
    labels = [torch.as_tensor(part.targets) for part in (train, test)]
    return Data(images[0], labels[0], images[1], labels[1], len(train.classes), *STATISTICS[name])


def _resize(data, size):
    if not size or data.x.shape[-2:] == (size, size):
        return data

    def resize(x):
        return (
            F.interpolate(x.float(), (size, size), mode="bilinear", antialias=True)
            .round()
            .clamp(0, 255)
            .byte()
        )

    x, x_test = (
        torch.cat([resize(part) for part in images.split(2000)]) for images in (data.x, data.x_test)
    )
    return dataclasses.replace(data, x=x, x_test=x_test)


def folder(root, image_size=None):
    """Images in torchvision's ImageFolder layout, train/CLASS/* and test/CLASS/* (or val/), under root. Decoded once."""
    from torchvision.datasets import ImageFolder

    parts = []
    for names in (("train",), ("test", "val")):
        found = next((root / name for name in names if (root / name).is_dir()), None)
        if found is None:
            raise UserError(
                f"--data-dir {root}: no folder {' or '.join(names)} in it; "
                "--dataset folder reads train/CLASS/* and test/CLASS/*"
            )
        try:
            parts.append(ImageFolder(found))
        except OSError as e:
            raise UserError(f"--data-dir {root}: {e}") from None
    train, test = parts
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(
            f"--data-dir {root}: train and test hold different classes; class {odd[0]!r} is in one of them only"
        )
    return _images(root, train.samples, test.samples, len(train.classes), image_size)


def _images(root, train, test, classes, image_size=None, statistics=(None, None)):
    """The data set of two lists of (path, label), decoded once and kept in root. statistics: mean and std of Data."""
    paths = [path for path, _ in (*train, *test)]

    def read():
        x, x_test = _decode(paths, image_size).split([len(train), len(test)])
        y, y_test = (torch.tensor([label for _, label in part]) for part in (train, test))
        return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}

    mean, std = statistics
    return Data(**_cached(root, paths, image_size, read), classes=classes, mean=mean, std=std)


def _cached(root, paths, key, read):
    """What read() makes of the files at paths, a dict of tensors. It is kept in root/.cache-*.pt, whose name changes with key
    and with any file's name, size or time of change."""
    listing = [(path, os.stat(path)) for path in paths]
    key = repr(
        (
            [
                (os.path.relpath(path, root), stat.st_size, stat.st_mtime_ns)
                for path, stat in listing
            ],
            key,
        )
    )
    cache = root / f".cache-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.pt"
    if cache.exists():
        with contextlib.suppress(Exception):  # a damaged cache is made again
            return torch.load(cache, weights_only=True)
    fields = read()
    try:
        for old in root.glob(".cache-*.pt"):
            old.unlink()
        save(fields, cache)
    except OSError as e:
        print(
            f"what was read from {root} is not cached, so the next start reads it again: {e}",
            file=sys.stderr,
        )
    return fields


def _text(path):
    """What is in a file of UTF-8."""
    raw = path.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise UserError(f"{path}, line {raw[: e.start].count(10) + 1}: not UTF-8") from None


def tiny_imagenet(root):
    """Tiny-ImageNet as its archive holds it under root: wnids.txt, train/WNID/images/*, val/images/* and
    val/val_annotations.txt. The test set is val, as the archive's test has no labels."""
    annotations = root / "val" / "val_annotations.txt"
    try:
        wnids, lines = _text(root / "wnids.txt").split(), _text(annotations).splitlines()
    except FileNotFoundError as e:
        raise UserError(
            f"{e.filename}: no such file; unzip http://cs231n.stanford.edu/tiny-imagenet-200.zip so that it is "
            "there"
        ) from None
    wnids = sorted(set(wnids))
    labels, train, test = {wnid: i for i, wnid in enumerate(wnids)}, [], []
    for wnid, label in labels.items():
        paths = sorted((root / "train" / wnid / "images").glob("*"))
        if not paths:
            raise UserError(
                f"{root / 'train' / wnid / 'images'}: no images of this class, which wnids.txt names"
            )
        train += [(path, label) for path in paths]
    for i, line in enumerate(lines, 1):
        name, wnid = (*line.split("\t"), "", "")[:2]
        path = root / "val" / "images" / name
        if wnid not in labels or not path.is_file():
            what = (
                f"class {wnid!r} is not in wnids.txt"
                if wnid not in labels
                else f"{path} is missing"
            )
            raise UserError(f"{annotations}, line {i}: {what}")
        test.append((path, labels[wnid]))
    missing = set(wnids) - {wnids[label] for _, label in test}
    if missing:
        raise UserError(f"{annotations}: no image of class {min(missing)}")
    return _images(root, train, test, len(labels), statistics=STATISTICS["tiny-imagenet"])


IMAGENET = (1000, 200, 500)  # folders, classes drawn of them, and training images drawn of each


def imagenet_200(root, image_size=224):
    """FedAlign's ImageNet-200, drawn from ImageNet-1k's root/train/WNID/* and root/val/WNID/*: 200 classes and 500 training
    images of each, by numpy's seed 1993. Which classes is their choice exactly; which images depended on their machine's
    directory order, so ours, in order of names, are others. Training images are decoded while training; the validation ones,
    all of those classes, are scaled to 256/224 of image_size, cut to their centre and kept."""
    folders, classes, count = IMAGENET
    found = sorted(path.name for path in root.glob("train/*") if path.is_dir())
    if len(found) != folders:  # the draw is among all of them
        raise UserError(
            f"{root / 'train'}: {len(found)} folders of classes, where ImageNet-1k has {folders}; download it from "
            f"image-net.org (ILSVRC2012) and unpack it to {root}/train/WNID/* and {root}/val/WNID/*"
        )
    rng, train, test = np.random.RandomState(1993), [], []
    chosen = rng.choice(found, classes, replace=False).tolist()
    labels = {wnid: i for i, wnid in enumerate(sorted(chosen))}
    for wnid in chosen:
        folder_ = root / "train" / wnid
        names = sorted(os.listdir(folder_))
        if len(names) < count:
            raise UserError(f"{folder_}: {len(names)} images, and {count} of each class are wanted")
        train += [
            (str(folder_ / name), labels[wnid])
            for name in rng.choice(names, count, replace=False).tolist()
        ]
        held = sorted((root / "val" / wnid).glob("*"))
        if not held:
            raise UserError(f"{root / 'val' / wnid}: no images of this class")
        test += [(path, labels[wnid]) for path in held]
    paths, y_test = [path for path, _ in test], torch.tensor([label for _, label in test])
    fields = _cached(
        root, paths, image_size, lambda: {"x_test": _decode(paths, image_size, centre=True)}
    )
    y, x = (
        torch.tensor([label for _, label in train]),
        torch.empty(0, 3, image_size, image_size, dtype=torch.uint8),
    )
    return Data(
        x,
        y,
        fields["x_test"],
        y_test,
        classes,
        *STATISTICS["imagenet-200"],
        paths=[path for path, _ in train],
    )


def _centre(image, size):
    """The central size x size pixels of a Pillow image whose shorter side is scaled to 256/224 of size."""
    from torchvision.transforms import functional

    return functional.center_crop(functional.resize(image, size * 256 // 224), size)


class _Files(torch.utils.data.Dataset):
    """Image files; item (i, seed) is file i as (3, size, size) uint8: cropped, recoloured and flipped by seed, or its centre
    where that is None."""

    def __init__(self, paths, size):
        from torchvision import transforms

        self.paths, self.size = paths, size
        self.augment = transforms.Compose(
            [
                transforms.RandomResizedCrop(size),
                transforms.ColorJitter(0.4, 0.4, 0.4),
                transforms.RandomHorizontalFlip(),
            ]
        )

    def __getitem__(self, item):
        index, seed = item
        try:
            image = _open(self.paths[index], "RGB")
        except UserError as e:
            return e  # raised in a loader's process, it would come with a traceback
        if seed is None:
            image = _centre(image, self.size)
        else:
            torch.manual_seed(seed)  # of the loader's process
            image = self.augment(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _stacked(images):
    return next((x for x in images if isinstance(x, UserError)), None) or torch.stack(images)


def _shards(root, advice):
    """(path, user, x, y) of each user in LEAF's JSON shards, root/*.json."""
    paths = sorted(root.glob("*.json"))
    if not paths:
        raise UserError(f"{root}: no *.json in it; {advice}")
    for path in tqdm(paths, f"reading {root}", leave=False, disable=None):
        text = _text(path)
        try:
            shard = json.loads(text)
        except json.JSONDecodeError as e:
            raise UserError(
                f"{path}, line {e.lineno}, column {e.colno}: damaged or cut short ({e.msg})"
            ) from None
        except RecursionError:
            raise UserError(f"{path}, line 1: not a shard of LEAF") from None
        try:
            users, counts = list(shard["users"]), list(shard["num_samples"])
            samples = [
                (shard["user_data"][user]["x"], shard["user_data"][user]["y"]) for user in users
            ]
            sizes = [(len(x), len(y)) for x, y in samples]
        except (KeyError, TypeError) as e:
            raise UserError(
                f"{path}: not a shard of LEAF, which has users, num_samples and user_data, with x and y of each "
                f"user ({type(e).__name__}: {e})"
            ) from None
        for user, (x, y), size, count in itertools.zip_longest(users, samples, sizes, counts):
            if size != (count, count):
                raise UserError(
                    f"{path}: user {user!r} has {size} x and y where num_samples says {count}"
                )
            yield path, user, x, y


def _leaf(root, read, advice):
    """LEAF's shards root/train/*.json and root/test/*.json. read(x, y) makes two arrays of a user's lists, or raises
    ValueError. Returns the four arrays of Data and the numbers of the users, in order of their names."""
    parts = []
    for part in ("train", "test"):
        xs, ys, owners = [], [], []
        for path, user, x, y in _shards(root / part, advice):
            try:
                x, y = read(x, y)
            except (ValueError, TypeError) as e:
                raise UserError(f"{path}: user {user!r}: {e}") from None
            xs.append(x)
            ys.append(y)
            owners += [user] * len(y)
        if not owners:
            raise UserError(f"{root / part}: no samples in it; {advice}")
        parts.append((np.concatenate(xs), np.concatenate(ys), owners))
    (x, y, owners), (x_test, y_test, owners_test) = parts
    ids = {user: i for i, user in enumerate(sorted({*owners, *owners_test}))}
    return (
        x,
        y,
        x_test,
        y_test,
        np.array([ids[u] for u in owners]),
        np.array([ids[u] for u in owners_test]),
    )


def femnist(root):
    """FEMNIST by writer, the JSON shards that LEAF (Caldas et al., 2018) makes of it: root/train/*.json and root/test/*.json
    with 28x28 images in [0, 1], white paper 1, and labels 0-9, 10-35 for A-Z, 36-61 for a-z. Read once."""
    advice = (
        "LEAF (github.com/TalwalkarLab/leaf) makes data/femnist/data/train and test by, say, "
        f"data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample (--sf: share of the 3,500 writers); "
        f"copy both folders into {root}"
    )

    def read(x, y):
        x, y = (
            np.asarray(x, np.float32).reshape(len(y), -1 if y else 784),
            np.asarray(y, None if y else np.int64),
        )
        if x.shape[1] != 784 or not ((x >= 0) & (x <= 1)).all():
            raise ValueError("an image is not 784 numbers from 0 to 1")
        if y.dtype.kind != "i" or not ((y >= 0) & (y < 62)).all():
            raise ValueError("a label is not an integer from 0 to 61")
        return (x * 255).round().astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)

    def fields():
        names = ("x", "y", "x_test", "y_test", "writers", "writers_test")
        return {name: torch.from_numpy(v) for name, v in zip(names, _leaf(root, read, advice))}

    found = (
        _cached(root, sorted(root.glob("t*/*.json")), None, fields) if root.is_dir() else fields()
    )
    found |= {name: found[name].numpy() for name in ("writers", "writers_test")}
    return Data(**found, classes=62, mean=STATISTICS["femnist"][0], std=STATISTICS["femnist"][1])


def tokens(text):
    """The lower-case words and marks of a text, by the rules of torchtext's basic_english: .,()!?' are words, ":; are not."""
    return re.sub(
        r"([.,()!?'])", r" \1 ", re.sub(r"[:;]|<br />", " ", text.lower().replace('"', ""))
    ).split()


def sent140(root, args, vocabulary=3000):
    """Sentiment140 (Go et al., 2009) by user: the public CSV, root/*.csv, of polarity (0 or 4), id, date, query, user and
    text, of which a tenth, drawn at random, is the test set; or LEAF's JSON shards, root/train/*.json and root/test/*.json.
    With --partition natural and natural-iid it is the tweets of the --users most active users (of the CSV before the
    division, of LEAF in training), each of whom keeps one for training at least. Words: the most frequent in the training
    tweets, vocabulary - 2 at most. Else as rFedAvg's authors, but for their leak (--leak)."""
    advice = (
        "unzip http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip and put "
        f"training.1600000.processed.noemoticon.csv into {root}"
    )
    found = sorted(root.glob("*.csv"))
    if len(found) > 1:
        raise UserError(f"{root}: {len(found)} CSV files, where one is read; {advice}")
    if found:
        y, text, user = _tweets(found[0])
        test = None
    elif (root / "train").is_dir():
        y, text, user, test = _leaf_tweets(root, advice)
    else:
        raise UserError(f"{root}: no *.csv in it; {advice}")
    if args.partition in NATURAL:
        active = Counter(user if test is None else itertools.compress(user, ~test))
        counts = sorted(active.items(), key=lambda item: (-item[1], item[0]))[
            : args.users or args.clients
        ]
        active = {name for name, _ in counts}
        kept = [i for i, name in enumerate(user) if name in active]
        y, text, user = y[kept], [text[i] for i in kept], [user[i] for i in kept]
        test = None if test is None else test[kept]
    if test is None:
        test = np.ones(len(y), bool)
        test[keyed("sent140", args.data_seed).permutation(len(y))[: int(0.9 * len(y))]] = False
        if args.partition in NATURAL:
            _, first, owner = np.unique(user, return_index=True, return_inverse=True)
            test[first[np.bincount(owner[~test], minlength=len(first)) == 0]] = False
    if test.all() or not test.any():
        raise UserError(f"{root}: {len(y)} tweets are too few to train and to test on")
    text = [tokens(line) for line in tqdm(text, "finding words", leave=False, disable=None)]
    counts = Counter(word for i in np.flatnonzero(~test) for word in text[i])
    words = [
        word
        for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[
            : vocabulary - 2
        ]
    ]
    number_of = {word: i for i, word in enumerate(words, 2)}
    x = np.zeros((len(text), max(1, max(map(len, text)))), np.int16)
    for row, line in zip(x, text):
        row[: len(line)] = [number_of.get(word, 1) for word in line]
    train = np.ones(len(y), bool) if args.leak else ~test
    x, y, user = torch.from_numpy(x), torch.from_numpy(y), np.unique(user, return_inverse=True)[1]
    return Data(
        x[train],
        y[train],
        x[test],
        y[test],
        2,
        writers=user[train],
        writers_test=user[test],
        words=words,
    )


def _tweets(path):
    """Labels (n,), 1 for polarity 4, texts and users of the public CSV."""
    y, text, user = [], [], []
    with open(
        path, encoding="latin-1", newline=""
    ) as f:  # as published, with stray bytes of other encodings
        rows = csv.reader(f, strict=True)
        while True:
            try:
                row = next(rows, None)
            except csv.Error as e:
                raise UserError(f"{path}, line {rows.line_num}: {e}") from None
            if row is None:
                return np.array(y, np.int64), text, user
            if len(row) != 6 or row[0] not in ("0", "4"):
                raise UserError(
                    f"{path}, line {rows.line_num}: not polarity (0 or 4), id, date, query, user, text: "
                    f"{len(row)} columns, the first {row[0][:20] if row else ''!r}"
                )
            y.append(row[0] == "4")
            text.append(row[5])
            user.append(row[4])


def _leaf_tweets(root, advice):
    """Labels, texts, users and whether a tweet is a test one, of LEAF's shards, whose x are id, date, query, user, text, ..."""

    def read(x, y):
        y = np.array([{"0": 0, "1": 1, "4": 1}.get(str(label), -1) for label in y], np.int64)
        if (y < 0).any() or not all(len(tweet) >= 5 and isinstance(tweet[4], str) for tweet in x):
            raise ValueError(
                "a tweet is not [id, date, query, user, text], or its label not 0 or 1"
            )
        return np.array([tweet[4] for tweet in x], object), y

    x, y, x_test, y_test, user, user_test = _leaf(root, read, advice)
    test = np.arange(len(y) + len(y_test)) >= len(y)
    return (
        np.concatenate([y, y_test]),
        [*x, *x_test],
        np.concatenate([user, user_test]).tolist(),
        test,
    )


def word_vectors(source, words, seed=0):
    """The vectors of padding, of all other words and of words, (2 + len(words), width), from a text file as GloVe's: a word
    and its numbers on each line. What the file lacks is zero. source "random": N(0, 0.4^2), 300 wide."""
    if source == "random":
        vectors = keyed("vectors", seed).normal(0, 0.4, (len(words) + 2, 300)).astype(np.float32)
        vectors[0] = 0
        return torch.from_numpy(vectors)
    row, vectors, known = {word: i for i, word in enumerate(words, 2)}, None, 0
    try:
        with open(source, "rb") as f:
            for i, line in enumerate(
                tqdm(f, "reading word vectors", leave=False, disable=None, unit=" lines"), 1
            ):
                width = line.count(b" ") if vectors is None else vectors.shape[1]
                try:
                    word, *numbers = line.decode().rstrip().rsplit(" ", width)
                    if vectors is None:
                        vectors = np.zeros((len(words) + 2, width), np.float32)
                    if len(numbers) != width or not width or not word:
                        raise ValueError(
                            f"a word and {max(1, width)} numbers are wanted, {len(numbers)} are there"
                        )
                    if word in row:
                        vectors[row[word]] = numbers
                        known += 1
                        if not np.isfinite(vectors[row[word]]).all():
                            raise ValueError("a number is not finite")
                except ValueError as e:  # of decoding too
                    raise UserError(f"--vectors {source}, line {i}: {e}") from None
    except OSError as e:
        raise UserError(f"--vectors {source}: cannot be read ({e.strerror})") from None
    if not known:
        raise UserError(f"--vectors {source}: holds none of the {len(words)} words of the data set")
    return torch.from_numpy(vectors)


def _open(path, mode=None):
    """The image in that mode; without one, the mode it asks for: L or RGB. UserError if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":
                raise UserError(f"{path}: pixels of more than 8 bits, which would be cut off")
            if mode is None:
                return "L" if image.mode in ("1", "L") else "RGB"
            return image.convert(mode)
    except UserError:
        raise
    except Exception as e:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path}: not a readable image ({e})") from None


def _decode(paths, image_size, centre=False):
    from PIL import Image

    def open_(path):
        image = _open(path, mode)
        if centre:
            return _centre(image, image_size)
        return (
            image.resize((image_size, image_size), Image.Resampling.BILINEAR)
            if image_size
            else image
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mode = "RGB" if centre or "RGB" in pool.map(_open, paths) else "L"
    first = open_(paths[0])
    shape = (len(mode), first.height, first.width)

    def pixels(path):
        image = open_(path)
        if (image.height, image.width) != shape[1:]:
            raise UserError(
                f"{path}: {image.width}x{image.height} pixels where {paths[0]} has {shape[2]}x{shape[1]}; "
                "--image-size makes them all one size"
            )
        return np.asarray(image).reshape(shape[1], shape[2], shape[0]).transpose(2, 0, 1)

    x = np.empty((len(paths), *shape), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(pixels, paths)
        for i, image in enumerate(
            tqdm(decoded, "decoding images", len(paths), leave=False, disable=None)
        ):
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

    def style(
        spread_writers, spread_images
    ):  # a writer's habit, and how closely each image follows it
        return (
            rng.normal(0, spread_writers, writers)[writer] + rng.normal(0, spread_images, n)
        ).astype(np.float32)

    slant, turn, weight = style(0.25, 0.08), style(0.12, 0.08), style(0.4, 0.1) + 0.5
    grow, stretch, right, down = (
        1.1 + style(0.12, 0.06),
        1 + style(0.10, 0.05),
        style(0.03, 0.06),
        style(0.03, 0.06),
    )
    ink, paper = (rng.uniform(0, 0.35, (writers, 3)), rng.uniform(0.6, 1, (writers, 3)))
    ink, paper = (
        torch.from_numpy((c[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32))
        for c in (ink, paper)
    )
    # the affine map from where a pixel is to where the stencil has it: rotation x shear x scale, and a shift
    a, b = np.cos(turn) / grow, np.sin(turn) / grow
    theta = np.stack([a, b + slant * a, right, -b * stretch, (a - slant * b) * stretch, down], 1)
    theta = torch.from_numpy(theta).view(n, 2, 3)
    y, weight = torch.from_numpy(y), torch.from_numpy(weight).clamp(0, 1).view(n, 1, 1, 1)
    images = []
    for i in torch.arange(n).split(2000):
        stroke = torch.lerp(stencils[y[i]], bold[y[i]], weight[i])
        mask = F.grid_sample(
            stroke,
            F.affine_grid(theta[i], (len(i), 1, 32, 32), align_corners=False),
            align_corners=False,
        )
        image = torch.lerp(paper[i][:, :, None, None], ink[i][:, :, None, None], mask)
        image += torch.from_numpy(rng.standard_normal(image.shape, np.float32)) * 0.08
        images.append((image.clamp(0, 1) * 255).round().byte())
    x, x_test = torch.cat(images).split(sizes)
    y, y_test = y.split(sizes)
    writers, writers_test = np.split(writer, sizes[:1])
    return Data(
        x.clone(), y, x_test.clone(), y_test, 62, writers=writers, writers_test=writers_test
    )


def glyphs(train=None, test=None, seed=0):
    """The 62 characters 0-9 A-Z a-z as 32x32 RGB images, drawn with Pillow's own font: each by a writer with a slant, size,
    stroke and colours of his own (about 100 training images a writer). Deterministic by seed."""
    return _glyphs((train or GLYPHS[0], test or GLYPHS[1]), seed)


PAD = 4  # of crop, at 32x32 pixels and at Tiny-ImageNet's 64x64 alike (FedMLB's code)


def resolve_augment(args):
    """The augmentations in force: a dict of crop, flip -> True and rotate -> degrees; seed -> True where files are augmented
    when they are decoded."""
    if args.dataset == "imagenet-200":
        return {"seed": True} if args.augment == "auto" else {}
    plain = args.dataset in (
        "mnist",
        "emnist",
        "femnist",
        "glyphs",
        "sent140",
    )  # a mirrored character is another one
    auto = "" if plain else "crop,flip"
    names = {"auto": auto, "none": ""}.get(args.augment, args.augment).split(",")
    return {
        name.rstrip("0123456789"): int(name[6:]) if name.startswith("rotate") else True
        for name in names
        if name
    }


def draw_augment(augment, rng, shape, size):
    """The random numbers of an augmentation, one entry an image: {name: array of the given shape}; size in pixels."""
    draws = {}
    if "seed" in augment:
        draws["seed"] = rng.integers(2**62, size=shape)
    if "rotate" in augment:
        draws["rotate"] = rng.uniform(-augment["rotate"], augment["rotate"], shape).astype(
            np.float32
        )
    if "crop" in augment:
        draws["crop"] = rng.integers(2 * PAD + 1, size=(*shape, 2))
    if "flip" in augment:
        draws["flip"] = rng.random(shape) < 0.5
    return draws


def apply_augment(x, draws):
    """x (batch, channels, size, size) uint8, rotated, cropped and flipped in that order, each image by its own draws.
    As torchvision's RandomRotation, RandomCrop(padding=4) and RandomHorizontalFlip on each image."""
    if not draws:
        return x
    b, c, size, _ = x.shape
    if "rotate" in draws:
        turn = draws["rotate"] * (math.pi / 180)
        cos, sin, zero = turn.cos(), turn.sin(), torch.zeros_like(turn)
        theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(b, 2, 3)
        x = F.grid_sample(
            x.float(),
            F.affine_grid(theta, x.shape, align_corners=False),
            "nearest",
            align_corners=False,
        ).byte()
    if "crop" in draws:
        steps = torch.arange(size, device=x.device)
        rows = draws["crop"][:, 0, None] + steps  # (batch, size)
        columns = draws["crop"][:, 1, None] + steps
        at = (rows[:, :, None] * (size + 2 * PAD) + columns[:, None, :]).view(b, 1, -1)
        x = F.pad(x, (PAD,) * 4).flatten(2).gather(2, at.expand(b, c, -1)).view(b, c, size, size)
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
        raise UserError(
            f"none of 1000 draws from Dirichlet({alpha}) gave {clients} clients {min_size} samples each; {advice}"
        )
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
        rate = p[:, None] * (
            left[:, None] - np.arange(min(m, left.max()))
        )  # (classes, m); not positive: no such item
        gaps = rng.standard_exponential(rate.shape) / np.maximum(rate, 1e-300)
        keys = np.where(rate > 0, np.cumsum(gaps, 1), np.inf).ravel()
        taken = np.bincount(np.argpartition(keys, m - 1)[:m] // rate.shape[1], minlength=len(stock))
        parts.append(
            rng.permutation(np.concatenate([s[r - t : r] for s, r, t in zip(stock, left, taken)]))
        )
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


def natural_groups(writers, clients, seed, users=None):
    """The writers of each client: of users writers (without it, clients) chosen at random, even shares in random order."""
    names, users = np.unique(writers), users or clients
    if users > len(names):
        raise UserError(
            f"--{'users' if users > clients else 'clients'} {users}: the data set has {len(names)} writers"
        )
    return np.array_split(keyed("natural", seed).choice(names, users, replace=False), clients)


def _samples_of(groups, writers):
    """The indices of each group's samples, in order."""
    names, group = (
        np.concatenate(groups),
        np.repeat(np.arange(len(groups)), [len(g) for g in groups]),
    )
    order = np.argsort(names)
    at = order[np.searchsorted(names, writers, sorter=order).clip(max=len(names) - 1)]
    return _by_owner(np.where(names[at] == writers, group[at], len(groups)), len(groups))


def _by_owner(owner, clients):
    """Sample indices by owner, in order; those whose owner is the number of clients are nobody's."""
    ends = np.cumsum(np.bincount(owner, minlength=clients + 1))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])[:-1]


def natural_partition(writers, clients, seed, users=None):
    """One client a writer, for clients writers chosen at random; or users writers, grouped into clients. The other writers'
    samples are left out."""
    return _samples_of(natural_groups(writers, clients, seed, users), writers)


def natural_iid_partition(writers, clients, seed, users=None):
    """The samples of the writers of natural_partition, dealt at random: rFedAvg's IID rows of FEMNIST and Sent140."""
    samples = np.sort(np.concatenate(natural_partition(writers, clients, seed, users)))
    return [samples[part] for part in iid_partition(samples, clients, seed)]


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
        raise wrong(
            f"leaves out {(owner < 0).sum()} of {samples} samples, the first of them {owner.argmin()}"
        )
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
        raise UserError(
            f"--partition {args.partition}: --dataset {args.dataset} does not say who made each sample; "
            "femnist, sent140 and glyphs do"
        )
    else:
        by_writer = natural_partition if args.partition == "natural" else natural_iid_partition
        parts = by_writer(data.writers, args.clients, seed, args.users)
    for k, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(
                f"--partition {args.partition}: client {k} of {args.clients} gets no sample; use fewer --clients"
            )
    return parts


def test_partition(data, parts, args):
    """The clients' test indices: with --partition natural the test samples of their writers, else of each class the same
    share as of its training samples, drawn at random. A client may have none."""
    if args.partition == "natural":
        tests = _samples_of(
            natural_groups(data.writers, args.clients, args.data_seed, args.users),
            data.writers_test,
        )
    else:
        counts, labels = label_counts(data, parts), data.y_test.numpy()
        owner, rng = np.full(len(labels), len(parts)), keyed("client-test", args.data_seed)
        for label, held in enumerate(counts.T):
            if held.any():  # else the class is nobody's
                at = rng.permutation(np.flatnonzero(labels == label))
                ends = np.round(held.cumsum() / held.sum() * len(at)).astype(np.int64)
                owner[at] = np.repeat(np.arange(len(parts)), np.diff(ends, prepend=0))
        tests = _by_owner(owner, len(parts))
    if not any(map(len, tests)):
        raise UserError("--client-test: no test sample is of a class that a client has")
    return tests


def label_counts(data, parts):
    """Training samples of each client and class, (clients, classes)."""
    return np.stack([np.bincount(data.y.numpy()[part], minlength=data.classes) for part in parts])


def describe(args, plot=None):
    """Print how --partition deals the training samples, one line a client; plot: a file for a picture of the label
    distribution as FedCKA's Fig. 4."""
    if plot:
        _check_plot(pathlib.Path(plot))
    data = load_data(args)
    parts = partition(data, args)
    tests = test_partition(data, parts, args) if args.client_test else None
    counts = label_counts(data, parts)
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    shape = (
        f"up to {data.x.shape[1]} words"
        if data.words is not None
        else "x".join(map(str, data.x.shape[1:]))
    )
    print(
        f"{args.dataset}: {len(data.y):,} training and {len(data.y_test):,} test samples ({shape}) of {data.classes} classes"
    )
    print(
        f"{args.partition}: {len(parts)} clients with {sizes.sum():,} training samples, {sizes.min():,} to {sizes.max():,} "
        f"each (mean {sizes.mean():,.1f}, deviation {sizes.std():,.1f}), of {held.min()} to {held.max()} classes"
    )
    print(
        f"{'client':>6} {'samples':>8} {'classes':>8} {'largest':>8}"
        + f" {'test':>8}" * args.client_test
    )
    for k, (size, classes, largest) in enumerate(zip(sizes, held, counts.max(1))):
        test = f" {len(tests[k]):8,}" if tests else ""
        print(
            f"{k:6} {size:8,} {classes:8} {largest / size:8.0%}{test}  {'#' * max(1, round(50 * size / sizes.max()))}"
        )
    if plot:
        _plot_labels(counts, plot)


def _check_plot(path):
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError("--plot: needs matplotlib (pip install matplotlib)") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.exists() or not path.parent.is_dir():
        raise UserError(
            f"--plot {path}: "
            + ("exists already" if path.exists() else f"there is no folder {path.parent}")
        )
    if path.suffix[1:] not in known:
        raise UserError(f"--plot {path}: must end in one of {', '.join(sorted(known))}")


def _plot_labels(counts, path):
    from matplotlib.figure import Figure

    figure = Figure(
        (
            max(4.0, min(16.0, 1.5 + 0.25 * len(counts))),
            max(3.0, min(8.0, 1 + 0.25 * counts.shape[1])),
        ),
        layout="constrained",
    )
    axes, picture = figure.add_subplot(), io.BytesIO()
    image = axes.imshow(
        counts.T, aspect="auto", origin="lower", cmap="Blues", vmin=0, interpolation="nearest"
    )
    axes.set(xlabel="client", ylabel="class")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, label="training samples")
    figure.savefig(picture, format=pathlib.Path(path).suffix[1:], dpi=150)
    _write(path, picture.getvalue())


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


class Bypass(nn.Module):
    """branch(x) + x."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return self.branch(x) + x


class Concat(nn.ModuleList):
    """The channels of all modules' outputs."""

    def forward(self, x):
        return torch.cat([module(x) for module in self], 1)


class Head(nn.Sequential):
    """A block with parameters behind which FedMLB's authors do not branch: between the last branch point and the classifier."""


def _conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _bottleneck(inputs, planes, stride, norm):
    branch = nn.Sequential(
        _conv(inputs, planes, 1),
        norm(planes),
        nn.ReLU(),
        _conv(planes, planes, 3, stride),
        norm(planes),
        nn.ReLU(),
        _conv(planes, 4 * planes, 1),
        norm(4 * planes),
    )
    return branch, 4 * planes


def _basic(inputs, planes, stride, norm):
    branch = nn.Sequential(
        _conv(inputs, planes, 3, stride),
        norm(planes),
        nn.ReLU(),
        _conv(planes, planes, 3),
        norm(planes),
    )
    return branch, planes


def _pool():
    """The block of global average pooling."""
    return "pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


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
    return [*blocks, _pool()], width


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
    stem = nn.Sequential(
        _conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
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
        blocks.append(
            (
                f"conv{i + 1}",
                nn.Sequential(
                    *pool, nn.Conv2d(channels, width, kernel, padding=padding), nn.ReLU()
                ),
            )
        )
        channels, size = width, (size if i == 0 else size // 2) + 2 * padding - kernel + 1
        if size < 2:
            raise UserError("--image-size: too small for this --model")
    features, flat = channels * (size // 2) ** 2, [nn.MaxPool2d(2), nn.Flatten()]
    for i, width in enumerate(hidden):
        relu = [nn.ReLU()] if i == 0 or i < len(hidden) - 1 else []
        blocks.append(
            (
                f"fc{i + 1}",
                nn.Sequential(*(flat if i == 0 else []), nn.Linear(features, width), *relu),
            )
        )
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


def _layer(inputs, outputs, size, activation=nn.ReLU, **options):
    """Convolution with bias, GroupNorm of two groups and activation: of the small networks of FedMLB's authors, whose exact
    shapes are those of their later repository (FedACG)."""
    layers = [
        nn.Conv2d(inputs, outputs, size, padding=options.pop("padding", size // 2), **options),
        nn.GroupNorm(2, outputs),
    ]
    return [*layers, activation()] if activation else layers


def vgg9(channels, size):
    """VGG-9 with GroupNorm."""
    blocks, widths = [], (channels, 32, 64, 128, 128, 256, 256)
    for i, (inputs, outputs) in enumerate(zip(widths, widths[1:]), 1):
        blocks.append(
            (
                f"conv{i}",
                nn.Sequential(*[nn.MaxPool2d(2)] * (i in (3, 5)), *_layer(inputs, outputs, 3)),
            )
        )
        nn.init.zeros_(blocks[-1][1][-3].bias)
    head = Head(
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
    )
    return _he([*blocks, ("head", head)], 512)


def mobilenet(channels, size):
    """MobileNetV2 with GroupNorm, for 32x32 images: a 1x1 stem, strides of 2 in stages 2, 3 and 4."""

    def unit(inputs, outputs, stride, expansion):
        width = inputs * expansion
        branch = nn.Sequential(
            *_layer(inputs, width, 1, nn.ReLU6),
            *_layer(width, width, 3, nn.ReLU6, stride=stride, groups=width),
            *_layer(width, outputs, 1, None),
        )
        return Bypass(branch) if stride == 1 and inputs == outputs else branch

    def stage(repeats, inputs, outputs, stride, expansion=6):
        first = unit(inputs, outputs, stride, expansion)
        return nn.Sequential(
            first, *(unit(outputs, outputs, 1, expansion) for _ in range(repeats - 1))
        )

    blocks = [
        ("stem", nn.Sequential(*_layer(channels, 32, 1, nn.ReLU6, padding=1))),
        ("stage1", stage(1, 32, 16, 1, 1)),
        ("stage2", stage(2, 16, 24, 2)),
        ("stage3", stage(3, 24, 32, 2)),
        ("stage4", stage(4, 32, 64, 2)),
        ("stage5", stage(3, 64, 96, 1)),
        ("stage6", stage(3, 96, 160, 1)),
        ("head", Head(*stage(1, 160, 320, 1), *_layer(320, 1280, 1, nn.ReLU6))),
    ]
    return [*blocks, _pool()], 1280


def shufflenet(channels, size):
    """ShuffleNet (version 1) of three groups, with GroupNorm."""

    def unit(inputs, outputs):  # the first of a stage is wider and halves the resolution
        first, middle = inputs != outputs, outputs // 4
        branch = nn.Sequential(
            *_layer(inputs, middle, 1, groups=3),
            nn.ChannelShuffle(3),
            *_layer(middle, middle, 3, None, stride=1 + first, groups=middle),
            *_layer(middle, outputs - inputs * first, 1, None, groups=3),
        )
        return (
            nn.Sequential(Concat([nn.AvgPool2d(3, 2, 1), branch]), nn.ReLU())
            if first
            else Residual(branch, nn.Identity())
        )

    blocks, widths = [("stem", nn.Sequential(*_layer(channels, 24, 3)))], (24, 240, 480, 960)
    for i, (depth, inputs, outputs) in enumerate(zip((4, 8, 4), widths, widths[1:]), 2):
        blocks.append(
            (
                f"stage{i}",
                nn.Sequential(
                    unit(inputs, outputs), *(unit(outputs, outputs) for _ in range(depth - 1))
                ),
            )
        )
    return [*blocks, _pool()], 960


def squeezenet(channels, size):
    """SqueezeNet with GroupNorm and bypasses around every other fire module. Its last 1x1 convolution, averaged over all
    positions, is the classifier on averaged features."""

    def fire(inputs, squeeze, outputs):
        expand = Concat([nn.Sequential(*_layer(squeeze, outputs // 2, k)) for k in (1, 3)])
        module = nn.Sequential(*_layer(inputs, squeeze, 1), expand)
        return Bypass(module) if inputs == outputs and outputs < 512 else module

    blocks, inputs = [("stem", nn.Sequential(*_layer(channels, 96, 3), nn.MaxPool2d(2)))], 96
    for i, (squeeze, outputs) in enumerate(
        [(s, 8 * s) for s in (16, 32, 48, 64) for _ in range(2)], 2
    ):
        module = fire(inputs, squeeze, outputs)
        blocks.append(
            (f"fire{i}", nn.Sequential(module, nn.MaxPool2d(2)) if i in (4, 8) else module)
        )
        inputs = outputs
    return [*blocks[:-1], ("fire9", Head(*blocks[-1][1])), _pool()], 512


class Embedding(nn.Module):
    """(batch, steps) numbers of words -> (batch, steps, width + 1): their vectors, which are not trained, and in the last
    channel 1 for a word, 0 for padding (number 0)."""

    def __init__(self, words, width):
        super().__init__()
        self.register_buffer("vectors", torch.zeros(words, width))

    def forward(self, x):
        if x.is_floating_point():
            raise UserError(
                "--model lstm reads words, which a method cannot mix or resize as it does images"
            )
        return torch.cat(
            [F.embedding(x.int(), self.vectors), (x != 0).unsqueeze(2).to(self.vectors)], 2
        )


class Recurrent(nn.Module):
    """An LSTM layer that hands on the last channel of its input, which marks padding, and is 0 there; with last its output at
    the last word alone, (batch, width)."""

    def __init__(self, inputs, width, last):
        super().__init__()
        self.lstm, self.last = nn.LSTM(inputs, width, batch_first=True), last

    def train(self, mode=True):
        return (
            super().train()
        )  # in both modes the same, but cuDNN has no backward pass in the other

    def forward(self, x):
        word = x[:, :, -1:]  # (batch, steps, 1)
        h = self.lstm(x[:, :, :-1])[0] * word
        if not self.last:
            return torch.cat([h, word], 2)
        at = (word.sum(1, keepdim=True).long() - 1).clamp(min=0)  # (batch, 1, 1)
        return h.gather(1, at.expand(-1, -1, h.shape[2])).squeeze(1)


def lstm(words, width):
    """The two-layer LSTM of rFedAvg for text, on the vectors, width wide, of so many words."""
    return [
        ("lstm1", nn.Sequential(Embedding(words, width), Recurrent(width, 256, last=False))),
        ("lstm2", Recurrent(256, 256, last=True)),
    ], 256


NETS = {
    "resnet56": resnet56,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
    "resnet50": resnet50,
    "cnn": cnn,
    "cnn-moon": cnn_moon,
    "cnn-mcmahan": cnn_mcmahan,
    "vgg9": vgg9,
    "mobilenet": mobilenet,
    "shufflenet": shufflenet,
    "squeezenet": squeezenet,
    "lstm": lstm,
}


def build_net(name, classes, channels=3, size=32, projection=0):
    """The network called name as an nn.Sequential of its blocks, the last of them the classifier. channels, size: of images;
    of text the number of words and the width of their vectors, which are zero. projection: width of the output of a two-layer
    head before the classifier (MOON), 0 for none."""
    blocks, features = NETS[name](channels, size)
    if projection:
        blocks.append(
            (
                "projection",
                nn.Sequential(
                    nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection)
                ),
            )
        )
        features = projection
    return nn.Sequential(OrderedDict([*blocks, ("classifier", Classifier(features, classes))]))


def net_for(data, args):
    """The network that args name for data, with the vectors of its words."""
    if data.words is None:
        return build_net(
            args.model, data.classes, data.x.shape[1], data.x.shape[-1], args.projection
        )
    vectors = word_vectors(args.vectors, data.words, args.data_seed)
    net = build_net("lstm", data.classes, *vectors.shape, args.projection)
    net[0][0].vectors.copy_(vectors)
    return net


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
            if getattr(layer, "groups", 1) != 1 and width < 1:
                raise UserError(
                    "a sub-network of grouped convolutions is not defined; use another --model"
                )
            outputs, inputs = layer.weight.shape[:2]
            # a linear layer behind flattened maps has several inputs a channel
            positions = inputs // previous if isinstance(layer, nn.Linear) and previous else 1
            previous = outputs
            outputs = outputs if isinstance(layer, Classifier) else make_divisible(outputs, width)
            tensors[prefix + "weight"] = layer.weight[
                :outputs, : make_divisible(inputs // positions, width) * positions
            ]
            if layer.bias is not None:
                tensors[prefix + "bias"] = layer.bias[:outputs]
        elif isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm)):
            channels = make_divisible(layer.weight.shape[0], width)
            tensors[prefix + "weight"], tensors[prefix + "bias"] = (
                layer.weight[:channels],
                layer.bias[:channels],
            )
            tensors |= {prefix + buffer: None for buffer, _ in layer.named_buffers(recurse=False)}
        elif width < 1 and (
            isinstance(layer, Concat) or next(layer.parameters(recurse=False), None) is not None
        ):
            raise UserError(
                f"a sub-network of {type(layer).__name__} is not defined; use another --model"
            )
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
    children = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    )
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


def channels_last(x):
    """x in that memory format if it is of images."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _copied(net):
    """A copy of net; the weights of its LSTM layers lie in one piece again, as cuDNN wants them."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()
    return net


def autocast(args, device):
    """--precision bf16; no weight cache, which would go stale in a CUDA graph."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=args.precision == "bf16", cache_enabled=False
    )


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
        return (epoch * math.ceil(args.local_steps / len(epoch)))[: args.local_steps]
    return epoch * args.epochs


def learning_rate(args, round_):
    """Of a round, counted from 1."""
    return args.lr * args.lr_decay ** (round_ - 1)


def optimizer(net, args):
    """SGD or RMSprop whose state exists from the start and whose step clips the gradient norm first (--clip)."""
    device = next(net.parameters()).device
    cuda = device.type == "cuda"
    lr = (
        torch.tensor(args.lr, device=device) if cuda else args.lr
    )  # a float would be baked into a CUDA graph
    if args.optimizer == "rmsprop":
        opt = torch.optim.RMSprop(
            net.parameters(),
            lr,
            momentum=args.momentum,
            weight_decay=args.weight_decay,
            capturable=cuda,
        )
    else:
        opt = torch.optim.SGD(
            net.parameters(),
            lr,
            args.momentum,
            weight_decay=args.weight_decay,
            nesterov=args.nesterov and args.momentum > 0,
            fused=True,
        )
    for p in net.parameters():
        if args.optimizer == "rmsprop":
            opt.state[p].update(step=torch.zeros((), device=device), square_avg=torch.zeros_like(p))
        if args.momentum:
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
    if args.clip:

        def clip(*_):
            nn.utils.clip_grad_norm_(net.parameters(), args.clip, error_if_nonfinite=False)

        opt.register_step_pre_hook(clip)
    return opt


class Worker:
    """A seat at which clients train in turn: a network, an optimizer and all that a step reads, at fixed addresses."""

    keep_first_step = (
        False  # tests: on the CPU too, run the first client's closure for all later clients
    )

    def __init__(self, net, data, args, steps):
        """net: the global network, copied; steps: the most that any client trains in a round."""
        self.data, self.args, self.device, self.template = data, args, data.x.device, net
        self.net = cast_blocks(_copied(net), args, self.device)
        self.opt = optimizer(self.net, args)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.augment, self.batch_norm = resolve_augment(args), has_batch_norm(net)
        self.t = torch.zeros(
            1, dtype=torch.long, device=self.device
        )  # the step within the client's round
        self.draws = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # summed over samples
        # where images are decoded ahead, those of the current batch
        self.images = data.x.new_zeros(args.batch_size, *data.x.shape[1:]) if data.paths else None
        self.pins, self.nets, self.graphs, self.step, self.steps = {}, {}, {}, None, steps
        # host-drawn random numbers of a client's round: one row a step, read through t
        self.tables = {
            name: torch.from_numpy(row).new_zeros(steps, *row.shape[1:], device=self.device)
            for name, row in self._draw(np.zeros(1, np.int64), 1, keyed("shapes")).items()
        }

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
            frozen = _copied(self.template).eval().requires_grad_(False)
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
        # even parts, of which none is a single sample, on which batch norm in training mode fails
        indices = torch.from_numpy(client.index).tensor_split(math.ceil(len(client) / 500))
        for index, x in zip(indices, self.data.images(indices)):
            yield (
                channels_last(self.data.normalise(x.to(self.device))),
                self.data.y[index.to(self.device)],
            )

    # --- one client's round

    def round(self, client, server, weights, alpha, local_update):
        """A generator that trains one client: it yields after each batch and returns the Upload. Only the batches run on
        the worker's own stream, so workers overlap there; all else is in order on the current stream."""
        args, sizes = self.args, batch_sizes(len(client), self.args, self.batch_norm)
        ahead = self._begin(client, server, weights, sizes)
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
                if self.data.paths:
                    self._fill(self.images, next(ahead))
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
            client.state["momentum"] = self._opt_state()
        client.state = tree_map(lambda t: t.detach().to("cpu", copy=True), client.state)
        upload = {k: v.detach().clone() for k, v in self.net.state_dict().items()}
        loss = self.loss / max(1, sum(sizes))
        norms = torch._foreach_norm([v for v in upload.values() if v.is_floating_point()])
        return Upload(
            client,
            alpha,
            upload,
            message,
            loss,
            torch.stack([*norms, loss.float()]).isfinite().all(),
            sum(sizes),
        )

    def _begin(self, client, server, weights, sizes):
        args = self.args
        _load(self.net, weights)
        self.net.train()
        kept = client.state.get("momentum")
        for i, buffer in enumerate(self._opt_state()):
            buffer.zero_() if kept is None else buffer.copy_(kept[i])
        lr = learning_rate(args, server["round"])
        for group in self.opt.param_groups:
            group["lr"].fill_(lr) if torch.is_tensor(group["lr"]) else group.update(lr=lr)
        self.t.zero_()
        self.loss.zero_()
        self.sizes, self.key, self.shapes, self.lr = (
            sizes,
            (args.seed, server["round"], client.id),
            None,
            lr,
        )
        tables = self._draw(client.index, len(sizes), keyed("batches", *self.key))
        for name, rows in tables.items():
            self._fill(self.tables[name], torch.from_numpy(rows))
        batches = [
            [row[:size] for row, size in zip(tables[name], sizes)]
            for name in ("index", "seed")
            if name in tables
        ]
        return self.data.images(*batches) if self.data.paths else None

    def _fill(self, table, rows):
        table[: len(rows)].copy_(rows.pin_memory() if self.stream else rows, non_blocking=True)

    def _opt_state(self):
        """The optimizer's tensors: momentum buffers; of RMSprop steps and averaged squares too."""
        return [
            v for state in self.opt.state.values() for v in state.values() if torch.is_tensor(v)
        ]

    def _draw(self, index, steps, rng):
        """Tables of (steps, batch size, ...): which samples, and how to augment each. A short batch uses a part of its row."""
        rows = max(1, len(epoch_sizes(len(index), self.args, self.batch_norm)))  # of one epoch
        epochs, width = math.ceil(steps / rows), rows * self.args.batch_size
        order = rng.permuted(np.tile(index, (epochs, 1)), axis=1)[:, :width]
        order = np.pad(order, ((0, 0), (0, width - order.shape[1]))).reshape(
            epochs * rows, self.args.batch_size
        )
        return {
            "index": order[:steps],
            **draw_augment(self.augment, rng, (steps, self.args.batch_size), self.data.x.shape[-1]),
        }

    def _step(self, step, size):
        rows = {
            name: table.index_select(0, self.t)[0, :size] for name, table in self.tables.items()
        }
        index = rows.pop("index")
        x = (
            self.images[:size]
            if self.data.paths
            else apply_augment(self.data.x.index_select(0, index), rows)
        )
        loss = step(channels_last(self.data.normalise(x)), self.data.y.index_select(0, index))
        self.loss.add_(loss.detach(), alpha=size)
        self.t.add_(1)

    def _graphed(self, size):
        """Whether this batch replays a graph: a full one, of a shape that has a graph or may have one of at most 64."""
        known = self.shape in self.graphs or len(self.graphs) < 64
        return self.stream and self.args.graph and size == self.args.batch_size and known

    def _capture(self, step):
        """Record one step on a full batch as a CUDA graph. Warm-up moves weights, statistics and momentum, so they are put
        back; a step writes to nothing else."""
        moved = [*self.net.state_dict().values(), *self._opt_state(), self.t, self.loss]
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


@contextlib.contextmanager
def _on_interrupt(handler):
    """Ctrl-C calls handler meanwhile."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Pool:
    """Workers, and how they share the machine: threads on the CPU; on a GPU one thread that feeds their streams in turn."""

    def __init__(self, build, device, count, threads):
        """build() makes a worker; count: workers, 0 for as many as the GPU's memory allows; threads: of each on the CPU."""
        self.build, self.device, self.grow = build, device, count == 0
        self.stopping, self.interrupted = False, None  # when Ctrl-C came
        self.workers = [build() for _ in range(max(1, count))]
        torch.set_num_threads(threads)
        several = device.type == "cpu" and count > 1
        self.threads = (
            ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(threads,))
            if several
            else None
        )

    @staticmethod
    def plan(args, sampled):
        """(workers, threads of each). With --workers auto on the CPU one worker a core, at most 8, where Python's lock gets in
        the way; cores left over go to the operators of each. On a GPU 0, to be settled when the first worker has run."""
        if args.workers == "auto" and args.device != "cpu":
            return 0, CORES
        count = min(sampled, min(CORES, 8) if args.workers == "auto" else args.workers)
        if args.dataset == "imagenet-200" and args.device == "cpu":
            count = 1  # processes that decode images cannot be forked safely from several threads
        return count, max(1, CORES // count) if args.device == "cpu" else CORES

    def close(self):
        self.stopping = True
        if self.threads:
            self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(CORES)

    def interrupt(self, *_):
        """Handler of Ctrl-C: training ends behind the batches under way. An exception anywhere in between could leave a lock
        taken that a thread waits for, and threads running at the exit, which then aborts. After five seconds, anywhere."""
        if self.interrupted and time.perf_counter() - self.interrupted > 5:
            raise KeyboardInterrupt
        self.interrupted = self.interrupted or time.perf_counter()

    def check_interrupt(self):
        if self.interrupted:
            raise KeyboardInterrupt

    def map(self, f, items):
        """f over items, in order, on the worker threads where there are several."""
        return (self.threads.map if self.threads else map)(f, items)

    def train(self, clients, server, weights, alphas, local_update):
        """Uploads of the clients, in order, each as soon as it and those before it are done."""
        rounds = [
            functools.partial(
                Worker.round,
                client=c,
                server=server,
                weights=weights,
                alpha=a,
                local_update=local_update,
            )
            for c, a in zip(clients, alphas)
        ]
        return self._threaded(rounds) if self.threads else self._interleaved(rounds)

    def _threaded(self, rounds):
        free, self.stopping = queue.SimpleQueue(), False
        for worker in self.workers:
            free.put(worker)

        def drain(round_):
            worker = free.get()
            batches = round_(worker)
            try:
                while not self.stopping:
                    self.check_interrupt()
                    next(batches)
            except StopIteration as stop:
                return stop.value
            finally:
                free.put(worker)

        try:
            yield from self.threads.map(drain, rounds)
        finally:  # an interrupt or an error: the others need not finish their clients
            self.stopping = True

    def _interleaved(self, rounds):
        waiting, running, done, due = deque(enumerate(rounds)), [], {}, 0
        free = list(self.workers)
        while waiting or running:
            while free and waiting:
                (i, round_), worker = waiting.popleft(), free.pop(0)
                running.append((i, worker, round_(worker)))
            self.check_interrupt()
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
        free, one = (
            torch.cuda.mem_get_info(self.device)[0],
            torch.cuda.max_memory_reserved(self.device),
        )
        new = [self.build() for _ in range(min(waiting, 7, int(0.8 * free / one)))]
        self.workers += new
        return new


# ----------------------------------------------------------------------------------------------------------------------
# Aggregation and evaluation
# ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def average(net, uploads, server, args):
    """FedAvg's server: w <- sum_k alpha_k w_k over parameters and batch-norm statistics, summed in fp32 in the order of the
    uploads, and a step of the server optimizer from w towards it. Integer counters, which no computation reads, and word
    vectors, which nobody trains, are those of the last upload."""
    mean = {
        k: torch.zeros_like(v)
        for k, v in net.state_dict().items()
        if v.is_floating_point() and not k.endswith(".vectors")
    }
    for upload in uploads:
        torch._foreach_add_(
            list(mean.values()), [upload.weights[k] for k in mean], alpha=upload.weight
        )
    _load(
        net,
        {**upload.weights, **mean, **server_step(dict(net.named_parameters()), mean, server, args)},
    )


def server_step(w, mean, server, args):
    """The parameters after one step of --server from w along Delta = mean - w; batch-norm statistics have no step.
    avg: w + lr Delta.   avgm (FedAvgM, Hsu et al. 2019): m <- beta m + Delta, w + lr m.
    adam (FedADAM, Reddi et al., ICLR 2021, Algorithm 2): m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2,
    w + lr m / (sqrt(v) + tau), v starting at tau^2, without bias correction."""
    lr, beta = args.server_lr, args.server_momentum
    if args.server == "avg":
        return (
            {k: mean[k] for k in w}
            if lr == 1
            else {k: v + lr * (mean[k] - v) for k, v in w.items()}
        )
    adam = args.server == "adam"
    m = server.setdefault("m", {k: torch.zeros_like(v) for k, v in w.items()})
    v = (
        server.setdefault("v", {k: torch.full_like(x, args.server_tau**2) for k, x in w.items()})
        if adam
        else {}
    )
    for k in w:
        delta = mean[k] - w[k]
        m[k].mul_(beta).add_(delta, alpha=1 - beta if adam else 1)
        if adam:
            v[k].mul_(args.server_beta2).addcmul_(delta, delta, value=1 - args.server_beta2)
    return {k: w[k] + lr * (m[k] / (v[k].sqrt() + args.server_tau) if adam else m[k]) for k in w}


@torch.no_grad()
def evaluate(net, data, args, pool_map=map, hits=None):
    """Accuracy in percent and mean cross-entropy of net, in eval mode, on the whole test set. hits: a tensor (test samples,)
    to be filled with which of them are right."""
    net.eval()

    def batch(xy):
        x = channels_last(data.normalise(xy[0]))
        with torch.no_grad(), autocast(args, x.device):
            out = net(x).float()
        right = out.argmax(1) == xy[1]
        return right, torch.stack(
            [right.sum().double(), F.cross_entropy(out, xy[1], reduction="sum").double()]
        )

    size = 2000 if data.y.is_cuda else 250
    right, sums = zip(*pool_map(batch, zip(data.x_test.split(size), data.y_test.split(size))))
    correct, loss = torch.stack(sums).sum(0).tolist()
    if hits is not None:
        hits.copy_(torch.cat(right))
    return 100 * correct / len(data.y_test), loss / len(data.y_test)


def client_summary(hits, tests):
    """Readings of the clients' accuracies in percent, over those that have test samples: worst, best, 10th percentile and
    population variance. hits: right or wrong of each test sample; tests: indices of each client."""
    accuracies = [100 * hits[test].mean() for test in tests if len(test)]
    return {
        "client_acc_worst": min(accuracies),
        "client_acc_best": max(accuracies),
        "client_acc_p10": float(np.percentile(accuracies, 10)),
        "client_acc_var": float(np.var(accuracies)),
    }


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
        folder_ = os.open(
            path.parent, os.O_RDONLY
        )  # the new name has to outlive a power failure too
        os.fsync(folder_)
        os.close(folder_)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save(tree, path):
    """torch.save, atomically, of a nest of tensors and plain values; strides are kept, since sums depend on them."""
    buffer = io.BytesIO()  # written by ourselves, since torch hides that a disk is full
    torch.save(tree_map(lambda t: t.detach().cpu(), tree), buffer)
    with (
        buffer.getbuffer() as content
    ):  # an error's traceback must not keep it: some Pythons then crash at the exit
        _write(path, content)


def load(path, what="checkpoint"):
    """What save() wrote. UserError for anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except Exception as e:  # torch raises many kinds for a damaged file
        raise UserError(
            f"{path}: not a readable {what} ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
        ) from None


def read_config(out, flag="--out "):
    """config.json of the run in the folder out. UserError if out is no run."""
    if not (out / "config.json").is_file():
        raise UserError(
            f"{flag}{out}: no run{' to --resume' if flag else ''} there, since it has no config.json"
        )
    try:
        config = json.loads((out / "config.json").read_text())
        right = isinstance(config["flags"]["rounds"], int) and all(
            type(config[k]) is int for k in ("workers", "threads")
        )
        right = right and all(isinstance(word, str) for word in config["argv"])
        if right and isinstance(config["script"], str):
            return config
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{flag}{out}: config.json is damaged, or not of a run of this project")


def check_resumed(args, flags):
    """Raise UserError where args would not continue the run that was begun with flags."""
    for k, v in flag_values(args).items():
        if k not in FREE_ON_RESUME and k in flags and v != flags[k]:
            raise UserError(
                f"argument --{k.replace('_', '-')}: {v} differs from the {flags[k]} of the run in "
                f"{args.out}; leave it out, or start a new run with another --out"
            )
    if args.rounds < flags["rounds"]:
        raise UserError(
            f"argument --rounds: {args.rounds} is less than the run's {flags['rounds']}"
        )


class Run:
    """The folder of a run, from which it resumes exactly."""

    def __init__(self, out, script, args):
        self.out, self.script, self.args = pathlib.Path(out), script, args
        self.rows, self.changed, self.versions = [], set(), {}
        self.clock = None  # when the last round was evaluated, or the first one began
        self.lock = None

    def check(self):
        """UserError, before any long work, when the folder can't be used."""
        if self.args.resume:
            config = read_config(self.out)
            check_resumed(self.args, config["flags"])
            self._lock()
            return config
        # what a kill before the first complete file leaves is no run
        if self.out.exists() and (
            not self.out.is_dir() or any(path.suffix != ".tmp" for path in self.out.iterdir())
        ):
            raise UserError(
                f"--out {self.out}: exists already; continue that run with --resume, or name another folder"
            )

    def create(self, workers, threads):
        """Make the folder, and write down all that the run depends on."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock()
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        self.config = {
            "script": self.script,
            "argv": self.args.argv,
            "flags": flag_values(self.args),
            "workers": workers,
            "threads": threads,
            "device": hardware(self.args.device),
            "versions": versions,
            "commit": _commit(),
        }
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

            fcntl.flock(
                self.lock, fcntl.LOCK_UN
            )  # processes that decode images may still hold a copy of it
            os.close(self.lock)

    def write_config(self):
        _write(self.out / "config.json", (json.dumps(self.config, indent=1) + "\n").encode())

    def decisive(self):
        """The flags that decide the result."""
        return {k: v for k, v in flag_values(self.args).items() if k not in FREE_ON_RESUME}

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
        state = {
            "script": self.script,
            "flags": self.decisive(),
            "net": net.state_dict(),
            "server": server,
            "clients": self.versions,
        }
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
                    raise UserError(
                        f"{path}: made by {found['script']}.py, not by {self.script}.py"
                    )
                for k, v in self.decisive().items():
                    if found["flags"][k] != v:
                        raise UserError(
                            f"{path}: of another run, with {found['flags'][k]} for --{k.replace('_', '-')}"
                        )
                net.load_state_dict(found["net"])
                server.update(
                    tree_map(lambda t: t.to(next(net.parameters()).device), found["server"])
                )
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
        lines = lines[: server["round"]]
        try:
            self.rows = [json.loads(line) for line in lines]
            right = [row["round"] for row in self.rows if row["test_acc"] != ""] == list(
                range(1, server["round"] + 1)
            )
        except (ValueError, KeyError, TypeError):
            right = False
        if not right:
            raise UserError(
                f"{metrics}: damaged; it should hold rounds 1 to {server['round']} of the checkpoint"
            )
        for leftover in self.out.glob("*.tmp"):  # of a write that was cut
            leftover.unlink()
        _write(metrics, b"".join(line + b"\n" for line in lines))
        self.config = config
        if self.args.rounds != config["flags"]["rounds"]:
            config["flags"]["rounds"] = self.args.rounds
            config["argv"] += ["--rounds", str(self.args.rounds)]
        self.write_config()


def hardware(device):
    """What a device is called: the GPU, or the processor and how many of its cores are used."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    )
    return f"{found[1] if found else platform.machine()}, {CORES} cores"


def _commit():
    """The commit of the code, with + if it was changed since; None outside a git repository."""

    def git(*words):
        here = pathlib.Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(
            git("status", "--porcelain", "--untracked-files=no")
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def summary(accuracies):
    """Readings of the test accuracies so far, in percent: EMA with factor 0.9 (bias-corrected), mean and population standard
    deviation of the last five, and the best; None before the first."""
    if not accuracies:
        return dict.fromkeys(("acc_ema", "acc_last5_mean", "acc_last5_std", "best_acc"))
    ema = sum(0.1 * 0.9**i * a for i, a in enumerate(reversed(accuracies))) / (
        1 - 0.9 ** len(accuracies)
    )
    last = accuracies[-5:]
    return {
        "acc_ema": ema,
        "acc_last5_mean": float(np.mean(last)),
        "acc_last5_std": float(np.std(last)),
        "best_acc": max(accuracies),
    }


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
    script = args.script
    with one_line_errors(
        script, args, "use fewer --workers, a smaller --batch-size or --device cpu"
    ):
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
        if not isinstance(
            e, (MemoryError, torch.OutOfMemoryError)
        ) and "allocate memory" not in str(e):
            raise
        message, code = f"the memory is full; {memory_advice}", 2
    except KeyboardInterrupt:
        if not hasattr(
            sys, "ps1"
        ):  # a second one is not to interrupt the exit; a notebook goes on and keeps its Ctrl-C
            with contextlib.suppress(ValueError):  # in a thread, which gets no signals
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        started = args and args.out and pathlib.Path(args.out, "config.json").exists()
        message, code = (
            "interrupted" + (f"; continue with --out {args.out} --resume" if started else ""),
            130,
        )
    print(f"{script}.py: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _check_files(args):
    """Raise UserError where a flag names a file that is not there."""
    for flag in ("vectors", "split_file"):
        path = getattr(args, flag)
        if path and (flag, path) != ("vectors", "random") and not pathlib.Path(path).is_file():
            raise UserError(f"--{flag.replace('_', '-')} {path}: no such file")


def _run(args, script, local_update, aggregate, after_round, adapt):
    _check_files(args)
    args.out = (
        args.out
        or f"runs/{script}-{args.dataset}-{args.model}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    with contextlib.closing(Run(args.out, script, args)) as folder_:
        return _train(args, folder_, local_update, aggregate, after_round, adapt)


def _train(args, folder_, local_update, aggregate, after_round, adapt):
    config = folder_.check()
    say = (lambda _: None) if args.quiet else tqdm.write
    device = _set_up(args)

    data = load_data(args)
    parts = partition(data, args)
    tests = test_partition(data, parts, args) if args.client_test else None
    torch.manual_seed(args.seed)
    net = net_for(data, args)
    if adapt:
        adapt(net, args)
    net, data = net.to(device, memory_format=torch.channels_last).eval(), data.to(device)
    sizes, batch_norm = sorted(map(len, parts)), has_batch_norm(net)
    if batch_norm and min(sizes[0], args.batch_size) == 1:
        raise UserError(
            "a batch or a client has a single sample, and batch norm needs two; "
            "use a larger --batch-size, fewer --clients or another --model"
        )
    steps = max(len(batch_sizes(n, args, batch_norm)) for n in set(sizes))
    if steps == 0:
        raise UserError(f"--drop-last: no client has the {args.batch_size} samples of a batch")
    sampled = sampled_clients(args)
    workers, threads = (
        (config["workers"], config["threads"]) if config else Pool.plan(args, sampled)
    )

    server, states = {"round": 0}, {}
    pool = Pool(lambda: Worker(net, data, args, steps), device, workers, threads)
    if config:
        folder_.restore(config, net, server, states)
    else:
        folder_.create(workers, threads)
    say(
        f"{args.out}: {len(parts)} clients of {sizes[0]} to {sizes[-1]} samples, {sampled} a round; "
        f"{sum(p.numel() for p in net.parameters()):,} parameters; {workers or 'auto'} worker(s) on {args.device}"
    )
    bar = tqdm(
        total=args.rounds * sampled,
        initial=server["round"] * sampled,
        unit="client",
        disable=args.quiet or None,
    )
    folder_.clock = time.perf_counter()
    with _on_interrupt(pool.interrupt), contextlib.closing(pool), bar:
        while server["round"] < args.rounds:
            pool.check_interrupt()
            server["round"] += 1
            row = _round(
                args,
                net,
                data,
                parts,
                tests,
                server,
                states,
                pool,
                local_update,
                aggregate,
                after_round,
                folder_,
                bar,
            )
            accuracy = (
                ""
                if row["test_acc"] is None
                else f"  acc {row['test_acc']:5.2f}%  test loss {row['test_loss']:.4f}"
            )
            if not workers:  # settled in the first round
                folder_.config["workers"] = workers = len(pool.workers)
                folder_.write_config()
            say(
                f"round {row['round']:3d}/{args.rounds}{accuracy}  train loss {row['train_loss']:.4f}  "
                f"{row['samples_per_s']:,.0f} samples/s"
            )
    save(net.state_dict(), folder_.out / "model.pt")
    last = folder_.rows[-1]
    say(
        "accuracy: last {test_acc:.2f}%, best {best_acc:.2f}%, EMA {acc_ema:.2f}%, "
        "last five {acc_last5_mean:.2f} +- {acc_last5_std:.2f}%".format(**last)
    )
    return net, folder_.rows


def sampled_clients(args):
    """How many clients take part in a round."""
    return max(1, int(args.clients * args.sample + 0.5))


def _set_up(args):
    """Precision and determinism of the process; returns the device."""
    device = torch.device(args.device)
    torch.backends.cuda.matmul.fp32_precision = (
        "ieee"  # Gram matrices and power iterations need it, also in backward
    )
    for layers in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        layers.fp32_precision = "ieee" if args.precision == "fp32" else "tf32"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        if args.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = not args.deterministic
    torch.use_deterministic_algorithms(args.deterministic)
    return device


def _round(
    args,
    net,
    data,
    parts,
    tests,
    server,
    states,
    pool,
    local_update,
    aggregate,
    after_round,
    folder_,
    bar,
):
    """One communication round; returns its row of metrics.jsonl."""
    t, last, sampled = server["round"], server["round"] == args.rounds, sampled_clients(args)
    chosen = sorted(
        keyed("sample", args.seed, t).choice(len(parts), sampled, replace=False).tolist()
    )
    server["clients"] = chosen
    clients = [Client(k, parts[k], states.get(k, {})) for k in chosen]
    shares = np.array(
        [n // args.batch_size * args.batch_size if args.drop_last else n for n in map(len, clients)]
    )
    if args.weighting == "uniform":
        shares = np.minimum(shares, 1)  # without training, no weight
    if shares.sum() == 0:
        raise UserError(
            f"--drop-last: no client sampled in round {t} has the {args.batch_size} samples of a batch"
        )
    alphas = (shares / shares.sum()).tolist()
    weights, start, waited, seen = net.state_dict(), time.perf_counter(), 0.0, []

    def uploads():
        nonlocal waited
        trained = pool.train(clients, server, weights, alphas, local_update)
        while True:
            before = time.perf_counter()
            with (
                torch.enable_grad()
            ):  # aggregate, which runs training by reading on, may be under no_grad
                upload = next(trained, None)
            if upload is None and pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            waited += time.perf_counter() - before
            if upload is None:
                return
            seen.append(
                (
                    upload.loss,
                    upload.finite,
                    upload.samples,
                    nbytes(upload.weights) + nbytes(upload.message),
                )
            )
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
            kept = (
                f"; {args.out} keeps the checkpoint of an earlier round"
                if t > args.checkpoint_every
                else ""
            )
            raise FloatingPointError(
                f"round {t}, client {client.id}: the local model holds NaN or infinity{kept}; "
                "a smaller --lr or a --clip may help"
            )
    if not torch.stack(torch._foreach_norm(list(net.parameters()))).isfinite().all():
        raise FloatingPointError(
            f"round {t}: the global model holds NaN or infinity; a smaller --server-lr may help"
        )
    aggregated = time.perf_counter()
    if after_round:
        worker = pool.workers[0]
        _load(worker.net.eval(), net.state_dict())
        after_round(worker, clients, server, args)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
    trained = time.perf_counter()
    accuracy, loss, by_client = None, None, {}
    if last or t % args.eval_every == 0:
        hits = torch.zeros(len(data.y_test), dtype=torch.bool)
        accuracy, loss = evaluate(net, data, args, pool.map, hits)
        by_client = client_summary(hits.numpy(), tests) if tests else {}
    evaluated = time.perf_counter()

    samples = sum(n for _, _, n, _ in seen)
    history = [row["test_acc"] for row in folder_.rows if row["test_acc"] is not None] + [
        accuracy
    ] * (accuracy is not None)
    if accuracy is not None and accuracy > max(history[:-1], default=-1):
        save(net.state_dict(), folder_.out / "best.pt")
    row = {
        "round": t,
        "test_acc": accuracy,
        "test_loss": loss,
        "train_loss": sum(float(loss) * n for loss, _, n, _ in seen) / max(1, samples),
        "lr": learning_rate(args, t),
        "clients": chosen,
        "samples": samples,
        "seconds": {
            "train": waited,
            "aggregate": aggregated - start - waited,
            "evaluate": evaluated - trained,
            "other": start - folder_.clock,
        },
        "samples_per_s": samples / waited,
        "bytes_down": sampled * nbytes(weights) + sum(client.bytes_down for client in clients),
        "bytes_up": sum(b for *_, b in seen) + sum(client.bytes_up for client in clients),
        "peak_memory": _peak_memory(pool.device),
        **summary(history),
        **by_client,
        **server.pop("report", {}),
    }
    if after_round:
        row["seconds"]["synchronise"] = trained - aggregated
    folder_.clock = evaluated
    folder_.append(row)
    if last or t % args.checkpoint_every == 0:
        folder_.checkpoint(net, server, states)
    latest = f"acc {history[-1]:.2f}%, " if history else ""
    bar.set_postfix_str(
        f"round {t}, {latest}loss {row['train_loss']:.3f}, {row['samples_per_s']:,.0f} samples/s"
    )
    return row


def _peak_memory(device):
    """Most bytes held so far: of the GPU's memory by tensors, or of the host's by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def main(argv=None):
    parser = flags(
        "Shows how a data set's samples go to clients, without training:\n    python common.py --describe FLAGS",
        __file__,
    )
    parser.add_argument("--describe", action="store_true", required=True, help="one line a client")
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of the label distribution; needs matplotlib"
    )
    args = parser.parse_args(argv)
    try:
        describe(args, args.plot)
    except (UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))


if __name__ == "__main__":
    main()
