"""compare.py, reproduce.py and the tables: means by hand, published numbers, lines against the papers' settings, resuming."""

import ast
import csv
import io
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import TINY
from test_common import make_folder
from test_methods import ROOT, SCRIPTS, readme_commands

import common
import compare
import reproduce
import tables

CELLS = tables.all_cells()


def make_run(
    folder,
    command="fedavg.py --dataset glyphs --rounds 4",
    seed=0,
    accuracies=(10, 20, 30, 40),
    **more,
):
    """A run folder by hand: round t took t seconds and 1000 t bytes, half of them up; more: of every row."""
    flags = tables.parsed(f"{command} --seed {seed} --out {folder}")
    folder.mkdir(parents=True)
    config = {
        "script": command.split(".py")[0],
        "flags": flags,
        "workers": 1,
        "threads": 1,
        "device": "x86_64, 2 cores",
        "versions": {"torch": "2.15.0"},
        "commit": "0123456789+",
    }
    (folder / "config.json").write_text(json.dumps(config))
    rows, seen = [], []
    for t, accuracy in enumerate(accuracies, 1):
        seen += [accuracy] * (accuracy is not None)
        rows.append(
            {
                "round": t,
                "test_acc": accuracy,
                "test_loss": 1.0,
                "train_loss": 2.0 / t,
                "clients": [0, 1],
                "seconds": {"train": t / 2, "evaluate": t / 2},
                "bytes_down": 500 * t,
                "bytes_up": 500 * t,
                **common.summary(seen),
                **more,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoint.pt").touch()
    if len(rows) >= flags["rounds"]:
        (folder / "model.pt").touch()
    return folder


def run_compare(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        compare.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return e.value.code, out, err


# ----------------------------------------------------------------------------------------------------------------------
# The tables' lines
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper, table", CELLS)
def test_every_line_parses(paper, table):
    for cell in CELLS[paper, table]:
        assert tables.parsed(f"{cell.command} --seed 1")["seed"] == 1


def test_published_cells_and_lines_are_the_same():
    """Every accuracy in published.csv has its line, and every line of a table its number; 960 numbers in all."""
    published = compare.read_published()
    assert sum(map(len, published.values())) == 960
    lines = {
        (c.paper, c.table, c.dataset, c.model, c.setting, c.method)
        for cells in CELLS.values()
        for c in cells
    }
    costs = {
        key
        for key, metrics in published.items()
        if set(metrics) <= {"mflops_fwd", "gflops_fwd", "params_M"}
    }
    bound = next(
        compare.key_of(c) for c in CELLS["FedCKA", "fig5"] if c.method == "centralised"
    )  # 70%, in Sec. 4.3
    assert set(published) - costs == {key for key in lines if not key[1].startswith("fig")} | {
        bound
    }
    assert {key[:2] for key in costs} == {("FedAlign", "7")}
    assert published[
        "FedAlign", "5", "CIFAR-100", "ResNet56", "C=16;E=20;R=25;alpha=0.5", "FedAlign"
    ]["acc"] == ("56.9", "0.5")


def words_of(cell):
    """{flag: word, or None for a switch} of a cell's command."""
    words, found = cell.words, {}
    for word, following in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            assert word not in found, f"{word} twice in {cell.command}"
            found[word[2:]] = None if following.startswith("--") else following
    return found


NAMES = {
    "C": "clients",
    "N": "clients",
    "frac": "sample",
    "SR": "sample",
    "E": "epochs",
    "R": "rounds",
    "B": "batch-size",
    "M": "layers",
    "sim": "similarity",
    "lambda": "lam",
    "sigma": "noise",
    "pathways": "pathways",
    **{name: name for name in ("alpha", "lambda1", "lambda2", "tau")},
}
DATASETS = {
    "CIFAR-100": "cifar100",
    "CIFAR-10": "cifar10",
    "MNIST": "mnist",
    "FEMNIST": "femnist",
    "Sent140": "sent140",
    "Tiny-ImageNet": "tiny-imagenet",
    "ImageNet-200": "imagenet-200",
}
MODELS = {
    "ResNet56": "resnet56",
    "ResNet18": "resnet18",
    "CNN7": "cnn",
    "ResNet50+proj": "resnet50",
    "CNN512": "cnn-mcmahan",
    "LSTM2": "lstm",
    "ResNet18-GN2": "resnet18-gn",
    "ResNet-18": "resnet18-gn",
    "VGG-9": "vgg9",
    "MobileNet": "mobilenet",
    "ShuffleNet": "shufflenet",
    "SqueezeNet": "squeezenet",
}


@pytest.mark.parametrize("paper, table", CELLS)
def test_a_line_does_what_its_cell_says(paper, table):
    """Each NAME=VALUE of a setting is a flag of the line; so are data set, network and the direction of Table 4."""
    for cell in CELLS[paper, table]:
        f = words_of(cell)
        assert f["dataset"] == DATASETS[cell.dataset] if cell.dataset != "-" else table == "III"
        assert f["model"] == MODELS[cell.model]
        for part in cell.setting.split(";"):
            name, _, value = part.partition("=")
            if paper == "rFedAvg" and name == "C":
                name = "R"  # rounds of communication, in Fig. 9c
            if (
                name not in NAMES
                or (name == "M" and cell.script == "fedavg")
                or (value == "0" and name == "sigma")
            ):
                continue
            default = {"frac": "1", "pathways": "1,2,3,4,5"}.get(name, "missing")
            found = f.get(NAMES[name], default).replace(",", "")
            assert float(found) == float(value.rstrip("%")), (cell.setting, cell.command)
        assert f.get("direction") == ("global-local" if cell.method == "FedMLB_G->L" else None)


def test_lines_of_the_methods():
    """What a method's lines share in every table of a paper: betas, weights, rules and options."""
    own = {
        ("FedCKA", "SCAFFOLD"): {"server-lr": "1"},
        ("FedCKA", "MOON"): {"temperature": "0.5"},
        ("FedMLB", "FedAvg+KD"): {"hint": "logits", "gamma": "0.2"},
        ("FedMLB", "FedAvg+FitNet"): {"hint": "features", "gamma": "1"},
        ("FedMLB", "FedProx"): {"mu": "0.001"},
        ("FedMLB", "FedGKD"): {"gamma": "0.2", "buffer": "5"},
        ("FedMLB", "FedLS-NTD"): {"weighting-rule": "convex", "ntd-beta": "0.3", "tau": "1"},
        ("FedMLB", "FedADAM"): {
            "server": "adam",
            "server-momentum": "0.9",
            "server-beta2": "0.99",
            "server-tau": "0.001",
        },
        ("FedMLB", "FedAvgM"): {"server": "avgm", "server-lr": "1", "server-momentum": "0.4"},
        ("rFedAvg", "Scaffold"): {"option": "2", "server-lr": "1"},
        ("rFedAvg", "rFedAvg"): {"variant": "rfedavg"},
        ("rFedAvg", "rFedAvg+"): {"variant": "rfedavg+"},
    }
    for method in ("FedADAM", "FedAvgM"):
        own["FedMLB", f"{method}+FedMLB"] = own["FedMLB", method]
    seen = set()
    for cell in sum(CELLS.values(), []):
        key = cell.paper, cell.method
        if key in own:
            seen.add(key)
            assert own[key].items() <= words_of(cell).items(), cell.command
    assert seen == set(own)
    for cell in sum((CELLS["FedCKA", t] for t in "124"), []):
        f = words_of(cell)
        assert cell.method != "FedCKA" or (f["layers"], f["similarity-metric"]) == (
            "2",
            "linear-cka",
        )
    for cell in CELLS["rFedAvg", "fig8"]:
        cost = {"low cost": ("0.1", "10"), "high cost": ("0.2", "20")}[cell.setting.split(";")[-1]]
        f = words_of(cell)
        assert (
            (f["sample"], f["epochs"]) == cost
            and f["rounds"] == "80"
            and f["partition"] == "natural"
        )
    noisy = [words_of(c) for c in CELLS["rFedAvg", "fig12"] if "sigma=0" not in c.setting]
    assert len(noisy) == 4 and {f["noise-clip"] for f in noisy} == {"1"}
    assert {c.method for c in CELLS["rFedAvg", "fig10"]} == {"FedAvg", "rFedAvg", "rFedAvg+"}
    assert all("client-test" in words_of(tables.home(c)) for c in CELLS["rFedAvg", "fig11"])
    assert {tables.home(c).table for c in CELLS["rFedAvg", "fig11"]} == {"I"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_of_a_docstring_is_a_cell(name):
    """With every flag that decides the result, --augment auto included."""
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text())).replace("\\\n", " ")
    command = text[text.rindex("    python ") + 11 :]
    flags = compare.decisive(tables.parsed(command))
    paper, table = re.findall(r"(\w+) paper, (?:Table )(\w+)", text)[-1]
    cells = [
        c
        for (p, t), group in CELLS.items()
        if p == paper and t in (table, f"{table}a")
        for c in group
    ]
    assert flags in [compare.decisive(tables.parsed(c.command)) for c in cells if c.script == name]


def test_lines_of_fedalign():
    """Sec. 3.2; Nesterov, weight decay, batch 64 and drop-last of the code; mu 1e-4, 1, 1.75 and, by n, 2, 1.5, 1.25."""
    for (paper, table), cells in CELLS.items():
        for cell in cells if paper == "FedAlign" else []:
            f = words_of(cell)
            assert (f["batch-size"], f["lr"], f["momentum"], f["weight-decay"]) == (
                "64",
                "0.01",
                "0.9",
                "1e-4",
            )
            assert (
                "nesterov" in f
                and "drop-last" in f
                and "weighting" not in f
                and "lr-decay" not in f
            )
            assert (
                f["dataset"] == cell.dataset.lower().replace("cifar-", "cifar")
                and f["model"] == cell.model.lower()
            )
            assert f.get("augment") == (None if cell.dataset == "ImageNet-200" else "crop,flip")
            parts = f"E=20;alpha=0.5;{cell.setting}".replace("homog", "alpha=none").split(";")
            setting = dict(part.split("=") for part in parts)
            assert (f["clients"], f["epochs"]) == (setting["C"], setting["E"])
            assert f["rounds"] == setting.get("R", "25") and f.get("sample") == setting.get("frac")
            assert f.get("alpha", "none") == setting["alpha"] and f["partition"] == (
                "dirichlet" if "alpha" in f else "iid"
            )
            own = {
                "fedprox": {"mu": "1e-4"},
                "moon": {"mu": "1", "temperature": "0.5", "projection": "256"},
                "mixup": {"gamma": "0.1"},
                "stochdepth": {"keep": "0.9"},
                "fedavg": {},
                "fedalign": {"mu": "0.45", "width": "0.25", "clip": "10"},
            }.get(cell.script)
            if cell.script == "gradaug":
                n = cell.method[10:-1] or "2"
                own = {
                    "subnets": n,
                    "mu": {"1": "2", "2": "1.75", "3": "1.5", "4": "1.25"}[n],
                    "min-width": "0.8",
                }
            assert own.items() <= f.items()
            assert ("clip" in f) == (cell.script == "fedalign") and ("projection" in f) == (
                cell.script == "moon"
            )
            assert ("save-clients" in f) == (table == "1")


def test_lines_of_fedcka():
    """Sec. 4.1: SGD, lr 0.1, momentum 0.9, weight decay 1e-5, batch 128, E 10, no augmentation; best mu as printed."""
    best = {
        "CIFAR-10": "0.001 10 3",
        "CIFAR-100": "0.1 5 10",
        "Tiny-ImageNet": "0.1 0.1 3",
    }  # FedProx, MOON, FedCKA
    for (paper, table), cells in CELLS.items():
        for cell in cells if paper == "FedCKA" and table != "fig5" else []:
            f = words_of(cell)
            assert (f["lr"], f["momentum"], f["weight-decay"], f["batch-size"]) == (
                "0.1",
                "0.9",
                "1e-5",
                "128",
            )
            assert (
                "no-nesterov" in f
                and f["augment"] == "none"
                and f["epochs"] == "10"
                and f["clients"] == "10"
            )
            assert (
                f["rounds"]
                == {"CIFAR-10": "100", "CIFAR-100": "40", "Tiny-ImageNet": "20"}[cell.dataset]
            )
            assert f["model"] == ("cnn" if cell.dataset == "CIFAR-10" else "resnet50")
            assert f.get("projection") == (None if cell.dataset == "CIFAR-10" else "256")
            assert f["partition"] == "dirichlet" and f"alpha={f['alpha']};" in cell.setting
            mus = {"0.5": "0.1 10 3", "0.1": "0.001 0.1 5", "5.0": best[cell.dataset]}[
                f["alpha"]
            ].split()
            assert f.get("mu") == dict(zip(("fedprox", "moon", "fedcka"), mus)).get(cell.script)
    assert [words_of(c).get("layers") for c in CELLS["FedCKA", "fig5"]] == [*"1234567", None]
    metrics = [words_of(c).get("similarity-metric") for c in CELLS["FedCKA", "3"]]
    assert metrics == [None, "frobenius", "cosine", "kernel-cka", "linear-cka"]
    assert words_of(CELLS["FedCKA", "fig5"][-1])["clients"] == "1"


def test_lines_of_fedmlb():
    """App. A: 1000 rounds, E 5, lr 0.1 x 0.998^t (FedADAM 0.01), batch 50 and 10, on Tiny-ImageNet 100 and 20; K steps."""
    for (paper, table), cells in CELLS.items():
        for cell in cells if paper == "FedMLB" else []:
            f = words_of(cell)
            assert (
                f["rounds"] == "1000"
                and f["lr-decay"] == "0.998"
                and f["momentum"] == "0"
                and f["weight-decay"] == "1e-3"
            )
            assert (
                f["clip"] == "10" and f["augment"] == "rotate10,crop,flip" and "drop-last" not in f
            )
            assert f.get("normalise") == ("cifar10" if f["dataset"] == "cifar100" else None)
            assert f["lr"] == ("0.01" if "ADAM" in cell.method else "0.1")
            name, n, part, k = cell.setting.split(";")[:4]
            assert (f["partition"], f.get("alpha")) == {"IID": ("iid", None)}.get(
                name, ("dirichlet-balanced", name[4:-1])
            )
            assert n == f"N={f['clients']}" and part == f"part={100 * float(f['sample']):g}%"
            samples = {"cifar100": 50_000, "tiny-imagenet": 100_000}[f["dataset"]] // int(
                f["clients"]
            )
            assert k == f"K={int(f['epochs']) * samples // int(f['batch-size'])}"
            if "ADAM" in cell.method:
                assert (f["server"], f["server-lr"], f["server-tau"]) == ("adam", "0.01", "0.001")
            assert f.get("server-momentum") == {"FedAvgM": "0.4", "FedADAM": "0.9"}.get(
                cell.method.split("+")[0]
            )
            assert f.get("dyn-alpha") == ("0.1" if "FedDyn" in cell.method else None)
            assert ("FedMLB" in cell.method) == (cell.script == "fedmlb")
            if cell.script == "fedmlb" and table not in ("7", "8"):
                assert (f["lambda1"], f["lambda2"], f["tau"]) == ("1", "1", "1")
    assert (
        len(CELLS["FedMLB", "6"]) == 31 == len({c.command for c in CELLS["FedMLB", "6"]})
    )  # subsets of 5 but the empty one
    for cell in CELLS["FedMLB", "6"]:
        assert cell.setting.endswith(
            f"num_pathways={len(words_of(cell).get('pathways', '1,2,3,4,5').split(','))}"
        )


def test_lines_of_rfedavg():
    """Sec. VI-A: N, E, SR, batch and rounds; lambda, mu and q by data set; lr 0.01 of FedProx across devices; the code's
    plain average and drop-last."""
    by_data = {
        "MNIST": ("60", "1e-4", "1", "1"),
        "CIFAR-10": ("200", "1e-5", "1", "1"),
        "Sent140": ("30", "0.1", "0.01", "1e-4"),
    }
    for table, n, epochs, share, batch in [
        ("I", "20", "5", "1", "100"),
        ("II", "500", "10", "0.2", "32"),
    ]:
        assert len(CELLS["rFedAvg", table]) == 48
        for cell in CELLS["rFedAvg", table]:
            f = words_of(cell)
            rounds, lam, mu, q = by_data[cell.dataset]
            text = cell.dataset == "Sent140"
            assert (f["clients"], f["epochs"], f["sample"], f["rounds"]) == (
                n,
                epochs,
                share,
                rounds,
            )
            assert (
                f["batch-size"] == ("10" if text else batch)
                and f["weighting"] == "uniform"
                and "drop-last" in f
            )
            assert f["lr"] == (
                "0.01" if text or table == "II" and cell.method == "FedProx" else "0.1"
            )
            assert ("persist-opt" in f) == text
            assert f.get("optimizer") == ("rmsprop" if text else None) and (
                f["momentum"],
                f["weight-decay"],
            ) == ("0", "0")
            assert f["augment"] == "none" and f["model"] == ("lstm" if text else "cnn-mcmahan")
            assert (f.get("image-size"), f.get("normalise")) == (
                ("28", "half") if cell.dataset == "CIFAR-10" else (None, None)
            )
            if text:
                assert (
                    f["partition"] == ("natural" if "nonIID" in cell.setting else "natural-iid")
                    and f["users"] == "500"
                )
            else:
                assert f["partition"] == "similarity" and cell.setting.endswith(
                    f"sim={f['similarity']}%"
                )
            own = {
                "FedProx": ("mu", mu),
                "q-FedAvg": ("q", q),
                "rFedAvg": ("lam", lam),
                "rFedAvg+": ("lam", lam),
            }
            if cell.method in own:
                assert f[own[cell.method][0]] == own[cell.method][1]
            assert f.get("variant", cell.method.lower()) == cell.method.lower()
    equal = [c for c in CELLS["rFedAvg", "fig9c"] if ";C=200" not in c.setting]  # E C = 200
    assert (
        all(int(words_of(c)["epochs"]) * int(words_of(c)["rounds"]) == 200 for c in equal)
        and len(equal) == 9
    )


def test_a_command_of_several_tables_has_one_home():
    align = {cell.method: cell for cell in CELLS["FedAlign", "5"]}
    assert (
        tables.home(align["FedAvg"]).table == "1"
        and "--save-clients" in tables.home(align["FedAvg"]).command
    )
    assert tables.home(align["FedAlign"]).table == "5"
    folders = {}
    for command, cell in tables.homes().items():
        folder = cell.paper, cell.table, reproduce.slug(f"{cell.label} {cell.method}")
        assert folders.setdefault(folder, command) == command


# ----------------------------------------------------------------------------------------------------------------------
# compare.py
# ----------------------------------------------------------------------------------------------------------------------


def test_figures_by_hand(tmp_path):
    """Accuracies 0, 10, 20, -, 40, 50, 60 (one round without evaluation). Last five: 10, 20, 40, 50, 60: mean 36, deviation
    sqrt((26^2 + 16^2 + 4^2 + 14^2 + 24^2) / 5) = sqrt(344). EMA by its recursion a <- 0.9 a + 0.1 x from 0, over 1 - 0.9^i."""
    accuracies = (0, 10, 20, None, 40, 50, 60)
    run = compare.read_run(make_run(tmp_path / "a", "fedavg.py --rounds 7", accuracies=accuracies))
    ema, found = 0, {}
    for i, a in enumerate((0, 10, 20, 40, 50, 60), 1):
        ema = 0.9 * ema + 0.1 * a
        found[i] = ema / (1 - 0.9**i)
    got = compare.figures(run, 7, at=[2, 4, 7], targets=[found[4] - 0.01, found[4] + 0.01, 60])
    assert (got["last"], got["best"], got["last five"]) == (60, 60, pytest.approx(36))
    assert got["their deviation"] == pytest.approx(344**0.5)
    assert (got["EMA"], got["EMA@2"], got["EMA@4"]) == (
        pytest.approx(found[6]),
        pytest.approx(found[2]),
        None,
    )
    assert [v for k, v in got.items() if k.startswith("to ")] == [
        5,
        6,
        None,
    ]  # the fourth evaluation was in round 5
    assert got["s/round"] == 4 and got["MB/round"] == pytest.approx(
        0.004
    )  # of 1, 2, ..., 7 seconds and kB
    assert compare.figures(run, 3)["last"] == 20
    mean = compare.Mean.of([1.0, 4.0, 7.0])
    assert (mean.mean, mean.std, mean.n) == (4, pytest.approx(3), 3)  # sqrt((9 + 0 + 9) / 2)
    assert compare.Mean.of([5.0]).std is None and compare.Mean.of([None, 2.0]).missed == 1


def change(folder, alter):
    """Rows of metrics.jsonl, altered in place by alter(row)."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        alter(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_seconds_are_medians_and_bytes_are_means(tmp_path):
    """Of rounds 1 to 4 the last took 100 seconds and a megabyte: median 2.5 seconds, mean (1 + 2 + 3) kB + 1 MB over 4."""

    def slow(row):
        if row["round"] == 4:
            row.update(seconds={"train": 90.0, "evaluate": 10.0}, bytes_up=999_000, bytes_down=1000)

    run = compare.read_run(change(make_run(tmp_path / "a"), slow))
    got = compare.figures(run, 4, targets=[run.rows[1]["acc_ema"]])
    assert (
        got["s/round"] == 2.5
        and got["train s/round"] == 1.25
        and got["MB/round"] == pytest.approx(1.006 / 4)
    )
    assert list(got.values())[5] == 2  # a target is reached by what equals it


def test_what_decides_a_result(tmp_path):
    """--precision does, --workers does not; an augmentation counts as what it comes to, word vectors by their file's name."""
    line = "fedavg.py --dataset glyphs --rounds 4"
    made = [
        make_run(tmp_path / str(i), line + more, seed=i)
        for i, more in enumerate(
            [
                "",
                " --augment none",
                " --workers 2",
                " --data-dir x",
                " --precision bf16",
                " --augment flip",
                " --data-seed 1",
            ]
        )
    ]
    groups = compare.grouped([compare.read_run(path) for path in made], print)
    assert [[run.path.name for run in group.runs] for group in groups] == [
        ["0", "1", "2", "3"],
        ["4"],
        ["5"],
        ["6"],
    ]
    text = "fedavg.py --dataset sent140 --model lstm --vectors "
    a, b, drawn = (
        compare.decisive(tables.parsed(text + v)) for v in ("data/g.txt", "/mnt/g.txt", "random")
    )
    assert a == b != drawn


def test_only_plain_fedavg_on_the_same_machine_is_a_baseline(tmp_path):
    line = " --dataset glyphs --rounds 4"
    runs = [
        compare.read_run(make_run(tmp_path / name, command + line))
        for name, command in zip(
            ("prox", "avgm", "adam", "avg"),
            ("fedprox.py", "fedavg.py --server avgm", "fedavg.py --server adam", "fedavg.py"),
        )
    ]
    prox, *others, plain = compare.grouped(runs, print)
    assert compare.baseline(prox, [prox, *others]) is None
    assert compare.baseline(prox, [prox, *others, plain]) is plain and compare.comparable(
        prox, plain
    )
    for change_ in (
        dict(workers=2),
        dict(hardware="H"),
        dict(flags={**plain.flags, "precision": "bf16"}),
    ):
        other = compare.dataclasses.replace(plain.runs[0], **change_)
        assert not compare.comparable(prox, compare.Group([other], [], 4))


def test_of_the_same_run_the_one_with_more_figures_stays(tmp_path, capsys):
    """and the worst client's accuracy says of how many runs it is."""
    make_run(tmp_path / "a0")
    make_run(
        tmp_path / "b0", "fedavg.py --dataset glyphs --rounds 4 --client-test", client_acc_worst=7.0
    )
    make_run(tmp_path / "c1", seed=1)
    _, out, err = run_compare(capsys, tmp_path / "a0", tmp_path / "b0", tmp_path / "c1")
    assert "a0: left out" in err and "7.00 (n = 1)" in out
    _, out, _ = run_compare(capsys, tmp_path / "c1", tmp_path / "b0")
    assert "7.00 (n = 1)" in out


def test_runs_that_are_not_the_cell_have_no_published_number(tmp_path, capsys):
    """Another partition, word vectors that are drawn; and a mean over some of the subsets has no difference."""
    command = CELLS["FedAlign", "1"][0].command
    text = next(c.command for c in CELLS["rFedAvg", "I"] if c.dataset == "Sent140")
    drawn = text.replace("data/glove.6B.300d.txt", "random")
    for i, line in enumerate(
        (
            f"{command} --data-seed 1",
            drawn,
            text.replace("data/", "/mnt/"),
            f"{command} --augment auto",
        )
    ):
        rounds = tables.parsed(line)["rounds"]
        make_run(tmp_path / str(i), line, accuracies=[50.0] * rounds)
    groups = [compare.grouped([compare.read_run(tmp_path / str(i))], print)[0] for i in range(4)]
    assert [bool(list(compare.cells_of(group))) for group in groups] == [False, False, True, True]
    four = [c for c in CELLS["FedMLB", "6"] if c.setting.endswith("num_pathways=4")][:2]
    made = [
        make_run(tmp_path / f"m{i}", c.command, accuracies=[50.0] * 1000)
        for i, c in enumerate(four)
    ]
    _, out, _ = run_compare(capsys, *made)
    assert re.search(
        r"EMA at round 1000 +2 of 5 subsets of n = 1 +50\.00 \+- 0\.00 +53\.69 \+- 1\.43 +x86_64",
        out,
    )


def test_hessians_stand_beside_the_published_ones(tmp_path, capsys):
    """FedAlign, Table 1, FedAvg: 297, 6240, 11360, 0.98; H_N and H_D of the authors' reading alone."""
    found = {
        "eigenvalues": [{"value": 300.0}],
        "trace": {"value": 6000.0},
        "H_N": 11000.0,
        "H_D": 0.5,
    }
    for seed, diagonal in enumerate(("tensor", "elementwise")):
        run = make_run(tmp_path / str(seed), CELLS["FedAlign", "1"][0].command, seed, [50.0] * 25)
        (run / "hessian.json").write_text(json.dumps({**found, "settings": {"diagonal": diagonal}}))
    _, out, _ = run_compare(capsys, tmp_path / "0", tmp_path / "1")
    for name, n, published, difference in (
        ("lambda_max", 2, 297, "+3.00"),
        ("H_T", 2, 6240, "-240.00"),
        ("H_N", 1, 11360, "-360.00"),
        ("H_D", 1, 0.98, "-0.48"),
    ):
        assert re.search(rf" {name} +{n} .* {published} +{re.escape(difference)}", out), name
    (tmp_path / "0" / "hessian.json").write_text("[]")
    assert run_compare(capsys, tmp_path / "0")[0] == 0


def test_the_centralised_bound(tmp_path, capsys):
    cell = next(c for c in CELLS["FedCKA", "fig5"] if c.method == "centralised")
    _, out, _ = run_compare(capsys, make_run(tmp_path / "a", cell.command, accuracies=[69.0] * 100))
    assert re.search(r"FedCKA fig5 .*acc, last +1 +69\.00 +70 +-1\.00", out)


def test_fedcka_s_times_are_of_training(tmp_path, capsys):
    """Frobenius: 64.73 / 54.82 = 1.18 beside 30 seconds over 10 in training, whatever evaluation took."""
    cells = CELLS["FedCKA", "3"]
    runs = [
        make_run(
            tmp_path / str(i),
            cells[i].command,
            accuracies=[1.0] * 100,
            seconds={"train": t, "evaluate": 50.0},
        )
        for i, t in ((0, 10.0), (1, 30.0))
    ]
    _, out, _ = run_compare(capsys, *runs)
    assert re.search(r"FrobeniusNorm +training seconds x FedAvg +1 +3\.00 +1\.18 ", out)


def test_nothing_is_overwritten(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    (tmp_path / "old.csv").write_text("x")
    before = (run / "metrics.jsonl").read_bytes()
    for flag, path, message in (
        ("--csv", tmp_path / "old.csv", "exists already"),
        ("--csv", run / "metrics.jsonl", "exists"),
        ("--csv", run / "new.csv", "inside the run folder"),
        ("--csv", tmp_path / "no" / "x", "there is no folder"),
        ("--plot", run / "x.png", "inside the run folder"),
    ):
        code, out, err = run_compare(capsys, run, flag, path)
        assert code == 2 and message in err and flag in err and err.count("\n") == 1 and not out
    assert (tmp_path / "old.csv").read_text() == "x" and (
        run / "metrics.jsonl"
    ).read_bytes() == before


def test_groups_are_runs_that_differ_by_seed_only(tmp_path):
    """The machine's flags count for nothing, others do; the same seed twice is one run; cut runs do not enter a mean."""
    made = [
        make_run(tmp_path / "a0"),
        make_run(tmp_path / "a1", seed=1, accuracies=(10, 20, 30, 50)),
        make_run(
            tmp_path / "a2",
            "fedavg.py --dataset glyphs --rounds 4 --workers 2",
            seed=2,
            accuracies=(1, 2),
        ),
        make_run(tmp_path / "again"),
        make_run(tmp_path / "empty", seed=3, accuracies=()),
        make_run(tmp_path / "other", "fedavg.py --dataset glyphs --rounds 4 --lr 0.02"),
        make_run(tmp_path / "cut0", "fedavg.py --dataset glyphs --rounds 9", accuracies=(1, 2, 3)),
        make_run(
            tmp_path / "cut1", "fedavg.py --dataset glyphs --rounds 9", seed=1, accuracies=(3, 4)
        ),
    ]
    told = []
    first, other, cut = compare.grouped([compare.read_run(path) for path in made], told.append)
    assert [run.path.name for run in first.runs] == ["a0", "a1"] and first.count() == "2 + 1 at 2/4"
    assert compare.means(first)["last"].mean == 45 and compare.means(first)[
        "last"
    ].std == pytest.approx(50**0.5)
    assert other.count() == "1"
    assert (
        cut.count() == "2 at 2/9" and compare.means(cut)["last"].mean == 3
    )  # round 2 of both: 2 and 4
    assert len(told) == 2 and "again" in told[0] and "a0" in told[0] and "empty" in told[1]


def test_censored_rounds_are_shown_as_such(tmp_path, capsys):
    make_run(tmp_path / "a", seed=0, accuracies=(50, 60, 70, 80))
    make_run(tmp_path / "b", seed=1, accuracies=(10, 10, 10, 10))
    code, out, _ = run_compare(capsys, tmp_path / "a", tmp_path / "b", "--target", "45,99")
    assert code == 0 and "4+ (1 of 2: 1)" in out and re.search(r"4\+ +\d", out)
    assert "45.00 +- 49.50" in out  # last: 80 and 10, deviation 70 / sqrt 2


def test_relative_to_the_fedavg_of_the_same_setting(tmp_path, capsys):
    """Bytes and seconds over those of fedavg.py with the same alpha; none without one."""
    for alpha, scale in ((0.1, 1), (0.5, 2)):
        make_run(
            tmp_path / f"avg{alpha}",
            f"fedavg.py --dataset glyphs --rounds 4 --alpha {alpha}",
            bytes_up=1000 * scale,
        )
        make_run(
            tmp_path / f"prox{alpha}",
            f"fedprox.py --dataset glyphs --rounds 4 --alpha {alpha}",
            bytes_up=5000,
        )
    make_run(
        tmp_path / "delta", "rfedavg.py --dataset glyphs --rounds 4 --alpha 0.7", bytes_delta=8400
    )
    make_run(tmp_path / "lonely", "fedprox.py --dataset glyphs --rounds 4 --alpha 0.7")
    _, out, _ = run_compare(capsys, *sorted(tmp_path.iterdir()), "--csv", tmp_path / "t.csv")
    lines = {tuple(line.split()[:3]): line for line in out.splitlines()}
    # bytes_down is 500 t, 1250 on average: (1250 + 5000) / (1250 + 1000) and / (1250 + 2000)
    assert (
        "(2.78x)" in lines["alpha", "0.1", "fedprox"]
        and "(1.92x)" in lines["alpha", "0.5", "fedprox"]
    )
    assert (
        "x)" not in lines["alpha", "0.7", "fedprox"]
        and " 4,200 " in lines["alpha", "0.7", "rfedavg"]
    )  # of 2 clients
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert all(row["n"] == "1" and row["hardware"] == "x86_64, 2 cores" for row in rows)
    assert {row["figure"] for row in rows} >= {
        "last",
        "best",
        "EMA",
        "last five",
        "s/round",
        "MB/round",
    }


def test_published_number_beside_the_measured(tmp_path, capsys):
    """FedAlign, Table 5: 56.9 +- 0.5 beside 60 and 62 in the last round, 63 and 62 in the best; other flags match nothing."""
    command = next(c.command for c in CELLS["FedAlign", "5"] if c.method == "FedAlign")
    for seed, last in ((0, 60), (1, 62)):
        make_run(tmp_path / f"a{seed}", command, seed, [50.0] * 23 + [63.0 - seed, last])
    make_run(tmp_path / "b", command.replace("--lr 0.01", "--lr 0.02"), accuracies=[1.0] * 25)
    make_run(
        tmp_path / "c", command + " --lip-scale none", accuracies=[1.0] * 25
    )  # a flag that the line leaves at its default
    code, out, _ = run_compare(capsys, *sorted(tmp_path.iterdir()), "--markdown")
    beside = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("| FedAlign 5")
    ]
    setting, cores = "CIFAR-100 ResNet56 C=16;E=20;R=25;alpha=0.5", "x86_64, 2 cores"
    assert beside == [
        [
            "FedAlign 5",
            setting,
            "FedAlign",
            "acc, last",
            "2",
            "61.00 +- 1.41",
            "56.9 +- 0.5",
            "+4.10",
            cores,
        ],
        [
            "FedAlign 5",
            setting,
            "FedAlign",
            "acc, best",
            "2",
            "62.50 +- 0.71",
            "56.9 +- 0.5",
            "+5.60",
            cores,
        ],
    ]
    assert code == 0 and "commit 0123456+" in out and "torch 2.15.0" in out


def test_each_paper_is_compared_by_its_own_figure(tmp_path, capsys):
    """FedMLB by the EMA at a round and by rounds to a target, and over the subsets of Table 6; FedAlign's time by its ratio
    to FedAvg (161.9 / 137.2 = 1.18). A run that was cut gets no difference."""
    for cell in [
        c for c in CELLS["FedMLB", "6"] if c.setting.endswith("num_pathways=4")
    ]:  # 1234, 1235, ...
        level = 50.0 + int(words_of(cell)["pathways"][-1])  # 54, 55, 55, 55, 55
        make_run(
            tmp_path / words_of(cell)["pathways"].replace(",", ""),
            cell.command,
            accuracies=[level] * 1000,
        )
    _, out, _ = run_compare(capsys, *tmp_path.iterdir())
    assert re.search(
        r"num_pathways=4 +FedMLB +EMA at round 1000 +5 subsets of n = 1 +54\.80 \+- 0\.45 +53\.69 \+- 1\.43 +\+1\.11",
        out,
    )
    first = CELLS["FedMLB", "1a"][0].command
    run = [make_run(tmp_path / "x" / "avg", first, accuracies=[40.0] * 400 + [60.0] * 600)]
    _, out, _ = run_compare(capsys, *run)
    assert re.search(
        r"rounds to 47% +1 +405 +924 +-519\.00", out
    )  # 60 - 20 x 0.9^i > 47 first at i = 5
    align = {c.method: c.command for c in CELLS["FedAlign", "5"]}
    avg = make_run(tmp_path / "y" / "avg", align["FedAvg"], accuracies=[1.0] * 25)
    prox = make_run(
        tmp_path / "y" / "prox", align["FedProx"], accuracies=[1.0] * 20, seconds={"train": 21.0}
    )
    _, out, _ = run_compare(capsys, avg, prox)
    assert re.search(
        r"FedProx +seconds x FedAvg +1 at 20/25 +1\.62 +1\.18 +x86_64, 2 cores\n", out
    )  # 21 / 13; medians


def test_rfedavg_is_compared_by_its_last_five_rounds(tmp_path, capsys):
    """97.07 +- 0.34 beside last five 90, 92, 94, 96, 98: 94 +- sqrt(8)."""
    command = next(c.command for c in CELLS["rFedAvg", "I"] if c.dataset == "MNIST")
    make_run(tmp_path / "a", command, accuracies=[10.0] * 55 + [90.0, 92.0, 94.0, 96.0, 98.0])
    _, out, _ = run_compare(capsys, tmp_path / "a")
    assert re.search(
        r"mean of last five \+- over rounds +1 +94\.00 \+- 2\.83 +97\.07 \+- 0\.34 +-3\.07", out
    )


def test_a_line_being_written_does_not_count(tmp_path):
    path = make_run(tmp_path / "a")
    with open(path / "metrics.jsonl", "a") as f:
        f.write('{"round": 5, "test_a')
    assert len(compare.read_run(path).rows) == 4


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", None, "no run, since it has no config.json"),
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "[]", "config.json is damaged"),
        ("config.json", '{"script": 1, "flags": {}}', "config.json is damaged"),
        ("metrics.jsonl", "{}\n", "line 1 is damaged; it should be the row of round 1"),
        ("metrics.jsonl", '"\n', "line 1 is damaged"),
        ("metrics.jsonl", "\xff\n", "line 1 is damaged"),
    ],
)
def test_a_damaged_folder_gets_one_line(tmp_path, capsys, name, content, message):
    """and the others are shown; exit code 2."""
    make_run(tmp_path / "good")
    bad = make_run(tmp_path / "bad")
    (bad / name).unlink() if content is None else (bad / name).write_text(
        content, encoding="latin-1"
    )
    code, out, err = run_compare(capsys, bad, tmp_path / "good")
    assert code == 2 and message in err and err.count("\n") == 1 and str(bad) in err
    assert "fedavg" in out
    code, out, err = run_compare(capsys, bad)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_curves_by_hand(tmp_path, capsys):
    """Mean and sample deviation over seeds at each evaluated round, against rounds, seconds 1, 3, 6, 10 and bytes."""
    make_run(tmp_path / "a", accuracies=(10, None, 30, 40))
    make_run(tmp_path / "b", seed=1, accuracies=(20, None, 30, 60))
    runs = [compare.read_run(tmp_path / name) for name in "ab"]
    (group,) = compare.grouped(runs, print)
    at, mean, deviation = compare.curve(group, "rounds", "accuracy")
    assert (at, mean, deviation) == (
        [1, 3, 4],
        [15, 30, 50],
        [pytest.approx(50**0.5), 0, pytest.approx(200**0.5)],
    )
    assert compare.curve(group, "seconds", "accuracy")[0] == [1, 6, 10]
    assert compare.curve(group, "bytes", "accuracy")[0] == pytest.approx([1e-6, 6e-6, 10e-6])
    assert compare.curve(group, "rounds", "train_loss")[1] == pytest.approx([2, 1, 2 / 3, 0.5])
    (single,) = compare.grouped(runs[:1], print)
    assert compare.curve(single, "rounds", "ema")[2] is None


