"""The command reproduce.compare: its tables, files, and what README shows of results/."""

import csv
import json
import re

import pytest
from conftest import TINY
from makers import (
    CELLS,
    PLAIN,
    ROOT,
    make_run,
    read_rows,
    run_compare,
    write_rows,
)
from runs import write_config

import fedavg
from reproduce.figures import own_figures
from reproduce.runs import read_run


def test_censored_rounds_are_shown_as_such(tmp_path, capsys):
    make_run(tmp_path / "a", seed=0, accuracies=(50, 60, 70, 80))
    make_run(tmp_path / "b", seed=1, accuracies=(10, 10, 10, 10))
    code, out, _ = run_compare(capsys, tmp_path / "a", tmp_path / "b", "--target", "45,99")
    assert code == 0 and "4+ (1 of 2: 1)" in out and re.search(r"4\+ +\d", out)
    assert "45.00 +- 49.50" in out  # last: 80 and 10, deviation 70 / sqrt 2


def make_three_settings(folder):
    """Make runs of fedavg and others at alpha 0.1, 0.5 and 0.7, where fedavg is missing.

    bytes_down is 500 t, 1250 on average.
    """
    line = "--dataset glyphs --rounds 4 --alpha"
    for alpha, scale in ((0.1, 1), (0.5, 2)):
        make_run(folder / f"avg{alpha}", f"fedavg.py {line} {alpha}", bytes_up=1000 * scale)
        make_run(folder / f"prox{alpha}", f"fedprox.py {line} {alpha}", bytes_up=5000)
    make_run(folder / "delta", f"rfedavg.py {line} 0.7", bytes_delta=8400)
    make_run(folder / "lonely", f"fedprox.py {line} 0.7")
    return sorted(folder.iterdir())


def test_relative_to_the_fedavg_of_the_same_setting(tmp_path, capsys):
    """Bytes and seconds over those of fedavg.py with the same alpha; none without one."""
    (tmp_path / "runs").mkdir()
    csv_file = tmp_path / "t.csv"
    out = run_compare(capsys, *make_three_settings(tmp_path / "runs"), "--csv", csv_file)[1]
    lines = {tuple(line.split()[:3]): line for line in out.splitlines()}
    # (1250 + 5000) / (1250 + 1000) and / (1250 + 2000)
    assert "(2.78x)" in lines["alpha", "0.1", "FedProx"]
    assert "(1.92x)" in lines["alpha", "0.5", "FedProx"]
    assert "x)" not in lines["alpha", "0.7", "FedProx"]
    assert " 4,200 " in lines["alpha", "0.7", "rFedAvg"]  # of 2 clients
    rows = list(csv.DictReader(csv_file.open()))
    assert {row["n"] for row in rows} == {"1"}
    assert {row["hardware"] for row in rows} == {"x86_64, 2 cores"}
    figures = {"last", "best", "EMA", "last five", "s/round", "MB/round"}
    assert {row["figure"] for row in rows} >= figures


def test_a_table_says_first_what_all_rows_share(tmp_path, capsys):
    """Data set, network, partition, clients and rounds; not what differs, nor what is idle."""
    line = "--dataset glyphs --model cnn --clients 4 --epochs 2"
    a = make_run(tmp_path / "a", f"fedavg.py {line} --rounds 4")
    b = make_run(tmp_path / "b", f"fedprox.py {line} --rounds 5 --data-dir x")
    for markdown in ([], ["--markdown"]):
        _, out, _ = run_compare(capsys, a, b, *markdown)
        first, empty, head = out.splitlines()[:3]
        assert first == (
            "All rows: dataset glyphs, partition dirichlet, alpha 0.5, data_seed 0, model cnn, "
            "clients 4, sample 1.0, epochs 2, batch_size 64, lr 0.01, momentum 0.9, "
            "weight_decay 0.0001, clip 0.0, augment none"
        )
        assert not empty and "setting" in head
    _, out, _ = run_compare(capsys, a)
    assert ", rounds 4, " in out.splitlines()[0]
    natural = make_run(tmp_path / "c", f"fedavg.py {line} --rounds 4 --partition natural")
    _, out, _ = run_compare(capsys, natural)
    assert "partition natural" in out and "alpha" not in out and "similarity" not in out


