"""Running command lines one after another, to their end or to a limit of time."""

import contextlib
import math
import shlex
import signal
import subprocess
import sys
import time

from tqdm import tqdm

from reproduce import jobs
from reproduce.cells import parsed_flags

PATIENCE = 5  # seconds for a run to end by itself: Ctrl-C went to it as well, a kill did not


class TimeIsUp(Exception):
    """--limit is reached."""


def run_plan(plan, args, show):
    """Run what of a Plan is not finished, then show(whether all is). Return the exit code.

    It is 2 where a run failed by a user's mistake, 1 where one failed otherwise. With --dry-run the
    commands are printed, and no more.
    """
    states = {folder: jobs.state_of(folder, command) for folder, command in plan.commands.items()}
    lines = jobs.analysis_lines(plan, states)
    if args.dry_run:
        print_commands(plan.commands, states, lines)
        return 0
    deadline = time.monotonic() + 60 * args.limit
    failed, stopped = run_all(plan.commands, states, lines, deadline)
    finished = list(states.values()).count("finished")
    print(f"\n{finished} of {len(states)} runs finished{stopped}", flush=True)
    show(finished == len(states))
    for what, code in failed.items():
        print(f"reproduce: failed, with exit code {code}: {what}", file=sys.stderr)
    return 2 if 2 in failed.values() else int(bool(failed))


def print_commands(commands, states, lines):
    """Print the commands of what is not finished, and of the analyses."""
    for folder, command in commands.items():
        if states[folder] != "finished":
            resume = " --resume" if states[folder] == "begun" else ""
            print(f"python {command} --out {shlex.quote(str(folder))}{resume}")
    for line in lines:
        print(f"python {line}")


def run_all(commands, states, lines, deadline=math.inf):
    """Run what is not finished of {run folder: command}, then lines unless a run has failed.

    states: {run folder: of state_of()}, "finished" where a run has ended well. lines: of analyses.
    deadline: of time.monotonic(). Returns {folder or line: exit code} of what failed, and a text
    where the time was up.
    """
    failed = {}
    try:
        run_commands(commands, states, failed, deadline)
        for line in lines if not failed else ():
            print(f"\npython {line}", flush=True)
            if code := run_child(shlex.split(line), deadline):
                failed[line] = code
    except TimeIsUp:
        return failed, "; --limit is reached, the same command goes on"
    return failed, ""


def run_commands(commands, states, failed, deadline):
    """Run commands as run_all(), and add to failed.

    On a terminal one bar shows the rounds of all runs, which are quiet; elsewhere the commands and
    what they print.
    """
    total = sum(parsed_flags(command)["rounds"] for command in commands.values())
    with tqdm(total=total, initial=done(commands), unit="round", disable=None) as bar:
        for number, (folder, command) in enumerate(commands.items(), 1):
            if states[folder] == "finished":
                continue
            line = [*shlex.split(command), "--out", str(folder)]
            line += ["--resume"] * (states[folder] == "begun") + ["--quiet"] * (not bar.disable)
            if bar.disable:
                print(f"\n[{number}/{len(commands)}] python {shlex.join(line)}", flush=True)
            bar.set_description(f"{number}/{len(commands)} {folder.name}")
            code = run_child(line, deadline, lambda: bar.update(done(commands) - bar.n))
            if code:
                failed[folder] = code
            else:
                states[folder] = "finished"


def done(folders):
    """Return how many rounds run folders have."""
    files = (folder / "metrics.jsonl" for folder in folders)
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def run_child(line, deadline=math.inf, tick=lambda: None):
    """Run [SCRIPT.py, flags...] or [-m, module, words...] to its end; return its exit code.

    tick: called each second. Raises TimeIsUp, and KeyboardInterrupt if interrupted.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell's background jobs ignore the first, and would pass that on
        signal.signal(number, signal.default_int_handler)
    if time.monotonic() >= deadline:
        raise TimeIsUp
    script, *words = line
    script = script if script == "-m" else str(jobs.ROOT / script)
    child = subprocess.Popen([sys.executable, script, *words])
    try:
        while child.poll() is None:
            if time.monotonic() >= deadline:
                raise TimeIsUp
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
            tick()
    except (KeyboardInterrupt, TimeIsUp) as e:
        interrupt(child, 0 if isinstance(e, TimeIsUp) else PATIENCE)
        raise
    if child.returncode == 130:
        raise KeyboardInterrupt
    return child.returncode


def interrupt(child, patience):
    """Interrupt a run, which keeps its last finished round, after patience seconds."""
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        child.wait()
