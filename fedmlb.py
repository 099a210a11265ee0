"""FedMLB: Multi-Level Branched Regularization for Federated Learning
Kim, Kim, Han. ICML 2022. https://arxiv.org/abs/2207.06936

Hybrid pathways, m local blocks followed by the frozen global blocks m+1..M, keep each local block usable by the global ones:
    L = CE(q_L, y) + lambda1 mean_m CE(q_H^m, y) + lambda2 mean_m KL(q~_H^m || q~_L)                 (Eqs. 5-8)
q~ = softmax(logits / tau); m = 1..M-1. Gradients flow into the local blocks through q_L and, through the frozen tails,
through q_H, also inside the KL term; the global network is constant.
--direction global-local: pathway m is the global blocks 1..m followed by the local ones (the paper's ablation).
--pathways: a subset, such as 1,2; divided by their number, or by M-1 as the authors' code does (--divisor all).
--server avgm, adam or --dyn-alpha (which needs feddyn.py) combine it with FedAvgM, FedADAM and FedDyn.

State: none; with --dyn-alpha FedDyn's, and its plain average. Bytes per client and round: the model down, the model up.

FedMLB paper, Table 1, row FedMLB (CIFAR-100, 100 clients, 5%):
    python fedmlb.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced --clients 100 --sample 0.05 \\
        --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 --lr-decay 0.998 --momentum 0 \\
        --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip --normalise cifar10
"""

import torch.nn.functional as F

import common
import feddyn


def pathway_cuts(net):
    """Numbers of blocks after which a pathway may change over: behind each block with parameters but head and classifier."""
    return [
        m
        for m, b in enumerate(net[:-1], 1)
        if next(b.parameters(), None) is not None and not isinstance(b, common.Head)
    ]


def check(net, args):
    if args.pathways and max(args.pathways) > len(pathway_cuts(net)):
        raise common.UserError(
            f"argument --pathways: {args.model} has pathways 1 to {len(pathway_cuts(net))}"
        )


def hybrid_logits(net, glob, x, hidden, cuts, direction):
    """Logits of the pathways. hidden[m]: output of m local blocks on x."""
    if direction == "local-global":
        return [glob[m:](hidden[m]) for m in cuts]
    # at_width(., 1): batch norm as in training, but without a second update of its statistics
    return [common.at_width(net[m:], glob[:m](x), 1.0) for m in cuts]


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    glob = worker.frozen("glob")
    cuts = pathway_cuts(net)
    if args.pathways:
        cuts = [cuts[m - 1] for m in sorted(set(args.pathways))]
    divisor = len(cuts) if args.divisor == "selected" else len(pathway_cuts(net))
    if args.dyn_alpha:
        h_dyn, w = feddyn.begin(worker, client)

    def step(x, y):
        hidden = [x]
        for block in net:
            hidden.append(block(hidden[-1]))
        out = hidden[-1]
        loss = F.cross_entropy(out, y)
        if args.lambda1 or args.lambda2:
            log_q = F.log_softmax(out / args.tau, 1)
            for hybrid in hybrid_logits(net, glob, x, hidden, cuts, args.direction):
                # in logarithms: the gradient of KL in its first argument is NaN where a probability is rounded to 0
                divergence = F.kl_div(
                    log_q,
                    F.log_softmax(hybrid / args.tau, 1),
                    reduction="batchmean",
                    log_target=True,
                )
                loss = (
                    loss
                    + (args.lambda1 * F.cross_entropy(hybrid, y) + args.lambda2 * divergence)
                    / divisor
                )
        if args.dyn_alpha:
            loss = loss + feddyn.penalty(net, h_dyn, w, args.dyn_alpha)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    if args.dyn_alpha:
        feddyn.finish(worker, client, h_dyn, w, args.dyn_alpha)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--lambda1",
        type=common.number(float, 0),
        default=1.0,
        help="weight of the pathways' CE; both 0 is FedAvg",
    )
    parser.add_argument(
        "--lambda2",
        type=common.number(float, 0),
        default=1.0,
        help="weight of the pathways' KL; both 0 is FedAvg",
    )
    parser.add_argument(
        "--tau",
        type=common.number(float, 0, open_low=True),
        default=1.0,
        help="temperature of the KL term",
    )
    parser.add_argument(
        "--pathways",
        type=common.integers(1),
        metavar="M,...",
        help="pathways in use, from 1; without it all",
    )
    parser.add_argument(
        "--direction",
        default="local-global",
        choices=["local-global", "global-local"],
        help="which blocks come first",
    )
    parser.add_argument(
        "--divisor",
        default="selected",
        choices=["selected", "all"],
        help="what the sums over pathways are divided by",
    )
    parser.add_argument(
        "--dyn-alpha",
        type=common.number(float, 0),
        default=0.0,
        help="alpha of FedDyn, whose --weighting is uniform; 0 is without",
    )
    parser.set_defaults(weighting=None)
    args = parser.parse_args(argv)
    args.weighting = args.weighting or ("uniform" if args.dyn_alpha else "samples")
    return run(
        args, local_update, feddyn.aggregate if args.dyn_alpha else common.average, adapt=check
    )


if __name__ == "__main__":
    main()
