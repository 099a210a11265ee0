"""Which runs a table or scripts need, in which folders, and running what is left of them."""

import contextlib
import functools
import itertools
import math
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from tqdm import tqdm

import common
import run_folder
from analysis.runs import method_call, read_result
from reproduce.cells import all_cells, homes, parsed_flags, texts
from reproduce.runs import MACHINE_FLAGS, decisive_flags, read_run

ROOT = pathlib.Path(__file__).resolve().parent.parent  # where the scripts lie
PATIENCE = 5  # seconds for a run to end by itself: Ctrl-C went to it as well, a kill did not


class Plan(NamedTuple):
    """What is to be run."""

    commands: dict  # {run folder: command line}, in the order of running
    folder: pathlib.Path  # where the picture goes
    cells: list = []  # of a table; none of scripts
    names: dict | None = None  # {run folder: [(setting, method) in this table, ...]}


def with_seeds(args, commands):
    """Return {run folder: command} of {folder without the seed: command}, seed 0 of all first.

    Those of --data-seeds have a partition of their own; the first one is that of --seeds."""
    data, seeded = shlex.quote(args.data_dir or "data"), {}
    for seed in range(args.data_seeds or args.seeds or 1):
        own = bool(args.data_seeds and seed)
        more = f" --seed {seed}" + f" --data-seed {seed}" * own
        for folder, command in commands.items():
            place = pathlib.Path(f"{folder}-seed{seed}" + f"-data{seed}" * own)
            # word vectors lie beside the data, and a folder of images in it
            seeded[place] = command.replace(" data/", f" {data}/") + more
            if args.data_dir and "--data-dir" not in command:
                seeded[place] += f" --data-dir {data}"
    return seeded


def slug(text):
    """Return text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text.replace("=", "")).strip("-")


@functools.cache
def papers():
    """Return the papers, {name in small letters: name}."""
    return {name.lower(): name for name, _ in all_cells()}


def table_cells(paper, table):
    """Return the cells of a table, parts (1a, 1b) together if only the number is given.

    Raises UserError naming what there is."""
    name = papers()[paper.lower()]
    tables = [t for p, t in all_cells() if p == name]
    asked = [t for t in tables if re.fullmatch(re.escape(table.lower()) + "[a-d]?", t.lower())]
    if not asked:
        raise common.UserError(f"argument TABLE: {name} has {', '.join(tables)}, not {table!r}")
    return [cell for t in asked for cell in all_cells()[name, t]]


def select_cells(cells, text):
    """Return the cells of some methods and data sets, as --only names them; all if it is None.

    A word is a method by the table's name or else by its script, or a data set; all methods, or
    data sets, where none is named. Raises UserError if no cell is left."""
    if text is None:
        return cells
    words, titles = set(text.lower().split(",")), {cell.method.lower() for cell in cells}
    scripts = {cell.script for cell in cells} - titles
    datasets, selected = words - titles - scripts, cells
    if methods := words - datasets:
        selected = [c for c in cells if methods & {c.method.lower(), *({c.script} & scripts)}]
    if datasets:
        own = {c: {c.dataset.lower(), parsed_flags(c.command)["dataset"]} for c in selected}
        selected = [c for c in selected if datasets & own[c]]
    if not selected:
        there = ", ".join(dict.fromkeys([c.method for c in cells] + [c.dataset for c in cells]))
        raise common.UserError(f"argument --only: no cell of {text!r} in this table: {there}")
    return selected


def table_plan(args, cells):
    """Return the Plan of cells. A run that stands in several tables lies in the first one's."""
    root, commands, labels = pathlib.Path(args.runs), {}, {}
    for cell in cells:
        first = homes()[cell.command]
        name = slug(f"{first.label} {first.method}")
        folder = root / f"{first.paper}-{first.table}".lower() / name
        commands[folder] = first.command
        labels.setdefault(folder, {})[cell.label, cell.method] = None
    seeded = with_seeds(args, commands)
    names = zip(map(str, seeded), itertools.cycle(map(list, labels.values())))
    return Plan(seeded, root / f"{cells[0].paper}-{cells[0].table}".lower(), cells, dict(names))


@functools.cache
def scripts():
    """Return the names of the methods' scripts, without .py."""
    texts = {path.stem: path.read_text() for path in sorted(ROOT.glob("[!.]*.py"))}
    return [k for k, v in texts.items() if "local_update" in v and "common.flags(" in v]


