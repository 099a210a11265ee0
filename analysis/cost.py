"""Count what a method costs a client: compute, stored parameters, traffic and time.

    python -m analysis.cost SCRIPT [flags of that script]

The script's own local_update, aggregation and second synchronisation run for two rounds of two
clients on synthetic images of the data set's shape, and every product is counted as it happens, so
that nothing about a method is written twice. FedAlign's Tables 5 and 7 hold the same quantities.

Compute, per training sample, in multiply-accumulates (1 MAC = 2 FLOPs, of
torch.utils.flop_counter):
    forward   MACs of convolutions and linear layers, of every network that a step runs, as it
              runs: Table 5's MFLOPs column, whose "FLOPs" are these MACs.
    expected  the same with each residual block of stochastic depth weighted by its probability, as
              Table 5 counts; our step masks blocks instead of skipping them, so it saves nothing.
    products  other matrix products of the forward pass, such as Gram matrices and power iterations;
              the papers leave them out.
    backward  every matrix product and convolution of the backward pass; the papers leave it out.
    round     what a client and the server's second synchronisation do outside steps in a round,
              divided by the client's samples.
GradAug draws widths and resolutions: its figures are means over --draws steps. Its paper's numbers
are 5 to 8% below the mean of the rule in its authors' code (Table 5: 133.9, 170.7, 217.4, 264.1 for
n = 1 to 4; here about 127.6, 180, 232, 285).

Stored parameters, optimizer state left out:
    papers    weights of convolutions and linear layers in every copy of the network that a step
              reads (its own, frozen ones, pinned copies of the parameters), as Table 5 counts.
    full      all numbers of these networks, with batch norm and its statistics, and everything
              else that is pinned.
    kept      numbers that a client keeps between rounds.
Traffic: bytes down and up of a client in the second round, by the method's own account, model
included.
Time, on --device: median seconds of a round of one client, --epochs epochs of one batch (or
--local-steps steps, once through its data), after a warm-up round, in turns with fedavg.py under
the flags that it shares; --no-time leaves it out.

FedAlign paper, Table 5, row MOON (262.2 M, 2.21 M):
    python -m analysis.cost moon --dataset cifar100 --model resnet56 --no-time
"""

import contextlib
import dataclasses
import json
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker
from tqdm import tqdm

import common
import engine
from analysis import runs

# channels, pixels, classes
SHAPES = {
    "cifar100": (3, 32, 100),
    "cifar10": (3, 32, 10),
    "mnist": (1, 28, 10),
    "emnist": (1, 28, 62),
    "femnist": (1, 28, 62),
    "tiny-imagenet": (3, 64, 200),
    "imagenet-200": (3, 224, 200),
    "glyphs": (3, 32, 62),
}
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.RNNBase)
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
KINDS = ("forward", "expected", "products", "backward")
LEGEND = {
    "forward": "convolutions and linear layers",
    "expected": "forward, each block by its probability to run (StochDepth)",
    "products": "other matrix products, forward",
    "backward": "backward",
    "round": "once a round, outside steps",
}
CLIENTS = 2  # of a counted round
ROUNDS = 2  # that are counted: in the second, clients and server have a state


# --- counting


class MacCounter(TorchDispatchMode):
    """Counts the MACs of everything that runs inside a with block, by kind.

    keep: {module: probability that it is run}, for the expectation.
    """

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.macs = dict.fromkeys(KINDS, 0.0)
        self.tracker = ModuleTracker()
        self.layer_depth = 0  # modules of LAYERS around the running code
        self.probability = 1.0  # that the running code is run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operator = func._overloadpacket
        if operator in flop_registry:
            self._add(_macs(operator, args, kwargs or {}, out))
        return out

    def _add(self, macs):
        if self.tracker.is_bw:
            self.macs["backward"] += macs
        elif self.layer_depth:
            self.macs["forward"] += macs
            self.macs["expected"] += macs * self.probability
        else:
            self.macs["products"] += macs

    def totals(self):
        """Return the MACs so far, (4,), in the order of KINDS."""
        return np.array([self.macs[kind] for kind in KINDS])

    def __enter__(self):
        def enter(module, _):
            self.layer_depth += isinstance(module, LAYERS)
            self.probability *= self.keep.get(module, 1.0)

        def leave(module, *_):
            self.layer_depth -= isinstance(module, LAYERS)
            self.probability /= self.keep.get(module, 1.0)

        hooks = nn.modules.module
        self.hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)


