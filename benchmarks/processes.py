"""Compare the training throughput of one process with that of as many ranks of torchrun.

One process with N workers and N ranks with one each take turns on the same run; both have one
thread a worker. A round's samples/s are those of training, the exchange, aggregation and a second
synchronisation; the first round, which warms up, is left out. Prints a line a repeat, then medians,
their ratio and the bytes that the clients of a round send, then the same as JSON. Other flags go to
the script:

    python benchmarks/processes.py
    python benchmarks/processes.py --script scaffold --ranks 4 --clients 100 --sample 0.1
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULTS = "--dataset glyphs --model cnn --clients 10 --partition iid --epochs 1 --rounds 4".split()


def measure(ranks, script, flags):
    """Return samples/s, the median over the rounds but the first, and the bytes sent in a round.

    ranks: of torchrun, or 1 for one process with as many workers as --workers in flags says."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(ROOT / f"{script}.py"), *flags, "--quiet", "--out", f"{folder}/run"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)
        lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    parts = ("train", "aggregate", "synchronise")
    seconds = [sum(row["seconds"].get(part, 0) for part in parts) for row in rows]
    rates = [row["samples"] / time for row, time in zip(rows, seconds)]
    return statistics.median(rates[1:] or rates), rows[-1]["bytes_up"]


def main(argv=None):
    """Measure both in turns and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--script", default="fedavg", help="a method script")
    parser.add_argument("--ranks", type=int, default=2, help="of torchrun; workers of one process")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    args, flags = parser.parse_known_args(argv)
    if not (ROOT / f"{args.script}.py").is_file():
        parser.error(f"argument --script: there is no {args.script}.py")
    if args.ranks < 2 or args.repeats < 1:
        parser.error("argument --ranks, --repeats: two ranks and one repeat are the least")
    found = {"workers": [], "ranks": []}
    for _ in range(args.repeats):
        for kind, ranks, workers in (("workers", 1, args.ranks), ("ranks", args.ranks, 1)):
            words = [*DEFAULTS, *flags, "--workers", str(workers)]
            rate, sent = measure(ranks, args.script, words)
            found[kind].append(rate)
        print(
            "samples/s: {:,.0f} of workers, {:,.0f} of ranks".format(
                *(v[-1] for v in found.values())
            )
        )
    figures = {kind: statistics.median(rates) for kind, rates in found.items()}
    pairs = zip(found["ranks"], found["workers"])
    figures["ratio"] = statistics.median(ranks / workers for ranks, workers in pairs)
    figures["bytes"] = sent
    print(
        "medians: {workers:,.0f} and {ranks:,.0f}, ratio {ratio:.2f}; {bytes:,} bytes".format(
            **figures
        )
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