def test_pictures(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run_compare(capsys, *runs, "--plot", tmp_path / "x.png")
    assert code == 2 and "needs matplotlib" in err and err.count("\n") == 1
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for name, start in (("x.png", b"\x89PNG"), ("x.pdf", b"%PDF")):
        assert (
            run_compare(
                capsys, *runs, "--plot", tmp_path / name, "--x", "bytes", "--y", "ema,test_loss"
            )[0]
            == 0
        )
        assert (tmp_path / name).read_bytes().startswith(start)
    code, _, err = run_compare(capsys, *runs, "--plot", tmp_path / "x.docx")
    assert code == 2 and "x.docx" in err and err.count("\n") == 1
    assert not (tmp_path / "x.docx").exists()


def groups_of(tmp_path, *commands):
    """Finished runs of two seeds each, whose last accuracies are 10, 14; 20, 24; ..."""
    runs = [
        make_run(
            tmp_path / f"{i}-{seed}", f"{command} --rounds 1", seed, accuracies=[10 * i + 4 * seed]
        )
        for i, command in enumerate(commands, 1)
        for seed in (0, 1)
    ]
    return compare.grouped([compare.read_run(run) for run in runs], print)


def test_lines_against_a_flag_by_hand(tmp_path):
    """In order of the flag, a line for each value of the others; without the flag a level; those left alone one line if they
    differ in their rounds besides; seconds of other machines a line of their own."""

    def lines(x, *commands):
        groups = groups_of(tmp_path / str(len(list(tmp_path.iterdir()))), *commands)
        return [
            (label, [(value, groups.index(group) + 1) for value, group in line])
            for label, line in compare.lines_over(groups, None, x)
        ]

    mlb = "fedprox.py --dataset glyphs --epochs"
    assert lines("mu", "fedprox.py --mu 1", "fedavg.py", "fedprox.py --mu 0.01") == [
        ("fedprox", [(0.01, 3), (1.0, 1)]),
        ("fedavg", [("mu", 2)]),
    ]
    assert lines(
        "mu",
        "fedprox.py --mu 1",
        "fedprox.py --mu 1 --lr 0.1",
        "fedprox.py --mu 2",
        "fedprox.py --mu 2 --lr 0.1",
    ) == [("fedprox, lr 0.01", [(1.0, 1), (2.0, 3)]), ("fedprox, lr 0.1", [(1.0, 2), (2.0, 4)])]
    assert lines(
        "epochs",
        f"{mlb} 5",
        f"{mlb} 1",
        f"{mlb} 2 --batch-size 8",
        f"{mlb} 4 --batch-size 4",
        f"{mlb} 3 --lr 0.5",
    ) == [
        ("fedprox, batch_size 64, lr 0.01", [(1, 2), (5, 1)]),
        ("fedprox, batch_size 8 4, lr 0.01", [(2, 3), (4, 4)]),
        ("fedprox, batch_size 64, lr 0.5", [(3, 5)]),
    ]
    assert lines("pathways", *(f"fedmlb.py --pathways {p}" for p in ("2,3", "1", "1,2,3"))) == [
        ("fedmlb", [([1], 2), ([2, 3], 1), ([1, 2, 3], 3)])
    ]
    assert lines("s/round", f"{mlb} 5", f"{mlb} 1", f"{mlb} 2 --clients 8") == [
        ("fedprox, clients 16", [(1, 1), (1, 2)]),
        ("fedprox, clients 8", [(1, 3)]),
    ]
    groups = groups_of(tmp_path / "machines", f"{mlb} 5", f"{mlb} 1")
    for run in groups[1].runs:
        run.hardware = "NVIDIA H200"
    assert [(label, len(line)) for label, line in compare.lines_over(groups, None, "s/round")] == [
        ("fedprox, x86_64, 2 cores", 1),
        ("fedprox, NVIDIA H200", 1),
    ]


def test_pictures_against_a_flag(tmp_path, capsys, monkeypatch):
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    groups = groups_of(tmp_path, "rfedavg.py --lam 0.1", "rfedavg.py --lam 1e-5", "fedavg.py")
    folders = [run.path for group in groups for run in group.runs]
    assert run_compare(capsys, *folders, "--plot", tmp_path / "x.png", "--x", "lam")[0] == 0
    (ax,) = drawn[0].axes
    (line,) = ax.containers
    assert (
        line.lines[0].get_xydata().tolist() == [[1e-5, 22], [0.1, 12]] and ax.get_xscale() == "log"
    )
    assert line.lines[2][0].get_segments()[1][:, 1].tolist() == pytest.approx(
        [12 - 8**0.5, 12 + 8**0.5]
    )
    (level,) = (h for h in ax.get_lines() if h.get_label() == "fedavg")
    assert (
        list(level.get_ydata()) == [32, 32]
        and ax.get_xlabel() == "--lam"
        and ax.get_ylabel() == "Test accuracy (%)"
    )
    code, out, err = run_compare(capsys, *folders, "--plot", tmp_path / "y.png", "--x", "layers")
    assert (
        code == 2
        and "argument --x: layers is no flag that decides these runs" in err
        and err.count("\n") == 1
    )
    assert not (tmp_path / "y.png").exists()
    for name in ("seed", "workers", "split-file"):  # no setting, and one that no run has a value of
        assert (
            "argument --x"
            in run_compare(capsys, *folders, "--plot", tmp_path / "y.png", "--x", name)[2]
        )
    # words, of which a missing one is a value too; numbers too close to tell apart lie side by side
    groups = groups_of(tmp_path / "p", "fedmlb.py --pathways 1,2", "fedmlb.py")
    run_compare(
        capsys,
        *(run.path for group in groups for run in group.runs),
        "--plot",
        tmp_path / "p.png",
        "--x",
        "pathways",
    )
    assert [t.get_text() for t in drawn[-1].axes[0].get_xticklabels()] == ["1,2", "default"]
    groups = groups_of(tmp_path / "q", *(f"fedprox.py --mu {mu}" for mu in (0, 1, 50)))
    run_compare(
        capsys,
        *(run.path for group in groups for run in group.runs),
        "--plot",
        tmp_path / "q.png",
        "--x",
        "mu",
    )
    assert [t.get_text() for t in drawn[-1].axes[0].get_xticklabels()] == ["0", "1", "50"]
    assert drawn[-1].axes[0].containers[0].lines[0].get_xdata().tolist() == [0, 1, 2]


def test_runs_that_were_cut_are_no_points(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runs = [
        make_run(tmp_path / str(mu), f"fedprox.py --mu {mu} --rounds 4", accuracies=accuracies)
        for mu, accuracies in ((1, [1.0, 2.0]), (2, [1.0, 2.0, 3.0, 4.0]))
    ]
    code, _, err = run_compare(capsys, *runs, "--x", "mu", "--plot", tmp_path / "x.png")
    assert (
        code == 0
        and "1 of 2 rows are of runs that were cut, and are not drawn" in err
        and (tmp_path / "x.png").exists()
    )
    code, _, err = run_compare(capsys, runs[0], "--x", "mu", "--plot", tmp_path / "y.png")
    assert code == 0 and "1 of 1 rows" in err and not (tmp_path / "y.png").exists()
    # a level alone, since all that have the flag were cut; and what no run has measured
    runs = [runs[0], make_run(tmp_path / "level", accuracies=[1.0, 2.0, 3.0, 4.0])]
    code, _, err = run_compare(capsys, *runs, "--x", "mu", "--plot", tmp_path / "z.png")
    assert code == 0 and "1 of 2 rows" in err and (tmp_path / "z.png").exists()
    for y, there in (("worst", False), ("worst,ema", True)):
        code, _, err = run_compare(
            capsys, *runs, "--x", "mu", "--y", y, "--plot", tmp_path / "w.png"
        )
        assert (
            code == 0
            and "worst: not measured in these runs" in err
            and (tmp_path / "w.png").exists() == there
        )


@pytest.mark.parametrize(
    "command",
    [
        CELLS["rFedAvg", "I"][0].command,
        CELLS["FedAlign", "5"][0].command,
        CELLS["FedCKA", "4"][0].command,
        CELLS["FedMLB", "6"][0].command,
    ],
)
def test_runs_without_an_evaluation_yet(tmp_path, capsys, command):
    """--eval-every leaves rows without accuracy: they have seconds and bytes, and no accuracy anywhere."""
    run = make_run(tmp_path / "run", command, accuracies=[None, None])
    flags = ["--at", "500", "--target", "40", "--csv", tmp_path / "x.csv", "--over", "lr"]
    code, out, err = run_compare(capsys, run, *flags)
    assert (
        code == 0 and not err and "1 at 2/" in out and re.search(r" 1\.50 \(1\.00x\)| 1\.50 ", out)
    )
    pytest.importorskip("matplotlib")
    for x in ("rounds", "lr", "s/round"):
        assert run_compare(capsys, run, "--plot", tmp_path / f"{x[0]}.png", "--x", x)[0] == 0


def test_tables_go_into_a_file(tmp_path, capsys):
    """Between its marks, and nothing else is touched; not at all where marks are missing or a run is damaged."""
    run, page = make_run(tmp_path / "run"), tmp_path / "page.md"
    for text in ("", "\n".join(compare.MARKS[::-1]), compare.MARKS[0]):
        page.write_text(text)
        code, out, err = run_compare(capsys, run, "--into", page)
        assert (
            code == 2
            and "argument --into" in err
            and err.count("\n") == 1
            and page.read_text() == text
        )
    assert "argument --into" in run_compare(capsys, run, "--into", tmp_path / "no.md")[2]
    page.write_text(f"before\n{compare.MARKS[0]}old\n{compare.MARKS[1]}after\n")
    assert run_compare(capsys, run, "--into", page) == (0, "", "")
    _, tables_, _ = run_compare(capsys, run, "--markdown")
    assert page.read_text() == f"before\n{compare.MARKS[0]}\n{tables_}\n{compare.MARKS[1]}after\n"
    page.chmod(0o755)
    (tmp_path / "link.md").symlink_to(page)
    assert run_compare(capsys, run, "--into", tmp_path / "link.md")[0] == 0
    assert (tmp_path / "link.md").is_symlink() and page.stat().st_mode & 0o777 == 0o755
    (tmp_path / "bad").mkdir()
    assert (
        run_compare(capsys, run, tmp_path / "bad", "--into", page)[0] == 2
        and tables_ in page.read_text()
    )


def test_the_readme_s_results_are_those_kept(capsys, tmp_path, monkeypatch):
    """README's section is what compare.py makes of results/, every row with n and hardware."""
    monkeypatch.chdir(ROOT)
    page, runs = (
        tmp_path / "README.md",
        [str(p.parent.relative_to(ROOT)) for p in ROOT.glob("results/*/*/config.json")],
    )
    page.write_text((ROOT / "README.md").read_text())
    assert runs and run_compare(capsys, *runs, "--into", page)[0] == 0
    assert page.read_text() == (ROOT / "README.md").read_text()
    section = page.read_text().partition(compare.MARKS[0])[2].partition(compare.MARKS[1])[0]
    head, *rows = [
        line.split(" | ")
        for line in section.splitlines()
        if line.startswith("|") and "---" not in line
    ]
    assert (
        "n" in head
        and head[-1] == "hardware |"
        and all(
            "cores" in row[-1] or "NVIDIA" in row[-1] for row in rows if row[-1] != "hardware |"
        )
    )
    for run in runs:
        flags = json.loads((ROOT / run / "config.json").read_text())["flags"]
        assert not any(str(v).startswith("/") for v in flags.values())


# ----------------------------------------------------------------------------------------------------------------------
# reproduce.py
# ----------------------------------------------------------------------------------------------------------------------


def run_reproduce(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        reproduce.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return e.value.code, out, err


def test_dry_run_prints_what_is_left(tmp_path, capsys):
    argv = ["fedalign", "5", "--dry-run", "--seeds", "2", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv, "--only", "FedAvg,gradaug")
    lines = [line for line in out.splitlines() if not line.startswith("python cost.py")]
    assert code == 0 and len(lines) == 10 and out.count("python cost.py") == 5
    folder = tmp_path / "fedalign-1" / "CIFAR-100-ResNet56-C16-E20-R25-alpha0.5-FedAvg-seed0"
    assert lines[0].endswith(f"--seed 0 --out {folder}") and "--seed 1" in lines[5]
    for line in lines:
        assert SCRIPTS[shlex.split(line)[1].removesuffix(".py")] and tables.parsed(
            line.removeprefix("python ")
        )
    command = tables.home(CELLS["FedAlign", "5"][0]).command
    make_run(folder, command, accuracies=[1.0] * 25)
    make_run(
        folder.with_name(folder.name.replace("seed0", "seed1")), command, 1, accuracies=[1.0] * 3
    )
    _, out, _ = run_reproduce(capsys, *argv, "--only", "fedavg")
    (line,) = [line for line in out.splitlines() if not line.startswith("python cost.py")]
    assert "--seed 1" in line and line.endswith("--resume")


def test_small_scale_is_a_smaller_line(capsys, tmp_path):
    """FedAlign: clients / 2, rounds / 2.5, an epoch is a step; StochDepth needs residual blocks and says so."""
    _, out, _ = run_reproduce(
        capsys, "fedalign", "5", "--dry-run", "--scale", "small", "--runs", tmp_path
    )
    lines = [line for line in out.splitlines() if line.startswith("python")]
    assert (
        len(lines) == 9
        and "StochDepth" in out.splitlines()[0]
        and "SMALL SCALE" in out.splitlines()[1]
    )
    flags = tables.parsed(lines[-1].removeprefix("python "))
    assert (flags["dataset"], flags["model"]) == ("glyphs", "cnn")
    assert (flags["clients"], flags["rounds"], flags["local_steps"]) == (8, 10, 20)
    assert (flags["mu"], flags["lr"], flags["clip"], flags["alpha"]) == (
        0.45,
        0.01,
        10,
        0.5,
    ) and not flags["save_clients"]
    assert "small-glyphs-fedalign-5/small-" in lines[-1]
    for table, distinct in (
        ("9", 4),
        ("4", 6),
    ):  # of five networks and four settings, and of no two alike
        _, out, _ = run_reproduce(
            capsys, "fedmlb", table, "--dry-run", "--scale", "small", "--runs", tmp_path
        )
        assert sum(line.startswith("python") for line in out.splitlines()) == distinct
    silo = next(c for c in CELLS["rFedAvg", "I"] if c.setting.endswith("nonIID"))
    line = reproduce.small(silo, "folder")
    assert (
        "--vectors" not in line
        and "--users" not in line
        and "--dataset folder --model cnn" in line.replace("  ", " ")
    )
    assert "--clients 10 " in line and "--rounds 2 " in line and "--local-steps 5" in line


@pytest.mark.parametrize(
    "words, message",
    [
        (["--sweep", "lr=1,2", "--sweep", "lr=3"], "lr is swept twice"),
        (["--sweep", "workers=1,2"], "decides no result"),
        (["--sweep", "vectors=w_1,w-1"], "share the folder"),
        (["--sweep", "data-dir=a,b", "--data-dir", "c"], "is swept already"),
    ],
)
def test_sweeps_that_cannot_be_told_apart(capsys, tmp_path, words, message):
    code, out, err = run_reproduce(
        capsys, "fedavg.py", *shlex.split(GLYPHS), *words, "--runs", tmp_path, "--dry-run"
    )
    assert code == 2 and message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    "words, message",
    [
        (["fedalign", "5", "--only", ""], "argument --only"),
        (["fedalign", "5", "--dataset", "folder"], "--dataset"),
        (["./fedavg.py", "1"], "PAPER"),
        (["./fedavg.py", "--sweep", "lr=1"], ""),
    ],
)
def test_what_would_be_ignored_is_refused(capsys, tmp_path, words, message):
    code, out, err = run_reproduce(capsys, *words, "--runs", tmp_path, "--dry-run")
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_only_takes_the_table_s_names_first():
    chosen = [
        reproduce.only(CELLS["FedMLB", "1a"], word)
        for word in ("FedAvg", "feddyn,FedADAM+FedMLB", "fedmlb")
    ]
    assert [sorted({c.method for c in cells}) for cells in chosen] == [
        ["FedAvg"],
        ["FedADAM+FedMLB", "FedDyn"],
        ["FedMLB"],
    ]
    assert {c.method for c in reproduce.only(CELLS["FedAlign", "5"], "gradaug")} == {
        f"GradAug(n={n})" for n in range(1, 5)
    }


def test_sweeps(capsys, tmp_path):
    assert reproduce.sweeps(["layers=1,2", "mu=3,5"]) == [
        {"layers": a, "mu": b} for a in "12" for b in "35"
    ]
    assert reproduce.sweeps(["--pathways=1/1,2"]) == [{"pathways": "1"}, {"pathways": "1,2"}]
    together = [{"epochs": "1", "rounds": "200"}, {"epochs": "2", "rounds": "100"}]
    assert reproduce.sweeps(["epochs,rounds=1,200/2,100"]) == together
    code, out, _ = run_reproduce(
        capsys,
        "fedcka.py",
        "--dataset",
        "glyphs",
        "--model",
        "cnn",
        "--sweep",
        "layers=1,2,7",
        "--dry-run",
        "--runs",
        tmp_path,
    )
    flags = [tables.parsed(line.removeprefix("python ")) for line in out.splitlines()]
    assert (
        code == 0
        and [f["layers"] for f in flags] == [1, 2, 7]
        and {f["model"] for f in flags} == {"cnn"}
    )
    assert flags[0]["out"] == str(tmp_path / "sweep-fedcka-layers" / "layers1-seed0")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["fedfoo", "1"], "must be one of fedalign, fedcka, fedmlb, rfedavg"),
        (["fedalign", "9"], "FedAlign has 1, 2, 3"),
        (["fedalign", "5", "--only", "fedmlb"], "no method or data set 'fedmlb'"),
        (["fedalign", "5", "--limit", "0"], "--limit"),
        (["common.py", "--sweep", "lr=1"], "no method script"),
        (["fedavg.py"], "--sweep: needed"),
        (["fedavg.py", "--sweep", "lr"], "takes FLAG=a,b"),
        (["fedavg.py", "--sweep", "a,b=1,2/3"], "takes FLAG=a,b"),
        (["fedavg.py", "--sweep", "lr=0.1,no", "--dry-run"], "--lr: must be a number"),
        (["fedalign", "5", "--sweep", "lr=1"], "takes a method script"),
        (["fedalign", "5", "--lr", "1"], "unrecognized arguments"),
    ],
)
def test_mistakes_get_one_line(capsys, argv, message):
    code, out, err = run_reproduce(capsys, *argv)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_limit_interrupts_a_run(tmp_path, monkeypatch, capsys):
    """The run in progress gets SIGINT, none is started after it, and what is finished is not run again."""
    done = make_run(tmp_path / "done")
    started, signals = [], []

    class Child:
        stderr = None

        def __init__(self, line, stderr):
            started.append(line)

        def wait(self, timeout=None):
            if not signals:
                raise subprocess.TimeoutExpired("run", timeout)

        def send_signal(self, number):
            signals.append(number)

    monkeypatch.setattr(subprocess, "Popen", Child)
    jobs = {
        done: "fedavg.py --dataset glyphs --rounds 4",
        tmp_path / "b": "fedavg.py --lr 1",
        tmp_path / "c": "fedavg.py --lr 2",
    }
    assert reproduce.run_all(jobs, time.monotonic() + 60) == (1, {}, True)
    assert (
        signals == [signal.SIGINT]
        and len(started) == 1
        and started[0][2:] == ["--lr", "1", "--out", str(tmp_path / "b")]
    )
    assert reproduce.run_all(jobs, time.monotonic() - 1) == (1, {}, True) and len(started) == 1


