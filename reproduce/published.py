"""The numbers of published.csv, and the runs whose flags are those of their cells."""

import dataclasses
import itertools
import shlex

from analysis.runs import read_result
from reproduce.cells import Cell, all_cells, parsed_flags, read_published
from reproduce.figures import Mean, means, show_figure
from reproduce.runs import as_text, baseline, comparable, decisive_flags, hardware_of

HESSIAN = ("lambda_max", "H_T", "H_N", "H_D")


# --------------------------------------------------------------------------------------------------
# Which cells a run is of
# --------------------------------------------------------------------------------------------------


def matching_cells(group):
    """Yield the cells that have this group's flags, those left at their defaults too."""
    # of the first partition, where there are several
    first = min(group.runs, key=lambda run: run.flags.get("data_seed") or 0).flags
    flags = decisive_flags(first)
    for cell in itertools.chain(*all_cells().values()):
        if cell.script == group.script and may_match(cell, first):
            asked = decisive_flags(parsed_flags(cell.command))
            if all(flags.get(flag, value) == value for flag, value in asked.items()):
                yield cell


def may_match(cell, flags):
    """Whether flags agree with the words of a cell's command: a quick look before it is parsed."""
    for word, value in itertools.pairwise(shlex.split(cell.command)[1:]):
        compared = word.startswith("--") and not value.startswith("--")
        if compared and word not in ("--vectors", "--augment"):
            if not same_value(value, flags.get(word[2:].replace("-", "_"))):
                return False
    return True


def same_value(word, value):
    """Whether a word of a command line says the value of a flag."""
    try:
        return float(word) == float(value)
    except (TypeError, ValueError):
        return word == as_text(value)


# --------------------------------------------------------------------------------------------------
# What was measured of a published number
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Entry:
    """A row of published.csv, and the groups of runs that measured it.

    There are several groups where the published number is a mean over cells (FedMLB's Table 6).
    """

    key: tuple  # of its cells
    groups: list

    @property
    def cells(self):
        """How many cells the published number is of."""
        return sum(cell.key == self.key for cell in all_cells()[self.key[:2]])

    @property
    def caveat(self):
        """In what the published number is, or may be, another than ours: a sentence or nothing."""
        return next(cell.caveat for cell in all_cells()[self.key[:2]] if cell.key == self.key)

    @property
    def complete(self):
        return all(group.complete for group in self.groups)


@dataclasses.dataclass
class Measured:
    """What was measured of a published metric."""

    figure: str  # the name it is shown by
    value: float | None
    text: str
    n: str
    partial: bool = False  # of some of the entry's cells alone
    published: tuple | None = None  # value and deviation, where they are not published.csv's own

    def identity(self):
        return self.figure, self.value, self.text, self.n, self.published


def measure(entry, metric, groups, published):
    """Return what was measured of an entry's metric, [Measured, ...], nothing if it was not.

    groups: all that are shown, among them FedAvg's; published: of read_published().
    """
    if metric == "acc" and Cell(*entry.key).paper == "rFedAvg":
        return [last_five(entry)]
    if metric == "acc":
        return [column(entry, "acc, last", "last"), column(entry, "acc, best", "best")]
    if metric.startswith("acc@"):  # as in acc@500R
        number = int(metric[4:-1])
        return [column(entry, f"EMA at round {number}", f"EMA@{number}", at=[number])]
    if metric.startswith("rounds_to_"):  # as in rounds_to_47%
        target = float(metric[10:-1])
        return [column(entry, f"rounds to {target:g}%", f"to {target:g}%", targets=[target])]
    if metric in ("time_s_per_round", "train_time_s"):
        return relative_seconds(entry, metric, groups, published)
    if metric == "delta_size_bytes":
        return [delta_bytes(entry)]
    if metric in HESSIAN:
        return hessian_figure(entry, metric)
    return []  # MACs and parameters, of analysis.cost


def column(entry, figure, name, **asked):
    """Return a column of the main table as Measured; asked: at or targets of means()."""
    each = [means(group, **asked).get(name) for group in entry.groups]
    first = entry.groups[0]
    if any(mean is None for mean in each):
        return Measured(figure, None, "-", first.count())
    if entry.cells > 1:
        return mean_over_cells(entry, figure, each)
    # no mean of rounds of which some are censored
    value = None if each[0].missed else each[0].mean
    return Measured(figure, value, show_figure(name, each[0], first), first.count())


def mean_over_cells(entry, figure, each):
    """Return the mean of the groups' Means, which is the published one once all cells are there."""
    over = Mean.of([mean.mean for mean in each])
    seeds = ", ".join(sorted({group.count() for group in entry.groups}))
    n = f"{entry.cells} subsets of n = {seeds}"
    if over.n < entry.cells:
        return Measured(figure, over.mean, over.show(), f"{over.n} of {n}", partial=True)
    return Measured(figure, over.mean, over.show(), n)


