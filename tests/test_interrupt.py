"""From the shell: --help, and Ctrl-C."""

import os
import signal
import subprocess
import time

import pytest
from conftest import TINY
from runs import rounds_in, start


def started(out, *argv):
    """Start a long run; return its process once a round is done."""
    argv = [*TINY, "--rounds", "5000", *argv, "--out", str(out)]
    process = start("fedavg", *argv, stderr=subprocess.PIPE)
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    return process


def interrupted(process, out):
    """Check that a process ends with one line that says how to go on."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1, err
    assert f"--out {out} --resume" in err


def test_interrupt(tmp_path):
    process = started(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    interrupted(process, tmp_path / "run")


@pytest.mark.parametrize("i", [1, 3])
def test_a_second_interrupt_changes_nothing(tmp_path, monkeypatch, i):
    """Ctrl-C twice, as timeout sends it to a process and its group.

    Threads that still ran would abort the exit, and one that waits for a lock would never end."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    process = started(tmp_path / "run", "--workers", "2", "--batch-size", "8")
    for pause in (0.03 * i, 0.003 * i):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    interrupted(process, tmp_path / "run")


@pytest.mark.parametrize("closed", [[2], [0, 1, 2]])
def test_closed_streams(tmp_path, closed):
    """as of a service: nothing is said, and no file of the run takes the number of stderr."""

    def close():
        for number in closed:
            os.close(number)

    argv = [*TINY[:-3], "--device", "cpu", "--local-steps", "1", "--out", str(tmp_path / "run")]
    assert start("fedavg", *argv, preexec_fn=close).wait(200) == 0
    assert rounds_in(tmp_path / "run") == 2
