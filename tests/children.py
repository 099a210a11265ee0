"""Commands of the project in forked children, which may be killed, and what comes of them.

The parent imports torch once and computes nothing with it, so that it has a single thread and a
child misses none; that is checked before every fork."""

import functools
import importlib
import multiprocessing
import os
import signal
import tempfile
from typing import NamedTuple

ONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ.update(ONE)  # before torch and numpy are imported

import conftest  # noqa: E402  (finds the project)

# what children would import
for name in "torch._dynamo extras.images extras.partitions extras.servers".split():
    importlib.import_module(name)
FORK = multiprocessing.get_context("fork")
SECONDS = 40  # a child that takes longer hangs
NOTES = "is not cached", "cannot be locked here"  # lines beside the one


class Outcome(NamedTuple):
    """How a command ended."""

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
    """Return the Outcome of a command (a module with main) that a child runs after before()."""
    task = functools.partial(conftest.from_shell, importlib.import_module(name), argv)
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
    """Run task() with streams of its own."""
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before()
    task()
