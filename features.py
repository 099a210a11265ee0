"""Features that local models give to the samples of one class or several: rFedAvg (Wang et al., ICDE 2023), Fig. 1

    python features.py RUN --clients 0,1,2 --classes 0,1,2

What the classifier reads, (samples, d), for the chosen clients' models of the last round, all on the same training samples of
the chosen classes, drawn from all clients (--of own: each model on its own client's). They go to RUN/features.npz, as
client_K, (samples, d), and label_K, (samples,); index_K are the samples' places in the training set. A 2-D picture goes to
RUN/features-*.pdf: principal components of all models' features together and, if scikit-learn is installed, t-SNE.

RUN must have been made with --save-clients.
"""

import numpy as np
import torch
from tqdm import tqdm

import analysis
import common

COLOURS = [
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#f0e442",
    "#000000",
]  # Okabe and Ito
MARKERS = "o^sDvP*X"


@torch.no_grad()
def features(net, data, index):
    """(samples, d) in float32, of the training samples index, in eval mode, on the CPU."""
    parts = []
    for x in data.images(torch.from_numpy(index).split(250)):
        x = common.channels_last(data.normalise(x.to(data.y.device)))
        parts.append(net[:-1](x).float().cpu())
    return torch.cat(parts)


def principal_components(z):
    """The two leading principal components of z, (samples, d): coordinates (samples, 2) and shares of the variance (2,)."""
    z = z.double() - z.double().mean(0)
    u, s, _ = torch.linalg.svd(z, full_matrices=False)
    return (u * s)[:, :2].numpy(), (s.square() / s.square().sum().clamp(min=1e-300))[:2].numpy()


def draw(plt, coordinates, labels, clients, names, title):
    """One panel a client, all of the same scale; classes by colour and marker."""
    size = (2.6 * len(clients) + 0.8, 2.8)
    figure, panels = plt.subplots(
        1, len(clients), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axes, xy, y, k in zip(panels[0], coordinates, labels, clients):
        for i, label in enumerate(sorted({int(v) for part in labels for v in part})):
            axes.scatter(
                *xy[y == label].T,
                s=9,
                marker=MARKERS[(i + i // 8) % 8],
                color=COLOURS[i % 8],
                linewidths=0,
                alpha=0.8,
                label=f"class {label}",
            )
        axes.set(title=f"client {k}", xlabel=names[0])
    panels[0][0].set_ylabel(names[1])
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=2)
    figure.suptitle(title, fontsize=10, y=1.04)
    return figure


def main(argv=None):
    parser = common.PlainParser(__doc__)
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run made with --save-clients"
    )
    add = parser.add_argument
    add(
        "--clients",
        type=common.integers(0),
        default=[0, 1, 2],
        metavar="K,...",
        help="whose models",
    )
    add(
        "--classes",
        type=common.integers(0),
        default=[0, 1, 2],
        metavar="CLASS,...",
        help="whose samples",
    )
    add(
        "--of",
        default="all",
        choices=["all", "own"],
        help="samples of all clients, or each model's own client's",
    )
    add("--samples", type=common.number(int, 2), default=500, help="at most so many for each model")
    add(
        "--no-tsne",
        action="store_true",
        help="principal components alone; t-SNE needs scikit-learn",
    )
    analysis.add_machine(parser)
    add(
        "--seed",
        type=common.number(int, 0),
        default=0,
        help="of the choice of samples, and of t-SNE",
    )
    add(
        "--name",
        type=analysis.name,
        default="features",
        help="of the files written to the run folder",
    )
    args = parser.parse_args(argv)
    with common.one_line_errors("features", memory_advice="use fewer --samples or --device cpu"):
        for flag, values in (("clients", args.clients), ("classes", args.classes)):
            if len(set(values)) < len(values):
                raise common.UserError(f"argument --{flag}: names one twice")
        analysis.check_new(args.run, args.name, ("pca", "tsne"))
        run = analysis.open_run(args.run, analysis.machine(args))
        if max(args.classes) >= run.data.classes:
            raise common.UserError(
                f"argument --classes: {max(args.classes)} is no class of {run.args.dataset}, which has "
                f"{run.data.classes}, from 0"
            )
        nets, y, indices = [run.client_net(k) for k in args.clients], run.data.y.cpu().numpy(), []
        for k in args.clients:
            index = np.concatenate(run.parts) if args.of == "all" else run.parts[k]
            index = np.sort(index[np.isin(y[index], args.classes)])
            if len(index) < 2:
                raise common.UserError(
                    f"argument --classes: client {k} has {len(index)} samples of them; try --of all"
                )
            chosen = common.keyed("features", args.seed).choice(
                len(index), min(args.samples, len(index)), replace=False
            )
            indices.append(index[np.sort(chosen)])
        z = [
            features(net, run.data, index)
            for net, index in zip(tqdm(nets, "features", disable=None), indices)
        ]
        labels, ends = (
            [y[index] for index in indices],
            np.cumsum([len(index) for index in indices])[:-1],
        )
        arrays = {f"client_{k}": v.numpy() for k, v in zip(args.clients, z)}
        for name, own in (("label", labels), ("index", indices)):
            arrays |= {f"{name}_{k}": v for k, v in zip(args.clients, own)}
        together, title = torch.cat(z), f"{run.script}, {run.args.dataset}, {run.args.model}"
        pca, shares = principal_components(together)
        axes = [f"PC {i + 1} ({100 * share:.0f}% of variance)" for i, share in enumerate(shares)]
        pictures = {
            "pca": lambda plt: draw(plt, np.split(pca, ends), labels, args.clients, axes, title)
        }
        if not args.no_tsne:
            try:
                from sklearn.manifold import TSNE

                tsne = TSNE(
                    perplexity=min(30, (len(together) - 1) / 3), init="pca", random_state=args.seed
                )
                tsne, names = (
                    np.split(tsne.fit_transform(together.numpy()), ends),
                    ["t-SNE 1", "t-SNE 2"],
                )
                pictures["tsne"] = lambda plt: draw(plt, tsne, labels, args.clients, names, title)
            except ImportError:
                tqdm.write("no t-SNE, which needs scikit-learn (pip install scikit-learn)")
        result = {
            "script": run.script,
            "clients": args.clients,
            "classes": args.classes,
            "of": args.of,
            "seed": args.seed,
            "samples": [len(index) for index in indices],
            "features": together.shape[1],
            "pca_variance": shares.tolist(),
        }
        analysis.keep_analysis(args.run, args.name, result, arrays, pictures)
        sizes = ", ".join(f"{len(v)} x {v.shape[1]} of client {k}" for k, v in zip(args.clients, z))
        print(f"{args.run}/{args.name}.npz: {sizes}")


if __name__ == "__main__":
    main()
