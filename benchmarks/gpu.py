"""Check and measure what only a GPU runs: graphs, streams, precisions, memory, speed.

    python benchmarks/gpu.py machine correct      the parts named, of
        machine   versions; bytes/s of a copy and FLOP/s of a matrix product
        correct   every script and variant: the weights by CUDA graphs, with three workers and with
                  --workers auto against those of a run without graphs
        conduct   text, a resumed run, --deterministic after a run without, bf16
        memory    what evaluation takes with large images
        steps     ms of a step with 1 to 8 workers, with and without graphs, by precision
        layouts   the same, for both memory formats of images
        kernels   the kernels that take a step's time
        command   two rounds of fedalign.py --alpha 0.1 --clients 64 --sample 0.25
        rounds    a round of FedAlign's Table 5 beside the paper's, of FedMLB's cell and others
        loops     samples/s beside a bare and a conventional loop
    python benchmarks/gpu.py steps --only gradaug      of its cases those that hold a text

Each part is meant to fit in ten minutes. It needs no data set and no pytest. A case is a process of
its own; one that fails is a line that begins with FAIL, and the others go on. Then all of it is
printed as JSON. Exits with 1 if a case has failed. --small runs a small case of each part, on the
CPU too, where there are no graphs.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import functools
import importlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
import common  # noqa: E402
import engine  # noqa: E402
import run_folder  # noqa: E402
import extras.glyphs  # noqa: E402
from analysis import cost, runs  # noqa: E402

GLYPHS = "--dataset glyphs --clients 4 --rounds 2 --epochs 2 --batch-size 32 --quiet".split()
VARIANTS = """fedavg; fedprox; moon; mixup; stochdepth; gradaug; fedalign; fedcka; scaffold; fedmlb;
fedkd; fitnet; fedntd; fedgkd; feddyn; rfedavg; rfedavg_dp --noise-clip 1; rfedavg_code; qfedavg;
moon --frozen-mode train; fedcka --similarity-metric kernel-cka; scaffold --option 1;
scaffold --correction gradient; fedmlb --dyn-alpha 0.1; fedmlb --direction global-local;
rfedavg --variant rfedavg; rfedavg_code --variant rfedavg; fedntd --weighting-rule sum;
qfedavg --h rfedavg; stochdepth --rule code; gradaug --widths paper --subnets 1;
gradaug --subnets 4; fedalign --lip-scale none --lip-input full; fednova; ditto; fedper; fedbn"""
NETWORKS = """fedavg --model resnet18-gn; fedavg --model vgg9; fedavg --model mobilenet;
fedavg --model shufflenet; fedavg --model squeezenet; fedavg --model cnn --persist-opt;
fedavg --model cnn --augment rotate10,crop,flip; fedavg --model resnet56 --clip 1 --momentum 0;
fedavg --model cnn --optimizer rmsprop --lr 1e-4 --momentum 0; fedavg --model cnn --epochs 8"""
GN = "--model resnet18-gn --batch-size 50"
STEPS = f"""fedavg; fedalign; fedprox; scaffold; stochdepth; moon; gradaug --subnets 1;
gradaug --subnets 2; gradaug --subnets 4; fedavg {GN}; fedmlb {GN}; feddyn {GN};
fedavg --model resnet50; fedavg --model cnn-mcmahan"""
CELL = "--clients 100 --sample 0.05 --partition dirichlet-balanced --alpha 0.3 --momentum 0"
SHAPES = [
    f"fedavg {GN} --epochs 5 {CELL} --clip 10",
    f"fedmlb {GN} --epochs 5 {CELL} --clip 10",
    "fedavg --model cnn-mcmahan --clients 100 --sample 0.1 --batch-size 50 --partition iid",
    "fedavg --model cnn-mcmahan --clients 1000 --sample 0.05 --batch-size 10 --partition iid",
]
TABLE_5 = {  # row of the table: script
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon",
    "GradAug(n=1)": "gradaug --subnets 1",
    "GradAug(n=2)": "gradaug --subnets 2",
    "GradAug(n=3)": "gradaug --subnets 3",
    "GradAug(n=4)": "gradaug --subnets 4",
    "FedAlign": "fedalign",
}
EPOCHS = 4  # of Table 5's 20 that are run
IMAGES = (50_000, 10_000)  # to train on, to test on; --small has fewer
LOOPS = """bare --model resnet56; bare --model resnet18-gn --batch-size 50;
bare --model cnn-mcmahan --clients 100 --sample 0.1 --batch-size 50 --samples 50000;
bare --model cnn-mcmahan --clients 1000 --sample 0.05 --batch-size 10 --samples 50000;
conventional --model resnet56 --loaders 4,8 --repeats 1;
conventional --model resnet18-gn --batch-size 50 --loaders 4,8 --repeats 1"""


def listed(text):
    """Return the cases of a text, which semicolons separate."""
    return [" ".join(case.split()) for case in text.split(";")]


# --- runs


def random_images():
    """Return random images of CIFAR-100's shape."""
    samples, test = IMAGES
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples + test, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.arange(samples + test) % 100
    return common.Data(x[:samples], y[:samples], x[samples:], y[samples:], 100)


