"""Runs side by side, beside the published numbers, as tables and curves

Runs that differ in nothing but the seed (and in the machine's flags) are one row; so are runs that
differ in --data-seed too, if no two of them have the same. The columns:
    n            finished seeds, on one partition, or "partitions", each of which has one run;
                 without any, the runs that were cut or still go, at the last round that all of
                 them have; a run that on_round stopped is finished, each at its own last round,
                 which n tells: 3 (2 stopped at 40,60/100)
    last, best   accuracy (%) of the global model on the whole test set, in the last round and in
                 the best one: on what --validation holds out, or else on the test set itself
    EMA          exponential moving average with factor 0.9, bias-corrected (FedMLB's figure);
                 --at: at these rounds
    last five    mean of the last five evaluations; their deviation: population standard deviation
                 (rFedAvg's figures)
    to T%        first round whose EMA is at least T (--target); 1000+: not within the 1000 rounds
    worst client accuracy of the worst client in the last round, where it was measured
                 (--client-test; its n, if fewer)
    s/round      median seconds of a round, aggregation and evaluation included
    MB/round     sent and received by all clients
    (x)          seconds and MB relative to fedavg.py with the same data, network and federation,
                 seconds where the machine, --workers, --precision, --graph and --eval-every are the
                 same too; a line says where its partitions are others
    delta bytes  of rFedAvg's deltas, down and up, a client and round
    others       what a method reported of the last round, server["report"]
a +- b: mean and sample standard deviation (n - 1) over n. A last table sets the published
numbers beside runs whose flags are those of a paper's cell (published.csv, cells.txt), with
lambda_max, H_T, H_N and H_D where hessian_eval.py has been there. A mean over cells not all of
which are there ("2 of 5 subsets") gets no difference, nor do runs that were cut. Which round
FedAlign's and FedCKA's tables report is not stated: last and best are both given. Their times are
compared as ratios to FedAvg's, FedCKA's by the time in training. Under the table stands in what a
published number is known to be another than ours, or which of two readings made it where that is
open.

    python -m reproduce.compare runs/fedalign-1/* runs/fedalign-5/*
"""

import contextlib
import csv
import io
import json
import pathlib
import sys

import common
import run_folder
from analysis.runs import read_result, table
from reproduce import plot
from reproduce.figures import Mean, means, own_figures, show_figure
from reproduce.published import published_lines
from reproduce.rows import shared_setting, table_rows
from reproduce.runs import (
    MACHINE_FLAGS,
    baseline,
    comparable,
    group_runs,
    hardware_of,
    read_runs,
    without_baseline,
)

MARKS = "<!-- results -->\n", "<!-- end of results -->\n"  # what --into writes between
CSV_COLUMNS = [
    "setting",
    "method",
    "figure",
    "n",
    "n of",
    "measured",
    "std",
    "rounds",
    "not reached",
    "hardware",
    "paper",
    "table",
    "published",
    "published_std",
    "difference",
    "caveat",
]


