"""Scripts side by side, a sweep, or a published table or figure, as one command

    python -m reproduce SCRIPT,SCRIPT,"SCRIPT OWN FLAGS" FLAGS --seeds 3
    python -m reproduce SCRIPT FLAGS --sweep FLAG=a,b,...
    python -m reproduce PAPER TABLE            PAPER: fedalign, fedcka, fedmlb, rfedavg;
                                               TABLE: 1, 5, 1a, I, fig5, ...

runs what is missing, goes on with what was cut, skips what is finished, and ends with the table of
`python -m reproduce.compare` and, where matplotlib is installed, picture.png beside the runs.
Scripts with their FLAGS have runs in runs/compare-FLAGS/, so that a further script, seed or round
later adds to what is there; a sweep in runs/sweep-SCRIPT-FLAG/. A cell of a paper's table
(reproduce/cells.txt) has its run in runs/PAPER-TABLE/, named after the cell and its seed; a command
that stands in several tables is run once, under the first; a run with other flags in its place is
an error. Ctrl-C and --limit stop at any moment; the same command goes on from the last finished
round. A run that fails does not stop the others, and is listed at the end; the exit code is then 2
after a user's mistake, or 1. `fedalign.py` is the script where `fedalign` is the paper.

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
import shlex
import sys
import time

import common
from analysis import pictures
from reproduce import compare, jobs, plot
from reproduce.cells import parsed_flags, texts
from reproduce.runner import run_all, run_analyses


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    what = next((w for w in argv if w.lower() in jobs.papers() or jobs.names_script(w)), "")
    script = bool(what) and what.lower() not in jobs.papers()
    if script:  # whose own flags may stand anywhere
        at = argv.index(what)
        argv = [what, *argv[:at], *argv[at + 1 :]]
    parser = make_parser(with_table=not script)
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
    add, positive = parser.add_argument, common.number(float, 0, open_low=True)
    add("paper", metavar="PAPER", help="a paper, or method scripts separated by commas")
    if with_table:
        add("table", metavar="TABLE", help="its number, or figN")
        only = "these methods alone, by the table's name or by script, and these data sets"
        add("--only", metavar="NAME,...", help=only)
    add("--sweep", action="append", metavar="FLAG=VALUES", help="values of a flag, see above")
    add(
        "--dry-run",
        action="store_true",
        help="print the commands of what is not finished, and stop",
    )
    add("--seeds", type=common.COUNT, metavar="N", help="--seed 0, 1, ... (default: 1)")
    add("--data-seeds", type=common.COUNT, metavar="N", help="as --seeds, and other partitions")
    add("--limit", type=positive, metavar="MINUTES", help="stop cleanly after so long")
    add("--data-dir", metavar="DIR", help="passed on to the scripts")
    add("--runs", metavar="DIR", default="runs", help="where the tables' folders of runs are made")
    compare.add_flags(parser)
    return parser


def reproduce(args, extra):
    """Run and show what args ask for. Returns the exit code.

    extra: words that are no flags of this command: of the scripts.
    """
    plan = make_plan(args, extra)
    views = views_of(plan, args)
    compare.check_outputs(args)
    states = {folder: jobs.state_of(folder, command) for folder, command in plan.commands.items()}
    lines = jobs.analysis_lines(plan, states)
    if args.dry_run:
        print_commands(plan, states, lines)
        return 0
    deadline = time.monotonic() + 60 * args.limit if args.limit else None
    outcome = run_all(plan.commands, states, deadline)
    complete = outcome.finished == len(plan.commands)
    if complete:
        run_analyses(lines, deadline, outcome)
    stopped = "; --limit is reached, the same command goes on" if outcome.stopped else ""
    print(f"\n{outcome.finished} of {len(plan.commands)} runs finished{stopped}", flush=True)
    for part, view in views:
        show(part, view, complete)
    for what, code in outcome.failed.items():
        print(f"reproduce: failed, with exit code {code}: {what}", file=sys.stderr)
    return outcome.exit_code


def make_plan(args, extra):
    """Return the Plan that args ask for. Raises UserError for what does not go together."""
    if args.seeds and args.data_seeds:
        raise common.UserError("argument --data-seeds: varies --seed too; leave --seeds out")
    if "table" not in args:
        plan = jobs.scripts_plan(args, extra)
    else:
        if extra and jobs.is_script(args.paper.lower()):
            why = f"not of a paper's table; {args.paper.lower()}.py is the script"
            raise common.UserError(f"argument {extra[0]}: {why}")
        if extra:
            raise common.UserError(f"unrecognized arguments: {' '.join(extra)}")
        if args.sweep:
            raise common.UserError("argument --sweep: takes a method script, not a paper's table")
        cells = jobs.table_cells(args.paper, args.table)
        cells = cells if args.only is None else jobs.select_cells(cells, args.only)
        plan = jobs.table_plan(args, cells)
    for command in dict.fromkeys(plan.commands.values()):
        parsed_flags(command)  # a mistake is told before any work
    return plan


def views_of(plan, args):
    """Return what is shown, [(Plan, args with what the table or figure shows), ...].

    The parts of a figure, 9a to 9d, each by itself. Raises UserError for a file of several parts.
    """
    if not plan.cells:
        return [(plan, args)]
    views = []
    for _, cells in itertools.groupby(plan.cells, lambda c: c.table.startswith("fig") * c.table):
        cells = list(cells)
        parser = common.PlainParser("")
        compare.add_flags(parser)
        shown = vars(parser.parse_args(texts("views", cells[0][:2]).split()))
        flags = set().union(*(parsed_flags(cell.command) for cell in cells))
        if shown["x"] not in (None, *plot.CURVES, *plot.FIGURES, *flags):
            shown["x"] = None  # --only has left none with the flag
        asked = {name: value for name, value in vars(args).items() if value}
        view = argparse.Namespace(**vars(args) | shown | asked)
        views.append((jobs.table_plan(args, cells), view))
    if len(views) > 1 and (args.plot or args.csv):
        names = ", ".join(part.cells[0].table for part, _ in views)
        raise common.UserError(
            f"argument --plot, --csv: {args.table} has parts; name one of {names}"
        )
    return views


def print_commands(plan, states, lines):
    """Print the commands of what is not finished, and of the analyses."""
    for folder, command in plan.commands.items():
        if states[folder] != "finished":
            resume = " --resume" if states[folder] == "begun" else ""
            print(f"python {command} --out {shlex.quote(str(folder))}{resume}")
    for line in lines:
        print(f"python {line}")


def show(plan, view, complete):
    """Print and draw what there is of a Plan; files that the user named wait until it is complete.

    The same command writes them then. Without --plot the picture is picture.png of the folder.
    """
    folders = [folder for folder in plan.commands if (folder / "metrics.jsonl").exists()]
    if not folders:
        return
    if not complete and (view.csv or view.plot):
        print("\n--csv and --plot wait until all runs are finished")
        view.csv = view.plot = None
    tables = {cell[:2] for cell in plan.cells if not cell.table.startswith("fig")}
    print(f"\n{plan.cells[0].paper} {plan.cells[0].table}\n" if plan.cells else "")
    if not view.plot and has_pyplot():
        view.plot = plan.folder / "picture.png"
        view.plot.parent.mkdir(parents=True, exist_ok=True)
    compare.report(folders, view, plan.names, tables)


def has_pyplot():
    """Whether matplotlib is there."""
    try:
        return bool(pictures.pyplot())
    except common.UserError:
        return False


if __name__ == "__main__":
    main()