def scripts_in(text):
    """Return the words of each script in a list such as "fedavg,moon --mu 5".

    Raises UserError for what is no method's script."""
    # a comma may stand in a flag's value, too
    comma = rf",\s*(?=(?:[^\s,]+\.py|{'|'.join(scripts())})(?![^\s,]))"
    try:
        lines = [shlex.split(line) or [line] for line in re.split(comma, text)]
    except ValueError as e:
        raise common.UserError(f"argument PAPER: {text}: {e}") from None
    for words in lines:
        path = pathlib.PurePath(words[0].removesuffix(".py"))
        if str(path) not in scripts():
            what = f"{words[0]} is none of benchmark, {', '.join([*papers(), *scripts()])}"
            what += f"; copy it to {ROOT}, beside fedavg.py" * (len(path.parts) > 1)
            raise common.UserError(f"argument PAPER: {what}")
        words[0] = f"{path}.py"
    return lines


def scripts_plan(args, extra):
    """Return the Plan of scripts and --sweep; extra: flags that all scripts take.

    Raises UserError for what is no script, and for flags that the command sets itself."""
    lines = scripts_in(args.paper)
    points = itertools.product(*map(sweep_axis, args.sweep))
    points = [{k: v for part in parts for k, v in part.items()} for parts in points]
    swept = args.sweep and len(lines) == 1
    (script, *own), point = lines[0], points[0]
    name = ["sweep", script[:-3], *own, *point] if swept else ["compare", setting_of(extra)]
    folder, commands = pathlib.Path(args.runs, slug(" ".join(name))), {}
    for (script, *own), point in itertools.product(lines, points):
        values = [f"{k}={v}" for k, v in point.items()]
        words = [script, *extra, *own, *(f"--{value}" for value in values)]
        check_words(words, ["seed", "out", "resume"] + ["data-seed"] * bool(args.data_seeds))
        place = folder / slug(" ".join(values if swept else [script[:-3], *own, *values]))
        if place in commands:
            what = "--sweep: two points" if swept else "PAPER: two runs"
            raise common.UserError(f"argument {what} would share the folder {place}")
        commands[place] = shlex.join(words)
    return Plan(with_seeds(args, commands), folder)


def check_words(words, set_here):
    """Raise UserError for a flag among a script's words that is set here, and for --plain."""
    for flag in (common.canonical(word).split("=")[0] for word in words):
        if flag in [f"--{name}" for name in set_here]:
            why = "set by reproduce; see --seeds, --data-seeds and --runs"
            raise common.UserError(f"argument {flag}: {why}")
        if flag == "--plain":
            raise common.UserError("argument --plain: leaves a run that cannot be compared")


def setting_of(words):
    """Return the flags among words as text for the name of a folder, in one order.

    Without those that may differ when a run goes on; data set and network come first."""
    parts = re.split("(?:^| )--", " ".join(map(common.canonical, words)))[1:]
    flags = dict((re.split("[ =]", part, maxsplit=1) + [""])[:2] for part in parts)
    silent = {flag.replace("_", "-") for flag in MACHINE_FLAGS | {"rounds"}}
    first = [flags.pop(flag, "") for flag in ("dataset", "model")]
    text = " ".join(filter(None, first + [k + flags[k] for k in sorted(flags.keys() - silent)]))
    return text if len(text) <= 100 else f"{text[:90]} {run_folder.checksum([], text)}"


def sweep_axis(text):
    """Return the points of one --sweep, [{flag: value}, ...]. UserError if it is not FLAG=VALUES.

    Values are separated by commas, or by / where flags change together or values have commas."""
    flags, _, values = text.partition("=")
    flags = [flag.lstrip("-").replace("_", "-") for flag in flags.split(",")]
    together = len(flags) > 1
    points = values.split("/" if together or "/" in values else ",")
    points = [point.split(",") if together else [point] for point in points]
    if not all(flags) or not all(len(p) == len(flags) and all(p) for p in points):
        what = f"takes FLAG=a,b,... or FLAG,FLAG=a,b/c,d/..., not {text!r}"
        raise common.UserError(f"argument --sweep: {what}")
    return [dict(zip(flags, point)) for point in points]


def line_left(folder, command):
    """Return the words that make or finish the run of a command in folder, [] if it is finished.

    Raises UserError for flags that the script refuses, a damaged folder, and a finished run of
    other flags or other code; --resume refuses one that has begun. More rounds can be made."""
    script, *words = shlex.split(command)
    line, call = [script, *words, "--out", str(folder)], method_call(script[:-3], words)
    if not (folder / "config.json").exists():
        return line
    run = read_run(folder)
    whole = (folder / "model.pt").exists() or not (folder / "checkpoint.pt").exists()  # a record
    if not whole or len(run.rows) < call.args.rounds:
        return [*line, "--resume"]
    flags = common.flag_values(call.args)
    given = {common.canonical(word).split("=")[0] for word in words}
    if "--precision" not in given and run.flags["precision"] != "bf16":
        flags["precision"] = run.flags["precision"]  # fp32 or tf32, as that machine's default is
    if flags["augment"] == run.config["flags"]["augment"]:  # auto, which the data have settled
        flags["augment"] = run.flags["augment"]
    asked, began = decisive_flags(flags), decisive_flags(run.flags)
    for flag, least in ("client_test", False), ("save_clients", False), ("metric", "accuracy"):
        if flags[flag] != least and run.flags[flag] == least:  # what it asks for was not measured
            asked[flag], began[flag] = flags[flag], least
    run_folder.check_same(folder, run.config | {"flags": asked | began}, "flags", asked)
    if run.code:
        run_folder.check_same(folder, run.config, "code", run_folder.code_of(call.method))
    return []


