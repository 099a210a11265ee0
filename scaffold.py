"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning
Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378

Control variates, c of the server and c_k of each client, correct every local step for the client's
drift:
    v <- v - lr (g(v) - c_k + c)                                                             (Eq. 3)
    c_k+ = gradient of F_k at w                                          (option I)
    c_k+ = c_k - c + (w - w_k) / (K lr), K local steps                   (option II)         (Eq. 4)
    server:  w <- w + server_lr sum_k alpha_k (w_k - w),   c <- c + 1/N sum_k (c_k+ - c_k)   (Eq. 5)
alpha_k is n_k/n, as in NIID-Bench; with --weighting uniform 1/|S|, as in the paper. Batch-norm
statistics are averaged and not corrected. g is a batch's gradient; N counts all clients, |S| the
sampled ones. With momentum there are two ways to correct:
    --correction step      after the optimizer's step, v <- v - lr (c - c_k), which momentum never
                           sees (NIID-Bench)
    --correction gradient  in the gradient. K becomes (K - m (1 - m^K)/(1 - m)) / (1 - m), what
                           momentum m makes of K gradients of 1 (FedNTD's code); with Nesterov's the
                           first m is m^2
Option I's c_k is a gradient, which momentum has not scaled, so its correction goes into the
gradient. By default it is step for option II with momentum or RMSProp, else gradient.

State: c_k at each client, c at the server. Bytes per client and round: the model and c down, the
model and c_k+ - c_k up. In rFedAvg's public code the correction never reaches the model, which is
FedAvg's.

Measured: on MNIST, ten clients of two to seven digits, 96.75 +- 0.35 beside FedAvg's 95.21 +- 0.69
(n=3, AMD EPYC, 2 cores, commit 6a96d7b; docs/demonstration.md), gradients clipped at norm 1. In
rFedAvg's Table II, MNIST, similarity 0%, NaN in round 9 (n=1, 1 core, commit 67b18e9): one client's
c_k had grown to six times the median's (docs/results.md).

FedCKA paper, Table 1, CIFAR-10, row SCAFFOLD: 64.33. Not measured here yet.
    python scaffold.py --dataset cifar10 --model cnn --clients 10 --alpha 5 --rounds 100 \\
        --epochs 10 --batch-size 128 --lr 0.1 --no-nesterov --weight-decay 1e-5 --augment none
"""

import common

import torch
import torch.nn.functional as F


def effective_steps(steps, momentum, nesterov):
    """Return what the gradients of so many SGD steps weigh in the sum of the updates, over lr."""
    first = momentum**2 if nesterov else momentum
    return (steps - first * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def gradient(net, batches, samples):
    """Return the gradient of the mean cross-entropy over the batches, a list like net.parameters().

    Batch norm uses the statistics of the batches, as in training, and leaves the running ones
    alone."""
    total = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in batches:
        out = common.at_width(net, x, 1.0) if common.has_batch_norm(net) else net(x)
        loss = F.cross_entropy(out, y, reduction="sum") / samples
        torch._foreach_add_(total, torch.autograd.grad(loss, list(net.parameters())))
    return total


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    params = list(net.parameters())
    zeros = [torch.zeros_like(p) for p in params]
    c = client.download(server.get("c", zeros))
    c_k = worker.pin("c_k", client.state.get("c", zeros))
    correction = worker.pin("correction", torch._foreach_sub(c, c_k))
    w = worker.pin("w", params)
    if args.option == 1:
        c_new = gradient(net, worker.batches(client), len(client))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        if args.correction == "gradient":
            torch._foreach_add_([p.grad for p in params], correction)  # Eq. 3
        opt.step()
        if args.correction == "step":
            with torch.no_grad():
                lr = opt.param_groups[0]["lr"]
                torch._foreach_sub_(params, torch._foreach_mul(correction, lr))
        return loss

    yield step
    steps = max(1, len(worker.sizes))
    if args.correction == "gradient":
        steps = effective_steps(steps, args.momentum, args.nesterov)
    with torch.no_grad():
        if not worker.sizes:  # --drop-last left it nothing to train on
            c_new = c_k
        elif args.option == 2:  # Eq. 4
            c_new = torch._foreach_div(torch._foreach_sub(w, params), steps * worker.lr)
            torch._foreach_sub_(c_new, correction)
        client.sum("dc", torch._foreach_sub(c_new, c_k))
        client.state["c"] = c_new


@torch.no_grad()
def aggregate(net, received, server, args):
    """FedAvg's server step, and c <- c + 1/N sum_k (c_k+ - c_k)."""
    common.average(net, received, server, args)
    c = server.setdefault("c", [torch.zeros_like(p) for p in net.parameters()])
    torch._foreach_add_(c, received.sums["dc"], alpha=1 / args.clients)  # Eq. 5


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument("--option", type=int, default=2, choices=[1, 2], help="how c_k is renewed")
    parser.add_argument("--correction", choices=["step", "gradient"], help="where it goes")
    args = parser.parse_args(argv)
    scaled = args.option == 2 and (args.momentum or args.optimizer != "sgd")
    args.correction = args.correction or ("step" if scaled else "gradient")
    unknown = args.option == 2 and (args.persist_opt and args.momentum or args.optimizer != "sgd")
    if args.correction == "gradient" and unknown:
        parser.error("--correction gradient: --option 2 takes neither RMSProp nor --persist-opt")
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
