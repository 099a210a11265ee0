"""A short part of tests/chaos.py, in processes of their own, since those of pytest have threads."""

import subprocess
import sys

from methods import ROOT

PER_PROCESS = """
import os, sys
sys.path.insert(0, "tests")
import chaos, engine, numpy
engine.Worker.rng = lambda worker, name: numpy.random.default_rng(os.getpid())
chaos.main("--minutes 9 --only kills --cases 4".split())
"""


def run(*argv):
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_all_is_survived_or_refused():
    done = run("tests/chaos.py", *"--minutes 9 --seed 0 --cases 2".split())
    assert done.returncode == 0, done.stdout + done.stderr
    for section in ("kills", "damage"):
        assert f"{section}: 2 tried, 2 survived, 0 failed" in done.stdout


def test_a_resume_that_draws_other_numbers_is_noticed():
    done = run("-c", PER_PROCESS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs from the uncut run's" in done.stdout
