"""What a method costs a client: compute, stored parameters, traffic and time, as FedAlign's Tables 5 and 7 have it.

    python cost.py SCRIPT [flags of that script]

runs the script's own local_update, aggregation and second synchronisation for two rounds of two clients on synthetic images
of the data set's shape, so that nothing about a method is written twice, and counts what goes by. Per training sample:
    forward   MACs of convolutions and linear layers, of every network that a step runs, as it runs: Table 5's MFLOPs column,
              whose "FLOPs" are these MACs. 1 MAC = 2 FLOPs by torch.utils.flop_counter, which does the counting.
    expected  the same with each residual block of stochastic depth weighted by its probability, as Table 5 counts; our step
              masks blocks instead of skipping them, so it saves nothing.
    products  other matrix products in the forward pass: Gram matrices, power iterations. The papers leave them out.
    backward  every matrix product and convolution of the backward pass. The papers leave it out.
    round     what a client and the server's second synchronisation do outside steps, once a round, by a client's samples
GradAug's widths and resolutions are drawn: the mean over --draws steps. Its paper's numbers are 5 to 8% below the mean of the
rule in its authors' code (Table 5: 133.9, 170.7, 217.4, 264.1 for n = 1 to 4; here about 127.6, 180, 232, 285).

Stored parameters: as Table 5 counts, weights of convolutions and linear layers in every copy of the network that a step reads
(its own, frozen ones, and pinned copies of the parameters); in full, all numbers of these networks, batch norm and its
statistics included, and of whatever else is pinned; momentum left out. Kept between rounds by a client and by the server.
Bytes down and up a client and round: the second round's, by the method's own account, model included.
Time, on --device: median seconds of a round of one client, --epochs epochs of one batch (or --local-steps steps, once through
its data), after a round of warm-up, in turns with fedavg.py under the flags that it knows; --no-time leaves it out.

FedAlign paper, Table 5, row MOON (262.2 M, 2.21 M):
    python cost.py moon --dataset cifar100 --model resnet56 --no-time
"""

import contextlib
import json
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker
from tqdm import tqdm

import analysis
import common

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


class Counter(TorchDispatchMode):
    """MACs of what runs inside, by kind. keep: {module: probability that it is run} for the expectation."""

    def __init__(self, keep):
        super().__init__()
        self.macs, self.keep, self.tracker = dict.fromkeys(KINDS, 0.0), keep, ModuleTracker()
        self.layers, self.probability = (
            0,
            1.0,
        )  # how deep inside LAYERS, and how probable the code that runs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count:
            macs = count(*args, **(kwargs or {}), out_val=out) / 2
            if (
                func._overloadpacket is torch.ops.aten.convolution_backward
            ):  # whose formula in torch leaves out the groups
                gradient, _, weight, *_, wanted = args
                macs = gradient.numel() * weight[0].numel() * sum(wanted[:2])
            if self.tracker.is_bw:
                self.macs["backward"] += macs
            elif self.layers:
                self.macs["forward"] += macs
                self.macs["expected"] += macs * self.probability
            else:
                self.macs["products"] += macs
        return out

    def all(self):
        return np.array([self.macs[kind] for kind in KINDS])

    def __enter__(self):
        def enter(module, _):
            self.layers += isinstance(module, LAYERS)
            self.probability *= self.keep.get(module, 1.0)

        def leave(module, *_):
            self.layers -= isinstance(module, LAYERS)
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


def keep_probabilities(net):
    """{branch: probability} of the residual branches that are skipped at random, 0 aside."""
    return {m.branch: m.keep for m in net.modules() if getattr(m, "keep", 0)}


