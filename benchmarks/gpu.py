"""Check and measure what only a GPU runs: graphs, streams, precisions, memory, speed.

    python benchmarks/gpu.py correct nccl      the parts named, of
        correct   every script and variant: weights by CUDA graphs against those without, of several
                  workers, of a resumed run, of --plain and of the CPU
        nccl      a run under torchrun with one rank, against one without
        command   the README's command and its accuracy; two rounds of a typical one of FedAlign
        memory    what the GPU and the host hold after each of 50 rounds
        rounds    a round of FedAlign's Table 5 beside the paper's, of FedMLB's cell and others
        steps     ms of a step with 1 to 8 workers, with and without graphs, by precision
        kernels   the kernels that take a step's time
    python benchmarks/gpu.py steps --only gradaug      of its cases those that hold a text
    python benchmarks/gpu.py kernels --compile         and each case with compiled blocks too

It needs no data set and no pytest. A case is a process of its own, and a line of JSON as soon as it
is done: one that fails, or loses its graphs, says "ok": false, and the others go on. Exits with 1
if one has failed. "off / move": how far a replay was off its step, at most, as a share of how far
the step moved (engine.REPLAY_TOLERANCE is for it).
docs/speed.md says which calls to make. --small runs a small case of each part, on the CPU too,
where there are no graphs.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import csv
import functools
import gc
import importlib
import json
import os
import mmap
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
import common  # noqa: E402
import engine  # noqa: E402
import run_folder  # noqa: E402
import extras.glyphs  # noqa: E402
from analysis import runs, synthetic  # noqa: E402

SMALL = "--clients 4 --rounds 2 --epochs 2 --batch-size 32 --lr-decay 0.9 --quiet".split()
CORRECT = """fedavg; fedprox; moon; mixup; stochdepth; gradaug; fedalign; fedcka; scaffold; fedmlb;
fedkd; fitnet; fedntd; fedgkd; feddyn; rfedavg; rfedavg_dp --noise-clip 1; rfedavg_code; qfedavg;
moon --frozen-mode train; fedcka --similarity-metric kernel-cka; scaffold --option 1;
gradaug --mu 0; scaffold --correction gradient; fedmlb --dyn-alpha 0.1;
fedmlb --direction global-local; rfedavg --variant rfedavg; rfedavg_code --variant rfedavg;
fedntd --weighting-rule sum; qfedavg --h rfedavg; stochdepth --rule code;
gradaug --widths paper --subnets 1; gradaug --subnets 4;
fedalign --lip-scale none --lip-input full; fednova; ditto; fedper; fedbn;
fedavg --model resnet56 --clip 1 --momentum 0; fedalign --model resnet56; fedavg --model vgg9;
fedavg --model resnet18-gn; fedavg --model mobilenet; fedavg --model shufflenet;
fedavg --model squeezenet; fedavg --model cnn --persist-opt; fedavg --model cnn --epochs 8;
fedavg --augment rotate10,crop,flip; text fedavg; text moon; text fedmlb; text rfedavg;
fedavg --model cnn --optimizer rmsprop --lr 1e-4 --momentum 0"""
GN = "--model resnet18-gn --batch-size 50"
STEPS = f"""fedavg; fedavg --precision fp32; fedavg --precision bf16; fedalign; fedprox; scaffold;
fedalign --precision fp32; fedalign --precision bf16; stochdepth; moon; gradaug --subnets 1;
gradaug --subnets 2; gradaug --subnets 4; fedavg {GN}; fedavg {GN} --precision fp32;
fedavg {GN} --precision bf16; fedmlb {GN}; feddyn {GN}; fedavg --model resnet50;
fedavg --model cnn-mcmahan"""
KERNELS = f"fedavg; fedavg --precision fp32; fedalign; gradaug --subnets 2; fedavg {GN}"
CELL = "--clients 100 --sample 0.05 --partition dirichlet-balanced --alpha 0.3 --momentum 0"
TABLE_5 = ["FedAvg", "FedProx", "MOON", *(f"GradAug(n={n})" for n in range(1, 5)), "FedAlign"]
ROUNDS = f"""{"; ".join(TABLE_5)};
fedavg {GN} --epochs 5 {CELL} --clip 10; fedmlb {GN} --epochs 5 {CELL} --clip 10;
fedavg --model cnn-mcmahan --clients 100 --sample 0.1 --batch-size 50 --partition iid;
fedavg --model cnn-mcmahan --clients 1000 --sample 0.05 --batch-size 10 --partition iid"""
WAYS = {  # to run a case of correct
    "graph": "--workers 1",
    "eager": "--workers 1 --no-graph",
    "three": "--workers 3",
    "auto": "",
    "plain": "--plain",
}
EPOCHS = 4  # of Table 5's 20 that are run
README = "--dataset glyphs --model resnet8 --clients 10 --rounds 10 --epochs 1"
README += " --lr 0.1 --lr-decay 0.8"
TYPICAL = "fedalign --alpha 0.1 --clients 64 --sample 0.25"
COMMANDS = f"readme; {TYPICAL} --epochs 5; {TYPICAL} --epochs 10"
IMAGES = (50_000, 10_000)  # to train on, to test on; --small has fewer


# --- runs


def random_images(most=10**9):
    """Return random images of CIFAR-100's shape, at most so many to train on."""
    shape = argparse.Namespace(dataset="cifar100", image_size=None, seed=0)
    return synthetic.images(shape, min(IMAGES[0], most), IMAGES[1])


