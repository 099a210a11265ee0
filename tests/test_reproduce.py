"""The command reproduce: which runs a table or a sweep needs, what is there, what is shown."""

import csv
import math
import pathlib
import re
import shlex

import pytest
import run_folder
from analysis.runs import method_call
from conftest import refusal
from makers import (
    CELLS,
    GLYPHS,
    SCRIPTS,
    cell_folder,
    is_refused,
    make_cell_run,
    make_run,
    run_reproduce,
)
from runs import write_config

from reproduce import __main__ as command_module
from reproduce import compare, jobs, published
from reproduce.cells import Cell, homes, parsed_flags
from reproduce.jobs import select_cells, sweep_axis


def runs_of(out):
    """Return the lines of --dry-run that train, without those of analyses."""
    return [line for line in out.splitlines() if not line.startswith("python -m analysis.cost")]


# --- Tables


def test_dry_run_prints_what_is_left(tmp_path, capsys):
    argv = ["fedalign", "5", "--dry-run", "--seeds", "2", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv, "--only", "FedAvg,gradaug")
    lines = runs_of(out)
    assert code == 0 and len(lines) == 10
    assert out.count("python -m analysis.cost") == 5
    folder = tmp_path / "fedalign-1" / "CIFAR-100-ResNet56-C16-E20-R25-alpha0.5-FedAvg-seed0"
    assert lines[0].endswith(f"--seed 0 --out {folder}") and "--seed 1" in lines[5]
    for line in lines:
        assert shlex.split(line)[1].removesuffix(".py") in SCRIPTS
        assert parsed_flags(line.removeprefix("python "))
    first = homes()[CELLS["FedAlign", "5"][0].command]
    make_cell_run(folder, first, 1.0)
    other_seed = folder.with_name(folder.name.replace("seed0", "seed1"))
    make_run(other_seed, first.command, 1, accuracies=[1.0] * 3)
    _, out, _ = run_reproduce(capsys, *argv, "--only", "fedavg")
    (line,) = runs_of(out)
    assert "--seed 1" in line and line.endswith("--resume")


def test_analyses_are_lines_of_modules():
    """The cost of Tables 5 and 7, one line a method and data set, in the form that -m wants."""
    for table, count in (("5", 10), ("7", 16)):
        lines = jobs.analyses(jobs.Plan({}, None, CELLS["FedAlign", table]), {})
        assert len(lines) == count
        for flag, module, script, *_ in lines:
            assert (flag, module) == ("-m", "analysis.cost") and script[:-3] in SCRIPTS


@pytest.mark.parametrize(
    "table, words, methods, datasets",
    [
        ("FedMLB 1a", "FedAvg", ["FedAvg"], ["CIFAR-100", "Tiny-ImageNet"]),
        ("FedMLB 1a", "feddyn,FedDyn+FedMLB,cifar100", ["FedDyn", "FedDyn+FedMLB"], ["CIFAR-100"]),
        ("FedMLB 1a", "fedmlb,tiny-imagenet", ["FedMLB"], ["Tiny-ImageNet"]),
        ("FedAlign 5", "gradaug", [f"GradAug(n={n})" for n in range(1, 5)], ["CIFAR-100"]),
        ("rFedAvg I", "fedavg,MNIST,rfedavg+", ["FedAvg", "rFedAvg+"], ["MNIST"]),
    ],
)
def test_only(table, words, methods, datasets):
    """Methods by the table's names first, then by script, and data sets by both their names."""
    cells = select_cells(CELLS[tuple(table.split())], words)
    assert sorted({cell.method for cell in cells}) == methods
    assert sorted({cell.dataset for cell in cells}) == datasets


# --- Sweeps


def test_sweep_axes():
    assert sweep_axis("layers=1,2") == [{"layers": "1"}, {"layers": "2"}]
    assert sweep_axis("--pathways=1/1,2") == [{"pathways": "1"}, {"pathways": "1,2"}]
    together = [{"epochs": "1", "rounds": "200"}, {"epochs": "2", "rounds": "100"}]
    assert sweep_axis("epochs,rounds=1,200/2,100") == together


def commands_in(out):
    """Return the flags of the commands that --dry-run has printed."""
    return [parsed_flags(line.removeprefix("python ")) for line in out.splitlines()]


