"""The numbers of published.csv, and the runs whose flags are those of their cells."""

import functools
import itertools
import json

from analysis.runs import read_result
from reproduce.cells import all_cells, parsed_flags, read_published
from reproduce.figures import Mean, means, show_figure
from reproduce.runs import baseline, comparable, decisive_flags

HESSIAN = ("lambda_max", "H_T", "H_N", "H_D")


@functools.cache
def cells_by_flags():
    """Return {key_of(script, flags): [cell, ...]} of all cells."""
    found = {}
    for cell in itertools.chain(*all_cells().values()):
        found.setdefault(key_of(cell.script, parsed_flags(cell.command)), []).append(cell)
    return found


def key_of(script, flags):
    """Return what a cell and its runs share; tf32, a GPU's default, and fp32 are one."""
    flags = decisive_flags(flags)
    flags["precision"] = flags["precision"] == "bf16"
    return script, json.dumps(flags, sort_keys=True)


def matching_cells(group):
    """Return the cells with all flags of this group, which of several partitions has the first."""
    flags = group.flags | {"data_seed": group.data_seeds[0]}
    return cells_by_flags().get(key_of(group.script, flags), [])


def published_lines(groups, wanted=None):
    """Return the lines of the table of published numbers that groups have measured, dicts.

    wanted: {(paper, table), ...}; all if there are none. A number of several tables is one line."""
    published, entries, lines = read_published(), {}, {}
    for group in groups:
        for cell in matching_cells(group):
            if cell.key in published and (not wanted or cell[:2] in wanted):
                entries.setdefault(cell.key, (cell, []))[1].append(group)
    for key, (cell, alike) in entries.items():
        each = [alike] if cells_of(cell) > 1 else [[group] for group in alike]
        for own, (metric, (value, std)) in itertools.product(each, published[key].items()):
            for found in measure(cell, metric, own, groups):
                line = line_of(cell, {"published": value, "published_std": std, **found}, own)
                same = json.dumps(line | {"table": ""})
                first = lines.setdefault(same, line)
                first["table"] += f",{cell.table}" * (first is not line)
    return list(lines.values())


def line_of(cell, found, groups):
    """Return a line: what measure() has found of a cell's number, what it is of, the difference.

    Numbers that do not compare, as of runs that were cut, have no difference."""
    value, published = found.pop("value"), found["published"]
    whole = found.pop("whole", True) and all(group.complete for group in groups)
    censored = published.endswith("+") or published == "NA" or value is None
    compares = whole and not censored and not found["figure"].startswith("delta")
    return {
        "paper": cell.paper,
        "table": cell.table,
        "setting": f"{cell.dataset} {cell.model} {cell.setting}",
        "method": cell.method,
        **found,
        "measured": value,
        "difference": f"{value - float(published):+.2f}" if compares else "",
        "hardware": " and ".join(dict.fromkeys(group.hardware for group in groups)),
        "caveat": cell.caveat,
    }


def shown(line):
    """Return a line of published_lines() for the eye."""
    deviation = f" +- {line['published_std']}" if line["published_std"] else ""
    paper = f"{line['paper']} {line['table'].replace(',', ', ')}"
    line = line | {"paper": paper, "published": line["published"] + deviation}
    line["measured"] = line["text"]
    columns = "paper setting method figure n measured published difference hardware"
    return {name: line[name] for name in columns.split()}


