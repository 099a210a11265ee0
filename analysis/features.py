"""Extract the features that local models give to samples: rFedAvg (Wang et al., ICDE 2023), Fig. 1.

    python -m analysis.features RUN --clients 0,1,2 --classes 0,1,2

A feature is what the classifier reads. Those of the named clients' models of the last round, on the
same training samples of the named classes, drawn from all clients (--of own: each model on its own
client's), go to RUN/features.npz: client_K, (samples, features); label_K, (samples,); index_K, the
samples' places in the training set. Pictures of two dimensions go to RUN/features-*.pdf: principal
components of all models' features together and, if scikit-learn is installed, t-SNE.

RUN must have been made with --save-clients.
"""

import numpy as np
import torch
from tqdm import tqdm

import common
from analysis import pictures, runs

BATCH = 250  # samples that go through a network at once


@torch.no_grad()
def features(net, data, index):
    """Return the features of the training samples at index, (samples, features), on the CPU."""
    batches = []
    for x in data.images(torch.from_numpy(index).split(BATCH)):
        x = common.channels_last(data.normalise(x.to(data.y.device)))
        batches.append(net[:-1](x).float().cpu())
    return torch.cat(batches)


def principal_components(z):
    """Return the two principal components of z, (samples, 2), and their shares of its variance."""
    z = z.double() - z.double().mean(0)
    u, s, _ = torch.linalg.svd(z, full_matrices=False)
    shares = s.square() / s.square().sum().clamp(min=1e-300)
    return (u * s)[:, :2].numpy(), shares[:2].numpy()


def tsne_plane(z, seed):
    """Return {"tsne": (points, (samples, 2), names of axes)} of z, {} without scikit-learn."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        tqdm.write("no t-SNE, which needs scikit-learn (pip install scikit-learn)")
        return {}
    tsne = TSNE(perplexity=min(30, (len(z) - 1) / 3), init="pca", random_state=seed)
    return {"tsne": (tsne.fit_transform(z.numpy()), ["t-SNE 1", "t-SNE 2"])}


def select_samples(run, client, args):
    """Return at most args.samples of args.classes for a client's model: their places, and labels.

    Raises UserError where there are fewer than two."""
    labels = run.data.y.cpu().numpy()
    index = np.concatenate(run.parts) if args.of == "all" else run.parts[client]
    index = np.sort(index[np.isin(labels[index], args.classes)])
    if len(index) < 2:
        why = f"client {client} has {len(index)} samples of them; try --of all"
        raise common.UserError(f"argument --classes: {why}")
    rng = common.seeded_rng("features", args.seed)
    index = np.sort(rng.choice(index, min(args.samples, len(index)), replace=False))
    return index, labels[index]


def analyse(run, args):
    """Return the result, arrays and pictures of a FinishedRun, as runs.keep() takes them."""
    if max(args.classes) >= run.data.classes:
        why = f"{max(args.classes)} is no class of {run.args.dataset}'s {run.data.classes}, from 0"
        raise common.UserError(f"argument --classes: {why}")
    nets = [run.client_net(k) for k in args.clients]
    index, labels = zip(*(select_samples(run, k, args) for k in args.clients))
    z, arrays, bar = [], {}, tqdm(nets, "features", disable=None)
    for k, net, label, selected in zip(args.clients, bar, labels, index):
        z.append(features(net, run.data, selected))
        arrays |= {f"client_{k}": z[-1].numpy(), f"label_{k}": label, f"index_{k}": selected}
    together, ends = torch.cat(z), np.cumsum(list(map(len, z)))[:-1]
    xy, shares = principal_components(together)
    planes = {"pca": (xy, [f"PC {i} ({v:.0%} of variance)" for i, v in enumerate(shares, 1)])}
    planes |= {} if args.no_tsne else tsne_plane(together, args.seed)
    names = run.data.names or [f"class {label}" for label in range(run.data.classes)]
    drawn = {
        key: (pictures.scatter, args.clients, labels, np.split(xy, ends), axes, names, run.title)
        for key, (xy, axes) in planes.items()
    }
    result = {name: getattr(args, name) for name in ("clients", "classes", "of", "seed")}
    result |= {"samples": list(map(len, index)), "features": together.shape[1]}
    return result | {"pca_variance": shares.tolist()}, arrays, drawn


def main(argv=None):
    """Write the features of a run's client models to its folder."""
    parser = common.PlainParser(__doc__, prog="analysis/features.py")
    add, whose = parser.add_argument, "samples of all clients, or each model's own client's"
    numbers = {"type": common.integers(0), "default": [0, 1, 2]}
    add("run", metavar="RUN", help="folder of a finished run made with --save-clients")
    add("--clients", **numbers, metavar="K,...", help="whose models")
    add("--classes", **numbers, metavar="CLASS,...", help="whose samples")
    add("--of", default="all", choices=["all", "own"], help=whose)
    add("--samples", type=common.number(int, 2), default=500, help="at most so many for each model")
    add("--no-tsne", action="store_true", help="no t-SNE, which needs scikit-learn")
    add("--seed", type=common.SEED, default=0, help="of the samples, and of t-SNE")
    runs.add_run_flags(parser, "features")
    args = parser.parse_args(argv)
    with common.one_line_errors("analysis/features", "use fewer --samples or --device cpu"):
        result = runs.analyse(args.run, args, analyse)
    for client, samples in zip(args.clients, result["samples"]):
        print(f"client {client}: {samples} samples of {result['features']} features")


if __name__ == "__main__":
    main()
