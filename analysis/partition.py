"""Show how a data set's samples go to clients, without training.

    python -m analysis.partition --dataset glyphs --alpha 0.1 [--plot labels.png]

Flags are those of a run. One line a client: its samples, its classes, the share of its largest
class, with --client-test its test samples, and a bar as long as its samples are many. --plot draws
the label distribution as FedCKA's Fig. 4."""

import io
import pathlib

import common
import run_folder
from extras import partitions
from common import UserError


def main(argv=None):
    parser = common.flags(__doc__, __file__)
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of the label distribution; needs matplotlib"
    )
    args = parser.parse_args(argv)
    try:
        describe(args)
    except (UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))


def describe(args):
    """Print how args.partition deals the training samples, and draw it to args.plot if named."""
    path = pathlib.Path(args.plot) if args.plot else None
    if path:
        check_plot(path)
    data = common.load_data(args)
    parts = common.partition(data, args)
    tests = partitions.client_test_indices(data, parts, args) if args.client_test else None
    counts = partitions.label_counts(data, parts)
    print_summary(args, data, counts)
    print_clients(counts, tests)
    if path:
        plot_labels(counts, path, data.names)


def print_summary(args, data, counts):
    """Print what the data set and the partition are. counts: (clients, classes) samples."""
    sizes = counts.sum(1)
    classes = (counts > 0).sum(1)  # of each client
    shape = "x".join(map(str, data.x.shape[1:]))
    if data.words is not None:
        shape = f"up to {data.x.shape[1]} words"
    print(
        f"{args.dataset}: {len(data.y):,} training and {len(data.y_test):,} test samples ({shape}) "
        f"of {data.classes} classes"
    )
    print(
        f"{args.partition}: {len(counts)} clients with {sizes.sum():,} training samples, "
        f"{sizes.min():,} to {sizes.max():,} each (mean {sizes.mean():,.1f}, deviation "
        f"{sizes.std():,.1f}), of {classes.min()} to {classes.max()} classes"
    )
    if args.moved:
        print(f"{args.moved:,} samples were moved so that each client has {args.min_size}")


def print_clients(counts, tests):
    """Print a table with a line a client. tests: the clients' test indices, or None."""
    header = f"{'client':>6} {'samples':>8} {'classes':>8} {'largest':>8}"
    print(header + (f" {'test':>8}" if tests else ""))
    longest = counts.sum(1).max()
    for k, row in enumerate(counts):
        size = row.sum()
        line = f"{k:6} {size:8,} {(row > 0).sum():8} {row.max() / size:8.0%}"
        if tests:
            line += f" {len(tests[k]):8,}"
        print(f"{line}  {'#' * max(1, round(50 * size / longest))}")


def check_plot(path):
    """Raise UserError unless a picture can be written to path, before data are read."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError("--plot: needs matplotlib (pip install matplotlib)") from None
    if path.exists():
        raise UserError(f"--plot {path}: exists already")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise UserError(f"--plot {path}: must end in one of {', '.join(sorted(formats))}")


def plot_labels(counts, path, names=None):
    """Draw counts, (clients, classes) training samples, as a picture in the file path.

    names: of the classes."""
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    width = max(4.0, min(16.0, 1.5 + 0.25 * clients))  # inches
    height = max(3.0, min(10.0, 1 + 0.25 * classes))
    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        counts.T, aspect="auto", origin="lower", cmap="Blues", vmin=0, interpolation="nearest"
    )
    axes.set(xlabel="client", ylabel="class")
    digits = len(str(clients - 1))
    label_all(axes.xaxis, range(clients), 72 * (width - 1.5) / clients / (0.8 * digits))
    label_all(axes.yaxis, names or range(classes), 0.9 * 72 * (height - 1) / classes)
    figure.colorbar(image, label="training samples")
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    run_folder.write_atomically(path, picture.getvalue())


def label_all(axis, names, size):
    """Label each place on an axis by its name; some by numbers where only a small type would fit.

    size: of the type that fits, points."""
    if size < 5:
        axis.get_major_locator().set_params(integer=True)
        return
    labels = [str(name)[:20] for name in names]
    axis.set_ticks(range(len(labels)), labels, fontsize=min(10, size))


if __name__ == "__main__":
    main()
