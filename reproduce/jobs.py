"""Which runs a table or scripts need, in which folders, and what is there of them."""

import functools
import itertools
import math
import pathlib
import re
import shlex
from typing import NamedTuple

import common
import run_folder
from analysis.runs import method_call, read_result
from reproduce.cells import all_cells, home, texts
from reproduce.runs import MACHINE_FLAGS, decisive_flags, read_run

ROOT = pathlib.Path(__file__).resolve().parent.parent  # where the scripts lie
SET_HERE = {"--seed": "--seeds", "--out": "--runs", "--resume": "--runs"}  # flags of scripts


class Plan(NamedTuple):
    """What is to be run."""

    commands: dict  # {run folder: command line}, in the order of running
    folder: pathlib.Path  # where the picture goes
    cells: list = []  # of a table; none of scripts
    names: dict | None = None  # {run folder: [(setting, method) in this table, ...]}


def add_flags(parser):
    """Add the flags by which runs are run."""
    add, minutes = parser.add_argument, common.number(float, 0, open_low=True)
    commands = "print the commands of what is not finished, and stop"
    add("--dry-run", action="store_true", help=commands)
    limit = "stop cleanly after so long"
    add("--limit", type=minutes, default=math.inf, metavar="MINUTES", help=limit)
    add("--runs", metavar="DIR", default="runs", help="where the folders of runs are made")


def with_seeds(args, commands):
    """Return {run folder: command} of {folder without the seed: command}.

    All commands of a seed come before those of the next. Those of --data-seeds have a partition of
    their own; the first one is that of --seeds.
    """
    data = shlex.quote(args.data_dir or "data")
    seeded = {}
    for seed in range(args.data_seeds or args.seeds or 1):
        varied = f" --data-seed {seed}" if args.data_seeds and seed else ""
        more = f" --seed {seed}{varied}" + (f" --data-dir {data}" if args.data_dir else "")
        for folder, command in commands.items():
            place = f"{folder}-seed{seed}" + (f"-data{seed}" if varied else "")
            # word vectors lie beside the data
            seeded[pathlib.Path(place)] = command.replace(" data/", f" {data}/") + more
    return seeded


def slug(text):
    """Return text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text.replace("=", "")).strip("-")


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


@functools.cache
def papers():
    """Return the papers, {name in small letters: name}."""
    return {name.lower(): name for name, _ in all_cells()}


def table_cells(paper, table):
    """Return the cells of a table, parts (1a, 1b) together if only the number is given.

    Raises UserError naming what there is.
    """
    name = papers()[paper.lower()]
    tables = [t for p, t in all_cells() if p == name]
    asked = [t for t in tables if re.fullmatch(re.escape(table.lower()) + "[a-d]?", t.lower())]
    if not asked:
        raise common.UserError(f"argument TABLE: {name} has {', '.join(tables)}, not {table!r}")
    return [cell for t in asked for cell in all_cells()[name, t]]


def select_cells(cells, text):
    """Return the cells of some methods and data sets, as --only names them.

    A word is a method by the table's name or else by its script, or a data set; all methods, or
    data sets, where none is named. Raises UserError if no cell is left.
    """
    methods, datasets = set(), set()
    for word in text.lower().split(","):
        named = {c.method for c in cells if c.method.lower() == word}
        named = named or {c.method for c in cells if c.script == word}
        methods |= named
        datasets |= set() if named else {word}
    selected = [
        cell
        for cell in cells
        if (not methods or cell.method in methods)
        and (not datasets or datasets & {cell.dataset.lower(), cell.flag("dataset")})
    ]
    if not selected:
        there = [{cell.method: 0 for cell in cells}, {cell.dataset: 0 for cell in cells}]
        there = "; ".join(map(", ".join, there))
        raise common.UserError(f"argument --only: no cell of {text!r} in this table: {there}")
    return selected


def table_plan(args, cells):
    """Return the Plan of cells. A run that stands in several tables lies in the first one's."""
    commands, names = {}, {}
    for cell in cells:
        first = home(cell)
        folder = table_folder(args, first) / slug(f"{first.label} {first.method}")
        commands[folder] = first.command
        for place in with_seeds(args, {folder: ""}):
            names.setdefault(str(place), {})[cell.label, cell.method] = None
    names = {place: list(labels) for place, labels in names.items()}
    return Plan(with_seeds(args, commands), table_folder(args, cells[0]), cells, names)


def table_folder(args, cell):
    return pathlib.Path(args.runs, f"{cell.paper}-{cell.table}".lower())


# --------------------------------------------------------------------------------------------------
# Scripts: one or several side by side, and sweeps
# --------------------------------------------------------------------------------------------------


def is_script(name):
    """Whether a name, with or without .py, is that of a method's script."""
    source = ROOT / (name.removesuffix(".py") + ".py")
    text = source.read_text() if source.parent == ROOT and source.is_file() else ""
    return "local_update" in text and "common.flags(" in text


def scripts_in(text):
    """Return the words of each script in a list such as "fedavg,moon --mu 5".

    Raises UserError for what is no method's script.
    """
    lines = []
    for part in text.split(","):  # of flags' values, too
        name = re.split(r"\s", part.strip())[0]
        if not lines or name.endswith(".py") or is_script(name):
            lines.append(part)
        else:
            lines[-1] += f",{part}"
    lines = [shlex.split(line) for line in lines]
    for script, *_ in lines:
        if not is_script(script):
            what = f"{script} is no method script here, nor one of {', '.join(papers())}"
            raise common.UserError(f"argument PAPER: {what}")
    return [[f"{pathlib.Path(script).stem}.py", *words] for script, *words in lines]