def random_text():
    """Return sentences of 1 to 20 random words, with the parity of their sum as label."""
    torch.manual_seed(0)
    shown = torch.arange(20) < torch.randint(1, 21, (400, 1))
    x = torch.randint(1, 50, (400, 20), dtype=torch.int16) * shown.short()
    y = x.long().sum(1) % 2
    return common.Data(x[:300], y[:300], x[300:], y[300:], 2, words=[str(i) for i in range(48)])


def train(script, words, out, **own):
    """Run a script on own data or network, if given; return (weights on the CPU, rows, config)."""
    run = functools.partial(common.run, **own)
    net, rows = importlib.import_module(script).main([*words, "--out", str(out)], run=run)
    config = json.loads(pathlib.Path(out, "config.json").read_text())
    return {k: v.cpu() for k, v in net.state_dict().items()}, rows, config


def difference(a, b):
    """Return the largest difference between two state_dicts."""
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


def compare(script, words, **own):
    """Return differences of weights between a run without graphs and other ways to run it."""
    words = [*words, "--deterministic"]
    ways = {
        "eager": ["--workers", "1", "--no-graph"],
        "graph": ["--workers", "1"],
        "three": ["--workers", "3"],
        "auto": ["--workers", "auto"],
    }
    one_core = mock.patch.object(common, "CORES", 1)  # on a CPU sums depend on the threads
    with tempfile.TemporaryDirectory() as out, one_core:
        found = {
            name: train(script, [*words, *way], pathlib.Path(out, name), **own)
            for name, way in ways.items()
        }
    weights = {name: tree for name, (tree, *_) in found.items()}
    finite = all(bool(v.isfinite().all()) for v in weights["graph"].values())
    close = all(
        torch.allclose(v.double(), weights["eager"][k].double(), rtol=1e-4, atol=1e-5)
        for k, v in weights["graph"].items()
    )
    row = {name: difference(weights["graph"], weights[name]) for name in ("eager", "three", "auto")}
    row |= {"graphs": found["graph"][2]["graph"], "loss": found["graph"][1][-1]["train_loss"]}
    row["ok"] = finite and close and row["graphs"] and not row["three"] and not row["auto"]
    return row


# --- the parts: each takes the words of a case and the device, and returns a dict of figures


def machine(words, device):
    """Versions, and how fast the GPU copies and multiplies."""
    size = 2**28 if device != "cpu" else 2**20
    x = torch.randn(size, device=device)
    y, a = torch.empty_like(x), torch.randn(4096 if device != "cpu" else 256, device=device)
    a = a.outer(a)
    copy = seconds(lambda: y.copy_(x), device, 20)
    product = seconds(lambda: a @ a, device, 20)
    return {
        "device": run_folder.hardware(device),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "commit": run_folder.commit(),
        "copy TB/s": 8 * size / copy / 1e12,
        "fp32 TFLOP/s": 2 * len(a) ** 3 / product / 1e12,
    }


def synchronise(device):
    """Wait for the GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(f, device, repeats):
    """Return the mean seconds of f()."""
    f()
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        f()
    synchronise(device)
    return (time.perf_counter() - start) / repeats


def correct(words, device):
    """Weights of a script's small run on glyphs, by graphs, streams and neither."""
    extras.glyphs.GLYPHS = (600, 200)
    script, *flags = words
    return compare(script, [*GLYPHS, "--device", device, "--lr-decay", "0.9", *flags])