def test_a_table_that_was_cut_goes_on(tmp_path, monkeypatch):
    """reproduce.py gets SIGINT alone in its first run and is started again: the same rows as in an uncut run; what was
    finished is not run again."""
    data = make_folder(tmp_path / "data", (32, 32))
    flags = [
        *TINY,
        "--dataset",
        "folder",
        "--data-dir",
        str(data),
        "--rounds",
        "60",
        "--clients",
        "2",
        "--partition",
        "iid",
    ]
    cells = [
        tables.Cell(
            "FedAlign", "5", "D", "M", "S", method, f"{method.lower()}.py {shlex.join(flags)}"
        )
        for method in ("FedProx", "FedAvg")
    ]
    done, cut = (tmp_path / "fedalign-5" / f"D-M-S-{cell.method}-seed0" for cell in cells)
    whole = tmp_path / "whole"
    make_run(done, cells[0].command, accuracies=[1.0] * 60)
    code = (
        "import reproduce, tables; from tables import Cell; reproduce.PATIENCE = 0.1; tables.AFTER.clear();"
        f"tables.all_cells = lambda: {{('FedAlign', '5'): {cells}}};"
        f"reproduce.main(['fedalign', '5', '--runs', {str(tmp_path)!r}])"
    )
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
        )

    def rows(out):
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "samples_per_s", "peak_memory")}
            for row in lines
        ]

    process = start()
    while process.poll() is None and not (cut / "metrics.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 0 < len(rows(cut)) < 60
    out = start().communicate()[0]
    assert (
        "[2/2] python fedavg.py" in out
        and "--resume" in out
        and "[1/2]" not in out
        and "2 of 2 runs finished" in out
    )
    SCRIPTS["fedavg"].main([*flags, "--seed", "0", "--out", str(whole)])
    assert rows(cut) == rows(whole) and len(rows(whole)) == 60


def test_readme_commands_of_tables(capsys):
    for line in readme_commands():
        words = shlex.split(line)
        if words[:2] == ["python", "reproduce.py"]:
            assert run_reproduce(capsys, *words[2:], "--dry-run")[0] == 0


GLYPHS = "--dataset glyphs --model cnn --clients 2 --rounds 4 --epochs 1"


def test_a_run_with_other_flags_is_not_finished(tmp_path, capsys):
    """The folder and the flag are named, whichever decides; what does not decide may differ, and more rounds go on."""
    sweep = [
        "fedavg.py",
        *shlex.split(GLYPHS),
        "--sweep",
        "momentum=0",
        "--runs",
        tmp_path,
        "--dry-run",
    ]
    folder = tmp_path / "sweep-fedavg-momentum" / "momentum0-seed0"
    make_run(folder, f"fedavg.py {GLYPHS} --momentum 0 --lr 0.03")
    for more, message in (
        (["--lr", "0.5"], "--lr 0.03, not 0.5"),
        (["--lr", "0.03", "--client-test"], "--client-test False"),
        (["--lr", "0.03", "--save-clients"], "--save-clients False"),
        (["--lr", "0.03", "--rounds", "3"], "--rounds 4, not 3"),
    ):
        code, out, err = run_reproduce(capsys, *sweep, *more)
        assert (
            code == 2 and message in err and str(folder) in err and err.count("\n") == 1 and not out
        )
    for more in (["--workers", "2"], ["--augment", "none"], ["--data-dir", "x"]):
        assert run_reproduce(capsys, *sweep, "--lr", "0.03", *more)[:2] == (0, "")
    assert run_reproduce(capsys, *sweep, "--lr", "0.03", "--rounds", "9")[1].endswith("--resume\n")
    (folder / "model.pt").unlink()
    assert run_reproduce(capsys, *sweep, "--lr", "0.03")[1].endswith("--resume\n")
    (folder / "checkpoint.pt").unlink()
    assert (
        run_reproduce(capsys, *sweep, "--lr", "0.03")[1] == ""
    )  # a record, of which nothing else was kept
    code, out, err = run_reproduce(capsys, *sweep, "--lr", "0.03", "--rounds", "9")
    assert code == 2 and "4 of 9 rounds without a checkpoint" in err and err.count("\n") == 1
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"fedavg"', '"moon"')
    )
    assert "a run of moon.py, not fedavg.py" in run_reproduce(capsys, *sweep, "--lr", "0.03")[2]


