"""The command reproduce: which runs a table or a sweep needs, what is there, what is shown."""

import csv
import math
import pathlib
import re
import shlex

import pytest
import run_folder
from analysis.runs import method_call
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
from reproduce import cells as cells_module
from reproduce import compare, jobs, published
from reproduce.cells import Cell, bare, home, parsed_flags
from reproduce.jobs import select_cells, sweep_axis

SWEEP = ["fedavg.py", *shlex.split(GLYPHS)]


def runs_of(out):
    """Return the lines of --dry-run that train, without those of analyses."""
    return [line for line in out.splitlines() if not line.startswith("python -m analysis.cost")]


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


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
    first = home(CELLS["FedAlign", "5"][0])
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
    "paper, table, words, methods, datasets",
    [
        ("FedMLB", "1a", "FedAvg", ["FedAvg"], ["CIFAR-100", "Tiny-ImageNet"]),
        (
            "FedMLB",
            "1a",
            "feddyn,FedDyn+FedMLB,cifar100",
            ["FedDyn", "FedDyn+FedMLB"],
            ["CIFAR-100"],
        ),
        ("FedMLB", "1a", "fedmlb,tiny-imagenet", ["FedMLB"], ["Tiny-ImageNet"]),
        ("FedAlign", "5", "gradaug", [f"GradAug(n={n})" for n in range(1, 5)], ["CIFAR-100"]),
        ("rFedAvg", "I", "fedavg,MNIST,rfedavg+", ["FedAvg", "rFedAvg+"], ["MNIST"]),
    ],
)
def test_only(paper, table, words, methods, datasets):
    """Methods by the table's names first, then by script, and data sets by both their names."""
    cells = select_cells(CELLS[paper, table], words)
    assert sorted({cell.method for cell in cells}) == methods
    assert sorted({cell.dataset for cell in cells}) == datasets


# --------------------------------------------------------------------------------------------------
# Sweeps
# --------------------------------------------------------------------------------------------------


def test_sweep_axes():
    assert sweep_axis("layers=1,2") == [{"layers": "1"}, {"layers": "2"}]
    assert sweep_axis("--pathways=1/1,2") == [{"pathways": "1"}, {"pathways": "1,2"}]
    together = [{"epochs": "1", "rounds": "200"}, {"epochs": "2", "rounds": "100"}]
    assert sweep_axis("epochs,rounds=1,200/2,100") == together


def test_sweeps(capsys, tmp_path):
    argv = ["fedcka.py", "--dataset", "glyphs", "--model", "cnn", "--sweep", "layers=1,2,7"]
    code, out, _ = run_reproduce(capsys, *argv, "--dry-run", "--runs", tmp_path)
    flags = [parsed_flags(line.removeprefix("python ")) for line in out.splitlines()]
    assert code == 0 and [f["layers"] for f in flags] == [1, 2, 7]
    assert {f["model"] for f in flags} == {"cnn"}
    assert flags[0]["out"] == str(tmp_path / "sweep-fedcka-layers" / "layers1-seed0")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--sweep", "lr=1,2", "--sweep", "lr=3"], "share the folder"),
        (["--sweep", "vectors=w_1,w-1"], "share the folder"),
        (["--sweep", "lr=0.1", "--seed", "1"], "set by reproduce"),
        (["--sweep", "lr=0.1", "--out=x"], "set by reproduce"),
        (["--sweep", "lr=0.1", "--resume"], "set by reproduce"),
        (["--sweep", "seed=1,2"], "set by reproduce"),
        (["--sweep", "data-seed=1,2", "--data-seeds", "2"], "set by reproduce"),
    ],
)
def test_sweeps_that_are_refused(capsys, tmp_path, words, message):
    """Points that cannot be told apart, and a sweep's own seeds and folders."""
    result = run_reproduce(capsys, *SWEEP, *words, "--runs", tmp_path, "--dry-run")
    assert is_refused(result, message)


# --------------------------------------------------------------------------------------------------
# Scripts side by side
# --------------------------------------------------------------------------------------------------

