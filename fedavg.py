"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data
McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. https://arxiv.org/abs/1602.05629

In each round every sampled client k starts at the global weights, v = w, and runs E epochs of SGD
on its loss, which end at v = w_k (Algorithm 1, ClientUpdate):
    F_k(v) = 1/n_k sum_i CE(f(x_i; v), y_i)
The server averages what comes back; n counts the samples of the sampled clients:
    w <- sum_k alpha_k w_k,   alpha_k = n_k/n                                          (Algorithm 1)

State: none. Bytes per client and round: the model down, the model up. Batch-norm statistics are
averaged with the weights. Momentum starts at zero in every round; --persist-opt keeps it per
client. FedAlign's code keeps it per worker thread. A client trains on its last, short batch too;
FedAlign's code leaves it out, as --drop-last does.

Measured: rFedAvg's Table II, MNIST, similarity 0%, last five rounds: 94.16 and 93.43 (seeds 0, 1),
published 94.38 +- 0.26 (x86_64 and AMD EPYC, 2 cores, commits ff1a9d4, e95fd1a; docs/results.md).

FedAlign paper, Table 5, row FedAvg: 52.9 +- 0.1. Not measured here yet.
    python fedavg.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last
"""

import common

import torch.nn.functional as F


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
