"""Commands of the project in forked children, which may be killed, and what comes of them.

The parent imports torch once and computes nothing with it, so that it has a single thread and a
child misses none; that is checked before every fork."""

import contextlib
import functools
import importlib
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

ONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ.update(ONE)  # before torch and numpy are imported

import conftest  # noqa: E402, F401  (finds the project)

import common  # noqa: E402

# what children would import
for name in "torch._dynamo torchvision.datasets torchvision.transforms.functional".split():
    importlib.import_module(name)
for name in "extras.readers extras.text extras.partitions extras.servers extras.backbones".split():
    importlib.import_module(name)
for name in "analysis.similarity analysis.features hessian_eval reproduce.compare".split():
    importlib.import_module(name)
sys.modules["matplotlib"] = None  # an analysis without pictures is a faster one

SECONDS = 40  # a child that takes longer hangs
MEMORY = 4 << 30  # bytes that a child may take beside what it starts with
NOTES = "is not cached", "cannot be locked here"  # lines beside the one


class Outcome(NamedTuple):
    """How a command ended."""

    code: int | None  # the exit code, -9 of SIGKILL, None of a hang
    out: str
    err: str

    def fault(self, *codes):
        """Return what is wrong with it: another code than those, or not one line with all but 0.

        "" if it is as it should be."""
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


def from_shell(module, argv):
    """Call a module's main() as its command line does."""
    sys.argv = argv
    with common.one_line_errors():
        module.main()


def run(name, *argv, seconds=SECONDS, before=None, meanwhile=None):
    """Run a command of the project (a module with main) in a child; return its Outcome.

    before(): called in the child, first. meanwhile(): called whenever the child has stopped
    itself, which goes on afterwards."""
    words = [f"{name}.py", *map(str, argv)]
    task = functools.partial(from_shell, importlib.import_module(name), words)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a fork would leave threads behind")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(task, before, out, err)
        code = _wait(pid, seconds, meanwhile)
        with contextlib.suppress(ProcessLookupError):  # what decodes images for it
            os.killpg(pid, signal.SIGKILL)
        return Outcome(code, *(_content(f) for f in (out, err)))


def _content(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def _child(task, before, out, err):
    """Run task() as a process of its own would; never returns."""
    code = 1
    try:
        os.setsid()
        for file, number in ((out, 1), (err, 2)):
            os.dup2(file.fileno(), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if before:
            before()
        task()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid, seconds, meanwhile):
    """Return the exit code of a child, None if it took longer and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if not done:
            time.sleep(0.002)
        elif os.WIFSTOPPED(status):
            meanwhile()
            os.kill(pid, signal.SIGCONT)
        else:
            return os.waitstatus_to_exitcode(status)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
