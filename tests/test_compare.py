"""The command reproduce.compare: its tables and files."""

import csv
import re

import pytest
from conftest import TINY
from makers import CELLS, PLAIN, make_groups, make_run, read_rows, run_compare, write_rows
from runs import write_config

import fedavg
from reproduce.figures import own_figures, setting_label
from reproduce.runs import read_run


def csv_rows(path):
    return list(csv.DictReader(path.open()))


def test_censored_rounds_are_shown_as_such(tmp_path, capsys):
    a = make_run(tmp_path / "a", seed=0, accuracies=(50, 60, 70, 80))
    b = make_run(tmp_path / "b", seed=1, accuracies=(10, 10, 10, 10))
    code, out, _ = run_compare(capsys, a, b, "--target", "45,99")
    assert code == 0 and "4+ (1 of 2: 1)" in out and re.search(r"4\+ +\d", out)
    assert "45.00 +- 49.50" in out  # last: 80 and 10, deviation 70 / sqrt 2


def test_relative_to_the_fedavg_of_the_same_setting(tmp_path, capsys):
    """(1250 + 5000) / (1250 + 1000) and / (1250 + 2000), of FedAvg with the same alpha."""
    runs = {
        "fedavg.py 0.1": {"bytes_up": 1000},
        "fedprox.py 0.1": {"bytes_up": 5000},
        "fedavg.py 0.5": {"bytes_up": 2000},
        "fedprox.py 0.5": {"bytes_up": 5000},
        "rfedavg.py 0.7": {"bytes_delta": 8400},
        "fedprox.py 0.7": {},
    }
    lines = [k.replace(" ", " --dataset glyphs --rounds 4 --alpha ") for k in runs]
    folders = [make_run(tmp_path / str(i), lines[i], **runs[k]) for i, k in enumerate(runs)]
    out = run_compare(capsys, *folders, "--csv", tmp_path / "t.csv")[1]
    lines = {tuple(line.split()[1:3]): line for line in out.splitlines() if "alpha" in line}
    assert "(2.78x)" in lines["0.1", "FedProx"] and "(1.92x)" in lines["0.5", "FedProx"]
    assert "x)" not in lines["0.7", "FedProx"]
    assert " 4,200 " in lines["0.7", "rFedAvg"]  # of 2 clients
    rows = csv_rows(tmp_path / "t.csv")
    assert {(row["n"], row["hardware"]) for row in rows} == {("1", "x86_64, 2 cores")}


def test_a_table_says_first_what_all_rows_share(tmp_path, capsys):
    """Data set, network, partition, clients and rounds; not what differs, nor what is idle."""
    line = "--dataset glyphs --model cnn --clients 4 --epochs 2"
    lines = "fedavg.py --rounds 4", "fedprox.py --rounds 5 --data-dir x"
    lines += ("fedavg.py --rounds 4 --partition natural --drop-last",)
    a, b, c = (make_run(tmp_path / str(i), f"{words} {line}") for i, words in enumerate(lines))
    assert run_compare(capsys, a, b)[1].startswith(
        "All rows: dataset glyphs, partition dirichlet, alpha 0.5, data_seed 0, model cnn, "
        "clients 4, sample 1.0, epochs 2, batch_size 64, lr 0.01, momentum 0.9, "
        "weight_decay 0.0001, clip 0.0, augment none\n\nsetting"
    )
    assert ", rounds 4, " in run_compare(capsys, a)[1].splitlines()[0]
    out = run_compare(capsys, c)[1]
    assert "partition natural" in out and "alpha" not in out and "similarity" not in out
    assert "drop_last True" in out  # not its default


def test_a_setting_names_what_acts(tmp_path):
    """--data-dir says which images a folder has, and nothing of the glyphs."""
    lines = f"{PLAIN} --data-dir a", "fedavg.py --dataset folder --rounds 4 --data-dir b"
    runs = [make_groups(make_run(tmp_path / str(i), line))[0] for i, line in enumerate(lines)]
    labels = [setting_label(run, runs) for run in runs]
    assert labels == ["dataset glyphs", "dataset folder, data_dir b"]


def test_what_a_method_reports_is_a_column(tmp_path, capsys):
    """The last round's, with four digits; a run without it does not count; lists are no numbers."""
    a = make_run(tmp_path / "a", seed=2)
    b = make_run(tmp_path / "b", largest_step=0.001234, by_client=[1, 2], flag=True)
    c = make_run(tmp_path / "d", seed=1, largest_step=0.002234)
    other = make_run(tmp_path / "c", "fedprox.py --dataset glyphs --rounds 4")
    _, out, _ = run_compare(capsys, a, b, c, other, "--csv", tmp_path / "x.csv")
    lines = [line for line in out.splitlines() if line.startswith(("method", "FedAvg", "FedProx"))]
    assert "largest_step" in lines[0] and "by_client" not in out and "flag" not in out
    assert "0.001734 +- 0.00071 (n = 2)" in lines[1] and "0.0017" not in lines[2]
    (row,) = [row for row in csv_rows(tmp_path / "x.csv") if row["figure"] == "largest_step"]
    assert float(row["measured"]) == pytest.approx(0.001734) and row["n"] == "2"


