"""Runs that are cut at a file operation, whichever, and their resumes cut again.

What a kill behind an operation leaves is what one before the next leaves: a cut before each of
them, and inside of each write, are all that there are."""

import json
import random
import signal

from chaotic.cut import HOW
from chaotic.world import METHODS, difference, files_of, train
from runs import rounds_in


def plans(world):
    """Return all (method, how, at), shuffled: every operation of every method's run."""
    found = []
    for i, names in enumerate(world.operations):
        for at, name in enumerate(names, 1):
            hows = [how for how in HOW if how != "torn" or name == "write"]
            found += [(i, how, at) for how in hows]
    random.Random(world.seed).shuffle(found)
    return found


def case(world, n):
    """Cut a run and its resumes; return what was done, and what is wrong, "" if nothing.

    The first cut is the n-th of the plans."""
    rng = random.Random(f"{world.seed} kills {n}")
    i, *first = plans(world)[n % len(plans(world))]
    begun = rng.choice(["new", "new", f"2-{i}"])  # the last is a finished run that is extended
    cuts = [first, *([rng.choice([*HOW]), rng.randint(1, 60)] for _ in range(rng.randint(0, 2)))]
    what = f"{METHODS[i]}, from {begun}: " + ", ".join(f"{how} at {at}" for how, at in cuts)
    with world.copy(begun) as folder:
        fault, refused = cut_all(world, folder, i, cuts, rng)
        if fault or refused:
            return what, fault
        left = [path.name for path in (folder / "data").glob("**/.*.tmp")]
        fault = difference(world.root / f"4-{i}" / "run", folder / "run")
        fault = fault or (left and f"data keep {left[0]}")
        return what, fault or analyse_cut(world, folder, i, rng)


def cut_all(world, folder, i, cuts, rng):
    """Run method i through its cuts to the end; return what is wrong, and if it was refused."""
    robbed = False
    for how, at in [*cuts, ("list", 0)]:
        robbed = robbed or how == "vanish"
        fault, refused = cut_once(folder, METHODS[i], how, at)
        if robbed and refused:
            return "", True
        if not fault and not robbed and rng.random() < 0.3:
            fault = look(world, folder, i)
        if fault:
            return f"{fault}, at {how} {at}", False
    return "", False


def cut_once(folder, method, how, at):
    """Run or resume a method up to a cut; return what is wrong, and whether it was refused."""
    rivals = []

    def rival():
        before = files_of(folder)
        rivals.append(train(folder, method, "--rounds", 4))
        if rivals[0].code and before != files_of(folder):
            rivals.append("changed files")

    unlocked = at == 1 and (folder / "run" / "config.json").exists()  # a resume locks at 1
    outcome = train(folder, method, "--rounds", 4, how=how, at=at, meanwhile=rival)
    if outcome.code == -signal.SIGKILL and how in ("kill", "torn", "power"):
        return "", False
    refused = outcome.code == 2 and not outcome.fault(2)
    fault = outcome.fault(*HOW.get(how, (0,)))
    if rivals and not fault:
        fault = rivals[0].fault(0, 2) and f"the second process: {rivals[0].fault(0, 2)}"
        won = [outcome.code, rivals[0].code].count(0)
        if not fault and (len(rivals) > 1 or won != 1 + unlocked):
            fault = "two processes wrote to one folder, or none"
    return fault, refused


def look(world, folder, i):
    """Analyse and compare a run that was cut; return what is wrong."""
    if rounds_in(folder / "run") == 0:
        return ""
    rounds = json.loads((folder / "run" / "config.json").read_text())["flags"]["rounds"]
    for name in ("similarity", "compare"):
        outcome, found = world.see(folder, name)
        if outcome.fault(0, 2):
            return f"{name}: {outcome.fault(0, 2)}"
        if name == "similarity" and outcome.code == 0 and found != world.seen(i, rounds, name):
            return f"{name} shows other numbers for round {rounds}"
    return ""


def analyse_cut(world, folder, i, rng):
    """Kill an analysis at one of its operations, and repeat it; return what is wrong."""
    name, at = rng.choice(["features", "similarity"]), rng.randint(1, 16)
    if "--save-clients" not in METHODS[i] or rng.random() < 0.5:
        return ""
    world.see(folder, name, how="kill", at=at, keep=True)
    outcome, found = world.see(folder, name)
    expected = world.seen(i, 4, name)
    fault = outcome.fault(0)
    if found | {"": ""} != expected | {"": ""}:
        fault = fault or f"{' '.join(found)} are others, or too many"
    elif "exists already" in fault:
        fault = ""  # it was done
    return fault and f"{name} repeated after a kill at {at}: {fault}"
