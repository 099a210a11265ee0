"""Figures of a run, their means over runs, and what tells the rows of a table apart."""

import dataclasses
import math
import statistics
from collections import namedtuple

import common
from reproduce.runs import MACHINE_FLAGS, SETTING_FLAGS, as_text, decisive_flags, shared_flags

ROW_KEYS = {  # of a row as the engine writes it; what else is there the method has reported
    *"round test_acc test_loss train_loss lr clients samples seconds samples_per_s".split(),
    *"bytes_down bytes_up bytes_delta peak_memory best_acc acc_ema val_acc val_loss crc32".split(),
    *"acc_last5_mean acc_last5_std".split(),
}
METHODS = """FedAvg FedProx MOON Mixup StochDepth GradAug FedAlign FedCKA SCAFFOLD FedNova FedMLB
FedKD FitNet FedNTD FedGKD FedDyn rFedAvg Ditto FedPer FedBN"""
NAMES = {name.lower(): name for name in METHODS.split()} | {"qfedavg": "q-FedAvg"}  # of scripts
SERVERS = {"avgm": "FedAvgM", "adam": "FedADAM", "yogi": "FedYogi"}


@dataclasses.dataclass
class Mean:
    """Mean and sample standard deviation (None for n = 1) of n numbers."""

    mean: float | None
    std: float | None
    n: int
    missed: int = 0  # how many more had none

    @classmethod
    def of(cls, values):
        """Return the Mean of numbers, of which None is a missed one."""
        numbers = [v for v in values if v is not None]
        finite = all(map(math.isfinite, numbers))
        std = (statistics.stdev(numbers) if finite else math.nan) if len(numbers) > 1 else None
        mean = statistics.fmean(numbers) if numbers else None
        return cls(mean, std, len(numbers), len(values) - len(numbers))

    def show(self, form=",.2f", std_form=None):
        if self.mean is None:
            return "-"
        text = f"{self.mean:{form}}"
        return text if self.std is None else f"{text} +- {self.std:{std_form or form}}"


def seconds(row):
    """Return how long a round took."""
    return sum(row["seconds"].values())


def traffic(row):
    """Return the bytes that the clients of a round received and sent."""
    return row["bytes_down"] + row["bytes_up"]


def is_number(value):
    return type(value) in (int, float)


def own_figures(rows):
    """Return the numbers that the method itself reported last, {name: number}."""
    items = [(k, v) for row in rows for k, v in row.items() if k not in ROW_KEYS and is_number(v)]
    return {k: v for k, v in items if not k.startswith(("client_acc", "personal_acc"))}


def figures(run, rounds, at=(), targets=()):
    """Return the figures of a run after so many rounds, {column: number or None}.

    at: rounds at which the EMA is asked for; targets: accuracies (%) that the EMA is to reach."""
    rows = run.rows[:rounds]
    tested = [row for row in rows if row["test_acc"] is not None]
    last, five = tested[-1] if tested else {}, [row["test_acc"] for row in tested[-5:]]
    emas = {row["round"]: row["acc_ema"] for row in tested}
    values = {
        **own_figures(rows),
        "last": last.get("test_acc"),
        "best": common.best_row(tested)["test_acc"] if tested else None,
        "EMA": last.get("acc_ema"),
        "last five": statistics.fmean(five) if five else None,
        "their deviation": statistics.pstdev(five) if five else None,
        **{f"EMA@{t}": emas.get(t) for t in at},
        **{f"to {x:g}%": next((t for t in emas if emas[t] >= x), None) for x in targets},
        "s/round": statistics.median(map(seconds, rows)),
        "train s/round": statistics.median(row["seconds"].get("train", 0) for row in rows),
        "MB/round": statistics.fmean(map(traffic, rows)) / 1e6,
    }
    for name, key in ("worst client", "client_acc_worst"), ("personal", "personal_acc_mean"):
        if last.get(key) is not None:
            values[name] = last[key]
    if "bytes_delta" in rows[-1]:
        values["delta bytes"] = rows[-1]["bytes_delta"] / len(rows[-1]["clients"])
    return values


def means(group, at=(), targets=()):
    """Return {column: Mean over the group's runs}; at and targets as for figures().

    A run that was stopped early counts with its own last round."""
    counted = [(run, len(run.rows) if run.finished else group.rounds) for run in group.runs]
    each = [figures(run, rounds, at, targets) for run, rounds in counted]
    columns = dict.fromkeys(column for values in each for column in values)
    return {column: Mean.of([values.get(column) for values in each]) for column in columns}


def show_figure(column, mean, group):
    """Return a Mean as its cell of the table."""
    if column.startswith("to "):
        return show_censored(mean, group.rounds)
    forms = (",.2f",)
    if column in set().union(*(own_figures(run.rows) for run in group.runs)):
        forms = ".4g", ".2g"
    elif column in ("s/round", "MB/round", "delta bytes") and mean.mean and mean.mean >= 10:
        forms = (",.1f" if mean.mean < 1000 else ",.0f",)
    fewer = f" (n = {mean.n})" * bool(mean.n and mean.missed)  # not measured in all of the runs
    return mean.show(*forms) + fewer


