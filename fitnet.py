"""FitNet: FedAvg with distillation from the global model's features (FedAvg+FitNet)
A baseline of FedMLB: Kim, Kim, Han. Multi-Level Branched Regularization for Federated Learning.
ICML 2022. https://arxiv.org/abs/2207.06936 After Romero, Ballas, Kahou, Chassang, Gatta, Bengio.
FitNets: Hints for Thin Deep Nets. ICLR 2015. https://arxiv.org/abs/1412.6550

The teacher is the frozen global model of the round's start:
    L = CE + gamma mean_m mean((f_m local - f_m global)^2),   gamma 1
f_m is the output of block m, over all blocks but the classifier. A block without parameters
(pooling) counts with the block before it. FedMLB's text gives no formula and no weight; these are
ours.

State: none beyond the global model during training. Bytes per client and round: the model down, the
model up.

FedMLB paper, Table 2, row FedAvg + FitNet (CIFAR-100, 100 clients, 5%): EMA 47.67. Not measured
here yet.
    python fitnet.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced \\
        --clients 100 --sample 0.05 --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 \\
        --lr-decay 0.998 --momentum 0 --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip \\
        --normalise cifar10 --gamma 1
"""

import common

import torch.nn.functional as F


def hint_blocks(net):
    """Return the numbers, from 0, of the blocks whose outputs are compared."""
    return [m for m in range(len(net) - 1) if next(net[m + 1].parameters(), None) is not None]


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    glob = worker.frozen("glob")
    hints = hint_blocks(net)

    def step(x, y):
        out, teacher, hint = x, x, 0
        for m, block in enumerate(net):
            out = block(out)
            if args.gamma and m < len(net) - 1:
                teacher = glob[m](teacher)
            if args.gamma and m in hints:
                hint = hint + F.mse_loss(out, teacher) / len(hints)
        loss = F.cross_entropy(out, y)
        loss = loss + args.gamma * hint
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    weight = common.number(float, 0)
    parser.add_argument("--gamma", type=weight, default=1.0, help="of the hints; 0 is FedAvg")
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
