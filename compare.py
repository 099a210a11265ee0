"""compare.py: runs side by side, beside the published numbers, as tables and curves

Runs that differ in nothing but the seed (and in the machine's flags) are one row. What the columns hold:
    n            finished seeds; without any, the runs that were cut or still go, at the last round that all of them have
    last, best   accuracy (%) of the global model on the whole test set, in the last round and in the best one
    EMA          exponential moving average with factor 0.9, bias-corrected (FedMLB's figure); --at: at these rounds
    last five    mean of the last five evaluations; their deviation: population standard deviation (rFedAvg's figures)
    to T%        first round whose EMA is at least T (--target); 1000+: not within the run's 1000 rounds
    worst client accuracy of the worst client in the last round, where it was measured (--client-test; its n, if fewer)
    s/round      median seconds of a round, aggregation and evaluation included; MB/round: sent and received by all clients;
                 (x) both relative to fedavg.py with the same data, network and federation, seconds where the machine,
                 --workers, --precision, --graph and --eval-every are the same too; delta bytes: of rFedAvg's deltas, down and
                 up, a client and round
a +- b: mean and sample standard deviation (n - 1) over the seeds. A last table sets the published numbers beside runs whose
flags are those of a paper's cell (published.csv, tables.py), with lambda_max, H_T, H_N and H_D where hessian_eval.py has been
there. A mean over cells that are not all there ("2 of 5 subsets") gets no difference, nor do runs that were cut. Which round
FedAlign's and FedCKA's tables report is not stated: last and best are both given. Their times are compared as ratios to
FedAvg's, FedCKA's by the time in training.

    python compare.py runs/fedalign-1/* runs/fedalign-5/*
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import pathlib
import statistics
import sys

import common
import tables

# Flags that may differ among the runs of a row, since they do not decide the result, or only to rounding.
MACHINE = common.FREE_ON_RESUME - {"rounds"} | {
    "device",
    "workers",
    "graph",
    "deterministic",
    "client_test",
}
# Flags that make the setting; what else differs between rows names the method.
SETTING = (
    "dataset",
    "data_dir",
    "image_size",
    "partition",
    "alpha",
    "similarity",
    "split_file",
    "data_seed",
    "users",
    "model",
    "clients",
    "sample",
    "rounds",
    "epochs",
    "local_steps",
    "batch_size",
)
PUBLISHED = pathlib.Path(__file__).with_name("published.csv")


@dataclasses.dataclass
class Run:
    """A run folder, from its config.json and metrics.jsonl alone."""

    path: pathlib.Path
    script: str
    flags: dict
    rows: list  # of metrics.jsonl, rounds 1, 2, ...
    hardware: str
    torch: str
    commit: str
    workers: int | None  # None: not settled yet

    @property
    def finished(self):
        return len(self.rows) >= self.flags["rounds"]

    @property
    def key(self):
        """What two runs share when only their seeds differ."""
        return self.script, json.dumps(decisive(self.flags), sort_keys=True)

    @property
    def speed(self):
        """What two runs share whose seconds compare."""
        return (
            self.hardware,
            self.workers,
            *(self.flags.get(k) for k in ("precision", "graph", "eval_every")),
        )


def decisive(flags):
    """The flags that decide a result, but the seed, as they act: {name: value}. --augment as what it comes to, the file of
    --vectors by its name, --data-dir only where it says which images they are."""
    found = {k: v for k, v in flags.items() if k not in MACHINE | {"seed"}}
    words = argparse.Namespace(dataset=flags["dataset"], augment=flags.get("augment", "auto"))
    found["augment"] = common.resolve_augment(words)
    found["vectors"] = flags.get("vectors") and pathlib.Path(flags["vectors"]).name
    if flags["dataset"] == "folder":
        found["data_dir"] = flags.get("data_dir")
    if flags.get("local_steps"):
        found["epochs"] = None
    return found


def read_run(path):
    """The Run in a folder. UserError if it is none, or damaged; a last line that was cut while being written does not count."""
    path = pathlib.Path(path)
    if not (path / "config.json").is_file():
        raise common.UserError(f"{path}: no run, since it has no config.json")
    try:
        config = json.loads((path / "config.json").read_text())
        script, flags = config["script"], config["flags"]
        right = (
            type(script) is str
            and type(flags["dataset"]) is str
            and all(type(flags[k]) is int for k in ("rounds", "seed"))
        )
        decisive(flags)
        flags["epochs"] = None if flags.get("local_steps") else flags.get("epochs")
        machine = [
            str(config.get("device")),
            str((config.get("versions") or {}).get("torch")),
            config.get("commit"),
        ]
        right = right and flags["rounds"] > 0 and type(config.get("workers")) in (int, type(None))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise common.UserError(f"{path}: config.json is damaged, or not of a run of this project")
    metrics, rows = path / "metrics.jsonl", []
    try:
        lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    except OSError as e:
        raise common.UserError(f"{metrics}: cannot be read ({e.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            numbers = [
                *row["seconds"].values(),
                *(row[k] for k in ("bytes_down", "bytes_up", "train_loss")),
                row.get("bytes_delta", 0),
            ]
            perhaps = [row[k] for k in ("test_acc", "test_loss", "acc_ema")] + [
                row.get("client_acc_worst")
            ]
            whole = (
                row["round"] == number
                and len(row["clients"]) > 0
                and all(type(v) in (int, float) for v in numbers)
            )
            whole = whole and all(v is None or type(v) in (int, float) for v in perhaps)
            whole = whole and (row["test_acc"] is None or row["acc_ema"] is not None)
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if whole:
            rows.append(row)
        elif number < len(lines) or line.endswith(b"\n"):
            raise common.UserError(
                f"{metrics}: line {number} is damaged; it should be the row of round {number}"
            )
    return Run(
        path,
        script,
        flags,
        rows,
        machine[0],
        machine[1],
        machine[2] or "unknown",
        config.get("workers"),
    )


@dataclasses.dataclass
class Group:
    """The runs of one row, and how many of their rounds count."""

    runs: list  # finished ones, or if there are none all that have a round
    others: list  # cut or still going, beside finished ones
    rounds: int

    @property
    def flags(self):
        return self.runs[0].flags

    def count(self):
        """n as it is shown."""
        n, asked = len(self.runs), self.flags["rounds"]
        at = "" if self.rounds >= asked else f" at {self.rounds}/{asked}"
        return f"{n}{at}" + "".join(f" + 1 at {len(run.rows)}/{asked}" for run in self.others)


def measured(run):
    """How much there is of a run: rounds, and figures in their rows."""
    return len(run.rows), sum(v is not None for row in run.rows for v in row.values())


def grouped(runs, warn):
    """Runs as Groups, in the order given. warn(line) is told of runs that are left out."""
    byname = collections.OrderedDict()
    for run in runs:
        byname.setdefault(run.key, []).append(run)
    groups = []
    for same in byname.values():
        seeds = {}
        for run in same:
            known = seeds.setdefault(run.flags["seed"], run)
            if (
                known is not run
            ):  # twice the same run is no second sample; the one of which more was measured stays
                more = measured(run) > measured(known)
                kept, left = (run, known) if more else (known, run)
                seeds[run.flags["seed"]] = kept
                warn(
                    f"{left.path}: left out, since it is the run of {kept.path} again (seed {run.flags['seed']})"
                )
        for run in seeds.values():
            if not run.rows:
                warn(f"{run.path}: left out, since it has no finished round yet")
        begun = [run for run in seeds.values() if run.rows]
        done = [run for run in begun if run.finished]
        if begun:
            chosen = done or begun
            groups.append(
                Group(
                    chosen,
                    [run for run in begun if run not in chosen],
                    min(len(run.rows) for run in chosen),
                )
            )
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# Figures of a run, and their mean over seeds
# ----------------------------------------------------------------------------------------------------------------------


def figures(run, rounds, at=(), targets=()):
    """The figures of a run after so many rounds, {column: number or None}."""
    rows = run.rows[:rounds]
    tested = [row for row in rows if row["test_acc"] is not None]
    accuracies, last = [row["test_acc"] for row in tested], tested[-1] if tested else {}
    five = accuracies[-5:]
    found = {
        "last": last.get("test_acc"),
        "best": max(accuracies, default=None),
        "EMA": last.get("acc_ema"),
        "last five": statistics.fmean(five) if five else None,
        "their deviation": statistics.pstdev(five) if five else None,
    }
    for round_ in at:
        found[f"EMA@{round_}"] = next(
            (row["acc_ema"] for row in tested if row["round"] == round_), None
        )
    for target in targets:
        found[f"to {target:g}%"] = next(
            (row["round"] for row in tested if row["acc_ema"] >= target), None
        )
    if last.get("client_acc_worst") is not None:
        found["worst client"] = last["client_acc_worst"]
    found["s/round"] = statistics.median(sum(row["seconds"].values()) for row in rows)
    found["train s/round"] = statistics.median(row["seconds"].get("train", 0) for row in rows)
    found["MB/round"] = statistics.fmean(row["bytes_down"] + row["bytes_up"] for row in rows) / 1e6
    if "bytes_delta" in rows[-1]:
        found["delta bytes"] = rows[-1]["bytes_delta"] / len(rows[-1]["clients"])
    return found


@dataclasses.dataclass
class Mean:
    """Mean and sample standard deviation (None for n = 1) of n numbers; missed: how many more had none."""

    mean: float
    std: float
    n: int
    missed: int = 0

    @classmethod
    def of(cls, values):
        there = [v for v in values if v is not None]
        if not there:
            return cls(None, None, 0, len(values))
        std = statistics.stdev(there) if len(there) > 1 else None
        return cls(statistics.fmean(there), std, len(there), len(values) - len(there))

    def show(self, digits=2):
        if self.mean is None:
            return "-"
        return f"{self.mean:,.{digits}f}" + (
            f" +- {self.std:,.{digits}f}" if self.std is not None else ""
        )


def means(group, at=(), targets=()):
    """{column: Mean over the group's runs}."""
    each = [figures(run, group.rounds, at, targets) for run in group.runs]
    return {
        name: Mean.of([found.get(name) for found in each])
        for name in dict.fromkeys(itertools.chain(*each))
    }


def shown(name, found, group):
    """A Mean as its cell of the table."""
    if name.startswith("to "):  # censored: not within the run's rounds
        limit = f"{group.rounds}+"
        if found.missed:
            return (
                limit
                if not found.n
                else f"{limit} ({found.n} of {found.n + found.missed}: {found.show(0)})"
            )
        return found.show(0)
    if name == "worst client" and found.missed:  # measured in some of the runs alone
        return f"{found.show()} (n = {found.n})"
    large = name in ("s/round", "MB/round", "delta bytes") and found.mean is not None
    return found.show((found.mean < 10) + (found.mean < 1000) if large else 2)


def baseline(group, groups):
    """fedavg.py's group in the same setting, the one with most flags in common; None without one."""

    def alike(a, b, names):
        return sum(a.get(k) == b.get(k) for k in names)

    fits = [
        g
        for g in groups
        if g.runs[0].script == "fedavg"
        and g.flags.get("server") == "avg"
        and all(
            g.flags.get(k) == group.flags.get(k) for k in SETTING if k not in ("rounds", "data_dir")
        )
    ]
    return max(fits, key=lambda g: alike(g.flags, group.flags, g.flags), default=None)


def words(value):
    return (
        ",".join(map(str, value))
        if isinstance(value, list)
        else "default"
        if value is None
        else str(value)
    )


def labels(groups, names):
    """[(setting, method, group)], a row each. names: {folder: [(setting, method), ...]}, else what differs among flags; a
    setting of None is what differs among flags too."""
    rows = []
    for group in groups:
        known = names.get(str(group.runs[0].path)) if names else None
        if known and known[0][0] is not None:
            rows += [(*name, group) for name in known]
            continue
        differing = [k for k in SETTING if len({words(g.flags.get(k)) for g in groups}) > 1]
        if group.flags["dataset"] != "folder":
            differing = [k for k in differing if k != "data_dir"]
        setting = ", ".join(
            f"{k} {words(group.flags[k])}" for k in differing if group.flags.get(k) is not None
        )
        same = [g for g in groups if g.runs[0].script == group.runs[0].script]
        own = [
            k
            for k in group.flags
            if k not in {*SETTING, *MACHINE, "seed"}
            and len({words(g.flags.get(k)) for g in same}) > 1
        ]
        plain = " ".join([group.runs[0].script, *(f"{k}={words(group.flags[k])}" for k in own)])
        rows += [(setting, method, group) for _, method in known or [(None, plain)]]
    if names and all(
        setting is not None for known in names.values() for setting, _ in known
    ):  # drop what all settings say
        parts = [
            [part for word in setting.split(" ") for part in word.split(";")]
            for setting, _, _ in rows
        ]
        common_ = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
        rows = [
            (" ".join(p for p in part if p not in common_), *row[1:])
            for part, row in zip(parts, rows)
        ]
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Published numbers
# ----------------------------------------------------------------------------------------------------------------------


def read_published():
    """{(paper, table, dataset, model, setting, method): {metric: (value, std)}} of published.csv, both as printed."""
    rows = {}
    for row in csv.DictReader(
        line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")
    ):
        key = tuple(row[k] for k in ("paper", "table", "dataset", "model", "setting", "method"))
        rows.setdefault(key, {})[row["metric"]] = row["value"], row["std"]
    return rows


def given(cell, flags):
    """Whether flags agree with the words of a cell's command: a quick look before it is parsed."""

    def agree(word, value):
        try:
            return float(word) == float(value)
        except (TypeError, ValueError):
            return word == words(value)

    pairs = zip(cell.words, cell.words[1:])
    return all(
        agree(word, flags.get(flag[2:].replace("-", "_")))
        for flag, word in pairs
        if flag.startswith("--")
        and not word.startswith("--")
        and flag not in ("--vectors", "--augment")
    )


def cells_of(group):
    """The papers' cells that have this group's flags, those left at their defaults too."""
    run = group.runs[0]
    own = decisive(run.flags)
    for cell in itertools.chain(*tables.all_cells().values()):
        if cell.script == run.script and given(cell, run.flags):
            if all(own.get(k, v) == v for k, v in decisive(tables.parsed(cell.command)).items()):
                yield cell


def key_of(cell):
    """The row of published.csv that a cell stands in."""
    return cell.paper, cell.table, cell.dataset, cell.model, cell.setting, cell.method


def beside_published(groups, wanted=None):
    """The table of measured and published numbers: (rows for the tidy CSV, rows for the eye). wanted: [(paper, table)], or
    None for all."""
    published, cells = read_published(), collections.OrderedDict()
    for group in groups:
        for cell in cells_of(group):
            if key_of(cell) in published and (not wanted or (cell.paper, cell.table) in wanted):
                cells.setdefault(key_of(cell), []).append(group)
    merged = collections.OrderedDict()
    for key, several in cells.items():
        for metric, (value, std) in published[key].items():
            for name, measured, target, spread in measure(key, metric, several, groups, published):
                if target is None:
                    target, spread = value, std
                row = (key[0], *key[2:], name, measured, target, spread)
                merged.setdefault(row, []).append(key[1])
    lines, tidy = [], []
    for (
        paper,
        dataset,
        model,
        setting,
        method,
        name,
        measured,
        value,
        std,
    ), where in merged.items():
        several = cells[
            next(k for k in cells if (k[0], *k[2:]) == (paper, dataset, model, setting, method))
        ]
        short = (
            any(group.rounds < group.flags["rounds"] for group in several)
            or "of" in measured[2].split()[1:2]
        )
        censored = (
            value.endswith("+")
            or value == "NA"
            or measured[0] is None
            or short
            or name.startswith("delta")
        )
        difference = "" if censored else f"{measured[0] - float(value):+.2f}"
        lines.append(
            {
                "paper": f"{paper} {', '.join(where)}",
                "setting": f"{dataset} {model} {setting}",
                "method": method,
                "figure": name,
                "n": measured[2],
                "measured": measured[1],
                "published": value + (f" +- {std}" if std else ""),
                "difference": difference,
                "hardware": machine(*several),
            }
        )
        tidy.append(
            {
                **lines[-1],
                "paper": paper,
                "table": ",".join(where),
                "measured": measured[0],
                "published": value,
                "published_std": std,
            }
        )
    return tidy, lines


def measure(key, metric, several, groups, published):
    """What was measured of a published metric: [(name, (mean, as shown, n), other published value or None, its std)]."""

    def column(name, **more):
        each = [means(g, **more).get(name) for g in several]
        if any(m is None for m in each):
            return None, "-", several[0].count()
        if (
            subsets > 1
        ):  # Table 6 of FedMLB: mean over subsets of pathways, which is theirs once all are there
            over, seeds = (
                Mean.of([m.mean for m in each]),
                ", ".join(sorted({g.count() for g in several})),
            )
            return (
                over.mean,
                over.show(),
                (f"{over.n} of " if over.n < subsets else "") + f"{subsets} subsets of n = {seeds}",
            )
        mean = (
            None if each[0].missed else each[0].mean
        )  # no mean of rounds of which some are censored
        return mean, shown(name, each[0], several[0]), several[0].count()

    paper, group = key[0], several[0]
    subsets = sum(key_of(cell) == key for cell in tables.all_cells()[key[:2]])
    if metric == "acc" and paper == "rFedAvg":
        mean, text, n = column("last five")
        text = text if mean is None else f"{mean:.2f} +- {means(group)['their deviation'].mean:.2f}"
        return [("mean of last five +- over rounds", (mean, text, n), None, None)]
    if metric == "acc":
        return [
            ("acc, last", column("last"), None, None),
            ("acc, best", column("best"), None, None),
        ]
    if metric.startswith("acc@"):
        round_ = int(metric[4:-1])
        return [(f"EMA at round {round_}", column(f"EMA@{round_}", at=[round_]), None, None)]
    if metric.startswith("rounds_to_"):
        target = float(metric[10:-1])
        return [(f"rounds to {target:g}%", column(f"to {target:g}%", targets=[target]), None, None)]
    if metric in ("time_s_per_round", "train_time_s"):  # other hardware: only ratios compare
        plain = next(
            (
                published[(*key[:5], name)][metric][0]
                for name in ("FedAvg", "None(FedAvg)")
                if metric in published.get((*key[:5], name), {})
            ),
            None,
        )
        base = baseline(group, groups)
        if plain is None or base is None or base is group or not comparable(base, group):
            return []
        name = (
            "train s/round" if metric == "train_time_s" else "s/round"
        )  # FedCKA's Tables 3 and 4: local training time
        ratio = means(group)[name].mean / means(base)[name].mean
        return [
            (
                "training " * (metric == "train_time_s") + "seconds x FedAvg",
                (ratio, f"{ratio:.2f}", group.count()),
                f"{float(published[key][metric][0]) / float(plain):.2f}",
                "",
            )
        ]
    if (
        metric == "delta_size_bytes"
    ):  # theirs: what a client receives, with about 760 bytes of serialisation a delta
        note = "down, of the clients sampled" if key[4] == "cross-device" else "down"
        return [
            (f"delta bytes, down and up (published: {note})", column("delta bytes"), None, None)
        ]
    if metric in HESSIAN:
        found = Mean.of([hessian(run.path).get(metric) for run in group.runs])
        return [(metric, (found.mean, found.show(), f"{found.n}"), None, None)] if found.n else []
    return []  # of cost.py


HESSIAN = ("lambda_max", "H_T", "H_N", "H_D")


def hessian(path):
    """What hessian_eval.py has left in a run folder, {metric: number}; H_N and H_D of the reading behind FedAlign's Table 1
    alone. Empty without it."""
    try:
        found = json.loads((path / "hessian.json").read_text())
        numbers = {"lambda_max": found["eigenvalues"][0]["value"], "H_T": found["trace"]["value"]}
        if found["settings"]["diagonal"] == "tensor":
            numbers |= {name: found.get(name) for name in ("H_N", "H_D")}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    return {name: value for name, value in numbers.items() if type(value) in (int, float)}


# ----------------------------------------------------------------------------------------------------------------------
# Tables and pictures
# ----------------------------------------------------------------------------------------------------------------------


def render(lines, markdown):
    """Dicts with the same keys as a table; columns without content are left out."""
    columns = [c for c in lines[0] if any(line[c] not in ("", "-") for line in lines)]
    cells = [columns, *[[str(line[c]) for c in columns] for line in lines]]
    width = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
        rows = ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join([rows[0], "|" + "---|" * len(columns), *rows[1:]])
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, width)).rstrip() for row in cells
    )


