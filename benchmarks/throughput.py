"""Measure the training throughput of method scripts, each run a process of its own.

In every combination of the workers, graphs and precisions that are asked for:

    python benchmarks/throughput.py fedprox moon fedalign
    python benchmarks/throughput.py fedalign moon --workers 1,2,4,8 --graph on,off \\
        --precision fp32,bf16 --model resnet56
    python benchmarks/throughput.py "gradaug --subnets 2" "gradaug --subnets 1" --model resnet56

A script may come with flags of its own, in quotes; all other flags go to every script. fedavg.py
always runs beside them in the same combinations and is what "time" is relative to: seconds to train
and aggregate a round, per training sample, over fedavg.py's. The combinations take turns, so that a
noisy moment meets all of them. A round is the median of all but the first, which pays for warm-up
and graph capture. Prints a line a combination (medians over the repeats) and the same as JSON.
"""

import argparse
import itertools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULTS = "--dataset glyphs --model cnn --clients 10 --partition iid --epochs 1".split()
HEADER = (
    f"{'script':28} workers graph precision  samples/s   train  aggregate  evaluate  other s  "
    "host GiB  GPU GiB  time"
)


# --- one run


def measure(script, flags):
    """Return the figures of one run, medians over the rounds but the first; None when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        command = [sys.executable, str(ROOT / f"{script}.py"), *flags, "--quiet", "--out", str(run)]
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            print(f"{shlex.join(command[1:-2])}: failed", file=sys.stderr)
            return None
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
    host = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        **figures_of(rows[1:] or rows),
        "host": host,
        "device": rows[-1]["peak_memory"] if config["flags"]["device"] != "cpu" else None,
        "workers": config["workers"],
        "machine": config["device"],
        "torch": config["versions"]["torch"],
        "commit": config["commit"],
    }


def figures_of(rows):
    """Return the median seconds of each part of a round, and per training sample, of rows."""
    rounds = [{"synchronise": 0.0, **row["seconds"]} for row in rows]
    training = [s["train"] + s["aggregate"] + s["synchronise"] for s in rounds]
    return {
        "seconds": {part: statistics.median(s[part] for s in rounds) for part in rounds[0]},
        "per_sample": statistics.median(t / row["samples"] for t, row in zip(training, rows)),
    }


# --- combinations of scripts and settings


def measure_all(scripts, args, flags):
    """Return {(script, setting): figures of each repeat}, taking turns.

    scripts: tuples of a name and its own flags. A setting is (workers, graph, precision).
    """
    settings = list(
        itertools.product(args.workers.split(","), args.graph.split(","), args.precision.split(","))
    )
    figures = {(script, setting): [] for script in scripts for setting in settings}
    for _ in range(args.repeats):
        for script, setting in figures:
            name, *script_flags = script
            words = [*DEFAULTS, "--rounds", str(args.rounds), *flags, *script_flags]
            figures[script, setting].append(measure(name, [*words, *words_of(setting)]))
    return figures


def words_of(setting):
    """Return the flags of a setting, (workers, graph, precision)."""
    workers, graph, precision = setting
    graph_flag = "--graph" if graph == "on" else "--no-graph"
    return ["--workers", workers, graph_flag, "--precision", precision]


def table_row(script, setting, pairs):
    """Return the row of a script in a setting: medians over pairs of figures (its, fedavg.py's)."""
    first = pairs[0][0]
    return {
        "script": shlex.join(script),
        "workers": first["workers"],
        "graph": setting[1],
        "precision": setting[2],
        "samples_per_s": statistics.median(1 / run["per_sample"] for run, _ in pairs),
        "seconds": {
            part: statistics.median(run["seconds"][part] for run, _ in pairs)
            for part in first["seconds"]
        },
        "host_bytes": max(run["host"] for run, _ in pairs),
        "device_bytes": first["device"],
        "repeats": len(pairs),
        "time": statistics.median(run["per_sample"] / base["per_sample"] for run, base in pairs),
    }


def print_row(row):
    """Print a row of the table under HEADER."""
    s = row["seconds"]
    averaging = s["aggregate"] + s["synchronise"]
    host = row["host_bytes"] / 2**30
    gpu = "-" if row["device_bytes"] is None else f"{row['device_bytes'] / 2**30:.2f}"
    print(
        f"{row['script']:28} {row['workers']:7} {row['graph']:>5} {row['precision']:>9} "
        f"{row['samples_per_s']:10,.0f} {s['train']:7.2f} {averaging:10.2f} {s['evaluate']:9.2f} "
        f"{s['other']:8.2f} {host:9.2f} {gpu:>7}  {row['time']:.2f}"
    )


# --- the command


def make_parser():
    """Return the parser of this benchmark's own flags; all others go to the scripts."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "scripts",
        nargs="+",
        metavar="SCRIPT",
        help="method scripts, such as fedalign or 'fedcka --layers 2'",
    )
    add("--workers", default="auto", help="numbers, or auto, separated by commas")
    add("--graph", default="on", help="on, off, or on,off")
    add("--precision", default="fp32", help="fp32, tf32 and bf16, separated by commas")
    add("--rounds", type=int, default=3, help="rounds of a run, at least two")
    add("--repeats", type=int, default=3, help="runs of each combination")
    return parser


def parse_flags(argv):
    """Return (scripts with their own flags, fedavg first; args; the flags of every script)."""
    parser = make_parser()
    args, flags = parser.parse_known_args(argv)
    if args.rounds < 2 or args.repeats < 1:
        parser.error("argument --rounds, --repeats: at least two rounds and one repeat are needed")
    if not set(args.graph.split(",")) <= {"on", "off"}:
        parser.error(f"argument --graph: takes on, off, or on,off, not {args.graph!r}")
    texts = ["fedavg", *(text for text in args.scripts if text != "fedavg")]
    scripts = [tuple(shlex.split(text.replace(".py", "", 1))) for text in texts]
    for name, *_ in scripts:
        if not (ROOT / f"{name}.py").is_file():
            parser.error(f"argument SCRIPT: there is no {name}.py")
    return scripts, args, flags


def main(argv=None):
    """Measure the combinations and print the table; return the exit code."""
    scripts, args, flags = parse_flags(argv)
    figures = measure_all(scripts, args, flags)
    print(HEADER)
    table = []
    successes = []
    for (script, setting), measured in figures.items():
        baseline = figures[scripts[0], setting]
        pairs = [(run, base) for run, base in zip(measured, baseline) if run and base]
        if pairs:
            successes.append(pairs[0][0])
            table.append(table_row(script, setting, pairs))
            print_row(table[-1])
    if not table:
        return 1
    result = {key: successes[-1][key] for key in ("machine", "torch", "commit")}
    result["flags"] = [*DEFAULTS, *flags]
    result["rounds"] = args.rounds
    result["table"] = table
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("throughput.py: error: interrupted", file=sys.stderr)
        sys.exit(130)
