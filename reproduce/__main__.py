"""Scripts side by side, a sweep, or a published table or figure, as one command

    python -m reproduce SCRIPT.py,SCRIPT.py,"SCRIPT.py OWN FLAGS" FLAGS --seeds 3
    python -m reproduce SCRIPT.py FLAGS --sweep FLAG=a,b,...
    python -m reproduce PAPER TABLE            PAPER: fedalign, fedcka, fedmlb, rfedavg;
                                               TABLE: 1, 5, 1a, I, fig5, ...

runs what is missing, goes on with what was cut, skips what is finished, and ends with the table of
`python -m reproduce.compare`. Scripts with their FLAGS have runs in runs/compare-FLAGS/, so that a
further script, seed or round later adds to what is there; a sweep in runs/sweep-SCRIPT-FLAG/. A
cell of a paper's table (reproduce/cells.txt) has its run in runs/PAPER-TABLE/, named after the cell
and its seed; a command that stands in several tables is run once, under the first; a run with other
flags in its place is an error. Ctrl-C and --limit stop at any moment; the same command goes on from
the last finished round. A run that fails, for want of its data for example, is listed at the end,
after the table of what there is; the exit code is then that of the mistake (2), or 1.

--seeds N repeats each run with --seed 0, 1, ... on one partition; --data-seeds N with another
partition each time, --seed and --data-seed 0, 1, ...

--sweep takes values separated by commas, or by / where a value has commas; flags that change
together are joined by a comma:
    --sweep layers=1,2,3
    --sweep pathways=1/1,2/1,2,3
    --sweep epochs,rounds=1,200/2,100
Several --sweep make a grid. --clients 1 is the centralised bound.
"""

import argparse
import itertools
import re
import shlex
import sys
import time

