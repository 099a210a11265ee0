"""MOON: Model-Contrastive Federated Learning
Li, He, Song. CVPR 2021. https://arxiv.org/abs/2103.16257

FedAvg with a contrastive term that pulls a client's features z towards those of the global model,
z_glob, and away from those of its own model of the last round it took part in, z_prev, on the same
batch:
    L = CE + mu l_con                                                                        (Eq. 4)
    l_con = -log[e^(cos(z, z_glob)/tau) / (e^(cos(z, z_glob)/tau) + e^(cos(z, z_prev)/tau))] (Eq. 3)
z: output of a projection head before the classifier, which reads it too. The term is 0 in a
client's first round.

State: each client keeps its last model. Bytes per client and round: the model down, the model up.
The frozen networks are in eval mode, as in the MOON authors' code. With --frozen-mode train they
are in train mode, as in FedAlign's code: their batch norm uses the batch's statistics. That moves
their running statistics, which nothing reads. Both codes give a client that was never sampled a
last model too: MOON's a random network, FedAlign's the initial global one, after round 1 the one
that round 1 ended with. Ours has none. MOON's code can keep several last models; we keep one, its
default. --projection is 0 by default for cnn and cnn-moon, which have the head built in, and 256
for all others: mu 0 is FedAvg with the same --projection.

Measured: FedCKA's Table 1, CIFAR-10, 20 of 100 rounds, learning rate 0.01, mu 10: 65.16 +- 0.14,
0.82 +- 0.58 over FedAvg on the same partitions (n=3, Intel Xeon, 2 cores, commits cd27d00, e10f676
and d6b6a72; docs/fedcka.md).

FedAlign paper, Table 5, row MOON: 55.0 +- 0.5. Not measured here yet.
    python moon.py --dataset cifar100 --model resnet56 --clients 16 --alpha 0.5 --rounds 25 \\
        --epochs 20 --drop-last --mu 1 --frozen-mode train
"""

import common

import torch.nn.functional as F


def contrastive_loss(z, z_glob, z_prev, tau):
    """Eq. 3, mean over the batch of features z, z_glob, z_prev, each (batch, width)."""
    towards = F.cosine_similarity(z, z_glob) / tau
    away = F.cosine_similarity(z, z_prev) / tau
    return F.softplus(away - towards).mean()  # -log(e^t / (e^t + e^a)) = log(1 + e^(a - t))


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    prev = client.state.get("net")
    has_prev = worker.pin("has_prev", float(prev is not None))  # 0: no term; step cannot branch
    glob, prev = worker.frozen("glob"), worker.frozen("prev", prev)
    for frozen in (glob, prev):
        frozen.train(args.frozen_mode == "train")

    def step(x, y):
        z = net[:-1](x)
        out = net[-1](z)
        loss = F.cross_entropy(out, y)
        if args.mu:
            l_con = contrastive_loss(z, glob[:-1](x), prev[:-1](x), args.temperature)
            loss = loss + args.mu * has_prev * l_con  # Eq. 4
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    client.state["net"] = net.state_dict()


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.set_defaults(projection=None)
    add, positive = parser.add_argument, common.number(float, 0, open_low=True)
    add("--mu", type=common.number(float, 0), default=1.0, help="of the contrast; 0 is FedAvg")
    add("--temperature", type=positive, default=0.5, help="tau")
    add("--frozen-mode", default="eval", choices=["eval", "train"], help="see above")
    args = parser.parse_args(argv)
    if args.projection is None:
        args.projection = 0 if args.model in ("cnn", "cnn-moon") else 256
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
