"""Compare the training throughput of fedavg.py with that of a bare PyTorch loop.

The bare loop is one model on normalised float tensors in memory, with the same batch size and
optimizer, all cores or the GPU on one step, and nothing federated. Both take turns on random images
of CIFAR-10's shape. Prints a line a repeat, then medians and the ratio, then the same as JSON.
Takes fedavg.py's flags:

    python benchmarks/bare_loop.py
    python benchmarks/bare_loop.py --model cnn-mcmahan --clients 100 --sample 0.1 --batch-size 50 \\
        --samples 50000
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import engine  # noqa: E402
import run_folder  # noqa: E402
import fedavg  # noqa: E402

TEST_IMAGES = 100


def new_net(args, data):
    """Return the network that args name for data, on args.device, with weights of args.seed."""
    torch.manual_seed(args.seed)
    channels, size = data.x.shape[1], data.x.shape[-1]
    net = common.build_net(args.model, data.classes, channels, size, args.projection)
    return net.to(args.device)


def plain_sgd(net, args):
    """Return torch's own SGD with the hyper-parameters of args."""
    return torch.optim.SGD(
        net.parameters(),
        args.lr,
        args.momentum,
        weight_decay=args.weight_decay,
        nesterov=args.nesterov,
    )


def bare(args, data, samples):
    """Return the samples/s of a plain loop over that many samples."""
    net = new_net(args, data)
    opt = plain_sgd(net, args)
    x = data.normalise(data.x).to(args.device)
    y = data.y.to(args.device)
    net.train()
    start = time.perf_counter()
    epochs = -(-samples // len(y))
    order = torch.cat([torch.randperm(len(y), device=args.device) for _ in range(epochs)])
    for i in order[:samples].split(args.batch_size):
        loss = F.cross_entropy(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - start)


def random_images(args):
    """Return random images of CIFAR-10's shape, --samples of them to train on."""
    images = args.samples + TEST_IMAGES
    shape = (images, 3, args.image_size or 32, args.image_size or 32)
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (images,), generator=generator)
    train = args.samples
    return common.Data(x[:train], y[:train], x[train:], y[train:], 10)


def federated(args, data):
    """Return (samples/s, samples of a round) of the second of two rounds of fedavg.py.

    The time is that of training and aggregation.
    """
    given = mock.patch.object(common, "load_data", lambda _: data)
    with tempfile.TemporaryDirectory() as out, given:
        args.rounds = 2
        args.eval_every = 2
        args.out = f"{out}/run"
        args.quiet = True
        _, rows = common.run(args, fedavg.local_update)
    seconds = rows[-1]["seconds"]
    return rows[-1]["samples"] / (seconds["train"] + seconds["aggregate"]), rows[-1]["samples"]


def summarise(args, name, figures, **more):
    """Print medians over repeats, then all of it, with more, as JSON.

    figures: (samples/s of the baseline called name, of fedavg.py) of each repeat.
    """
    baseline, fast = (statistics.median(column) for column in zip(*figures))
    ratio = statistics.median(b / a for a, b in figures)
    print(f"{baseline:12,.0f}{fast:11,.0f}   median; ratio {ratio:.2f}")
    result = {
        "model": args.model,
        "batch_size": args.batch_size,
        "machine": run_folder.hardware(args.device),
        "torch": torch.__version__,
        "commit": run_folder.commit(),
        **more,
        name: baseline,
        "fedavg": fast,
        "ratio": ratio,
    }
    print(json.dumps(result))


def make_parser(doc, script):
    """Return fedavg.py's parser with --samples and the defaults of the benchmarks."""
    parser = common.flags(doc, script)
    parser.add_argument(
        "--samples",
        type=common.number(int, TEST_IMAGES),
        default=20_000,
        help="training images of all clients",
    )
    parser.set_defaults(dataset="cifar10", model="cnn", clients=10, partition="iid", epochs=1)
    return parser


def add_repeats(parser, default):
    """Add --repeats to a parser."""
    parser.add_argument(
        "--repeats",
        type=common.number(int, 1),
        default=default,
        help="times that each loop is measured",
    )


def main(argv=None):
    """Measure both loops in turns, and print what they reach."""
    parser = make_parser(__doc__, __file__)
    add_repeats(parser, 5)
    parser.set_defaults(augment="none")
    args = parser.parse_args(argv)
    data = random_images(args)
    figures = []
    engine.keep_freed_memory()  # which a run does too: both loops gain by it
    print("   bare loop  fedavg.py   samples/s")
    for _ in range(args.repeats):
        fast, samples = federated(args, data)
        figures.append((bare(args, data, samples), fast))
        print("{:12,.0f}{:11,.0f}".format(*figures[-1]), flush=True)
    summarise(args, "bare_loop", figures)


if __name__ == "__main__":
    with common.one_line_errors("bare_loop"):
        main()
