"""Which runs a table or a sweep needs, in which folders they go, and what is there of them."""

import argparse
import dataclasses
import itertools
import pathlib
import re
import shlex

import common
import run_folder
from analysis.runs import method_call, read_result
from reproduce.cells import all_cells, home, parsed_flags, texts
from reproduce.runs import MACHINE_FLAGS, as_text, decisive_flags, read_run

ROOT = pathlib.Path(__file__).resolve().parent.parent  # where the scripts lie
SET_HERE = {  # flags of scripts that the command sets, and by which of its own
    "--seed": "--seeds",
    "--out": "--runs",
    "--resume": "--runs",
}
NOT_DOWNLOADED = {  # data sets and their folders in --data-dir
    "tiny-imagenet": "tiny-imagenet-200",
    "imagenet-200": "imagenet",
    "femnist": "femnist",
    "sent140": "sent140",
    "folder": "",
}


@dataclasses.dataclass
class Plan:
    """What is to be run."""

    commands: dict  # {run folder: command line}, in the order of running
    cells: list  # of a table; empty for scripts
    names: dict | None = None  # {run folder: [(setting, method) in this table, ...]}


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def table_cells(paper, table):
    """Return the cells of a table, parts (1a, 1b) together if only the number is given.

    Raises UserError naming what there is.
    """
    papers = {name.lower(): name for name, _ in all_cells()}
    if paper.lower() not in papers:
        raise common.UserError(
            f"argument PAPER: must be one of {', '.join(papers)} or a method script, not {paper!r}"
        )
    name = papers[paper.lower()]
    tables = [t for p, t in all_cells() if p == name]
    parts = re.compile(re.escape(table.lower()) + "[a-d]?")
    asked = [t for t in tables if parts.fullmatch(t.lower())]
    if not asked:
        raise common.UserError(f"argument TABLE: {name} has {', '.join(tables)}, not {table!r}")
    return [cell for t in asked for cell in all_cells()[name, t]]


def select_cells(cells, text):
    """Return the cells of some methods and data sets, as --only names them.

    A word is a method by the table's name or by its script, or a data set; all methods, or data
    sets, where none is named. Raises UserError for a word that is neither, and if no cell is left.
    """
    of_methods = []
    of_datasets = []
    for word in text.lower().split(","):
        by_method = cells_of_method(cells, word)
        by_dataset = [cell for cell in cells if word in dataset_names(cell)]
        if by_method:
            of_methods += by_method
        elif by_dataset:
            of_datasets += by_dataset
        else:
            methods = distinct(cell.method for cell in cells)
            datasets = distinct(cell.dataset for cell in cells)
            raise common.UserError(
                f"argument --only: no method or data set {word!r} in this table; "
                f"it has {methods}; {datasets}"
            )
    asked = [set(some or cells) for some in (of_methods, of_datasets)]
    selected = [cell for cell in cells if all(cell in some for some in asked)]
    if not selected:
        raise common.UserError(f"argument --only: no cell of this table has both, {text!r}")
    return selected


def cells_of_method(cells, word):
    """Return the cells whose method a word names in the table, or else by its script."""
    by_name = [cell for cell in cells if cell.method.lower() == word]
    return by_name or [cell for cell in cells if cell.script == word]


def dataset_names(cell):
    """Return the data set as the table has it, in small letters, and as --dataset has it."""
    return cell.dataset.lower(), parsed_flags(cell.command)["dataset"]


def distinct(words):
    return ", ".join(dict.fromkeys(words))


def table_plan(args, cells):
    """Return the Plan of cells. A run that stands in several tables lies in the first one's."""
    commands = {}
    labels = {}
    for cell in cells:
        first = home(cell)
        table = f"{first.paper.lower()}-{first.table.lower()}"
        folder = pathlib.Path(args.runs, table, slug(f"{first.label} {first.method}"))
        commands[folder] = first.command
        label = cell.label, cell.method
        if label not in labels.setdefault(folder, []):
            labels[folder].append(label)
    names = {}
    for folder, (suffix, _) in itertools.product(labels, repetitions(args)):
        names[f"{folder}{suffix}"] = labels[folder]
    return Plan(with_seeds(args, commands), cells, names)


