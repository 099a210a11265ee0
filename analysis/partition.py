"""Show how a data set's samples go to clients, without training.

    python -m analysis.partition --dataset glyphs --alpha 0.1 [--plot labels.png]

Flags are those of a run. One line a client: its samples, its classes, the share of its largest
class, with --client-test its test samples, and a bar as long as its samples are many. --plot draws
the label distribution as FedCKA's Fig. 4."""

import pathlib

import common
from analysis import pictures
from extras import partitions


def main(argv=None):
    """Print how --partition deals the training samples, and draw it to --plot."""
    parser = common.flags(__doc__, __file__)
    picture = "write a picture of the label distribution; needs matplotlib"
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help=picture)
    args = parser.parse_args(argv)
    if args.plot:
        pictures.check_picture("--plot", args.plot)
    data = common.load_data(args)
    parts = common.partition(data, args)
    tests = partitions.client_test_indices(data, parts, args) if args.client_test else None
    counts = partitions.label_counts(data, parts)
    show(args, data, counts, tests)
    if args.plot:
        pictures.write(args.plot, pictures.label_counts, counts, data.names)


def show(args, data, counts, tests):
    """Print what the data set and the partition are, and a table with a line a client.

    counts: (clients, classes) samples. tests: the clients' test indices, or None."""
    sizes, classes = counts.sum(1), (counts > 0).sum(1)  # of each client
    words, pixels = f"up to {data.x.shape[1]} words", "x".join(map(str, data.x.shape[1:]))
    shape = pixels if data.words is None else words
    samples = f"{len(data.y):,} training and {len(data.y_test):,} test samples ({shape})"
    print(f"{args.dataset}: {samples} of {data.classes} classes")
    spread = f"(mean {sizes.mean():,.1f}, deviation {sizes.std():,.1f})"
    each = f"{sizes.min():,} to {sizes.max():,} each {spread}"
    samples = f"{sizes.sum():,} training samples, {each}, of {classes.min()} to {classes.max()}"
    print(f"{args.partition}: {len(counts)} clients with {samples} classes")
    if args.moved:
        print(f"{args.moved:,} samples were moved so that each client has {args.min_size}")
    header = f"{'client':>6} {'samples':>8} {'classes':>8} {'largest':>8}"
    print(header + (f" {'test':>8}" if tests else ""))
    for k, (row, size) in enumerate(zip(counts, sizes)):
        line = f"{k:6} {size:8,} {classes[k]:8} {row.max() / size:8.0%}"
        line += f" {len(tests[k]):8,}" if tests else ""
        print(f"{line}  {'#' * max(1, round(50 * size / sizes.max()))}")


if __name__ == "__main__":
    with common.one_line_errors("analysis/partition"):
        main()