def test_sweeps(capsys, tmp_path):
    """Of one script, in a folder of its own, or of several."""
    argv = ["--dataset", "glyphs", "--model", "cnn", "--dry-run", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, "fedcka.py", *argv, "--sweep", "layers=1,2,7")
    flags = commands_in(out)
    assert code == 0 and [f["layers"] for f in flags] == [1, 2, 7]
    assert {f["model"] for f in flags} == {"cnn"}
    assert flags[0]["out"] == str(tmp_path / "sweep-fedcka-layers" / "layers1-seed0")
    _, out, _ = run_reproduce(capsys, "fedavg.py,fedprox", *argv, "--sweep", "lr=0.1,0.2")
    names = [f"{name}-lr{lr}-seed0" for name in ("fedavg", "fedprox") for lr in (0.1, 0.2)]
    assert [f["out"] for f in commands_in(out)] == [
        str(tmp_path / "compare-glyphs-cnn" / name) for name in names
    ]


# --- Scripts side by side

SIDE_BY_SIDE = "fedavg.py,moon.py,fedalign.py --lr 0.01 --augment crop,flip, fedprox.py"
SETTING = "compare-glyphs-cnn-alpha0.1-clients2-epochs1"


def test_scripts_side_by_side(tmp_path, capsys):
    """Each with the flags of all and its own, in a folder of the setting; seed 0 of all first."""
    argv = [SIDE_BY_SIDE, *shlex.split(GLYPHS), "--alpha", "0.1", "--runs", tmp_path, "--dry-run"]
    code, out, _ = run_reproduce(capsys, *argv, "--seeds", "2")
    flags = commands_in(out)
    scripts = [line.split()[1] for line in out.splitlines()]
    assert code == 0
    assert scripts == 2 * ["fedavg.py", "moon.py", "fedalign.py", "fedprox.py"]
    assert [f["seed"] for f in flags] == 4 * [0] + 4 * [1]
    assert {(f["alpha"], f["clients"], f["data_seed"]) for f in flags} == {(0.1, 2, 0)}
    assert [f["augment"] for f in flags[:4]] == ["auto", "auto", "crop,flip", "auto"]
    names = ["fedavg", "moon", "fedalign-lr-0.01-augment-crop-flip", "fedprox"]
    assert [f["out"] for f in flags[:4]] == [f"{tmp_path}/{SETTING}/{n}-seed0" for n in names]


def test_a_setting_is_a_folder_whatever_the_order_of_its_flags(tmp_path, capsys):
    """Rounds, which may grow, and the machine's flags are not in its name; long ones are cut."""

    def folder(*words):
        argv = ["fedavg.py", *words, "--runs", tmp_path, "--dry-run"]
        (flags,) = commands_in(run_reproduce(capsys, *argv)[1])
        path = pathlib.Path(flags["out"])
        assert path.name == "fedavg-seed0"
        return path.parent.name

    first = folder(*shlex.split(GLYPHS), "--alpha", "0.1")
    turned = ["--partition_alpha=0.1", "--quiet", *shlex.split(GLYPHS), "--comm_round", "9"]
    assert first == folder(*turned, "--device", "cpu") == SETTING
    more = "--momentum 0.5 --weight-decay 0.001 --batch-size 32 --lr-decay 0.99 --clip 10"
    more += " --server avgm --server-lr 0.5 --server-momentum"
    long = [folder(*shlex.split(f"{GLYPHS} {more} {value}")) for value in (0.1, 0.2)]
    assert len(set(long)) == 2 and all(len(name) < 120 for name in long)


def test_data_seeds_vary_the_partition_too(tmp_path, capsys):
    """The first is the run of --seeds; a table's runs as well."""
    tail = ["--data-seeds", "3", "--runs", tmp_path, "--dry-run"]
    _, out, _ = run_reproduce(capsys, "fedavg.py", *shlex.split(GLYPHS), *tail)
    flags = commands_in(out)
    assert [(f["seed"], f["data_seed"]) for f in flags] == [(0, 0), (1, 1), (2, 2)]
    names = [pathlib.Path(f["out"]).name for f in flags]
    assert names == ["fedavg-seed0", "fedavg-seed1-data1", "fedavg-seed2-data2"]
    _, out, _ = run_reproduce(capsys, "fedalign", "5", "--only", "fedavg", *tail)
    assert [line.split("--data-seed ")[1:] for line in runs_of(out)][0] == []
    assert "--seed 2 --data-seed 2" in runs_of(out)[2]


