"""Ditto: Fair and Robust Federated Learning Through Personalization
Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221

FedAvg, and beside it a network v_k of each client's own, held near the global weights w:
    min_v  F_k(v) + lambda/2 ||v - w||^2                                                     (Eq. 2)
On each batch, before FedAvg's step on it,
    v_k <- v_k - lr (grad F_k(v_k) + lambda (v_k - w))                                 (Algorithm 1)
lambda 0 is training alone; the global network is FedAvg's for every lambda.

State: each client keeps v_k, which starts at the w of its first round. Bytes per client and round:
the model down, the model up. The steps of v_k are without momentum, weight decay and --clip.

No published number is repeated here. On non-IID CIFAR-10:
    python ditto.py --dataset cifar10 --model resnet8 --clients 10 --alpha 0.1 --client-test
"""

import common

import torch
import torch.nn.functional as F


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    w = worker.pin("w", list(net.parameters()))
    own = worker.frozen("own", client.state.get("personal")).train().requires_grad_()
    v = list(own.parameters())

    def step(x, y):
        gradient = torch.autograd.grad(F.cross_entropy(own(x), y), v)
        with torch.no_grad():
            pull = torch._foreach_mul(torch._foreach_sub(v, w), args.lam)  # lambda (v - w)
            update = torch._foreach_add(gradient, pull)
            torch._foreach_sub_(v, torch._foreach_mul(update, opt.param_groups[0]["lr"]))
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    client.state["personal"] = own.state_dict()


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    parser.add_argument("--lam", type=common.number(float, 0), default=1.0, help="lambda")
    args = parser.parse_args(argv)
    return run(args, local_update)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
