"""Scripts side by side, a sweep, or a published table or figure, as one command

    python -m reproduce SCRIPT,SCRIPT,"SCRIPT OWN FLAGS" FLAGS --seeds 3
    python -m reproduce SCRIPT FLAGS --sweep FLAG=a,b,...
    python -m reproduce PAPER TABLE            PAPER: fedalign, fedcka, fedmlb, rfedavg;
                                               TABLE: 1, 5, 1a, I, fig5, ...
    python -m reproduce benchmark              every method in one setting: reproduce/benchmark.py

runs what is missing, goes on with what was cut, skips what is finished, and ends with the table of
`python -m reproduce.compare` and picture.png beside the runs.
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

import itertools
import sys

import common
from reproduce import benchmark, compare, jobs
from reproduce.cells import parsed_flags, texts
from reproduce.runner import run_plan


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["benchmark"]:
        parser, command = benchmark.make_parser(), benchmark.benchmark
    else:
        with_table = any(word.lower() in jobs.papers() for word in argv)
        parser, command = make_parser(with_table), reproduce

    def parse(words):
        return parser.parse_known_args([*words, *argv])

    try:
        raise SystemExit(command(parse))
    except (common.UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))
    except KeyboardInterrupt:
        print("\nreproduce: interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def reproduce(parse):
    """Run a table or scripts, and show them. Returns the exit code.

    parse: returns the flags and what else is on the command line, with words before it.
    """
    args, extra = parse([])
    plan = make_plan(args, extra)
    views = views_of(plan, args, parse)
    compare.check_outputs(args)

    def show_views(complete):
        for part, view in views:
            show(part, view, complete)

    return run_plan(plan, args, show_views)


def make_parser(with_table):
    """Return the parser; with_table: for a paper's table, not for a script."""
    parser = common.PlainParser(__doc__, prog="reproduce")
    add = parser.add_argument
    add("paper", metavar="PAPER", help="a paper, or method scripts separated by commas")
    if with_table:
        add("table", metavar="TABLE", help="its number, or figN")
        only = "these methods alone, by the table's name or by script, and these data sets"
        add("--only", metavar="NAME,...", help=only)
    else:
        values = "values of a flag, see above"
        add("--sweep", action="append", metavar="FLAG=VALUES", default=[], help=values)
    add("--seeds", type=common.COUNT, metavar="N", help="--seed 0, 1, ... (default: 1)")
    add("--data-seeds", type=common.COUNT, metavar="N", help="as --seeds, and other partitions")
    add("--data-dir", metavar="DIR", help="passed on to the scripts")
    jobs.add_flags(parser)
    compare.add_flags(parser)
    return parser


def make_plan(args, extra):
    """Return the Plan that args ask for; extra: words that are no flags of this command.

    Raises UserError for what does not go together.
    """
    if args.seeds and args.data_seeds:
        raise common.UserError("argument --data-seeds: varies --seed too; leave --seeds out")
    if "table" not in args:
        plan = jobs.scripts_plan(args, extra)
    elif extra and jobs.is_script(args.paper.lower()):
        why = f"not of a paper's table; {args.paper.lower()}.py is the script"
        raise common.UserError(f"argument {extra[0]}: {why}")
    elif extra:
        raise common.UserError(f"unrecognized arguments: {' '.join(extra)}")
    else:
        cells = jobs.table_cells(args.paper, args.table)
        cells = cells if args.only is None else jobs.select_cells(cells, args.only)
        plan = jobs.table_plan(args, cells)
    for command in dict.fromkeys(plan.commands.values()):
        parsed_flags(command)  # a mistake is told before any work
    return plan


def views_of(plan, args, parse):
    """Return what is shown, [(Plan, args with what the table or figure shows), ...].

    parse: as of reproduce(). The parts of a figure, 9a to 9d, each by itself. Raises UserError for
    a file of several parts.
    """
    parts = itertools.groupby(plan.cells, lambda c: c.table.startswith("fig") * c.table)
    parts = [list(cells) for _, cells in parts]
    if len(parts) > 1 and (args.plot or args.csv):
        names = f"{args.table} has parts; name one of {', '.join(part[0].table for part in parts)}"
        raise common.UserError(f"argument --plot, --csv: {names}")
    words = [texts("views", cells[0][:2]).split() for cells in parts]
    views = [(jobs.table_plan(args, cells), parse(line)[0]) for cells, line in zip(parts, words)]
    return views or [(plan, args)]


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
    if not view.plot:
        view.plot = plan.folder / "picture.png"
        view.plot.parent.mkdir(parents=True, exist_ok=True)
    compare.report(folders, view, plan.names, tables)


if __name__ == "__main__":
    main()
