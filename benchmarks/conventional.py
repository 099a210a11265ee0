"""fedavg.py against the usual way to write federated averaging, on the same data, network and clients: a PIL image and a chain
of torchvision transforms per sample, a DataLoader a client, a deep copy of the model and a new optimizer a client, all clients
one after the other, and an average of their state_dicts, key by key. Both take turns; one line a repeat, then medians and the
ratio, then the same as JSON. A repeat is one round, to train and aggregate, after a warm-up that is not measured; of the
conventional loop it is one for each number of loading processes, of which the fastest counts. Takes fedavg.py's flags:

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
import bare_loop  # noqa: E402


class Images(Dataset):
    """What torchvision's CIFAR data sets do: each sample of an array becomes a PIL image and goes through transforms."""

    def __init__(self, data, augment):
        from torchvision import transforms

        size = data.x.shape[-1]
        chain = (
            [transforms.RandomCrop(size, padding=common.PAD), transforms.RandomHorizontalFlip()]
            if augment
            else []
        )
        mean, std = data.mean.flatten().tolist(), data.std.flatten().tolist()
        self.transform = transforms.Compose(
            [*chain, transforms.ToTensor(), transforms.Normalize(mean, std)]
        )
        self.x, self.y = data.x.permute(0, 2, 3, 1).contiguous().numpy(), data.y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        from PIL import Image

        return self.transform(Image.fromarray(self.x[i])), self.y[i]


def conventional_round(net, images, parts, args, loaders):
    """One round of the usual loop from the global network net, in place; returns its training samples."""
    device, local, samples = torch.device(args.device), [], 0
    for part in parts:
        model = copy.deepcopy(net).train()
        opt = torch.optim.SGD(
            model.parameters(),
            args.lr,
            args.momentum,
            weight_decay=args.weight_decay,
            nesterov=args.nesterov,
        )
        loader = DataLoader(
            Subset(images, part.tolist()),
            args.batch_size,
            shuffle=True,
            num_workers=loaders,
            pin_memory=device.type == "cuda",
        )
        for _ in range(args.epochs):
            for x, y in loader:
                x, y = x.to(device), y.to(device)
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                loss.item()  # for the log
                samples += len(y)
        local.append((len(part), copy.deepcopy(model.state_dict())))
    total = sum(n for n, _ in local)
    net.load_state_dict(
        {k: sum(n / total * weights[k] for n, weights in local) for k in local[0][1]}
    )
    return samples


def clients(data, args):
    """Training indices of the clients that take part in a round."""
    return common.partition(data, args)[: common.sampled_clients(args)]


def conventional(args, data, loaders):
    """Samples/s of a round with that many loading processes, after a warm-up; precision and cuDNN as torch sets them."""
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = (
        "ieee",
        "tf32",
    )
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(args.seed)
    net = common.build_net(
        args.model, data.classes, data.x.shape[1], data.x.shape[-1], args.projection
    ).to(args.device)
    images, parts = Images(data, args.augment != "none"), clients(data, args)
    conventional_round(net, images, parts[:1], args, loaders)
    start = time.perf_counter()
    samples = conventional_round(net, images, parts, args, loaders)
    if args.device != "cpu":
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - start)


def main(argv=None):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--samples",
        type=common.number(int, 100),
        default=20_000,
        help="training images of all clients",
    )
    parser.add_argument(
        "--loaders",
        type=common.integers(0),
        default=[0, min(common.CORES, 8)],
        metavar="N,...",
        help="numbers of loading processes of a DataLoader to try",
    )
    parser.add_argument(
        "--repeats", type=common.number(int, 1), default=3, help="times that each loop is measured"
    )
    parser.set_defaults(dataset="cifar10", model="cnn", clients=10, partition="iid", epochs=1)
    args = parser.parse_args(argv)
    plain = parser.parse_args([])
    for flag in (
        "precision",
        "clip",
        "optimizer",
        "local_steps",
        "drop_last",
        "weighting",
        "server",
        "persist_opt",
    ):
        if getattr(args, flag) != getattr(plain, flag):
            parser.error(f"argument --{flag.replace('_', '-')}: not in the conventional loop")
    data, figures, best = bare_loop.random_images(args), [], []
    print("conventional  fedavg.py   samples/s")
    for _ in range(args.repeats):
        tried = {loaders: conventional(args, data, loaders) for loaders in args.loaders}
        best.append(max(tried, key=tried.get))
        figures.append((tried[best[-1]], bare_loop.federated(args, data)[0]))
        print("{:12,.0f}{:11,.0f}".format(*figures[-1]), flush=True)
    bare_loop.summarise(args, "conventional", figures, loaders=statistics.mode(best))


if __name__ == "__main__":
    with common.one_line_errors("conventional"):
        main()
