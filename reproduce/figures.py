"""Figures of a run, and their means over runs."""

import dataclasses
import statistics
import typing

import common


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
        missed = len(values) - len(numbers)
        if not numbers:
            return cls(None, None, 0, missed)
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, len(numbers), missed)

    def show(self, digits=2):
        if self.mean is None:
            return "-"
        text = f"{self.mean:,.{digits}f}"
        return text if self.std is None else f"{text} +- {self.std:,.{digits}f}"

    def show_short(self):
        """Return it with four digits, whatever its size."""
        return f"{self.mean:.4g}" + ("" if self.std is None else f" +- {self.std:.2g}")


def figures(run, rounds, at=(), targets=()):
    """Return the figures of a run after so many rounds, {column: number or None}.

    at: rounds at which the EMA is asked for; targets: accuracies (%) that the EMA is to reach.
    """
    rows = run.rows[:rounds]
    tested = [row for row in rows if row["test_acc"] is not None]
    values = accuracy_figures(tested)
    for number in at:
        emas = [row["acc_ema"] for row in tested if row["round"] == number]
        values[f"EMA@{number}"] = emas[0] if emas else None
    for target in targets:
        reached = [row["round"] for row in tested if row["acc_ema"] >= target]
        values[f"to {target:g}%"] = reached[0] if reached else None
    if tested and tested[-1].get("client_acc_worst") is not None:
        values["worst client"] = tested[-1]["client_acc_worst"]
    return {**own_figures(rows), **values, **cost_figures(rows)}


ENGINE_KEYS = {  # of a row; what else is there the method has reported
    *"round test_acc test_loss train_loss lr clients samples seconds samples_per_s".split(),
    *"bytes_down bytes_up bytes_delta peak_memory best_acc acc_ema".split(),
    *"acc_last5_mean acc_last5_std val_acc val_loss".split(),
    *"client_acc_mean client_acc_std client_acc_worst client_acc_best client_acc_p10".split(),
    *"client_acc_var personal_acc_std personal_acc_best personal_acc_p10 personal_acc_var".split(),
    "crc32",
}


def own_figures(rows):
    """Return the numbers that the method itself reported last, {name: number}."""
    last = {}
    for row in rows:
        last |= {key: row[key] for key in row.keys() - ENGINE_KEYS if is_number(row[key])}
    return last


def is_number(value):
    return type(value) in (int, float)


def accuracy_figures(tested):
    """Return the figures of the rows that have been evaluated."""
    accuracies = [row["test_acc"] for row in tested]
    last, best = tested[-1] if tested else {}, common.best_row(tested)
    five = accuracies[-5:]
    return {
        "last": last.get("test_acc"),
        "best": best["test_acc"] if best else None,
        "EMA": last.get("acc_ema"),
        "last five": statistics.fmean(five) if five else None,
        "their deviation": statistics.pstdev(five) if five else None,
    }


def cost_figures(rows):
    """Return median seconds and mean bytes of a round."""
    values = {
        "s/round": statistics.median(seconds(row) for row in rows),
        "train s/round": statistics.median(row["seconds"].get("train", 0) for row in rows),
        "MB/round": statistics.fmean(traffic(row) for row in rows) / 1e6,
    }
    if "bytes_delta" in rows[-1]:
        values["delta bytes"] = rows[-1]["bytes_delta"] / len(rows[-1]["clients"])
    return values


def seconds(row):
    """Return how long a round took."""
    return sum(row["seconds"].values())


def traffic(row):
    """Return the bytes that the clients of a round received and sent."""
    return row["bytes_down"] + row["bytes_up"]


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
    if column == "worst client" and mean.missed:  # measured in some of the runs alone
        return f"{mean.show()} (n = {mean.n})"
    if column in own_figures(group.runs[0].rows):
        return mean.show_short()
    if column not in ("s/round", "MB/round", "delta bytes") or mean.mean is None:
        return mean.show()
    if mean.mean < 10:
        return mean.show(2)
    return mean.show(1 if mean.mean < 1000 else 0)


def show_censored(mean, rounds):
    """Return a Mean of rounds to a target, which some runs may not have reached."""
    if not mean.missed:
        return mean.show(0)
    if not mean.n:
        return f"{rounds}+"
    return f"{rounds}+ ({mean.n} of {mean.n + mean.missed}: {mean.show(0)})"


class Curve(typing.NamedTuple):
    """Mean and sample deviation over runs at each point; deviation is None for one run."""

    at: list
    mean: list
    deviation: list | None


ROW_KEYS = {"accuracy": "test_acc", "ema": "acc_ema", "worst": "client_acc_worst"}


def curve(group, x, quantity):
    """Return the Curve of a quantity against x: rounds, seconds or bytes."""
    key = ROW_KEYS.get(quantity, quantity)
    at = []
    values = []
    for number in range(1, group.rounds + 1):
        rows = [run.rows[number - 1] for run in group.runs]
        if all(is_number(row.get(key)) for row in rows):
            at.append(position(group, number, x))
            values.append(Mean.of([row[key] for row in rows]))
    deviation = [value.std for value in values] if len(group.runs) > 1 else None
    return Curve(at, [value.mean for value in values], deviation)


def position(group, number, x):
    """Return where round number lies on the axis x, the mean over the group's runs."""
    if x == "rounds":
        return number
    amount = seconds if x == "seconds" else traffic
    totals = [sum(map(amount, run.rows[:number])) for run in group.runs]
    return statistics.fmean(totals) / (1e9 if x == "bytes" else 1)
