"""Extract the features that local models give to samples: rFedAvg (Wang et al., ICDE 2023), Fig. 1.

    python -m analysis.features RUN --clients 0,1,2 --classes 0,1,2

A feature is what the classifier reads. Those of the named clients' models of the last round, on the
same training samples of the named classes, drawn from all clients (--of own: each model on its own
client's), go to RUN/features.npz: client_K, (samples, features); label_K, (samples,); index_K, the
samples' places in the training set. Pictures of two dimensions go to RUN/features-*.pdf: principal
components of all models' features together and, if scikit-learn is installed, t-SNE.

RUN must have been made with --save-clients.
"""

from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import common
from analysis import runs

# the palette of Okabe and Ito, which colour-blind readers can tell apart
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #f0e442 #000000".split()
MARKERS = "o^sDvP*X"
PICTURES = "pca", "tsne"  # the keys of all
BATCH = 250  # samples that go through a network at once


# --- features and projections


@torch.no_grad()
def features(net, data, index):
    """Return the features of training samples, (samples, features) float32, on the CPU.

    net: in eval mode. index: (samples,), their places in the training set.
    """
    batches = []
    for x in data.images(torch.from_numpy(index).split(BATCH)):
        x = common.channels_last(data.normalise(x.to(data.y.device)))
        batches.append(net[:-1](x).float().cpu())
    return torch.cat(batches)


def principal_components(z):
    """Return the two leading principal components of z, (samples, d).

    (coordinates, (samples, 2); their shares of the variance, (2,)).
    """
    z = z.double() - z.double().mean(0)
    u, s, _ = torch.linalg.svd(z, full_matrices=False)
    shares = s.square() / s.square().sum().clamp(min=1e-300)
    return (u * s)[:, :2].numpy(), shares[:2].numpy()


def tsne_coordinates(z, seed):
    """Return the t-SNE of z, (samples, 2), or None, with a line, where scikit-learn is missing."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        tqdm.write("no t-SNE, which needs scikit-learn (pip install scikit-learn)")
        return None
    perplexity = min(30, (len(z) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(z.numpy())


class Selection(NamedTuple):
    """The training samples of which one client's model gives features."""

    client: int
    index: np.ndarray  # (samples,) places in the training set
    labels: np.ndarray  # (samples,)


def select_samples(run, client, args):
    """Return the Selection of a client's model, at most args.samples of args.classes.

    Raises UserError where there are fewer than two.
    """
    labels = run.data.y.cpu().numpy()
    index = np.concatenate(run.parts) if args.of == "all" else run.parts[client]
    index = np.sort(index[np.isin(labels[index], args.classes)])
    if len(index) < 2:
        raise common.UserError(
            f"argument --classes: client {client} has {len(index)} samples of them; try --of all"
        )
    rng = common.keyed("features", args.seed)
    places = rng.choice(len(index), min(args.samples, len(index)), replace=False)
    index = index[np.sort(places)]
    return Selection(client, index, labels[index])


# --- pictures


class Labels(NamedTuple):
    """What a picture says of its axes and classes, and above."""

    axes: list  # the names of both coordinates
    classes: list | None  # the names of all classes
    title: str

    def of_class(self, label):
        """Return how the legend calls a class."""
        return self.classes[label] if self.classes else f"class {label}"