def test_small_runs_of_other_data_lie_elsewhere(tmp_path, capsys):
    words = ["fedmlb", "4", "--scale", "small", "--runs", tmp_path, "--dry-run"]
    folders = [
        {
            shlex.split(line)[-1]
            for line in run_reproduce(capsys, *words, "--dataset", name)[1].splitlines()
            if line.startswith("python")
        }
        for name in ("glyphs", "folder")
    ]
    assert folders[0] and folders[1] and not folders[0] & folders[1]


@pytest.mark.parametrize(
    "words", [["--seed", "1"], ["--out=x"], ["--resume"], ["--sweep", "seed=1,2"]]
)
def test_a_sweep_sets_its_own_seeds_and_folders(tmp_path, capsys, words):
    code, out, err = run_reproduce(
        capsys,
        "fedavg.py",
        *shlex.split(GLYPHS),
        "--runs",
        tmp_path,
        "--dry-run",
        *words,
        *([] if "--sweep" in words else ["--sweep", "lr=0.1"]),
    )
    assert code == 2 and "set by reproduce.py" in err and err.count("\n") == 1 and not out


def test_flags_may_stand_before_the_script(tmp_path, capsys):
    tail = ["fedprox.py", *shlex.split(GLYPHS), "--sweep", "mu=1,2", "--runs", tmp_path]
    first, last = (
        run_reproduce(capsys, "--dry-run", *tail),
        run_reproduce(capsys, *tail, "--dry-run"),
    )
    assert first == last and first[0] == 0 and first[1].count("--mu=") == 2


