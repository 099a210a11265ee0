"""Cut runs, damage their files and feed them nonsense: all must be survived, or refused in a line.

    python tests/chaos.py --minutes 30 --seed 0
    python tests/chaos.py --seed 0 --only kills --case 17       one case, and what it did

Run by hand, outside the suite, of which tests/test_chaos.py is a short part. Three sections, one
case of each in turn, until time is over:
    kills    a run is killed, interrupted or robbed of its disk at one of its file operations, and
             so are its resumes; the last one ends with what the uncut run has, bit for bit
    damage   a file of a run or of its data is damaged or exchanged, and the run resumed or
             analysed: refused, nothing changed, or the same results
    fuzz     flags, run folders and data files of nonsense: done, or refused
A refusal is one line on stderr and exit code 2. Ends in a line a section, and exit code 1 if any
case failed."""

import argparse
import collections
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import traceback

from chaotic import children  # noqa: F401  (first: it settles the threads of torch)
from chaotic import damage, fuzz, kills
from chaotic.world import World

SECTIONS = {"kills": kills.case, "damage": damage.case, "fuzz": fuzz.case}


def attempt(world, section, n):
    """Return what a case did, and what is wrong; also where this program is."""
    try:
        return SECTIONS[section](world, n)
    except BaseException:  # a parser of the project that exits too
        return "this program", " ".join(traceback.format_exc().split())


def lane(world, args, first, end, results):
    """Run every so-many-th case, from first, of each section in turn; report each to results."""
    sections = [args.only] if args.only else [*SECTIONS]
    for n in range(first, args.cases, args.jobs):
        for section in sections:
            if time.monotonic() > end:
                return results.put(None)
            results.put((section, n, *attempt(world, section, n)))
    results.put(None)


def run_lanes(world, args, end):
    """Run cases on several processes at once; yield (section, case, what, fault) of each."""
    processes = multiprocessing.get_context("fork")
    results = processes.SimpleQueue()
    for first in range(args.jobs):
        processes.Process(target=lane, args=(world, args, first, end, results)).start()
    ended = 0
    while ended < args.jobs:
        result = results.get()
        if result:
            yield result
        else:
            ended += 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1, help="that it takes in all")
    parser.add_argument("--cases", type=int, default=10**9, help="of each section, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at once")
    parser.add_argument("--only", choices=[*SECTIONS])
    parser.add_argument("--case", type=int, help="of --only: this one alone")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    tried, failed = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        world = World(pathlib.Path(folder).resolve(), args.seed)
        if args.case is not None:
            what, fault = SECTIONS[args.only](world, args.case)
            sys.exit(f"{what}: {fault}" if fault else print(what))
        for section, n, what, fault in run_lanes(world, args, end):
            tried[section] += 1
            if fault:
                failed[section] += 1
                case = f"--seed {args.seed} --only {section} --case {n}"
                print(f"{case}: {what}: {fault}", flush=True)
    for section in tried:
        survived = tried[section] - failed[section]
        print(f"{section}: {tried[section]} tried, {survived} survived, {failed[section]} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
