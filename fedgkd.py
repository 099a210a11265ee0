"""FedGKD: Toward Heterogeneous Federated Learning via Global Knowledge Distillation
Yao, Pan, Dai, Wan, Ding, Yu, Jin, Xu, Sun. IEEE Transactions on Computers 2024 (arXiv 2021).
https://arxiv.org/abs/2107.00051

Distillation from the plain average w~ of the last M global models, the current one included:
    L = CE + gamma/2 KL(softmax(f(w~)) || softmax(f(v)))                                     (Eq. 6)
The KL is a mean over the batch at temperature 1, and there is none in the first round. The initial
model never counts among the last: in round 2 w~ is what the first aggregation gave, as in the
authors' code.

State: the server keeps the last M models and their mean. Bytes per client and round: two models
down (one in the first round), one up. M is 5 and gamma/2 is 0.1, as in the authors' code; FedMLB
gives gamma 0.2 and no M.

FedMLB paper, Table 2, row FedGKD (CIFAR-100, 100 clients, 5%): EMA 47.96. Not measured here yet.
    python fedgkd.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced \\
        --clients 100 --sample 0.05 --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 \\
        --lr-decay 0.998 --momentum 0 --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip \\
        --normalise cifar10
"""

import common

import torch
import torch.nn.functional as F


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    mean = server.get("mean") if args.gamma else None
    has_mean = worker.pin("has_mean", float(mean is not None))  # 0: no term; step cannot branch
    teacher = worker.frozen("teacher", client.download(mean))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        if args.gamma:
            kl = F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
            loss = loss + args.gamma / 2 * has_mean * kl  # Eq. 6
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def aggregate(net, received, server, args):
    """FedAvg's average, and the mean of the last --buffer global models, the new one included."""
    buffer = server.setdefault("buffer", [])
    common.average(net, received, server, args)
    buffer.append({k: v.clone() for k, v in net.state_dict().items()})
    del buffer[: -args.buffer]
    mean = dict(buffer[-1])
    for k, v in mean.items():
        if v.is_floating_point():
            mean[k] = torch.stack([w[k] for w in buffer]).mean(0)
    server["mean"] = mean


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    add = parser.add_argument
    add("--gamma", type=common.number(float, 0), default=0.2, help="2 x KL's weight; 0 is FedAvg")
    add("--buffer", type=common.number(int, 1), default=5, help="M, global models in the average")
    args = parser.parse_args(argv)
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