def _macs(operator, args, kwargs, out):
    """Return the MACs of one call of a torch operator that flop_registry knows."""
    if operator is torch.ops.aten.convolution_backward:  # torch's formula leaves out the groups
        gradient, _, weight, *_, output_mask = args
        return gradient.numel() * weight[0].numel() * sum(output_mask[:2])
    return flop_registry[operator](*args, **kwargs, out_val=out) / 2


def keep_probabilities(net):
    """Return {branch: probability to run} of the residual branches that stochastic depth skips.

    Branches that never run are left out.
    """
    return {m.branch: m.keep for m in net.modules() if getattr(m, "keep", 0)}


class CountingWorker(engine.Worker):
    """A worker that runs one step of each shape, counted, in place of all steps of all clients.

    That is enough, since steps take no decision that differs between clients or rounds.
    counts: MACs per sample of each step, (4,) each. counted: all MACs that ran, (4,).
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.costs = {}
        self.counts = []
        self.counted = np.zeros(len(KINDS))

    def _step(self, step, size):
        if not self.shapes:
            self.counts = [self._cost(step, size, None)]
        elif self.shape is self.shapes[0]:
            self.counts += self._costs_of_shapes(step, size)

    def _costs_of_shapes(self, step, size):
        """Return the MACs per sample of the steps of a client's round.

        A shape is a tuple of parts whose costs add up: a step costs the bare one's and each part's.
        """
        bare = self._cost(step, size, ())
        costs = []
        for shape in self.shapes:
            parts = (self._cost(step, size, (part,)) - bare for part in shape)
            costs.append(bare + sum(parts))
        return costs

    def _cost(self, step, size, shape):
        """Return the MACs per sample of a step on size samples; it runs once for each shape."""
        if shape not in self.costs:
            self.shape = shape
            self.t.zero_()
            with MacCounter(keep_probabilities(self.net)) as counter:
                super()._step(step, size)
            self.costs[shape] = counter.totals() / size
            self.counted = self.counted + counter.totals()
        return self.costs[shape]


# --- a method on synthetic images


class Trial(NamedTuple):
    """A method's call, its global network, the worker that trains clients, and their indices."""

    call: runs.MethodCall
    net: nn.Module
    worker: engine.Worker
    parts: list


