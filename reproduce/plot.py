"""Pictures of runs: curves over rounds, seconds or bytes, or points against a flag."""

import itertools
import math

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
    "worst": "worst client's accuracy (%)",
}
CURVES, FIGURES = ("rounds", "seconds", "bytes"), ("s/round", "MB/round")  # of --x
KEYS = {"accuracy": "test_acc", "ema": "acc_ema", "worst": "client_acc_worst"}  # of --y, in rows
EFFORT = {"rounds", "epochs", "local_steps", "batch_size"}  # what moves a run along s/round
LINES = ["-", "--", ":", "-."]


def axes_of(x, y, groups):
    """Return --x and --y as write() takes them, with what is drawn if they are None.

    Raises UserError for a flag that decides none of the runs, and for numbers that are nowhere."""
    x = (x or "rounds").lstrip("-")
    if x not in (*CURVES, *FIGURES):
        x = x.replace("-", "_")
        if x in MACHINE_FLAGS | {"seed"} or all(g.flags.get(x) is None for g in groups):
            takes = f"it takes {', '.join((*CURVES, *FIGURES))} or a flag"
            raise common.UserError(f"argument --x: {x} is no flag that decides these runs; {takes}")
    rows = [row for group in groups for run in group.runs for row in run.rows]
    there = sorted({k for row in rows for k, v in row.items() if figures.is_number(v)})
    there = dict.fromkeys([*KEYS, *there])
    for name in y or ():
        if name not in there:
            raise common.UserError(f"argument --y: {name[:40]!r} is none of {', '.join(there)}")
    return x, y or (["accuracy", "train_loss"] if x in CURVES else ["accuracy"])


def write(path, groups, names, x, quantities, warn):
    """Draw to path what has been measured of quantities of groups against x, if it is anything.

    names: as for table_rows(). warn is told of what is not drawn."""
    whole = [group for group in groups if x in CURVES or group.complete]
    if cut := len(groups) - len(whole):
        warn(f"{cut} of {len(groups)} rows are of runs that were cut, and are not drawn")
    drawn = [q for q in quantities if any(values(group, q) for group in whole)]
    missing = ", ".join(q for q in quantities if q not in drawn)
    if whole and missing:
        warn(f"{missing}: not measured in these runs, and not drawn")
    if drawn:
        pictures.write(path, draw, whole, names, x, drawn)


def values(group, quantity, x="rounds"):
    """Return the points of a quantity that was measured in all runs of a group, as curve()."""
    return figures.curve(group, x, KEYS.get(quantity, quantity))


def draw(plt, groups, names, x, quantities):
    """Return a figure of what write() draws: a panel a setting and quantity, and one legend."""
    lines = (curves_of if x in CURVES else lines_over)(groups, names, x)
    settings = list(dict.fromkeys(setting for _, (setting, *_) in lines))
    panels = list(itertools.product(settings, quantities))
    across = len(quantities) if len(quantities) > 1 else min(3, len(settings))
    down = math.ceil(len(panels) / across)
    size = max(4.5, 3.2 * across + 0.4), 2.5 * down + 0.8
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for ax, (setting, quantity) in zip(axes.flat, panels):
        own = [(i, label, points) for i, (where, label, points) in lines if where == setting]
        draw_panel(ax, own, x, quantity)
        ax.set(xlabel=LABELS.get(x, f"--{x.replace('_', '-')}"), title=setting)
        ax.set(ylabel=LABELS.get(quantity, quantity.replace("_", " ")))
        ax.grid(color="0.92")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    add_legend(figure, groups)
    return figure