def conduct(words, device):
    """What runs do beside training: one of text, resume, later, bf16."""
    extras.glyphs.GLYPHS = (600, 200)
    kind, *flags = words
    glyphs = [*GLYPHS, "--device", device]
    if kind == "text":
        script, *more = flags
        words = [*GLYPHS[2:], "--device", device, "--augment", "none", "--partition", "iid", *more]
        net = common.build_net("lstm", 2, 50, 16)
        torch.nn.init.normal_(net[0][0].vectors)
        return compare(script, words, data=random_text(), net=net)
    with tempfile.TemporaryDirectory() as out:
        a, b = pathlib.Path(out, "a"), pathlib.Path(out, "b")
        if kind == "resume":
            glyphs += ["--deterministic", *flags]
            whole = train("fedavg", [*glyphs, "--rounds", "3"], a)[0]
            train("fedavg", [*glyphs, "--rounds", "1"], b)
            cut = train("fedavg", ["--resume", "--rounds", "3", "--quiet"], b)[0]
            return {"resumed": difference(whole, cut), "ok": not difference(whole, cut)}
        if kind == "later":  # as in a notebook
            train("fedavg", [*glyphs, *flags], a)
            train("fedavg", [*glyphs, *flags, "--deterministic"], b)
            return {"ok": True}
        weights = train("fedavg", [*glyphs, *flags, "--precision", "bf16"], a)[0]
        return {"ok": all(bool(v.isfinite().all()) for v in weights.values())}


def memory(words, device):
    """GiB that evaluation reserves, beside the network and the images."""
    model, size, images = words[0], int(words[1]), int(words[2])
    args = common.flags("", "gpu").parse_args(["--device", device])
    common.set_up_device(args)
    x, y = torch.zeros(images, 3, size, size, dtype=torch.uint8), torch.zeros(images).long()
    data = common.Data(x, y, x, y, 100).to(device)
    net = common.build_net(model, 100, 3, size).to(device, memory_format=torch.channels_last)
    before = common.peak_memory(torch.device(device))
    took = seconds(lambda: common.evaluate(net, data, args), device, 1)
    peak = common.peak_memory(torch.device(device))
    return {"GiB": (peak - before) / 2**30, "images/s": images / took}


