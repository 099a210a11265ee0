"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization
Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. https://arxiv.org/abs/2102.07623

FedAvg of everything but batch norm. Client k keeps the scales, shifts and statistics of its batch
norm, b_k, which it never sends:
    min_{w, b_k}  F_k(w, b_k),   then  w <- sum_k n_k/n w_k

State: each client keeps b_k. Bytes per client and round: the model without batch norm, down and up.
A client starts with the batch norm of the initial network. The global network keeps that one, so
its test_acc says nothing; --client-test measures the clients' own (personal_acc). The average of
the paper's Algorithm 1 is the plain one, 1/K, of --weighting uniform.

No published number is repeated here. On non-IID CIFAR-10:
    python fedbn.py --dataset cifar10 --model resnet8 --clients 10 --alpha 0.1 --client-test
"""

import common

import torch.nn as nn
import torch.nn.functional as F


def norms(net):
    """Return the weights and statistics of net's batch norm, a part of its state_dict."""
    kind = nn.modules.batchnorm._BatchNorm
    layers = {name for name, module in net.named_modules() if isinstance(module, kind)}
    return {name: v for name, v in net.state_dict().items() if name.rpartition(".")[0] in layers}


def check(net, args):
    if not norms(net):
        raise common.UserError(f"--model {args.model}: no batch norm to keep; use a resnet")


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    common.load_weights(net, net.state_dict() | client.state.get("personal", {}))

    def step(x, y):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    own = client.state["personal"] = norms(net)
    rest = [v for name, v in net.state_dict().items() if name not in own]
    client.receives(rest)
    client.sends(rest)


def aggregate(net, received, server, args):
    received.mean |= norms(net)  # which nobody sends
    common.average(net, received, server, args)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    args = parser.parse_args(argv)
    return run(args, local_update, aggregate, adapt=check)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
