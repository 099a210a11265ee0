"""FedMLB: Multi-Level Branched Regularization for Federated Learning
Kim, Kim, Han. ICML 2022. https://arxiv.org/abs/2207.06936

Hybrid pathways, m local blocks followed by the frozen global blocks m+1..M, keep each local block
usable by the global ones:
    L = CE(q_L, y) + lambda1 mean_m CE(q_H^m, y) + lambda2 mean_m KL(q~_H^m || q~_L)      (Eqs. 5-8)
q~ = softmax(logits / tau); m = 1..M-1. Gradients flow into the local blocks through q_L, and
through the frozen tails from q_H, in both its terms. The global network is constant. --direction
global-local: pathway m is the global blocks 1..m followed by the local ones (the paper's ablation).
--pathways 1,2: a subset. The sums are divided by their number; --divisor all divides by M-1, as the
authors' code. --server avgm, --server adam and --dyn-alpha (which needs feddyn.py) combine it with
FedAvgM, FedADAM and FedDyn.

State: none; with --dyn-alpha FedDyn's, and FedDyn's equal weights of clients. Bytes per client and
round: the model down, the model up.

FedMLB paper, Table 1, row FedMLB (CIFAR-100, 100 clients, 5%): EMA 54.58. Not measured here yet.
    python fedmlb.py --dataset cifar100 --model resnet18-gn --partition dirichlet-balanced \\
        --clients 100 --sample 0.05 --alpha 0.3 --rounds 1000 --epochs 5 --batch-size 50 --lr 0.1 \\
        --lr-decay 0.998 --momentum 0 --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip \\
        --normalise cifar10
"""

import common

import torch.nn.functional as F


def pathway_cuts(net):
    """Return the numbers of blocks after which a pathway may change over.

    They are those with parameters, without a head and the classifier."""
    blocks = [(m, block) for m, block in enumerate(net[:-1], 1) if [*block.parameters()]]
    return [m for m, block in blocks if getattr(block, "branches", True)]


def check(net, args):
    """Raise UserError where --pathways names one that the network lacks."""
    pathways = len(pathway_cuts(net))
    if args.pathways and max(args.pathways) > pathways:
        raise common.UserError(f"argument --pathways: {args.model} has pathways 1 to {pathways}")


def hybrid_logits(net, glob, x, hidden, m, direction):
    """Return the logits of pathway m. hidden[m]: output of m local blocks on x."""
    if direction == "local-global":
        return glob[m:](hidden[m])
    # at_width(., 1): batch norm as in training, but without a second update of its statistics
    return common.at_width(net[m:], glob[:m](x), 1.0)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    glob = worker.frozen("glob")
    all_cuts = pathway_cuts(net)
    cuts = [m for i, m in enumerate(all_cuts, 1) if not args.pathways or i in args.pathways]
    divisor = len(all_cuts if args.divisor == "all" else cuts)
    if args.dyn_alpha:
        feddyn = common.import_extra("feddyn", "--dyn-alpha", "")
        h, w = feddyn.begin(worker, client)

    def step(x, y):
        hidden = [x]
        for block in net:
            hidden.append(block(hidden[-1]))
        out = hidden[-1]
        loss = F.cross_entropy(out, y)
        if args.lambda1 or args.lambda2:
            log_q = F.log_softmax(out / args.tau, 1)
            for m in cuts:
                hybrid = hybrid_logits(net, glob, x, hidden, m, args.direction)
                # in logarithms: else the gradient of KL(q_H || q_L) is NaN where q_H is 0
                log_h = F.log_softmax(hybrid / args.tau, 1)
                kl = F.kl_div(log_q, log_h, reduction="batchmean", log_target=True)
                ce = F.cross_entropy(hybrid, y)
                loss = loss + (args.lambda1 * ce + args.lambda2 * kl) / divisor  # Eqs. 5-8
        opt.zero_grad()
        loss.backward()
        if args.dyn_alpha:
            loss = loss + feddyn.add_penalty(net, h, w, args.dyn_alpha)
        opt.step()
        return loss

    yield step
    if args.dyn_alpha:
        feddyn.finish(net, client, h, w, args.dyn_alpha)


def aggregate(net, received, server, args):
    """Aggregate as FedDyn does."""
    common.import_extra("feddyn", "--dyn-alpha", "").aggregate(net, received, server, args)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    add, weight = parser.add_argument, common.number(float, 0)
    directions = ["local-global", "global-local"]
    add("--lambda1", type=weight, default=1.0, help="of the pathways' CE; both 0 is FedAvg")
    add("--lambda2", type=weight, default=1.0, help="of the pathways' KL; both 0 is FedAvg")
    add("--tau", type=common.number(float, 0, open_low=True), default=1.0, help="of the KL")
    add("--pathways", type=common.integers(1), metavar="M,...", help="in use, from 1; default: all")
    add("--direction", default=directions[0], choices=directions, help="which blocks come first")
    add("--divisor", default="selected", choices=["selected", "all"], help="of the sums over m")
    add("--dyn-alpha", type=weight, default=0.0, help="FedDyn's alpha, uniform weights; 0: without")
    parser.set_defaults(weighting=None)
    args = parser.parse_args(argv)
    args.weighting = args.weighting or ("uniform" if args.dyn_alpha else "samples")
    return run(args, local_update, aggregate if args.dyn_alpha else None, adapt=check)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