class Seats(NamedTuple):
    """Workers of a method in turns: each has a client that trains step by step."""

    device: str
    batches: list  # a generator of steps for each worker

    def run(self, steps):
        """Run so many steps of each worker; return (ms a step, of it the host's)."""
        synchronise(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            for batches in self.batches:
                next(batches)
        host = time.perf_counter() - start
        synchronise(self.device)
        total = time.perf_counter() - start
        return [1e3 * t / steps / len(self.batches) for t in (total, host)]


def seats(words, device, steps, short=False):
    """Return a function that seats so many workers of a script for that many steps.

    short: on batches of a bit over half the size, in place of full ones."""
    script, *flags = words
    wanted = f"--dataset cifar100 --device {device} --augment crop,flip --local-steps {steps}"
    call = runs.method_call(script, [*wanted.split(), *flags])
    size = call.args.batch_size
    samples = size // 2 + 5 if short else 4 * size
    data = cost.images(call.args, 8 * samples).to(common.set_up_device(call.args))
    net = common.prepare_net(data, call.args, call.method.adapt)
    server = {"round": 2, "clients": list(range(8))}
    weights, workers, parts = net.state_dict(), [], np.split(np.arange(8 * samples), 8)

    def seated(count):
        while len(workers) < count:
            workers.append(engine.Worker(net, data, call.args, steps))
        clients = [common.Client(k, part, {}, 1 / 8) for k, part in enumerate(parts)]
        rounds = [
            worker.train(client, server, weights, call.method.local_update)
            for worker, client in zip(workers[:count], clients)
        ]
        return Seats(device, rounds)

    return seated


def steps(words, device):
    """Ms of a step: with 1, 2, 4 and 8 workers, and without graphs; full and short batches."""
    count, row = (220, {}) if device != "cpu" else (4, {})
    warm = count // 2  # GradAug meets most of its parts
    seated = seats(words, device, count)
    for workers in (1, 2, 4, 8) if device != "cpu" else (1, 2):
        at_work = seated(workers)
        first, _ = at_work.run(1)
        at_work.run(warm)
        total, host = at_work.run(count - warm - 1)
        row |= {"first": first, "host": host} if workers == 1 else {}
        row[f"x{workers}"] = total
    if device != "cpu":
        row["GiB"] = torch.cuda.memory_reserved() / 2**30
    for name, more, short in (
        ("eager", ["--no-graph"], False),
        ("short", [], True),
        ("short eager", ["--no-graph"], True),
    ):
        at_work = seats([*words, *more], device, count // 2, short)(1)
        at_work.run(count // 4)
        row[name] = at_work.run(count // 4 - 1 or 1)[0]
    return row


def layouts(words, device):
    """steps() with images and weights in the memory format that the first word names."""
    layout, *words = words
    with mock.patch.object(torch, "channels_last", getattr(torch, layout)):
        return steps(words, device)


def kernels(words, device):
    """The kernels of a step: how many, ms of all, and of those that take the most."""
    kinds, cpu = torch.profiler.ProfilerActivity, device == "cpu"
    at_work = seats(words, device, 20)(1)
    at_work.run(5)
    with torch.profiler.profile(activities=[kinds.CPU if cpu else kinds.CUDA]) as profiler:
        at_work.run(10)

    def ms(event):
        return (event.self_cpu_time_total if cpu else event.self_device_time_total) / 1e4

    events = sorted(filter(ms, profiler.key_averages()), key=ms, reverse=True)
    row = {"kernels": sum(e.count for e in events) / 10, "ms": sum(map(ms, events))}
    return row | {"most": {f"{e.key[:90]} x{e.count / 10:.0f}": ms(e) for e in events[:15]}}


def two_rounds(words, device):
    """Seconds of two rounds on random images, to train and aggregate: the first one captures."""
    script, *flags = words
    flags = [*flags, "--rounds", "2", "--eval-every", "2", "--device", device, "--quiet"]
    with tempfile.TemporaryDirectory() as out:
        _, rows, config = train(script, flags, pathlib.Path(out, "run"), data=random_images())
    times = [row["seconds"]["train"] + row["seconds"]["aggregate"] for row in rows]
    return {
        "first": times[0],
        "second": times[1],
        "samples/s": rows[1]["samples"] / times[1],
        "evaluate": rows[1]["seconds"]["evaluate"],
        "workers": config["workers"],
        "graphs": config.get("graph"),
        "GiB": rows[1]["peak_memory"] / 2**30,
    }


def rounds(words, device):
    """two_rounds(); a row of Table 5, which the first word may name, on a part of its epochs."""
    if words[0] not in TABLE_5:
        return two_rounds(words, device)
    label, *more = words
    script, *flags = TABLE_5[label].split()
    row = two_rounds([script, *flags, "--drop-last", "--epochs", str(EPOCHS), *more], device)
    row["20 epochs"] = row["second"] * 20 / EPOCHS
    row["paper"] = papers_seconds()[label]
    return row | {"paper / ours": row["paper"] / row["20 epochs"]}


def papers_seconds():
    """Return {row of FedAlign's Table 5: seconds a round on four RTX 2080 Ti}."""
    with open(ROOT / "reproduce" / "published.csv") as f:
        table = [row[5:8] for row in csv.reader(f) if row[:2] == ["FedAlign", "5"]]
    return {row: float(value) for row, kind, value in table if kind == "time_s_per_round"}


def loops(words, device):
    """What benchmarks/loops.py prints as JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        importlib.import_module("loops").main([*words, "--device", device])
    return json.loads(printed.getvalue().splitlines()[-1])


def networks_of(script):
    """Return the cases of a script of VARIANTS: on both networks, or with what it needs."""
    if "stochdepth" in script or "--frozen-mode" in script:
        return [f"{script} --model resnet56"]
    return [f"{script} --model {model}" for model in ("cnn", "resnet56")]


class Part(NamedTuple):
    """A function of (words, device), its cases, and its small one."""

    measure: Callable
    cases: list
    small: str
    jobs: int = 1  # cases at a time, of those that measure no time


PRECISIONS = [
    f"{script} --precision {precision}"
    for script in ("fedavg", "fedalign", f"fedavg {GN}")
    for precision in ("fp32", "bf16")
]
TYPICAL = "fedalign --alpha 0.1 --clients 64 --sample 0.25"
PARTS = {
    "machine": Part(machine, [""], ""),
    "correct": Part(
        correct,
        [case for script in listed(VARIANTS) for case in networks_of(script)] + listed(NETWORKS),
        "fedprox --model cnn --epochs 1",
        5,
    ),
    "conduct": Part(
        conduct,
        ["resume", "resume --model resnet56", "later", "bf16 --model resnet56"]
        + [f"text {script}" for script in ("fedavg", "moon", "fedmlb", "rfedavg")]
        + ["text fedavg --optimizer rmsprop --lr 1e-4 --momentum 0 --persist-opt"],
        "text fedavg --epochs 1",
        3,
    ),
    "memory": Part(
        memory,
        ["resnet56 32 2000", "resnet50 32 2000", "resnet18 224 2000", "resnet50 64 2000"],
        "cnn 32 50",
    ),
    "steps": Part(steps, listed(STEPS) + PRECISIONS, "fedprox --model cnn --batch-size 8"),
    "layouts": Part(
        layouts,
        [
            f"{layout} {script} --precision {precision}"
            for script in ("fedavg", f"fedavg {GN}")
            for precision in ("tf32", "fp32", "bf16")
            for layout in ("channels_last", "contiguous_format")
        ],
        "contiguous_format fedavg --model cnn --batch-size 8",
    ),
    "kernels": Part(
        kernels,
        ["fedavg", "fedalign", "gradaug --subnets 2", f"fedavg {GN}"],
        "fedavg --model cnn --batch-size 8",
    ),
    "command": Part(
        two_rounds,
        [f"{TYPICAL} --epochs 5", f"{TYPICAL} --epochs 10"],
        f"{TYPICAL} --model cnn --clients 4 --epochs 1",
    ),
    "rounds": Part(rounds, [*TABLE_5, *SHAPES], "FedAvg --model cnn --clients 4 --epochs 1"),
    "loops": Part(loops, listed(LOOPS), "bare --samples 200 --clients 2 --repeats 1"),
}


# --- the command


def run_case(name, case, args):
    """Run a case of a part. Return its row: part, case, ok, took and figures, or an error."""
    start = time.perf_counter()
    row = {"part": name, "case": case, "ok": True}
    try:
        figures = in_a_process(name, case, args) if args.processes else here(name, case, args)
    except Exception as e:
        text = str(e).strip().splitlines()
        figures = {"ok": False, "error": f"{type(e).__name__}: {text[-1][:300] if text else ''}"}
    return row | figures | {"took": time.perf_counter() - start}


def here(name, case, args):
    """Run a case in this process; a SystemExit is an error like others."""
    try:
        return PARTS[name].measure(case.split(), args.device)
    except SystemExit as e:
        raise RuntimeError(f"exit code {e.code}") from None


def in_a_process(name, case, args):
    """Run a case in a process of its own. Return what it prints last."""
    command = [sys.executable, __file__, name, "--case", case, "--device", args.device]
    command += ["--small"] if args.small else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    if done.returncode:
        raise RuntimeError(done.stderr)
    warned = {line.strip()[:200] for line in done.stderr.splitlines() if "Warning" in line}
    warned |= {line for line in done.stderr.splitlines() if "CUDA graph" in line}
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures | ({"warned": sorted(warned)} if warned else {})


def show(row):
    """Print a row: ok or FAIL, part, case, then its figures."""

    def text(value):
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print(
        "ok  " if row["ok"] else "FAIL", f"{row['part']:8} {row['case']}", f"({row['took']:.1f} s)"
    )
    figures = {k: v for k, v in row.items() if k not in ("part", "case", "ok", "took")}
    nested = {k: v for k, v in figures.items() if isinstance(v, dict)}
    line = "  ".join(f"{k} {text(v)}" for k, v in figures.items() if k not in nested)
    print(f"     {line}", flush=True)
    for table in nested.values():
        for key, value in table.items():
            print(f"       {text(value):>8} {key}", flush=True)


def parse_flags(argv):
    """Return the flags of argv; exits for a part that there is not, and for a GPU that is not."""
    parser = common.PlainParser(__doc__, prog="benchmarks/gpu.py")
    add = parser.add_argument
    add("parts", nargs="+", metavar="PART", choices=PARTS, help=f"of {', '.join(PARTS)}")
    add("--only", default="", metavar="TEXT", help="only cases that hold it")
    add("--device", type=common.device_name, default="cuda", help="cuda, cuda:N or cpu")
    add("--small", action="store_true", help="a small case of each part")
    add("--limit", type=common.number(int, 1), default=300, help="seconds of a case")
    add(
        "--processes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run each case in a process of its own",
    )
    add("--case", help=argparse.SUPPRESS)  # what such a process runs
    return parser.parse_args(argv)


def main(argv=None):
    """Run the cases of the parts; print a table and JSON. Return the exit code."""
    global IMAGES
    args = parse_flags(argv)
    if args.small:
        IMAGES = (400, 50)
    if args.case is not None:
        print(json.dumps(here(args.parts[0], args.case, args)))
        return 0
    table = []
    for name in args.parts:
        part = PARTS[name]
        cases = [case for case in ([part.small] if args.small else part.cases) if args.only in case]
        with concurrent.futures.ThreadPoolExecutor(part.jobs if args.processes else 1) as pool:
            for row in pool.map(lambda case, name=name: run_case(name, case, args), cases):
                show(row)
                table.append(row)
    print(
        json.dumps(
            {
                "device": run_folder.hardware(args.device),
                "commit": run_folder.commit(),
                "table": table,
            }
        )
    )
    return int(not table or not all(row["ok"] for row in table))


if __name__ == "__main__":
    sys.exit(main())