def last_five(entry):
    """Return rFedAvg's figure: the mean of the last five rounds, and their deviation."""
    measured = column(entry, "mean of last five +- over rounds", "last five")
    if measured.value is not None:
        deviation = means(entry.groups[0])["their deviation"].mean
        measured.text = f"{measured.value:.2f} +- {deviation:.2f}"
    return measured


def relative_seconds(entry, metric, groups, published):
    """Return seconds as a ratio to FedAvg's, since the hardware is another.

    FedCKA's Tables 3 and 4 give the time of local training.
    """
    group = entry.groups[0]
    base = baseline(group, groups)
    plain = published_fedavg(entry.key, metric, published)
    if plain is None or base is None or base is group or not comparable(base, group):
        return []
    training = metric == "train_time_s"
    name = "train s/round" if training else "s/round"
    ratio = means(group)[name].mean / means(base)[name].mean
    figure = "training seconds x FedAvg" if training else "seconds x FedAvg"
    theirs = float(published[entry.key][metric][0]) / plain
    return [Measured(figure, ratio, f"{ratio:.2f}", group.count(), published=(f"{theirs:.2f}", ""))]


def published_fedavg(key, metric, published):
    """Return the published metric of FedAvg in the setting of key; None without one."""
    for method in ("FedAvg", "None(FedAvg)"):
        numbers = published.get((*key[:5], method), {})
        if metric in numbers:
            return float(numbers[metric][0])
    return None


def delta_bytes(entry):
    """Return the size of rFedAvg's deltas.

    The published one is what a client receives, with about 760 bytes of serialisation a delta.
    """
    note = "down, of the clients sampled" if Cell(*entry.key).setting == "cross-device" else "down"
    return column(entry, f"delta bytes, down and up (published: {note})", "delta bytes")


def hessian_figure(entry, metric):
    """Return what hessian_eval.py has measured of a metric, [Measured] or []."""
    mean = Mean.of([read_hessian(run).get(metric) for run in entry.groups[0].runs])
    return [Measured(metric, mean.mean, mean.show(), str(mean.n))] if mean.n else []


def read_hessian(run):
    """Return what hessian_eval.py has left of a RunRecord's last round, {metric: number}.

    H_N and H_D are there in the reading behind FedAlign's Table 1 alone.
    """
    result = read_result(run.path, "hessian")
    if not result:
        return {}
    numbers = {"lambda_max": result["eigenvalues"][0]["value"], "H_T": result["trace"]["value"]}
    if result["settings"]["diagonal"] == "tensor":
        numbers |= {name: result.get(name) for name in ("H_N", "H_D")}
    return numbers


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class PublishedLine:
    """A measured figure beside a published number, which may stand in several tables."""

    entry: Entry
    measured: Measured
    value: str  # the published one, as printed
    std: str
    tables: list

    @property
    def difference(self):
        """Measured minus published as text, empty where the two do not compare."""
        value = self.measured.value
        censored = self.value.endswith("+") or self.value == "NA" or value is None
        partial = self.measured.partial or not self.entry.complete
        if censored or partial or self.measured.figure.startswith("delta"):
            return ""
        return f"{value - float(self.value):+.2f}"

    def shown(self):
        """Return the line for the eye."""
        key = Cell(*self.entry.key)
        return {
            "paper": f"{key.paper} {', '.join(self.tables)}",
            "setting": f"{key.dataset} {key.model} {key.setting}",
            "method": key.method,
            "figure": self.measured.figure,
            "n": self.measured.n,
            "measured": self.measured.text,
            "published": self.value + (f" +- {self.std}" if self.std else ""),
            "difference": self.difference,
            "hardware": hardware_of(*self.entry.groups),
        }

    def tidy(self):
        """Return the line for the CSV."""
        return {
            **self.shown(),
            "paper": Cell(*self.entry.key).paper,
            "table": ",".join(self.tables),
            "measured": self.measured.value,
            "published": self.value,
            "published_std": self.std,
            "caveat": self.entry.caveat,
        }


def published_lines(groups, wanted=None):
    """Return the PublishedLines of the groups that measured a published number.

    wanted: {(paper, table), ...}; all if there are none.
    """
    published = read_published()
    merged = {}
    for entry in entries_of(groups, wanted, published):
        for metric, number in published[entry.key].items():
            for measured in measure(entry, metric, groups, published):
                value, std = measured.published or number
                key = entry.key[0], *entry.key[2:], *measured.identity(), value, std
                line = merged.setdefault(key, PublishedLine(entry, measured, value, std, []))
                line.tables.append(Cell(*entry.key).table)
    return list(merged.values())


def entries_of(groups, wanted, published):
    """Return the Entries of published.csv that groups have measured."""
    entries = {}
    for group in groups:
        for cell in matching_cells(group):
            key = cell.key
            if key in published and (not wanted or key[:2] in wanted):
                entries.setdefault(key, Entry(key, [])).groups.append(group)
    return list(entries.values())