def machine(*groups):
    """Where groups were run, one word if all were alike."""
    return " and ".join(sorted({run.hardware for group in groups for run in group.runs}))


def comparable(a, b):
    """Whether the seconds of two groups were taken alike."""
    return len({run.speed for group in (a, b) for run in group.runs}) == 1


def table(groups, names=None, at=(), targets=()):
    """The main table: (rows for the tidy CSV, rows for the eye)."""
    rows = labels(groups, names)
    lines, tidy = [], []
    columns = [
        "last",
        "best",
        "EMA",
        *(f"EMA@{r}" for r in at),
        "last five",
        "their deviation",
        *(f"to {t:g}%" for t in targets),
        "worst client",
        "s/round",
        "MB/round",
        "delta bytes",
    ]
    for setting, method, group in rows:
        found, base = means(group, at, targets), baseline(group, groups)
        line = {"setting": setting, "method": method, "n": group.count()}
        for column in columns:
            line[column] = shown(column, found[column], group) if column in found else "-"
        for column in ("s/round", "MB/round"):
            plain = base and means(base)
            if plain and plain[column].mean and (column == "MB/round" or comparable(base, group)):
                line[column] += f" ({found[column].mean / plain[column].mean:.2f}x)"
        line["hardware"] = machine(group)
        lines.append(line)
        for name, mean in found.items():
            missed = mean.missed if name.startswith("to ") else None
            tidy.append(
                {
                    "setting": setting,
                    "method": method,
                    "figure": name,
                    "n": mean.n,
                    "measured": mean.mean,
                    "std": mean.std,
                    "rounds": group.rounds,
                    "not reached": missed,
                    "hardware": machine(group),
                }
            )
    return tidy, lines