def test_only_takes_data_sets():
    cells = CELLS["rFedAvg", "I"]
    assert {(c.method, c.dataset) for c in reproduce.only(cells, "fedavg,MNIST,rfedavg+")} == {
        ("FedAvg", "MNIST"),
        ("rFedAvg+", "MNIST"),
    }
    assert {c.dataset for c in reproduce.only(cells, "cifar10")} == {"CIFAR-10"} and len(
        reproduce.only(cells, "cifar10")
    ) == 18


def test_small_rows_say_what_was_run(tmp_path, capsys, monkeypatch):
    """At small scale method and setting are not the paper's: the flags that differ, and the word small, also in the CSV."""

    def call(line, deadline=None):
        words = [word for word in line if word != "--resume"]
        folder = pathlib.Path(words[words.index("--out") + 1])
        command = shlex.join(words[: words.index("--out")])
        make_run(folder, command, accuracies=[9.0] * tables.parsed(command)["rounds"])
        return 0, ""

    monkeypatch.setattr(reproduce, "call", call)
    argv = ["rfedavg", "I", "--scale", "small", "--only", "FedAvg,rFedAvg+", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv, "--csv", tmp_path / "x.csv")
    assert (
        code == 0
        and "rFedAvg+ (small)" in out
        and "N=20" not in out
        and "MNIST" not in out.split("runs finished")[1]
    )
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert rows and all("(small)" in row["method"] and "N=20" not in row["setting"] for row in rows)
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(
        compare, "plot", lambda groups, names, path, x, y: drawn.append((x, len(groups)))
    )
    run_reproduce(capsys, "rfedavg", "fig9c", "--scale", "small", "--runs", tmp_path)
    assert drawn == [("local_steps", 21)]


