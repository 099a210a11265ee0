"""The pictures of all analyses, and how a picture is written; they need matplotlib."""

import io
import pathlib

import numpy as np

import common
import run_folder

# the palette of Okabe and Ito, which colour-blind readers can tell apart, but for its yellow
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000 #8c564b".split()
MARKERS = "o^sDvP*X"
STYLE = {  # type that journals accept
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "",  # names in a file: equal figures give equal files
}


def pyplot():
    """Return matplotlib.pyplot, drawing into files. Raises UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise common.UserError("pictures need matplotlib (pip install matplotlib)") from None
    return pyplot


def check_file(flag, path):
    """Raise UserError for a file to be written that exists, or whose folder does not."""
    if path.exists():
        raise common.UserError(f"argument {flag}: {path} exists already; name another file")
    if not path.absolute().parent.is_dir():
        raise common.UserError(f"argument {flag}: {path}: there is no folder {path.parent}")


def check_picture(flag, path):
    """Raise UserError unless matplotlib can write a new picture to path."""
    check_file(flag, path)
    kinds = pyplot().matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise common.UserError(f"argument {flag}: {path} must end in one of {', '.join(kinds)}")


def write(path, draw, *content):
    """Write the figure that draw(pyplot, *content) returns to path, whose ending is its kind."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, buffer = draw(plt, *content), io.BytesIO()
        how = {"format": pathlib.Path(path).suffix[1:], "dpi": 200, "bbox_inches": "tight"}
        figure.savefig(buffer, **how, metadata={"Date": None} if how["format"] == "svg" else {})
        plt.close(figure)
    run_folder.write_atomically(pathlib.Path(path), buffer.getvalue())


def loss_surface(plt, coefficients, losses, title):
    """Return a figure of losses, (points, points), as a surface and as contours.

    Both have one logarithmic colour scale; losses that are not finite are drawn as the largest."""
    finite = losses[np.isfinite(losses)]
    surface = np.maximum(np.where(np.isfinite(losses), losses, max(finite, default=1.0)), 1e-6)
    levels = np.geomspace(surface.min(), max(surface.max(), surface.min() * 1.01), 13)
    norm = plt.matplotlib.colors.LogNorm(levels[0], levels[-1])
    grid = np.meshgrid(coefficients, coefficients, indexing="ij")
    axes = {"xlabel": r"step along $\varepsilon_0$", "ylabel": r"step along $\varepsilon_1$"}
    figure = plt.figure(figsize=(10, 3.8))
    solid = figure.add_axes((0, 0, 0.42, 0.92), projection="3d")
    colours = plt.get_cmap("cividis")(norm(surface))
    solid.plot_surface(*grid, np.log10(surface), facecolors=colours, rstride=1, cstride=1)
    solid.set(**axes, zlabel=r"$\log_{10}$ loss (nats)")
    solid.locator_params(nbins=5)
    solid.view_init(28, -55)
    flat = figure.add_axes((0.56, 0.14, 0.32, 0.74))
    contours = flat.contourf(*grid, surface, levels, cmap="cividis", norm=norm)
    flat.contour(*grid, surface, levels, colors="white", linewidths=0.4)
    flat.plot(0, 0, "+", color="red", markersize=9)
    flat.set(**axes, aspect="equal")
    label = {"label": "mean cross-entropy (nats)", "format": "%.3g", "ticks": levels[::2]}
    figure.colorbar(contours, ax=flat, **label).minorticks_off()
    figure.suptitle(title)
    return figure


def density(plt, nodes, weights, title):
    """Return a figure of an eigenvalue density, smoothed by a Gaussian of 1% of its range."""
    low, high = nodes.min(), nodes.max()
    sigma = max(0.01 * (high - low), 1e-12)
    grid = np.linspace(low - 5 * sigma, high + 5 * sigma, 1000)
    kernel = np.exp(-((grid[:, None, None] - nodes) ** 2) / (2 * sigma**2))
    curve = (kernel * weights).sum(2).mean(1) / (sigma * np.sqrt(2 * np.pi))
    figure, axes = plt.subplots(figsize=(4.2, 3))
    axes.semilogy(grid, np.maximum(curve, 1e-12), color=COLOURS[0])
    axes.set(xlabel="eigenvalue of the Hessian", ylabel="density", title=title)
    axes.set_ylim(curve.max() * 1e-9, curve.max() * 2)
    axes.grid(alpha=0.3)
    return figure


def layers(plt, names, values, title):
    """Return a figure of the mean of values, (clients, layers), with a thin line a client."""
    figure, axes = plt.subplots(figsize=(max(4, 0.28 * len(names) + 1.5), 3))
    label = f"each of {len(values)} clients"
    axes.plot(values.T, color="#999999", linewidth=0.7, label=[label, *[None] * (len(values) - 1)])
    axes.plot(values.mean(0), "o-", color=COLOURS[0], markersize=4, label="mean")
    axes.set(xlabel="layer, from the input", ylabel="linear CKA with the global model", title=title)
    axes.set_ylim(min(0.0, values.min()), 1.02)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return figure


def scatter(plt, clients, labels, xy, axis_names, names, title):
    """Return a figure of points, a panel a client; colours and markers are classes.

    labels, xy: of each of clients, (samples,) and (samples, 2). names: of all classes."""
    options = {"sharex": True, "sharey": True, "squeeze": False}
    size = 2.6 * len(clients) + 0.8, 2.8
    figure, (row,) = plt.subplots(1, len(clients), figsize=size, **options)
    for axes, client, own, points in zip(row, clients, labels, xy):
        for i, label in enumerate(np.unique(np.concatenate(labels))):
            style = {"color": COLOURS[i % 8], "marker": MARKERS[(i + i // 8) % 8]}
            shown = points[own == label].T
            axes.scatter(*shown, s=9, linewidths=0, alpha=0.8, label=names[label], **style)
        axes.set(title=f"client {client}", xlabel=axis_names[0])
    row[0].set_ylabel(axis_names[1])
    row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), markerscale=2)
    figure.suptitle(title, y=1.04)
    return figure


def label_counts(plt, counts, names=None):
    """Return a figure of counts, (clients, classes) samples; names: of the classes."""
    clients, classes = counts.shape
    width, height = np.clip((1.5 + 0.25 * clients, 1 + 0.25 * classes), (4, 3), (16, 10))
    figure, axes = plt.subplots(figsize=(width, height))
    options = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
    image = axes.imshow(counts.T, cmap="Blues", vmin=0, **options)
    axes.set(xlabel="client", ylabel="class")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    if classes <= 62:
        size = min(9, 40 * height / classes)  # points: three quarters of the room
        axes.set_yticks(range(classes), [str(n)[:20] for n in names or range(classes)], size=size)
    figure.colorbar(image, label="training samples")
    return figure
