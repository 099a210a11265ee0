"""Nonsense in flags, run folders and data files: done, or refused in one line.

A run may also diverge, exit code 1 and one line."""

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import random
import re
import shlex
import socket
import struct
import zlib

from PIL import Image

import support
from chaotic.children import run
from chaotic.damage import become, cut_short, flip, zero
from chaotic.world import SIGHTS
from methods import METHODS as SCRIPTS

TINY = "--data-dir data --model cnn --quiet --device cpu".split()
TINY += "--clients 2 --rounds 1 --local-steps 1 --batch-size 4".split()
OTHERS = {  # commands beside the methods' scripts, and words with which they are short
    "analysis.similarity": SIGHTS["similarity"][1:],
    "analysis.features": SIGHTS["features"][1:],
    "analysis.partition": "--dataset folder --data-dir data --clients 3 --partition iid".split(),
    "hessian_eval": "run --device cpu --samples 8 --probes 2 --max-iterations 2".split(),
    "reproduce.compare": ["run"],
    "reproduce.__main__": "fedalign 5 --dry-run".split(),
}
LONG = "rounds epochs local_steps probes max_iterations density landscape seeds".split()
NUMBERS = "0 1 2 3 7 99 -1 0.5 1.0 1e-300 1e308 nan inf -inf 1,2 0,99 1e5 None x \u0663".split()
NUMBERS += ["2147483647", "2147483648", "9" * 5000, ""]
WORDS = "x ../x /dev/null /proc/self/mem data none rotate10 crop,crop flip rotate181 random".split()
WORDS += ["", "a\nb", "\udcff", "n" * 300, "kernel-cka", "paper"]
VALUES = [None, True, 0, -1, 1.5, 10**400, math.nan, math.inf, -math.inf, "", "x", [], {}, [[]]]
VALUES += ["nan", 2**63, "9" * 5000, {"a": None}, [1, "a"], "\x00", "a\nb"]


# --- flags. Such functions return what they did, a command, and whether it must be refused.


class Found(Exception):
    """Carries a parser out of a script."""


@functools.cache
def actions_of(name):
    """Return the flags of a command, as argparse's actions."""

    def parse_known_args(parser, *_):
        raise Found(parser)

    real = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = parse_known_args
    try:
        importlib.import_module(name).main([])
    except Found as found:
        return [a for a in found.args[0]._actions if a.option_strings and a.dest != "help"]
    finally:
        argparse.ArgumentParser.parse_known_args = real


def words_of(action, rng):
    """Return an action's flag with a value, which may be none that it takes."""
    flag = rng.choice(action.option_strings)
    if action.nargs == 0:
        return [flag]
    values = NUMBERS if action.type and rng.random() < 0.9 else WORDS
    if action.choices and rng.random() < 0.8:
        values = sorted(action.choices)
    value = rng.choice(values)
    if action.dest in LONG and value.isdecimal() and value not in "0123":
        value = "2"
    return rng.choice([[flag, value], [f"{flag}={value}"]])


def flags(folder, rng):
    """A method's script, or another command, with flags some of which take no such values."""
    name = rng.choice([*SCRIPTS] if rng.random() < 0.7 else [*OTHERS])
    rare = "out resume workers dry_run".split()
    actions = [a for a in actions_of(name) if a.dest not in rare or rng.random() < 0.2]
    chosen = rng.sample(actions, min(len(actions), rng.choice([1, 1, 2, 3, 6])))
    words = [word for action in chosen for word in words_of(action, rng)]
    if name in OTHERS:
        dry = ["--dry-run"] * name.startswith("reproduce._")
        return "values", [name, *OTHERS[name], *words, *dry], False
    data, model = rng.choice(["folder", "glyphs"]), rng.choice(["cnn", "cnn", "resnet18-gn"])
    return "values", [name, *TINY, "--dataset", data, "--model", model, *words], False


# --- run folders


def places(tree):
    """Yield (container, key) of all that is in a nest of JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def mutate(tree, rng):
    """Change values or keys of a nest of JSON, or its text; return the text."""
    found = [*places(tree)]
    for container, key in rng.sample(found, min(len(found), rng.choice([1, 1, 1, 3]))):
        with contextlib.suppress(KeyError, IndexError):  # of what is gone already
            if rng.random() < 0.2:
                del container[key]
            else:
                container[key] = rng.choice(VALUES)
    text = json.dumps(tree)
    deep = "[" * 100_000, '{"a":' * 100_000, "9" * 100_000
    texts = [*deep, text + text, text[:-9], text.replace("1", "9" * 5000, 1)]
    return rng.choice(texts) if rng.random() < 0.15 else text


def records(folder, rng):
    """A run whose config.json or metrics.jsonl has other values; it is resumed or shown."""
    path = folder / "run" / rng.choice(["config.json", "metrics.jsonl"])
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    i = rng.randrange(len(lines))
    tree = json.loads(lines[i])
    if rng.random() < 0.5:
        tree.pop("crc32", None)
    lines[i] = mutate(tree, rng)
    path.write_text("".join(f"{line}\n" for line in lines))
    resume = "fedavg --out run --resume --quiet --device cpu --rounds 3".split()
    return path.name, rng.choice([resume, *SIGHTS.values()]), False


# --- data files


def png(path, depth=8, width=8, height=8):
    """Write an RGB image of 8x8 pixels of so many bits a channel, or one that says so."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    rows = zlib.compress((b"\0" + bytes(range(3 * depth))) * 8)
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def images(folder, rng):
    """An image that is none, or another, or a folder that holds itself."""
    path = rng.choice(sorted(folder.glob("data/t*/*/*.png")))
    kind = rng.choice(["16 bits", "loop", "mode", "huge", "bytes", "bytes", "name"])
    if kind == "16 bits":
        png(path, 16)
    if kind == "loop":
        (path.parent / "again").symlink_to("..")
    if kind == "mode":
        mode = rng.choice(["1", "L", "RGBA", "CMYK", "I;16", "F", "LA", "YCbCr", "I"])
        Image.new(mode, (8, 8)).save(path, "TIFF")
        kind += f" {mode}"
    if kind == "huge":
        png(path, 8, *rng.choice([(20_000, 9_000), (13_000, 8_000), (2**31 - 1, 8), (0, 8)]))
    if kind == "bytes":
        kind = damaged(path, rng)
    if kind == "name":
        path.rename(path.with_name(rng.choice(["a\nb.png", "\udcff.png", "x.txt", "n" * 250])))
    wrong = kind in ("huge", "mode I;16", "mode F", "mode I")
    return kind, "fedavg --dataset folder".split(), wrong