def numbers(weights):
    """Return all numbers of a state_dict as one vector on the CPU, in float64."""
    return torch.cat([v.double().flatten().cpu() for v in weights.values()])


def train(script, words, out=None, **own):
    """Run a script on own data or network, if given; return (its numbers, rows, config.json)."""
    run = functools.partial(common.run, **own)
    with tempfile.TemporaryDirectory() as folder:
        out = out or f"{folder}/run"
        net, rows = importlib.import_module(script).main([*words, "--out", out], run=run)
        config = json.loads(pathlib.Path(out, "config.json").read_text())
    return numbers(net.state_dict()), rows, config


# --- the parts: each takes the words of a case and the device, and returns a dict of figures


def correct(words, device):
    """Differences between the weights of a small run by CUDA graphs and by other ways."""
    extras.glyphs.GLYPHS, own = (600, 200), {}
    if words[0] == "text":
        _, *words = [*words, "--augment", "none", "--partition", "iid"]
        own = synthetic.text(400, 20)
    script, *flags = words
    flags = ["--dataset", "cifar10" if own else "glyphs", "--model", "resnet8", *SMALL, *flags]
    flags += ["--deterministic", "--precision", "fp32", "--device", device]
    found = {}
    with tempfile.TemporaryDirectory() as out, mock.patch.object(common, "CORES", 1):
        for name, way in WAYS.items():
            found[name] = train(script, [*flags, *way.split()], **own)
        more, out = "--resume --rounds 2 --quiet".split(), f"{out}/run"
        train(script, [*flags, "--workers", "1", "--rounds", "1"], out, **own)
        found["resumed"] = train(script, more, out, **own)
        beside = beside_the_cpu(script, flags, own)
    (graph, rows, config), weights = found.pop("graph"), {k: run[0] for k, run in found.items()}
    row = {name: float((v - graph).abs().max()) for name, v in weights.items()} | beside
    row |= {"graphs": config["graph"], "loss": rows[-1]["train_loss"]}
    same = row["three"] == row["auto"] == row["resumed"] == 0
    near = functools.partial(torch.allclose, graph, rtol=1e-4, atol=1e-5)
    close = near(weights["eager"]) and near(weights["plain"])
    close = close and row["cpu"] < min(0.5, max(1e-3, 10 * row["native"]))
    return row | {"ok": close and same and row["graphs"]}


def beside_the_cpu(script, flags, own):
    """Return how far two rounds of two steps end from the CPU's, over how far its parameters move.

    Training makes any rounding grow, so the learning rate is small, and "native" has the same
    share for the CPU beside itself: with PyTorch's own kernels in place of oneDNN's."""
    short = "--workers 1 --local-steps 2 --lr 1e-3".split()

    def weights(*device):
        return train(script, [*flags, *short, *device], **own)[0]

    cpu = "--device", "cpu"
    call = runs.method_call(script, [*flags, *cpu])
    net = common.begin(call.args, call.method.adapt, own.get("data"), own.get("net")).net
    trained = {key: torch.ones_like(value) for key, value in net.named_parameters()}
    zeros = {key: torch.zeros_like(value) for key, value in net.state_dict().items()}
    ours, theirs, where = weights(), weights(*cpu), numbers(zeros | trained) > 0
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # None: not set
        native = weights(*cpu)
    move = (theirs - numbers(net.state_dict()))[where].norm()
    off = {"cpu": ours - theirs, "native": native - theirs}
    return {name: float(v[where].norm() / move) for name, v in off.items()}


