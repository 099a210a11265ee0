"""Runs that are cut at a file operation, whichever, and their resumes cut again.

What a kill behind an operation leaves is what one before the next leaves: a cut before each of
them, and inside of each write, are all that there are."""

import random

from chaotic.cut import HOW
from chaotic.world import METHODS, train
from runs import difference


def plans(world):
    """Return two lists of (method, how, at).

    A loss of power at each rename and removal of SCAFFOLD's run, by which it commits something;
    then all there are, at every operation of every method's run, shuffled."""
    commits = [
        (1, "power", at)
        for at, name in enumerate(world.operations[1], 1)
        if name in ("replace", "unlink")
    ]
    found = []
    for i in range(len(METHODS)):
        for at, name in enumerate(world.operations[i], 1):
            hows = [how for how in HOW if how != "torn" or name == "write"]
            found += [(i, how, at) for how in hows]
    random.Random(world.seed).shuffle(found)
    return commits, found


def case(world, n):
    """Cut a run and its resumes; return what was done, and what is wrong, "" if nothing.

    The first cut is the n-th of the plans."""
    rng = random.Random(f"{world.seed} kills {n}")
    commits, others = plans(world)
    i, *first = [*commits, *others][n % (len(commits) + len(others))]
    begun, cuts = "new", [first]
    if n >= len(commits):
        begun = rng.choice(["new", "new", f"2-{i}"])  # the last is a finished run, extended
        cuts += [[rng.choice([*HOW]), rng.randint(1, 60)] for _ in range(rng.randint(0, 2))]
    what = f"{METHODS[i]}, from {begun}: " + ", ".join(f"{how} at {at}" for how, at in cuts)
    with world.copy(begun) as folder:
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