def test_outputs_are_checked_before_any_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "run_all", lambda *_: pytest.fail("started"))
    (tmp_path / "there.csv").touch()
    for words, message in (
        (["--csv", tmp_path / "there.csv"], "exists already"),
        (["--over", "pathways"], "has no flag"),
        (["--plot", tmp_path / "x.docx"], "must end in one of"),
    ):
        if "--plot" in words:
            pytest.importorskip("matplotlib")
        code, out, err = run_reproduce(
            capsys,
            "fedprox.py",
            *shlex.split(GLYPHS),
            "--sweep",
            "mu=1",
            "--runs",
            tmp_path,
            *words,
        )
        assert code == 2 and message in err and err.count("\n") == 1 and not out


def of_two_tables(monkeypatch, cells, template="cost.py {runs}"):
    monkeypatch.setattr(tables, "all_cells", lambda: {("FedAlign", "1"): cells})
    monkeypatch.setattr(tables, "homes", lambda: {tables.bare(c.command): c for c in cells})
    monkeypatch.setattr(tables, "AFTER", {("FedAlign", "1"): template})


def cell_of(method, command):
    return tables.Cell("FedAlign", "1", "D", "M", "S", method, command)


def test_a_table_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    """A data set that is not there is no reason to start; a mistake of code 2 in the first run does not stop the second. The
    table of what there is follows, then what failed and why; no analysis, and exit code 2, or 1 after other codes."""
    cells = [
        cell_of("A", f"fedavg.py {GLYPHS}"),
        cell_of("B", f"fedprox.py {GLYPHS}"),
        cell_of("C", f"moon.py {GLYPHS}"),
        cell_of("F", f"fedavg.py {GLYPHS} --dataset femnist --data-dir {tmp_path}"),
    ]
    of_two_tables(monkeypatch, cells)
    make_run(tmp_path / "fedalign-1" / "D-M-S-C-seed0", cells[2].command)
    for code, message in ((2, "no room"), (1, "diverged")):
        started = []

        def call(line, deadline=None):
            started.append(line[0])
            if line[0] == "fedprox.py":
                make_run(pathlib.Path(line[line.index("--out") + 1]), cells[1].command)
            return (code, message) if line[0] == "fedavg.py" else (0, "")

        monkeypatch.setattr(reproduce, "call", call)
        chosen = ["--only", "A,B,C"] if code == 1 else []
        found, out, err = run_reproduce(capsys, "fedalign", "1", "--runs", tmp_path, *chosen)
        assert (
            found == code and started == ["fedavg.py", "fedprox.py"][:code]
        )  # which is there in the second turn
        assert (
            "2 of " in out
            and f"{2 if code == 2 else 1} failed" in out
            and re.search(r"^ *B .* 40\.00 ", out, re.M)
        )
        assert f"D-M-S-A-seed0: {message}" in err
        assert ("D-M-S-F-seed0: --dataset femnist: there is no folder" in err) == (code == 2)