import common
from reproduce import compare, plot
from reproduce.cells import parsed_flags, texts
from reproduce.jobs import (
    analysis_lines,
    scripts_plan,
    select_cells,
    state_of,
    table_cells,
    table_plan,
)
from reproduce.runner import run_all, run_analyses
from reproduce.runs import read_run


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    script = next((word for word in argv if re.match(r"\w+\.py(?=[\s,]|$)", word)), None)
    if script:  # whose own flags may stand anywhere
        at = argv.index(script)
        argv = [script, *argv[:at], *argv[at + 1 :]]
    parser = make_parser(with_table=script is None)
    names = argv[0].split(",") if argv and script is None else []
    if len(names) > 1 and all(name.isidentifier() for name in names):
        scripts = ",".join(f"{name}.py" for name in names)
        parser.error(f"{argv[0]}: method scripts are named with .py, {scripts}")
    args, extra = parser.parse_known_args(argv)
    try:
        raise SystemExit(reproduce(args, extra))
    except (common.UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))
    except KeyboardInterrupt:
        print("\nreproduce: interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def make_parser(with_table):
    """Return the parser; with_table: for a paper's table, not for a script."""
    parser = common.PlainParser(__doc__, prog="reproduce")
    add = parser.add_argument
    add(
        "paper",
        metavar="PAPER",
        help="fedalign, fedcka, fedmlb or rfedavg; or method scripts, with their own flags, "
        "separated by commas",
    )
    if with_table:
        add("table", metavar="TABLE", help="its number, or figN")
        add(
            "--only",
            metavar="NAME,...",
            help="these methods alone, by the table's name or by script, and these data sets: "
            "FedAvg,fedprox,MNIST",
        )
    add(
        "--sweep",
        action="append",
        metavar="FLAG=VALUES",
        help="values of a flag of the scripts, see above",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the commands of what is not finished, and stop",
    )
    add("--seeds", type=common.number(int, 1), metavar="N", help="--seed 0, 1, ... (default: 1)")
    add(
        "--data-seeds",
        type=common.number(int, 1),
        metavar="N",
        help="as --seeds, and each with a partition of its own: --data-seed 0, 1, ...",
    )
    add(
        "--limit",
        type=common.number(float, 0, open_low=True),
        metavar="MINUTES",
        help="stop cleanly after so long; what is kept is up to the last finished round",
    )
    add("--data-dir", metavar="DIR", help="passed on to the scripts")
    add("--runs", metavar="DIR", default="runs", help="where the tables' folders of runs are made")
    compare.add_flags(parser)
    return parser


def reproduce(args, extra):
    """Run and show what args ask for. Returns the exit code.

    extra: words that are no flags of this command: of the scripts.
    """
    plan = make_plan(args, extra)
    parts = parts_of(plan, args)
    check(plan, parts, args)
    states = {folder: state_of(folder, command) for folder, command in plan.commands.items()}
    lines = analysis_lines(plan, states)
    if args.dry_run:
        print_commands(plan, states, lines)
        return 0
    if any(view.picture for _, view in parts):
        plot.pyplot()
    deadline = time.monotonic() + 60 * args.limit if args.limit else None
    outcome = run_all(plan.commands, deadline)
    complete = outcome.finished == len(plan.commands)
    if complete:
        run_analyses(lines, deadline, outcome)
    print(f"\n{summary(outcome, len(plan.commands))}\n", flush=True)
    for part, view in parts:
        if len(parts) > 1:
            print(f"{part.cells[0].paper} {part.cells[0].table}\n")
        show(part, view, complete)
    for what, (_, why) in outcome.failed.items():
        print(f"reproduce: failed: {what}: {why}", file=sys.stderr)
    return outcome.exit_code


def make_plan(args, extra):
    """Return the Plan that args ask for. Raises UserError for what does not go together."""
    if args.seeds and args.data_seeds:
        raise common.UserError("argument --data-seeds: varies --seed too; leave --seeds out")
    if re.match(r"\w+\.py", args.paper):
        return scripts_plan(args, extra)
    if extra:
        raise common.UserError(f"unrecognized arguments: {' '.join(extra)}")
    if args.sweep:
        raise common.UserError("argument --sweep: takes a method script, not a paper's table")
    cells = table_cells(args.paper, args.table)
    return table_plan(args, cells if args.only is None else select_cells(cells, args.only))


def parts_of(plan, args):
    """Return what is shown each by itself, [(Plan, view), ...]: the parts of a figure, 9a to 9d.

    view: args with what the table or figure shows. Raises UserError for a file that several parts
    would be written to.
    """
    parts = []
    for _, cells in itertools.groupby(plan.cells, key=figure_of):
        cells = list(cells)
        parts.append((table_plan(args, cells), published_view(args, cells)))
    for flag in ("plot", "csv") if len(parts) > 1 else ():
        if getattr(args, flag):
            names = ", ".join(part.cells[0].table for part, _ in parts)
            raise common.UserError(
                f"argument --{flag}: {args.table} has {len(parts)} parts; name one of {names}"
            )
    return parts or [(plan, argparse.Namespace(**vars(args), picture=None))]


def figure_of(cell):
    """Return the figure that a cell is drawn in; None for a table's cell."""
    return cell.table if cell.table.startswith("fig") else None


def published_view(args, cells):
    """Return args with what these cells' table or figure shows, unless asked otherwise.

    Its picture is the file of a figure's own picture, which is drawn anew each time.
    """
    first = cells[0]
    view = argparse.Namespace(**vars(args), picture=None)
    parser = common.PlainParser("")
    compare.add_flags(parser)
    words = texts("views", [first.paper, first.table]).split()
    shown = {flag: value for flag, value in vars(parser.parse_args(words)).items() if value}
    flags = set().union(*(parsed_flags(cell.command) for cell in cells))
    if shown.get("x") not in {None, *plot.X_NAMES, *flags}:  # --only has left none with the flag
        shown = {"at": shown["at"]} if "at" in shown else {}
    for flag, value in shown.items():
        if getattr(view, flag) is None:
            setattr(view, flag, value)
    if figure_of(first) and not args.plot:
        view.picture = f"{args.runs}/{first.paper.lower()}-{first.table.lower()}.png"
    return view


def check(plan, parts, args):
    """Raise UserError, before any work, for a command line or an output that is wrong."""
    compare.check_outputs(args)
    flags = {command: parsed_flags(command) for command in dict.fromkeys(plan.commands.values())}
    for _, view in parts:
        view.x = compare.checked_x(view.x, list(flags.values()))
    for command, names in flags.items():
        if args.over and args.over.replace("-", "_") not in names:
            raise common.UserError(f"argument --over: {command.split()[0]} has no flag {args.over}")


def print_commands(plan, states, lines):
    """Print the commands of what is not finished, and of the analyses."""
    for folder, command in plan.commands.items():
        if states[folder] != "finished":
            resume = " --resume" if states[folder] == "begun" else ""
            print(f"python {command} --out {shlex.quote(str(folder))}{resume}")
    for line in lines:
        print(f"python {line}")


def summary(outcome, total):
    text = f"{outcome.finished} of {total} runs finished"
    if outcome.failed:
        text += f", {len(outcome.failed)} failed"
    return text + ("; --limit is reached, the same command goes on" if outcome.stopped else "")


def show(plan, view, complete):
    """Print and draw what there is of a Plan; files that the user named wait until it is complete.

    The same command writes them then.
    """
    folders = [folder for folder in plan.commands if (folder / "config.json").exists()]
    runs = [read_run(folder) for folder in folders]
    if not any(run.rows for run in runs):
        return
    for flag in () if complete else ("csv", "plot"):
        if getattr(view, flag):
            print(f"--{flag} {getattr(view, flag)} waits until all runs are finished\n")
            setattr(view, flag, None)
    view.plot = view.picture or view.plot
    try:
        plot.check_quantities(view.y, runs)
    except common.UserError as e:  # after the work is done it is shown, without a picture
        print(f"reproduce: {e}", file=sys.stderr)
        view.y = view.plot = None
    if view.x not in plot.X_NAMES and not any(view.x in run.flags for run in runs):
        view.x = "rounds"  # the runs that have the flag failed
    tables = {(cell.paper, cell.table) for cell in plan.cells if not figure_of(cell)}
    compare.report(folders, view, plan.names, tables)


if __name__ == "__main__":
    main()