def test_what_a_method_reports_is_a_column(tmp_path, capsys):
    """The last round's, with four digits; a run without it has none; lists are no numbers."""
    a = make_run(tmp_path / "a", largest_step=0.001234, by_client=[1, 2], flag=True)
    b = make_run(tmp_path / "b", seed=1, largest_step=0.002234)
    other = make_run(tmp_path / "c", "fedprox.py --dataset glyphs --rounds 4")
    code, out, _ = run_compare(capsys, a, b, other, "--csv", tmp_path / "x.csv")
    lines = [line for line in out.splitlines() if line.startswith(("method", "FedAvg", "FedProx"))]
    assert code == 0 and "largest_step" in lines[0] and "by_client" not in out and "flag" not in out
    assert "0.001734 +- 0.00071" in lines[1] and "0.0017" not in lines[2]
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    (row,) = [row for row in rows if row["figure"] == "largest_step"]
    assert float(row["measured"]) == pytest.approx(0.001734) and row["n"] == "2"


def test_rows_of_the_engine_report_nothing(tmp_path, capsys):
    """All keys of a real run's rows are known, those of --client-test too."""
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--client-test", "--out", str(out)])
    assert own_figures(read_run(out).rows) == {}


def test_the_table_says_on_what_best_is_picked(tmp_path, capsys):
    """Without --validation the highest of the test set, 40; with it that of the best val_acc."""
    a = make_run(tmp_path / "a", accuracies=(10, 20, 40, 30))
    b = make_run(tmp_path / "b", f"{PLAIN} --validation 0.1", accuracies=(10, 20, 40, 30))
    write_rows(b, [row | {"val_acc": v} for row, v in zip(read_rows(b), (1, 8, 7, 8))])
    for folders, best, text in (
        ([a], ["40.00"], "; best is picked on the test set; torch"),
        ([b], ["20.00"], "; best is picked on held-out training samples; torch"),
        ([a, b], ["40.00", "20.00"], "held-out training samples, with --validation; torch"),
    ):
        out = run_compare(capsys, *folders)[1]
        rows = [line for line in out.splitlines() if line.startswith("FedAvg")]
        assert text in out
        assert [row.partition("30.00  ")[2].split()[0] for row in rows] == best


def test_n_is_of_seeds_or_of_partitions(tmp_path, capsys):
    """Runs of which each has a partition of its own are a row, which says so; others are not."""
    runs = {
        (script, seed, data): make_run(
            tmp_path / f"{script}{seed}{data}",
            f"{script}.py --dataset glyphs --rounds 4 --data-seed {data}",
            seed,
            (10, 20, 30, 40 + seed),
        )
        for script in ("fedavg", "fedprox")
        for seed, data in ((0, 0), (1, 0), (1, 1), (2, 2))
    }

    def shown(*keys):
        out = run_compare(capsys, *(runs[key] for key in keys))[1]
        lines = [line.split("  ") for line in out.splitlines()]
        lines = [list(map(str.strip, filter(None, line))) for line in lines]
        rows = [" ".join(line[:3]) for line in lines if line and line[-1] == "x86_64, 2 cores"]
        return out.splitlines()[0], rows, out.splitlines()[-1]

    paired = [("fedavg", 0, 0), ("fedavg", 1, 1), ("fedavg", 2, 2)]
    first, rows, last = shown(*paired)
    assert "data_seed 0,1,2" in first and rows == ["FedAvg 3 partitions 41.00 +- 1.00"]
    assert "over n partitions, each with a run of its own, none at n = 1" in last
    alike = [("fedprox", 0, 0), ("fedprox", 1, 1), ("fedprox", 2, 2)]
    for runs_of_prox, same in ((alike, True), (alike[:2], False)):
        table = run_compare(capsys, *(runs[key] for key in (*paired, *runs_of_prox)))[1]
        assert ("(1.00x)" in table.split("FedProx")[1].splitlines()[0]) == same
    first, rows, last = shown(*paired, ("fedprox", 0, 0), ("fedprox", 1, 0))
    assert "over n seeds on one partition or n partitions, each" in last
    assert rows == [
        "data_seed 0,1,2 FedAvg 3 partitions",
        "data_seed 0 FedProx 2",
    ]
    _, rows, last = shown(*paired, ("fedavg", 1, 0))
    assert [row.split()[:4] for row in rows] == [
        ["data_seed", "0", "FedAvg", "2"],
        ["data_seed", "1", "FedAvg", "1"],
        ["data_seed", "2", "FedAvg", "1"],
    ]
    assert "over n seeds on one partition, none" in last