SIDE_BY_SIDE = "fedavg.py,moon.py,fedalign.py --lr 0.01 --augment crop,flip, fedprox.py"
SETTING = "compare-glyphs-cnn-alpha0.1-clients2-epochs1"


def test_scripts_side_by_side(tmp_path, capsys):
    """Each with the flags of all and its own, in a folder of the setting; seed 0 of all first."""
    argv = [SIDE_BY_SIDE, *shlex.split(GLYPHS), "--alpha", "0.1", "--runs", tmp_path, "--dry-run"]
    code, out, _ = run_reproduce(capsys, *argv, "--seeds", "2")
    lines = [line.removeprefix("python ") for line in out.splitlines()]
    flags = [parsed_flags(line) for line in lines]
    assert code == 0 and [line.split()[0] for line in lines] == 2 * [
        "fedavg.py",
        "moon.py",
        "fedalign.py",
        "fedprox.py",
    ]
    assert [f["seed"] for f in flags] == 4 * [0] + 4 * [1]
    assert {(f["alpha"], f["clients"], f["data_seed"]) for f in flags} == {(0.1, 2, 0)}
    assert [f["augment"] for f in flags[:4]] == ["auto", "auto", "crop,flip", "auto"]
    names = ["fedavg", "moon", "fedalign-lr-0.01-augment-crop-flip", "fedprox"]
    assert [f["out"] for f in flags[:4]] == [f"{tmp_path}/{SETTING}/{n}-seed0" for n in names]


def test_a_setting_is_a_folder_whatever_the_order_of_its_flags(tmp_path, capsys):
    """Rounds, which may grow, and the machine's flags are not in its name; long ones are cut."""

    def folder(*words):
        argv = ["fedavg.py", *words, "--runs", tmp_path, "--dry-run"]
        (line,) = run_reproduce(capsys, *argv)[1].splitlines()
        path = pathlib.Path(parsed_flags(line.removeprefix("python "))["out"])
        assert path.name == "fedavg-seed0"
        return path.parent.name

    first = folder(*shlex.split(GLYPHS), "--alpha", "0.1")
    turned = ["--partition_alpha=0.1", "--quiet", *shlex.split(GLYPHS), "--comm_round", "9"]
    assert first == folder(*turned, "--device", "cpu") == SETTING
    more = "--momentum 0.5 --weight-decay 0.001 --batch-size 32 --lr-decay 0.99 --clip 10"
    more += " --server avgm --server-lr 0.5 --server-momentum"
    long = [folder(*shlex.split(f"{GLYPHS} {more} {value}")) for value in (0.1, 0.2)]
    assert len(set(long)) == 2 and all(len(name) < 120 for name in long)


def test_a_grid_of_scripts_and_a_flag(tmp_path, capsys):
    argv = ["fedavg.py,fedprox.py", *shlex.split(GLYPHS), "--sweep", "lr=0.1,0.2", "--dry-run"]
    _, out, _ = run_reproduce(capsys, *argv, "--runs", tmp_path)
    folders = [pathlib.Path(line.split()[-1]).name for line in out.splitlines()]
    assert folders == [
        f"{name}-lr{lr}-seed0" for name in ("fedavg", "fedprox") for lr in (0.1, 0.2)
    ]


def test_data_seeds_vary_the_partition_too(tmp_path, capsys):
    """The first is the run of --seeds; a table's runs as well."""
    tail = ["--data-seeds", "3", "--runs", tmp_path, "--dry-run"]
    _, out, _ = run_reproduce(capsys, "fedavg.py", *shlex.split(GLYPHS), *tail)
    flags = [parsed_flags(line.removeprefix("python ")) for line in out.splitlines()]
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


