"""Change one line of a method at a time, and check that a test notices.

    python tests/mutations.py [NAME...]     all mutations, or those whose names (FILE:N) begin so

Run by hand, outside the suite. Each mutation, of mutations.txt, is a false reading of a paper: a
sign, a factor, a gradient that is cut, a teacher for a student. The tree is copied to a temporary
folder, one text of one file is replaced there, and the test named is run in a process of its own.
It must fail by an assertion, no other error counts; unchanged, all must pass. Exits with 1 if a
mutation survives. tests/mutants.py makes the mutants that need no reading.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 300  # that the tests of one mutation may take


class Mutation(NamedTuple):
    """A text of a file, what replaces it, and the test that must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


def all_mutations():
    """Return the Mutations of mutations.txt, each called by its file and its place there."""
    found, file = [], None
    for line in (ROOT / "tests" / "mutations.txt").read_text().split("\n\n", 1)[1].splitlines():
        kind, rest = line[:2], line[2:]
        if kind == "==":
            file, count = rest.strip(), 0
        elif kind == "- ":
            old, count = rest, count + 1
        elif kind == "+ ":
            new = rest
        else:
            test = f"tests/test_{rest}".replace("::", ".py::", 1)
            found.append(Mutation(f"{file}:{count}", file, old, new, test))
    return found


class Watcher:
    """A plugin of pytest that notes how each test ends: passed, or the name of an exception."""

    def __init__(self, word=""):
        self.ends, self.word = {}, word

    def pytest_collection_modifyitems(self, items):
        """Begin with the tests of the script that word names; of those of all keep its own."""
        of_all = ("test_off_switch.py", "test_flags_matter.py")
        others = [i for i in items if i.path.name not in of_all or "[" not in i.name]
        if self.word:
            items[:] = [i for i in items if i in others or self.word in i.name]
            items.sort(key=lambda item: self.word not in item.name)

    def pytest_collectreport(self, report):
        if report.failed:
            self.ends[report.nodeid] = "no import"

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo:
            self.ends[item.nodeid] = call.excinfo.typename
        elif call.when == "call":
            self.ends[item.nodeid] = "passed"


def run_here(tree, tests, word, pipe):
    """Run tests of the tree in this process; send {test: how it ends} and what pytest prints.

    word: a script, of whose tests the run ends at the first that fails; "" for all tests."""
    import pytest

    os.chdir(tree)
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() not in ours]
    sys.dont_write_bytecode = True  # a file of the same size and second would pass for the old one
    watcher, log = Watcher(word), pathlib.Path(tree, "log")
    with log.open("w") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
        pytest.main(["-q", "-p", "no:cacheprovider", *["-x"] * bool(word), *tests], [watcher])
    pipe.send((watcher.ends, log.read_text()))


def run_tests(processes, tree, tests, word="", seconds=SECONDS):
    """Run tests of the tree in a new process. Return {test: how it ends} and what pytest prints."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=run_here, args=(str(tree), tests, word, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else ({}, f"not done in {seconds} s")
    except EOFError:
        return {}, "the process ended"
    finally:
        process.join(10)
        process.kill()
        process.join()


def verdict(ends, test):
    """Return "dies", or how a mutation survives a test whose cases ended so."""
    cases = {end for name, end in ends.items() if name == test or name.startswith(test + "[")}
    others = cases - {"passed", "AssertionError"}
    if others or not cases:
        return f"NO ASSERTION: {', '.join(others) or 'no such test'}"
    return "SURVIVES" if cases == {"passed"} else "dies"


def patched(mutation):
    """Return the file's text with the mutation; LookupError if the old text is not there once."""
    text = (ROOT / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        found = f"{count} times in {mutation.file}, not once"
        raise LookupError(f"{mutation.name}: {mutation.old!r} is {found}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(tree):
    """Copy to tree what the tests of the methods need."""
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md"]:
        shutil.copy(path, tree)
    for folder in ("analysis", "docs", "extras", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)


def fork_server():
    """Return the multiprocessing context whose processes have imported torch."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "numpy", "PIL.Image"])
    return processes


def check(mutations):
    """Run the mutations, print a line each, and return whether all of them die."""
    texts = [patched(mutation) for mutation in mutations]
    processes, start, dead = fork_server(), time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder).resolve()
        copy_tree(tree)
        ends, log = run_tests(processes, tree, sorted({m.test for m in mutations}))
        if not ends or set(ends.values()) != {"passed"}:
            sys.exit(f"without a mutation not all tests pass:\n{log}")
        for mutation, text in zip(mutations, texts):
            original = (tree / mutation.file).read_text()
            (tree / mutation.file).write_text(text)
            ends, log = run_tests(processes, tree, [mutation.test])
            (tree / mutation.file).write_text(original)
            found = verdict(ends, mutation.test)
            dead += found == "dies"
            print(f"{found:8}  {mutation.name:20} {mutation.test}  {mutation.new}", flush=True)
            if found.startswith("NO"):
                print(log[-1500:])
    print(f"{dead} of {len(mutations)} die, {time.perf_counter() - start:.0f} s")
    return dead == len(mutations)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginning of names; default: all")
    names = parser.parse_args(argv).names
    mutations = [m for m in all_mutations() if not names or m.name.startswith(tuple(names))]
    if not mutations:
        parser.error(f"no mutation is called {' or '.join(names)}")
    sys.exit(not check(mutations))


if __name__ == "__main__":
    main()