def measure(cell, metric, own, groups):
    """Return what own, groups of a cell's flags, measured of a published metric, as dicts.

    figure: its name; value, text, n; whole: whether all of its cells are there; published, where it
    is not published.csv's own. groups: all that are shown, among them FedAvg's."""
    if metric == "acc" and cell.paper == "rFedAvg":
        found = column(cell, own, "mean of last five +- over rounds", "last five")
        if found["value"] is not None:
            deviation = means(own[0])["their deviation"].mean
            found["text"] = f"{found['value']:.2f} +- {deviation:.2f}"
        return [found]
    if metric == "acc":
        return [column(cell, own, f"acc, {name}", name) for name in ("last", "best")]
    if metric.startswith("acc@"):  # as in acc@500R
        number = int(metric[4:-1])
        return [column(cell, own, f"EMA at round {number}", f"EMA@{number}", at=[number])]
    if metric.startswith("rounds_to_"):  # as in rounds_to_47%
        target = float(metric[10:-1])
        return [column(cell, own, f"rounds to {target:g}%", f"to {target:g}%", targets=[target])]
    if metric in ("time_s_per_round", "train_time_s"):
        return relative_seconds(cell, metric, own[0], groups)
    if metric == "delta_size_bytes":  # with about 760 bytes of serialisation a delta
        note = "down, of the clients sampled" if cell.setting == "cross-device" else "down"
        figure = f"delta bytes, down and up (published: {note})"
        return [column(cell, own, figure, "delta bytes")]
    mean = Mean.of([hessian_of(run).get(metric) for run in own[0].runs])
    if metric in HESSIAN and mean.n:
        return [{"figure": metric, "value": mean.mean, "text": mean.show(), "n": str(mean.n)}]
    return []  # MACs and parameters are analysis.cost's


def cells_of(cell):
    """Return over how many cells a published number is a mean; FedMLB's Table 6 has such."""
    return sum(c.key == cell.key for c in all_cells()[cell[:2]])


def column(cell, own, figure, name, **asked):
    """Return a column of the main table, over own, one group or those of several cells.

    asked: at or targets of means()."""
    each = [means(group, **asked).get(name) for group in own]
    found = {"figure": figure, "value": None, "text": "-", "n": own[0].count()}
    cells = cells_of(cell)
    if None in each:
        return found
    if cells == 1:  # there is no mean of rounds of which some are censored
        value = None if each[0].missed else each[0].mean
        return found | {"value": value, "text": show_figure(name, each[0], own[0])}
    over = Mean.of([mean.mean for mean in each])
    n = f"{over.n} of " * (over.n < cells)
    n += f"{cells} subsets of n = {', '.join(sorted({group.count() for group in own}))}"
    return {**found, "value": over.mean, "text": over.show(), "n": n, "whole": over.n == cells}


def relative_seconds(cell, metric, group, groups):
    """Return seconds as a ratio to FedAvg's, since the hardware is another.

    FedCKA's Tables 3 and 4 give the time of local training."""
    published, base = read_published(), baseline(group, groups)
    plain = [published.get((*cell.key[:5], m), {}) for m in ("FedAvg", "None(FedAvg)")]
    plain = [float(numbers[metric][0]) for numbers in plain if metric in numbers]
    if not plain or base in (None, group) or not comparable(base, group):
        return []
    kind = "train " * (metric == "train_time_s")
    ratio = means(group)[f"{kind}s/round"].mean / means(base)[f"{kind}s/round"].mean
    figure = f"{kind.replace(' ', 'ing ')}seconds x FedAvg"
    found = {"figure": figure, "value": ratio, "text": f"{ratio:.2f}", "n": group.count()}
    theirs = float(published[cell.key][metric][0]) / plain[0]
    return [found | {"published": f"{theirs:.2f}", "published_std": ""}]


def hessian_of(run):
    """Return what hessian_eval.py has left of a Run's last round, {metric: number}.

    H_N and H_D are there in the reading behind FedAlign's Table 1 alone."""
    result = read_result(run.path, "hessian")
    if "eigenvalues" not in (result or {}):  # none, or another analysis of that name
        return {}
    numbers = {"lambda_max": result["eigenvalues"][0]["value"], "H_T": result["trace"]["value"]}
    if result["settings"]["diagonal"] == "tensor":
        numbers |= {name: result.get(name) for name in ("H_N", "H_D")}
    return numbers
