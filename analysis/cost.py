"""Count what a method costs a client: compute, stored parameters and traffic.

    python -m analysis.cost SCRIPT [flags of that script]

The script's own functions run for two rounds of two clients on synthetic images of the data set's
shape, and every product is counted as it happens.

Compute, per training sample, in multiply-accumulates (1 MAC = 2 FLOPs):
    forward   convolutions and linear layers of every network that a step runs: the MFLOPs column of
              FedAlign's Table 5, whose "FLOPs" are these MACs
    expected  the same with each block of stochastic depth weighted by its probability, as Table 5
              counts; our step masks blocks instead of skipping them, so it saves nothing
    products  other matrix products of the forward pass, such as Gram matrices
    backward  every matrix product and convolution of the backward pass
    round     what clients and the server do outside steps in a round, divided by the samples
GradAug draws widths and resolutions: its figures are means over --draws steps.

Stored parameters, optimizer state left out: as the papers count, weights of convolutions and linear
layers in every copy of the network that a step reads (its own, frozen ones, pinned parameters); in
full, all numbers of these networks and all that is pinned; and what a client keeps between rounds.
Traffic: bytes of a client in the second round, by the method's own account, model included.

FedAlign paper, Table 5, row MOON (262.2 M, 2.21 M):
    python -m analysis.cost moon --dataset cifar100 --model resnet56
"""

import json

import numpy as np
import torch
import torch.nn as nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

import common
from analysis import runs
from analysis.hessian import twice_differentiable
from analysis.synthetic import images

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.RNNBase)
KINDS = {  # of MACs
    "forward": "convolutions and linear layers",
    "expected": "forward, each block by its probability to run (StochDepth)",
    "products": "other matrix products, forward",
    "backward": "backward",
}
CLIENTS, ROUNDS = 2, 2  # in the second round clients and server have a state


class Counter(TorchDispatchMode):
    """Counts the MACs of all that runs inside a with block.

    macs: those outside steps, by kind. costs: a step's a sample, (4,), by its shape; steps: of
    each step."""

    def __init__(self):
        super().__init__()
        self.macs, self.costs, self.steps = dict.fromkeys(KINDS, 0.0), {}, []
        self.inside = [(False, 1.0)]  # of the running modules: whether in a layer, probability
        self.tracker = ModuleTracker()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            macs = macs_of(func._overloadpacket, args, kwargs or {}, out)
            in_layer, probability = self.inside[-1]
            kind = "backward" if self.tracker.is_bw else "forward" if in_layer else "products"
            self.macs[kind] += macs
            self.macs["expected"] += macs * probability * (kind == "forward")
        return out

    def enter(self, module, _):
        in_layer, probability = self.inside[-1]
        probability *= getattr(module, "probability", 1.0)
        self.inside.append((in_layer or isinstance(module, LAYERS), probability))

    def leave(self, *_):
        self.inside.pop()


def macs_of(operator, args, kwargs, out):
    """Return the MACs of one call of a torch operator that flop_registry knows."""
    if operator is torch.ops.aten.convolution_backward:  # torch's formula leaves out the groups
        gradient, _, weight, *_, output_mask = args
        return gradient.numel() * weight[0].numel() * sum(output_mask[:2])
    return flop_registry[operator](*args, **kwargs, out_val=out) / 2


class Worker(common.PlainWorker):
    """A worker that takes only those steps whose cost counter, a Counter, does not know.

    read: what it has pinned and frozen, by name."""

    def __init__(self, counter, *of):
        super().__init__(*of)
        self.counter, self.read = counter, {}

    def pin(self, name, value):
        return self.read.setdefault(name, super().pin(name, value))

    def frozen(self, name, weights=None):
        return self.read.setdefault(name, super().frozen(name, weights))

    def local_batches(self, client):
        """Yield a batch for the bare step, and one for each part that its variants add to it."""
        counter = self.counter
        for x, y in super().local_batches(client):
            shapes = [(), *((part,) for part in self.variant or ())]
            for self.variant in [shape for shape in shapes if shape not in counter.costs]:
                outside, counter.macs = counter.macs, dict.fromkeys(KINDS, 0.0)
                yield x, y
                counter.costs[self.variant] = np.array([*counter.macs.values()]) / len(y)
                counter.macs = outside
            bare, *parts = (counter.costs[shape] for shape in shapes)
            counter.steps.append(bare + sum(part - bare for part in parts))
            if self.variants is None:  # all steps are alike
                return


