"""Training throughput of method scripts, each a process of its own, in every combination of what is asked for:

    python benchmarks/throughput.py fedprox moon fedalign
    python benchmarks/throughput.py fedalign moon --workers 1,2,4,8 --graph on,off --precision fp32,bf16 --model resnet56
    python benchmarks/throughput.py "gradaug --subnets 2" "gradaug --subnets 1" --model resnet56 --rounds 4

A script may come with flags of its own, in quotes; all other flags go to every script. fedavg.py always runs beside them in the
same combinations and is what "time" is relative to: seconds to train and aggregate a round, per training sample, over
fedavg.py's. The combinations take turns, so that a noisy moment meets all of them. A round is the median of all but the first,
which pays for warm-up and graph capture. Prints a line a combination (medians over the repeats) and the same as JSON.
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
DEFAULTS = [
    "--dataset",
    "glyphs",
    "--model",
    "cnn",
    "--clients",
    "10",
    "--partition",
    "iid",
    "--epochs",
    "1",
]


def measure(script, flags):
    """Medians over the rounds but the first of one run, and its peak memory; None when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / f"{script}.py"),
            *flags,
            "--quiet",
            "--out",
            f"{folder}/run",
        ]
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            print(f"{shlex.join(command[1:-2])}: failed", file=sys.stderr)
            return None
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        config = json.load(open(f"{folder}/run/config.json"))
    later = rows[1:] or rows
    parts = [{"synchronise": 0.0, **row["seconds"]} for row in later]
    seconds = {part: statistics.median(s[part] for s in parts) for part in parts[0]}
    host = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    device = rows[-1]["peak_memory"] if config["flags"]["device"] != "cpu" else None
    training = [s["train"] + s["aggregate"] + s["synchronise"] for s in parts]
    return {
        "seconds": seconds,
        "per_sample": statistics.median(t / row["samples"] for t, row in zip(training, later)),
        "host": host,
        "device": device,
        "workers": config["workers"],
        "machine": config["device"],
        "torch": config["versions"]["torch"],
        "commit": config["commit"],
    }


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "scripts",
        nargs="+",
        metavar="SCRIPT",
        help="method scripts, such as fedalign or 'fedcka --layers 2'",
    )
    parser.add_argument("--workers", default="auto", help="numbers, or auto, separated by commas")
    parser.add_argument("--graph", default="on", help="on, off, or on,off")
    parser.add_argument(
        "--precision", default="fp32", help="fp32, tf32 and bf16, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run, at least two")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each combination")
    args, flags = parser.parse_known_args(argv)
    if args.rounds < 2 or args.repeats < 1:
        parser.error("argument --rounds, --repeats: at least two rounds and one repeat are needed")
    if not set(args.graph.split(",")) <= {"on", "off"}:
        parser.error(f"argument --graph: takes on, off, or on,off, not {args.graph!r}")
    scripts = [
        shlex.split(text.replace(".py", "", 1))
        for text in ["fedavg", *(s for s in args.scripts if s != "fedavg")]
    ]
    for script, *_ in scripts:
        if not (ROOT / f"{script}.py").is_file():
            parser.error(f"argument SCRIPT: there is no {script}.py")
    machine = list(
        itertools.product(args.workers.split(","), args.graph.split(","), args.precision.split(","))
    )
    found = {(tuple(script), how): [] for script in scripts for how in machine}
    for _ in range(args.repeats):
        for script, (workers, graph, precision) in found:
            how = [
                "--workers",
                workers,
                "--graph" if graph == "on" else "--no-graph",
                "--precision",
                precision,
            ]
            words = [*DEFAULTS, "--rounds", str(args.rounds), *flags, *script[1:], *how]
            found[script, (workers, graph, precision)].append(measure(script[0], words))

    print(
        f"{'script':28} workers graph precision  samples/s   train  aggregate  evaluate  other s  host GiB  GPU GiB  time"
    )
    table = []
    for (script, how), runs in found.items():
        pairs = [
            (run, base) for run, base in zip(runs, found[tuple(scripts[0]), how]) if run and base
        ]
        if not pairs:
            continue
        one = pairs[0][0]
        row = {
            "script": shlex.join(script),
            "workers": one["workers"],
            "graph": how[1],
            "precision": how[2],
            "samples_per_s": statistics.median(1 / run["per_sample"] for run, _ in pairs),
            "seconds": {
                part: statistics.median(run["seconds"][part] for run, _ in pairs)
                for part in one["seconds"]
            },
            "host_bytes": max(run["host"] for run, _ in pairs),
            "device_bytes": one["device"],
            "repeats": len(pairs),
            "time": statistics.median(
                run["per_sample"] / base["per_sample"] for run, base in pairs
            ),
        }
        table.append(row)
        s, device = (
            row["seconds"],
            "      -" if one["device"] is None else f"{one['device'] / 2**30:7.2f}",
        )
        print(
            f"{row['script']:28} {row['workers']:7} {how[1]:>5} {how[2]:>9} {row['samples_per_s']:10,.0f} {s['train']:7.2f} "
            f"{s['aggregate'] + s['synchronise']:10.2f} {s['evaluate']:9.2f} {s['other']:8.2f} "
            f"{row['host_bytes'] / 2**30:9.2f} {device}  {row['time']:.2f}"
        )
    if not table:
        return 1
    machine = {key: one[key] for key in ("machine", "torch", "commit")}
    print(
        json.dumps({**machine, "flags": [*DEFAULTS, *flags], "rounds": args.rounds, "table": table})
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("throughput.py: error: interrupted", file=sys.stderr)
        sys.exit(130)