def leaf(folder, rng):
    """Shards of FEMNIST with other values, or a user twice."""
    support.make_femnist(folder / "data", (3, 4, 3, 5, 6))
    path = rng.choice(sorted(folder.glob("data/femnist/*/*.json")))
    words = "fedavg --dataset femnist".split()
    if rng.random() < 0.3:
        return damaged(path, rng), words, False
    shard = json.loads(path.read_text())
    users = shard["users"]
    if rng.random() < 0.1:
        users.append(users[0])
        shard["num_samples"].append(shard["num_samples"][0])
        path.write_text(json.dumps(shard))
        return "a user twice", words, True
    data = shard["user_data"][users[0]]
    part = rng.choice([shard, data["y"], data["x"][0], data])
    text = mutate(part, rng)
    path.write_text(text if part is shard else json.dumps(shard))
    return "a value", words, False


def splits(folder, rng):
    """A split file with other values."""
    parts = [list(range(0, 36, 2)), list(range(1, 36, 2))]
    path = folder / "split"
    path.write_text(mutate(rng.choice([parts, dict(enumerate(parts))]), rng))
    what = damaged(path, rng) if rng.random() < 0.3 else "a value"
    words = "fedavg --dataset folder --partition file --split-file split"
    return what, words.split(), False


def digits(folder, rng):
    """MNIST's four files, one of them damaged."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 40), ("t10k", 20)):
        x = struct.pack(">IIII", 0x803, n, 28, 28) + bytes(784 * n)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(x)
        y = struct.pack(">II", 0x801, n) + bytes(i % 10 for i in range(n))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(y)
    path = rng.choice(sorted(raw.iterdir()))
    words = "fedavg --dataset mnist --partition iid".split()
    return f"{path.name} {damaged(path, rng)}", words, False


def text(folder, rng):
    """Tweets and vectors of their words, one of both damaged."""
    support.make_sent140(folder / "data")
    vectors = folder / "vectors"
    lines = [[word, "0.5", "-1", "2"] for word in "ann bob is glad sad today p q".split()]
    value = rng.choice([*NUMBERS, *WORDS, "1e39", "1e999", "0x1", "\x85"])
    rng.choice(lines)[rng.randrange(4)] = value
    vectors.write_text("".join(f"{' '.join(words)}\n" for words in lines), errors="replace")
    what = f"vectors with {value[:20]!r}"
    if rng.random() < 0.5:
        path = rng.choice([vectors, folder / "data" / "sent140" / "tweets.csv"])
        what = f"{path.name} {damaged(path, rng)}"
    words = "fedavg --dataset sent140 --model lstm --vectors vectors --partition iid"
    return what, words.split(), False


def damaged(path, rng):
    """Damage a file, or put a folder, a FIFO or a link in its place; return what was done."""
    return rng.choice([flip, flip, cut_short, zero, become])(path, None, rng)


SORTS = [flags, flags, flags, records, records, images, leaf, splits, digits, text]


# --- a case


def case(world, n):
    """Make nonsense and feed it; return the command, and what is wrong, "" if nothing."""
    rng = random.Random(f"{world.seed} fuzz {n}")
    sort = rng.choice(SORTS)
    with world.copy("2-0") as folder:
        for cache in folder.glob("data/.cache*"):
            cache.unlink()
        what, words, wrong = sort(folder, rng)
        if sort not in (flags, records):
            words = [words[0], *TINY, *words[1:]]

        def before():
            os.chdir(folder)
            socket.getaddrinfo = refuse  # no downloads

        outcome = run(*words, before=before)
        diverged = outcome.code == 1 and "NaN or infinity" in outcome.err
        fault = outcome.fault(*[2] if wrong else [0, 2], *[1] * diverged)
        if what == "metrics.jsonl" and re.search(r"\b(nan|inf)\b", outcome.out):
            fault = fault or "shows numbers that are none"
        what = f"{sort.__name__}, {what}: {shlex.join(words)}"
        return ascii(what)[1:-1][:500], fault


def refuse(*_):
    raise OSError("no network here")
