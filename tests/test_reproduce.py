"""The command reproduce: which runs a table or a sweep needs, what is there, what is shown."""

import csv
import math
import re
import shlex

import pytest
import run_folder
import torch
from analysis.runs import method_call
from conftest import refusal
from makers import (
    CELLS,
    GLYPHS,
    Started,
    cell_folder,
    is_refused,
    make_cell_run,
    make_run,
    read_rows,
    run_reproduce,
    write_rows,
)
from runs import config_of, write_config

from reproduce import compare, jobs, published
from reproduce.cells import Cell, homes, parsed_flags
from reproduce.jobs import select_cells


@pytest.fixture
def lines(tmp_path, capsys):
    """A function that returns the lines that --dry-run prints."""

    def run(*argv):
        code, out, _ = run_reproduce(capsys, *argv, "--runs", tmp_path, "--dry-run")
        assert code == 0
        return out.splitlines()

    return run


def test_dry_run_prints_what_is_left(tmp_path, lines):
    """The cost of Tables 5 and 7 is a line a method and data set, in the form that -m wants."""
    argv = ["fedalign", "5", "--seeds", "2", "--only"]
    left = lines(*argv, "FedAvg,gradaug")
    folder = tmp_path / "fedalign-1" / "CIFAR-100-ResNet56-C16-E20-R25-alpha0.5-FedAvg-seed0"
    assert left[0].endswith(f"--seed 0 --out {folder}") and "--seed 1" in left[5]
    cost = "python -m analysis.cost "
    assert [line.startswith(cost) for line in left] == 10 * [False] + 5 * [True]
    assert sum(line.startswith(cost) for line in lines("fedalign", "7")) == 16
    first = homes()[CELLS["FedAlign", "5"][0].command]
    make_cell_run(folder, first, 1.0)
    other_seed = folder.with_name(folder.name.replace("seed0", "seed1"))
    make_run(other_seed, first.command, 1, accuracies=[1.0] * 3)
    line, last = lines(*argv, "fedavg")
    assert "--seed 1" in line and line.endswith("--resume") and last.startswith(cost)
    text = lines("rfedavg", "I", "--only", "FedAvg,Sent140", "--data-dir", "/x")[0]
    assert "--vectors /x/glove" in text and " --data-dir /x " in text
    text = lines("niid-bench", "cifar-10", "--only", "MOON", "--data-dir", "/x")[0]
    assert text.count("--data-dir") == 1 and " --data-dir /x/cifar10 " in text
    seeds = [line.partition("--seed ")[2] for line in lines(*argv[:2], "--data-seeds", "2")]
    assert seeds[0].startswith("0 --out ") and seeds[10].startswith("1 --data-seed 1 --out ")


@pytest.mark.parametrize(
    "table, words, methods, datasets",
    [
        ("FedMLB 1a", "FedAvg", ["FedAvg"], ["CIFAR-100", "Tiny-ImageNet"]),
        ("FedMLB 1a", "feddyn,FedDyn+FedMLB,cifar100", ["FedDyn", "FedDyn+FedMLB"], ["CIFAR-100"]),
        ("FedAlign 5", "gradaug", [f"GradAug(n={n})" for n in range(1, 5)], ["CIFAR-100"]),
        ("rFedAvg I", "fedavg,MNIST,rfedavg+", ["FedAvg", "rFedAvg+"], ["MNIST"]),
    ],
)
def test_only(table, words, methods, datasets):
    """Methods by the table's names first, then by script, and data sets by both their names."""
    cells = select_cells(CELLS[tuple(table.split())], words)
    assert sorted({cell.method for cell in cells}) == methods
    assert sorted({cell.dataset for cell in cells}) == datasets


