"""FedProx: Federated Optimization in Heterogeneous Networks
Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127

FedAvg with a proximal term that keeps client k near the global weights w it started from:
    min_v  F_k(v) + mu/2 ||v - w||^2                                                         (Eq. 2)
over all trainable parameters, those of batch norm included.

State: none beyond a copy of w during training. Bytes per client and round: the model down, the
model up. The code of FedAlign and MOON has the 1/2, too. rFedAvg's has not: its lambda is our mu/2.
Nor has the later code of FedMLB's authors: its 0.001 is our mu 0.002.

Measured: rFedAvg's Table II, MNIST, similarity 0%, mu 1, learning rate 0.01 where FedAvg has 0.1,
last five rounds: 75.02 +- 2.17, published 69.36 +- 5.78 (n=1, AMD EPYC, 1 core, commit 67b18e9;
docs/results.md). FedCKA's Table 1, CIFAR-10, 20 of 100 rounds, learning rate 0.01, mu 0.001:
64.36 beside FedAvg's 63.92 (n=1, Intel Xeon, 2 cores, commits cd27d00 and e10f676; docs/fedcka.md).

FedAlign paper, Table 5, row FedProx: 53.1 +- 0.3. Not measured here yet.
    python fedprox.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --mu 0.0001
"""

import common

import torch.nn.functional as F


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    w = worker.pin("w", list(net.parameters()))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        loss = loss + common.add_proximal(net, w, args.mu)  # mu/2 ||v - w||^2, gradient too (Eq. 2)
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument("--mu", type=common.number(float, 0), default=1e-4, help="0 is FedAvg")
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
