"""A table of refusals: files that are made, a command, and the words of its one line."""

import faulthandler
import json
import os
import shlex
import sys

import numpy as np
import pytest
import torch
from conftest import TINY, make_folder, refused
from methods import SCRIPTS
from PIL import Image
from support import make_clients, make_femnist, make_imagenet, make_sent140, make_tiny_imagenet

import common

SHARD = "femnist/train/all_data_0_train.json"
TWEETS = "sent140/tweets.csv"
LOOP = "train/ape/loop"
ANNOTATIONS = "tiny-imagenet-200/val/val_annotations.txt"
DATA = {  # the first word of a command: what makes its files, and the flags that it stands for
    "FOLDER": (lambda root: make_folder(root, (32, 32)), "folder --partition iid"),
    "CLIENTS": (make_clients, "folder --image-size 32"),
    "FEMNIST": (make_femnist, "femnist"),
    "TINY-IMAGENET": (make_tiny_imagenet, "tiny-imagenet"),
    "IMAGENET": (make_imagenet, "imagenet-200 --partition iid --clients 2 --image-size 28"),
    "TWEETS": (make_sent140, "sent140 --model lstm --vectors random --clients 2 --partition iid"),
}


def damage(f):
    """Return a function of f's other arguments that returns a damage, a function of the root."""
    return lambda *args: lambda root: f(root, *args)


def write(name, content):
    return lambda root: (root / name).write_bytes(content)


def paint(name, *pixels):
    return lambda root: Image.fromarray(np.zeros(*pixels)).save(root / name)


@damage
def save(root, name, change):
    """Save the weights of cnn after change(weights, name of the first)."""
    weights = common.build_net("cnn", 62).state_dict()
    torch.save(change(weights, next(iter(weights))), root / name)


def each(pattern, f):
    return lambda root: [f(path) for path in root.glob(pattern)]


def remove(pattern):
    return each(pattern, os.unlink)