NCCL = """
import sys, common, extras.glyphs, {script}
extras.glyphs.GLYPHS = (600, 200)
common.CORES = 1
common.under_torchrun = lambda: True  # with one rank too
{script}.main(sys.argv[1:])
"""


def nccl(words, device):
    """How far a run of one rank under torchrun, on a GPU by NCCL, ends from one without."""
    extras.glyphs.GLYPHS = (600, 200)
    script, *flags = words
    flags = ["--dataset", "glyphs", *SMALL, "--workers", "1", "--device", device, *flags]
    flags += ["--deterministic", "--out"]
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 1 --no-python".split()
    code = [sys.executable, "-c", NCCL.format(script=script)]
    with tempfile.TemporaryDirectory() as out, mock.patch.object(common, "CORES", 1):
        alone = train(script, flags[:-1])[0]
        command = [sys.executable, *torchrun, *code, *flags, f"{out}/ranks"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        ranks = numbers(run_folder.load(pathlib.Path(out, "ranks", "model.pt")))
        graphs = run_folder.read_config(pathlib.Path(out, "ranks"))["graph"]
    off = float((alone - ranks).abs().max())
    return {"ranks": off, "graphs": graphs, "ok": graphs and not off}


def command(words, device):
    """The README's command, of which a CPU gives 85.1%; or two_rounds() of another."""
    if words != ["readme"]:
        return two_rounds(words, device)
    began = time.perf_counter()
    _, rows, config = train("fedavg", [*README.split(), "--device", device, "--quiet"])
    figures = {"accuracy": rows[-1]["test_acc"], "seconds": time.perf_counter() - began}
    return figures | {"workers": config["workers"], "ok": abs(figures["accuracy"] - 85.1) < 4}


def memory(words, device):
    """MiB after each round: what tensors hold of the GPU, and the process of the host; the peak."""
    flags = ["--model", "resnet8", *SMALL, "--rounds", "50", *words[1:], "--device", device]
    held, host = [], []

    def on_round(row, net):
        gc.collect()  # tensors in cycles would count until Python happens to look
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        host.append(round(pages * mmap.PAGESIZE / 2**20, 1))
        held.append(0 if device == "cpu" else round(torch.cuda.memory_allocated() / 2**20, 1))

    _, rows, _ = train(words[0], flags, data=random_images(2000), on_round=on_round)
    early = len(rows) // 5
    ok = held[-1] <= 1.02 * held[early] and host[-1] <= 1.05 * host[early]
    peak = rows[-1]["peak_memory"] / 2**30
    return {"MiB": held, "host MiB": host, "peak GiB": peak, "ok": ok}


def ms_of(device, rounds, steps):
    """Run so many steps of each of rounds, generators; return (ms a step, of it the host's)."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        for batches in rounds:
            next(batches)
    host = time.perf_counter() - start
    wait()
    return [1e3 * t / steps / len(rounds) for t in (time.perf_counter() - start, host)]


def seats(words, device, steps, short=False):
    """Return a function that seats so many workers of a script, and returns ms_of() their steps.

    short: on batches of a bit over half the size, in place of full ones."""
    wanted = f"--dataset cifar100 --device {device} --augment crop,flip --local-steps {steps}"
    call = runs.method_call(words[0], [*wanted.split(), *words[1:]])
    size = call.args.batch_size
    samples = size // 2 + 5 if short else 4 * size
    data = synthetic.images(call.args, 8 * samples).to(common.set_up_device(call.args))
    net = common.prepare_net(data, call.args, call.method.adapt)
    server = {"round": 2, "clients": list(range(8))}
    weights, workers, parts = net.state_dict(), [], np.split(np.arange(8 * samples), 8)

    def seated(count):
        while len(workers) < count:
            workers.append(engine.Worker(net, data, call.args, steps))
        return functools.partial(ms_of, device, [*map(begin, range(count))])

    def begin(k):
        client = common.Client(k, parts[k], {}, 1 / 8)
        return workers[k].train(client, server, weights, call.method.local_update)

    return seated


def steps(words, device):
    """Ms of a step: with 1, 2, 4 and 8 workers, and without graphs; of a short batch too."""
    count, most, row = (220, 8, {}) if device != "cpu" else (4, 2, {})
    seated = seats(words, device, count)
    for workers in [n for n in (1, 2, 4, 8) if n <= most]:
        run = seated(workers)
        run(count // 2)  # GradAug meets most of its parts
        row[f"x{workers}"], host = run(count - count // 2)
        row.setdefault("host", host)
    if device != "cpu":
        row["GiB"] = torch.cuda.memory_reserved() / 2**30
    for name, flags, short in ("eager", ["--no-graph"], False), ("short", [], True):
        run = seats([*words, *flags], device, count // 2, short)(1)
        run(count // 4)
        row[name] = run(count // 4)[0]
    return row


def kernels(words, device):
    """The kernels of a step: how many, ms of it, of all kernels and of those that take the most."""
    kinds, cpu = torch.profiler.ProfilerActivity, device == "cpu"
    run = seats(words, device, 20)(1)
    wall, _ = run(5)
    with torch.profiler.profile(activities=[kinds.CPU if cpu else kinds.CUDA]) as profiler:
        run(10)

    def ms(event):
        return (event.self_cpu_time_total if cpu else event.self_device_time_total) / 1e4

    events = sorted(filter(ms, profiler.key_averages()), key=ms, reverse=True)
    row = {"kernels": sum(e.count for e in events) / 10, "step": wall, "ms": sum(map(ms, events))}
    return row | {"most": {f"{e.key[:90]} x{e.count / 10:.0f}": ms(e) for e in events[:15]}}


def two_rounds(words, device):
    """Seconds of two rounds on random images, to train and aggregate: the first one captures."""
    flags = [*words[1:], "--rounds", "2", "--eval-every", "2", "--device", device, "--quiet"]
    _, rows, config = train(words[0], flags, data=random_images())
    first, second = (row["seconds"]["train"] + row["seconds"]["aggregate"] for row in rows)
    row = {"first": first, "second": second, "samples/s": rows[1]["samples"] / second}
    row |= {"evaluate": rows[1]["seconds"]["evaluate"], "GiB": rows[1]["peak_memory"] / 2**30}
    return row | {"workers": config["workers"], "graphs": config.get("graph")}


def rounds(words, device):
    """two_rounds(); a row of Table 5, which the first word may name, on a part of its epochs."""
    if words[0] not in TABLE_5:
        return two_rounds(words, device)
    label, *more = words
    script = label.lower().replace("(n=", " --subnets ").removesuffix(")").split()
    row = two_rounds([*script, "--drop-last", "--epochs", str(EPOCHS), *more], device)
    row["20 epochs"] = row["second"] * 20 / EPOCHS
    row["paper"] = papers_seconds()[label]
    return row | {"paper / ours": row["paper"] / row["20 epochs"]}


def papers_seconds():
    """Return {row of FedAlign's Table 5: seconds a round on four RTX 2080 Ti}."""
    with open(ROOT / "reproduce" / "published.csv") as f:
        table = [row[5:8] for row in csv.reader(f) if row[:2] == ["FedAlign", "5"]]
    return {row: float(value) for row, kind, value in table if kind == "time_s_per_round"}


def listed(text):
    """Return the cases of a text, which semicolons separate."""
    return [" ".join(case.split()) for case in text.split(";")]


FEW = "--clients 4 --epochs 1"  # of the small cases
# a function of (words, device), its cases, a small one; cases at a time, where no time is measured
Part = collections.namedtuple("Part", "measure cases small jobs", defaults=[1])
PARTS = {
    "correct": Part(correct, CORRECT, "text fedprox --clients 4 --batch-size 4 --local-steps 2", 6),
    "nccl": Part(nccl, "fedavg --model resnet8; rfedavg --model cnn", "fedavg --model cnn"),
    "command": Part(command, COMMANDS, f"{TYPICAL} --model cnn {FEW}"),
    "memory": Part(
        memory, "fedavg; gradaug; moon", "fedavg --model cnn --rounds 5 --local-steps 3", 3
    ),
    "rounds": Part(rounds, ROUNDS, f"FedAvg --model cnn {FEW}"),
    "steps": Part(steps, STEPS, "fedprox --model cnn --batch-size 8"),
    "kernels": Part(kernels, KERNELS, "fedavg --model cnn --batch-size 8"),
}


# --- the command


def run_case(name, case, args):
    """Run a case; print its row: part, case, ok, seconds and figures, or an error. Return ok."""
    start = time.perf_counter()
    row = {"part": name, "case": case, "ok": True}
    try:
        row |= in_a_process(name, case, args) if args.processes else here(name, case, args)
    except Exception as e:
        text = str(e).strip().splitlines()
        row |= {"ok": False, "error": f"{type(e).__name__}: {text[-1][:300] if text else ''}"}
    row |= {"seconds": time.perf_counter() - start, "commit": run_folder.commit()}
    row |= {"device": run_folder.hardware(args.device), "torch": torch.__version__}
    short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(short), flush=True)
    return row["ok"]


def here(name, case, args):
    """Run a case in this process. Return its figures."""
    words, compiled, seen = case.split(), contextlib.nullcontext(), {}
    if words[:1] == ["compiled"]:
        _, *words = words
        compiled = mock.patch.object(engine.Worker, "copy", compiled_copy)
    with compiled, watched(seen):
        return PARTS[name].measure(words, args.device) | seen


@contextlib.contextmanager
def watched(seen):
    """Note in a dict how far replays are off their steps, and that a run goes on without graphs."""
    error, prepare, shares = engine.replay_error, engine.Worker._prepare, []

    def noted(*lists):
        shares.append(error(*lists))
        seen["off / move"] = float(np.max(shares))  # or not a number
        return shares[-1]

    def prepared(worker, *call):
        prepare(worker, *call)
        if not worker.args.capture:
            seen.update(ok=False, error="it has lost its graphs")
        if not worker.compares:
            seen.update(ok=False, error="it has no memory to compare its graphs")

    patched = mock.patch.object(engine.Worker, "_prepare", prepared)
    with patched, mock.patch.object(engine, "replay_error", noted):
        yield


def compiled_copy(worker):
    """Return PlainWorker.copy(), whose blocks go through torch.compile."""
    net = common.PlainWorker.copy(worker)
    torch._dynamo.config.recompile_limit = 10_000  # blocks of all workers share their code
    for block in net.children():
        block.compile(backend="eager" if worker.device.type == "cpu" else "inductor")
    return net


def in_a_process(name, case, args):
    """Run a case in a process of its own. Return what it prints last."""
    words = [sys.executable, __file__, name, "--case", case, "--device", args.device]
    words += ["--small"] * args.small
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=args.limit)
        finally:
            with contextlib.suppress(ProcessLookupError):  # torchrun and its processes too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(err)
    said = [line[:200] for line in err.splitlines() if "Warning" in line or "CUDA" in line]
    return json.loads(out.splitlines()[-1]) | ({"warned": sorted(set(said))} if said else {})