def test_analyses_follow_finished_tables(tmp_path, monkeypatch, capsys):
    """For runs that lack them, until the time is up; their failure is one."""
    cells = [cell_of("A", f"fedavg.py {GLYPHS}"), cell_of("B", f"fedprox.py {GLYPHS}")]
    of_two_tables(monkeypatch, cells, "hessian_eval.py {runs} --diagonal tensor")
    a, b = (
        make_run(tmp_path / "fedalign-1" / f"D-M-S-{cell.method}-seed0", cell.command)
        for cell in cells
    )
    lines, answers = [], [(0, ""), (1, "no"), (None, "")]

    def call(line, deadline=None):
        lines.append((line, deadline))
        return answers[len(lines) - 1]

    monkeypatch.setattr(reproduce, "call", call)
    argv = ["fedalign", "1", "--runs", tmp_path]
    assert run_reproduce(capsys, *argv)[0] == 0
    assert lines == [(["hessian_eval.py", str(a), str(b), "--diagonal", "tensor"], None)]
    (a / "hessian.json").write_text("{}")
    code, _, err = run_reproduce(capsys, *argv)
    assert (
        code == 1
        and lines[1][0] == ["hessian_eval.py", str(b), "--diagonal", "tensor"]
        and ": no\n" in err
    )
    code, out, _ = run_reproduce(capsys, *argv, "--limit", "1")
    assert code == 0 and lines[2][1] is not None and "the same command goes on" in out
    (b / "hessian.json").write_text("{}")
    assert run_reproduce(capsys, *argv)[0] == 0 and len(lines) == 3


