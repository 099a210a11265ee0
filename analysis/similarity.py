"""Compare the layers of local and global models: FedCKA (Son et al., 2021), Fig. 2.

    python -m analysis.similarity RUN

Linear CKA between the activations of the global model and of each client's model after the last
round, on the whole test set, for each of fedcka.py's layers. The Gram matrices of the test set
would not fit into memory, so the three HSICs of
    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)),  K = A A', L = B B'
are means over minibatches of the unbiased estimator (Nguyen, Raghu, Kornblith, ICLR 2021), whose
expectation does not depend on the size of a batch. fedcka.py's own CKA (Eq. 3, biased) is higher,
the more so the smaller the batch.

RUN must have been made with --save-clients. Results go to RUN/similarity.json, the picture to
RUN/similarity-layers.pdf.
"""

import numpy as np
import torch
from tqdm import tqdm

import common
import fedcka
from analysis import pictures, runs

BATCH = 500  # test samples whose Gram matrices are in memory at once
LEAST_SAMPLES = 4  # of which the unbiased HSIC has an estimate


def hsic(a, b):
    """Return the unbiased HSIC of two Gram matrices, (n, n) each, n > 3 (Song et al., JMLR 2012).

    Diagonals play no part."""
    n = len(a)
    a, b = (gram - torch.diag(gram.diagonal()) for gram in (a, b))
    total = (a * b).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (a.sum(0) @ b.sum(0))) / (n * (n - 3))


def layer_grams(net, x):
    """Yield the Gram matrix, (n, n), of the output of each of fedcka.layers(net) for inputs x.

    No estimate depends on the mean that fedcka.gram takes off."""
    for layer in fedcka.layers(net):
        x = layer(x)
        yield fedcka.gram(x.flatten(1).double())


def batch_hsics(net, others, x):
    """Return HSIC(K, L), HSIC(K, K), HSIC(L, L) on inputs x, (others, layers, 3).

    K is of net's layers, L of the same layers of each of others."""
    own = list(layer_grams(net, x))  # the only Gram matrices that stay in memory
    pairs = ((k, m) for other in others for k, m in zip(own, layer_grams(other, x)))
    rows = [torch.stack([hsic(k, m), hsic(k, k), hsic(m, m)]) for k, m in pairs]
    return torch.stack(rows).unflatten(0, (len(others), -1))


@torch.no_grad()
def layer_similarities(net, others, batches):
    """Return the linear CKA of each layer of net with the same layer of others, (others, layers).

    batches: an iterable of inputs, each of which weighs as many as its samples; those of fewer than
    four, of no estimate, are left out."""
    batches = (x for x in batches if len(x) >= LEAST_SAMPLES)
    cross, a, b = sum(len(x) * batch_hsics(net, others, x) for x in batches).unbind(2)
    return (cross / (a * b).clamp(min=1e-300).sqrt()).cpu().numpy()


def layer_names(net):
    """Return a name for each of fedcka.layers(net): stem, stage1.1, stage1.2, ..., classifier."""
    names = []
    for name, block in net.named_children():
        inner = fedcka.layers([block])
        names += [name] if inner == [block] else [f"{name}.{i}" for i, _ in enumerate(inner, 1)]
    return names


def analyse(run, args):
    """Return the result, arrays and pictures of a FinishedRun, as runs.keep() takes them."""
    if len(run.data.x_test) < LEAST_SAMPLES:
        raise common.UserError(f"{run.path}: needs {LEAST_SAMPLES} test samples or more")
    nets = [run.client_net(k) for k in run.clients]
    parts = tqdm(run.data.x_test.split(BATCH), "test set", disable=None)
    batches = (common.channels_last(run.data.normalise(x)) for x in parts)
    values = layer_similarities(run.net, nets, batches)
    layers = layer_names(run.net)
    result = {"layers": layers, "clients": run.clients, "linear_cka": values.tolist()}
    result |= {"mean": values.mean(0).tolist(), "test_samples": len(run.data.x_test)}
    return result, {}, {"layers": (pictures.layers, layers, values, run.title)}


def main(argv=None):
    """Compare the layers of a run's models, write the results to its folder and print them."""
    parser = common.PlainParser(__doc__, prog="analysis/similarity.py")
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a finished run made with --save-clients")
    runs.add_run_flags(parser, "similarity")
    args = parser.parse_args(argv)
    with common.one_line_errors("analysis/similarity", advice="use --device cpu"):
        result = runs.analyse(args.run, args, analyse)
    width = max(map(len, result["layers"]))
    for name, column in zip(result["layers"], np.transpose(result["linear_cka"])):
        mean, low, high = column.mean(), column.min(), column.max()
        print(f"{name:{width}}  {mean:.4f}  (clients {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
