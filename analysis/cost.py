"""Count what a method costs a client: compute, stored parameters and traffic.

    python -m analysis.cost SCRIPT [flags of that script]

The script's own functions run for two rounds of two clients on synthetic images of the data set's
shape, and every product is counted as it happens, so that nothing about a method is written twice.

Compute, per training sample, in multiply-accumulates (1 MAC = 2 FLOPs):
    forward   MACs of convolutions and linear layers, of every network that a step runs, as it
              runs: the MFLOPs column of FedAlign's Table 5, whose "FLOPs" are these MACs.
    expected  the same with each residual block of stochastic depth weighted by its probability, as
              Table 5 counts; our step masks blocks instead of skipping them, so it saves nothing.
    products  other matrix products of the forward pass, such as Gram matrices and power iterations;
              the papers leave them out.
    backward  every matrix product and convolution of the backward pass; the papers leave it out.
    round     what clients and the server do outside steps in a round, divided by the samples.
GradAug draws widths and resolutions: its figures are means over --draws steps. Its paper's numbers
are 5 to 8% below the mean of the rule in its authors' code (Table 5: 133.9, 170.7, 217.4, 264.1 for
n = 1 to 4; here about 127.6, 180, 232, 285).

Stored parameters, optimizer state left out: as the papers count, weights of convolutions and linear
layers in every copy of the network that a step reads (its own, frozen ones, pinned parameters); in
full, all numbers of these networks and all that is pinned; and what a client keeps between rounds.
Traffic: bytes of a client in the second round, by the method's own account, model included.

FedAlign paper, Table 5, row MOON (262.2 M, 2.21 M):
    python -m analysis.cost moon --dataset cifar100 --model resnet56
"""

import dataclasses
import json

import numpy as np
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

import common
from analysis import runs
from analysis.hessian import twice_differentiable

