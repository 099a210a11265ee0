"""Measure what a federation costs besides training, by the number of its clients.

    python benchmarks/population.py
    python benchmarks/population.py --scripts scaffold,moon --populations 100,100000 --rounds 200

Each client has four images of 8x8 pixels and a round samples 50 clients, so that whatever grows
does so with the population. Every run is a process of its own, on the CPU. Columns, by script and
population (seconds; medians over the rounds but the first):

    start        partition, network and run folder
    round        a round beyond local training and checkpoint: sampling, aggregation, records
    checkpoint   one checkpoint; MB: checkpoint.pt and states/ after the last round
    resume       start once more, from the checkpoint
    peak GB      largest resident memory of the run; growth MB: of it in the run's second half

Other flags go to the scripts, such as --partition iid. Prints the table, then JSON.
"""

import concurrent.futures
import functools
import importlib
import json
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.nn as nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import engine  # noqa: E402
import run_folder  # noqa: E402

SAMPLED, SAMPLES, FEATURES = 50, 4, 256  # clients a round, images a client, width of features
FLAGS = "--partition iid --local-steps 1 --batch-size 4 --eval-every 1000000 --device cpu --quiet"
BEYOND = ("aggregate", "synchronise", "other")  # parts of a round beyond training


def small_data(clients):
    """Return random images, four a client, as a Data."""
    n, g = SAMPLES * clients, torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 1, 8, 8), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (n,), generator=g)
    return common.Data(x, y, x[:100], y[:100], classes=10)


def small_net():
    """Return a network of about 7,000 parameters with FEATURES features."""
    body = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU())
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, FEATURES), nn.ReLU())
    return nn.Sequential(body, pool, common.Classifier(FEATURES, 10))


def timed(owner, name):
    """Let each call of owner.name add its seconds to a list. Return the list."""
    call, seconds = getattr(owner, name), []

    def wrapper(*words, **options):
        start = time.perf_counter()
        found = call(*words, **options)
        seconds.append(time.perf_counter() - start)
        return found

    setattr(owner, name, wrapper)
    return seconds


def run(script, clients, flags):
    """Run a script in this process, whose functions it changes.

    Returns the rows of metrics.jsonl, the seconds of the start, and those of each checkpoint."""
    begin, checkpoints = timed(engine, "begin"), timed(run_folder.RunFolder, "checkpoint")
    torch.manual_seed(0)
    call = functools.partial(common.run, data=small_data(clients), net=small_net())
    sample = str(min(1.0, SAMPLED / clients))
    words = [*FLAGS.split(), "--clients", str(clients), "--sample", sample, *flags]
    _, rows = importlib.import_module(script).main(words, run=call)
    return rows, begin[0], checkpoints


def in_process(f, *words):
    """Return f(*words), called in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(f, *words).result()


def measure(script, clients, rounds, flags):
    """Return the figures of a run of that many rounds and of one more after it is resumed."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "run")
        words = [*flags, "--out", str(out), "--rounds", str(rounds)]
        rows, start, checkpoints = in_process(run, script, clients, words)
        files = [out / "checkpoint.pt", *(out / "states").glob("*")]
        size = sum(path.stat().st_size for path in files)
        words[-1] = str(rounds + 1)
        _, resume, _ = in_process(run, script, clients, [*words, "--resume"])
    parts = [row["seconds"] for row in rows[1:]]
    beyond = [sum(part.get(name, 0) for name in BEYOND) for part in parts]
    beyond = [s - checkpoint for s, checkpoint in zip(beyond, checkpoints)]  # of the round before
    peaks = [row["peak_memory"] for row in rows]
    row = {"script": script, "clients": clients, "start": start}
    row |= {"round": statistics.median(beyond), "checkpoint": statistics.median(checkpoints[1:])}
    row |= {"MB": size / 1e6, "resume": resume, "peak GB": peaks[-1] / 1e9}
    return row | {"growth MB": (peaks[-1] - peaks[len(peaks) // 2]) / 1e6}


def main(argv=None):
    """Measure all scripts at all populations; print the table, and the same as JSON."""
    parser = common.PlainParser(__doc__, prog="population.py")
    add, populations = parser.add_argument, "100,1000,10000,100000,1000000"
    add("--scripts", default="fedavg,scaffold,moon,rfedavg", metavar="LIST")
    add("--populations", type=common.integers(1), default=populations, metavar="LIST")
    add("--rounds", type=common.number(int, 3), default=20, help="rounds of a run")
    args, flags = parser.parse_known_args(argv)
    scripts, table = args.scripts.split(","), []
    for script in scripts:
        if not pathlib.Path(common.__file__).with_name(f"{script}.py").is_file():
            parser.error(f"argument --scripts: there is no {script}.py")
    for clients in args.populations:
        for script in scripts:
            table.append(measure(script, clients, args.rounds, flags))
            if len(table) == 1:
                print(*(f"{name:>10}" for name in table[0]))
            script, clients, *figures = table[-1].values()
            print(f"{script:>10} {clients:10,}", *(f"{v:10.4g}" for v in figures), flush=True)
    about = {"machine": run_folder.hardware("cpu"), "torch": torch.__version__}
    about |= {"commit": run_folder.commit(), "rounds": args.rounds, "flags": flags}
    print(json.dumps({**about, "table": table}))


if __name__ == "__main__":
    with common.one_line_errors("population"):
        main()