def train(call, data, net, counter):
    """Count the steps of two clients for two rounds. Return the last client and its worker."""
    args, (local_update, aggregate, after_round, _) = call
    server, states = {}, [{} for _ in range(CLIENTS)]
    parts = np.split(np.arange(len(data.y)), CLIENTS)
    for t in range(1, ROUNDS + 1):
        server |= {"round": t, "clients": list(range(CLIENTS))}
        clients = [common.Client(k, parts[k], states[k], 1 / CLIENTS) for k in range(CLIENTS)]
        received = common.Received()
        for client in clients:
            worker = Worker(counter, net, data, args, client, server)
            received.add(client, common.train_client(worker, client, server, args, local_update))
        states = [client.state for client in clients]
        aggregate(net, received, server, args)
        if after_round:
            idle = common.PlainWorker(net, data, args, clients[0], server)
            idle.net.eval()
            after_round(idle, clients, server, args)
    return client, worker


def stored_numbers(net, state, read):
    """Return the numbers that a step reads, as the papers count and in full, and a client's."""
    layers = [m for m in net.modules() if isinstance(m, LAYERS)]
    weights = sum(p.numel() for layer in layers for p in layer.parameters())
    floats = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    networks = 1 + sum(isinstance(value, nn.Module) for value in read.values())
    shapes = [p.shape for p in net.parameters()]
    copies = sum(isinstance(v, list) and [t.shape for t in v] == shapes for v in read.values())
    pinned = {id(t): t.numel() for t in common.tensors_in(read)}  # lists have their entries twice
    full = networks * floats + sum(pinned.values())
    kept = sum(t.numel() for t in common.tensors_in(state))
    return {"papers": (networks + copies) * weights, "full": full, "kept": kept}


def count(call, draws):
    """Return the costs of a MethodCall as a dict, counted on the CPU; changes call.args.

    draws: over how many steps, where they differ."""
    args, counter = call.args, Counter()
    args.device, args.local_steps = "cpu", -(-draws // (CLIENTS * ROUNDS))
    common.set_up_device(args)
    data = images(args, args.batch_size * CLIENTS)
    net = common.prepare_net(data, args, call.method.adapt)
    for block in net.modules():
        if hasattr(block, "keep"):  # of stochastic depth
            block.branch.probability = block.keep
    before = hooks.register_module_forward_pre_hook(counter.enter)
    with before, hooks.register_module_forward_hook(counter.leave):
        with counter, twice_differentiable(net):  # LSTMs of linear layers, which are counted
            client, worker = train(call, data, net, counter)
    macs = dict(zip(KINDS, np.mean(counter.steps, 0).tolist()))
    outside = sum(counter.macs.values()) - counter.macs["expected"]  # the forward pass once
    macs["round"] = outside / (CLIENTS * ROUNDS * args.batch_size)
    model = common.nbytes(net.state_dict())
    more = {"down": client.bytes_down, "up": client.bytes_up}
    traffic = {way: n + client.model.get(way, model) for way, n in more.items()}
    stored = stored_numbers(net, client.state, worker.read)
    result = {name: getattr(args, name) for name in ("script", "model", "dataset", "batch_size")}
    return result | {"macs_per_sample": macs, "parameters": stored, "bytes": traffic}


def main(argv=None):
    """Count a method's cost, print it, and return what is printed as a dict."""
    usage = "python -m analysis.cost SCRIPT [--draws N] [flags of the script]"
    parser = common.PlainParser(__doc__, prog="analysis/cost.py", usage=usage)
    add, draws = parser.add_argument, "steps over which drawn sizes are averaged"
    add("script", metavar="SCRIPT", help="a method's script, such as moon")
    add("--draws", type=common.COUNT, default=1000, help=draws)
    args, flags = parser.parse_known_args(argv)
    with common.one_line_errors("analysis/cost"):
        call = runs.method_call(args.script.removesuffix(".py"), flags)
        if call.args.batch_size < 2:
            raise common.UserError("argument --batch-size: must be at least 2, for batch norm")
        result = count(call, args.draws)
    show(result)
    return result


def show(result):
    """Print a result for people, then on one line as JSON."""
    print("{script}.py, {model}, {dataset}, batches of {batch_size}".format(**result))
    macs = result["macs_per_sample"]
    for kind, text in {**KINDS, "round": "once a round, outside steps"}.items():
        if kind != "expected" or macs["expected"] != macs["forward"]:
            number = macs[kind] / 1e6
            print(f"  {number:10.2f} M MACs ({2 * number:10.2f} MFLOPs) a sample: {text}")
    stored = "{papers:,} parameters as the papers count, {full:,} in full; a client keeps {kept:,}"
    print("  " + stored.format(**result["parameters"]))
    print("  {down:,} bytes down, {up:,} up, a client and round".format(**result["bytes"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
