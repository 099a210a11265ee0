"""Training throughput of fedavg.py against a bare PyTorch loop: one model, normalised float tensors in memory, the same batch
size and optimizer, all cores or the GPU on one step, nothing federated. Both take turns on random CIFAR-10-shaped images; one
line a repeat, then medians and the ratio, then the same as JSON. Takes fedavg.py's flags:

    python benchmarks/bare_loop.py
    python benchmarks/bare_loop.py --model cnn-mcmahan --clients 100 --sample 0.1 --batch-size 50 --samples 50000
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import fedavg  # noqa: E402


def bare(args, data, samples):
    """Samples/s of a plain loop over that many samples."""
    torch.manual_seed(args.seed)
    net = common.build_net(
        args.model, data.classes, data.x.shape[1], data.x.shape[-1], args.projection
    ).to(args.device)
    opt = torch.optim.SGD(
        net.parameters(),
        args.lr,
        args.momentum,
        weight_decay=args.weight_decay,
        nesterov=args.nesterov,
    )
    x, y = data.normalise(data.x).to(args.device), data.y.to(args.device)
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
    """Random CIFAR-10-shaped images, --samples of them to train on."""
    shape = (3, args.image_size or 32, args.image_size or 32)
    draw = torch.Generator().manual_seed(args.seed)
    x = torch.randint(0, 256, (args.samples + 100, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (args.samples + 100,), generator=draw)
    return common.Data(x[:-100], y[:-100], x[-100:], y[-100:], 10)


def federated(args, data):
    """(samples/s, samples of a round) of the second of two rounds of fedavg.py; the time is training and aggregation."""
    common.load_data = lambda _: data
    with tempfile.TemporaryDirectory() as out:
        args.rounds, args.out, args.quiet, args.eval_every = 2, f"{out}/run", True, 2
        _, rows = common.run(args, fedavg.local_update)
    seconds = rows[-1]["seconds"]
    return rows[-1]["samples"] / (seconds["train"] + seconds["aggregate"]), rows[-1]["samples"]


def summarise(args, name, figures, **more):
    """Print the medians of (samples/s of the baseline called name, of fedavg.py) and of their ratio, then all of it as JSON."""
    plain, fast = (statistics.median(column) for column in zip(*figures))
    ratio = statistics.median(b / a for a, b in figures)
    print(f"{plain:12,.0f}{fast:11,.0f}   median; ratio {ratio:.2f}")
    print(
        json.dumps(
            {
                "model": args.model,
                "batch_size": args.batch_size,
                "machine": common.hardware(args.device),
                "torch": torch.__version__,
                "commit": common._commit(),
                **more,
                name: plain,
                "fedavg": fast,
                "ratio": ratio,
            }
        )
    )


def main(argv=None):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--samples",
        type=common.number(int, 100),
        default=20_000,
        help="training images of all clients",
    )
    parser.add_argument(
        "--repeats", type=common.number(int, 1), default=5, help="times that each loop is measured"
    )
    parser.set_defaults(
        dataset="cifar10", model="cnn", clients=10, partition="iid", epochs=1, augment="none"
    )
    args = parser.parse_args(argv)
    data, figures = random_images(args), []
    print("   bare loop  fedavg.py   samples/s")
    for _ in range(args.repeats):
        fast, samples = federated(args, data)
        figures.append((bare(args, data, samples), fast))
        print("{:12,.0f}{:11,.0f}".format(*figures[-1]), flush=True)
    summarise(args, "bare_loop", figures)


if __name__ == "__main__":
    with common.one_line_errors("bare_loop"):
        main()
