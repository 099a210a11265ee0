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


# --- similarity


def hsic(gram_a, gram_b):
    """Return the unbiased HSIC of two Gram matrices, (n, n) each, n > 3 (Song et al., JMLR 2012).

    Diagonals play no part.
    """
    n = len(gram_a)
    a = gram_a - torch.diag(gram_a.diagonal())
    b = gram_b - torch.diag(gram_b.diagonal())
    return (
        (a * b).sum()
        + a.sum() * b.sum() / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (a.sum(0) @ b.sum(0))
    ) / (n * (n - 3))


def gram(h):
    """Return h h' in float64, (n, n), of activations h, (n, ...), less their mean over n.

    No estimate depends on the mean; without it fewer digits cancel.
    """
    h = h.flatten(1)
    h = h - h.mean(0)
    return (h @ h.T).double()


def layer_grams(net, x):
    """Yield the Gram matrix, (n, n), of the output of each of fedcka.layers(net) for inputs x."""
    h = x
    for layer in fedcka.layers(net):
        h = layer(h)
        yield gram(h)


def batch_hsics(net, others, x):
    """Return HSIC(K, L), HSIC(K, K), HSIC(L, L) on inputs x, (others, layers, 3).

    K is of net's layers, L of the same layers of each of others.
    """
    # the only Gram matrices that stay in memory
    references = [(k, hsic(k, k)) for k in layer_grams(net, x)]
    rows = []
    for other in others:
        pairs = zip(references, layer_grams(other, x))
        rows += [torch.stack([hsic(k, m), kk, hsic(m, m)]) for (k, kk), m in pairs]
    return torch.stack(rows).unflatten(0, (len(others), -1))


@torch.no_grad()
def layer_similarities(net, others, batches):
    """Return the linear CKA of each layer of net with the same layer of others, (others, layers).

    batches: an iterable of inputs; those of fewer than four samples, of no estimate, are left out.
    Each batch weighs as many as its samples.
    """
    total = 0
    for x in batches:
        if len(x) >= LEAST_SAMPLES:
            total = total + len(x) * batch_hsics(net, others, x)
    cross, a, b = total.unbind(2)  # (others, layers) each
    return (cross / (a * b).clamp(min=1e-300).sqrt()).cpu().numpy()


def layer_names(net):
    """Return a name for each of fedcka.layers(net): stem, stage1.1, stage1.2, ..., classifier."""
    names = []
    for name, block in net.named_children():
        inner = fedcka.layers(torch.nn.Sequential(block))
        if len(inner) == 1 and inner[0] is block:
            names.append(name)
        else:
            names += [f"{name}.{i + 1}" for i in range(len(inner))]
    return names


# --- the command


def batches_of_test_set(data):
    """Yield the inputs of the test set in batches, with a progress bar."""
    for x in tqdm(data.x_test.split(BATCH), "test set", disable=None):
        yield common.channels_last(data.normalise(x))


def analyse(run):
    """Return the result of a FinishedRun; UserError if its test set is too small for CKA."""
    samples = len(run.data.x_test)
    if samples < LEAST_SAMPLES:
        raise common.UserError(f"{run.path}: CKA needs {LEAST_SAMPLES} test samples, not {samples}")
    nets = [run.client_net(k) for k in run.clients]
    values = layer_similarities(run.net, nets, batches_of_test_set(run.data))
    return {
        "script": run.script,
        "layers": layer_names(run.net),
        "clients": run.clients,
        "linear_cka": values.tolist(),
        "mean": values.mean(0).tolist(),
        "test_samples": samples,
    }


def show(result):
    """Print a line for each layer."""
    width = max(map(len, result["layers"]))
    for name, column in zip(result["layers"], np.transpose(result["linear_cka"])):
        mean, low, high = column.mean(), column.min(), column.max()
        print(f"{name:{width}}  {mean:.4f}  (clients {low:.4f} to {high:.4f})")


def main(argv=None):
    """Compare the layers of a run's models, write the results to its folder and print them."""
    parser = common.PlainParser(__doc__, prog="analysis/similarity.py")
    folder = "folder of a finished run made with --save-clients"
    parser.add_argument("run", metavar="RUN", help=folder)
    runs.add_run_flags(parser, "similarity")
    args = parser.parse_args(argv)
    with common.one_line_errors("analysis/similarity", advice="use --device cpu"):
        runs.check_new(args.run, args.name)
        run = runs.open_run(args.run, args.device, args.data_dir)
        result = analyse(run)
        values = np.array(result["linear_cka"])
        drawn = {"layers": (pictures.layers, result["layers"], values, run.title)}
        runs.keep(run, args.name, result, drawn=drawn)
        show(result)


if __name__ == "__main__":
    main()
