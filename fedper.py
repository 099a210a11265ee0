"""FedPer: Federated Learning with Personalization Layers
Arivazhagan, Aggarwal, Singh, Choudhary. 2019. https://arxiv.org/abs/1912.00818

FedAvg of all blocks but the last. Client k trains its own last block v_k, which it never sends:
    min_{w, v_k}  F_k(w, v_k),   then  w <- sum_k n_k/n w_k

State: each client keeps v_k. Bytes per client and round: the other blocks down, the other blocks
up. A client starts with the last block of the initial network. The global network keeps that one,
so its test_acc says nothing; --client-test measures the clients' own (personal_acc). The paper also
keeps several last blocks; here it is the classifier alone.

No published number is repeated here. On non-IID CIFAR-10:
    python fedper.py --dataset cifar10 --model resnet8 --clients 10 --alpha 0.1 --client-test
"""

import common

import torch.nn.functional as F


def head(net):
    """Return the weights of net's last block, a part of its state_dict."""
    body = net[:-1].state_dict()
    return {name: v for name, v in net.state_dict().items() if name not in body}


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
    own = client.state["personal"] = head(net)
    body = [v for name, v in net.state_dict().items() if name not in own]
    client.receives(body)
    client.sends(body)


def aggregate(net, received, server, args):
    received.mean |= head(net)  # which nobody sends
    common.average(net, received, server, args)


def main(argv=None, run=common.run):
    parser = common.flags(__doc__, __file__)
    args = parser.parse_args(argv)
    return run(args, local_update, aggregate)


if __name__ == "__main__":
    with common.one_line_errors():
        main()
