"""Cut runs at a file operation, whichever, and their resumes again: all must be survived.

    python tests/chaos.py --minutes 30 --seed 0
    python tests/chaos.py --seed 0 --case 17       one case, and what it did

A run is killed, interrupted or robbed of its disk or of a file before one of its file operations or
inside of a write, and so are its resumes; the last one ends with what the uncut run has, bit for
bit, or is refused by one line where a file is gone. Exit code 1 if any case failed."""

import argparse
import builtins
import errno
import fcntl
import functools
import importlib
import io
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

# before torch and numpy are imported
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

from conftest import from_shell, make_folder  # noqa: E402
from runs import difference  # noqa: E402

import common  # noqa: E402
import extras.glyphs  # noqa: E402

# what children would import
for name in "torch._dynamo extras.images extras.partitions extras.servers".split():
    importlib.import_module(name)
FORK = multiprocessing.get_context("fork")
SECONDS = 40  # a child that takes longer hangs
NOTES = "is not cached", "cannot be locked here"  # lines beside the one
OPERATIONS = [(os, name) for name in "fsync replace rename unlink remove mkdir rmdir".split()]
OPERATIONS.append((fcntl, "flock"))
HOW = {  # what happens at an operation: the exit codes that may follow
    "kill": (0, -9),  # 0 where a resume has fewer operations
    "torn": (0, -9),  # a part is written
    "power": (0, -9),  # what was not synchronised is lost too
    "interrupt": (0, 130),
    "full": (0, 2),  # the disk
    "vanish": (0, 2),  # a file of the run
}
common.NETS["cnn"] = lambda channels, size: common._plain(channels, size, (4,), 3, 0, (8,))
extras.glyphs.GLYPHS = (120, 40)
FEDERATION = [
    *"--dataset folder --data-dir data --model cnn --augment none --partition iid".split(),
    *"--clients 3 --local-steps 2 --batch-size 6 --quiet --device cpu".split(),
]
METHODS = [  # each sort of state: of clients, of the server, of optimizers
    "fedavg --checkpoint-every 2 --client-test --save-clients",
    "scaffold --eval-every 2 --persist-opt --sample 0.7 --save-clients",
    "moon --checkpoint-every 2 --eval-every 2 --client-test --sample 0.7",
    "rfedavg --client-test --persist-opt --optimizer rmsprop --workers 2 --save-clients",
    "fedgkd --checkpoint-every 3 --eval-every 2 --server adam",
]


class Outcome(NamedTuple):
    code: int | None  # the exit code, -9 of SIGKILL, None of a hang
    out: str
    err: str

    def fault(self, *codes):
        """Return what is wrong: another code than those, or not one line with all but 0; or ""."""
        lines = [s for s in self.err.splitlines() if not any(note in s for note in NOTES)]
        tail = lines[-1] if lines else ""
        if self.code is None:
            return "a hang"
        if "Traceback" in self.err:
            return f"a traceback: {tail}"
        if self.code not in codes:
            return f"exit code {self.code}, {tail or 'nothing said'}"
        if self.code > 0 and len(lines) != 1 or self.code == 0 and lines:
            return f"exit code {self.code} with {len(lines)} lines on stderr: {lines[0]}"
        return ""


def run(name, *argv, before):
    """Return the Outcome of a command (a module with main) that a child runs after before().

    The parent computes nothing with torch: it has a single thread, and a child misses none."""
    task = functools.partial(from_shell, importlib.import_module(name), argv)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a fork would leave threads behind")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = FORK.Process(target=_child, args=(task, before, out, err))
        child.start()
        child.join(SECONDS)
        code = child.exitcode
        child.kill()  # one that hangs
        for file in (out, err):
            file.seek(0)
        return Outcome(code, out.read(), err.read())


def _child(task, before, out, err):
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before()
    task()


class Cut:
    """Counts a process' file operations, and does something (HOW; list: prints) at one."""

    def __init__(self, how, at, folder):
        self.how, self.at, self.folder = how, at, folder
        self.done = 0  # operations
        self.unsynced = {}  # {path: how much of it is safe}

    def install(self):
        """Work in the folder, and stand before the operations of this process, from now on."""
        os.chdir(self.folder)
        self.real_open = builtins.open
        builtins.open = io.open = self.open
        for module, name in OPERATIONS:
            setattr(module, name, functools.partial(self.operate, name, getattr(module, name)))

    def operate(self, name, operation, *args, **kwargs):
        self.before(name)
        done = operation(*args, **kwargs)
        if name == "fsync":
            self.unsynced.pop(os.readlink(f"/proc/self/fd/{args[0]}"), None)
        if name == "replace":
            old, new = map(os.path.abspath, args)
            if old in self.unsynced:
                self.unsynced[new] = self.unsynced.pop(old)
        return done

    def open(self, path, mode="r", *args, **kwargs):
        if not {*mode} & {*"wax+"}:
            return self.real_open(path, mode, *args, **kwargs)
        self.before("open")
        file = self.real_open(path, mode, *args, **kwargs)
        self.unsynced[os.path.abspath(path)] = file.tell()
        file.write = functools.partial(self.write, file, file.write)
        return file

    def write(self, file, write, content):
        def part():
            write(content[: 997 * self.at % (len(content) + 1)])
            file.flush()

        self.before("write", part)
        written = write(content)
        file.flush()
        return written

    def before(self, name, write=None):
        """Count an operation, and do what is to be done at it; write(): writes a part."""
        self.done += 1
        if self.how == "list":
            os.write(1, f"{name}\n".encode())
        elif self.done == self.at:
            getattr(self, self.how)(name, write)

    def kill(self, name, write):
        os.kill(os.getpid(), signal.SIGKILL)

    def torn(self, name, write):
        if write:
            write()
        self.kill(name, write)

    def power(self, name, write):
        for path, size in list(self.unsynced.items()):
            if os.path.exists(path):
                os.truncate(path, size)
        self.kill(name, write)

    def interrupt(self, name, write):
        os.kill(os.getpid(), signal.SIGINT)

    def full(self, name, write):
        number = errno.ENOLCK if name == "flock" else errno.ENOSPC
        raise OSError(number, os.strerror(number), "some file")

    def vanish(self, name, write):
        names = "config.json", "metrics.jsonl", "checkpoint.pt", "states/*"  # read again
        files = sorted(path for name in names for path in pathlib.Path("run").glob(name))
        if files:
            files[self.at % len(files)].unlink()