def draw_panel(ax, lines, x, quantity):
    """Draw lines, [(number of the style, label, group or points of lines_over()), ...]."""
    xs = [] if x in CURVES else [at for *_, points in lines for at, _ in points if at is not None]
    texts = not all(map(figures.is_number, xs))
    place = {None: None} | {at: str(at) if texts else at for at in xs}
    if texts:  # in their order
        ax.plot(sorted(map(str, xs), key=order), [math.nan] * len(xs))
    elif xs and min(xs) > 0 and max(xs) >= 50 * min(xs):
        ax.set_xscale("log")
    for i, label, points in lines:
        style = {"label": label, "color": pictures.COLOURS[i % 8], "linestyle": LINES[i // 8 % 4]}
        if x in CURVES:
            draw_curve(ax, values(points, quantity, x), style)
        else:
            found = [(place[at], values(group, quantity)) for at, group in points]
            draw_points(ax, [(at, means[-1][1]) for at, means in found if means], style)
    if x in CURVES:
        ax.locator_params(axis="x", integer=x == "rounds")


def draw_curve(ax, points, style):
    """Draw points, [(x, Mean)], with a band of their deviation; a single point as a dot."""
    at, heights = [x for x, _ in points], [mean.mean for _, mean in points]
    ax.plot(at, heights, marker="." if len(at) == 1 else None, **style)
    if points and points[0][1].std is not None:
        band = zip(*((mean.mean - mean.std, mean.mean + mean.std) for _, mean in points))
        ax.fill_between(at, *band, color=style["color"], alpha=0.18, linewidth=0)


def draw_points(ax, points, style):
    """Draw points, [(x, Mean)], with bars of their deviation; a method without x is a level."""
    for _, mean in (point for point in points if point[0] is None):
        ax.axhline(mean.mean, **style | {"linestyle": "--"})
    points = [(x, mean.mean, mean.std or 0.0) for x, mean in points if x is not None]
    if points:
        ax.errorbar(*zip(*points), marker="o", markersize=3, capsize=2, **style)


def add_legend(figure, groups):
    """Put one legend below all panels, with n and what the bands are."""
    handles = {h.get_label(): h for ax in figure.axes for h in ax.get_legend_handles_labels()[0]}
    title = f"n = {', '.join(map(str, sorted({len(group.runs) for group in groups})))}"
    over = " or ".join(sorted({group.over for group in groups if len(group.runs) > 1}))
    title += f"; bands and bars: one standard deviation over {over}" * bool(over)
    room = int(14 * figure.get_figwidth())  # characters
    place = {"loc": "outside lower center", "ncols": max(1, room // (7 + max(map(len, handles))))}
    figure.legend(handles.values(), handles.keys(), title=title, **place)


def curves_of(groups, names, x):
    """Return [(number of the method, (setting or "" where each has one, method, group)), ...]."""
    rows = figures.table_rows(groups, names)
    if len({row.setting for row in rows}) == len(rows):
        rows = [figures.Row("", f"{row.method} {row.setting}".strip(), row.group) for row in rows]
    if x == "seconds" and len({row.group.hardware for row in rows}) > 1:
        rows = [row._replace(method=f"{row.method}, {row.group.hardware}") for row in rows]
    methods = list(dict.fromkeys(row.method for row in rows))
    return [(methods.index(row.method), row) for row in rows]


def lines_over(groups, names, x):
    """Return what is drawn against x, [(number, ("", label, [(value of x, group), ...])), ...].

    A line holds the groups of a method, and of a machine, that differ in x alone or, where x is a
    figure of a round, in their effort. Groups left alone are one line if their effort differs too,
    as of epochs and rounds whose product is fixed. A method without the flag has the value None."""
    alike, lines, found = {}, {}, []
    moving = EFFORT if x in FIGURES else {x}
    for group in groups:
        name = figures.NAMES.get(group.script, group.script)
        labels = (names or {}).get(str(group.runs[0].path), [("", name)])
        for method in dict.fromkeys(method for _, method in labels):
            line = method, group.hardware if x in FIGURES else ""
            alike.setdefault((line, group.runs[0].key(*moving)), []).append(group)
    for (line, key), own in alike.items():
        key = own[0].runs[0].key(x, *EFFORT) if len(own) == 1 else key
        lines.setdefault((line, key), []).extend(own)
    several = len({machine for (_, machine), _ in lines}) > 1
    for ((method, machine), _), own in lines.items():
        same = sum((other for (line, _), other in lines.items() if line[0] == method), [])
        label = ", ".join([method, *[machine] * several, *differences(own, same, moving)])
        points = [(value_of(group, x), group) for group in own]
        found.append(("", label, sorted(points, key=lambda p: order(p[0]))))
    return list(enumerate(found))


def differences(groups, others, moving):
    """Return in what groups of a line differ from others, but for the flags moving, as texts."""
    silent = {*moving, *MACHINE_FLAGS, "seed", "data_dir"}
    flags = figures.differing_flags([f for f in groups[0].flags if f not in silent], others)
    parts = [" ".join([f, *dict.fromkeys(as_text(g.flags.get(f)) for g in groups)]) for f in flags]
    return parts[:3] + ["..."] * (len(parts) > 3) + figures.code_labels(groups[0], others)


def value_of(group, x):
    """Return where a group lies on the axis x: a number, a text, or None without that flag."""
    if x in FIGURES:
        return figures.means(group)[x].mean
    value = group.flags.get(x)
    return value if figures.is_number(value) or x not in group.flags else as_text(value)


def order(value):
    """Return a key that sorts numbers, and texts after them, short ones first."""
    return (0, value, "") if figures.is_number(value) else (1, len(value or ""), value or "")
