"""StochDepth: Deep Networks with Stochastic Depth
Huang, Sun, Liu, Sedra, Weinberger. ECCV 2016. https://arxiv.org/abs/1603.09382

FedAvg on a network whose residual block l of L is skipped at random in training (FedAlign paper,
Sec. 3.1):
    train: relu(b F(x) + I(x)), b ~ Bernoulli(rho_l);   test: relu(rho_l F(x) + I(x))
    rho_l = 1 - l/L (1 - rho_L)
b is drawn once a block and batch. A block that is skipped keeps its batch-norm statistics and gets
a gradient of zero.

State: none. Bytes per client and round: the model down, the model up.
By this rho_l, the default, the first block too is skipped at times. With --rule code rho_l
falls from 1 at the first block to rho_L at the last, as in FedAlign's code.

FedAlign paper, Table 5, row StochDepth: 55.5 +- 0.2. Not measured here yet.
    python stochdepth.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --keep 0.9 --rule code
"""

import common

import torch
import torch.nn.functional as F


class StochasticResidual(common.Residual):
    """relu(b branch(x) + shortcut(x)): b is mask in training, and keep in eval mode."""

    def __init__(self, block, keep):
        super().__init__(block.branch, block.shortcut)
        self.keep = keep
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x):
        b = self.mask if self.training else self.keep
        return F.relu(b * self.branch(x) + self.shortcut(x))


def keep_probabilities(blocks, keep, rule="paper"):
    """Return rho_1, ..., rho_L of L blocks."""
    if rule == "code":
        return [1 - block / max(1, blocks - 1) * (1 - keep) for block in range(blocks)]
    return [1 - block / blocks * (1 - keep) for block in range(1, blocks + 1)]


def adapt(net, args):
    """Make the residual blocks of net stochastic."""
    names = [name for name, block in net.named_modules() if isinstance(block, common.Residual)]
    names = [name for name in names if name and not name.startswith(tuple(f"{n}." for n in names))]
    if not names:
        raise common.UserError(f"--model {args.model}: no residual blocks to skip; use a resnet")
    for name, keep in zip(names, keep_probabilities(len(names), args.keep, args.rule)):
        net.set_submodule(name, StochasticResidual(net.get_submodule(name), keep))


def running_statistics(blocks):
    """Return the branches' batch-norm statistics, a list, and the block's number of each entry."""
    statistics, owner = [], []
    for i, block in enumerate(blocks):
        floats = [v for v in block.branch.buffers() if v.is_floating_point()]
        statistics += floats
        owner += [i] * sum(len(v) for v in floats)
    return statistics, torch.tensor(owner, dtype=torch.long)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    blocks = [m for m in net.modules() if isinstance(m, StochasticResidual)]
    keep = [block.keep for block in blocks]
    statistics, owner = running_statistics(blocks)
    owner = worker.pin("owner", owner)
    worker.draw("kept", lambda rng, steps: (rng.random((steps, len(keep))) < keep).astype("f4"))

    def step(x, y):
        kept = worker.drawn("kept")
        torch._foreach_copy_([block.mask for block in blocks], list(kept))
        before = torch.cat(statistics) if statistics else None
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if statistics:  # those of a skipped block stand still
            after = torch.where(kept[owner] > 0, torch.cat(statistics), before)
            torch._foreach_copy_(statistics, after.split([len(v) for v in statistics]))
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    add, share = parser.add_argument, common.number(float, 0, 1)
    add("--keep", type=share, default=0.9, help="rho_L; 1 is FedAvg")
    add("--rule", default="paper", choices=["paper", "code"], help="how rho_l falls, see above")
    args = parser.parse_args(argv)
    return run(args, local_update, adapt=adapt)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
