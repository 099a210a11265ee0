"""Stand before the file operations of a process, and do something at one of them."""

import builtins
import errno
import fcntl
import functools
import io
import os
import pathlib
import signal

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
