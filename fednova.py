"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization
Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481

Clients of many local steps pull the average towards their own optimum. FedNova divides each
client's change by a_k, the weight of its steps (the paper's ||a_k||_1), and multiplies the mean by
the mean a_k:
    w <- w + (sum_k alpha_k a_k) sum_k alpha_k (w_k - w) / a_k,   alpha_k = n_k/n
For K steps with momentum m, which starts at zero,
    a_k = (K - m (1 - m^K)/(1 - m)) / (1 - m)
That is K without momentum; with Nesterov's, m^2 replaces the first m. If all a_k are equal, it is
FedAvg. Batch-norm statistics are averaged. In NIID-Bench's code n_k counts batches, not samples.

State: none. Bytes per client and round: the model down, the model and one number up.

NIID-Bench (Li et al., ICDE 2022), CIFAR-10, Dirichlet(0.5): 66.8 after 50 rounds, mean of three,
beside FedAvg's 68.2. Here 64.9 +- 2.5, beside 64.6 +- 3.2 (three partitions; docs/benchmark.md).
    python fednova.py --dataset cifar10 --model simple-cnn --clients 10 --alpha 0.5 --rounds 50 \\
        --epochs 10 --batch-size 64 --lr 0.01 --no-nesterov --weight-decay 1e-5 \\
        --normalise none --augment reflect-crop,flip
"""

import common

import torch
import torch.nn.functional as F


def effective_steps(steps, momentum, nesterov):
    """Return a_k: what the gradients of so many SGD steps weigh in w - w_k, over lr."""
    first = momentum**2 if nesterov else momentum
    return (steps - first * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    w = worker.pin("w", list(net.parameters()))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    a = effective_steps(len(worker.sizes), args.momentum, args.nesterov)  # 0 without a step
    drift = torch._foreach_sub(list(net.parameters()), w)
    drift = torch._foreach_mul(drift, client.weight / max(a, 1))  # a of any step is 1 at least
    client.sum("d", drift, sent=False)  # w_k is sent anyway
    client.sum("a", torch.tensor(client.weight * a, dtype=torch.float64))


@torch.no_grad()
def aggregate(net, received, server, args):
    """w <- w + (sum_k alpha_k a_k) sum_k alpha_k (w_k - w) / a_k."""
    for (name, w), d in zip(net.named_parameters(), received.sums["d"]):
        received.mean[name] = w + received.sums["a"].to(w) * d
    server["report"] = {"effective_steps": received.sums["a"].item()}
    common.average(net, received, server, args)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    args = parser.parse_args(argv)
    if args.optimizer != "sgd" or args.persist_opt:
        flag = "--persist-opt" if args.persist_opt else "--optimizer"
        parser.error(f"argument {flag}: FedNova weighs steps of sgd from no momentum")
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