def show_censored(mean, rounds):
    """Return a Mean of rounds to a target, which some runs may not have reached."""
    if not mean.missed:
        return mean.show(",.0f")
    reached = f" ({mean.n} of {mean.n + mean.missed}: {mean.show(',.0f')})"
    return f"{rounds}+" + reached * bool(mean.n)


def curve(group, x, key):
    """Return [(x, Mean)] of a number of the rows against x: rounds, seconds or bytes, in GB."""
    points, totals = [], [0.0] * len(group.runs)
    amount = {"rounds": lambda row: 1, "seconds": seconds, "bytes": traffic}[x]
    for rows in zip(*(run.rows[: group.rounds] for run in group.runs)):
        totals = [total + amount(row) for total, row in zip(totals, rows)]
        if all(is_number(row.get(key)) for row in rows):
            at = statistics.fmean(totals) / (1e9 if x == "bytes" else 1)
            points.append((at, Mean.of([row[key] for row in rows])))
    return points


Row = namedtuple("Row", "setting method group")


def table_rows(groups, names=None):
    """Return the Rows of groups.

    names: {run folder: [(setting, method), ...]}, a row each; rows without a name are named after
    the flags that differ between groups."""
    rows = []
    for group in groups:
        own = [(setting_label(group, groups), method_label(group, groups))]
        labels = (names or {}).get(str(group.runs[0].path), own)
        rows += [Row(setting, method, group) for setting, method in labels]
    if not names:
        return rows
    parts = [row.setting.replace(";", " ").split(" ") for row in rows]  # "CIFAR-10 C=16;R=25"
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    settings = [" ".join(word for word in words if word not in shared) for words in parts]
    return [row._replace(setting=setting) for row, setting in zip(rows, settings)]


def differing_flags(flags, groups):
    """Return those of the flags that have several values among groups."""
    return [flag for flag in flags if len({as_text(g.flags.get(flag)) for g in groups}) > 1]


def setting_label(group, groups):
    """Return the flags of the setting that differ between groups, as text."""
    own = decisive_flags(group.flags)
    values = {flag: own.get(flag) for flag in differing_flags(SETTING_FLAGS, groups)}
    return ", ".join(f"{k} {as_text(v)}" for k, v in values.items() if v is not None)


def method_label(group, groups):
    """Return the method and those of its flags that differ between its groups, as text.

    A method is a script or, where a script ran with several, its server optimizer."""
    groups = [other for other in groups if other.script == group.script]
    name, server = NAMES.get(group.script, group.script), group.flags.get("server")
    if len({other.flags.get("server") for other in groups}) > 1:
        groups = [other for other in groups if other.flags.get("server") == server]
        if server in SERVERS:
            name = SERVERS[server] + f" ({name})" * (name != "FedAvg")
    flags = [flag for flag in group.flags if flag not in {*SETTING_FLAGS, *MACHINE_FLAGS, "seed"}]
    parts = [f"{flag}={as_text(group.flags[flag])}" for flag in differing_flags(flags, groups)]
    return " ".join([name, *parts, *code_labels(group, groups)])


def code_labels(group, groups):
    """Return what tells a group's code from that of groups with its script and flags, as texts."""
    own, flags = group.runs[0].code, decisive_flags(group.flags)
    same = (g for g in groups if g.script == group.script and decisive_flags(g.flags) == flags)
    codes = [other.runs[0].code for other in same]
    parts = sorted({k for code in codes for k in code | own if code.get(k) != own.get(k)})
    return [f"{part}={own.get(part, 'none').replace(' ', ' #')}" for part in parts]


def shared_setting(groups):
    """Return the flags of the setting that all groups share, as text; those that act alone.

    Of the flags of training beside the usual ones those off their defaults are named."""
    flags, usual = groups[0].flags, decisive_flags(shared_flags())
    named = [*SETTING_FLAGS, *"lr momentum weight_decay clip".split()]
    named += [k for k, v in usual.items() if k not in {*named, "augment"} and flags.get(k, v) != v]
    idle = set(differing_flags(named, groups))
    if flags["dataset"] != "folder":
        idle.add("data_dir")
    if not str(flags["partition"]).startswith("dirichlet"):
        idle.add("alpha")
    idle |= {"similarity", "labels", "shards"} - {flags["partition"]}
    shared = {flag: flags.get(flag) for flag in named if flag not in idle}
    augments = {decisive_flags(g.flags)["augment"] for g in groups}
    shared["augment"] = augments.pop() if len(augments) == 1 else None
    return ", ".join(f"{k} {as_text(v)}" for k, v in shared.items() if v is not None)
