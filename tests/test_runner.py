"""Running the runs of a table: limits, interrupts, resuming, and what is said of failures."""

import io
import shlex
import signal
import subprocess
import sys
import time

from conftest import make_folder
from makers import PLAIN, ROOT, make_run, run_child_here, run_reproduce
from runs import rounds_in, rows_of
from tqdm import tqdm

import common
from reproduce import jobs
from reproduce.jobs import run_all, run_child


class Child:
    """In place of subprocess.Popen: a run that ends only when it gets a signal."""

    returncode, lines, signals = None, [], []

    def __init__(self, line):
        self.lines.append(line)
        self.send_signal = self.signals.append

    def poll(self):
        return 130 if self.signals else None

    def wait(self, timeout=None):
        if not self.signals:
            raise subprocess.TimeoutExpired("run", timeout)


def test_limit_interrupts_a_run(tmp_path, monkeypatch):
    """The run in progress gets SIGINT, none is started after it, and none is run again."""
    monkeypatch.setattr(subprocess, "Popen", Child)
    commands = {tmp_path / str(lr): f"fedavg.py --lr {lr}" for lr in (1, 2)}
    left = {place: [*line.split(), "--out", str(place)] for place, line in commands.items()}
    stopped = {}, "; --limit is reached, the same command goes on"
    assert run_all(commands, left, [["x"]], time.monotonic() + 0.1) == stopped
    assert run_all(commands, left, [], time.monotonic() - 1) == stopped
    script = [sys.executable, str(ROOT / "fedavg.py"), "--lr", "1", "--out", str(tmp_path / "1")]
    assert Child.lines == [script] and Child.signals == [signal.SIGINT]
    assert left.keys() == commands.keys()


def test_a_bar_shows_all_rounds(tmp_path, monkeypatch):
    """What is there of finished and begun runs, and what comes; the runs are quiet."""
    bars, lines = [], []

    def bar(**options):
        bars.append(tqdm(**options | {"disable": False, "file": io.StringIO()}))
        return bars[0]

    def run_child(line, deadline, tick):
        lines.append(line)
        tick()
        make_run(tmp_path / "b", "fedavg.py --rounds 3", accuracies=(1, 2))
        tick()
        return 0

    monkeypatch.setattr(jobs, "tqdm", bar)
    monkeypatch.setattr(jobs, "run_child", run_child)
    commands = {make_run(tmp_path / "a"): PLAIN, tmp_path / "b": "fedavg.py --rounds 3"}
    run_all(commands, {tmp_path / "b": ["fedavg.py"]}, [])
    assert (bars[0].total, bars[0].initial, bars[0].n) == (4 + 3, 4, 6)
    assert lines[0][-1] == "--quiet"


def test_a_module_is_run_and_says_itself_why_it_fails(tmp_path, capfd):
    """as the analyses are; this one is Python's own."""
    (tmp_path / "a.json").write_text("[1]")
    line = ["-m", "json.tool", "--compact"]
    assert run_child([*line, str(tmp_path / "a.json")]) == 0
    assert run_child([*line, str(tmp_path / "b.json")]) == 2
    out, err = capfd.readouterr()
    assert out == "[1]\n" and "b.json" in err


def test_a_command_that_was_cut_goes_on(tmp_path, capsys, monkeypatch):
    """SIGTERM to the command alone ends its run, which is resumed to the rows of an uncut one."""
    code = "from reproduce import __main__, jobs; jobs.PATIENCE = 0; __main__.main()"
    flags = "--dataset folder --model cnn --clients 2 --rounds 40 --epochs 1 --partition iid"
    flags = [*flags.split(), *"--device cpu --workers 1 --eval-every 10 --data-dir".split()]
    flags.append(str(make_folder(tmp_path / "data", (32, 32))))
    argv = ["fedprox,fedavg", *flags, "--runs", str(tmp_path)]
    folder = tmp_path / "compare-folder-cnn-clients2-epochs1-eval-every10-partitioniid"
    done, cut = folder / "fedprox-seed0", folder / "fedavg-seed0"
    make_run(done, f"fedprox.py {shlex.join(flags)}", accuracies=[1.0] * 40)
    line = [sys.executable, "-c", code, *argv]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not rounds_in(cut):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and 0 < rounds_in(cut) < 40 and "error" not in err
    assert "fedavg.py: interrupted; continue with" in err and "the same command goes on" in err

    monkeypatch.setattr(common, "CORES", 1)  # as of the process that was cut
    monkeypatch.setattr(jobs, "run_child", run_child_here)
    out = run_reproduce(capsys, *argv)[1]
    assert "[2/2] python fedavg.py" in out and "--resume" in out and "[1/2]" not in out
    run_child_here(["fedavg.py", *flags, "--out", str(tmp_path / "whole")])
    assert rows_of(cut) == rows_of(tmp_path / "whole") and rounds_in(cut) == 40
