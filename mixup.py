"""Mixup: mixup: Beyond Empirical Risk Minimization
Zhang, Cisse, Dauphin, Lopez-Paz. ICLR 2018. https://arxiv.org/abs/1710.09412

FedAvg on mixtures of two images of a batch (FedAlign paper, Sec. 3.1):
    x' = b x_i + (1 - b) x_j,   b ~ Beta(gamma, gamma)
    L = b CE(f(x'), y_i) + (1 - b) CE(f(x'), y_j)
with one b a batch and j a random permutation of it, as in the authors' code.

State: none. Bytes per client and round: the model down, the model up.

FedAlign paper, Table 5, row Mixup: 54.0 +- 0.1. Not measured here yet.
    python mixup.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --gamma 0.1
"""

import numpy as np
import common

import torch.nn.functional as F


def draw_beta(rng, steps, gamma):
    """Return b of each step, (steps,); 1, which mixes nothing, at gamma 0."""
    return (rng.beta(gamma, gamma, steps) if gamma else np.ones(steps)).astype(np.float32)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    worker.draw("beta", lambda rng, steps: draw_beta(rng, steps, args.gamma))
    worker.draw("order", lambda rng, steps: rng.random((steps, args.batch_size)))

    def step(x, y):
        b = worker.drawn("beta")
        j = worker.drawn("order")[: len(x)].argsort()  # a random permutation
        out = net(b * x + (1 - b) * x[j])
        loss = b * F.cross_entropy(out, y) + (1 - b) * F.cross_entropy(out, y[j])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    weight = common.number(float, 0)
    parser.add_argument("--gamma", type=weight, default=0.1, help="of Beta; 0 is FedAvg")
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