def test_runs_that_were_stopped_are_finished(tmp_path, capsys):
    """Each counts with its own last round; one that was cut does not, where others are finished."""
    folders = [
        make_run(tmp_path / str(seed), seed=seed, accuracies=(10, 20, 30, 40)[: seed + 1])
        for seed in range(4)
    ]
    for seed in (0, 1):
        write_config(folders[seed], stopped=seed + 1)
    _, out, _ = run_compare(capsys, *folders)
    # of 10, 20 and 40, and not 30, which was cut
    assert "3 (2 stopped at 1,2/4) + 1 at 3/4  23.33 +- 15.28" in out
    assert run_compare(capsys, *folders[:2], "--target", "15", "--csv", tmp_path / "x.csv")[0] == 0
    rows = {row["figure"]: row for row in csv.DictReader((tmp_path / "x.csv").open())}
    assert (rows["last"]["measured"], rows["last"]["n"], rows["last"]["rounds"]) == (
        "15.0",
        "2",
        "1",
    )


REFUSALS = [
    ("a --csv old.csv", "argument --csv: old.csv exists already"),
    ("a --csv a/metrics.jsonl", "argument --csv: a/metrics.jsonl exists already"),
    ("a --csv no/x", "argument --csv: no/x: there is no folder"),
    ("a --plot old.csv", "argument --plot: old.csv exists already"),
    ("empty", "no run with a finished round to compare"),
]


@pytest.mark.parametrize("words, message", REFUSALS)
def test_refusals(tmp_path, capsys, monkeypatch, words, message):
    """Nothing is overwritten."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "empty", accuracies=())
    (tmp_path / "old.csv").write_text("x")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    code, out, err = run_compare(capsys, *words.split())
    assert code == 2 and not out and message in err.splitlines()[-1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


@pytest.mark.parametrize("paper, table", [("rFedAvg", "I"), ("FedAlign", "5"), ("FedMLB", "6")])
def test_runs_without_an_evaluation_yet(tmp_path, capsys, paper, table):
    """--eval-every leaves rows without accuracy: they have seconds and bytes, and no accuracy."""
    command = CELLS[paper, table][0].command
    run = make_run(tmp_path / "run", command, accuracies=[None, None])
    flags = ["--at", "500", "--target", "40", "--csv", tmp_path / "x.csv"]
    code, out, err = run_compare(capsys, run, *flags)
    assert code == 0 and not err and "1 at 2/" in out
    assert re.search(r" 1\.50 \(1\.00x\)| 1\.50 ", out)
    pytest.importorskip("matplotlib")
    for x in ("rounds", "lr", "s/round"):
        assert run_compare(capsys, run, "--plot", tmp_path / f"{x[0]}.png", "--x", x)[0] == 0


def kept_runs():
    return [path.parent for path in sorted(ROOT.glob("results/*/*/config.json"))]


def test_kept_runs_name_no_place_of_a_machine():
    for run in kept_runs():
        flags = json.loads((run / "config.json").read_text())["flags"]
        assert not any(str(value).startswith("/") for value in flags.values())
