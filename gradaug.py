"""GradAug: A New Regularization Method for Deep Neural Networks
Yang, Zhu, Chen. NeurIPS 2020. https://arxiv.org/abs/2006.07989

FedAvg with n narrow sub-networks that learn the full network's logits from images of another
resolution (FedAlign paper):
    L = CE(F(x), y) + mu sum_i KL(softmax F(x) || softmax F^(omega_i)(T_i(x)))               (Eq. 2)
The full network's logits are constants in the KL terms. Each network's backward pass adds to the
gradients, and one optimizer step follows. T_i resizes to a random resolution. omega_1 is
--min-width, the other widths are uniform between it and 1, as in the authors' code; with --widths
paper all are random, as in the paper's text. Batch norm in a sub-network uses the batch's own
statistics.

State: none. Bytes per client and round: the model down, the model up.
mu by default: 2, 1.75, 1.5, 1.25 for n = 1, 2, 3, 4 (FedAlign paper, Secs. 3.2 and 4), 1 for more.
Networks that flatten their feature maps are given images resized down and back up.

FedAlign paper, Table 5, row GradAug (n = 2): 57.0 +- 0.1. Not measured here yet.
    python gradaug.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --subnets 2 --mu 1.75
"""

import functools

import common

import torch.nn as nn
import torch.nn.functional as F

MU = {1: 2.0, 2: 1.75, 3: 1.5, 4: 1.25}


@functools.lru_cache(None)
def same_channels(width, channels):
    """Return the least width, in steps of 0.001, with the same channels in every layer.

    One CUDA graph serves all widths for which it is the same."""
    widths = [*(thousandth / 1000 for thousandth in range(1, 1001)), width]
    kept = {w: [common.make_divisible(c, w) for c in channels] for w in widths}
    return next(w for w in widths if kept[w] == kept[width])


def draw_variants(rng, steps, args, channels, resolutions):
    """Return of each step a tuple of (width, resolution), one a sub-network, the widest first."""
    variants = []
    for _ in range(steps):
        widths = rng.uniform(args.min_width, 1, args.subnets).round(3)
        widths[0] = args.min_width if args.widths == "code" else widths[0]
        widths = sorted((same_channels(float(w), channels) for w in widths), reverse=True)
        variants.append(tuple((w, int(rng.choice(resolutions))) for w in widths))
    return variants


def resize(x, resolution, back):
    """Return x, (batch, channels, size, size), bilinearly resized; back: to its own size again."""
    small = F.interpolate(x, (resolution,) * 2, mode="bilinear", align_corners=True)
    return F.interpolate(small, x.shape[2:], mode="bilinear", align_corners=True) if back else small


def channels_of(net):
    """Return the different numbers of channels in net's layers, the classifier aside."""
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    channels = {m.weight.shape[0] for m in layers if not isinstance(m, common.Classifier)}
    return tuple(sorted(channels))


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    size = worker.data.image_size
    usual = [224, 192, 160, 128] if size == 224 else [size * i // 8 for i in (8, 7, 6, 5)]
    back = not any(isinstance(m, nn.AdaptiveAvgPool2d) for m in net.modules())
    if args.mu:
        rng, steps, pixels = worker.rng("shapes"), len(worker.sizes), args.resolutions or usual
        worker.variants = draw_variants(rng, steps, args, channels_of(net), pixels)

    def step(x, y):
        loss, teacher = worker.segment(full, x, y)
        for width, resolution in worker.variant or ():
            loss = loss + worker.segment(narrow, x, teacher, width, resolution)
        worker.segment(opt.step)
        return loss

    def full(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad(set_to_none=False)  # segments add to gradients where they are
        loss.backward()
        return loss, out.softmax(1)

    def narrow(x, teacher, width, resolution):
        student = common.at_width(net, resize(x, resolution, back), width).log_softmax(1)
        loss = args.mu * F.kl_div(student, teacher, reduction="batchmean")  # Eq. 2
        loss.backward()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    add, width = parser.add_argument, common.number(float, 0, 1, open_low=True)
    add("--subnets", type=common.number(int, 1), default=2, help="n, number of sub-networks")
    add("--mu", type=common.number(float, 0), help="of each; 0 is FedAvg (default: by --subnets)")
    add("--min-width", type=width, default=0.8, help="least width of a sub-network")
    add("--widths", default="code", choices=["code", "paper"], help="see above")
    add("--resolutions", type=common.integers(8, 4096), metavar="PX,...", help="default: by size")
    args = parser.parse_args(argv)
    args.mu = MU.get(args.subnets, 1.0) if args.mu is None else args.mu
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