def pooled(groups, flag, at, targets):
    """Mean over the groups that differ in a flag only, by the length of its value where that is a list."""
    pools = collections.OrderedDict()
    for group in groups:
        if flag not in group.flags:
            raise common.UserError(f"argument --over: {group.runs[0].path} has no flag {flag}")
        value = group.flags[flag]
        rest = {k: v for k, v in json.loads(group.runs[0].key[1]).items() if k != flag}
        size = len(value) if isinstance(value, list) else "all" if value is None else "any"
        pools.setdefault((group.runs[0].script, json.dumps(rest, sort_keys=True), size), []).append(
            group
        )
    lines = []
    for (script, _, size), several in pools.items():
        each = [means(g, at, targets) for g in several]
        seeds = ", ".join(sorted({g.count() for g in several}))
        line = {
            "method": script,
            f"number of {flag}": size,
            "n": f"{len(several)} rows of n = {seeds}",
        }
        for column in ["last", "best", "EMA", *(f"EMA@{r}" for r in at)]:
            line[column] = Mean.of([m[column].mean for m in each]).show()
        lines.append({**line, "hardware": machine(*several)})
    return lines


COLOURS = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C564B",
]  # told apart by all eyes
QUANTITIES = ("accuracy", "ema", "train_loss", "test_loss", "worst")
AXES = {
    "rounds": "Communication rounds",
    "seconds": "Seconds",
    "bytes": "Communicated (GB)",
    "s/round": "Seconds a round",
    "MB/round": "Communicated a round (MB)",
    "accuracy": "Test accuracy (%)",
    "ema": "Test accuracy, EMA (%)",
    "train_loss": "Training loss",
    "test_loss": "Test loss",
    "worst": "Worst client's accuracy (%)",
}
CURVES = ("rounds", "seconds", "bytes")