def test_parts_of_a_figure_are_drawn_apart(tmp_path, capsys):
    """9a to 9d each against its own flag, 4 against seconds a round; a file that the user names is one part's."""
    pytest.importorskip("matplotlib")
    for paper, figure in (("rFedAvg", "fig9a"), ("rFedAvg", "fig9d"), ("FedMLB", "fig4")):
        for cell in CELLS[paper, figure]:
            own = tables.home(cell)
            folder = (
                tmp_path
                / f"{own.paper.lower()}-{own.table.lower()}"
                / reproduce.slug(f"{own.label} {own.method}")
            )
            folder = folder.with_name(f"{folder.name}-seed0")
            if not folder.exists():
                make_run(
                    folder, own.command, accuracies=[1.0] * tables.parsed(own.command)["rounds"]
                )
    _, out, _ = run_reproduce(capsys, "fedmlb", "fig4", "--runs", tmp_path)
    assert "12 of 12 runs finished" in out and (tmp_path / "fedmlb-fig4.png").exists()
    for flag in ("--plot", "--csv"):
        code, _, err = run_reproduce(
            capsys, "rfedavg", "fig9", "--runs", tmp_path, flag, tmp_path / "x.png"
        )
        assert (
            code == 2
            and f"argument {flag}: fig9 has 4 parts; name one of fig9a, fig9b" in err
            and err.count("\n") == 1
        )
    for figure in ("fig9a", "fig9d"):
        code, out, _ = run_reproduce(capsys, "rfedavg", figure, "--runs", tmp_path)
        assert code == 0 and (tmp_path / f"rfedavg-{figure}.png").exists()
    with pytest.MonkeyPatch.context() as m:
        views = []
        m.setattr(
            compare,
            "report",
            lambda folders, args, names, **_: views.append(
                (args.x, args.plot, len(folders), names)
            ),
        )
        m.setattr(reproduce, "run_all", lambda *_: (0, {}, False))
        run_reproduce(capsys, "rfedavg", "fig9", "--runs", tmp_path)
    assert [(x, pathlib.Path(plot).name) for x, plot, *_ in views] == [
        ("lam", "rfedavg-fig9a.png"),
        ("clients", "rfedavg-fig9b.png"),
        ("epochs", "rfedavg-fig9c.png"),
        ("sample", "rfedavg-fig9d.png"),
    ]
    assert views[0][2] == len(CELLS["rFedAvg", "fig9a"]) and {
        s for n in views[0][3].values() for s, _ in n
    } == {c.label for c in CELLS["rFedAvg", "fig9a"]}


def test_the_reason_of_a_failure_is_its_last_line(tmp_path, capsys):
    code, said = reproduce.call(
        [
            "fedavg.py",
            *shlex.split(GLYPHS),
            "--dataset",
            "folder",
            "--data-dir",
            str(tmp_path / "no"),
        ]
    )
    assert (
        code == 2
        and said.startswith("fedavg.py: error: --data-dir")
        and capsys.readouterr().err == said + "\n"
    )


def test_a_terminated_table_ends_its_run(tmp_path):
    """SIGTERM to reproduce.py alone: the run is interrupted, keeps its rounds, and nothing is left running."""
    code = "import reproduce; reproduce.PATIENCE = 0.1; reproduce.main()"
    argv = [
        "fedavg.py",
        "--dataset",
        "glyphs",
        "--model",
        "cnn",
        "--clients",
        "2",
        "--local-steps",
        "1",
        "--rounds",
        "500",
        "--batch-size",
        "8",
        "--sweep",
        "lr=0.01",
        "--runs",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
    )
    run = tmp_path / "sweep-fedavg-lr" / "lr0.01-seed0"
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and "fedavg.py: error: interrupted" in err
        and "the same command goes on" in err
    )
    assert 0 < len(compare.read_run(run).rows) < 500
