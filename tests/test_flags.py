"""Flags: their defaults and spellings, and one line of error for what makes no sense."""

import argparse

import numpy as np
import pytest
import torch
from conftest import TINY, flags, from_shell, make_folder, refused
from methods import SCRIPTS
from PIL import Image

import common
import fedalign
import fedavg
import fedprox
from analysis import partition


def parsed(words):
    return common.flags("x", "x").parse_args(words.split())


def test_aliases():
    words = "--client_number 64 --client_sample .25 --comm_round=7 --partition_alpha 0.1"
    args = parsed(f"{words} --batch_size 8 --wd 0 --image_size 16")
    assert (args.clients, args.sample, args.rounds, args.alpha) == (64, 0.25, 7, 0.1)
    assert (args.batch_size, args.weight_decay, args.image_size) == (8, 0, 16)
    args = parsed("--n_parties 5 --sample_fraction .5 --beta 2")
    assert (args.clients, args.sample, args.alpha) == (5, 0.5, 2)
    args = parsed("--num_of_clients 6 --participation_rate .3 --dirichlet_alpha 3")
    assert (args.clients, args.sample, args.alpha) == (6, 0.3, 3)


def test_defaults_are_fedaligns_main_setting():
    args = vars(parsed(""))
    expected = {
        "dataset": "cifar100",
        "model": "resnet56",
        "partition": "dirichlet",
        "alpha": 0.5,
        "clients": 16,
        "sample": 1,
        "rounds": 25,
        "epochs": 20,
        "batch_size": 64,
        "lr": 0.01,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "clip": 0,
        "weighting": "samples",
        "persist_opt": False,
        "drop_last": False,
    }
    assert {k: args[k] for k in expected} == expected
    assert isinstance(common.flags("x", "x"), argparse.ArgumentParser)


def test_what_the_parser_notes():
    """The script's name, beside the flags."""
    args = common.flags("x", "dir/fedx.py").parse_args(["--out", "a", "--n_parties=5", "--quiet"])
    assert args.script == "fedx"
    assert common.flag_values(args).keys() == vars(args).keys() - {
        "script",
        "plain",
        "capture",
        "moved",
        "augmented",
    }


