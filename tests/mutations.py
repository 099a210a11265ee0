"""Change one line of a method at a time, and check that its tests notice.

    python tests/mutations.py [NAME...]     all mutations, or those whose names begin so
    python tests/mutations.py --list        what is changed, and which tests must fail

Run by hand, outside the suite: about four minutes. Each mutation, of mutations.txt, is a false
reading of a method: a sign, a factor, a gradient that is cut, a teacher for a student. The tree is
copied to a temporary folder, one text of one file is replaced there, and the tests named are run in
a process of their own. Each of them must fail by an assertion, no other error counts; unchanged,
all must pass. Exits with 1 if a mutation survives.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 300  # that the tests of one mutation may take


@dataclasses.dataclass
class Mutation:
    """A text of a file, what replaces it, and the tests that must fail then."""

    name: str
    file: str
    old: str = ""
    new: str = ""
    tests: list = dataclasses.field(default_factory=list)


def all_mutations():
    """Return the Mutations of mutations.txt, each with its file's name in front of its own."""
    found, file = [], None
    for line in (ROOT / "tests" / "mutations.txt").read_text().split("\n\n", 1)[1].splitlines():
        kind, rest = line[:2], line[2:]
        if kind == "==":
            file = rest.strip()
        elif kind == "- ":
            found[-1].old = rest
        elif kind == "+ ":
            found[-1].new = rest
        elif kind == "  ":
            found[-1].tests.append(f"tests/test_{rest}".replace("::", ".py::", 1))
        elif line:
            found.append(Mutation(f"{pathlib.Path(file).stem}-{line}", file))
    assert len({mutation.name for mutation in found}) == len(found)
    return found


class Watcher:
    """A plugin of pytest that notes how each test ends: passed, or the name of an exception."""

    def __init__(self):
        self.ends = {}

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo:
            self.ends[item.nodeid] = call.excinfo.typename
        elif call.when == "call":
            self.ends[item.nodeid] = "passed"


def run_here(tree, tests, pipe):
    """Run tests of the tree in this process; send {test: how it ends} and what pytest prints."""
    import pytest

    os.chdir(tree)
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() not in ours]
    sys.dont_write_bytecode = True  # a file of the same size and second would pass for the old one
    watcher, log = Watcher(), pathlib.Path(tree, "log")
    with log.open("w") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
        pytest.main(["-q", "-p", "no:cacheprovider", *tests], [watcher])
    pipe.send((watcher.ends, log.read_text()))


def run_tests(processes, tree, tests):
    """Run tests of the tree in a new process. Return {test: how it ends} and what pytest prints."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=run_here, args=(str(tree), tests, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else ({}, f"not done in {SECONDS} s")
    except EOFError:
        return {}, "the process ended"
    finally:
        process.join(10)  # it cleans up behind itself
        process.kill()
        process.join()


def verdict(ends, tests):
    """Return "dies", or how a mutation survives tests that ended so."""
    for test in tests:
        cases = {end for name, end in ends.items() if name == test or name.startswith(test + "[")}
        others = cases - {"passed", "AssertionError"}
        if others or not cases:
            return f"NO ASSERTION: {', '.join(others) or 'no such test'}"
        if cases == {"passed"}:
            return f"SURVIVES {test}"
    return "dies"


def patched(mutation):
    """Return the file's text with the mutation; SystemExit if the old text is not there once."""
    text = (ROOT / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        sys.exit(f"{mutation.name}: {count} times in {mutation.file}, not once: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(tree):
    """Copy to tree what the tests of the methods need."""
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md"]:
        shutil.copy(path, tree)
    for folder in ("analysis", "docs", "extras", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)


def check(mutations):
    """Run the mutations, print a table, and return whether all of them die."""
    texts = [patched(mutation) for mutation in mutations]
    processes = multiprocessing.get_context("forkserver")  # which imports torch once
    processes.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "numpy", "PIL.Image"])
    start, dead = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder).resolve()
        copy_tree(tree)
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        ends, log = run_tests(processes, tree, tests)
        if not ends or set(ends.values()) != {"passed"}:
            sys.exit(f"without a mutation not all tests pass:\n{log}")
        for mutation, text in zip(mutations, texts):
            path, began = tree / mutation.file, time.perf_counter()
            original = path.read_text()
            path.write_text(text)
            ends, log = run_tests(processes, tree, mutation.tests)
            path.write_text(original)
            found = verdict(ends, mutation.tests)
            dead += found == "dies"
            names = " ".join(test.rpartition("::")[2] for test in mutation.tests)
            seconds = time.perf_counter() - began
            print(f"{found:4}  {seconds:4.1f} s  {mutation.name:46} {names}", flush=True)
            if found.startswith("NO"):
                print(log[-1500:])
    print(f"{dead} of {len(mutations)} die, {time.perf_counter() - start:.0f} s")
    return dead == len(mutations)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginning of names; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    args = parser.parse_args(argv)
    mutations = [
        m for m in all_mutations() if not args.names or m.name.startswith(tuple(args.names))
    ]
    if not mutations:
        parser.error(f"no mutation is called {' or '.join(args.names)}")
    if args.list:
        for m in mutations:
            patched(m)
            print(f"{m.name}: {m.file}\n    - {m.old.strip()}\n    + {m.new.strip()}")
            print("".join(f"    {test}\n" for test in m.tests), end="")
        return
    if not check(mutations):
        sys.exit(1)


if __name__ == "__main__":
    main()
