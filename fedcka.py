"""FedCKA: Compare Where It Matters: Using Layer-Wise Regularization to Improve Federated Learning on Heterogeneous Data
Son, Kim, Chung, Min. 2021. https://arxiv.org/abs/2112.00407

MOON's contrast on the first M layers instead of the last, with centered kernel alignment for its similarity:
    L = CE + mu l_cka                                                              (Eq. 1)
    l_cka = -1/M sum_n log[e^s(a_n, g_n) / (e^s(a_n, g_n) + e^s(a_n, p_n))]        (Eq. 2)
a_n, g_n, p_n: activations of layer n in the local, the global and the client's last model on the same batch; the frozen
two run no further than layer M. The stem counts as a layer, and so does each residual block. s: linear CKA (Eq. 3), or
another --similarity-metric. No temperature. The term is 0 until a client has a last model; batches under three samples are
left out (linear CKA is undefined at one and 1 at two). The equations are reconstructed from the paper's prose.

State: each client keeps its last model. Bytes per client and round: the model down, the model up.
The paper gives neither the bandwidth of kernel CKA (here: the median squared distance) nor the formulas of the Frobenius
and cosine similarities (here: minus the mean squared difference; the cosine of the flattened activations).
`fedcka.py --similarity-of RUN` compares the layers of a finished run instead (Fig. 2; similarity.py).

FedCKA paper, Table 1, CIFAR-10, row FedCKA:
    python fedcka.py --dataset cifar10 --model cnn --clients 10 --alpha 5 --rounds 100 --epochs 10 --batch-size 128 \\
        --lr 0.1 --no-nesterov --weight-decay 1e-5 --augment none --mu 3
"""

import sys

import torch
import torch.nn.functional as F

import common


def _centred(gram):
    return gram - gram.mean(0, keepdim=True) - gram.mean(1, keepdim=True) + gram.mean()


def _scaled(x):
    """x over its Frobenius norm, so that no product of squares leaves the range of fp32."""
    return x / x.norm().clamp(min=1e-30)


def _cka(k_a, k_b):
    return (_scaled(_centred(k_a)) * _scaled(_centred(k_b))).sum()


def linear_cka(a, b):
    """Linear CKA of activations a, b, (batch, features each): ||B'A||_F^2 / (||A'A||_F ||B'B||_F) of centred columns,
    computed from the batch x batch Gram matrices, so that the width of the layer does not matter."""
    a, b = (
        a - a.mean(0),
        b - b.mean(0),
    )  # before the product: a large mean would cancel badly afterwards
    return _cka(a @ a.T, b @ b.T)


def kernel_cka(a, b):
    """CKA with the kernel exp(-d^2 / (2 median d^2)), the median over all pairs and held constant."""

    def gram(x):
        x = x - x.mean(0)
        squares = x.square().sum(1)
        distances = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=0)
        ordered = distances.detach().flatten().sort().values
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        return torch.exp(-distances / (2 * median).clamp(min=1e-30))

    return _cka(gram(a), gram(b))


def squared_frobenius(a, b):
    """Minus the mean squared difference."""
    return -(a - b).square().mean()


def vectorized_cosine(a, b):
    """Cosine of the two matrices as vectors."""
    return F.cosine_similarity(a.flatten(), b.flatten(), dim=0)


SIMILARITIES = {
    "linear-cka": linear_cka,
    "kernel-cka": kernel_cka,
    "frobenius": squared_frobenius,
    "cosine": vectorized_cosine,
}


def layers(net):
    """The network's blocks, with each residual block of a stage by itself."""
    return [
        layer
        for block in net.children()
        for layer in (
            block if isinstance(next(block.children(), None), common.Residual) else [block]
        )
    ]


def check(net, args):
    if args.layers > len(layers(net)):
        raise common.UserError(f"argument --layers: {args.model} has {len(layers(net))} layers")
    if args.mu and args.batch_size < 3:
        raise common.UserError(
            "argument --batch-size: must be at least 3, since CKA of two samples is 1"
        )


def local_update(worker, client, server, args):
    net, opt = worker.net, worker.opt
    prev = client.state.get("net")
    known = worker.pin("known", float(prev is not None))  # 0 skips the term
    glob, prev = worker.frozen("glob"), worker.frozen("prev", prev)
    similarity = SIMILARITIES[args.similarity_metric]
    net_layers, glob_layers, prev_layers = layers(net), layers(glob), layers(prev)

    def step(x, y):
        compared = args.layers if args.mu and len(x) > 2 else 0
        a, g, p, contrast = x, x, x, 0
        for m in range(compared):
            a, g, p = net_layers[m](a), glob_layers[m](g), prev_layers[m](p)
            towards, away = (similarity(a.flatten(1), h.flatten(1)) for h in (g, p))
            contrast = contrast + F.softplus(away - towards) / args.layers
        for layer in net_layers[compared:]:
            a = layer(a)
        out = a
        loss = F.cross_entropy(out, y)
        if compared:
            loss = loss + args.mu * known * contrast
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    yield step
    client.state["net"] = net.state_dict()


def main(argv=None, run=common.run):
    argv = sys.argv[1:] if argv is None else argv
    if "--similarity-of" in argv:
        import similarity

        return similarity.main([word for word in argv if word != "--similarity-of"])
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--mu",
        type=common.number(float, 0),
        default=3.0,
        help="weight of the contrastive term; 0 is FedAvg",
    )
    parser.add_argument(
        "--layers",
        type=common.number(int, 1),
        default=2,
        help="M, layers from the input that are compared",
    )
    parser.add_argument(
        "--similarity-metric", default="linear-cka", choices=list(SIMILARITIES), help="s"
    )
    args = parser.parse_args(argv)
    return run(args, local_update, adapt=check)


if __name__ == "__main__":
    main()