def cut(name):
    return each(name, lambda path: os.truncate(path, path.stat().st_size // 2))


@damage
def pipe(root, name):
    """Put a pipe in a file's place, of which a read never ends."""
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)


@damage
def move(root, name, target):
    (root / target).parent.mkdir(exist_ok=True)
    (root / name).rename(root / target)


@damage
def edit(root, change):
    """Call change(shard, data of its second user, that user's name) on a shard of FEMNIST."""
    shard = json.loads((root / SHARD).read_text())
    user = shard["users"][1]
    change(shard, shard["user_data"][user], user)
    (root / SHARD).write_text(json.dumps(shard))


@damage
def line_5(root, line):
    """Put another line in the place of the fifth of the tweets, as the last one if it is cut."""
    lines = (root / TWEETS).read_bytes().splitlines(keepends=True)
    rest = lines[5:] if line.endswith(b"\n") else []
    (root / TWEETS).write_bytes(b"".join([*lines[:4], line, *rest]))


FLAGS = """
--clients 0 | --clients; at least 1
--sample 0 | --sample; above 0
--alpha nan | --alpha; nan
--rounds 2.5 | --rounds; integer
--dataset cifar11 | --dataset; cifar11; glyphs
--lr 1e39 | --lr; at most 3.4
--augment crop,spin | --augment; rotateDEGREES
--augment crop,reflect-crop | --augment; crop or reflect-crop
--augment rotate10,rotate20 | --augment; rotate10,rotate20
--workers many | --workers
--device cuda | --device; no GPU
--rounds NINES | --rounds; at most
--model resnet18 --batch-size 1 | --batch-size; batch norm
--seed -1 | --seed
--similarity 101 | --similarity; 100
--split-file x | --split-file; --partition file
--split-file= | --split-file; --partition file
--init= | not a file, where a state_dict should be
--partial-split | --partial-split; --partition file
--partition file | --split-file
--partition iid --clients 601 | no sample
--partition labels --labels 63 | --labels 63; has 62 labels
--partition shards --shards 999 | --shards 999; samples
--partition labels | --labels 2: no client has label; use more --clients
--drop-last --batch-size 599 | --drop-last
--image-size 10 | --image-size
--image-size 2147483647 | --image-size; at most 4096
--model resnet56 --partition iid --clients 600 | batch norm needs two samples; --clients
--server adam --server-tau 1e308 | --server-tau; at most 1e+18
--lr-decay 1.1 | --lr-decay; above 0 and at most 1
--min-size 151 | --min-size; 600 samples cannot give 4 --clients 151 each
fedbn | --model cnn: no batch norm
--validation 0.0001 | --validation; of 600
--validation 1 | --validation; of 600
--validation 0.1 --partition file --split-file x | --validation; --partition file
--leak | --leak; sent140
--vectors random | --vectors
fedcka --layers 99 | --layers; cnn has 7
fedcka --batch-size 2 | --batch-size; at least 3
fedmlb --pathways 9 | --pathways
stochdepth | --model cnn; residual
rfedavg_dp --noise 1 | --noise-clip
scaffold --correction gradient --persist-opt | --persist-opt
scaffold --correction gradient --optimizer rmsprop | --correction gradient; --option 2; RMSProp
fednova --persist-opt | argument --persist-opt
fednova --optimizer rmsprop | argument --optimizer
fedprox --dirichlet_alpah 5 | arguments: --dirichlet-alpah; did you mean --alpha?
--dyn_alpha 0.1 | --dyn-alpha is a flag of feddyn.py, fedmlb.py
--plain --workers 2 | argument --plain: not with --workers
--plain --save-clients | argument --plain: not with --save-clients
--init absent.pt | absent.pt; no such state_dict
TWEETS --model cnn --vectors '' | --model; lstm
TWEETS --image-size 28 | --image-size
TWEETS --augment flip | --augment
TWEETS --users 9 | --users
TWEETS --partition natural --users 1 | --users; --clients
TWEETS --leak | --leak; natural
mixup TWEETS | words | begun
gradaug TWEETS | not of images | begun
fedalign TWEETS | LSTM | begun
IMAGENET --augment crop | --augment; imagenet-200
CLIENTS --partition natural --clients 4 | --clients 4; 3 writers
CLIENTS --partition iid | train/amy/ape/0.png; images lie in train/CLASS/*, or with
FOLDER --partition natural | train/ape/0.png; --partition natural train/CLIENT/
"""
TWICE = {"users": ["f01_3"] * 2, "num_samples": [3, 3]}
INIT, SPLIT = "--init init.pt", "--partition file --split-file split"
FILES = [  # a damage, and a line as above
    (None, "'a\nb' | a b"),
    (lambda root: (root / "run").mkdir(), "--plain | --out run: exists already | begun"),
    (write("file", b"kept"), "--out file/run | file"),
    (cut(SHARD), f"FEMNIST | {SHARD}, user None: not a shard of LEAF (JSONDecodeError; line 1"),
    (write(SHARD, b"\xff"), f"FEMNIST | {SHARD}; not UTF-8"),
    (write(SHARD, b"[" * 99999), "FEMNIST | not a shard; RecursionError"),
    (edit(lambda shard, *_: shard["num_samples"].pop()), "FEMNIST | not a shard; shorter"),
    (edit(lambda shard, _, user: shard["user_data"].pop(user)), "FEMNIST | f01_3; KeyError"),
    (edit(lambda _, data, user: data["x"].pop()), "FEMNIST | f01_3; 2 x and 3 y; says 3"),
    (edit(lambda shard, *_: shard.update(TWICE)), "FEMNIST | f01_3; listed twice"),
    (edit(lambda _, data, user: data.update(x=[[0.5] * 100] * 3)), "FEMNIST | f01_3; reshape"),
    (edit(lambda _, data, user: data["x"][0].__setitem__(5, 255)), "FEMNIST | f01_3; 0 to 1"),
    (edit(lambda _, data, user: data["y"].__setitem__(0, 62)), "FEMNIST | f01_3; 0 to 61"),
    (remove("femnist/train/*"), "FEMNIST | femnist/train; no samples in *.json; TalwalkarLab/leaf"),
    (pipe(SHARD), f"FEMNIST | {SHARD}: not a regular file"),
    (write(ANNOTATIONS, b"val_0.JPEG\tn03\nval_1.JPEG\n"), "TINY-IMAGENET | txt, line 2; ''"),
    (write(ANNOTATIONS, b""), f"TINY-IMAGENET | {ANNOTATIONS}: names no image"),
    (remove("*/val/images/val_1.JPEG"), "TINY-IMAGENET | val_1.JPEG; No such file"),
    (pipe(ANNOTATIONS), f"TINY-IMAGENET | {ANNOTATIONS}: not a regular file"),
    (cut("*/train/*/*"), "IMAGENET | train/n; not a readable image | begun"),
    (remove("*/val/*/*"), "IMAGENET | 6 images, and 0 in val/n"),
    (remove("*/train/*/[0-2]*"), "IMAGENET | 3 images; where 4"),
    (move("imagenet/train", "moved"), "IMAGENET | imagenet/train; 0 folders; image-net.org"),
    (each("*/train/*/*", lambda path: pipe(path)(path)), "IMAGENET | not a regular file | begun"),
    (paint("train/bee/2.png", (9, 7, 3), np.uint8), "FOLDER | bee/2.png; 7x9; --image-size"),
    (cut("test/ape/1.png"), "FOLDER | ape/1.png; not a readable image"),
    (move("test/bee", "test/cow"), "FOLDER | class 'bee' is in train or in test alone"),
    (paint("train/ape/0.png", (32, 32), np.uint16), "FOLDER | ape/0.png; more than 8 bits"),
    (each("t*/*/*", lambda p: Image.open(p).resize((32, 24)).save(p)), "FOLDER | 32x24; --image"),
    (remove("t*/bee/*"), "FOLDER | one class alone"),
    (move("train/ape", "train/cow/ape"), "FOLDER | train/bee/0.png and train/cow/ape/0.png"),
    (move("train", "test/more"), "CLIENTS --partition natural | no images; train/CLASS"),
    (lambda root: (root / LOOP).symlink_to(root / "train/ape"), f"FOLDER | {LOOP}/0.png; images"),
    (line_5(b'"4","1","date","NO_QUERY","ann"\n'), "TWEETS | csv, line 5; expected 6, got 5"),
    (line_5(b'"2","1","d","q","u","text"\n'), "TWEETS | tweets.csv, line 5; '2'"),
    (line_5(b'"4","1","d","q","u","cut'), "TWEETS | tweets.csv, line 5; end of data"),
    (remove(TWEETS), "TWEETS | no *.csv; trainingandtestdata.zip"),
    (pipe(TWEETS), f"TWEETS | {TWEETS}: not a regular file"),
    (write("v", b"glad 1 2\nsad 3\n"), "TWEETS --vectors v | --vectors v, line 2; size 1; (2,)"),
    (write("v", b"glad 1 2\ns\xff 1 2\n"), "TWEETS --vectors v | --vectors v, line 2; utf-8"),
    (write("v", b"glad 1 2\nsad nan 1\n"), "TWEETS --vectors v | NaN or infinity"),
    (write("v", b"qqq 1 2\n"), "TWEETS --vectors v | none of"),
    (pipe("v"), "TWEETS --vectors v | v: no such file; glove.6B.zip"),
    (pipe("split"), f"{SPLIT} | split: no such file"),
    (save("init.pt", lambda w, k: w | {k: w[k][:1]}), f"{INIT} | 'conv1.0.weight' is of; (1, 3"),
    (save("init.pt", lambda w, k: w | {k: w[k] * np.nan}), f"{INIT} | NaN"),
    (save("init.pt", lambda w, k: w | {"more": w[k]}), f"{INIT} | 'more' is in it alone"),
    (save("init.pt", lambda w, k: [w[k]]), f"{INIT} | not a state_dict"),
    (save("init.pt", lambda w, k: torch.nn.ReLU()), f"{INIT} | not a readable state_dict"),
]
CASES = [*((None, line) for line in FLAGS.strip().splitlines()), *FILES]


@pytest.mark.parametrize("change, line", CASES, ids=[line for _, line in CASES])
def test_refusals(tmp_path, monkeypatch, capsys, change, line):
    """One line with all these words; no folder is made, but of a run that had begun."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)  # at a pipe
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words, expected, *begun = line.replace("NINES", "9" * 1200).split(" | ")
    argv, name = shlex.split(words), "fedavg"
    if argv[0] in SCRIPTS:
        name, *argv = argv
    if argv and argv[0] in DATA:
        make, known = DATA[argv.pop(0)]
        make(tmp_path)
        argv = [*f"--data-dir . --dataset {known}".split(), *argv]
    if change:
        change(tmp_path)
    refused(capsys, SCRIPTS[name], [*TINY, "--out", "run", *argv], *expected.split("; "))
    assert (tmp_path / "run").exists() == bool(begun)
    faulthandler.cancel_dump_traceback_later()
