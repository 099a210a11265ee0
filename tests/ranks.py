"""Runs of several processes of torchrun: what the tests share, and the long check, by hand:

    python tests/ranks.py            every method and variant: one process, 2 and 3 ranks

Prints what was checked and found equal, bit for bit: the global model, the best one, the rows, the
checkpoint and all client states. Exits with 1 where something differs.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from conftest import TINY  # noqa: E402
from methods import ROOT, SHORT, VARIANTS, needed  # noqa: E402
from runs import equal, rows_of  # noqa: E402

import common  # noqa: E402
import run_folder  # noqa: E402
import extras.glyphs  # noqa: E402

# runs each line of standard input or of the file named, SCRIPT FLAGS, on the small glyphs
DRIVER = """
import importlib, sys
import common
import extras.glyphs
extras.glyphs.GLYPHS = (600, 200)
for line in open(sys.argv[1]).read().splitlines():
    name, *_ = sys.argv = line.split()
    with common.one_line_errors():
        importlib.import_module(name).main()
"""


def start(lines, ranks, folder, before="", options=(), **more):
    """Start torchrun with so many ranks, which run the lines, SCRIPT FLAGS, one after the other.

    folder: a folder for a file; before: code that each rank runs first."""
    path = pathlib.Path(folder, f"lines-{time.monotonic_ns()}")
    path.write_text("\n".join(lines))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    torchrun += ["--nproc-per-node", str(ranks), "--no-python"]
    command = [*torchrun, sys.executable, "-c", before + DRIVER, str(path)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"  # where a process dies of a signal
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def run_ranks(lines, ranks, folder, **options):
    """Run lines as start() does; return exit code and stderr."""
    process = start(lines, ranks, folder, **options)
    _, err = process.communicate(timeout=900)
    return process.returncode, err


def run_here(lines):
    """Run lines in this process."""
    extras.glyphs.GLYPHS = (600, 200)
    for line in lines:
        name, *argv = line.split()
        __import__(name).main(argv)


def contents(out):
    """Return all that a run leaves, without what may differ: seconds, and flags of the machine."""
    checkpoint = run_folder.load(out / "checkpoint.pt")
    found = {"rows": rows_of(out), "net": checkpoint["net"], "server": checkpoint["server"]}
    for folder, table in (("states", "clients"), ("clients", "models")):
        paths = sorted(out.glob(f"{folder}/*"))
        found[folder] = {path.name: run_folder.load(path) for path in paths}
        found[f"{table} named"] = sorted((k, t) for k, t, _ in checkpoint[table].tolist())
    return found | {name: run_folder.load(out / name) for name in ("model.pt", "best.pt")}


def assert_equal(a, b):
    """Check that two runs left the same, and nothing half written."""
    first, second = contents(a), contents(b)
    for key in first:
        assert equal(first[key], second[key]), (str(b), key)
    assert not list(b.glob("**/*.tmp"))


# --- by hand: every method


def check_same(folder):
    """Compare every variant of one process with those of 2 and 3 ranks, of 1 and 2 workers."""

    def lines(place):
        for i, (name, more) in enumerate(VARIANTS):
            words = [*TINY, *SHORT[:-2], *more.split(), *needed(name, more.split())]
            yield " ".join([name, *words, *place, "--out", f"{folder}/{'-'.join(place)}/{i}"])

    torch.set_num_threads(1)
    common.CORES = 1
    run_here(lines(["--workers", "1"]))  # with one thread, as several ranks have
    failures = 0
    for ranks, workers in ((2, 1), (3, 1), (2, 2), (3, 2)):
        place = folder / f"{ranks}x{workers}"
        texts = [
            line.replace(f"{folder}/--workers-1", str(place)).replace(
                "--workers 1", f"--workers {workers}"
            )
            for line in lines(["--workers", "1"])
        ]
        code, err = run_ranks(texts, ranks, folder)
        assert code == 0, err[-3000:]
        for i, variant in enumerate(VARIANTS):
            try:
                assert_equal(folder / "--workers-1" / str(i), place / str(i))
            except AssertionError as e:
                failures += 1
                print("differs:", variant, e)
        print(f"{ranks} ranks, {workers} worker(s): {len(VARIANTS)} variants compared", flush=True)
    return failures


def main():
    with tempfile.TemporaryDirectory() as folder:
        return check_same(pathlib.Path(folder).resolve())


if __name__ == "__main__":
    sys.exit(min(1, main()))
