"""Cut runs, and damage their files: all must be survived, or refused in a line.

    python tests/chaos.py --minutes 30 --seed 0
    python tests/chaos.py --seed 0 --only kills --case 17       one case, and what it did

Run by hand, and for a minute by .ci/run. Two sections, a case of each in turn, until time is over:
    kills    a run is killed, interrupted or robbed of its disk at one of its file operations, and
             so are its resumes; the last one ends with what the uncut run has, bit for bit
    damage   a file of a run or of its data is damaged or exchanged, and the run resumed: refused
             with nothing changed, or the same results
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
from chaotic import damage, kills
from chaotic.world import World

SECTIONS = {"kills": kills.case, "damage": damage.case}


def lane(world, args, first, end, results):
    """Run every so-many-th case, from first, of each section in turn; report each to results."""
    for n in range(first, args.cases, args.jobs):
        for section in [args.only] if args.only else SECTIONS:
            if time.monotonic() > end:
                return results.put(None)
            try:
                what, fault = SECTIONS[section](world, n)
            except BaseException:  # a parser of the project that exits too
                what, fault = "this program", " ".join(traceback.format_exc().split())
            results.put((section, n, what, fault))
    results.put(None)


def run_lanes(world, args):
    """Run cases on several processes at once; yield (section, case, what, fault) of each."""
    processes, end = multiprocessing.get_context("fork"), args.start + 60 * args.minutes
    results = processes.SimpleQueue()
    for first in range(args.jobs):
        processes.Process(target=lane, args=(world, args, first, end, results)).start()
    for _ in range(args.jobs):
        yield from iter(results.get, None)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1, help="that it takes in all")
    parser.add_argument("--cases", type=int, default=10**9, help="of each section, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at once")
    parser.add_argument("--only", choices=[*SECTIONS])
    parser.add_argument("--case", type=int, help="of --only: this one alone")
    parser.set_defaults(start=time.monotonic())
    args = parser.parse_args(argv)
    tried, failed = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        world = World(pathlib.Path(folder).resolve(), args.seed)
        if args.case is not None:
            what, fault = SECTIONS[args.only](world, args.case)
            sys.exit(f"{what}: {fault}" if fault else print(what))
        for section, n, what, fault in run_lanes(world, args):
            tried[section] += 1
            failed[section] += bool(fault)
            if fault:
                case = f"--seed {args.seed} --only {section} --case {n}"
                print(f"{case}: {what}: {fault}", flush=True)
    for section, count in tried.items():
        bad = failed[section]
        print(f"{section}: {count} tried, {count - bad} survived, {bad} failed")
    sys.exit(failed.total() > 0)


if __name__ == "__main__":
    main()