class Counted(common.Worker):
    """A worker that runs one step, counted, for all steps of all clients: steps take no decision that differs between them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.costs, self.ran, self.counts = {}, 0, []

    def _cost(self, step, size, shape):
        if shape not in self.costs:
            self.shape = shape
            self.t.zero_()
            with Counter(keep_probabilities(self.net)) as counter:
                super()._step(step, size)
            self.costs[shape] = counter.all() / size
            self.ran = self.ran + counter.all()
        return self.costs[shape]

    def _step(self, step, size):
        if not self.shapes:
            self.counts = [self._cost(step, size, None)]
        elif self.shape is self.shapes[0]:
            # a shape is a tuple of parts whose costs add up: that of a step is the bare one's and each part's
            bare = self._cost(step, size, ())
            for shape in self.shapes:
                self.counts.append(
                    bare + sum(self._cost(step, size, (part,)) - bare for part in shape)
                )


def images(args, samples):
    """A data set of that many synthetic training samples, of the shape of args.dataset, with labels in turn."""
    if args.dataset in SHAPES:
        channels, size, classes = SHAPES[args.dataset]
        size, draw = args.image_size or size, torch.Generator().manual_seed(args.seed)
        x = torch.randint(
            0, 256, (samples, channels, size, size), dtype=torch.uint8, generator=draw
        )
        return common.Data(
            x, torch.arange(samples) % classes, x[:1], torch.zeros(1, dtype=torch.long), classes
        )
    data = common.load_data(args)
    rows = torch.arange(samples) % len(data.y)
    return common.dataclasses.replace(data, x=data.x[rows], y=data.y[rows], writers=None)


def rounds(call, worker, net, parts, count):
    """count rounds of the script's training, aggregation and second synchronisation. Yields of each the seconds it took, and
    of its first client the bytes down and up and the numbers kept for the next round."""
    args, server, states = call.args, {"round": 0}, {}
    pool = common.Pool(lambda: worker, worker.device, 1, common.CORES)
    for t in range(1, count + 1):
        server.update(round=t, clients=list(range(len(parts))))
        clients = [common.Client(k, part, states.get(k, {})) for k, part in enumerate(parts)]
        start, down = time.perf_counter(), common.nbytes(net.state_dict())
        uploads = list(
            pool.train(
                clients, server, net.state_dict(), [1 / len(parts)] * len(parts), call.local_update
            )
        )
        states = {upload.client.id: upload.client.state for upload in uploads}
        up = common.nbytes(uploads[0].weights) + common.nbytes(uploads[0].message)
        call.aggregate(net, iter(uploads), server, args)
        if call.after_round:
            worker.net.eval().load_state_dict(net.state_dict())
            call.after_round(worker, clients, server, args)
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        server.pop("report", None)
        yield {
            "seconds": time.perf_counter() - start,
            "down": down + clients[0].bytes_down,
            "up": up + clients[0].bytes_up,
            "kept": numel(clients[0].state),
        }


def prepare(call, samples, clients):
    """(data, parts, net) of so many clients of that many synthetic samples each."""
    device = common._set_up(call.args)
    data = images(call.args, samples * clients)
    torch.manual_seed(call.args.seed)
    net = common.net_for(data, call.args)
    if call.adapt:
        call.adapt(net, call.args)
    net, data = net.to(device, memory_format=torch.channels_last).eval(), data.to(device)
    return data, np.array_split(np.arange(samples * clients), clients), net


def numel(tree):
    return sum(t.numel() for t in common.tensors_in(tree))


def stored(worker):
    """Numbers that a step reads: (of the networks' convolutions and linear layers, of everything)."""
    norms = {
        p for m in worker.net.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)
    }
    shapes = [p.shape for p in worker.net.parameters()]
    weights = sum(p.numel() for p in worker.net.parameters() if p not in norms)
    copies = 1 + len(worker.nets)
    everything = copies * sum(
        v.numel() for v in worker.net.state_dict().values() if v.is_floating_point()
    )
    pins = {}
    for name, value in worker.pins.items():
        pins.setdefault(name.split(".")[0], []).append(value)
    copies += sum([v.shape for v in values] == shapes for values in pins.values())
    return copies * weights, everything + numel(pins)


