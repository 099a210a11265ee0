"""Running command lines one after another, to their end or to a limit of time."""

import contextlib
import dataclasses
import shlex
import signal
import subprocess
import sys
import time

from tqdm import tqdm

from reproduce.jobs import ROOT, parsed_flags

PATIENCE = 5  # seconds for a run to end by itself: Ctrl-C went to it as well, a kill did not


@dataclasses.dataclass
class Outcome:
    """What became of command lines."""

    finished: int = 0
    failed: dict = dataclasses.field(default_factory=dict)  # {folder or line: exit code}
    stopped: bool = False  # the time was up

    @property
    def exit_code(self):
        """2 where a run failed by a user's mistake, 1 where it failed otherwise."""
        codes = self.failed.values()
        return 2 if 2 in codes else int(bool(codes))


def run_all(commands, states, deadline=None):
    """Run what is not finished of {run folder: command}. Return the Outcome.

    states: {run folder: of state_of()}. deadline: of time.monotonic(). On a terminal one bar shows
    the rounds of all runs, which are quiet; elsewhere the commands and what they print.
    """
    rounds = {folder: parsed_flags(command)["rounds"] for folder, command in commands.items()}
    done = {folder: rounds_in(folder) for folder in commands}
    outcome = Outcome(list(states.values()).count("finished"))
    total, initial = sum(rounds.values()), sum(done.values())
    with tqdm(total=total, initial=initial, unit="round", disable=None) as bar:
        for number, (folder, command) in enumerate(commands.items(), 1):
            if states[folder] == "finished":
                continue
            line = [*shlex.split(command), "--out", str(folder)]
            line += ["--resume"] * (states[folder] == "begun") + ["--quiet"] * (not bar.disable)
            if bar.disable:
                print(f"\n[{number}/{len(commands)}] python {shlex.join(line)}", flush=True)
            bar.set_description(f"{number}/{len(commands)} {folder.name}")
            code = run_child(line, deadline, lambda f=folder: advance(bar, f, done))
            if code is None:
                outcome.stopped = True
                break
            if code:
                outcome.failed[folder] = code
            else:
                outcome.finished += 1
    return outcome


def rounds_in(folder):
    """Return how many rounds a run folder has."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def advance(bar, folder, done):
    """Move the bar on by the rounds that a run has got since; done: {run folder: its rounds}."""
    before, done[folder] = done[folder], rounds_in(folder)
    bar.update(max(0, done[folder] - before))


def run_analyses(lines, deadline, outcome):
    """Run command lines after the runs of an Outcome, to which their failures are added."""
    for line in lines if not outcome.stopped else ():
        print(f"\npython {line}", flush=True)
        code = run_child(shlex.split(line), deadline)
        outcome.stopped = code is None
        if outcome.stopped:
            return
        outcome.failed |= {line: code} if code else {}


def run_child(line, deadline=None, tick=lambda: None):
    """Run [SCRIPT.py, flags...] or [-m, module, words...] to its end; return its exit code.

    None when the time was up. tick: called each second. Raises KeyboardInterrupt if interrupted.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell's background jobs ignore the first, and would pass that on
        signal.signal(number, signal.default_int_handler)
    if deadline and time.monotonic() >= deadline:
        return None
    script, *words = line
    script = script if script == "-m" else str(ROOT / script)
    child = subprocess.Popen([sys.executable, script, *words])
    try:
        while child.poll() is None:
            if deadline and time.monotonic() >= deadline:
                interrupt(child, 0)
                return None
            left = min(1, deadline - time.monotonic()) if deadline else 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0, left))
            tick()
    except KeyboardInterrupt:
        interrupt(child, PATIENCE)
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