@pytest.mark.parametrize(
    "text, name", [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_device_flag(monkeypatch, text, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert flags("--device", text).device == name


def test_device_is_auto_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert torch.device(parsed("").device).index == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parsed("").device == "cpu"


REFUSALS = """
--clients 0 | --clients; at least 1
--sample 0 | --sample; above 0
--sample 1.5 | --sample; at most 1
--alpha nan | --alpha; nan
--rounds 2.5 | --rounds; integer
--dataset cifar11 | --dataset; cifar11; glyphs
--lr inf | --lr
--lr 1e39 | --lr; at most 3.4
--augment crop,spin | --augment; rotateDEGREES
--augment crop,reflect-crop | --augment; crop or reflect-crop
--workers many | --workers
--nonsense | --nonsense
--model vit | --model; resnet56
--device tpu | --device; cuda
--rounds NINES | --rounds; at most
--model resnet18 --batch-size 1 | --batch-size; batch norm
--seed -1 | --seed
--similarity 101 | --similarity; 100
--split-file x | --split-file; --partition file
--partial-split | --partial-split; --partition file
--partition file | --split-file
--clients 61 | 600; 61; --clients
--partition file --split-file /nonexistent | --split-file /nonexistent
--partition natural --clients 300 | writers
--partition iid --clients 601 | no sample
--partition labels --labels 63 | --labels 63; has 62 labels
--partition labels | --labels 2: no client has label; use more --clients
--drop-last --batch-size 599 | --drop-last
--dataset folder --data-dir /nonexistent | /nonexistent; train
--image-size 10 | --image-size
--image-size 2147483647 | --image-size; at most 4096
--model resnet56 --partition iid --clients 600 | single sample
--server adam --server-tau 1e308 | --server-tau; at most 1e+18
--lr-decay 1.1 | --lr-decay; above 0 and at most 1
fedbn | --model cnn: no batch norm
--validation 0.0001 | --validation; of 600
--validation 1 | --validation; of 600
--validation 0.1 --partition file --split-file x | --validation; --partition file
--leak | --leak; sent140
fedcka --layers 99 | --layers; cnn has 7
fedcka --batch-size 2 | --batch-size; at least 3
fedmlb --pathways 9 | --pathways
stochdepth | --model cnn; residual
stochdepth --keep 1 | --model
rfedavg_dp --noise 1 | --noise-clip
rfedavg --noise 1 | --noise
scaffold --correction gradient --persist-opt | --persist-opt
fednova --persist-opt | argument --persist-opt
fednova --optimizer rmsprop | argument --optimizer
"""


@pytest.mark.parametrize("line", REFUSALS.strip().splitlines())
def test_refusals(tmp_path, capsys, line):
    """One line with all these words; no folder is made."""
    words, _, expected = line.replace("NINES", "9" * 1200).partition(" | ")
    name, *argv = words.split()
    if name.startswith("--"):
        name, argv = "fedavg", words.split()
    out = tmp_path / "run"
    refused(capsys, SCRIPTS[name], [*TINY, "--out", out, *argv], *expected.split("; "))
    assert not out.exists()


@pytest.mark.parametrize("argv", [["a\nb"], ["--only\nb", "c"], ["--lr", "a\nb"]])
def test_a_newline_in_a_word(capsys, argv):
    refused(capsys, fedavg, [*TINY, *argv], " ".join(argv[0].split()))


def test_learning_rates_of_all_rounds_are_finite():
    assert parsed("--lr-decay 1e-300 --rounds 100000").rounds == 100000


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path, capsys):
    argv = [*TINY, "--device", "cuda", "--out", tmp_path / "run"]
    refused(capsys, fedavg, argv, "--device", "no GPU")
    assert not (tmp_path / "run").exists()


def no_folder(root):
    root.mkdir()


def hollow(root):
    (root / "train" / "ape").mkdir(parents=True)
    (root / "test").mkdir()


def odd_size(root):
    make_folder(root, (32, 32))
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(root / "train/bee/2.png")


def cut_file(root):
    path = make_folder(root, (32, 32)) / "test/ape/1.png"
    path.write_bytes(path.read_bytes()[:1000])


def other_classes(root):
    make_folder(root, (32, 32))
    (root / "test/bee").rename(root / "test/cow")


def deep_pixels(root):
    make_folder(root, (32, 32))
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(root / "train/ape/0.png")


def wide(root):
    make_folder(root, (32, 24))


@pytest.mark.parametrize(
    "make, words",
    [
        (no_folder, ["images", "train"]),
        (hollow, ["no images found", "train/CLASS"]),
        (odd_size, ["bee/2.png", "7x9", "--image-size"]),
        (cut_file, ["ape/1.png", "not a readable image"]),
        (other_classes, ["bee", "classes"]),
        (deep_pixels, ["ape/0.png", "8 bits"]),
        (wide, ["32x24", "--image-size"]),
    ],
)
def test_bad_images(tmp_path, capsys, make, words):
    make(tmp_path / "images")
    argv = ["--dataset", "folder", "--data-dir", tmp_path / "images", "--out", tmp_path / "run"]
    refused(capsys, fedavg, [*TINY, *argv], *words)
    assert not (tmp_path / "run").exists()


def test_failed_download_is_one_line(tmp_path, capsys, monkeypatch):
    from torchvision import datasets

    def offline(root, **kwargs):
        (root / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("Error downloading\ntrain-images-idx3-ubyte.gz")

    monkeypatch.setattr(datasets, "MNIST", offline)
    argv = [*TINY, "--dataset", "mnist", "--out", tmp_path / "run", "--data-dir", tmp_path / "new"]
    refused(capsys, fedavg, argv, "mnist", "downloaded", "glyphs")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()  # the user's own
    refused(capsys, fedavg, argv, "mnist", "downloaded", "glyphs")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


MEANT = [
    ("--datadir x", "--data-dir"),
    ("--local_epoch 5", "--epochs"),
    ("--client 5", "--clients"),
    ("--dirichlet_alpah 5", "--alpha"),
]


@pytest.mark.parametrize("argv, meant", MEANT)
def test_unknown_flags_suggest_the_nearest(capsys, argv, meant):
    word = argv.split()[0].replace("_", "-")
    refused(capsys, fedprox, argv.split(), f"arguments: {word}", f"did you mean {meant}?")


@pytest.mark.parametrize(
    "flag, scripts", [("--keep", "stochdepth.py"), ("--dyn_alpha", "feddyn.py, fedmlb.py")]
)
def test_a_flag_of_another_script_names_it(capsys, flag, scripts):
    line = f"{flag.replace('_', '-')} is a flag of {scripts}\n"
    with pytest.raises(SystemExit):
        from_shell(fedavg, [flag, "0.1"])
    assert capsys.readouterr().err.endswith(line)


def test_other_commands_suggest_too_and_nothing_where_nothing_is_near(capsys):
    for script, line in (
        (fedavg, "fedavg.py: error: unrecognized arguments: --xyzzy a\n"),
        (partition, "unrecognized arguments: --client 5; did you mean --clients?\n"),
    ):
        with pytest.raises(SystemExit):
            from_shell(script, ["--xyzzy", "a"] if script is fedavg else ["--client", "5"])
        assert capsys.readouterr().err.endswith(line)


def test_help_is_short(capsys):
    """The paper, the script's own flags, then the shared ones, a line or two each."""
    with pytest.raises(SystemExit):
        fedalign.main(["--help"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert out.startswith(fedalign.__doc__.split("\n")[0])
    assert "usage" not in out
    assert all(len(line) <= 100 for line in lines)
    assert len(lines) - len(fedalign.__doc__.splitlines()) < 90
    places = [
        out.index(f"\n  {flag} ") for flag in ("--mu", "--dataset", "--clients", "--lr", "--out")
    ]
    assert places == sorted(places)
    flags = common.flags("x", "x")._actions
    assert all(flag.option_strings[0] in out for flag in flags)
    assert all(choice in out for flag in flags for choice in flag.choices or [])
    assert "(default: False)" not in out
    assert "--local-epochs" in out


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, place):
    (tmp_path / "file").write_text("kept")
    refused(capsys, fedavg, [*TINY, "--out", tmp_path / place], str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"
