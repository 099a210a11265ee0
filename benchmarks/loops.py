"""Compare the training throughput of fedavg.py with that of a loop written otherwise.

    python benchmarks/loops.py bare
    python benchmarks/loops.py bare --model cnn-mcmahan --clients 1000 --sample 0.05 --batch-size 10
    python benchmarks/loops.py conventional --model resnet56 --device cuda --loaders 0,4,8

bare: one model on normalised float tensors in memory, with the same batch size and optimizer, all
cores or the GPU on one step, and nothing federated. conventional: the usual way to write federated
averaging, a PIL image and a chain of torchvision transforms per sample, a DataLoader a client, a
deep copy of the model and a new optimizer a client, all clients one after the other, and an average
of their state_dicts, key by key; of the numbers of loading processes in --loaders the fastest
counts. Both train a round, after a warm-up, on random images of the data set's shape, in turns with
fedavg.py, whose flags are taken. Prints a line a repeat, then medians and the ratio, then the same
as JSON.
"""

import copy
import json
import pathlib
import statistics
import sys
import tempfile
import time
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import engine  # noqa: E402
import fedavg  # noqa: E402
import run_folder  # noqa: E402
from analysis.synthetic import images  # noqa: E402

# flags of fedavg.py that the loops beside it do not implement
NOT_BARE = "precision clip optimizer"
NOT_CONVENTIONAL = f"{NOT_BARE} local_steps drop_last weighting server persist_opt"


def federated(args, data):
    """Return (samples/s, samples of a round) of the second of two rounds of fedavg.py.

    The time is that of training and aggregation."""
    args = copy.copy(args)
    given = mock.patch.object(common, "load_data", lambda _: data)
    with tempfile.TemporaryDirectory() as out, given:
        args.rounds, args.eval_every, args.out, args.quiet = 2, 2, f"{out}/run", True
        _, rows = common.run(args, fedavg.local_update)
    seconds, samples = rows[-1]["seconds"], rows[-1]["samples"]
    return samples / (seconds["train"] + seconds["aggregate"]), samples


def new_net(args, data):
    """Return the network that args name for data, on args.device, with weights of args.seed."""
    torch.manual_seed(args.seed)
    return common.net_for(data, args).to(args.device)


def plain_sgd(net, args):
    """Return torch's own SGD with the hyper-parameters of args."""
    more = {"weight_decay": args.weight_decay, "nesterov": args.nesterov and args.momentum > 0}
    return torch.optim.SGD(net.parameters(), args.lr, args.momentum, **more)


def step(net, opt, x, y):
    """Take a step of SGD. Return the loss."""
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss


def rate(samples, start, device):
    """Return samples/s since start."""
    if device != "cpu":
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - start)


def bare(args, data, samples):
    """Return the samples/s of a plain loop over that many samples."""
    net = new_net(args, data).train()
    opt = plain_sgd(net, args)
    x, y = data.normalise(data.x).to(args.device), data.y.to(args.device)
    start, epochs = time.perf_counter(), -(-samples // len(y))
    order = torch.cat([torch.randperm(len(y), device=args.device) for _ in range(epochs)])
    for i in order[:samples].split(args.batch_size):
        step(net, opt, x[i], y[i])
    return rate(samples, start, args.device)


class Images(Dataset):
    """A data set that makes each sample a PIL image and transforms it, as torchvision's CIFAR."""

    def __init__(self, data, augment):
        from torchvision import transforms

        mean, std = data.mean.flatten().tolist(), data.std.flatten().tolist()
        steps = [transforms.ToTensor(), transforms.Normalize(mean, std)]
        if augment:
            crop = transforms.RandomCrop(data.x.shape[-1], padding=common.PAD)
            steps = [crop, transforms.RandomHorizontalFlip(), *steps]
        self.transform = transforms.Compose(steps)
        self.x = data.x.permute(0, 2, 3, 1).squeeze(3).contiguous().numpy()
        self.y = data.y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.x[i])), self.y[i]


