"""How alike are the layers of local and global models? FedCKA (Son et al., 2021), Fig. 2

    python similarity.py RUN        (or: python fedcka.py --similarity-of RUN)

Linear CKA between the activations of the global model and of each client's model after the last round, on the whole test set,
for each of fedcka.py's layers. The Gram matrices of the test set would not fit into memory, so the three HSICs of
    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)),  K = A A', L = B B'
are means over minibatches of the unbiased estimator (Nguyen, Raghu, Kornblith, ICLR 2021), whose expectation
does not depend on the size of a batch. fedcka.py's own CKA (Eq. 3, biased) is higher, the more so the smaller the batch.

RUN must have been made with --save-clients. Results go to RUN/similarity.json, the picture to RUN/similarity-layers.pdf.
"""

import torch
from tqdm import tqdm

import analysis
import common
import fedcka


def hsic(k, l):
    """Unbiased HSIC of Gram matrices k, l, (n, n) each, n > 3 (Song et al., JMLR 2012)."""
    n = len(k)
    k, l = (m - torch.diag(m.diagonal()) for m in (k, l))
    return (
        (k * l).sum()
        + k.sum() * l.sum() / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (k.sum(0) @ l.sum(0))
    ) / (n * (n - 3))


def gram(h):
    """h h' in float64, (n, n), of activations h, (n, ...), less their means: no estimate depends on these."""
    h = h.flatten(1)
    h = h - h.mean(0)
    return (h @ h.T).double()


@torch.no_grad()
def layer_similarities(net, others, batches):
    """Linear CKA of each of fedcka.layers(net) between net and each of others, (others, layers), over batches of inputs."""

    def grams(model, h):
        for layer in fedcka.layers(model):
            h = layer(h)
            yield gram(h)

    total = 0
    for x in batches:
        if len(x) < 4:  # of no estimate
            continue
        glob = [(k, hsic(k, k)) for k in grams(net, x)]  # the only Gram matrices that are kept
        total = total + len(x) * torch.stack(
            [
                torch.stack(
                    [
                        torch.stack([hsic(k, l), own, hsic(l, l)])
                        for (k, own), l in zip(glob, grams(other, x))
                    ]
                )
                for other in others
            ]
        )
    cross, a, b = total.unbind(2)  # (others, layers) each
    return (cross / (a * b).clamp(min=1e-300).sqrt()).cpu().numpy()


def layer_names(net):
    """Of fedcka.layers(net): stem, stage1.1, stage1.2, ..., classifier."""
    names = []
    for name, block in net.named_children():
        inner = fedcka.layers(torch.nn.Sequential(block))
        names += (
            [name]
            if len(inner) == 1 and inner[0] is block
            else [f"{name}.{i + 1}" for i in range(len(inner))]
        )
    return names


def draw(plt, names, clients, values, title):
    """The mean over clients, one thin line a client."""
    figure, axes = plt.subplots(figsize=(max(4, 0.28 * len(names) + 1.5), 3))
    for line in values:
        axes.plot(line, color="#999999", linewidth=0.7)
    axes.plot([], [], color="#999999", linewidth=0.7, label=f"each of {len(clients)} clients")
    axes.plot(values.mean(0), "o-", color="#0072b2", markersize=4, label="mean")
    axes.set(xlabel="layer, from the input", ylabel="linear CKA with the global model", title=title)
    axes.set_ylim(min(0.0, values.min()), 1.02)
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=90 if len(names) > 8 else 30,
        ha="center" if len(names) > 8 else "right",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="best", frameon=False)
    return figure


def main(argv=None):
    parser = common.PlainParser(__doc__)
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run made with --save-clients"
    )
    analysis.add_machine(parser)
    parser.add_argument(
        "--name",
        type=analysis.name,
        default="similarity",
        help="of the files written to the run folder",
    )
    args = parser.parse_args(argv)
    with common.one_line_errors("similarity", memory_advice="use --device cpu"):
        analysis.check_new(args.run, args.name, ("layers",))
        run = analysis.open_run(args.run, analysis.machine(args))
        others = [run.client_net(k) for k in run.clients]
        data, names = run.data, layer_names(run.net)
        if len(data.x_test) < 4:
            raise common.UserError(
                f"{args.run}: its test set has {len(data.x_test)} samples, and CKA needs at least 4"
            )

        def batches():
            for x in tqdm(data.x_test.split(500), "test set", disable=None):
                x = data.normalise(x)
                yield common.channels_last(x)

        values = layer_similarities(run.net, others, batches())
        result = {
            "script": run.script,
            "layers": names,
            "clients": run.clients,
            "linear_cka": values.tolist(),
            "mean": values.mean(0).tolist(),
            "test_samples": len(data.x_test),
        }
        title = f"{run.script}, {run.args.dataset}, {run.args.model}"
        pictures = {"layers": lambda plt: draw(plt, names, run.clients, values, title)}
        analysis.keep_analysis(args.run, args.name, result, {}, pictures)
        width = max(map(len, names))
        for name, column in zip(names, values.T):
            print(
                f"{name:{width}}  {column.mean():.4f}  (clients {column.min():.4f} to {column.max():.4f})"
            )


if __name__ == "__main__":
    main()