def scripts_plan(args, extra):
    """Return the Plan of scripts and --sweep; extra: flags that all scripts take.

    Raises UserError for what is no script, and for flags that the command sets itself.
    """
    lines = scripts_in(args.paper)
    points = sweep_points(args.sweep or [])
    check_script_flags(args, [*extra, *itertools.chain(*lines), *(f"--{k}" for k in points[0])])
    swept = args.sweep and len(lines) == 1
    stem = pathlib.Path(lines[0][0]).stem
    name = ["sweep", stem, *lines[0][1:], *points[0]] if swept else ["compare", setting_of(extra)]
    folder, commands = pathlib.Path(args.runs, slug(" ".join(name))), {}
    for (script, *own), point in itertools.product(lines, points):
        values = [f"{k}={v}" for k, v in point.items()]
        label = values if swept else [pathlib.Path(script).stem, *own, *values]
        place = folder / slug(" ".join(label))
        if place in commands:
            what = "--sweep: two points" if swept else "PAPER: two runs"
            raise common.UserError(f"argument {what} would share the folder {place}")
        commands[place] = shlex.join([script, *extra, *own, *(f"--{value}" for value in values)])
    return Plan(with_seeds(args, commands), folder)


def setting_of(words):
    """Return the flags among words as text for the name of a folder, in one order.

    Without those that may differ when a run goes on; data set and network come first.
    """
    flags = {}
    for word in map(common.canonical, words):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = [value] * bool(value)
        elif flags:
            flags[name].append(word)
    silent = {flag.replace("_", "-") for flag in MACHINE_FLAGS | {"rounds"}}
    first = ["dataset", "model"]
    kept = sorted(flags.keys() - silent, key=lambda name: (name not in first, name))
    text = " ".join(name * (name not in first) + ",".join(flags[name]) for name in kept)
    return text if len(text) <= 100 else f"{text[:90]} {run_folder.checksum([], text)}"


def check_script_flags(args, words):
    """Raise UserError if the words of a script's command have flags that are set elsewhere."""
    here = SET_HERE | ({"--data-seed": "--data-seeds"} if args.data_seeds else {})
    for word in words:
        flag = common.canonical(word).split("=")[0]
        if flag in here:
            raise common.UserError(f"argument {flag}: set by reproduce; see {here[flag]}")


def sweep_points(sweeps):
    """Return every combination of --sweep's values, [{flag: value}, ...]; [{}] of none."""
    combinations = itertools.product(*map(sweep_axis, sweeps))
    return [{k: v for part in parts for k, v in part.items()} for parts in combinations]


def sweep_axis(text):
    """Return the points of one --sweep, [{flag: value}, ...]. UserError if it is not FLAG=VALUES.

    Values are separated by commas, or by / where flags change together or values have commas.
    """
    flags, eq, values = text.partition("=")
    flags = [flag.lstrip("-").replace("_", "-") for flag in flags.split(",")]
    together = len(flags) > 1
    points = values.split("/" if together or "/" in values else ",")
    points = [point.split(",") if together else [point] for point in points]
    fits = all(len(point) == len(flags) and all(point) for point in points)
    if not eq or not all(flags) or not fits:
        what = f"takes FLAG=a,b,... or FLAG,FLAG=a,b/c,d/..., not {text!r}"
        raise common.UserError(f"argument --sweep: {what}")
    return [dict(zip(flags, point)) for point in points]


# --------------------------------------------------------------------------------------------------
# What is there
# --------------------------------------------------------------------------------------------------


def state_of(folder, command):
    """Return whether the run of a command is finished, begun or missing.

    Raises UserError for a damaged folder, and for a finished run of other flags or other code;
    --resume refuses one that has begun. More rounds can be made.
    """
    if not (folder / "config.json").exists():
        return "missing"
    run, (script, *words) = read_run(folder), shlex.split(command)
    call = method_call(script.removesuffix(".py"), words)
    whole = (folder / "model.pt").exists() or not (folder / "checkpoint.pt").exists()  # a record
    if not whole or len(run.rows) < call.args.rounds:
        return "begun"
    flags = common.flag_values(call.args)
    asked, began = decisive_flags(flags), decisive_flags(run.flags)
    for flag, least in ("client_test", False), ("save_clients", False), ("metric", "accuracy"):
        if flags[flag] != least and run.flags[flag] == least:  # what it asks for was not measured
            asked[flag], began[flag] = flags[flag], least
    run_folder.check_same(folder, run.config | {"flags": asked | began}, "flags", asked)
    if run.code:
        run_folder.check_same(folder, run.config, "code", run_folder.code_of(call.method))
    return "finished"


def analysis_lines(plan, states):
    """Return the command lines of the analyses that a table needs beside its runs.

    states: {run folder: of state_of()}, before the runs that are not finished go on.
    """
    lines = []
    for paper, table in dict.fromkeys(cell[:2] for cell in plan.cells):
        template = texts("after", [paper, table])
        if "COMMAND" in template:  # of each data set and method, in the first setting
            firsts = {(c.dataset, c.method): c.command for c in reversed(plan.cells)}
            lines += [template.replace("COMMAND", command) for command in firsts.values()]
        elif template:
            # a mere record of a run has no weights, and is left as it is
            folders = [
                f
                for f in plan.commands
                if states[f] != "finished"
                or ((f / "model.pt").exists() and not read_result(f, "hessian"))
            ]
            words = " ".join(shlex.quote(str(folder)) for folder in folders)
            lines += [template.replace("RUNS", words)] if folders else []
    return lines
