"""Change one line of a method at a time, and check that a test notices.

    python tests/mutations.py [NAME...]     all mutations, or those whose names (FILE:N) begin so

Each mutation, of mutations.txt, is a false reading of a paper, planted in a copy of the tree. The
test that it names must fail by an assertion; unchanged, all must pass. Exit code 1 if one survives.
tests/mutants.py makes the mutants that need no reading."""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
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
    found = []
    text = (ROOT / "tests" / "mutations.txt").read_text().split("\n\n", 1)[1]
    for line in text.replace(" =>\n    ", " => ").splitlines():
        if line.startswith("== "):
            _, file, test = line.split(" ", 2)
        else:
            name = f"{file}:{1 + sum(other.file == file for other in found)}"
            test_file = f"tests/test_{test}".replace("::", ".py::", 1)
            found.append(Mutation(name, file, *line.split(" => "), test_file))
    return found


def patched(mutation):
    """Return the file's text with the mutation; LookupError if the old text is not there once."""
    text = (ROOT / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        found = f"{count} times in {mutation.file}, not once"
        raise LookupError(f"{mutation.name}: {mutation.old!r} is {found}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(folder):
    """Copy to folder what the tests of the methods need; return its path."""
    tree = pathlib.Path(folder).resolve()
    ignored = shutil.ignore_patterns(".git", "__pycache__", "data", "results", "runs", "shared")
    return shutil.copytree(ROOT, tree, ignore=ignored, dirs_exist_ok=True)


def run_tests(tree, tests, *options, seconds=SECONDS):
    """Return the set of exceptions with which tests end, {"no end"} if unknown, and the log."""
    # -B: a file of the same size and second would pass for the old one
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-rfE", "--tb=no"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    options = {"capture_output": True, "text": True, "timeout": seconds}
    try:
        done = subprocess.run(command, cwd=tree, env={**os.environ, "COLUMNS": "400"}, **options)
    except subprocess.TimeoutExpired:
        return {"no end"}, ""
    ends = re.findall(r"^(?:FAILED|ERROR) .*? - (\w+)(?=[: ]|$)", done.stdout, re.M)
    ends = {"AssertionError" if end == "assert" else end for end in ends}
    return ends if done.returncode == bool(ends) else {"no end"}, done.stdout


def check(mutations):
    """Run the mutations, print a line each, and return whether all of them die."""
    texts = [patched(mutation) for mutation in mutations]
    start, dead = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        ends, log = run_tests(tree, sorted({m.test for m in mutations}))
        if ends:
            sys.exit(f"without a mutation not all tests pass:\n{log}")
        for mutation, text in zip(mutations, texts):
            (tree / mutation.file).write_text(text)
            ends, log = run_tests(tree, [mutation.test])
            shutil.copy(ROOT / mutation.file, tree / mutation.file)
            dead += ends == {"AssertionError"}
            found = " ".join(ends) or "SURVIVES"
            print(f"{found:14}  {mutation.name:20} {mutation.test}  {mutation.new}", flush=True)
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