def conventional_round(net, dataset, parts, args, loaders):
    """Train and average one round of the usual loop from the global network net, in place.

    parts: the training indices of each client. loaders: processes of a DataLoader. Returns the
    number of training samples."""
    local, samples = [], 0
    for part in parts:
        model = copy.deepcopy(net).train()
        opt = plain_sgd(model, args)
        options = {"num_workers": loaders, "pin_memory": args.device != "cpu"}
        own = Subset(dataset, part.tolist())
        loader = DataLoader(own, args.batch_size, shuffle=True, **options)
        for _ in range(args.epochs):
            for x, y in loader:
                step(model, opt, x.to(args.device), y.to(args.device)).item()  # for the log
                samples += len(y)
        local.append((len(part), copy.deepcopy(model.state_dict())))
    total = sum(n for n, _ in local)
    mean = {k: sum(n / total * weights[k] for n, weights in local) for k in local[0][1]}
    net.load_state_dict(mean)
    return samples


def conventional(args, data, loaders):
    """Return the samples/s of a round with that many loading processes, after a warm-up.

    Precision and cuDNN are as torch sets them."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = False
    augment = common.resolve_augment(args, data)
    if augment not in ([], ["crop", "flip"]):
        raise common.UserError("argument --augment: the conventional loop has none and crop,flip")
    net, dataset = new_net(args, data), Images(data, augment)
    parts = common.partition(data, args)[: common.clients_per_round(args)]
    conventional_round(net, dataset, parts[:1], args, loaders)
    start = time.perf_counter()
    return rate(conventional_round(net, dataset, parts, args, loaders), start, args.device)


def parse_flags(argv):
    """Return the flags of argv; exits for those that the loop does not implement."""
    parser = common.flags(__doc__, __file__)
    add, cores = parser.add_argument, min(common.CORES, 8)
    add("loop", choices=["bare", "conventional"], help="what fedavg.py is compared with")
    add("--samples", type=common.number(int, 100), default=20_000, help="images in all")
    add("--repeats", type=common.COUNT, default=3, help="times that each loop is measured")
    add("--loaders", type=common.integers(0), default=[0, cores], help="of the conventional loop")
    parser.set_defaults(dataset="cifar10", model="cnn", clients=10, partition="iid", epochs=1)
    args = parser.parse_args(argv)
    defaults = parser.parse_args([args.loop, f"--device={args.device}"])
    is_bare = args.loop == "bare"
    for flag in (NOT_BARE if is_bare else NOT_CONVENTIONAL).split():
        if getattr(args, flag) != getattr(defaults, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: not in the {args.loop} loop")
    args.augment = "none" if is_bare else args.augment
    return args


def main(argv=None):
    """Measure both loops in turns, and print what they reach."""
    args = parse_flags(argv)
    data, figures, fastest = images(args, args.samples), [], []
    engine.keep_freed_memory()  # which a run does too: both loops gain by it
    print(f"{args.loop:>12}  fedavg.py   samples/s")
    for _ in range(args.repeats):
        fast, samples = federated(args, data)
        if args.loop == "bare":
            speeds = {None: bare(args, data, samples)}
        else:
            speeds = {loaders: conventional(args, data, loaders) for loaders in args.loaders}
        fastest.append(max(speeds, key=speeds.get))
        figures.append((speeds[fastest[-1]], fast))
        print("{:12,.0f}{:11,.0f}".format(*figures[-1]), flush=True)
    other, fast = map(statistics.median, zip(*figures))
    ratio = statistics.median(b / a for a, b in figures)
    print(f"{other:12,.0f}{fast:11,.0f}   median; ratio {ratio:.2f}")
    about = {name: getattr(args, name) for name in ("loop", "model", "batch_size")}
    about |= {"machine": run_folder.hardware(args.device), "torch": torch.__version__}
    about |= {"commit": run_folder.commit(), "loaders": statistics.mode(fastest)}
    print(json.dumps({**about, args.loop: other, "fedavg": fast, "ratio": ratio}))


if __name__ == "__main__":
    with common.one_line_errors("loops"):
        main()