def slug(text):
    """Return text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text.replace("=", "")).strip("-")


def with_seeds(args, commands):
    """Return {run folder: command} of {folder without the seed: command}.

    All commands of a seed come before those of the next.
    """
    data = shlex.quote(args.data_dir or "data")
    data_flag = f" --data-dir {data}" if args.data_dir else ""
    seeded = {}
    for suffix, seeds in repetitions(args):
        for folder, command in commands.items():
            command = command.replace(" data/", f" {data}/")  # word vectors lie beside the data
            seeded[pathlib.Path(f"{folder}{suffix}")] = f"{command} {seeds}{data_flag}"
    return seeded


def repetitions(args):
    """Return what each repetition adds to its folder and to its command, [(suffix, flags), ...].

    Those of --data-seeds have a partition of their own; the first one is that of --seeds.
    """
    added = [
        (f"-seed{seed}", f"--seed {seed}") for seed in range(args.data_seeds or args.seeds or 1)
    ]
    for seed in range(1, args.data_seeds or 1):
        added[seed] = f"-seed{seed}-data{seed}", f"--seed {seed} --data-seed {seed}"
    return added


# --------------------------------------------------------------------------------------------------
# Scripts: one or several side by side, and sweeps
# --------------------------------------------------------------------------------------------------


def scripts_in(text):
    """Return the words of each script in a list such as "fedavg.py,moon.py --mu 5".

    Raises UserError for what is no method's script.
    """
    lines = [shlex.split(line) for line in re.split(r",(?=\s*\w+\.py\b)", text)]
    for script, *_ in lines:
        source = ROOT / script
        text = source.read_text() if source.name == script and source.is_file() else ""
        if "local_update" not in text or "common.flags(" not in text:
            raise common.UserError(f"argument PAPER: {script} is no method script here")
    return lines


def scripts_plan(args, extra):
    """Return the Plan of scripts and --sweep; extra: flags that all scripts take.

    Raises UserError for what is no script, and for flags that the command sets itself.
    """
    lines = scripts_in(args.paper)
    points = sweep_points(args.sweep) if args.sweep else [{}]
    check_script_flags(args, [*extra, *itertools.chain(*lines), *(f"--{k}" for k in points[0])])
    swept = args.sweep and len(lines) == 1
    stem = pathlib.Path(lines[0][0]).stem
    name = " ".join(
        ["sweep", stem, *lines[0][1:], *points[0]] if swept else ["compare", setting_of(extra)]
    )
    commands = {}
    for (script, *own), point in itertools.product(lines, points):
        values = [f"{k}={v}" for k, v in point.items()]
        label = values if swept else [pathlib.Path(script).stem, *own, *values]
        place = pathlib.Path(args.runs, slug(name), slug(" ".join(label)))
        if place in commands:
            what = "--sweep: two points" if swept else "PAPER: two runs"
            raise common.UserError(f"argument {what} would share the folder {place}")
        flags = [f"--{value}" for value in values]
        commands[place] = shlex.join([script, *extra, *own, *flags])
    return Plan(with_seeds(args, commands), [])


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
    digest = common.checksum([], text)
    return text if len(text) <= 100 else f"{text[:90]} {digest}"


def check_script_flags(args, words):
    """Raise UserError if the words of a script's command have flags that are set elsewhere."""
    here = SET_HERE | ({"--data-seed": "--data-seeds"} if args.data_seeds else {})
    for word in words:
        flag = word.split("=")[0].replace("_", "-")
        if flag in here:
            raise common.UserError(f"argument {flag}: set by reproduce; see {here[flag]}")
    if args.data_dir and "--data-dir" in words:
        raise common.UserError("argument --data-dir: is swept already")


def sweep_points(texts):
    """Return every combination of --sweep's values, [{flag: value}, ...].

    Raises UserError for a text that is not FLAG=VALUES, and for flags that make no sense.
    """
    axes = [sweep_axis(text) for text in texts]
    swept = [flag for axis in axes for flag in axis[0]]
    for flag in swept:
        if swept.count(flag) > 1:
            raise common.UserError(f"argument --sweep: {flag} is swept twice")
        if flag == "data-seed":
            raise common.UserError("argument --sweep: takes no data-seed; see --data-seeds")
        if flag.replace("-", "_") in MACHINE_FLAGS - {"data_dir"}:
            raise common.UserError(f"argument --sweep: {flag} decides no result")
    points = []
    for combination in itertools.product(*axes):
        points.append({flag: value for part in combination for flag, value in part.items()})
    return points


def sweep_axis(text):
    """Return the points of one --sweep, [{flag: value}, ...].

    Values are separated by commas, or by / where flags change together or values have commas.
    """
    flags, eq, values = text.partition("=")
    flags = [flag.lstrip("-").replace("_", "-") for flag in flags.split(",")]
    together = len(flags) > 1
    points = values.split("/" if together or "/" in values else ",")
    points = [point.split(",") if together else [point] for point in points]
    fits = all(len(point) == len(flags) and all(point) for point in points)
    if not eq or not all(flags) or not fits:
        raise common.UserError(
            f"argument --sweep: takes FLAG=a,b,... or FLAG,FLAG=a,b/c,d/..., not {text!r}"
        )
    return [dict(zip(flags, point)) for point in points]