SETTING = "compare-glyphs-cnn-alpha0.1-clients2-epochs1"
LONG = f"fedavg {GLYPHS} --momentum 0.5 --weight-decay 0.001 --batch-size 32 --lr-decay 0.99"
LONG += " --server avgm --server-lr 0.5 --server-momentum "
# a line, then the folder and its runs, seed 0 of all first, then flags, each of all runs; each run
# has the flags of all and its own, but rounds, which may grow, and the machine's are in no name
PLANS = f"""
fedmlb.py --dataset glyphs --sweep=--pathways=1/1,2
    sweep-fedmlb-pathways/ pathways1-seed0 pathways1-2-seed0
    pathways [[1], [1, 2]]
fedavg --dataset glyphs --sweep epochs,rounds=1,200/2,100
    sweep-fedavg-epochs-rounds/ epochs1-rounds200-seed0 epochs2-rounds100-seed0
    epochs [1, 2] | rounds [200, 100]
fedavg.py,fedprox --dataset glyphs --sweep lr=0.1,0.2
    compare-glyphs/ fedavg-lr0.1-seed0 fedavg-lr0.2-seed0 fedprox-lr0.1-seed0 fedprox-lr0.2-seed0
    lr [0.1, 0.2, 0.1, 0.2]
'fedavg,fedalign.py --augment crop,flip, ditto' {GLYPHS} --alpha 0.1 --seeds 2
    {SETTING}/ fedavg-seed0 fedalign-augment-crop-flip-seed0 ditto-seed0 fedavg-seed1 \
fedalign-augment-crop-flip-seed1 ditto-seed1
    augment ['auto', 'crop,flip', 'auto', 'auto', 'crop,flip', 'auto'] | clients [2, 2, 2, 2, 2, 2]
fedavg {GLYPHS} --alpha 0.1 --data-seeds 3
    {SETTING}/ fedavg-seed0 fedavg-seed1-data1 fedavg-seed2-data2
    seed [0, 1, 2] | data_seed [0, 1, 2]
fedavg --partition_alpha=0.1 --quiet {GLYPHS} --comm_round 9
    {SETTING}/ fedavg-seed0
    rounds [9]
"""


@pytest.mark.parametrize("plan", re.split(r"\n(?! )", PLANS.strip()))
def test_runs_of_scripts_and_sweeps(tmp_path, lines, plan):
    line, places, flags = plan.split("\n    ")
    found = [parsed_flags(line.removeprefix("python ")) for line in lines(*shlex.split(line))]
    folder, *names = places.split()
    assert [f["out"] for f in found] == [f"{tmp_path}/{folder}{name}" for name in names]
    for name, values in (words.split(" ", 1) for words in flags.split(" | ")):
        assert str([f[name] for f in found]) == values


def test_long_names_are_cut(lines):
    names = {lines(*shlex.split(f"{LONG}{value}"))[0].split("/")[-2] for value in (0.1, 0.2)}
    assert len(names) == 2 and max(map(len, names)) < 120


