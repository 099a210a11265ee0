"""Pictures of runs: curves over rounds, seconds or bytes, or points against a flag."""

import itertools
import math
from typing import NamedTuple

import common
from analysis import pictures
from reproduce import figures
from reproduce.runs import MACHINE_FLAGS, as_text

LABELS = {  # of axes
    "rounds": "communication rounds",
    "seconds": "seconds",
    "bytes": "communicated (GB)",
    "s/round": "seconds a round",
    "MB/round": "communicated a round (MB)",
    "accuracy": "test accuracy (%)",
    "ema": "test accuracy, EMA (%)",
    "train_loss": "training loss,\nwith the method's terms",
    "test_loss": "test loss",
    "worst": "worst client's accuracy (%)",
}
CURVES = ("rounds", "seconds", "bytes")
FIGURES = ("s/round", "MB/round")  # of a round, as x
KEYS = {"accuracy": "test_acc", "ema": "acc_ema", "worst": "client_acc_worst"}  # of --y, in rows
EFFORT = {"rounds", "epochs", "local_steps", "batch_size"}  # what moves a run along s/round
LINES = ["-", "--", ":", "-."]


def axes_of(x, y, groups):
    """Return --x and --y as a Picture of groups takes them, with what is drawn if they are None.

    Raises UserError for a flag that decides none of the runs, and for numbers that are nowhere.
    """
    x = (x or "rounds").lstrip("-")
    if x not in (*CURVES, *FIGURES):
        x = x.replace("-", "_")
        decides = x not in MACHINE_FLAGS | {"seed"}
        if not decides or all(group.flags.get(x) is None for group in groups):
            names = ", ".join((*CURVES, *FIGURES))
            why = f"{x} is no flag that decides these runs; it takes {names} or a flag"
            raise common.UserError(f"argument --x: {why}")
    rows = [row for group in groups for run in group.runs for row in run.rows]
    there = sorted({k for row in rows for k, v in row.items() if figures.is_number(v)})
    for name in y or ():
        if name not in {*KEYS, *there}:
            names = ", ".join(dict.fromkeys([*KEYS, *there]))
            raise common.UserError(f"argument --y: {name[:40]!r} is none of {names}")
    return x, y or (["accuracy", "train_loss"] if x in CURVES else ["accuracy"])


class Picture(NamedTuple):
    """What is drawn: quantities of groups against x; names: as for table_rows()."""

    groups: list
    names: dict | None
    x: str
    quantities: list

    def write(self, path, warn):
        """Draw what has been measured to path, if it is anything. warn is told of what has not."""
        groups = [g for g in self.groups if self.x in CURVES or g.complete]
        cut, total = len(self.groups) - len(groups), len(self.groups)
        if cut:
            warn(f"{cut} of {total} rows are of runs that were cut, and are not drawn")
        drawn = [q for q in self.quantities if any(values(g, q) for g in groups)]
        missing = ", ".join(q for q in self.quantities if q not in drawn)
        if groups and missing:
            warn(f"{missing}: not measured in these runs, and not drawn")
        if drawn:
            draw = draw_curves if self.x in CURVES else draw_points
            pictures.write(path, draw, self._replace(groups=groups, quantities=drawn))


def values(group, quantity, x="rounds"):
    """Return the points of a quantity that was measured in all runs of a group, as curve()."""
    return figures.curve(group, x, KEYS.get(quantity, quantity))


def make_axes(plt, down, across):
    """Return a figure and its axes, (down, across)."""
    size = max(4.5, 3.2 * across + 0.4), 2.5 * down + 0.8
    return plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")


def add_legend(figure, groups):
    """Put one legend below all panels, with n and what the bands are."""
    handles = {}
    for ax in figure.axes:
        ax.grid(color="0.92")
        handles |= {handle.get_label(): handle for handle in ax.get_legend_handles_labels()[0]}
    title = f"n = {', '.join(map(str, sorted({len(group.runs) for group in groups})))}"
    over = sorted({group.over for group in groups if len(group.runs) > 1})
    if over:
        title += f"; bands and bars: one standard deviation over {' or '.join(over)}"
    room = int(14 * figure.get_figwidth())  # characters
    columns = max(1, room // (7 + max(map(len, handles))))
    options = {"title": title, "loc": "outside lower center", "ncols": columns}
    figure.legend(handles.values(), handles.keys(), **options)


def style_of(i):
    """Return colour and kind of the i-th line."""
    turn, colour = divmod(i, len(pictures.COLOURS))
    return {"color": pictures.COLOURS[colour], "linestyle": LINES[turn % len(LINES)]}


def label_of(name):
    return LABELS.get(name, name.replace("_", " "))


# --------------------------------------------------------------------------------------------------
# Curves
# --------------------------------------------------------------------------------------------------


def draw_curves(plt, picture):
    """Return a figure with a panel a setting and quantity."""
    rows = figures.table_rows(picture.groups, picture.names)
    if len({row.setting for row in rows}) == len(rows):  # nothing to compare within a setting
        rows = [figures.Row("", f"{row.method} {row.setting}".strip(), row.group) for row in rows]
    if picture.x == "seconds" and len({row.group.hardware for row in rows}) > 1:
        rows = [row._replace(method=f"{row.method}, {row.group.hardware}") for row in rows]
    methods = list(dict.fromkeys(row.method for row in rows))
    settings = list(dict.fromkeys(row.setting for row in rows))
    panels = list(itertools.product(settings, picture.quantities))
    across = len(picture.quantities) if len(picture.quantities) > 1 else min(3, len(settings))
    figure, axes = make_axes(plt, math.ceil(len(panels) / across), across)
    for ax, (setting, quantity) in zip(axes.flat, panels):
        for row in rows:
            if row.setting == setting:
                points = values(row.group, quantity, picture.x)
                draw_curve(ax, points, row.method, style_of(methods.index(row.method)))
        ax.set(xlabel=LABELS[picture.x], ylabel=label_of(quantity), title=setting)
        ax.locator_params(axis="x", integer=picture.x == "rounds")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    add_legend(figure, picture.groups)
    return figure


def draw_curve(ax, points, label, style):
    """Draw points, [(x, Mean)], with a band of their deviation; a single point as a dot."""
    at, heights = [x for x, _ in points], [mean.mean for _, mean in points]
    ax.plot(at, heights, label=label, marker="." if len(at) == 1 else None, **style)
    if points and points[0][1].std is not None:
        low = [mean.mean - mean.std for _, mean in points]
        high = [mean.mean + mean.std for _, mean in points]
        ax.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0)


