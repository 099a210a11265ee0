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
    personal     mean accuracy of the clients' own networks, as of FedPer, in the last round
                 (--client-test; its n, if fewer)
    s/round      median seconds of a round, aggregation and evaluation included
    MB/round     sent and received by all clients
    (x)          seconds and MB relative to fedavg.py with the same data, partitions, network and
                 federation; seconds where the machine, --workers, --precision, --graph and
                 --eval-every are the same too
    delta bytes  of rFedAvg's deltas, down and up, a client and round
    others       what a method reported of the last round, server["report"]
a +- b: mean and sample standard deviation (n - 1) over n. A last table sets the published
numbers beside runs whose flags are those of a paper's cell (published.csv, cells.txt), with
lambda_max, H_T, H_N and H_D where hessian_eval.py has been there. A mean over cells not all of
which are there ("2 of 5 subsets") gets no difference, nor do runs that were cut. Which round
FedAlign's and FedCKA's tables report is not stated: last and best are both given. Their times are
compared as ratios to FedAvg's, FedCKA's by the time in training. The sentences under the table say
where a published number is known to be another than ours.

    python -m reproduce.compare runs/fedalign-1/* runs/fedalign-5/*
"""

import contextlib
import csv
import io
import pathlib
import sys

import common
import run_folder
from analysis import pictures
from analysis.runs import read_result, table
from reproduce import plot
from reproduce.figures import means, own_figures, shared_setting, show_figure, table_rows
from reproduce.published import published_lines, shown
from reproduce.runs import baseline, comparable, group_runs, read_runs

CSV_COLUMNS = (
    "setting,method,figure,n,n of,measured,std,rounds,not reached,hardware,paper,table,published,"
    "published_std,difference,caveat"
).split(",")


def warn(line):
    print(f"reproduce.compare: {line}", file=sys.stderr)


def main_table(groups, names, at, targets):
    """Return the table of all rows, as (lines for the eye, lines for the CSV)."""
    columns = ["last", "best", "EMA", *(f"EMA@{t}" for t in at), "last five", "their deviation"]
    columns += [*(f"to {target:g}%" for target in targets), "worst client"]
    columns += ["personal", "s/round", "MB/round"]
    reported = (own_figures(run.rows) for group in groups for run in group.runs)
    columns += ["delta bytes", *sorted(set().union(*reported) - {*columns})]
    lines, tidy = [], []
    for setting, method, group in table_rows(groups, names):
        found, base = means(group, at, targets), baseline(group, groups)
        line = {"setting": setting, "method": method, "n": group.count()}
        for column in columns:
            line[column] = show_figure(column, found[column], group) if column in found else "-"
        for column in ("s/round", "MB/round") if base else ():
            plain = means(base)[column].mean
            if plain and (column == "MB/round" or comparable(base, group)):
                line[column] += f" ({found[column].mean / plain:.2f}x)"
        lines.append({**line, "hardware": group.hardware})
        about = {"setting": setting, "method": method, "n of": group.over, "rounds": group.rounds}
        for figure, mean in found.items():
            missed = mean.missed if figure.startswith("to ") else None
            numbers = {"n": mean.n, "measured": mean.mean, "std": mean.std, "not reached": missed}
            tidy.append({**about, "figure": figure, **numbers, "hardware": group.hardware})
    return lines, tidy


def footnote(groups, published):
    """Return what the numbers are, and of which versions; published: of published_lines()."""
    runs = [run for group in groups for run in group.runs]
    commits = sorted({run.config["commit"] or "unknown" for run in runs})
    commits = ", ".join(commit[:7] + "+" * ("+" in commit) for commit in commits)
    kinds = {group.over for group in groups if len(group.runs) > 1} or {"seeds"}
    texts = "n seeds on one partition", "n partitions, each with a run of its own"
    over = " or ".join(text for text in texts if kinds & set(text.replace(",", "").split()))
    text = f"Accuracies in %; a +- b: mean and sample standard deviation over {over}, none at n = 1"
    held_out = {any("val_acc" in row for row in run.rows) for run in runs}
    text += "; best is picked on the test set" * (False in held_out)
    text += "; best is picked on held-out training samples" * (True in held_out)
    text += ", with --validation" * (len(held_out) > 1)
    if any(line["figure"].startswith("mean of last five") for line in published):
        text += "; with the mean of last five their population standard deviation"
    torch = ", ".join(sorted({run.config["versions"]["torch"] for run in runs}))
    return f"{text}; torch {torch}, commit {commits}."


def report(folders, args, names=None, wanted=None):
    """Print the tables of run folders, write the CSV and the picture.

    args: of add_flags(); names: as for table_rows(); wanted: {(paper, table), ...} whose published
    numbers are shown, all if there are none. Returns how many folders were damaged. Raises
    UserError if there is no run to show."""
    runs, damaged = read_runs(folders, warn)
    groups = group_runs(runs, warn)
    if not groups and not damaged:
        raise common.UserError("no run with a finished round to compare")
    if not groups:
        return damaged
    lines, tidy = main_table(groups, names, args.at or [], args.target or [])
    published = published_lines(groups, wanted)
    for run in runs:
        if (run.path / "hessian.json").exists() and not read_result(run.path, "hessian"):
            warn(f"{run.path}/hessian.json: left out, since it is of an earlier round")
    print(f"All rows: {shared_setting(groups)}\n\n{table(lines, args.markdown)}")
    if published:
        print("\nBeside the published numbers:\n")
        print(table([shown(line) for line in published], args.markdown))
    for caveat in dict.fromkeys(line["caveat"] for line in published if line["caveat"]):
        print(f"\n{caveat}")
    print(f"\n{footnote(groups, published)}")
    if args.csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(tidy + published)
        run_folder.write_atomically(args.csv, text.getvalue().encode())
    if args.plot:
        plot.write(args.plot, groups, names, *plot.axes_of(args.x, args.y, groups), warn)
    return damaged


def replace_section(path, make, marks):
    """Put what make() prints between the marks in a file; UserError if they are not there."""
    before, begin, rest = path.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not end:
        begin, end = map(str.strip, marks)
        raise common.UserError(f"{path} has no line {begin} and, later, {end}")
    with contextlib.redirect_stdout(io.StringIO()) as text:
        make()
    page = f"{before}{begin}\n{text.getvalue()}\n{end}{after}"
    run_folder.write_atomically(path, page.encode())


def percentages(text):
    """An argparse type: numbers from 0 to 100, separated by commas."""
    return [common.number(float, 0, 100)(word) for word in text.split(",")]


def add_flags(parser):
    """Add the flags that `python -m reproduce` takes too."""
    add, path = parser.add_argument, pathlib.Path
    add("--markdown", action="store_true", help="print Markdown tables")
    add("--csv", type=path, metavar="FILE", help="also write all numbers, one a line")
    add("--at", type=common.integers(1), metavar="ROUND,...", help="columns for the EMA then")
    target = "columns for the first round whose EMA gets there"
    add("--target", type=percentages, metavar="PERCENT,...", help=target)
    add("--plot", type=path, metavar="FILE", help="draw a picture (.png, .pdf, .svg)")
    x = "what is drawn against: rounds (if not said), seconds or bytes, as curves; or, of the "
    x += "last round, a flag (lam, clients), s/round or MB/round"
    add("--x", metavar="NAME", help=x)
    y = "what is drawn: accuracy, ema, train_loss (with the method's own terms), test_loss, worst "
    y += "(client's accuracy), or any number of metrics.jsonl; if not said accuracy,train_loss, or "
    y += "accuracy against a flag"
    add("--y", type=lambda text: text.split(","), metavar="LIST", help=y)


def check_outputs(args):
    """Raise UserError, before any work, for a --csv or --plot that could not be written."""
    if args.csv:
        pictures.check_file("--csv", args.csv)
    if args.plot:
        pictures.check_picture("--plot", args.plot)


def main(argv=None):
    parser = common.PlainParser(__doc__, prog="reproduce.compare")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        check_outputs(args)
        raise SystemExit(2 if report(args.runs, args) else 0)
    except (common.UserError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