REFUSALS = [
    ("'fedavg --vectors \"a'", 'argument PAPER: fedavg --vectors "a: No closing quotation'),
    ("''", "argument PAPER: is none of benchmark"),
    ("/some/place/mine.py", "scaffold, stochdepth; copy it to "),
    ("fedfoo 1", "fedfoo is none of benchmark, fedalign, fedcka, fedmlb"),
    ("fedavg.py,fedavg.py", "two runs would share the folder"),
    ("fedavg --sweep lr=1,2 --sweep lr=3", "two points would share the folder"),
    ("fedavg --sweep lr", "takes FLAG=a,b"),
    ("fedavg --sweep a,b=1,2/3", "takes FLAG=a,b"),
    ("fedavg --sweep lr=0.1,no", "fedavg.py: argument --lr: must be a number"),
    ("'fedavg.py,fedprox.py --out=x --resume'", "argument --out: set by reproduce"),
    ("fedavg --plain", "argument --plain: leaves a run that cannot be compared"),
    ("benchmark --data-seed 3", "argument --data-seed: set by reproduce"),
    ("fedavg --sweep seed=1,2", "argument --seed: set by reproduce"),
    ("fedavg --sweep data-seed=1,2 --data-seeds 2", "argument --data-seed: set by reproduce"),
    ("fedavg --seeds 2 --data-seeds 2", "--data-seeds: varies --seed too"),
    ("./fedavg.py 1", "unrecognized arguments: 1"),
    ("fedalign 9", "FedAlign has 1, 2, 3"),
    ("fedalign 5 --only fedmlb", "no cell of 'fedmlb' in this table: FedAvg, FedProx"),
    ("fedalign 5 --sweep lr=1", "--sweep: not of a paper's table; fedalign.py is the script"),
    ("niid-bench cifar-10 --lr 1", "--lr: not of a paper's table\n"),
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


KEPT = [  # more flags, and what is told then: a refusal, --resume, or "" of a finished run
    ("--workers=2", ""),
    ("--rounds 9", "--resume"),
    ("--rounds 3", "another --rounds (4, now 3)"),
    ("--lr 0.5", "another --lr (0.03, now 0.5)"),
    ("--client-test", "another --client-test (False, now True)"),
    ("--metric all", "another --metric (accuracy, now all)"),
]


def test_what_is_finished(tmp_path, capsys, monkeypatch):
    """A run without its last weights goes on; not a record, of which nothing else is kept."""
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
    write_config(folder, code=code | {"aggregate": "median 1"})
    assert is_refused(run_reproduce(capsys, *argv), "another aggregate", "median 1", str(folder))
    (folder / "model.pt").unlink()
    assert run_reproduce(capsys, *argv)[1].endswith("--resume\n")
    write_config(folder, code=code)
    (folder / "checkpoint.pt").unlink()
    assert run_reproduce(capsys, *argv)[1] == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # whose default is tf32
    assert run_reproduce(capsys, *argv) == (0, "", "")
    assert "--precision" in run_reproduce(capsys, *argv, "--precision", "bf16")[2]
    config = config_of(folder)["flags"]
    write_config(folder, flags=config | {"precision": "bf16"})
    assert is_refused(run_reproduce(capsys, *argv), "another --precision (bf16, now tf32)")
    monkeypatch.undo()
    command = "fedavg.py --dataset folder --rounds 4"
    folder = write_config(make_run(tmp_path / "a", command), augment="none")  # of grey images
    for more in ("", " --augment none"):
        assert jobs.line_left(folder, command + more) == []
    assert "another --augment" in refusal(jobs.line_left, folder, f"{command} --augment crop")


def test_a_comparison_runs_goes_on_and_shows(tmp_path, capsys, started):
    """A table of all scripts over their seeds, and a picture; a further script adds its runs."""
    pytest.importorskip("matplotlib")
    argv = [*shlex.split(GLYPHS), "--seeds", "3", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, "fedavg,moon --mu 5", *argv)
    assert code == 0 and "6 of 6 runs finished" in out
    assert (tmp_path / "compare-glyphs-cnn-clients2-epochs1" / "picture.png").exists()
    assert "All rows: dataset glyphs, partition dirichlet, alpha 0.5, data_seed 0" in out
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith(("FedAvg", "MOON"))]
    assert rows == [["FedAvg", "3"], ["MOON", "3"]]
    started.clear()
    code, out, _ = run_reproduce(capsys, "fedprox.py,fedavg.py,moon.py --mu 5", *argv)
    assert [line[0] for line in started] == 3 * ["fedprox.py"] and "9 of 9 runs finished" in out


def test_what_another_process_has_finished_is_not_run(tmp_path, capsys, monkeypatch):
    """The runs of both scripts are made while the first of them runs."""
    argv, started = ["fedavg,fedprox", *shlex.split(GLYPHS), "--runs", tmp_path], Started()
    left = run_reproduce(capsys, *argv, "--dry-run")[1].splitlines()

    def run_child(line, *_):
        return max(started(shlex.split(each)[1:]) for each in left)

    monkeypatch.setattr(jobs, "run_child", run_child)
    code, out, _ = run_reproduce(capsys, *argv)
    assert code == 0 and len(started) == 2 and "2 of 2 runs finished" in out


def test_a_whole_table(tmp_path, capsys, started):
    """Every cell is run once and shown by the table's names, beside its published number."""
    argv = ["rfedavg", "I", "--only", "FedAvg,rFedAvg+,MNIST", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv, "--csv", tmp_path / "x.csv")
    assert code == 0 and "6 of 6 runs finished" in out and "97.07 +- 0.34" in out
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    last = [row for row in rows if row["figure"] == "last"]
    assert len(last) == 6 and {row["method"] for row in last} == {"FedAvg", "rFedAvg+"}
    assert {row["setting"] for row in last} == {"sim=0%", "sim=10%", "sim=100%"}
    assert [row["table"] for row in rows if row["published"]] == 6 * ["I"]