def main(argv=None):
    """Run the cases of the parts, each a line of JSON. Return the exit code."""
    global IMAGES
    parser = common.PlainParser(__doc__, prog="benchmarks/gpu.py")
    add, on_off = parser.add_argument, argparse.BooleanOptionalAction
    add("parts", nargs="+", metavar="PART", choices=PARTS, help=f"of {', '.join(PARTS)}")
    add("--only", default="", metavar="TEXT", help="only cases that hold it")
    add("--device", type=common.device_name, default="cuda", help="cuda, cuda:N or cpu")
    add("--small", action="store_true", help="a small case of each part")
    add("--compile", action="store_true", help="cases of steps and kernels compiled too")
    add("--limit", type=common.number(int, 1), default=300, help="seconds of a case")
    add("--processes", action=on_off, default=True, help="run each case in a process of its own")
    add("--case", metavar="WORDS", help="one case of your own, in this process: script and flags")
    args, fine = parser.parse_args(argv), []
    IMAGES = (400, 50) if args.small else IMAGES
    if args.case is not None:
        print(json.dumps(here(args.parts[0], args.case, args)))
        return 0
    for name in args.parts:
        part, run = PARTS[name], functools.partial(run_case, name, args=args)
        cases = [c for c in listed(part.small if args.small else part.cases) if args.only in c]
        if args.compile and name in ("steps", "kernels"):
            cases = [way + case for case in cases for way in ("", "compiled ")]
        with concurrent.futures.ThreadPoolExecutor(part.jobs) as pool:
            fine += (pool.map if args.processes else map)(run, cases)
    if not fine:
        parser.error(f"argument --only: no case holds {args.only!r}")
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