def curve(group, x, y):
    """Points of a group's curve: x, mean and sample deviation over seeds of y, the last None for one seed."""
    key = {"accuracy": "test_acc", "ema": "acc_ema", "worst": "client_acc_worst"}.get(y, y)
    points, at, deviation = [], [], []
    for i in range(group.rounds):
        rows = [run.rows[i] for run in group.runs]
        if any(row.get(key) is None for row in rows):
            continue
        seen = [run.rows[: i + 1] for run in group.runs]
        at.append(
            {
                "rounds": i + 1,
                "seconds": statistics.fmean(
                    sum(sum(r["seconds"].values()) for r in s) for s in seen
                ),
                "bytes": statistics.fmean(
                    sum(r["bytes_down"] + r["bytes_up"] for r in s) for s in seen
                )
                / 1e9,
            }[x]
        )
        values = Mean.of([row[key] for row in rows])
        points.append(values.mean)
        deviation.append(values.std)
    return at, points, deviation if len(group.runs) > 1 else None


def panels(settings, quantities):
    """Where each panel of a picture stands: {(setting, quantity): (row, column)}; no more than four side by side."""
    if len(settings) == 1:
        return {(settings[0], q): (0, j) for j, q in enumerate(quantities)}
    if len(quantities) == 1:
        return {(s, quantities[0]): divmod(i, 3) for i, s in enumerate(settings)}
    wide = len(settings) <= 4
    return {
        (s, q): (j, i) if wide else (i, j)
        for i, s in enumerate(settings)
        for j, q in enumerate(quantities)
    }