def tiny_table(monkeypatch, template, *scripts):
    """Make FedAlign's Table 1 the only one, of the scripts. Returns its cells."""
    cells = [
        Cell("FedAlign", "1", "D", "M", "S", script, command=f"{script}.py {GLYPHS}")
        for script in scripts
    ]
    for module in (jobs, published):
        monkeypatch.setattr(module, "all_cells", lambda: {("FedAlign", "1"): cells})
    monkeypatch.setattr(published, "cells_by_flags", dict)
    monkeypatch.setattr(jobs, "homes", lambda: {c.command: c for c in cells})
    monkeypatch.setattr(jobs, "texts", lambda *_: template)
    return cells


@pytest.mark.parametrize("code", [2, 1])
def test_a_table_goes_on_after_a_failure(tmp_path, monkeypatch, capsys, started, code):
    """The table of what there is follows, then what failed; no analysis; exit code 2 or 1."""
    cells = tiny_table(monkeypatch, "-m analysis.cost RUNS", "fedavg", "fedprox", "moon")
    make_run(cell_folder(tmp_path, cells[2]), cells[2].command)
    started.codes = {"fedavg.py": code if code == 2 else 134}
    argv = ["fedalign", "1", "--runs", tmp_path, "--csv", tmp_path / "x.csv"]
    exit_code, out, err = run_reproduce(capsys, *argv)
    assert "--csv and --plot wait" in out and not (tmp_path / "x.csv").exists()
    assert exit_code == code and [line[0] for line in started] == ["fedavg.py", "fedprox.py"]
    assert "2 of 3 runs finished" in out and re.search(r"^ *fedprox .* 9\.00 ", out, re.M)
    assert re.search(r"failed, with exit code \d+: .*D-M-S-fedavg-seed0\n", err)


def test_analyses_follow_finished_tables(tmp_path, monkeypatch, capsys):
    """For runs that lack them, until the time is up; their failure is one."""
    cells = tiny_table(monkeypatch, "hessian_eval.py RUNS --diagonal tensor", "fedavg", "fedprox")
    a, b = (make_run(cell_folder(tmp_path, cell), cell.command) for cell in cells)

    def run(lacking, answer, *more):
        def run_child(line, deadline):
            assert line == ["hessian_eval.py", *map(str, lacking), "--diagonal", "tensor"]
            if deadline < math.inf:
                raise TimeoutError
            return answer

        monkeypatch.setattr(jobs, "run_child", run_child)
        code, out, err = run_reproduce(capsys, "fedalign", "1", "--runs", tmp_path, *more)
        return code, out + err

    assert run([a, b], 0)[0] == 0
    (a / "hessian.json").write_text('{"round": 4}')
    code, text = run([b], 1)
    assert code == 1 and "failed, with exit code 1: hessian_eval.py" in text
    code, text = run([b], 1, "--limit", "1")
    assert code == 0 and "--limit is reached" in text
    (b / "hessian.json").write_text('{"round": 4}')
    assert run(["none"], 1)[0] == 0
    (b / "hessian.json").write_text('{"round": 3}')  # of 4
    assert "hessian.json: left out" in run([b], 0)[1]
    write_rows(a, read_rows(a)[:3])  # a run that goes on is analysed again, whatever is there
    (a / "hessian.json").write_text('{"round": 3}')
    argv = ["fedalign", "1", "--runs", tmp_path, "--dry-run"]
    assert f"python hessian_eval.py {a} {b} --diag" in run_reproduce(capsys, *argv)[1]


def test_parts_of_a_figure_are_drawn_apart(tmp_path, capsys, monkeypatch):
    """9a to 9d each against its own flag."""
    pytest.importorskip("matplotlib")
    report, shown = compare.report, []
    monkeypatch.setattr(compare, "report", lambda *args: shown.append(args) or report(*args))
    monkeypatch.setattr(jobs, "run_all", lambda *_: ({}, ""))
    firsts = {homes()[CELLS["rFedAvg", f"fig9{part}"][1].command] for part in "abcd"}
    for cell in firsts:
        make_cell_run(cell_folder(tmp_path, cell), cell, 1.0)
    run_reproduce(capsys, "rfedavg", "fig9", "--runs", tmp_path)
    axes = [("lam", "a"), ("clients", "b"), ("epochs", "c"), ("sample", "d")]
    found = [(v.x, v.plot.parent.name[-1]) for _, v, *_ in shown if v.plot.exists()]
    assert found == axes
    _, _, names, wanted = shown[0]
    assert len(names) == len(CELLS["rFedAvg", "fig9a"]) and wanted == set()
