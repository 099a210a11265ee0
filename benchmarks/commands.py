"""Measure the training throughput of commands, each run a process of its own, in turns.

    python benchmarks/commands.py fedavg "fedprox --mu 0.1" moon
    python benchmarks/commands.py fedavg "fedavg --workers 4" "fedavg --no-graph" --model resnet56
    python benchmarks/commands.py "fedavg --workers 2" "2x fedavg --workers 1" --sample 0.1

A command is a method's script with flags of its own; "2x" before it: two ranks of torchrun, of one
thread a worker, as all commands then have. All other flags go to every script. The commands take
turns, so that a noisy moment meets all of them. A round is the median of all but the first, which
pays for warm-up and graph capture. "time" is seconds to train, exchange and aggregate per training
sample, over those of the first command, the median of the turns. Prints a line a command (medians
over the repeats), then the same as JSON.
"""

import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402

ROOT = pathlib.Path(common.__file__).resolve().parent
DEFAULTS = "--dataset glyphs --model cnn --clients 10 --partition iid --epochs 1".split()
TRAINING = ("train", "aggregate", "synchronise")  # parts of a round's seconds
COLUMNS = {  # of the table: what is printed of a figure, and of which unit
    "samples/s": ("{:10,.0f}", 1),
    "train": ("{:7.2f}", 1),
    "aggregate": ("{:9.2f}", 1),
    "evaluate": ("{:8.2f}", 1),
    "other": ("{:6.2f}", 1),
    "MB up": ("{:8.1f}", 1e6),
    "host GiB": ("{:8.2f}", 2**30),
    "GPU GiB": ("{:8.2f}", 2**30),
    "time": ("{:6.2f}", 1),
}


def split(command):
    """Return (ranks, script, flags) of a command; UserError for a script that is not there."""
    words = shlex.split(command)
    ranks = int(words.pop(0)[:-1]) if words[0][:-1].isdigit() else 1
    script = words.pop(0).removesuffix(".py")
    if not (ROOT / f"{script}.py").is_file():
        raise common.UserError(f"argument COMMAND: there is no {script}.py")
    return ranks, script, words


def measure(ranks, script, flags, threads=None):
    """Return the figures of one run, {column: number}, and its config.json; None when it fails.

    Seconds are medians over the rounds but the first. threads: of each worker; None: as ever."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / f"{script}.py")]
        environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        words = [*command, *flags, "--quiet", "--out", str(run)]
        process = subprocess.Popen(words, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            print(f"{script} {shlex.join(flags)}: failed", file=sys.stderr)
            return None
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
    parts = [{"synchronise": 0.0, **row["seconds"]} for row in rows[1:] or rows]
    seconds = {part: statistics.median(p[part] for p in parts) for part in parts[0]}
    training = [sum(p[part] for part in TRAINING) for p in parts]
    rates = [row["samples"] / time for row, time in zip(rows[1:] or rows, training)]
    seconds["aggregate"] += seconds.pop("synchronise")
    figures = {"samples/s": statistics.median(rates), **seconds, "MB up": rows[-1]["bytes_up"]}
    figures["host GiB"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if config["flags"]["device"] != "cpu":
        figures["GPU GiB"] = rows[-1]["peak_memory"]
    return figures, config


def table_row(command, runs, first):
    """Return medians of a command's runs; first: those of the first command, turn by turn."""
    columns = {name: [figures[name] for figures, _ in runs] for name in runs[0][0]}
    pairs = zip(columns["samples/s"], first)
    columns["time"] = [base["samples/s"] / rate for rate, (base, _) in pairs]
    medians = {name: statistics.median(values) for name, values in columns.items()}
    return {"command": command, "workers": runs[0][1]["workers"], **medians}


def main(argv=None):
    """Measure the commands in turns and print the table; return the exit code."""
    parser = common.PlainParser(__doc__, prog="commands.py")
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="fedavg, '2x moon --mu 1'")
    parser.add_argument("--rounds", type=common.number(int, 2), default=3, help="of a run")
    parser.add_argument("--repeats", type=common.COUNT, default=3, help="runs of each command")
    args, flags = parser.parse_known_args(argv)
    lines = [split(command) for command in args.commands]
    threads = 1 if any(ranks > 1 for ranks, *_ in lines) else None
    flags = [*DEFAULTS, "--rounds", str(args.rounds), *flags]
    runs = [[] for _ in lines]
    for _ in range(args.repeats):
        turn = [measure(ranks, script, [*flags, *own], threads) for ranks, script, own in lines]
        if None in turn:
            return 1
        for found, run in zip(runs, turn):
            found.append(run)
    table = [table_row(c, found, runs[0]) for c, found in zip(args.commands, runs)]
    columns = {name: column for name, column in COLUMNS.items() if name in table[0]}
    titles = [f"{name:>{len(form.format(0))}}" for name, (form, _) in columns.items()]
    print(f"{'command':34}", *titles)
    for row in table:
        cells = [form.format(row[name] / unit) for name, (form, unit) in columns.items()]
        print(f"{row['command']:34}", *cells)
    config = runs[0][-1][1]
    about = {"machine": config["device"], "torch": config["versions"]["torch"]}
    print(json.dumps({**about, "commit": config["commit"], "flags": flags, "table": table}))
    return 0


if __name__ == "__main__":
    with common.one_line_errors("commands"):
        sys.exit(main())