def pyplot():
    """matplotlib.pyplot, drawing into files. UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError:
        raise common.UserError(
            "argument --plot: needs matplotlib (pip install matplotlib)"
        ) from None
    return matplotlib.pyplot


def plot(groups, names, path, x="rounds", quantities=("accuracy", "train_loss")):
    """A picture of curves, a panel for each setting and quantity; of points, a panel for each quantity, where x is a flag or
    a figure. UserError without matplotlib."""
    plt = pyplot()
    with plt.rc_context(
        {
            "font.size": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "pdf.fonttype": 42,
            "legend.frameon": False,
            "lines.linewidth": 1.3,
        }
    ):
        draw = draw_curves if x in CURVES else draw_points
        figure, bars = draw(plt, groups, names, x, list(quantities))
        handles = {
            h.get_label(): h for ax in figure.axes for h in ax.get_legend_handles_labels()[0]
        }
        counts, room = (
            sorted({len(group.runs) for group in groups}),
            16 * figure.get_figwidth(),
        )  # characters
        title = (
            f"n = {', '.join(map(str, counts))}"
            + f"; {bars}: one standard deviation over seeds" * (counts[-1] > 1)
        )
        across = max(1, min(len(handles), int(room / (7 + max(map(len, handles))))))
        figure.set_figheight(
            figure.get_figheight() + 0.17 * max(0, math.ceil(len(handles) / across) - 2)
        )
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            title=title,
            title_fontsize=7,
            ncols=across,
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format=pathlib.Path(path).suffix[1:] or "png", dpi=300)
        plt.close(figure)
    common._write(path, buffer.getvalue())


def panes(plt, down, across):
    """A figure and its axes, (down, across)."""
    return plt.subplots(
        down,
        across,
        figsize=(max(3.4, 2.6 * across + 0.4), 2.2 * down + 0.6),
        squeeze=False,
        layout="constrained",
    )


def draw_curves(plt, groups, names, x, quantities):
    rows = labels(groups, names)
    if len({row[0] for row in rows}) == len(
        rows
    ):  # nothing to compare within a setting: it tells the curves apart
        rows = [("", f"{method} {setting}".strip(), group) for setting, method, group in rows]
    if x == "seconds" and len({machine(group) for group in groups}) > 1:
        rows = [(setting, f"{method}, {machine(group)}", group) for setting, method, group in rows]
    settings, methods = (
        list(dict.fromkeys(row[0] for row in rows)),
        list(dict.fromkeys(row[1] for row in rows)),
    )
    style = {
        m: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": ["-", "--", ":", "-."][i // len(COLOURS) % 4],
        }
        for i, m in enumerate(methods)
    }
    places = panels(settings, quantities)
    down, across = (1 + max(place[k] for place in places.values()) for k in (0, 1))
    at_place = {place: panel for panel, place in places.items()}
    figure, axes = panes(plt, down, across)
    for row, column in ((r, c) for r in range(down) for c in range(across)):
        ax = axes[row][column]
        if (row, column) not in at_place:
            ax.remove()
            continue
        setting, quantity = at_place[row, column]
        for method, group in ((m, g) for s, m, g in rows if s == setting):
            at, mean, deviation = curve(group, x, quantity)
            ax.plot(at, mean, label=method, marker="." if len(at) == 1 else None, **style[method])
            if deviation:
                low, high = ([m + sign * d for m, d in zip(mean, deviation)] for sign in (-1, 1))
                ax.fill_between(
                    at, low, high, color=style[method]["color"], alpha=0.18, linewidth=0
                )
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
        ax.xaxis.get_major_locator().set_params(
            integer=x == "rounds", nbins="auto" if x == "rounds" else 4
        )
        if (row + 1, column) not in at_place:
            ax.set_xlabel(AXES[x])
        if column == 0 or at_place[row, column - 1][1] != quantity:
            ax.set_ylabel(AXES[quantity])
        if row == 0 or at_place[row - 1, column][0] != setting:
            ax.set_title(setting, fontsize=8)
    return figure, "band"


EFFORT = {
    "rounds",
    "epochs",
    "local_steps",
    "batch_size",
}  # what moves a run along an axis of seconds or bytes a round


def lines_over(groups, names, x):
    """What is drawn against x, a flag or a figure of a round: [(label, [(value, group), ...])]. A line holds the groups of a
    method that differ in x alone, in order of x; where x is a figure, in their effort. Groups left alone are one line if they
    differ in their effort besides, as of epochs and rounds whose product is fixed. A method without the flag, as fedavg.py
    without lam, is a level: its value is x itself."""

    def rest(group, without):
        flags = {k: v for k, v in decisive(group.flags).items() if k not in without}
        return json.dumps([flags, machine(group) if "/" in x else ""], sort_keys=True)

    strict, lines = {}, {}
    for group in groups:
        known = (names or {}).get(str(group.runs[0].path), [("", group.runs[0].script)])
        for method in dict.fromkeys(method for _, method in known):
            strict.setdefault((method, rest(group, EFFORT if "/" in x else {x})), []).append(group)
    for (method, own), line in strict.items():
        lines.setdefault(
            (method, own if len(line) > 1 else rest(line[0], {x} | EFFORT)), []
        ).extend(line)
    found = []
    for (method, _), line in lines.items():
        rivals = [g for (other, _), several in lines.items() if other == method for g in several]
        telling = [
            k
            for k in line[0].flags
            if k not in {x, "seed", "data_dir", *MACHINE, *(EFFORT if "/" in x else ())}
            and len({words(g.flags.get(k)) for g in rivals}) > 1
        ]
        said = [
            f"{k} {' '.join(dict.fromkeys(words(g.flags.get(k)) for g in line))}" for k in telling
        ]
        if "/" in x and len({machine(g) for g in rivals}) > 1:
            said.insert(0, machine(line[0]))
        points = [(means(g)[x].mean if "/" in x else g.flags.get(x, x), g) for g in line]
        found.append(
            (
                ", ".join([method, *said[:3], *["..."] * (len(said) > 3)]),
                sorted(points, key=lambda p: in_order(p[0])),
            )
        )
    return found


def in_order(value):
    """A key that sorts numbers, and what is none behind them."""
    number = type(value) in (int, float)
    return (not number, value if number else len(words(value)), words(value))


def draw_points(plt, groups, names, x, quantities):
    lines = lines_over(groups, names, x)
    values = [
        value for _, points in lines for value, group in points if "/" in x or x in group.flags
    ]
    numbers = all(type(v) in (int, float) for v in values)
    ticks = list(dict.fromkeys(v if numbers else words(v) for v in sorted(values, key=in_order)))
    log = bool(ticks) and numbers and min(ticks) > 0 and max(ticks) >= 50 * min(ticks)
    # numbers that would lie on each other are set side by side
    spaced = numbers and (
        log
        or "/" in x
        or all(b - a > 0.05 * (ticks[-1] - ticks[0]) for a, b in zip(ticks, ticks[1:]))
    )
    figure, axes = panes(plt, 1, len(quantities))
    for ax, quantity in zip(axes[0], quantities):
        for i, (label, points) in enumerate(lines):
            ends = [(value, group, curve(group, "rounds", quantity)) for value, group in points]
            ends = [
                (value, group, mean[-1], deviation[-1] if deviation else math.nan)
                for value, group, (_, mean, deviation) in ends
                if mean
            ]  # what was not measured has none
            style = {"label": label, "color": COLOURS[i % len(COLOURS)]}
            if ends and "/" not in x and x not in ends[0][1].flags:
                ax.axhline(ends[0][2], linestyle="--", **style)
            elif ends:
                at = [
                    value if spaced else ticks.index(value if numbers else words(value))
                    for value, *_ in ends
                ]
                ax.errorbar(
                    at,
                    [end[2] for end in ends],
                    [end[3] for end in ends],
                    marker="o",
                    markersize=3,
                    capsize=2,
                    linestyle=["-", ":"][i // len(COLOURS) % 2],
                    **style,
                )
        if log:
            ax.set_xscale("log")
        if "/" not in x and (len(ticks) <= 12 or not spaced):
            ax.set_xticks(
                ticks if spaced else range(len(ticks)), [f"{t:g}" if numbers else t for t in ticks]
            )
            ax.minorticks_off()
        ax.grid(color="0.92")
        ax.set_axisbelow(True)
        ax.set_xlabel(AXES.get(x, f"--{x.replace('_', '-')}"))
        ax.set_ylabel(AXES[quantity])
    return figure, "bars"


def add_flags(parser):
    """What reproduce.py takes too."""
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--csv", metavar="FILE", help="also write all numbers, one a line")
    parser.add_argument(
        "--at",
        type=common.integers(1),
        metavar="ROUND,...",
        help="columns for the EMA at these rounds",
    )
    parser.add_argument(
        "--target",
        type=_percents,
        metavar="PERCENT,...",
        help="columns for the first round whose EMA gets there",
    )
    parser.add_argument(
        "--over",
        metavar="FLAG",
        help="a further table, averaged over a flag: pathways, for FedMLB's Table 6",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw curves, mean and a band of one deviation over seeds (.png, .pdf, .svg)",
    )
    parser.add_argument(
        "--x",
        metavar="NAME",
        help="what is drawn against: rounds (if not said), seconds or bytes, as curves; or of the last round a "
        "flag (lam, clients), s/round or MB/round",
    )
    parser.add_argument(
        "--y",
        type=_quantities,
        metavar="LIST",
        help="what is drawn: accuracy, ema, train_loss (with the method's own terms), test_loss, worst "
        "(client's accuracy); if not said accuracy,train_loss, or accuracy against a flag",
    )


def _percents(text):
    return [common.number(float, 0, 100)(word) for word in text.split(",")]


def _quantities(text):
    names = text.split(",")
    if not set(names) <= {*QUANTITIES}:
        raise argparse.ArgumentTypeError(
            f"takes a list of accuracy, ema, train_loss, test_loss and worst, not {text[:40]!r}"
        )
    return names


def check_outputs(args):
    """UserError, before any work, for a --csv or --plot that could not be written, or would overwrite something."""
    if (
        args.csv
        and args.plot
        and pathlib.Path(args.csv).absolute() == pathlib.Path(args.plot).absolute()
    ):
        raise common.UserError(f"argument --plot: {args.plot} is the file of --csv")
    for flag in ("csv", "plot"):
        if getattr(args, flag) is None:
            continue
        path = pathlib.Path(getattr(args, flag))
        run = next(
            (folder for folder in path.absolute().parents if (folder / "config.json").exists()),
            None,
        )
        if path.exists():
            raise common.UserError(f"argument --{flag}: {path} exists already; name another file")
        if run:
            raise common.UserError(
                f"argument --{flag}: {path} is inside the run folder {run}; name a file elsewhere"
            )
        if not path.absolute().parent.is_dir():
            raise common.UserError(f"argument --{flag}: {path}: there is no folder {path.parent}")
    if args.plot:
        pyplot()
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if (pathlib.Path(args.plot).suffix[1:] or "png") not in kinds:
            raise common.UserError(
                f"argument --plot: {args.plot} must end in one of .{', .'.join(sorted(kinds))}"
            )


def check_x(args, flags):
    """UserError if --x is none of its names, nor a flag that decides any of the runs, whose flags are given. --x as it is in
    them."""
    args.x = args.x or "rounds"
    if args.x not in AXES or args.x in QUANTITIES:
        args.x = args.x.lstrip("-").replace("-", "_")
        if args.x in MACHINE | {"seed"} or not any(own.get(args.x) is not None for own in flags):
            raise common.UserError(
                f"argument --x: {args.x} is no flag that decides these runs; it takes rounds, seconds, "
                "bytes, s/round, MB/round or a flag"
            )


def report(folders, args, names=None, published=True, wanted=None):
    """Print the tables, write the CSV and the picture; published, wanted: whether beside published numbers, and of which
    (paper, table) alone. Returns how many folders were damaged; UserError if nothing is left."""
    runs, damaged = [], 0

    def warn(line):
        print(f"compare.py: {line}", file=sys.stderr)

    for folder in folders:
        try:
            runs.append(read_run(folder))
        except common.UserError as e:
            damaged += 1
            warn(f"error: {e}")
    groups = grouped(runs, warn)
    if not groups and damaged:
        return damaged
    if not groups:
        raise common.UserError("no run with a finished round to compare")
    at, targets, flag = (
        args.at or [],
        args.target or [],
        args.over and args.over.lstrip("-").replace("-", "_"),
    )
    check_x(args, [group.flags for group in groups])
    over = pooled(groups, flag, at, targets) if flag else []
    tidy, lines = table(groups, names, at, targets)
    beside, besides = beside_published(groups, wanted) if published else ([], [])
    parts = [
        ("", lines),
        (f"\nMean +- sample standard deviation over the rows that differ in {flag}:\n\n", over),
        ("\nBeside the published numbers:\n\n", besides),
    ]
    used = [run for group in groups for run in group.runs]
    commits = sorted({run.commit[:7] + "+" * run.commit.endswith("+") for run in used})
    versions = (
        f"torch {', '.join(sorted({run.torch for run in used}))}, commit {', '.join(commits)}"
    )
    parts = [title + render(rows, args.markdown) + "\n" for title, rows in parts if rows]
    five = any(line["figure"].startswith("mean of last five") for line in besides)
    parts.append(
        "\nAccuracies in %; a +- b: mean and sample standard deviation over n seeds, none at n = 1"
        + "; with the mean of last five their population standard deviation" * five
        + f"; {versions}.\n"
    )
    print("".join(parts), end="")
    if args.csv:
        columns = [
            "setting",
            "method",
            "figure",
            "n",
            "measured",
            "std",
            "rounds",
            "not reached",
            "hardware",
            "paper",
            "table",
            "published",
            "published_std",
            "difference",
        ]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(tidy + beside)
        common._write(args.csv, text.getvalue().encode())
    if args.plot:
        curves = args.x in CURVES
        whole = [group for group in groups if curves or group.rounds >= group.flags["rounds"]]
        if len(whole) < len(groups):
            warn(
                f"{len(groups) - len(whole)} of {len(groups)} rows are of runs that were cut, and are not drawn"
            )
        asked = args.y or (["accuracy", "train_loss"] if curves else ["accuracy"])
        drawn = [
            quantity
            for quantity in asked
            if any(curve(group, "rounds", quantity)[1] for group in whole)
        ]
        if whole and len(drawn) < len(asked):
            warn(
                f"{', '.join(q for q in asked if q not in drawn)}: not measured in these runs, and not drawn"
            )
        if drawn:
            plot(whole, names, args.plot, args.x, drawn)
    return damaged


MARKS = "<!-- results -->\n", "<!-- end of results -->\n"


def into(path, make):
    """Put what make() prints between the MARKS in a file. UserError, before anything is made, if they are not there."""
    try:
        before, begin, rest = path.read_text().partition(MARKS[0])
    except (OSError, UnicodeDecodeError) as e:
        raise common.UserError(f"argument --into: {path} cannot be read ({e})") from None
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise common.UserError(
            f"argument --into: {path} has no line {MARKS[0].strip()} with {MARKS[1].strip()} behind it"
        )
    with contextlib.redirect_stdout(io.StringIO()) as text:
        damaged = make()
    if not damaged:
        mode = path.stat().st_mode
        common._write(
            path.resolve(), (before + begin + "\n" + text.getvalue() + "\n" + end + after).encode()
        )
        path.chmod(mode)
    return damaged


def main(argv=None):
    parser = common.PlainParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--into",
        metavar="FILE",
        type=pathlib.Path,
        help=f"put the tables as Markdown into FILE, between {MARKS[0].strip()} and {MARKS[1].strip()}",
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        check_outputs(args)
        if args.into:
            args.markdown, runs = (
                True,
                sorted(map(pathlib.Path, args.runs)),
            )  # in one order, whatever the shell's
            damaged = into(args.into, lambda: report(runs, args))
        else:
            damaged = report(args.runs, args)
        raise SystemExit(2 if damaged else 0)
    except (common.UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))


if __name__ == "__main__":
    main()
