"""The command reproduce.compare: its tables, files, and what README shows of results/."""

import csv
import io
import json
import re

import pytest
from makers import CELLS, ROOT, is_refused, make_run, run_compare

from reproduce.compare import MARKS


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
    _, out, _ = run_compare(capsys, *make_three_settings(tmp_path))
    lines = {tuple(line.split()[:3]): line for line in out.splitlines()}
    # (1250 + 5000) / (1250 + 1000) and / (1250 + 2000)
    assert "(2.78x)" in lines["alpha", "0.1", "fedprox"]
    assert "(1.92x)" in lines["alpha", "0.5", "fedprox"]
    assert "x)" not in lines["alpha", "0.7", "fedprox"]
    assert " 4,200 " in lines["alpha", "0.7", "rfedavg"]  # of 2 clients


def test_the_csv_has_every_number(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    runs = make_three_settings(tmp_path / "runs")
    run_compare(capsys, *runs, "--csv", tmp_path / "t.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
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
            "clients 4, sample 1.0, epochs 2, batch_size 64"
        )
        assert not empty and "setting" in head
    _, out, _ = run_compare(capsys, a)
    assert ", rounds 4, " in out.splitlines()[0]
    natural = make_run(tmp_path / "c", f"fedavg.py {line} --rounds 4 --partition natural")
    _, out, _ = run_compare(capsys, natural)
    assert "partition natural" in out and "alpha" not in out and "similarity" not in out


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
        assert is_refused(run_compare(capsys, run, flag, path), message, flag)
    assert (tmp_path / "old.csv").read_text() == "x"
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "paper, table", [("rFedAvg", "I"), ("FedAlign", "5"), ("FedCKA", "4"), ("FedMLB", "6")]
)
def test_runs_without_an_evaluation_yet(tmp_path, capsys, paper, table):
    """--eval-every leaves rows without accuracy: they have seconds and bytes, and no accuracy."""
    command = CELLS[paper, table][0].command
    run = make_run(tmp_path / "run", command, accuracies=[None, None])
    flags = ["--at", "500", "--target", "40", "--csv", tmp_path / "x.csv", "--over", "lr"]
    code, out, err = run_compare(capsys, run, *flags)
    assert code == 0 and not err and "1 at 2/" in out
    assert re.search(r" 1\.50 \(1\.00x\)| 1\.50 ", out)
    pytest.importorskip("matplotlib")
    for x in ("rounds", "lr", "s/round"):
        assert run_compare(capsys, run, "--plot", tmp_path / f"{x[0]}.png", "--x", x)[0] == 0


# --------------------------------------------------------------------------------------------------
# --into
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n".join(MARKS[::-1]), MARKS[0]])
def test_a_page_without_its_marks(tmp_path, capsys, text):
    run = make_run(tmp_path / "run")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert is_refused(run_compare(capsys, run, "--into", page), "argument --into")
    assert page.read_text() == text
    assert "argument --into" in run_compare(capsys, run, "--into", tmp_path / "no.md")[2]


def test_tables_go_into_a_file(tmp_path, capsys):
    """Between its marks, and nothing else is touched; not at all where a run is damaged."""
    run = make_run(tmp_path / "run")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}old\n{MARKS[1]}after\n")
    assert run_compare(capsys, run, "--into", page) == (0, "", "")
    _, tables, _ = run_compare(capsys, run, "--markdown")
    assert page.read_text() == f"before\n{MARKS[0]}\n{tables}\n{MARKS[1]}after\n"
    page.chmod(0o755)
    link = tmp_path / "link.md"
    link.symlink_to(page)
    assert run_compare(capsys, run, "--into", link)[0] == 0
    assert link.is_symlink() and page.stat().st_mode & 0o777 == 0o755
    (tmp_path / "bad").mkdir()
    assert run_compare(capsys, run, tmp_path / "bad", "--into", page)[0] == 2
    assert tables in page.read_text()


def kept_runs():
    return [path.parent for path in sorted(ROOT.glob("results/*/*/config.json"))]


@pytest.mark.parametrize(
    "page, folders",
    [("reproduce.md", "rfedavg-*"), ("demonstration.md", "mnist-skew")],
)
def test_the_results_are_those_kept(capsys, tmp_path, monkeypatch, page, folders):
    """The section is what the command makes of results/, every row with n and hardware."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / page).read_text()
    page = tmp_path / page
    page.write_text(text)
    runs = [run.relative_to(ROOT) for run in kept_runs() if run.match(f"results/{folders}/*")]
    assert runs and run_compare(capsys, *runs, "--into", page)[0] == 0
    assert page.read_text() == text
    section = text.partition(MARKS[0])[2].partition(MARKS[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    head, *rows = [line.split(" | ") for line in lines]
    assert "n" in head and head[-1] == "hardware |"
    for row in rows:
        assert row[-1] == "hardware |" or "cores" in row[-1] or "NVIDIA" in row[-1]


def test_kept_runs_name_no_place_of_a_machine():
    for run in kept_runs():
        flags = json.loads((run / "config.json").read_text())["flags"]
        assert not any(str(value).startswith("/") for value in flags.values())