def analyses(plan, left):
    """Return the lines, as words, of the analyses that a table needs beside its runs.

    left: the run folders whose runs go on before. Of a mere record of a run there is none."""
    lines = []
    for paper, table in dict.fromkeys(cell[:2] for cell in plan.cells):
        template = texts("after", [paper, table])
        if "COMMAND" in template:  # of each data set and method, in the first setting
            firsts = {(c.dataset, c.method): c.command for c in reversed(plan.cells)}
            lines += [template.replace("COMMAND", command) for command in firsts.values()]
        whole = (f for f in plan.commands if f in left or (f / "model.pt").exists())
        lacking = [str(f) for f in whole if f in left or not read_result(f, "hessian")]
        if "RUNS" in template and lacking:
            lines.append(template.replace("RUNS", shlex.join(lacking)))
    return [shlex.split(line) for line in lines]


def run_plan(plan, args, show):
    """Run what of a Plan is not finished, then show(whether all is). Return the exit code.

    It is 2 where a run failed by a user's mistake, 1 where one failed otherwise. With --dry-run the
    commands are printed, and no more."""
    lines = {folder: line_left(folder, command) for folder, command in plan.commands.items()}
    left = {folder: line for folder, line in lines.items() if line}
    after = analyses(plan, left)
    if args.dry_run:
        for line in [*left.values(), *after]:
            print(f"python {shlex.join(line)}")
        return 0
    failed, ended = run_all(plan.commands, left, after, time.monotonic() + 60 * args.limit)
    print(f"\n{len(lines) - len(left)} of {len(lines)} runs finished{ended}", flush=True)
    show(not left)
    for what, code in failed.items():
        print(f"reproduce: failed, with exit code {code}: {what}", file=sys.stderr)
    return 2 if 2 in failed.values() else int(bool(failed))


def run_all(commands, left, after, deadline=math.inf):
    """Run what is left, {run folder: line}, then the lines after unless a run has failed.

    On a terminal a bar shows the rounds of all runs, which are quiet; elsewhere the lines and what
    they print. commands: {run folder: command} of all runs. What ends well is taken from left.
    Returns {folder or line: exit code} of what failed, and a text where the time was up."""
    failed, total = {}, sum(parsed_flags(command)["rounds"] for command in commands.values())
    numbers = {folder: f"{i}/{len(commands)}" for i, folder in enumerate(commands, 1)}
    try:
        with tqdm(total=total, initial=done(commands), unit="round", disable=None) as bar:
            for folder in list(left):
                line = left[folder] = line_left(folder, commands[folder])
                if not line:  # another process has finished it
                    del left[folder]
                    continue
                if bar.disable:
                    print(f"\n[{numbers[folder]}] python {shlex.join(line)}", flush=True)
                bar.set_description(f"{numbers[folder]} {folder.name}")
                words = line + ["--quiet"] * (not bar.disable)
                if code := run_child(words, deadline, lambda: bar.update(done(commands) - bar.n)):
                    failed[folder] = code
                else:
                    del left[folder]
        for line in after if not failed else ():
            print(f"\npython {shlex.join(line)}", flush=True)
            if code := run_child(line, deadline):
                failed[shlex.join(line)] = code
    except TimeoutError:
        return failed, "; --limit is reached, the same command goes on"
    return failed, ""


def done(folders):
    """Return how many rounds run folders have."""
    files = (folder / "metrics.jsonl" for folder in folders)
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def run_child(line, deadline=math.inf, tick=lambda: None):
    """Run [SCRIPT.py, flags...] or [-m, module, words...] to its end; return its exit code.

    tick: called each second. Raises TimeoutError at the deadline, and KeyboardInterrupt where it is
    interrupted; the child then ends too, and keeps its last finished round."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell's background jobs ignore the first, and would pass that on
        signal.signal(number, signal.default_int_handler)
    if time.monotonic() >= deadline:
        raise TimeoutError
    script = line[0] if line[0] == "-m" else str(ROOT / line[0])
    child = subprocess.Popen([sys.executable, script, *line[1:]])
    try:
        while child.poll() is None:
            if time.monotonic() >= deadline:
                raise TimeoutError
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
            tick()
    except (KeyboardInterrupt, TimeoutError) as e:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0 if isinstance(e, TimeoutError) else PATIENCE)
        child.send_signal(signal.SIGINT)  # unless it has ended
        child.wait()
        raise
    if child.returncode == 130:
        raise KeyboardInterrupt
    return child.returncode