# --------------------------------------------------------------------------------------------------
# Command lines
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        (["fedfoo", "1"], "fedfoo is no method script here, nor one of fedalign, fedcka, fedmlb"),
        (["fedalign", "9"], "FedAlign has 1, 2, 3"),
        (
            ["fedalign", "5", "--only", "fedmlb"],
            "no cell of 'fedmlb' in this table: FedAvg, FedProx",
        ),
        (["fedalign", "5", "--only", ""], "argument --only"),
        (["fedalign", "5", "--limit", "0"], "--limit"),
        (["common.py", "--sweep", "lr=1"], "no method script"),
        (["fedavg.py,common.py"], "common.py is no method script"),
        (["fedavg.py,fedfoo.py --lr 1"], "fedfoo.py is no method script"),
        (["fedavg.py,fedavg.py"], "two runs would share the folder"),
        (["fedavg.py", "--seeds", "2", "--data-seeds", "2"], "--data-seeds: varies --seed too"),
        (["fedavg.py", "--data-seed", "1", "--data-seeds", "2"], "set by reproduce"),
        (["fedavg.py,fedprox.py --out x"], "--out: set by reproduce"),
        (["fedavg.py", "--sweep", "lr"], "takes FLAG=a,b"),
        (["fedavg.py", "--sweep", "a,b=1,2/3"], "takes FLAG=a,b"),
        (["fedalign", "5", "--sweep", "lr=1"], "--sweep: not of a paper's table; fedalign.py is"),
        (["fedmlb", "1a", "--lr", "1"], "--lr: not of a paper's table; fedmlb.py is the script"),
        (["niid-bench", "cifar-10", "--lr", "1"], "--lr: not of a paper's table"),
        (["./fedavg.py", "1"], "unrecognized arguments: 1"),
        (["fedalign", "--lr", "1"], "argument --lr: not of a paper's table"),
        (["rfedavg", "fig9", "--csv", "x.csv"], "fig9 has parts; name one of fig9a, fig9b"),
    ],
)
def test_mistakes_get_one_line(capsys, tmp_path, argv, message):
    result = run_reproduce(capsys, *argv, "--runs", tmp_path, "--dry-run")
    assert is_refused(result, "reproduce: error: ", message)


def test_a_mistake_in_a_script_s_flag_is_the_script_s(capsys, tmp_path):
    argv = ["fedavg.py", "--sweep", "lr=0.1,no", "--runs", tmp_path, "--dry-run"]
    assert is_refused(run_reproduce(capsys, *argv), "fedavg.py: argument --lr: must be a number")