def warn(line):
    print(f"reproduce.compare: {line}", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------


def main_table(groups, names, at, targets):
    """Return the table of all rows, as (lines for the eye, lines for the CSV)."""
    columns = [
        "last",
        "best",
        "EMA",
        *(f"EMA@{number}" for number in at),
        "last five",
        "their deviation",
        *(f"to {target:g}%" for target in targets),
        "worst client",
        "s/round",
        "MB/round",
        "delta bytes",
    ]
    reported = (own_figures(run.rows) for group in groups for run in group.runs)
    columns += sorted(set().union(*reported) - {*columns})
    lines = []
    tidy = []
    for row in table_rows(groups, names):
        measured = means(row.group, at, targets)
        line = {"setting": row.setting, "method": row.method, "n": row.group.count()}
        for column in columns:
            mean = measured.get(column)
            line[column] = show_figure(column, mean, row.group) if mean else "-"
        for column, ratio in cost_ratios(row.group, groups, measured).items():
            line[column] += f" ({ratio:.2f}x)"
        lines.append({**line, "hardware": hardware_of(row.group)})
        tidy += tidy_lines(row, measured)
    return lines, tidy


def cost_ratios(group, groups, measured):
    """Return seconds and bytes of a round over those of FedAvg in the same setting."""
    base = baseline(group, groups)
    why = without_baseline(group, groups)
    if why:
        warn(why)
    plain = means(base) if base else {}
    ratios = {}
    for column in ("s/round", "MB/round"):
        compares = base and (column == "MB/round" or comparable(base, group))
        if compares and plain[column].mean:
            ratios[column] = measured[column].mean / plain[column].mean
    return ratios


def tidy_lines(row, measured):
    """Return a line for the CSV of each Mean of a Row."""
    return [
        {
            "setting": row.setting,
            "method": row.method,
            "figure": name,
            "n": mean.n,
            "n of": row.group.over,
            "measured": mean.mean,
            "std": mean.std,
            "rounds": row.group.rounds,
            "not reached": mean.missed if name.startswith("to ") else None,
            "hardware": hardware_of(row.group),
        }
        for name, mean in measured.items()
    ]


def pooled_table(groups, flag, at):
    """Return the means over the groups that differ in a flag only, as lines for the eye.

    Lists, as of pathways, are pooled by their length. Raises UserError for a run without the flag.
    """
    pools = {}
    for group in groups:
        if flag not in group.flags:
            raise common.UserError(f"argument --over: {group.runs[0].path} has no flag {flag}")
        others = json.loads(group.runs[0].key[1])
        others[0].pop(flag, None)
        key = group.script, json.dumps(others, sort_keys=True), pool_of(group.flags[flag])
        pools.setdefault(key, []).append(group)
    lines = []
    for (script, _, pool), members in pools.items():
        each = [means(group, at) for group in members]
        seeds = ", ".join(sorted({group.count() for group in members}))
        n = f"{len(members)} rows of n = {seeds}"
        line = {"method": script, f"number of {flag}": pool, "n": n}
        for column in ("last", "best", "EMA", *(f"EMA@{number}" for number in at)):
            line[column] = Mean.of([measured[column].mean for measured in each]).show()
        lines.append({**line, "hardware": hardware_of(*members)})
    return lines


def pool_of(value):
    """Return what values of a flag have in common that are pooled: the length of lists."""
    if isinstance(value, list):
        return len(value)
    return "all" if value is None else "any"


def footnote(groups, lines):
    """Return what the numbers are, and of which versions; lines: of the published table."""
    runs = [run for group in groups for run in group.runs]
    commits = sorted({short_commit(run.commit) for run in runs})
    versions = ", ".join(sorted({run.torch for run in runs}))
    kinds = {group.over for group in groups if len(group.runs) > 1}
    over = {
        "seeds": "n seeds on one partition",
        "partitions": "n partitions, each with a run of its own",
    }
    kinds = " or ".join(over[kind] for kind in sorted(kinds, reverse=True)) or over["seeds"]
    text = (
        f"Accuracies in %; a +- b: mean and sample standard deviation over {kinds}, none at n = 1"
    )
    held_out = {any("val_acc" in row for row in run.rows) for run in runs}
    if False in held_out:
        text += "; best is picked on the test set"
    if True in held_out:
        text += "; best is picked on held-out training samples" + ", with --validation" * (
            len(held_out) > 1
        )
    if any(line.measured.figure.startswith("mean of last five") for line in lines):
        text += "; with the mean of last five their population standard deviation"
    return f"{text}; torch {versions}, commit {', '.join(commits)}."


def short_commit(commit):
    return commit[:7] + ("+" if "+" in commit else "")


# --------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------


def report(folders, args, names=None, wanted=None):
    """Print the tables of run folders, write the CSV and the picture.

    args: of add_flags(); names: as for table_rows(); wanted: {(paper, table), ...} whose published
    numbers are shown, all if there are none. Returns how many folders were damaged. Raises
    UserError if there is no run to show.
    """
    records, damaged = read_runs(folders, warn)
    groups = group_runs(records, warn)
    if not groups and damaged:
        return damaged
    if not groups:
        raise common.UserError("no run with a finished round to compare")
    args.x = checked_x(args.x, [group.flags for group in groups])
    plot.check_quantities(args.y, records)
    at = args.at or []
    over = args.over and args.over.lstrip("-").replace("-", "_")
    pooled = pooled_table(groups, over, at) if over else []
    lines, tidy = main_table(groups, names, at, args.target or [])
    published = published_lines(groups, wanted)
    for record in records:
        if (record.path / "hessian.json").exists() and not read_result(record.path, "hessian"):
            why = "it is not of the run's last round; hessian_eval.py writes it anew"
            warn(f"{record.path}/hessian.json: left out, since {why}")
    parts = [
        ("", lines),
        (f"\nMean +- sample standard deviation over the rows that differ in {over}:\n\n", pooled),
        ("\nBeside the published numbers:\n\n", [line.shown() for line in published]),
    ]
    print(f"All rows: {shared_setting(groups)}\n")
    for title, part in parts:
        if part:
            print(title + table(part, args.markdown))
    for caveat in dict.fromkeys(filter(None, (line.entry.caveat for line in published))):
        print(f"\n{caveat}")
    print(f"\n{footnote(groups, published)}")
    if args.csv:
        write_csv(args.csv, tidy + [line.tidy() for line in published])
    if args.plot:
        draw(groups, names, args)
    return damaged


def write_csv(path, lines):
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    run_folder.write_atomically(path, text.getvalue().encode())


def draw(groups, names, args):
    """Write the picture of what has been measured, and tell what has not."""
    curves = args.x in plot.CURVE_AXES
    complete = [group for group in groups if curves or group.complete]
    cut = len(groups) - len(complete)
    if cut:
        warn(f"{cut} of {len(groups)} rows are of runs that were cut, and are not drawn")
    asked = args.y or (["accuracy", "train_loss"] if curves else ["accuracy"])
    drawn = [quantity for quantity in asked if plot.measured_in(complete, quantity)]
    missing = [quantity for quantity in asked if quantity not in drawn]
    if complete and missing:
        warn(f"{', '.join(missing)}: not measured in these runs, and not drawn")
    if drawn:
        plot.Picture(complete, names, args.x, drawn).write(args.plot)


def replace_section(path, make):
    """Put what make() prints between the MARKS in a file, unless make() returns that runs failed.

    Raises UserError, before anything is made, if the marks are not there.
    """
    try:
        before, begin, rest = path.read_text().partition(MARKS[0])
    except (OSError, UnicodeDecodeError) as e:
        raise common.UserError(f"argument --into: {path} cannot be read ({e})") from None
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        begin, end = map(str.strip, MARKS)
        raise common.UserError(f"argument --into: {path} has no line {begin} with {end} behind it")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        damaged = make()
    if not damaged:
        mode = path.stat().st_mode
        page = f"{before}{begin}\n{text.getvalue()}\n{end}{after}"
        run_folder.write_atomically(path.resolve(), page.encode())
        path.chmod(mode)
    return damaged


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


def add_flags(parser):
    """Add the flags that `python -m reproduce` takes too."""
    add = parser.add_argument
    add("--markdown", action="store_true", help="print Markdown tables")
    add("--csv", metavar="FILE", help="also write all numbers, one a line")
    add(
        "--at",
        type=common.integers(1),
        metavar="ROUND,...",
        help="columns for the EMA at these rounds",
    )
    add(
        "--target",
        type=percentages,
        metavar="PERCENT,...",
        help="columns for the first round whose EMA gets there",
    )
    add(
        "--over",
        metavar="FLAG",
        help="a further table, averaged over a flag: pathways, for FedMLB's Table 6",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw curves, mean and a band of one deviation over seeds (.png, .pdf, .svg)",
    )
    add(
        "--x",
        metavar="NAME",
        help="what is drawn against: rounds (if not said), seconds or bytes, as curves; or of the "
        "last round a flag (lam, clients), s/round or MB/round",
    )
    add(
        "--y",
        type=lambda text: text.split(","),
        metavar="LIST",
        help="what is drawn: accuracy, ema, train_loss (with the method's own terms), test_loss, "
        "worst (client's accuracy), or a number in the rows of metrics.jsonl, as a method reports; "
        "if not said accuracy,train_loss, or accuracy against a flag",
    )


def percentages(text):
    """An argparse type: numbers from 0 to 100, separated by commas."""
    return [common.number(float, 0, 100)(word) for word in text.split(",")]


def check_outputs(args):
    """Raise UserError, before any work, for a --csv or --plot that could not be written.

    Nor may it overwrite anything.
    """
    if args.csv and args.plot:
        if pathlib.Path(args.csv).absolute() == pathlib.Path(args.plot).absolute():
            raise common.UserError(f"argument --plot: {args.plot} is the file of --csv")
    if args.csv:
        check_new_file("--csv", pathlib.Path(args.csv))
    if args.plot:
        check_new_file("--plot", pathlib.Path(args.plot))
        plot.check_format(args.plot)


def check_new_file(flag, path):
    """Raise UserError if path exists, is inside a run folder or in a folder that is not there."""
    if path.exists():
        raise common.UserError(f"argument {flag}: {path} exists already; name another file")
    for folder in path.absolute().parents:
        if (folder / "config.json").exists():
            raise common.UserError(
                f"argument {flag}: {path} is inside the run folder {folder}; name a file elsewhere"
            )
    if not path.absolute().parent.is_dir():
        raise common.UserError(f"argument {flag}: {path}: there is no folder {path.parent}")


def checked_x(x, flags):
    """Return --x as it is in the flags of runs, a list of dicts; rounds if it was not given.

    Raises UserError if it is none of its names, nor a flag that decides any of the runs.
    """
    x = x or "rounds"
    if x in plot.X_NAMES:
        return x
    x = x.lstrip("-").replace("-", "_")
    decides = x not in MACHINE_FLAGS | {"seed"}
    if not decides or all(values.get(x) is None for values in flags):
        raise common.UserError(
            f"argument --x: {x} is no flag that decides these runs; it takes rounds, seconds, "
            "bytes, s/round, MB/round or a flag"
        )
    return x


def main(argv=None):
    parser = common.PlainParser(__doc__, prog="reproduce.compare")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--into",
        metavar="FILE",
        type=pathlib.Path,
        help=f"put the tables as Markdown into FILE, between {MARKS[0].strip()} and "
        f"{MARKS[1].strip()}",
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        check_outputs(args)
        if args.into:
            args.markdown = True
            folders = sorted(map(pathlib.Path, args.runs))  # in one order, whatever the shell's
            damaged = replace_section(args.into, lambda: report(folders, args))
        else:
            damaged = report(args.runs, args)
    except (common.UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))
    raise SystemExit(2 if damaged else 0)


if __name__ == "__main__":
    main()