def test_a_comparison_runs_goes_on_and_shows(tmp_path, capsys, monkeypatch):
    """A table of all scripts over their seeds, and a picture; a further script adds its runs."""
    pytest.importorskip("matplotlib")
    started = []

    def run_child(line, *_):
        started.append(line[0])
        return make_child(line)

    monkeypatch.setattr(jobs, "run_child", run_child)
    argv = [*shlex.split(GLYPHS), "--seeds", "3", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, "fedavg,moon --mu 5", *argv)
    assert code == 0 and "6 of 6 runs finished" in out
    assert (tmp_path / "compare-glyphs-cnn-clients2-epochs1" / "picture.png").exists()
    assert "All rows: dataset glyphs, partition dirichlet, alpha 0.5, data_seed 0" in out
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith(("FedAvg", "MOON"))]
    assert rows == [["FedAvg", "3"], ["MOON", "3"]]
    assert "over n seeds on one partition, none at n = 1" in out
    started.clear()
    code, out, _ = run_reproduce(capsys, "fedprox.py,fedavg.py,moon.py --mu 5", *argv)
    assert code == 0 and started == 3 * ["fedprox.py"] and "9 of 9 runs finished" in out


# --- Command lines


REFUSALS = [
    ("'fedavg --vectors \"a'", 'argument PAPER: fedavg --vectors "a: No closing quotation'),
    ("''", "argument PAPER: is no method script"),
    ("/some/place/mine.py", "fedalign, fedcka, fedmlb, rfedavg, niid-bench; copy it to "),
    ("fedfoo 1", "fedfoo is no method script here, nor one of fedalign, fedcka, fedmlb"),
    ("common.py --sweep lr=1", "no method script"),
    ("fedavg.py,common.py", "common.py is no method script"),
    ("'fedavg.py,fedfoo.py --lr 1'", "fedfoo.py is no method script"),
    ("fedavg.py,fedavg.py", "two runs would share the folder"),
    ("fedavg --sweep lr=1,2 --sweep lr=3", "two points would share the folder"),
    ("fedavg --sweep vectors=w_1,w-1", "share the folder"),
    ("fedavg --sweep lr", "takes FLAG=a,b"),
    ("fedavg --sweep a,b=1,2/3", "takes FLAG=a,b"),
    ("fedavg --sweep lr=0.1,no", "fedavg.py: argument --lr: must be a number"),
    ("fedavg --seed 1", "argument --seed: set by reproduce"),
    ("fedavg --out=x", "argument --out: set by reproduce"),
    ("'fedavg.py,fedprox.py --resume'", "argument --resume: set by reproduce"),
    ("fedavg --sweep seed=1,2", "argument --seed: set by reproduce"),
    ("fedavg --sweep data-seed=1,2 --data-seeds 2", "argument --data-seed: set by reproduce"),
    ("fedavg --seeds 2 --data-seeds 2", "--data-seeds: varies --seed too"),
    ("./fedavg.py 1", "unrecognized arguments: 1"),
    ("fedalign 9", "FedAlign has 1, 2, 3"),
    ("fedalign 5 --only fedmlb", "no cell of 'fedmlb' in this table: FedAvg, FedProx"),
    ("fedalign 5 --only ''", "argument --only"),
    ("fedalign 5 --limit 0", "--limit"),
    ("fedalign 5 --sweep lr=1", "--sweep: not of a paper's table; fedalign.py is the script"),
    ("fedalign --lr 1", "argument --lr: not of a paper's table"),
    ("niid-bench cifar-10 --lr 1", "--lr: not of a paper's table"),
    ("rfedavg fig9 --csv x.csv", "fig9 has parts; name one of fig9a, fig9b"),
    ("fedavg --csv there.csv", "argument --csv: there.csv exists already"),
    ("fedavg --plot x.docx", "must end in one of"),
]