@pytest.mark.parametrize("module", [command_module, compare])
def test_help_begins_with_the_description(capsys, module):
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert capsys.readouterr().out.startswith(module.__doc__.splitlines()[0])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--csv", "there.csv"], "exists already"),
        (["--plot", "x.docx"], "must end in one of"),
    ],
)
def test_outputs_are_checked_before_any_run(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr(jobs, "run_all", lambda *_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").touch()
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    argv = ["fedprox.py", *shlex.split(GLYPHS), "--sweep", "mu=1", "--runs", tmp_path]
    assert is_refused(run_reproduce(capsys, *argv, *words), message)


# --------------------------------------------------------------------------------------------------
# What is there
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def swept(tmp_path, capsys):
    """The folder of a run in a sweep, and a function that runs the sweep with more flags."""
    folder = tmp_path / "sweep-fedavg-momentum" / "momentum0-seed0"
    make_run(folder, f"fedavg.py {GLYPHS} --momentum 0 --lr 0.03")

    def sweep(*more):
        argv = [*SWEEP, "--sweep", "momentum=0", "--lr", "0.03", "--runs", tmp_path, "--dry-run"]
        return run_reproduce(capsys, *argv, *more)

    return folder, sweep


def test_a_run_with_other_flags_is_not_finished(swept):
    """The folder and the flag are named, if it decides; others may differ."""
    folder, sweep = swept
    assert is_refused(sweep("--lr", "0.5"), "another --lr (0.03, now 0.5)", str(folder))
    assert is_refused(sweep("--rounds", "3"), "another --rounds (4, now 3)", str(folder))
    assert is_refused(sweep("--client-test"), "another --client-test (False, now True)")
    for more in ("--workers=2", "--augment=none", "--data-dir=x"):
        assert sweep(more)[:2] == (0, "")


def test_a_run_of_other_code_is_not_finished(swept):
    folder, sweep = swept
    code = run_folder.code_of(method_call("fedavg").method)
    write_config(folder, code=code)
    assert sweep()[:2] == (0, "")
    write_config(folder, code=code | {"aggregate": "median 1"})
    assert is_refused(sweep(), "another aggregate", "median 1", str(folder))


def test_what_is_not_finished_goes_on(swept):
    """More rounds, a run without its last weights; not a record, of which nothing else is kept."""
    folder, sweep = swept
    assert sweep("--rounds", "9")[1].endswith("--resume\n")
    (folder / "model.pt").unlink()
    assert sweep()[1].endswith("--resume\n")
    (folder / "checkpoint.pt").unlink()
    assert sweep()[1] == ""


# --------------------------------------------------------------------------------------------------
# Whole tables, whose runs are made by hand
# --------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(cells_module, "homes", lambda: {bare(c.command): c for c in cells})
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
    exit_code, out, err = run_reproduce(capsys, "fedalign", "1", "--runs", tmp_path)
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
    assert lines == [(["hessian_eval.py", str(a), str(b), "--diagonal", "tensor"], math.inf)]
    (a / "hessian.json").write_text('{"round": 4}')
    code, _, err = run_reproduce(capsys, *argv)
    assert code == 1 and "hessian_eval.py" in err
    assert lines[1][0] == ["hessian_eval.py", str(b), "--diagonal", "tensor"]
    code, out, _ = run_reproduce(capsys, *argv, "--limit", "1")
    assert code == 0 and lines[2][1] < math.inf and "--limit is reached" in out
    (b / "hessian.json").write_text('{"round": 4}')
    assert run_reproduce(capsys, *argv)[0] == 0 and len(lines) == 3
    (b / "hessian.json").write_text('{"round": 3}')  # of 4
    code, _, err = run_reproduce(capsys, *argv)
    assert code == 0 and lines[3][0] == ["hessian_eval.py", str(b), "--diagonal", "tensor"]
    assert "B" in err and "hessian.json: left out" in err


def test_a_run_that_goes_on_is_analysed_again(tmp_path, monkeypatch, capsys):
    """Though the result that is there is of its last round so far."""
    (cell,) = tiny_table(monkeypatch, "hessian_eval.py RUNS", A=f"fedavg.py {GLYPHS}")
    run = make_run(cell_folder(tmp_path, cell), cell.command, accuracies=(10, 20))
    (run / "hessian.json").write_text('{"round": 2}')
    _, out, _ = run_reproduce(capsys, "fedalign", "1", "--runs", tmp_path, "--dry-run")
    assert out.splitlines()[-1] == f"python hessian_eval.py {run}"


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paper, figure", [("rFedAvg", "fig9a"), ("rFedAvg", "fig9d"), ("FedMLB", "fig4")]
)
def test_a_figure_is_drawn(tmp_path, capsys, paper, figure):
    """9a and 9d each against its own flag, 4 against seconds a round."""
    pytest.importorskip("matplotlib")
    folders = {cell_folder(tmp_path, home(cell)): home(cell) for cell in CELLS[paper, figure]}
    for folder, cell in folders.items():
        make_cell_run(folder, cell, 1.0)
    code, out, _ = run_reproduce(capsys, paper.lower(), figure, "--runs", tmp_path)
    assert code == 0 and f"{len(folders)} of {len(folders)} runs finished" in out
    assert (tmp_path / f"{paper.lower()}-{figure}" / "picture.png").exists()


def test_parts_of_a_figure_are_drawn_apart(tmp_path, capsys, monkeypatch):
    """9a to 9d each against its own flag."""
    pytest.importorskip("matplotlib")
    shown = []
    monkeypatch.setattr(compare, "report", lambda *args: shown.append(args))
    monkeypatch.setattr(jobs, "run_all", lambda *_: ({}, ""))
    for part in "abcd":
        cell = home(CELLS["rFedAvg", f"fig9{part}"][1])
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
    _, _, names, wanted = shown[0]
    settings = {setting for labels in names.values() for setting, _ in labels}
    assert settings == {cell.label for cell in CELLS["rFedAvg", "fig9a"]}
    assert len(names) == len(CELLS["rFedAvg", "fig9a"]) and wanted == set()