def test_rows_of_the_engine_report_nothing(tmp_path):
    """All keys of a real run's rows are known, those of --client-test too."""
    fedavg.main([*TINY, "--local-steps", "1", "--client-test", "--out", str(tmp_path / "run")])
    assert own_figures(read_run(tmp_path / "run").rows) == {}


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
        assert text in out and re.findall(r"^FedAvg .* 30\.00  (\S+)", out, re.M) == best


def test_n_is_of_seeds_or_of_partitions(tmp_path, capsys):
    """Runs of which each has a partition of its own are a row, which says so; others are not."""

    def shown(*runs):
        """Return the first line, the rows, in single spaces, and the last line of a table."""
        folders = [tmp_path / f"{script}{seed}{data}" for script, seed, data in runs]
        for folder, (script, seed, data) in zip(folders, runs):
            if not folder.exists():
                line = f"{script}.py --dataset glyphs --rounds 4 --data-seed {data}"
                make_run(folder, line, seed, (10, 20, 30, 40 + seed))
        first, *lines, last = run_compare(capsys, *folders)[1].splitlines()
        rows = [re.sub(" +", " ", line) for line in lines if line.endswith("x86_64, 2 cores")]
        return first, rows, last

    paired = [("fedavg", 0, 0), ("fedavg", 1, 1), ("fedavg", 2, 2)]
    first, (row,), last = shown(*paired)
    assert "data_seed 0,1,2" in first and row.startswith("FedAvg 3 partitions 41.00 +- 1.00")
    assert "over n partitions, each with a run of its own, none at n = 1" in last
    alike = [("fedprox", 0, 0), ("fedprox", 1, 1), ("fedprox", 2, 2)]
    assert "(1.00x)" in shown(*paired, *alike)[1][1]
    assert "(1.00x)" not in shown(*paired, *alike[:2])[1][1]
    _, (avg, prox), last = shown(*paired, ("fedprox", 0, 0), ("fedprox", 1, 0))
    assert "over n seeds on one partition or n partitions, each" in last
    assert avg.startswith("data_seed 0,1,2 FedAvg 3 partitions ")
    assert prox.startswith("data_seed 0 FedProx 2 ")
    _, rows, last = shown(*paired, ("fedavg", 1, 0))
    names = ["data_seed 0 FedAvg 2", "data_seed 1 FedAvg 1", "data_seed 2 FedAvg 1"]
    assert [row[: len(names[0])] for row in rows] == names
    assert "over n seeds on one partition, none" in last


def test_runs_that_were_stopped_are_finished(tmp_path, capsys):
    """Each counts with its own last round; one that was cut does not, where others are finished."""
    rounds = {0: (10,), 1: (10, 20), 2: (10, 20, 30), 3: (10, 20, 30, 40)}
    folders = [make_run(tmp_path / str(k), seed=k, accuracies=v) for k, v in rounds.items()]
    for seed in (0, 1):
        write_config(folders[seed], stopped=seed + 1)
    out = run_compare(capsys, *folders)[1]  # of 10, 20 and 40, and not 30, which was cut
    assert "3 (2 stopped at 1,2/4) + 1 at 3/4  23.33 +- 15.28" in out
    run_compare(capsys, *folders[:2], "--csv", tmp_path / "x.csv")
    last = next(row for row in csv_rows(tmp_path / "x.csv") if row["figure"] == "last")
    assert (last["measured"], last["n"], last["rounds"]) == ("15.0", "2", "1")


def test_refusals(tmp_path, capsys):
    a, empty = make_run(tmp_path / "a"), make_run(tmp_path / "empty", accuracies=())
    file = f"{a}/metrics.jsonl"
    for words, message in (
        ([a, "--csv", f"{a}/no/x"], f"argument --csv: {a}/no/x: there is no folder"),
        ([a, "--plot", file], f"argument --plot: {file} exists already"),
        ([empty], "no run with a finished round to compare"),
    ):
        code, out, err = run_compare(capsys, *words)
        assert code == 2 and not out and message in err.splitlines()[-1]


@pytest.mark.parametrize("paper, table", [("rFedAvg", "I"), ("FedMLB", "6")])
def test_runs_without_an_evaluation_yet(tmp_path, capsys, paper, table):
    """--eval-every leaves rows without accuracy: they have seconds and bytes, and no accuracy."""
    run = make_run(tmp_path / "run", CELLS[paper, table][0].command, accuracies=[None, None])
    flags = ["--at", "500", "--target", "40", "--csv", tmp_path / "x.csv"]
    code, out, err = run_compare(capsys, run, *flags)
    assert code == 0 and not err and re.search(r" 1 at 2/.* 1\.50 ", out) and "n = 0" not in out
    pytest.importorskip("matplotlib")
    for x in ("rounds", "s/round"):
        assert run_compare(capsys, run, "--plot", tmp_path / f"{x[0]}.png", "--x", x)[0] == 0