@pytest.mark.parametrize("words, message", REFUSALS)
def test_mistakes_get_one_line(capsys, tmp_path, monkeypatch, words, message):
    """before any run."""
    monkeypatch.setattr(jobs, "run_child", lambda *_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").touch()
    result = run_reproduce(capsys, *shlex.split(words), "--runs", tmp_path)
    assert is_refused(result, "reproduce: error: ", message)


@pytest.mark.parametrize("module", [command_module, compare])
def test_help_begins_with_the_description(capsys, module):
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert capsys.readouterr().out.startswith(module.__doc__.splitlines()[0])


# --- What is there


KEPT = [  # more flags, and what is told then: a refusal, --resume, or "" of a finished run
    ("", ""),
    ("--workers=2", ""),
    ("--augment=none", ""),
    ("--data-dir=x", ""),
    ("--rounds 9", "--resume"),
    ("--rounds 3", "another --rounds (4, now 3)"),
    ("--lr 0.5", "another --lr (0.03, now 0.5)"),
    ("--client-test", "another --client-test (False, now True)"),
    ("--metric all", "another --metric (accuracy, now all)"),
]


def test_what_is_finished(tmp_path, capsys):
    """The folder and the flag are named, if it decides; others may differ.

    A run without its last weights goes on; not a record, of which nothing else is kept.
    """
    folder = tmp_path / "sweep-fedavg-momentum" / "momentum0-seed0"
    make_run(folder, f"fedavg.py {GLYPHS} --momentum 0 --lr 0.03")
    argv = ["fedavg", *shlex.split(GLYPHS), "--sweep", "momentum=0", "--lr", "0.03"]
    argv += ["--runs", tmp_path, "--dry-run"]
    for more, told in KEPT:
        code, out, err = run_reproduce(capsys, *argv, *shlex.split(more))
        refused = told.startswith("another")
        assert (code == 2 and str(folder) in err and told in err) if refused else code == 0, more
        assert out.endswith(f"{told}\n") if told == "--resume" else not out, more
    code = run_folder.code_of(method_call("fedavg").method)
    write_config(folder, code=code)
    assert run_reproduce(capsys, *argv)[:2] == (0, "")
    write_config(folder, code=code | {"aggregate": "median 1"})
    assert is_refused(run_reproduce(capsys, *argv), "another aggregate", "median 1", str(folder))
    (folder / "model.pt").unlink()
    assert run_reproduce(capsys, *argv)[1].endswith("--resume\n")
    write_config(folder, code=code)
    (folder / "checkpoint.pt").unlink()
    assert run_reproduce(capsys, *argv)[1] == ""


def test_auto_is_what_it_came_to(tmp_path):
    """For grey images none, which the flags do not tell."""
    command = "fedavg.py --dataset folder --rounds 4"
    folder = write_config(make_run(tmp_path / "a", command), augment="none")
    for more in ("", " --augment none"):
        assert jobs.line_left(folder, command + more) == []
    assert "another --augment" in refusal(jobs.line_left, folder, f"{command} --augment crop")


# --- Whole tables, whose runs are made by hand


def make_child(line, *_):
    """As run_child(), but the run is made by hand; a script's own flags are read as ever."""
    at = line.index("--out")
    command = shlex.join(line[:at])
    flags = parsed_flags(command)
    accuracies = [9.0] * flags["rounds"]
    make_run(pathlib.Path(line[at + 1]), command, flags["seed"], accuracies)
    return 0


def test_a_whole_table(tmp_path, capsys, monkeypatch):
    """Every cell is run once and shown by the table's names, beside its published number."""
    monkeypatch.setattr(jobs, "run_child", make_child)
    argv = ["rfedavg", "I", "--only", "FedAvg,rFedAvg+", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv, "--csv", tmp_path / "x.csv")
    assert code == 0 and "16 of 16 runs finished" in out
    assert "MNIST" in out and "97.07 +- 0.34" in out
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    last = [row for row in rows if row["figure"] == "last"]
    assert len(last) == 16 and {row["method"] for row in last} == {"FedAvg", "rFedAvg+"}
    assert len({row["setting"] for row in last}) == 8
    published_rows = [row for row in rows if row["published"]]
    assert len(published_rows) == 16 and {row["table"] for row in published_rows} == {"I"}


def tiny_table(monkeypatch, template, **commands):
    """Make FedAlign's Table 1 the only one, of {method: command}. Returns its cells."""
    cells = [
        Cell("FedAlign", "1", "D", "M", "S", method, command=command)
        for method, command in commands.items()
    ]
    for module in (jobs, published):
        monkeypatch.setattr(module, "all_cells", lambda: {("FedAlign", "1"): cells})
    monkeypatch.setattr(published, "cells_by_flags", dict)
    monkeypatch.setattr(jobs, "homes", lambda: {c.command: c for c in cells})
    monkeypatch.setattr(jobs, "texts", lambda *_: template)
    return cells


@pytest.mark.parametrize("code", [2, 1])
def test_a_table_goes_on_after_a_failure(tmp_path, monkeypatch, capsys, code):
    """The table of what there is follows, then what failed; no analysis; exit code 2 or 1."""
    scripts = {"A": "fedavg", "B": "fedprox", "C": "moon"}
    commands = {name: f"{script}.py {GLYPHS}" for name, script in scripts.items()}
    cells = tiny_table(monkeypatch, "-m analysis.cost RUNS", **commands)
    make_run(cell_folder(tmp_path, cells[2]), cells[2].command)
    started = []

    def run_child(line, *_):
        started.append(line[0])
        return make_child(line) if line[0] == "fedprox.py" else (code if code == 2 else 134)

    monkeypatch.setattr(jobs, "run_child", run_child)
    argv = ["fedalign", "1", "--runs", tmp_path, "--csv", tmp_path / "x.csv"]
    exit_code, out, err = run_reproduce(capsys, *argv)
    assert "--csv and --plot wait" in out and not (tmp_path / "x.csv").exists()
    assert exit_code == code and started == ["fedavg.py", "fedprox.py"]
    assert "2 of 3 runs finished" in out and re.search(r"^ *B .* 9\.00 ", out, re.M)
    assert re.search(r"failed, with exit code \d+: .*D-M-S-A-seed0\n", err)


def test_analyses_follow_finished_tables(tmp_path, monkeypatch, capsys):
    """For runs that lack them, until the time is up; their failure is one."""
    scripts = {"A": f"fedavg.py {GLYPHS}", "B": f"fedprox.py {GLYPHS}"}
    cells = tiny_table(monkeypatch, "hessian_eval.py RUNS --diagonal tensor", **scripts)
    a, b = (make_run(cell_folder(tmp_path, cell), cell.command) for cell in cells)
    lines, answers = [], [0, 1, TimeoutError, 0]

    def run_child(line, deadline):
        lines.append((line, deadline))
        answer = answers[len(lines) - 1]
        if answer is TimeoutError:
            raise answer
        return answer

    monkeypatch.setattr(jobs, "run_child", run_child)
    argv = ["fedalign", "1", "--runs", tmp_path]
    assert run_reproduce(capsys, *argv)[0] == 0
    (a / "hessian.json").write_text('{"round": 4}')
    code, _, err = run_reproduce(capsys, *argv)
    assert code == 1 and "hessian_eval.py" in err
    code, out, _ = run_reproduce(capsys, *argv, "--limit", "1")
    assert code == 0 and lines[2][1] < math.inf and "--limit is reached" in out
    (b / "hessian.json").write_text('{"round": 4}')
    assert run_reproduce(capsys, *argv)[0] == 0 and len(lines) == 3
    (b / "hessian.json").write_text('{"round": 3}')  # of 4
    code, _, err = run_reproduce(capsys, *argv)
    assert code == 0 and "B" in err and "hessian.json: left out" in err
    runs = [[a, b], [b], [b], [b]]
    analysis = [["hessian_eval.py", *map(str, own), "--diagonal", "tensor"] for own in runs]
    assert [line for line, _ in lines] == analysis


def test_a_run_that_goes_on_is_analysed_again(tmp_path, monkeypatch, capsys):
    """Though the result that is there is of its last round so far."""
    (cell,) = tiny_table(monkeypatch, "hessian_eval.py RUNS", A=f"fedavg.py {GLYPHS}")
    run = make_run(cell_folder(tmp_path, cell), cell.command, accuracies=(10, 20))
    (run / "hessian.json").write_text('{"round": 2}')
    _, out, _ = run_reproduce(capsys, "fedalign", "1", "--runs", tmp_path, "--dry-run")
    assert out.splitlines()[-1] == f"python hessian_eval.py {run}"


# --- Figures


def test_parts_of_a_figure_are_drawn_apart(tmp_path, capsys, monkeypatch):
    """9a to 9d each against its own flag."""
    pytest.importorskip("matplotlib")
    report, shown = compare.report, []
    monkeypatch.setattr(compare, "report", lambda *args: shown.append(args) or report(*args))
    monkeypatch.setattr(jobs, "run_all", lambda *_: ({}, ""))
    for part in "abcd":
        cell = homes()[CELLS["rFedAvg", f"fig9{part}"][1].command]
        folder = cell_folder(tmp_path, cell)
        if not folder.exists():
            make_cell_run(folder, cell, 1.0)
    run_reproduce(capsys, "rfedavg", "fig9", "--runs", tmp_path)
    assert [(view.x, view.plot.parent.name) for _, view, *_ in shown] == [
        ("lam", "rfedavg-fig9a"),
        ("clients", "rfedavg-fig9b"),
        ("epochs", "rfedavg-fig9c"),
        ("sample", "rfedavg-fig9d"),
    ]
    assert all(view.plot.exists() for _, view, *_ in shown)
    _, _, names, wanted = shown[0]
    settings = {setting for labels in names.values() for setting, _ in labels}
    assert settings == {cell.label for cell in CELLS["rFedAvg", "fig9a"]}
    assert len(names) == len(CELLS["rFedAvg", "fig9a"]) and wanted == set()