def images(args, samples):
    """Return a data set of that many synthetic training samples, with labels in turn.

    Images have the shape of args.dataset; of other data sets it repeats the first samples.
    """
    if args.dataset not in SHAPES:
        data = common.load_data(args)
        rows = torch.arange(samples) % len(data.y)
        return dataclasses.replace(data, x=data.x[rows], y=data.y[rows], writers=None)
    channels, size, classes = SHAPES[args.dataset]
    size = args.image_size or size
    generator = torch.Generator().manual_seed(args.seed)
    shape = (samples, channels, size, size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.arange(samples) % classes
    return common.Data(x, y, x[:1], torch.zeros(1, dtype=torch.long), classes)


def prepare(call, samples, clients, worker_type=engine.Worker):
    """Return the Trial of a MethodCall on so many clients of that many synthetic samples each."""
    args = call.args
    device = common.set_up_device(args)
    data = images(args, samples * clients).to(device)
    net = common.prepare_net(data, args, call.method.adapt)
    steps = len(common.batch_sizes(samples, args, False))
    worker = worker_type(net, data, args, steps)
    return Trial(call, net, worker, np.array_split(np.arange(samples * clients), clients))


def train_and_aggregate(trial, pool, clients, server):
    """Train the clients and aggregate into trial.net."""
    method = trial.call.method
    received = common.Received()
    weights = trial.net.state_dict()

    def start(worker, client):
        return worker.train(client, server, weights, method.local_update)

    for trained in pool.train(clients, start):
        if trained is not None:
            received.add(*trained)
    method.aggregate(trial.net, received, server, trial.call.args)


def rounds(trial, count):
    """Yield the cost of each of count rounds of a Trial, as the first client sees it.

    A dict of the seconds of the whole round, bytes down and up, and numbers kept for the next.
    """
    worker = trial.worker
    pool = engine.Pool(lambda: worker, worker.device, 1, common.CORES)
    server = {"round": 0}
    states = {}
    for t in range(1, count + 1):
        server.update(round=t, clients=list(range(len(trial.parts))))
        weight = 1 / len(trial.parts)
        clients = [
            common.Client(k, part, states.get(k, {}), weight) for k, part in enumerate(trial.parts)
        ]
        start = time.perf_counter()
        model = common.nbytes(trial.net.state_dict())
        train_and_aggregate(trial, pool, clients, server)
        states = {client.id: client.state for client in clients}
        synchronise(trial, clients, server)
        yield {
            "seconds": time.perf_counter() - start,
            "down": model + clients[0].bytes_down,
            "up": model + clients[0].bytes_up,
            "kept": numbers_in(clients[0].state),
        }


def synchronise(trial, clients, server):
    """Run the second synchronisation of a Trial's method, if it has one, and wait for the GPU."""
    worker = trial.worker
    method = trial.call.method
    if method.after_round:
        worker.net.eval().load_state_dict(trial.net.state_dict())
        method.after_round(worker, clients, server, trial.call.args)
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    server.pop("report", None)


# --- what is measured


def numbers_in(tree):
    """Return how many numbers the tensors in nested dicts, lists and tuples hold."""
    return sum(t.numel() for t in common.tensors_in(tree))


def stored_numbers(worker):
    """Return the numbers that a step reads, counted in two ways.

    (weights of the networks' convolutions and linear layers, everything); see the top of this file.
    """
    net = worker.net
    norm_parameters = {
        p for m in net.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)
    }
    weights = sum(p.numel() for p in net.parameters() if p not in norm_parameters)
    floats = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    networks = 1 + len(worker.nets)
    return (
        (networks + pinned_copies(worker)) * weights,
        networks * floats + numbers_in(worker.pins),
    )


def pinned_copies(worker):
    """Return how many pinned lists of tensors are shaped as the parameters of the network."""
    parameter_shapes = [p.shape for p in worker.net.parameters()]
    lists = {}
    for name, value in worker.pins.items():
        lists.setdefault(name.split(".")[0], []).append(value.shape)
    return sum(shapes == parameter_shapes for shapes in lists.values())


def count(call, draws):
    """Return the costs of a MethodCall as a dict; see the top of this file.

    Counted on the CPU, over draws steps. Changes call.args.
    """
    args = call.args
    args.local_steps = draws
    args.capture = False
    args.device = "cpu"
    trial = prepare(call, args.batch_size, CLIENTS, CountingWorker)
    with unfused_lstm(trial.net), MacCounter({}) as everything:
        *_, last = rounds(trial, ROUNDS)
    macs = dict(zip(KINDS, np.mean(trial.worker.counts, 0).tolist()))
    outside = (everything.totals() - trial.worker.counted)[[0, 2, 3]]  # forward and expected: once
    macs["round"] = float(sum(outside)) / (CLIENTS * ROUNDS * args.batch_size)
    papers, full = stored_numbers(trial.worker)
    return {
        "macs_per_sample": macs,
        "flops_per_sample": {kind: 2 * number for kind, number in macs.items()},
        "parameters": {"papers": papers, "full": full, "kept": last["kept"]},
        "bytes": {"down": last["down"], "up": last["up"]},
    }


def unfused_lstm(net):
    """Return a context in which the LSTMs of net are made of linear layers, which are counted."""
    if any(isinstance(module, nn.RNNBase) for module in net.modules()):
        return torch.backends.mkldnn.flags(enabled=False)
    return contextlib.nullcontext()


