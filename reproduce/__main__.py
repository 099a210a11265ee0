"""Scripts side by side, a sweep, or a published table or figure, as one command

    python -m reproduce SCRIPT,SCRIPT,"SCRIPT OWN FLAGS" FLAGS --seeds 3
    python -m reproduce SCRIPT FLAGS --sweep layers=1,2,3 --sweep epochs,rounds=1,200/2,100
    python -m reproduce PAPER TABLE     PAPER: fedalign, fedcka, fedmlb, rfedavg; TABLE: 1a, I, fig5
    python -m reproduce benchmark       every method in one setting: reproduce/benchmark.py

runs what is missing, goes on with what was cut, skips what is finished, and ends with the table of
`python -m reproduce.compare` and picture.png beside the runs. Ctrl-C and --limit stop at any
moment; the same command goes on from the last finished round. A run that fails does not stop the
others, and is listed at the end; the exit code is then 2 after a user's mistake, or 1.

Scripts with their FLAGS have runs in runs/compare-FLAGS/, where a further script, seed or round
adds to what is there; a sweep in runs/sweep-SCRIPT-FLAG/. A cell of a paper's table
(reproduce/cells.txt) has its run in runs/PAPER-TABLE/, or in that of the first table with the same
command. A run with other flags in its place is an error. `fedalign.py` is the script where
`fedalign` is the paper.

--seeds N repeats each run with --seed 0, 1, ... on one partition; --data-seeds N with another
partition each time, --seed and --data-seed 0, 1, ... Values of --sweep are separated by commas, or
by / where a value has commas (pathways=1/1,2) or flags change together; several --sweep make a
grid. --clients 1 is the centralised bound.
"""

import itertools
import math
import sys

import common
from reproduce import benchmark, compare, jobs
from reproduce.cells import texts


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser(argv)
    args, extra = parser.parse_known_args(argv)
    try:
        if args.paper == "benchmark":
            raise SystemExit(benchmark.benchmark(args, extra))
        compare.check_outputs(args)
        plan = make_plan(args, extra)
        parts = parts_of(plan, args)

        def show_parts(whole):
            for part in parts:
                words = texts("views", part.cells[0][:2]).split() if part.cells else []
                show(part, parser.parse_known_args([*words, *argv])[0], whole)

        raise SystemExit(jobs.run_plan(plan, args, show_parts))
    except (common.UserError, OSError) as e:
        parser.error(str(e))
    except KeyboardInterrupt:
        common.end("\nreproduce: interrupted; the same command goes on", 130)


def make_parser(argv):
    """Return the parser for the benchmark, a paper's table or scripts, as argv asks."""
    own, minutes = argv[:1] == ["benchmark"], common.number(float, 0, open_low=True)
    table = any(word.lower() in jobs.papers() for word in argv) and not own
    parser = common.PlainParser(benchmark.__doc__ if own else __doc__, prog="reproduce")
    add = parser.add_argument
    add("paper", metavar="PAPER", help="a paper, method scripts separated by commas, or benchmark")
    if table:
        add("table", metavar="TABLE", help="its number, or figN")
    if table or own:
        add("--only", metavar="NAME,...", help="methods by name or script, and data sets")
    else:
        add("--sweep", action="append", metavar="FLAG=VALUES", default=[], help="see above")
    if own:
        add("--quick", action="store_true", help="a smoke test")
        add("--publish", action="store_true", help="write into the docs, and run nothing")
        add("--data-seeds", type=common.COUNT, metavar="N", help="default: 3; with --quick 1")
    else:
        add("--seeds", type=common.COUNT, metavar="N", help="--seed 0, 1, ... (default: 1)")
        add("--data-seeds", type=common.COUNT, metavar="N", help="as --seeds, other partitions too")
        add("--data-dir", metavar="DIR", help="passed on to the scripts")
        compare.add_flags(parser)
    add("--dry-run", action="store_true", help="print the commands that are left, and stop")
    add("--limit", type=minutes, default=math.inf, metavar="MINUTES", help="stop after so long")
    add("--runs", metavar="DIR", default="runs", help="where the folders of runs are made")
    return parser


def make_plan(args, extra):
    """Return the Plan that args ask for; extra: words that are no flags of this command.

    Raises UserError for what does not go together."""
    if args.seeds and args.data_seeds:
        raise common.UserError("argument --data-seeds: varies --seed too; leave --seeds out")
    if "table" not in args:
        return jobs.scripts_plan(args, extra)
    if extra:
        hint = f"; {args.paper.lower()}.py is the script" * (args.paper.lower() in jobs.scripts())
        raise common.UserError(f"argument {extra[0]}: not of a paper's table{hint}")
    cells = jobs.table_cells(args.paper, args.table)
    return jobs.table_plan(args, jobs.select_cells(cells, args.only))


def parts_of(plan, args):
    """Return the Plans of a figure's parts, 9a to 9d, of which each has its picture, or the plan.

    Raises UserError for a file of several parts."""
    parts = itertools.groupby(plan.cells, lambda c: c.table.startswith("fig") * c.table)
    parts = {table: jobs.table_plan(args, list(cells)) for table, cells in parts}
    if len(parts) > 1 and (args.plot or args.csv):
        names = f"{args.table} has parts; name one of {', '.join(parts)}"
        raise common.UserError(f"argument --plot, --csv: {names}")
    return list(parts.values()) or [plan]


def show(plan, view, whole):
    """Print and draw what there is of a Plan; files that the user named wait for the whole.

    The same command writes them then. Without --plot the picture is picture.png of the folder."""
    folders = [folder for folder in plan.commands if (folder / "metrics.jsonl").exists()]
    if not folders:
        return
    if not whole and (view.csv or view.plot):
        print("\n--csv and --plot wait until all runs are finished")
        view.csv = view.plot = None
    tables = {cell[:2] for cell in plan.cells if not cell.table.startswith("fig")}
    print(f"\n{plan.cells[0].paper} {plan.cells[0].table}\n" if plan.cells else "")
    plan.folder.mkdir(parents=True, exist_ok=True)
    view.plot = view.plot or plan.folder / "picture.png"
    compare.report(folders, view, plan.names, tables)


if __name__ == "__main__":
    main()
