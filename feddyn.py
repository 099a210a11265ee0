"""FedDyn: Federated Learning Based on Dynamic Regularization
Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263

Each client's loss gets a linear and a quadratic term, so that its stationary points become those of the global loss:
    L_k(v) = F_k(v) - <h_k, v> + alpha/2 ||v - w||^2                               (Eq. 1)
    client, after training:  h_k <- h_k - alpha (v - w)
    server:  h <- h - alpha/N sum_k (w_k - w),   w <- mean_k w_k - h/alpha         (Algorithm 1)
N: all clients; the sum and the mean, which is uniform, are over the sampled ones. --clip clips the whole gradient.

State: h_k at each client, h at the server. Bytes per client and round: the model down, the model up.
The authors' code adapts alpha to each client's size; here it is one number, as in the paper.

FedMLB paper, Table 1, row FedDyn (CIFAR-100, 100 clients, 5%):
    python feddyn.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced --clients 100 --sample 0.05 \\
        --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 --lr-decay 0.998 --momentum 0 \\
        --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip --normalise cifar10 --dyn-alpha 0.1
"""

import torch
import torch.nn.functional as F

import common


def penalty(net, h, w, alpha):
    """-<h, v> + alpha/2 ||v - w||^2 of the parameters v of net; h, w: lists of tensors."""
    return sum(
        alpha / 2 * (v - w_).square().sum() - (h_ * v).sum()
        for v, h_, w_ in zip(net.parameters(), h, w)
    )


def begin(worker, client):
    """h_k and w of the client's round, pinned."""
    params = list(worker.net.parameters())
    h = client.state.get("h") or [torch.zeros_like(p) for p in params]
    return worker.pin("h", h), worker.pin("w", params)


@torch.no_grad()
def finish(worker, client, h, w, alpha):
    client.state["h"] = [h_ - alpha * (v - w_) for v, h_, w_ in zip(worker.net.parameters(), h, w)]


@torch.no_grad()
def aggregate(net, uploads, server, args):
    """The server's two lines above; with alpha 0 h/alpha is left out, so that the average remains."""
    w = {k: v.clone() for k, v in net.named_parameters()}
    drift = {k: torch.zeros_like(v) for k, v in w.items()}  # sum_k (w_k - w)

    def summed():
        for upload in uploads:
            for k in drift:
                drift[k] += upload.weights[k] - w[k]
            yield upload

    common.average(net, summed(), server, args)
    if args.dyn_alpha:
        h = server.setdefault("h", {k: torch.zeros_like(v) for k, v in w.items()})
        for k, v in net.named_parameters():
            h[k] -= args.dyn_alpha / args.clients * drift[k]
            v -= h[k] / args.dyn_alpha


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    h, w = begin(worker, client)

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        if args.dyn_alpha:
            loss = loss + penalty(net, h, w, args.dyn_alpha)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    if args.dyn_alpha:
        finish(worker, client, h, w, args.dyn_alpha)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.set_defaults(weighting="uniform")
    parser.add_argument(
        "--dyn-alpha",
        type=common.number(float, 0),
        default=0.1,
        help="alpha; 0 is FedAvg with --weighting uniform",
    )
    args = parser.parse_args(argv)
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    main()