def train(folder, method, *argv, how="list", at=0):
    """Run, or resume, a method in folder, cut so at an operation; return its Outcome."""
    script, *words = method.split()
    argv = [*FEDERATION, *words, "--out", "run", *argv]
    if (folder / "run" / "config.json").exists():
        argv.append("--resume")
    return run(script, *argv, before=Cut(how, at, folder).install)


class World:
    """Uncut runs of method i, so many rounds long, in root/ROUNDS-i; root/new has their data."""

    def __init__(self, root, seed):
        self.root, self.seed = root, seed
        make_folder(root / "new" / "data", (8, 8), counts=(18, 6))
        self.operations = []  # of each method's run of four rounds: their names, in order
        for i, method in enumerate(METHODS):
            for rounds in (2, 4):
                folder = shutil.copytree(root / "new", root / f"{rounds}-{i}")
                outcome = train(folder, method, "--rounds", rounds)
                if outcome.fault(0):
                    raise SystemExit(f"{method}: {outcome.fault(0)}")
            self.operations.append(outcome.out.split())

    def plans(self):
        """Return lists of (method, how, at): power lost at SCAFFOLD's commits; all, shuffled."""
        found = [
            (i, how, at)
            for i in range(len(METHODS))
            for at, name in enumerate(self.operations[i], 1)
            for how in HOW
            if how != "torn" or name == "write"
        ]
        random.Random(self.seed).shuffle(found)
        names = enumerate(self.operations[1], 1)
        return [(1, "power", at) for at, name in names if name in ("replace", "unlink")], found


def case(world, end, n):
    """Cut a run by the n-th plan, and its resumes; return (what, fault), or None after end."""
    if time.monotonic() > end:
        return None
    rng = random.Random(f"{world.seed} kills {n}")
    commits, others = world.plans()
    i, *first = [*commits, *others][n % (len(commits) + len(others))]
    begun, cuts = "new", [first]
    if n >= len(commits):
        begun = rng.choice(["new", "new", f"2-{i}"])  # the last is a finished run, extended
        cuts += [[rng.choice([*HOW]), rng.randint(1, 60)] for _ in range(rng.randint(0, 2))]
    what = f"{METHODS[i]}, from {begun}: " + ", ".join(f"{how} at {at}" for how, at in cuts)
    with tempfile.TemporaryDirectory(dir=world.root) as place:
        folder = shutil.copytree(world.root / begun, pathlib.Path(place, "copy"))
        fault, refused = cut_all(folder, i, cuts)
        if fault or refused:
            return what, fault
        left = [path.name for path in (folder / "data").glob("**/.*.tmp")]
        fault = difference(world.root / f"4-{i}" / "run", folder / "run")
        return what, fault or (left and f"data keep {left[0]}")


def cut_all(folder, i, cuts):
    """Run method i through its cuts to the end; return what is wrong, and if it was refused."""
    robbed = False
    for how, at in [*cuts, ("list", 0)]:
        robbed = robbed or how == "vanish"
        outcome = train(folder, METHODS[i], "--rounds", 4, how=how, at=at)
        if robbed and outcome.code == 2 and not outcome.fault(2):
            return "", True
        if fault := outcome.fault(*HOW.get(how, (0,))):
            return f"{fault}, at {how} {at}", False
    return "", False


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1, help="that it takes in all")
    parser.add_argument("--cases", type=int, default=10_000, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at once")
    parser.add_argument("--case", type=int, help="this one alone")
    args = parser.parse_args(argv)
    end, tried, failed = time.monotonic() + 60 * args.minutes, 0, 0
    cases = range(args.cases) if args.case is None else [args.case]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(args.jobs, FORK) as pool:
        world = World(pathlib.Path(folder).resolve(), args.seed)
        for n, found in zip(cases, pool.map(functools.partial(case, world, end), cases)):
            if found:
                tried, failed = tried + 1, failed + bool(found[1])
            if found and (found[1] or args.case is not None):
                print(
                    f"--seed {args.seed} --case {n}: {found[0]}: {found[1] or 'fine'}", flush=True
                )
    print(f"{tried} tried, {tried - failed} survived, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
