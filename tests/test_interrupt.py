"""From the shell: Ctrl-C, closed streams, and that tests/chaos.py sees a fault."""

import os
import signal
import subprocess
import sys
import time

from conftest import TINY
from methods import ROOT
from runs import rounds_in, start


def test_interrupts(tmp_path, monkeypatch):
    """Ctrl-C twice, as timeout sends it to a process and its group, is a line: how to go on.

    Threads that still ran would abort the exit, and one that waits for a lock would never end."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    out = tmp_path / "run"
    argv = [*TINY, "--rounds", "5000", "--workers", "2", "--batch-size", "8", "--out", str(out)]
    process = start("fedavg", *argv, stderr=subprocess.PIPE)
    while not rounds_in(out) and process.poll() is None:
        time.sleep(0.02)
    for pause in (0.03, 0.003):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1, err
    assert f"--out {out} --resume" in err


def test_closed_streams(tmp_path):
    """as of a service: nothing is said, and no file of the run takes the number of stderr."""

    def close():
        for number in range(3):
            os.close(number)

    argv = [*TINY[:-3], "--device", "cpu", "--local-steps", "1", "--out", str(tmp_path / "run")]
    assert start("fedavg", *argv, preexec_fn=close).wait(200) == 0
    assert rounds_in(tmp_path / "run") == 2


PER_PROCESS = """
import os
import chaos, engine, numpy
engine.Worker.rng = lambda worker, name: numpy.random.default_rng(os.getpid())
chaos.main("--minutes 9 --only kills --cases 4".split())
"""


def test_a_resume_that_draws_other_numbers_is_noticed():
    command = [sys.executable, "-c", PER_PROCESS]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs from the uncut run's" in done.stdout
