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
UNITS = {"MB up": 1e6, "host GiB": 2**30, "GPU GiB": 2**30}  # of what is printed


def split(command):
    """Return (ranks, script, flags) of a command; UserError for a script that is not there."""
    try:
        words = shlex.split(command)
        ranks = int(words.pop(0)[:-1]) if words[0][:-1].isdigit() else 1
        script = words.pop(0).removesuffix(".py")
    except (ValueError, IndexError):
        raise common.UserError(f"argument COMMAND: {command!r} names no script") from None
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
        command += [*flags, "--quiet", "--out", str(run)]
        process = subprocess.Popen(command, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            print(f"{script} {shlex.join(flags)}: failed", file=sys.stderr)
            return None
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
    rows = rows[1:] or rows
    parts = [{"synchronise": 0.0, **row["seconds"]} for row in rows]
    seconds = {part: statistics.median(p[part] for p in parts) for part in parts[0]}
    rates = [r["samples"] / sum(p[part] for part in TRAINING) for r, p in zip(rows, parts)]
    seconds["aggregate"] += seconds.pop("synchronise")
    figures = {"samples/s": statistics.median(rates), **seconds, "MB up": rows[-1]["bytes_up"]}
    figures["host GiB"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if config["flags"]["device"] != "cpu":
        figures["GPU GiB"] = rows[-1]["peak_memory"]
    return figures, config


def table_row(command, runs, first):
    """Return medians of a command's runs; first: those of the first command, turn by turn."""
    for (figures, _), (base, _) in zip(runs, first):
        figures["time"] = base["samples/s"] / figures["samples/s"]
    medians = {name: statistics.median(figures[name] for figures, _ in runs) for name in runs[0][0]}
    return {"command": command, "workers": runs[0][1]["workers"], **medians}


def main(argv=None):
    """Measure the commands in turns and print the table; return the exit code."""
    parser = common.PlainParser(__doc__, prog="commands.py")
    parser.add_argument("commands", nargs="+", metavar="COMMAND", help="fedavg, '2x moon --mu 1'")
    parser.add_argument("--rounds", type=common.number(int, 2), default=3, help="of a run")
    parser.add_argument("--repeats", type=common.COUNT, default=3, help="runs of each command")
    args, flags = parser.parse_known_args(argv)
    lines, turns = [split(command) for command in args.commands], []
    threads = 1 if any(ranks > 1 for ranks, *_ in lines) else None
    flags = [*DEFAULTS, "--rounds", str(args.rounds), *flags]
    for _ in range(args.repeats):
        turn = [measure(ranks, script, [*flags, *own], threads) for ranks, script, own in lines]
        if None in turn:
            return 1
        turns.append(turn)
    runs = list(zip(*turns))  # of each command
    table = [table_row(c, found, runs[0]) for c, found in zip(args.commands, runs)]
    names = [name for name in table[0] if name not in ("command", "workers")]
    print(f"{'command':34}", *(f"{name:>9}" for name in names))
    for row in table:
        values = [row[name] / UNITS.get(name, 1) for name in names]
        cells = [f"{value:9,.{0 if value > 1000 else 2}f}" for value in values]
        print(f"{row['command']:34}", *cells)
    config = runs[0][-1][1]
    about = {"machine": config["device"], "torch": config["versions"]["torch"]}
    print(json.dumps({**about, "commit": config["commit"], "flags": flags, "table": table}))
    return 0


if __name__ == "__main__":
    with common.one_line_errors("commands"):
        sys.exit(main())
