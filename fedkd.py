"""FedKD: FedAvg with distillation from the global model, on logits (FedAvg+KD) or on features (FedAvg+FitNet)
Baselines of FedMLB: Kim, Kim, Han. Multi-Level Branched Regularization for Federated Learning. ICML 2022.
https://arxiv.org/abs/2207.06936
After Hinton, Vinyals, Dean (2015), https://arxiv.org/abs/1503.02531, and FitNets, Romero et al. (ICLR 2015),
https://arxiv.org/abs/1412.6550.

The teacher is the frozen global model of the round's start.
    --hint logits:    L = (1 - gamma) CE + gamma KL(softmax(global) || softmax(local)),   gamma 0.2, temperature 1
    --hint features:  L = CE + gamma mean_m mean((f_m local - f_m global)^2) over blocks m but the classifier,   gamma 1
FedMLB's text gives no formula and no weights for either; the first is that of its Flower reproduction, the second ours.

State: none beyond the global model during training. Bytes per client and round: the model down, the model up.

FedMLB paper, Table 2, row FedAvg + KD (CIFAR-100, 100 clients, 5%):
    python fedkd.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced --clients 100 --sample 0.05 \\
        --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 --lr-decay 0.998 --momentum 0 \\
        --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip --normalise cifar10 --gamma 0.2
"""

import torch.nn.functional as F

import common


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    glob = worker.frozen("glob")
    # a block before one without parameters is compared behind that one: behind the pooling
    hints = [
        m
        for m in range(len(net) - 1)
        if args.hint == "features" and next(net[m + 1].parameters(), None) is not None
    ]
    gamma = args.gamma if args.gamma is not None else {"logits": 0.2, "features": 1.0}[args.hint]

    def step(x, y):
        h, teacher, hint = x, x, 0
        for m, block in enumerate(net):
            h = block(h)
            if gamma:
                teacher = glob[m](teacher)
                if m in hints:
                    hint = hint + F.mse_loss(h, teacher) / len(hints)
        loss = F.cross_entropy(h, y)
        if gamma and args.hint == "features":
            loss = loss + gamma * hint
        elif gamma:
            loss = (1 - gamma) * loss + gamma * F.kl_div(
                h.log_softmax(1), teacher.softmax(1), reduction="batchmean"
            )
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--hint",
        default="logits",
        choices=["logits", "features"],
        help="what is distilled: FedAvg+KD, FedAvg+FitNet",
    )
    parser.add_argument(
        "--gamma",
        type=common.number(float, 0),
        help="weight of the distillation; 0 is FedAvg (default: 0.2 for logits, 1 for features)",
    )
    args = parser.parse_args(argv)
    if args.hint == "logits" and args.gamma and args.gamma > 1:
        parser.error(f"argument --gamma: must be at most 1 with --hint logits, not {args.gamma}")
    return run(args, local_update)


if __name__ == "__main__":
    main()
