"""Runs of several processes of torchrun: what the tests share, and the long checks, by hand:

    python tests/ranks.py same       every method and variant: one process, 2 and 3 ranks
    python tests/ranks.py kill 50    SIGKILL of a rank, of rank 0 and of torchrun, so many times;
                                     a third word limits the minutes

Prints what was checked and found equal, bit for bit: the global model, the best one, the rows, the
checkpoint and all client states. Exits with 1 where something differs.
"""

import importlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from conftest import TINY  # noqa: E402
from methods import ROOT, SHORT, VARIANTS, needed  # noqa: E402
from runs import equal, rounds_in, rows_of  # noqa: E402

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


# --- by hand: kills


def ranks_of(process):
    """Return the process ids of torchrun's ranks, by their number."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        rank = [word for word in words if word.startswith(b"RANK=")]
        if parent == process.pid and rank:
            found[int(rank[0][5:])] = int(path.name)
    return found


def kill_one(process, whom):
    """Send SIGKILL to torchrun, to rank 0 or to another rank; return whether it was there."""
    if process.poll() is not None:
        return False
    if whom == "torchrun":
        os.kill(process.pid, signal.SIGKILL)
        return True
    ids = process.ranks if isinstance(process, Forked) else ranks_of(process)
    rank = 0 if whom == "rank 0" else max(ids, default=0)
    if rank in ids:
        os.kill(ids[rank], signal.SIGKILL)
    return rank in ids


class Forked:
    """Ranks without torchrun, forked from this process, which has imported all that is slow."""

    def __init__(self, line, ranks):
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        self.ranks = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)  # what the others say of the one that is killed
                try:
                    run_here([line])
                    importlib.import_module("extras.ranks").Ranks.joined.leave()
                finally:  # the caller's own clean-up is not the child's
                    os._exit(0)
            self.ranks[rank] = pid

    def poll(self):
        """Return whether all have ended."""
        for rank, pid in list(self.ranks.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.ranks[rank]
        return None if self.ranks else 0

    def communicate(self, timeout):
        """End the others half a second behind the one that was killed, as torchrun does."""
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            for pid in self.ranks.values():
                os.kill(pid, signal.SIGTERM)


def check_kills(folder, count, minutes=1e9, name="scaffold"):
    """Kill a run so many times, each time resumed, with another number of ranks; compare.

    minutes: after which no more is killed. Every fifth time it is a run under torchrun, which is
    slow to start; else forked ranks, as without it."""
    words = f"--rounds {4 * count} --sample 0.5 --local-steps 2 --checkpoint-every 2 --persist-opt"
    words = [*TINY, *words.split(), "--eval-every", "10", "--batch-size", "8"]
    deadline = time.monotonic() + 60 * minutes
    torch.set_num_threads(1)
    common.CORES = 1
    run_here([" ".join([name, *words, "--workers", "1", "--out", str(folder / "whole")])])
    out, killed, slowest = folder / "cut", {"torchrun": 0, "rank 0": 0, "a rank": 0}, 0.0
    while sum(killed.values()) < count and time.monotonic() < deadline:
        ranks, workers = random.choice([2, 3]), random.choice([1, 2])
        line = [name, *words, "--workers", str(workers), "--out", str(out)]
        line = " ".join([*line, *["--resume"] * (out / "config.json").exists()])
        real, until = sum(killed.values()) % 5 == 4, rounds_in(out) + random.randint(0, 3)
        process = start([line], ranks, folder) if real else Forked(line, ranks)
        while process.poll() is None and rounds_in(out) < until:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        whom = random.choice(["torchrun"] * 3 * real + ["rank 0", "a rank"])
        killed[whom] += kill_one(process, whom)
        moment = time.monotonic()
        process.communicate(timeout=300)
        while (pids := alive(out)) and time.monotonic() < moment + 120:
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - moment)
        assert not pids, pids
        print(f"{sum(killed.values())}: {whom}, {ranks} ranks, round {rounds_in(out)}", flush=True)
        if (out / "model.pt").exists():
            break
    run_here([" ".join([name, "--out", str(out), "--resume", "--quiet"])])
    assert_equal(folder / "whole", out)
    print(f"killed: {json.dumps(killed)}; all processes ended within {slowest:.1f} s; equal")
    return 0


def alive(out):
    """Return the processes that still have a run's folder open."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/fd"):
        try:
            targets = [os.readlink(handle) for handle in path.iterdir()]
        except OSError:
            continue
        if str(out) in targets and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def main(argv):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder).resolve()
        if argv[:1] == ["same"]:
            return check_same(folder)
        if argv[:1] == ["kill"]:
            return check_kills(folder, int(argv[1]), *map(float, argv[2:3]))
    print("ranks.py: error: name same, or kill COUNT", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])) if sys.argv[1:] else main([]))