def measure(calls, repeats):
    """Return the seconds of repeats rounds of one client, a list for each of calls, in turns.

    A client trains --epochs epochs of one batch, or --local-steps steps; the first round of each
    call is a warm-up and left out.
    """
    timed_rounds = []
    for call in calls:
        samples = call.args.batch_size * (call.args.local_steps or 1)
        timed_rounds.append(rounds(prepare(call, samples, 1), repeats + 1))
    seconds = [[] for _ in calls]
    for _ in tqdm(range(repeats + 1), "rounds", leave=False, disable=None):
        for i, generator in enumerate(timed_rounds):
            seconds[i].append(next(generator)["seconds"])
    return [column[1:] for column in seconds]


def times(script, flags, repeats):
    """Return medians over repeats: seconds of a client's round, of fedavg.py's, and the ratio.

    The ratio is of each pair of rounds that followed one another.
    """
    fedavg = runs.method_call("fedavg", shared_flags(flags))
    baseline, seconds = measure([fedavg, runs.method_call(script, flags)], repeats)
    return {
        "round": statistics.median(seconds),
        "fedavg": statistics.median(baseline),
        "ratio": statistics.median(b / a for a, b in zip(baseline, seconds)),
    }


def shared_flags(argv):
    """Return the words of argv without the flags, and their values, that fedavg.py lacks."""
    words = [common.canonical(word) for word in argv]
    _, unknown = common.flags("", "fedavg").parse_known_args(words)
    shared = []
    for word in words:
        if unknown and word == unknown[0]:  # they stand in the order of words
            unknown.pop(0)
        else:
            shared.append(word)
    return shared


# --- the command


def make_parser():
    """Return the parser of this analysis' own flags; all others are the script's."""
    parser = common.PlainParser(
        __doc__,
        prog="analysis/cost.py",
        usage="python -m analysis.cost SCRIPT [--no-time] [--draws N] [--repeats N] [flags]",
    )
    add = parser.add_argument
    positive = common.number(int, 1)
    add("script", metavar="SCRIPT", help="a method's script, such as moon")
    add("--no-time", action="store_true", help="measure no time")
    add("--draws", type=positive, default=1000, help="steps over which drawn sizes are averaged")
    add("--repeats", type=positive, default=3, help="rounds that are timed")
    return parser


def main(argv=None):
    """Count and time a method, print it, and return what is printed as a dict."""
    args, flags = make_parser().parse_known_args(argv)
    script = args.script.removesuffix(".py")
    with common.one_line_errors("analysis/cost"):
        call = runs.method_call(script, flags)
        if call.args.batch_size < 2:
            raise common.UserError(
                "argument --batch-size: must be at least 2, for batch norm and contrasts"
            )
        result = {
            "script": script,
            "model": call.args.model,
            "dataset": call.args.dataset,
            "batch_size": call.args.batch_size,
            **count(call, args.draws),
        }
        if not args.no_time:
            result["seconds"] = times(script, flags, args.repeats)
    show(result)
    return result


def show(result):
    """Print a result for people, then on one line as JSON."""
    print("{script}.py, {model}, {dataset}, batches of {batch_size}".format(**result))
    macs = result["macs_per_sample"]
    for kind, text in LEGEND.items():
        if kind != "expected" or macs["expected"] != macs["forward"]:
            millions = macs[kind] / 1e6
            print(
                f"  {millions:10.2f} M MACs ({2 * millions:10.2f} MFLOPs) a sample: {text}",
            )
    parameters = result["parameters"]
    print(
        f"  {parameters['papers'] / 1e6:10.2f} M parameters as the papers count them, "
        f"{parameters['full']:,} numbers in full; "
        f"{parameters['kept']:,} kept by a client between rounds"
    )
    print("  {down:,} bytes down, {up:,} up, a client and round".format(**result["bytes"]))
    if "seconds" in result:
        text = "  {round:.2f} s a client's round, fedavg.py {fedavg:.2f} s, ratio {ratio:.2f}"
        print(text.format(**result["seconds"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
