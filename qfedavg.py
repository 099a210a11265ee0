"""qFedAvg: Fair Resource Allocation in Federated Learning
Li, Sanjabi, Beirami, Smith. ICLR 2020. https://arxiv.org/abs/1905.10497

FedAvg whose server weighs clients by their loss F_k at w, to even out their accuracies (Algorithm 2):
    Dw_k = L (w - w_k),   D_k = F_k^q Dw_k,   h_k = q F_k^(q-1) ||Dw_k||^2 + L F_k^q
    w <- w - sum_k D_k / sum_k h_k
F_k: mean cross-entropy over the client's training data, in eval mode; L = 1/lr; batch-norm statistics are averaged.

State: none. Bytes per client and round: the model down, the model and one number up.
--h rfedavg: as the rFedAvg authors' code, ||D_k||^2 in h_k and a constant for L (--lipschitz, 1 in their config). Their F_k
is the mean of the losses of full batches in training mode; ours stays that above. Clients are sampled uniformly.

rFedAvg paper, Table I, MNIST, row q-FedAvg, cross-silo, similarity 0%:
    python qfedavg.py --dataset mnist --model cnn-mcmahan --partition similarity --similarity 0 --clients 20 \\
        --rounds 60 --epochs 5 --batch-size 100 --lr 0.1 --momentum 0 --weight-decay 0 --drop-last --weighting uniform --q 1
"""

import torch
import torch.nn.functional as F

import common


@torch.no_grad()
def local_loss(net, batches, samples):
    net.eval()
    loss = sum(F.cross_entropy(net(x), y, reduction="sum") for x, y in batches) / samples
    net.train()
    return loss


@torch.no_grad()
def aggregate(net, uploads, server, args):
    w, total, h = {k: v.clone() for k, v in net.named_parameters()}, {}, 0
    lipschitz = (
        args.lipschitz if args.h == "rfedavg" else 1 / common.learning_rate(args, server["round"])
    )

    def summed():
        nonlocal h
        for upload in uploads:
            if not upload.weight:  # --drop-last left it nothing to train on
                yield upload
                continue
            loss = upload.message["loss"].double() + 1e-10  # powers of it are soon beyond fp32
            update = {k: lipschitz * (w[k] - upload.weights[k]).double() for k in w}
            norm = sum(v.square().sum() for v in update.values())
            if args.h == "rfedavg":
                norm = norm * loss ** (2 * args.q)
            h = h + args.q * loss ** (args.q - 1) * norm + lipschitz * loss**args.q
            for k, v in update.items():
                total[k] = total.get(k, 0) + loss**args.q * v
            yield upload

    common.average(net, summed(), {}, args)  # for the batch-norm statistics
    target = {k: (w[k] - total[k] / h).to(w[k]) for k in w}
    for (_, v), new in zip(
        net.named_parameters(), common.server_step(w, target, server, args).values()
    ):
        v.copy_(new)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    loss_before = local_loss(net, worker.batches(client), len(client))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    return {"loss": loss_before}


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--q",
        type=common.number(float, 0),
        default=1.0,
        help="how much fairness; 0 is FedAvg with --weighting uniform",
    )
    parser.add_argument("--h", default="paper", choices=["paper", "rfedavg"], help="whose h_k")
    parser.add_argument(
        "--lipschitz",
        type=common.number(float, 0, open_low=True),
        default=1.0,
        help="L of --h rfedavg",
    )
    args = parser.parse_args(argv)
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    main()