# --------------------------------------------------------------------------------------------------
# What is there
# --------------------------------------------------------------------------------------------------


def state_of(folder, command):
    """Return whether the run of a command is finished, begun or missing.

    Raises UserError for a damaged folder, and for a run with other flags than the command's.
    """
    if not (folder / "config.json").exists():
        return "missing"
    run = read_run(folder)
    script = command.split()[0].removesuffix(".py")
    if run.script != script:
        raise common.UserError(
            f"{folder}: holds a run of {run.script}.py, not {script}.py; move it away, or name "
            "other --runs"
        )
    if run.code:
        check_code(run, code_parts(command))
    flags = parsed_flags(command)
    checkpoint = (folder / "checkpoint.pt").exists()
    # of a record there are config.json and metrics.jsonl alone
    whole = (folder / "model.pt").exists() or not checkpoint
    finished = whole and len(run.rows) >= flags["rounds"]
    past_checkpoint = len(run.rows) > run.flags.get("checkpoint_every", 1)
    if not finished and past_checkpoint and not checkpoint:
        raise common.UserError(
            f"{folder}: {len(run.rows)} of {flags['rounds']} rounds without a checkpoint cannot go "
            "on; move it away, or name other --runs"
        )
    check_flags(run, flags, finished)
    return "finished" if finished else "begun"


def code_parts(command):
    """Return what config.json would keep of the code of a command line's functions."""
    script, *words = shlex.split(command)
    return run_folder.code_of(method_call(script.removesuffix(".py"), words).method)


def check_code(run, code):
    """Raise UserError naming a function in which a run differs from the script as it is now."""
    for part in {**run.code, **code}:
        began, now = run.code.get(part, "none"), code.get(part, "none")
        if began != now:
            raise common.UserError(
                f"{run.path}: holds a run with another {part}, {began}, where {run.script}.py now "
                f"has {now}; move it away, or name other --runs"
            )


def check_flags(run, flags, finished):
    """Raise UserError naming a flag in which a run differs from the flags that are asked for.

    More rounds can be made. What is measured or kept beside the result has to be there as well.
    """
    recorded = decisive_flags(run.flags)
    differing = []
    for flag, value in decisive_flags(flags).items():
        more_rounds = flag == "rounds" and recorded.get(flag) < value
        if flag in recorded and recorded[flag] != value and not more_rounds:
            differing.append(flag)
    for flag in ("client_test", "save_clients") if finished else ("client_test",):
        if flags[flag] and not run.flags.get(flag):
            differing.append(flag)
    if differing:
        flag = differing[0]
        name = flag.replace("_", "-")
        raise common.UserError(
            f"{run.path}: holds a run with --{name} {as_text(run.flags.get(flag))}, not "
            f"{as_text(flags.get(flag))}; move it away, or name other --runs"
        )


def missing_input(command):
    """Return why a command cannot run here, as far as can be seen without reading data, or None."""
    args = argparse.Namespace(**parsed_flags(command))
    place = pathlib.Path(args.data_dir, NOT_DOWNLOADED.get(args.dataset, ""))
    if args.dataset in NOT_DOWNLOADED and not place.is_dir():
        return f"--dataset {args.dataset}: there is no folder {place}"
    for flag in ("vectors", "split_file"):
        path = getattr(args, flag)
        if path and path != "random" and not pathlib.Path(path).is_file():
            return f"--{flag.replace('_', '-')} {path}: no such file"
    return None


def analysis_lines(plan, states):
    """Return the command lines of the analyses that a table needs beside its runs.

    states: {run folder: of state_of()}, before the runs that are not finished go on.
    """
    lines = []
    for paper, table in dict.fromkeys((cell.paper, cell.table) for cell in plan.cells):
        template = texts("after", [paper, table])
        if "COMMAND" in template:
            lines += [template.replace("COMMAND", c) for c in one_per_method(plan.cells)]
        elif template:
            folders = [f for f in plan.commands if states[f] != "finished" or to_analyse(f)]
            words = " ".join(shlex.quote(str(folder)) for folder in folders)
            lines += [template.replace("RUNS", words)] if folders else []
    return lines


def one_per_method(cells):
    """Return the commands of cells in one setting, the first, for each data set and method."""
    commands = {}
    for cell in cells:
        commands.setdefault((cell.dataset, cell.method), cell.command)
    return list(commands.values())


def to_analyse(folder):
    """Whether hessian_eval.py has not been in the folder of a finished run since its last round.

    A mere record has no weights, and is left as it is.
    """
    return (folder / "model.pt").exists() and not read_result(folder, "hessian")