def draw(plt, panels, labels):
    """Return a figure with one panel for each client; colours and markers are classes.

    panels: (Selection, its coordinates, (samples, 2)) of each client, which have one scale in all
    panels. labels: a Labels.
    """
    figure, row = plt.subplots(
        1,
        len(panels),
        figsize=(2.6 * len(panels) + 0.8, 2.8),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    row = row[0]
    classes = sorted({int(label) for selection, _ in panels for label in selection.labels})
    for axes, (selection, xy) in zip(row, panels):
        for i, label in enumerate(classes):
            axes.scatter(
                *xy[selection.labels == label].T,
                s=9,
                marker=MARKERS[(i + i // 8) % 8],
                color=COLOURS[i % 8],
                linewidths=0,
                alpha=0.8,
                label=labels.of_class(label),
            )
        axes.set(title=f"client {selection.client}", xlabel=labels.axes[0])
    row[0].set_ylabel(labels.axes[1])
    row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, markerscale=2)
    figure.suptitle(labels.title, fontsize=10, y=1.04)
    return figure


def picture(selections, coordinates, labels):
    """Return the function that draws coordinates, (all samples, 2), in the order of the clients."""
    ends = np.cumsum([len(selection.index) for selection in selections])[:-1]
    panels = list(zip(selections, np.split(coordinates, ends)))
    return lambda plt: draw(plt, panels, labels)


# --- the command


def analyse(run, args):
    """Return the Analysis of a FinishedRun."""
    nets = [run.client_net(k) for k in args.clients]
    selections = [select_samples(run, k, args) for k in args.clients]
    pairs = zip(tqdm(nets, "features", disable=None), selections)
    z = [features(net, run.data, selection.index) for net, selection in pairs]
    together = torch.cat(z)
    coordinates, shares = principal_components(together)
    result = {
        "script": run.script,
        "clients": args.clients,
        "classes": args.classes,
        "of": args.of,
        "seed": args.seed,
        "samples": [len(selection.index) for selection in selections],
        "features": together.shape[1],
        "pca_variance": shares.tolist(),
    }
    analysis = runs.Analysis(result, arrays_of(selections, z))
    names = [f"PC {i + 1} ({100 * share:.0f}% of variance)" for i, share in enumerate(shares)]
    labels = Labels(names, run.data.names, run.title)
    analysis.pictures["pca"] = picture(selections, coordinates, labels)
    coordinates = None if args.no_tsne else tsne_coordinates(together, args.seed)
    if coordinates is not None:
        labels = labels._replace(axes=["t-SNE 1", "t-SNE 2"])
        analysis.pictures["tsne"] = picture(selections, coordinates, labels)
    return analysis


def arrays_of(selections, z):
    """Return the arrays of features.npz; z: the features of each client's samples."""
    arrays = {}
    for selection, client_features in zip(selections, z):
        arrays[f"client_{selection.client}"] = client_features.numpy()
        arrays[f"label_{selection.client}"] = selection.labels
        arrays[f"index_{selection.client}"] = selection.index
    return arrays


def make_parser():
    """Return the parser of this analysis' flags."""
    parser = common.PlainParser(__doc__, prog="analysis/features.py")
    add = parser.add_argument
    numbers = {"type": common.integers(0), "default": [0, 1, 2]}
    add("run", metavar="RUN", help="folder of a finished run made with --save-clients")
    add("--clients", **numbers, metavar="K,...", help="whose models")
    add("--classes", **numbers, metavar="CLASS,...", help="whose samples")
    add(
        "--of",
        default="all",
        choices=["all", "own"],
        help="samples of all clients, or each model's own client's",
    )
    add("--samples", type=common.number(int, 2), default=500, help="at most so many for each model")
    add("--no-tsne", action="store_true", help="no t-SNE, which needs scikit-learn")
    add("--seed", type=common.number(int, 0), default=0, help="of the samples, and of t-SNE")
    runs.add_run_flags(parser, "features")
    return parser


def check_classes(args, run):
    """Raise UserError for a class that the data set of a FinishedRun lacks."""
    if max(args.classes) >= run.data.classes:
        raise common.UserError(
            f"argument --classes: {max(args.classes)} is no class of {run.args.dataset}, which has "
            f"{run.data.classes}, from 0"
        )


def check_repeats(args):
    """Raise UserError for a client or a class that is named twice."""
    for flag, values in (("clients", args.clients), ("classes", args.classes)):
        if len(set(values)) < len(values):
            raise common.UserError(f"argument --{flag}: names one twice")


def main(argv=None):
    """Write the features of a run's client models to its folder."""
    args = make_parser().parse_args(argv)
    advice = "use fewer --samples or --device cpu"
    with common.one_line_errors("analysis/features", advice=advice):
        check_repeats(args)
        runs.check_new(args.run, args.name, PICTURES)
        run = runs.open_run(args.run, args.device, args.data_dir)
        check_classes(args, run)
        analysis = analyse(run, args)
        runs.keep_analysis(run, args.name, analysis, PICTURES)
        for client, samples in zip(args.clients, analysis.result["samples"]):
            print(f"client {client}: {samples} samples of {analysis.result['features']} features")


if __name__ == "__main__":
    main()