SHAPES = {  # channels, pixels, classes
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
KINDS = {  # of MACs
    "forward": "convolutions and linear layers",
    "expected": "forward, each block by its probability to run (StochDepth)",
    "products": "other matrix products, forward",
    "backward": "backward",
}
CLIENTS, ROUNDS = 2, 2  # in the second round clients and server have a state


class Counter(TorchDispatchMode):
    """Counts the MACs of all that runs inside a with block, and what the steps of a method read.

    networks, pins: what the last client has frozen and pinned, by name.
    """

    def __init__(self):
        super().__init__()
        self.macs = dict.fromkeys(KINDS, 0.0)
        self.costs, self.steps, self.ran = {}, [], 0.0  # of steps: by shape, one by one, in all
        self.networks, self.pins = {}, {}
        self.keep = {}  # {module: probability that it is run}
        self.layer_depth, self.probability = 0, 1.0  # of the modules around the running code
        self.tracker = ModuleTracker()

    def totals(self):
        """Return the MACs so far, (4,), in the order of KINDS."""
        return np.array(list(self.macs.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            macs = macs_of(func._overloadpacket, args, kwargs or {}, out)
            if self.tracker.is_bw:
                self.macs["backward"] += macs
            elif self.layer_depth:
                self.macs["forward"] += macs
                self.macs["expected"] += macs * self.probability
            else:
                self.macs["products"] += macs
        return out

    def __enter__(self):
        def enter(module, _):
            self.layer_depth += isinstance(module, LAYERS)
            self.probability *= self.keep.get(module, 1.0)

        def leave(module, *_):
            self.layer_depth -= isinstance(module, LAYERS)
            self.probability /= self.keep.get(module, 1.0)

        before = nn.modules.module.register_module_forward_pre_hook(enter)
        self.hooks = [before, nn.modules.module.register_module_forward_hook(leave)]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def counted(self, local_update):
        """Return local_update with steps that are counted; one of each shape is enough to run.

        A shape is a tuple of parts whose costs add up: a step costs the bare one's and each part's.
        """

        def update(worker, client, server, args):
            blocks = [m for m in worker.net.modules() if getattr(m, "keep", 0)]
            self.keep = {block.branch: block.keep for block in blocks}
            self.networks, self.pins = {}, {}
            worker.frozen = noting(worker.frozen, self.networks)
            worker.pin = noting(worker.pin, self.pins)
            method = local_update(worker, client, server, args)
            step = next(method)

            def counted_step(x, y):
                shapes = [None] if worker.variant is None else [(), *((p,) for p in worker.variant)]
                for shape in [shape for shape in shapes if shape not in self.costs]:
                    worker.variant, before = shape, self.totals()
                    step(x, y)
                    self.ran = self.ran + self.totals() - before
                    self.costs[shape] = (self.totals() - before) / len(y)
                bare, *parts = (self.costs[shape] for shape in shapes)
                self.steps.append(bare + sum(part - bare for part in parts))
                return torch.zeros(())

            yield counted_step
            next(method, None)

        return update


def macs_of(operator, args, kwargs, out):
    """Return the MACs of one call of a torch operator that flop_registry knows."""
    if operator is torch.ops.aten.convolution_backward:  # torch's formula leaves out the groups
        gradient, _, weight, *_, output_mask = args
        return gradient.numel() * weight[0].numel() * sum(output_mask[:2])
    return flop_registry[operator](*args, **kwargs, out_val=out) / 2


def noting(f, found):
    """Return f, a function of a name and more, which notes in found what it returns."""

    def noted(name, *values):
        found[name] = f(name, *values)
        return found[name]

    return noted


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


def train(call, counter):
    """Train two clients for two rounds, on a batch each. Return network, state and traffic of one.

    call: a MethodCall, on the CPU.
    """
    args, method, size = call.args, call.method, call.args.batch_size
    data = images(args, size * CLIENTS)
    parts = np.split(np.arange(size * CLIENTS), CLIENTS)
    net, local_update = common.prepare_net(data, args, method.adapt), counter.counted(method[0])
    server, states = {}, [{}] * CLIENTS
    with counter, twice_differentiable(net):  # LSTMs of linear layers, which are counted
        for t in range(1, ROUNDS + 1):
            server |= {"round": t, "clients": list(range(CLIENTS))}
            clients = [common.Client(k, parts[k], states[k], 1 / CLIENTS) for k in range(CLIENTS)]
            received = common.Received()
            for client in clients:
                worker = common.PlainWorker(net, data, args, client, server)
                weights = common.train_client(worker, client, server, args, local_update)
                received.add(client, weights)
            states = [client.state for client in clients]
            method.aggregate(net, received, server, args)
            if method.after_round:
                worker = common.PlainWorker(net, data, args, clients[0], server)
                worker.net.eval()
                method.after_round(worker, clients, server, args)
    model = common.nbytes(net.state_dict())
    traffic = {"down": model + clients[0].bytes_down, "up": model + clients[0].bytes_up}
    return net, states[0], traffic


def numbers_in(tree):
    """Return how many numbers the tensors in nested dicts, lists and tuples hold."""
    return sum({id(t): t.numel() for t in common.tensors_in(tree)}.values())


def stored_numbers(net, counter):
    """Return the numbers that a step reads, counted in two ways: as the papers do, and in full."""
    of_norms = {p for m in net.modules() if isinstance(m, NORMS) for p in m.parameters(False)}
    weights = sum(p.numel() for p in net.parameters() if p not in of_norms)
    floats = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    shapes, pins = [p.shape for p in net.parameters()], counter.pins.values()
    copies = sum(isinstance(pin, list) and [v.shape for v in pin] == shapes for pin in pins)
    networks = 1 + len(counter.networks)
    return (networks + copies) * weights, networks * floats + numbers_in(counter.pins)


def count(call, draws):
    """Return the costs of a MethodCall as a dict, counted on the CPU; changes call.args.

    draws: over how many steps, where they differ.
    """
    args, counter = call.args, Counter()
    args.device, args.local_steps = "cpu", 1
    common.set_up_device(args)
    net, state, traffic = train(call, counter)
    if None not in counter.costs:
        args.local_steps, counter = -(-draws // (CLIENTS * ROUNDS)), Counter()
        train(call, counter)
    macs = dict(zip(KINDS, np.mean(counter.steps, 0).tolist()))
    outside = (counter.totals() - counter.ran)[[0, 2, 3]]  # forward and expected: once
    macs["round"] = float(sum(outside)) / (CLIENTS * ROUNDS * args.batch_size)
    papers, full = stored_numbers(net, counter)
    stored = {"papers": papers, "full": full, "kept": numbers_in(state)}
    return {"macs_per_sample": macs, "parameters": stored, "bytes": traffic}


# --- the command


def main(argv=None):
    """Count a method's cost, print it, and return what is printed as a dict."""
    usage = "python -m analysis.cost SCRIPT [--draws N] [flags of the script]"
    parser = common.PlainParser(__doc__, prog="analysis/cost.py", usage=usage)
    add, draws = parser.add_argument, "steps over which drawn sizes are averaged"
    add("script", metavar="SCRIPT", help="a method's script, such as moon")
    add("--draws", type=common.COUNT, default=1000, help=draws)
    args, flags = parser.parse_known_args(argv)
    script = args.script.removesuffix(".py")
    with common.one_line_errors("analysis/cost"):
        call = runs.method_call(script, flags)
        if call.args.batch_size < 2:
            raise common.UserError("argument --batch-size: must be at least 2, for batch norm")
        about = {name: getattr(call.args, name) for name in ("model", "dataset", "batch_size")}
        result = {"script": script, **about, **count(call, args.draws)}
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
