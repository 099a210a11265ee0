"""Compare fedavg.py with the usual way to write federated averaging.

The usual way is a PIL image and a chain of torchvision transforms per sample, a DataLoader a
client, a deep copy of the model and a new optimizer a client, all clients one after the other, and
an average of their state_dicts, key by key; here on the same data, network and clients. Both take
turns. Prints a line a repeat, then medians and the ratio, then the same as JSON. A repeat is one
round, to train and aggregate, after a warm-up that is not measured; of the conventional loop it is
one for each number of loading processes, of which the fastest counts. Takes fedavg.py's flags:

    python benchmarks/conventional.py
    python benchmarks/conventional.py --model resnet56 --device cuda --loaders 0,4,8
"""

import copy
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import engine  # noqa: E402
import bare_loop  # noqa: E402

# flags of fedavg.py that the conventional loop does not implement
NOT_IMPLEMENTED = [
    "precision",
    "clip",
    "optimizer",
    "local_steps",
    "drop_last",
    "weighting",
    "server",
    "persist_opt",
]


class Images(Dataset):
    """A data set that makes each sample a PIL image and transforms it, as torchvision's CIFAR."""

    def __init__(self, data, augment):
        from torchvision import transforms

        size = data.x.shape[-1]
        mean = data.mean.flatten().tolist()
        std = data.std.flatten().tolist()
        steps = [transforms.ToTensor(), transforms.Normalize(mean, std)]
        if augment:
            crop = transforms.RandomCrop(size, padding=common.PAD)
            steps = [crop, transforms.RandomHorizontalFlip(), *steps]
        self.transform = transforms.Compose(steps)
        self.x = data.x.permute(0, 2, 3, 1).contiguous().numpy()
        self.y = data.y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        from PIL import Image

        return self.transform(Image.fromarray(self.x[i])), self.y[i]


def conventional_round(net, images, parts, args, loaders):
    """Train and average one round of the usual loop from the global network net, in place.

    parts: the training indices of each client. loaders: processes of a DataLoader. Returns the
    number of training samples.
    """
    local = []
    samples = 0
    for part in parts:
        model = copy.deepcopy(net).train()
        loader = DataLoader(
            Subset(images, part.tolist()),
            args.batch_size,
            shuffle=True,
            num_workers=loaders,
            pin_memory=args.device != "cpu",
        )
        samples += train_client(model, loader, args)
        local.append((len(part), copy.deepcopy(model.state_dict())))
    total = sum(n for n, _ in local)
    net.load_state_dict(
        {k: sum(n / total * weights[k] for n, weights in local) for k in local[0][1]}
    )
    return samples


def train_client(model, loader, args):
    """Train model on the batches of loader, --epochs times; return the number of samples."""
    device = torch.device(args.device)
    opt = bare_loop.plain_sgd(model, args)
    samples = 0
    for _ in range(args.epochs):
        for x, y in loader:
            x = x.to(device)
            y = y.to(device)
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            loss.item()  # for the log
            samples += len(y)
    return samples


def clients(data, args):
    """Return the training indices of the clients that take part in a round."""
    return common.partition(data, args)[: common.sampled_clients(args)]


def conventional(args, data, loaders):
    """Return the samples/s of a round with that many loading processes, after a warm-up.

    Precision and cuDNN are as torch sets them.
    """
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = False
    net = bare_loop.new_net(args, data)
    images = Images(data, args.augment != "none")
    parts = clients(data, args)
    conventional_round(net, images, parts[:1], args, loaders)
    start = time.perf_counter()
    samples = conventional_round(net, images, parts, args, loaders)
    if args.device != "cpu":
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - start)


def parse_flags(argv):
    """Return the flags of argv; exits for those that the conventional loop does not implement."""
    parser = bare_loop.make_parser(__doc__, __file__)
    parser.add_argument(
        "--loaders",
        type=common.integers(0),
        default=[0, min(common.CORES, 8)],
        metavar="N,...",
        help="numbers of loading processes of a DataLoader to try",
    )
    bare_loop.add_repeats(parser, 3)
    args = parser.parse_args(argv)
    defaults = parser.parse_args([])
    for flag in NOT_IMPLEMENTED:
        if getattr(args, flag) != getattr(defaults, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: not in the conventional loop")
    return args


def main(argv=None):
    """Measure both loops in turns, and print what they reach."""
    args = parse_flags(argv)
    data = bare_loop.random_images(args)
    figures, fastest = [], []
    engine.keep_freed_memory()  # which a run does too: both loops gain by it
    print("conventional  fedavg.py   samples/s")
    for _ in range(args.repeats):
        speeds = {loaders: conventional(args, data, loaders) for loaders in args.loaders}
        fastest.append(max(speeds, key=speeds.get))
        figures.append((speeds[fastest[-1]], bare_loop.federated(args, data)[0]))
        print("{:12,.0f}{:11,.0f}".format(*figures[-1]), flush=True)
    bare_loop.summarise(args, "conventional", figures, loaders=statistics.mode(fastest))


if __name__ == "__main__":
    with common.one_line_errors("conventional"):
        main()