# --------------------------------------------------------------------------------------------------
# Points against a flag, or against a figure of a round
# --------------------------------------------------------------------------------------------------


def draw_points(plt, picture):
    """Return a figure with a panel a quantity: the last round's, a line for runs alike but in x."""
    figure, axes = make_axes(plt, 1, len(picture.quantities))
    lines = lines_over(picture)
    xs = [x for _, points in lines for x, _ in points if x is not None]
    numbers = xs and all(map(figures.is_number, xs))
    for ax, quantity in zip(axes[0], picture.quantities):
        for x in [] if numbers else sorted(set(map(str, xs)), key=order):
            ax.plot([x], [math.nan])  # texts in their order
        for i, (label, points) in enumerate(lines):
            found = [(x, values(g, quantity)) for x, g in points]
            found = [(x if numbers else x and str(x), at[-1][1]) for x, at in found if at]
            draw_line(ax, found, label, style_of(i))
        if numbers and min(xs) > 0 and max(xs) >= 50 * min(xs):
            ax.set_xscale("log")
        flag = f"--{picture.x.replace('_', '-')}"
        ax.set(xlabel=LABELS.get(picture.x, flag), ylabel=label_of(quantity))
    add_legend(figure, picture.groups)
    return figure


def draw_line(ax, points, label, style):
    """Draw points, [(x, Mean)], with bars of their deviation; a method without x is a level."""
    for x, mean in points:
        if x is None:
            ax.axhline(mean.mean, label=label, **style | {"linestyle": "--"})
    points = [(x, mean) for x, mean in points if x is not None]
    if points:
        at, heights = zip(*((x, mean.mean) for x, mean in points))
        bars = [mean.std or 0.0 for _, mean in points]
        ax.errorbar(at, heights, bars, label=label, marker="o", markersize=3, capsize=2, **style)


def lines_over(picture):
    """Return what is drawn against x, [(label, [(value of x, group), ...]), ...].

    A line holds the groups of a method, and of a machine, that differ in x alone or, where x is a
    figure of a round, in their effort. Groups left alone are one line if they differ in their
    effort besides, as of epochs and rounds whose product is fixed. The value is None for a method
    without the flag.
    """
    x, alike, lines = picture.x, {}, {}
    moving = EFFORT if x in FIGURES else {x}
    for group in picture.groups:
        name = figures.NAMES.get(group.script, group.script)
        labels = (picture.names or {}).get(str(group.runs[0].path), [("", name)])
        for method in dict.fromkeys(method for _, method in labels):
            line = method, group.hardware if x in FIGURES else ""
            alike.setdefault((line, group.runs[0].key(*moving)), []).append(group)
    for (line, key), groups in alike.items():
        key = groups[0].runs[0].key(x, *EFFORT) if len(groups) == 1 else key
        lines.setdefault((line, key), []).extend(groups)
    found = []
    for ((method, machine), _), groups in lines.items():
        same = sum((other for (line, _), other in lines.items() if line[0] == method), [])
        silent = {*moving, *MACHINE_FLAGS, "seed", "data_dir"}
        differing = figures.differing_flags([f for f in groups[0].flags if f not in silent], same)
        flags = {f: dict.fromkeys(as_text(g.flags.get(f)) for g in groups) for f in differing}
        parts = [machine] * (len({line[1] for line, _ in lines}) > 1)
        parts += [f"{flag} {' '.join(texts)}" for flag, texts in flags.items()][:3]
        parts += ["..."] * (len(flags) > 3) + figures.code_labels(groups[0], same)
        points = [(value_of(group, x), group) for group in groups]
        found.append((", ".join([method, *parts]), sorted(points, key=lambda p: order(p[0]))))
    return found


def value_of(group, x):
    """Return where a group lies on the axis x: a number, a text, or None without that flag."""
    if x in FIGURES:
        return figures.means(group)[x].mean
    value = group.flags.get(x)
    return value if figures.is_number(value) or x not in group.flags else as_text(value)


def order(value):
    """Return a key that sorts numbers, and texts after them, short ones first."""
    return (0, value, "") if figures.is_number(value) else (1, len(value or ""), value or "")
