"""Pictures of runs: curves over rounds, seconds or bytes, or points against a flag."""

import dataclasses
import io
import itertools
import json
import math
import pathlib
import typing

import common
import run_folder
from reproduce.figures import curve, is_number, means
from reproduce.rows import Row, code_labels, differing_flags, table_rows
from reproduce.runs import MACHINE_FLAGS, as_text, decisive_flags, hardware_of

COLOURS = [  # told apart by all eyes
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
]
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}
QUANTITIES = ("accuracy", "ema", "train_loss", "test_loss", "worst")
CURVE_AXES = ("rounds", "seconds", "bytes")
LABELS = {
    "rounds": "Communication rounds",
    "seconds": "Seconds",
    "bytes": "Communicated (GB)",
    "s/round": "Seconds a round",
    "MB/round": "Communicated a round (MB)",
    "accuracy": "Test accuracy (%)",
    "ema": "Test accuracy, EMA (%)",
    "train_loss": "Training loss,\nwith the method's terms",
    "test_loss": "Test loss",
    "worst": "Worst client's accuracy (%)",
}
X_NAMES = [name for name in LABELS if name not in QUANTITIES]  # what --x takes besides flags
EFFORT = {  # what moves a run along an axis of seconds or bytes a round
    "rounds",
    "epochs",
    "local_steps",
    "batch_size",
}


