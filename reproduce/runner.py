"""Running command lines one after another, to their end or to a limit of time."""

import dataclasses
import shlex
import signal
import subprocess
import sys
import threading
import time

from reproduce.jobs import ROOT, missing_input, state_of

PATIENCE = 5  # seconds for a run to end by itself: Ctrl-C went to it as well, a kill did not


@dataclasses.dataclass
class Outcome:
    """What became of the runs of a Plan."""

    finished: int = 0
    failed: dict = dataclasses.field(default_factory=dict)  # {folder or line: (exit code, why)}
    stopped: bool = False  # the time was up

    @property
    def exit_code(self):
        """2 where a run failed by a user's mistake, 1 where it failed otherwise."""
        if not self.failed:
            return 0
        return 2 if 2 in [code for code, _ in self.failed.values()] else 1


def run_all(commands, deadline=None):
    """Run what is not finished of {run folder: command}; deadline: of time.monotonic().

    Returns the Outcome. Raises UserError for a folder that holds another run.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell's background jobs ignore the first, and would pass that on
        signal.signal(number, signal.default_int_handler)
    states = {folder: state_of(folder, command) for folder, command in commands.items()}
    outcome = Outcome(finished=list(states.values()).count("finished"))
    for folder, command in commands.items():
        why = None if states[folder] == "finished" else missing_input(command)
        if why:
            outcome.failed[folder] = 2, why
    for number, (folder, command) in enumerate(commands.items(), 1):
        if states[folder] == "finished" or folder in outcome.failed:
            continue
        if deadline and time.monotonic() >= deadline:
            outcome.stopped = True
            break
        line = [*shlex.split(command), "--out", str(folder)]
        line += ["--resume"] if states[folder] == "begun" else []
        print(f"\n[{number}/{len(commands)}] python {shlex.join(line)}", flush=True)
        code, why = run_child(line, deadline)
        if code is None:
            outcome.finished += state_of(folder, command) == "finished"
            outcome.stopped = True
            break
        if code:
            outcome.failed[folder] = code, why or f"exit code {code}"
        else:
            outcome.finished += 1
    return outcome


def run_analyses(lines, deadline, outcome):
    """Run command lines behind the runs of an Outcome, to which their failures are added."""
    for line in lines:
        if outcome.stopped or deadline and time.monotonic() >= deadline:
            outcome.stopped = True
            return
        print(f"\npython {line}", flush=True)
        code, why = run_child(shlex.split(line), deadline)
        outcome.stopped = code is None
        if code:
            outcome.failed[line] = code, why or f"exit code {code}"


def child_command(line):
    """Return the command of a line, [SCRIPT.py, flags...] or [-m, module, words...]."""
    script, *words = line
    return [sys.executable, script if script == "-m" else str(ROOT / script), *words]


def run_child(line, deadline=None):
    """Run a command line to its end.

    Returns (exit code, the last line on stderr), or (None, "") when the time was up. On a terminal
    its stderr, where a bar moves, is left to it. Raises KeyboardInterrupt if it was interrupted.
    """
    stderr = None if sys.stderr.isatty() else subprocess.PIPE
    child = subprocess.Popen(child_command(line), stderr=stderr)
    tail = [""]
    listener = threading.Thread(target=pass_on, args=(child.stderr, tail), daemon=True)
    if child.stderr:
        listener.start()
    try:
        code = child.wait(None if deadline is None else max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        interrupt(child)
        return None, ""
    except KeyboardInterrupt:
        interrupt(child, PATIENCE)
        raise
    finally:
        if child.stderr:
            listener.join()
    if code == 130:
        raise KeyboardInterrupt
    return code, tail[0]


def pass_on(stream, tail):
    """Copy a child's stream to stderr, and keep the last line that says something in tail[0]."""
    for line in stream:
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        tail[0] = text.strip() or tail[0]


def interrupt(child, patience=0):
    """Interrupt a run, which keeps its last finished round, after patience seconds."""
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        child.wait()