def count(call, draws):
    """Costs of a method_call as a dict, counted on the CPU, where no LSTM is fused; see the top of this file. Changes
    call.args."""
    args = call.args
    args.local_steps, args.graph, args.device = draws, False, "cpu"
    data, parts, net = prepare(call, args.batch_size, 2)
    worker = Counted(net, data, args, draws)
    recurrent = any(isinstance(m, nn.RNNBase) for m in net.modules())
    # the fused LSTM of the CPU is not counted, the plain one is made of linear layers
    unfused = torch.backends.mkldnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    with unfused, Counter({}) as everything:
        *_, last = rounds(call, worker, net, parts, 2)
    macs = dict(zip(KINDS, np.mean(worker.counts, 0).tolist()))
    outside = float(sum((everything.all() - worker.ran)[[0, 2, 3]])) / (
        4 * args.batch_size
    )  # of two clients in two rounds
    papers, full = stored(worker)
    macs["round"] = outside
    return {
        "macs_per_sample": macs,
        "flops_per_sample": {k: 2 * v for k, v in macs.items()},
        "parameters": {"papers": papers, "full": full, "kept": last["kept"]},
        "bytes": {"down": last["down"], "up": last["up"]},
    }


def measure(calls, repeats):
    """Seconds of each of repeats rounds of one client of each call, in turns: --epochs epochs of a batch, or --local-steps."""
    runs = []
    for call in calls:
        args = call.args
        samples = args.batch_size * (args.local_steps or 1)
        data, parts, net = prepare(call, samples, 1)
        per_round = len(common.batch_sizes(samples, args, False))
        runs.append(
            rounds(call, common.Worker(net, data, args, per_round), net, parts, repeats + 1)
        )
    seconds = [[] for _ in runs]
    for i in tqdm(range(repeats + 1), "rounds", leave=False, disable=None):
        for run, own in zip(runs, seconds):
            own.append(next(run)["seconds"])
    return [own[1:] for own in seconds]


def plain_words(argv):
    """The flags among argv that fedavg.py has."""
    parser = common.flags("", "fedavg")
    words = [common.canonical(word) for word in argv]
    unknown = iter(super(common.Parser, parser).parse_known_args(words)[1])
    other = next(unknown, None)
    plain = []
    for word in words:
        if word == other:
            other = next(unknown, None)
        else:
            plain.append(word)
    return plain


def main(argv=None):
    parser = common.PlainParser(
        __doc__, usage="cost.py SCRIPT [--no-time] [--draws N] [--repeats N] [SCRIPT's flags]"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a method's script, such as moon")
    parser.add_argument("--no-time", action="store_true", help="measure no time")
    parser.add_argument(
        "--draws",
        type=common.number(int, 1),
        default=1000,
        help="steps over which drawn sizes are averaged",
    )
    parser.add_argument(
        "--repeats", type=common.number(int, 1), default=3, help="rounds that are timed"
    )
    args, flags = parser.parse_known_args(argv)
    script = args.script.removesuffix(".py")
    with common.one_line_errors("cost"):
        call = analysis.method_call(script, flags)
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


def times(script, flags, repeats):
    """Median seconds of a client's round, of fedavg.py's, and their ratio, a pair at a time."""
    calls = [
        analysis.method_call("fedavg", plain_words(flags)),
        analysis.method_call(script, flags),
    ]
    plain, own = measure(calls, repeats)
    return {
        "round": statistics.median(own),
        "fedavg": statistics.median(plain),
        "ratio": statistics.median(b / a for a, b in zip(plain, own)),
    }


def show(result):
    macs, parameters = result["macs_per_sample"], result["parameters"]
    print(
        f"{result['script']}.py, {result['model']}, {result['dataset']}, batches of {result['batch_size']}"
    )
    for name, text in (
        ("forward", "convolutions and linear layers"),
        ("expected", "forward, each block by its probability to run (StochDepth)"),
        ("products", "other matrix products, forward"),
        ("backward", "backward"),
        ("round", "once a round, outside steps"),
    ):
        if name == "expected" and macs["expected"] == macs["forward"]:
            continue
        print(
            f"  {macs[name] / 1e6:10.2f} M MACs ({2 * macs[name] / 1e6:10.2f} MFLOPs) a sample: {text}"
        )
    print(
        f"  {parameters['papers'] / 1e6:10.2f} M parameters as the papers count them, {parameters['full']:,} numbers in "
        f"full; {parameters['kept']:,} kept by a client between rounds"
    )
    print(
        f"  {result['bytes']['down']:,} bytes down, {result['bytes']['up']:,} up, a client and round"
    )
    if "seconds" in result:
        print(
            "  {round:.2f} s a client's round, fedavg.py {fedavg:.2f} s, ratio {ratio:.2f}".format(
                **result["seconds"]
            )
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