def pyplot():
    """Return matplotlib.pyplot, drawing into files. Raises UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        raise common.UserError(
            "argument --plot: needs matplotlib (pip install matplotlib)"
        ) from None
    return matplotlib.pyplot


def check_format(path):
    """Raise UserError if matplotlib is missing or cannot write a file of that name."""
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if file_kind(path) not in kinds:
        raise common.UserError(
            f"argument --plot: {path} must end in one of .{', .'.join(sorted(kinds))}"
        )


def file_kind(path):
    return pathlib.Path(path).suffix[1:] or "png"


@dataclasses.dataclass
class Picture:
    """What is drawn: quantities of groups against x, which is rounds, a flag or s/round, say.

    names: as for table_rows().
    """

    groups: list
    names: dict | None
    x: str
    quantities: list

    @property
    def against_figure(self):
        """Whether x is a figure of a round, as s/round."""
        return "/" in self.x

    def write(self, path):
        """Draw curves, a panel a setting and quantity; or points, a panel a quantity."""
        plt = pyplot()
        with plt.rc_context(STYLE):
            draw = draw_curves if self.x in CURVE_AXES else draw_points
            figure = draw(plt, self)
            add_legend(figure, self)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=file_kind(path), dpi=300)
            plt.close(figure)
        run_folder.write_atomically(path, buffer.getvalue())


def check_quantities(names, runs):
    """Raise UserError for a name of --y that is nowhere in the rows of runs."""
    rows = [row for run in runs for row in run.rows]
    there = sorted({key for row in rows for key, value in row.items() if is_number(value)})
    for name in names or ():
        if name not in {*QUANTITIES, *there}:
            raise common.UserError(
                f"argument --y: {name[:40]!r} is not in these runs; it takes "
                f"{', '.join(dict.fromkeys([*QUANTITIES, *there]))}"
            )


def measured_in(groups, quantity):
    """Whether any of the groups has a point of a quantity."""
    return any(curve(group, "rounds", quantity).mean for group in groups)


def add_legend(figure, picture):
    """Put one legend below all panels, as wide as the figure, with n and what the bands are."""
    handles = {}
    for ax in figure.axes:
        for handle in ax.get_legend_handles_labels()[0]:
            handles[handle.get_label()] = handle
    counts = sorted({len(group.runs) for group in picture.groups})
    title = f"n = {', '.join(map(str, counts))}"
    if counts[-1] > 1:
        bars = "band" if picture.x in CURVE_AXES else "bars"
        over = " or ".join(sorted({group.over for group in picture.groups if len(group.runs) > 1}))
        title += f"; {bars}: one standard deviation over {over}"
    room = int(16 * figure.get_figwidth())  # characters
    columns = max(1, min(len(handles), room // (7 + max(map(len, handles)))))
    lines = math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, lines - 2))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        title=title,
        title_fontsize=7,
        ncols=columns,
    )


def make_axes(plt, down, across):
    """Return a figure and its axes, (down, across)."""
    size = max(3.4, 2.6 * across + 0.4), 2.2 * down + 0.6
    return plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")


def add_grid(ax):
    ax.grid(color="0.92")
    ax.set_axisbelow(True)


# --------------------------------------------------------------------------------------------------
# Curves
# --------------------------------------------------------------------------------------------------


def draw_curves(plt, picture):
    rows = curve_rows(picture)
    settings = list(dict.fromkeys(row.setting for row in rows))
    places = panels(settings, picture.quantities)
    styles = curve_styles(rows)
    down = 1 + max(row for row, _ in places)
    across = 1 + max(column for _, column in places)
    figure, axes = make_axes(plt, down, across)
    for place in itertools.product(range(down), range(across)):
        ax = axes[place]
        if place not in places:
            ax.remove()
            continue
        setting, quantity = places[place]
        for row in rows:
            if row.setting == setting:
                draw_curve(ax, curve(row.group, picture.x, quantity), row.method, styles)
        add_grid(ax)
        ticks = {"integer": True, "nbins": "auto"} if picture.x == "rounds" else {"nbins": 4}
        ax.xaxis.get_major_locator().set_params(**ticks)
        label_panel(ax, place, places, picture.x)
    return figure


def curve_rows(picture):
    """Return the Rows to draw, whose methods tell curves of a panel apart."""
    rows = table_rows(picture.groups, picture.names)
    if len({row.setting for row in rows}) == len(rows):
        # nothing to compare within a setting: it tells the curves apart
        rows = [Row("", f"{row.method} {row.setting}".strip(), row.group) for row in rows]
    if picture.x == "seconds" and len({hardware_of(group) for group in picture.groups}) > 1:
        rows = [row._replace(method=f"{row.method}, {hardware_of(row.group)}") for row in rows]
    return rows


def curve_styles(rows):
    """Return {method: colour and line style}."""
    styles = {}
    for i, method in enumerate(dict.fromkeys(row.method for row in rows)):
        turn, colour = divmod(i, len(COLOURS))
        line = ["-", "--", ":", "-."][turn % 4]
        styles[method] = {"color": COLOURS[colour], "linestyle": line}
    return styles


def draw_curve(ax, points, method, styles):
    """Draw a Curve with a band of its deviation; a single point as a dot."""
    marker = "." if len(points.at) == 1 else None
    ax.plot(points.at, points.mean, label=method, marker=marker, **styles[method])
    if points.deviation:
        low = [mean - std for mean, std in zip(points.mean, points.deviation)]
        high = [mean + std for mean, std in zip(points.mean, points.deviation)]
        colour = styles[method]["color"]
        ax.fill_between(points.at, low, high, color=colour, alpha=0.18, linewidth=0)


def panels(settings, quantities):
    """Return where each panel stands, {(row, column): (setting, quantity)}; at most four a row."""
    if len(settings) == 1:
        return {(0, j): (settings[0], quantity) for j, quantity in enumerate(quantities)}
    if len(quantities) == 1:
        return {divmod(i, 3): (setting, quantities[0]) for i, setting in enumerate(settings)}
    places = {}
    for (i, setting), (j, quantity) in itertools.product(
        enumerate(settings), enumerate(quantities)
    ):
        place = (j, i) if len(settings) <= 4 else (i, j)
        places[place] = setting, quantity
    return places


def label_panel(ax, place, places, x):
    """Label axes where the panels beside and below do not say the same."""
    row, column = place
    setting, quantity = places[place]
    if (row + 1, column) not in places:
        ax.set_xlabel(LABELS[x])
    if column == 0 or places[row, column - 1][1] != quantity:
        ax.set_ylabel(LABELS.get(quantity, quantity.replace("_", " ")))
    if row == 0 or places[row - 1, column][0] != setting:
        ax.set_title(setting, fontsize=8)


# --------------------------------------------------------------------------------------------------
# Points against a flag, or against a figure of a round
# --------------------------------------------------------------------------------------------------


class PointLine(typing.NamedTuple):
    label: str
    points: list  # [(value of x, group), ...]


def draw_points(plt, picture):
    lines = lines_over(picture)
    ticks = Ticks.of(picture, lines)
    figure, axes = make_axes(plt, 1, len(picture.quantities))
    for ax, quantity in zip(axes[0], picture.quantities):
        for i, line in enumerate(lines):
            turn, colour = divmod(i, len(COLOURS))
            style = {"label": line.label, "color": COLOURS[colour]}
            draw_line(ax, measured_points(line, quantity), ticks, style, ["-", ":"][turn % 2])
        ticks.put_on(ax)
        add_grid(ax)
        ax.set_xlabel(LABELS.get(picture.x, f"--{picture.x.replace('_', '-')}"))
        ax.set_ylabel(LABELS.get(quantity, quantity.replace("_", " ")))
    return figure


def measured_points(line, quantity):
    """Return the line's points of a quantity, [(value, group, mean, deviation)], at the last round.

    A group in which it was not measured has none.
    """
    points = []
    for value, group in line.points:
        measured = curve(group, "rounds", quantity)
        if measured.mean:
            deviation = measured.deviation[-1] if measured.deviation else math.nan
            points.append((value, group, measured.mean[-1], deviation))
    return points


def draw_line(ax, points, ticks, style, linestyle):
    """Draw points with bars of their deviation; a method without the flag is a level."""
    if not points:
        return
    values, groups, heights, deviations = zip(*points)
    if ticks.flag and ticks.flag not in groups[0].flags:
        ax.axhline(heights[0], linestyle="--", **style)
        return
    ax.errorbar(
        [ticks.position(value) for value in values],
        heights,
        deviations,
        marker="o",
        markersize=3,
        capsize=2,
        linestyle=linestyle,
        **style,
    )


@dataclasses.dataclass
class Ticks:
    """The x axis of points: numbers at their places, or values side by side."""

    flag: str | None  # None: a figure of a round
    values: list
    numbers: bool

    @classmethod
    def of(cls, picture, lines):
        flag = None if picture.against_figure else picture.x
        points = [point for line in lines for point in line.points]
        values = [value for value, group in points if not flag or flag in group.flags]
        numbers = all(is_number(value) for value in values)
        in_order = sorted(values, key=order)
        shown = in_order if numbers else map(as_text, in_order)
        return cls(flag, list(dict.fromkeys(shown)), numbers)

    @property
    def log(self):
        """Whether the axis is logarithmic: positive numbers over a wide range."""
        if not self.values or not self.numbers:
            return False
        return min(self.values) > 0 and max(self.values) >= 50 * min(self.values)

    @property
    def spaced(self):
        """Whether values lie at their places; numbers that would overlap stand side by side."""
        if not self.numbers or self.log or not self.flag:
            return self.numbers
        least = 0.05 * (self.values[-1] - self.values[0]) if self.values else 0
        return all(b - a > least for a, b in itertools.pairwise(self.values))

    def position(self, value):
        if self.spaced:
            return value
        return self.values.index(value if self.numbers else as_text(value))

    def put_on(self, ax):
        if self.log:
            ax.set_xscale("log")
        if self.flag and (len(self.values) <= 12 or not self.spaced):
            at = self.values if self.spaced else range(len(self.values))
            ax.set_xticks(at, [f"{v:g}" if self.numbers else v for v in self.values])
            ax.minorticks_off()


def order(value):
    """Return a key that sorts numbers, and other values behind them, short lists first."""
    size = value if is_number(value) else len(as_text(value))
    return not is_number(value), size, as_text(value)


def lines_over(picture):
    """Return the Lines drawn against x.

    A line holds the groups of a method that differ in x alone, in order of x; where x is a figure
    of a round, in their effort. Groups left alone are one line if they differ in their effort
    besides, as of epochs and rounds whose product is fixed. A method without the flag, as fedavg.py
    without lam, is a level: its value is x itself.
    """
    moving = EFFORT if picture.against_figure else {picture.x}
    strict = {}
    for group in picture.groups:
        for method in methods_of(group, picture.names):
            key = method, other_flags(group, moving, picture)
            strict.setdefault(key, []).append(group)
    lines = {}
    for (method, flags), groups in strict.items():
        if len(groups) == 1:
            flags = other_flags(groups[0], {picture.x} | EFFORT, picture)
        lines.setdefault((method, flags), []).extend(groups)
    return [
        PointLine(line_label(method, groups, lines, picture), line_points(groups, picture))
        for (method, _), groups in lines.items()
    ]


def methods_of(group, names):
    """Return the methods as which a group is drawn, each once."""
    labels = (names or {}).get(str(group.runs[0].path), [("", group.script)])
    return list(dict.fromkeys(method for _, method in labels))


def other_flags(group, without, picture):
    """Return the flags, as text, that groups on one line share."""
    flags = {k: v for k, v in decisive_flags(group.flags).items() if k not in without}
    hardware = hardware_of(group) if picture.against_figure else ""
    return json.dumps([flags, hardware, group.code], sort_keys=True)


def line_points(groups, picture):
    """Return [(value of x, group)] in order of the values."""
    points = []
    for group in groups:
        if picture.against_figure:
            value = means(group)[picture.x].mean
        else:
            value = group.flags.get(picture.x, picture.x)
        points.append((value, group))
    return sorted(points, key=lambda point: order(point[0]))


def line_label(method, groups, lines, picture):
    """Return the method and up to three flags in which its lines differ.

    lines: {(method, other flags): groups} of all lines.
    """
    same_method = [g for (other, _), line in lines.items() if other == method for g in line]
    silent = {picture.x, "seed", "data_dir", *MACHINE_FLAGS}
    if picture.against_figure:
        silent |= EFFORT
    flags = [flag for flag in groups[0].flags if flag not in silent]
    parts = []
    if picture.against_figure and len({hardware_of(group) for group in same_method}) > 1:
        parts.append(hardware_of(groups[0]))
    for flag in differing_flags(flags, same_method):
        values = dict.fromkeys(as_text(group.flags.get(flag)) for group in groups)
        parts.append(f"{flag} {' '.join(values)}")
    more = ["..."] if len(parts) > 3 else []
    return ", ".join([method, *parts[:3], *more, *code_labels(groups[0], same_method)])
