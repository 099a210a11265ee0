"""Running the runs of a table: limits, interrupts, resuming, and what is said of failures."""

import importlib
import io
import os
import shlex
import signal
import subprocess
import sys
import time

from conftest import TINY
from makers import GLYPHS, PLAIN, ROOT, make_images, make_run, read_rows
from tqdm import tqdm

from reproduce.cells import Cell
from reproduce import jobs
from reproduce.jobs import run_all, run_child
from reproduce.runs import read_run

ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


class Child:
    """In place of subprocess.Popen: a run that ends only when it gets a signal."""

    returncode = None
    started = []
    signals = []

    def __init__(self, line):
        self.started.append(line)

    def poll(self):
        return 130 if self.signals else None

    def wait(self, timeout=None):
        if not self.signals:
            raise subprocess.TimeoutExpired("run", timeout)

    def send_signal(self, number):
        self.signals.append(number)


def test_limit_interrupts_a_run(tmp_path, monkeypatch):
    """The run in progress gets SIGINT, none is started after it, and none is run again."""
    monkeypatch.setattr(Child, "started", [])
    monkeypatch.setattr(Child, "signals", [])
    monkeypatch.setattr(subprocess, "Popen", Child)
    places = make_run(tmp_path / "done"), tmp_path / "b", tmp_path / "c"
    commands = dict(zip(places, (PLAIN, "fedavg.py --lr 1", "fedavg.py --lr 2")))
    left = {p: [*commands[p].split(), "--out", str(p)] for p in places[1:]}
    stopped = {}, "; --limit is reached, the same command goes on"
    assert run_all(commands, left, [["x"]], time.monotonic() + 0.1) == stopped
    assert Child.signals == [signal.SIGINT]
    (line,) = Child.started
    script = [sys.executable, str(ROOT / "fedavg.py")]
    assert line == [*script, "--lr", "1", "--out", str(tmp_path / "b")]
    assert run_all(commands, left, [], time.monotonic() - 1) == stopped
    assert len(Child.started) == 1 and list(left) == [*places[1:]]


def test_a_bar_shows_all_rounds(tmp_path, monkeypatch):
    """What is there of finished and begun runs, and what comes; the runs are quiet."""
    bars, lines = [], []

    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    def run_child(line, deadline, tick):
        lines.append(line)
        tick()
        make_run(tmp_path / "b", "fedavg.py --rounds 3", accuracies=(1, 2))
        tick()
        return 0

    monkeypatch.setattr(jobs, "tqdm", Bar)
    monkeypatch.setattr(jobs, "run_child", run_child)
    places = make_run(tmp_path / "a"), tmp_path / "b"
    commands = dict(zip(places, (PLAIN, "fedavg.py --rounds 3")))
    run_all(commands, {places[1]: ["fedavg.py", "--rounds", "3"]}, [])
    assert (bars[0].total, bars[0].initial, bars[0].n) == (4 + 3, 4, 6)
    assert lines[0][-1] == "--quiet"


def test_a_module_is_run(tmp_path, capfd):
    """as the analyses are; this one is Python's own."""
    (tmp_path / "a.json").write_text("[1]")
    assert run_child(["-m", "json.tool", "--compact", str(tmp_path / "a.json")]) == 0
    assert capfd.readouterr().out == "[1]\n"


def test_a_failure_says_why_itself(tmp_path, capfd):
    flags = [*shlex.split(GLYPHS), "--dataset", "folder", "--data-dir", str(tmp_path / "no")]
    assert run_child(["fedavg.py", *flags]) == 2
    assert capfd.readouterr().err.startswith("fedavg.py: error: --data-dir")


def result_rows(folder):
    """Return the rows of a run without what depends on the machine."""
    machine = ("seconds", "samples_per_s", "peak_memory", "crc32")
    return [{k: v for k, v in row.items() if k not in machine} for row in read_rows(folder)]


def wait_for(path, process):
    while process.poll() is None and not path.exists():
        time.sleep(0.01)


def test_a_table_that_was_cut_goes_on(tmp_path):
    """The command alone gets SIGINT in its second run and is started again.

    The same rows as in an uncut run; what was finished is not run again.
    """
    flags = [*TINY, "--dataset", "folder", "--data-dir", str(make_images(tmp_path / "data", 32))]
    flags += ["--rounds", "60", "--clients", "2", "--partition", "iid"]
    cells = [
        Cell("FedAlign", "5", "D", "M", "S", method, command=f"{script}.py {shlex.join(flags)}")
        for method, script in (("FedProx", "fedprox"), ("FedAvg", "fedavg"))
    ]
    done, cut = (tmp_path / "fedalign-5" / f"D-M-S-{cell.method}-seed0" for cell in cells)
    make_run(done, cells[0].command, accuracies=[1.0] * 60)
    code = (
        "from reproduce import __main__, cells, jobs, published\n"
        "from reproduce.cells import Cell\n"
        "jobs.PATIENCE = 0.1\n"
        "jobs.texts = lambda *_: ''\n"
        f"tables = {{('FedAlign', '5'): {cells}}}\n"
        "cells.all_cells = jobs.all_cells = published.all_cells = lambda: tables\n"
        f"__main__.main(['fedalign', '5', '--runs', {str(tmp_path)!r}])"
    )

    def start():
        line = [sys.executable, "-c", code]
        return subprocess.Popen(line, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)

    process = start()
    wait_for(cut / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 0 < len(result_rows(cut)) < 60
    out = start().communicate()[0]
    assert "[2/2] python fedavg.py" in out and "--resume" in out and "[1/2]" not in out
    assert "2 of 2 runs finished" in out
    whole = tmp_path / "whole"
    importlib.import_module("fedavg").main([*flags, "--seed", "0", "--out", str(whole)])
    assert result_rows(cut) == result_rows(whole) and len(result_rows(whole)) == 60


def test_a_terminated_table_ends_its_run(tmp_path):
    """SIGTERM to the command alone: the run is interrupted, keeps its rounds, and nothing runs."""
    code = "from reproduce import __main__, jobs; jobs.PATIENCE = 0.1; __main__.main()"
    flags = "--dataset glyphs --model cnn --clients 2 --local-steps 1 --rounds 500 --batch-size 8"
    argv = ["fedavg.py", *flags.split(), "--sweep", "lr=0.01", "--runs", str(tmp_path)]
    line = [sys.executable, "-c", code, *argv]
    process = subprocess.Popen(line, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "sweep-fedavg-lr" / "lr0.01-seed0"
    wait_for(run / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        "fedavg.py: interrupted; continue with" in err
        and "error" not in err
        and "the same command goes on" in err
    )
    assert 0 < len(read_run(run).rows) < 500
