"""Run folders, read from config.json and metrics.jsonl alone, and groups of runs, a row each."""

import argparse
import dataclasses
import functools
import json
import pathlib

import common
import run_folder

# Flags that may differ among the runs of a row: they do not decide the result, or only to rounding.
MACHINE_FLAGS = common.FREE_ON_RESUME - {"rounds"} | {
    "device",
    "workers",
    "graph",
    "deterministic",
    "client_test",
}
# Flags that make the setting; what else differs between rows names the method.
SETTING_FLAGS = (
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


@dataclasses.dataclass
class RunRecord:
    """A run, as its folder tells."""

    path: pathlib.Path
    script: str
    code: dict | None  # {"local_update": "NAME DIGEST", ...}; None: not recorded
    flags: dict
    rows: list  # of metrics.jsonl, rounds 1, 2, ...
    hardware: str
    torch: str
    commit: str
    workers: int | None  # None: not settled yet
    stopped: int | None  # the round behind which on_round ended training, before --rounds

    @property
    def finished(self):
        return len(self.rows) >= self.flags["rounds"] or self.stopped == len(self.rows)

    @property
    def key(self):
        """What two runs share when only their seeds differ."""
        what = [decisive_flags(self.flags), self.code]
        return self.script, json.dumps(what, sort_keys=True)

    @property
    def seeds(self):
        return self.flags["seed"], self.flags.get("data_seed")

    @property
    def family(self):
        """What two runs share when only their seeds and their partitions' seeds differ."""
        without = {**self.flags, "data_seed": None}
        return dataclasses.replace(self, flags=without).key

    @property
    def speed(self):
        """What two runs share whose seconds compare."""
        flags = [self.flags.get(flag) for flag in ("precision", "graph", "eval_every")]
        return self.hardware, self.workers, *flags


def decisive_flags(flags):
    """Return the flags that decide a result as they act, {name: value}, without the seed.

    --augment is what it comes to, the file of --vectors its name, and --data-dir is there only
    where it says which images they are.
    """
    decisive = {k: v for k, v in flags.items() if k not in MACHINE_FLAGS | {"seed"}}
    images = argparse.Namespace(dataset=flags["dataset"], augment=flags.get("augment", "auto"))
    decisive["augment"] = common.resolve_augment(images)
    decisive["vectors"] = flags.get("vectors") and pathlib.Path(flags["vectors"]).name
    if flags["dataset"] == "folder":
        decisive["data_dir"] = flags.get("data_dir")
    if flags.get("local_steps"):
        decisive["epochs"] = None
    return decisive


def as_text(value):
    """Return the value of a flag as a table shows it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "default" if value is None else str(value)


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def read_run(path):
    """Return the RunRecord of a run folder.

    A last line of metrics.jsonl that was cut while being written does not count. Raises UserError
    if the folder is no run, or a damaged one.
    """
    path = pathlib.Path(path)
    config = run_folder.read_config(path)
    flags = later_flags() | config["flags"]
    flags["epochs"] = None if flags["local_steps"] else flags["epochs"]
    return RunRecord(
        path=path,
        script=config["script"],
        code=config["code"],
        flags=flags,
        rows=read_rows(path, config),
        hardware=config["device"],
        torch=config["versions"]["torch"],
        commit=config["commit"] or "unknown",
        workers=config["workers"],
        stopped=config.get("stopped"),
    )


@functools.cache
def later_flags():
    """Return the shared flags at their defaults, which is what runs from before a flag had."""
    parser = common.flags("", "reproduce")
    return common.flag_values(parser.parse_args(["--device", "cpu"]))


def read_rows(path, config):
    """Return the rows of metrics.jsonl in a run folder; config: its config.json.

    Raises UserError if a line is damaged, or of another run.
    """
    file = path / "metrics.jsonl"
    try:
        rows = run_folder.read_rows(path, config)
        whole = file.read_bytes().count(b"\n") if file.exists() else 0  # the next is being written
    except OSError as e:
        raise common.UserError(f"{file}: cannot be read ({e.strerror})") from None
    if len(rows) < whole:
        raise common.UserError(
            f"{file}: line {len(rows) + 1} is damaged, or of another run; it should be the row of "
            f"round {len(rows) + 1}"
        )
    return rows


def read_runs(folders, warn):
    """Return the RunRecords of folders, and how many others were damaged, of which warn is told."""
    records = []
    damaged = 0
    for folder in folders:
        try:
            records.append(read_run(folder))
        except common.UserError as e:
            damaged += 1
            warn(f"error: {e}")
    return records, damaged


# --------------------------------------------------------------------------------------------------
# Groups of runs
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Group:
    """The runs of one row, and how many of their rounds count.

    They differ in their seeds alone or, where each has a partition of its own, in --data-seed too.
    """

    runs: list  # finished ones, or if there are none all that have a round; stopped is finished
    unfinished: list  # cut or still going, where others are finished
    rounds: int  # that all runs have

    @property
    def data_seeds(self):
        return sorted({run.flags.get("data_seed") for run in self.runs}, key=str)

    @property
    def flags(self):
        """The flags of all runs; data_seed is a list where it varies."""
        varied = {"data_seed": self.data_seeds} if len(self.data_seeds) > 1 else {}
        return self.runs[0].flags | varied

    @property
    def over(self):
        """What n counts."""
        return "partitions" if len(self.data_seeds) > 1 else "seeds"

    @property
    def script(self):
        return self.runs[0].script

    @property
    def code(self):
        return self.runs[0].code

    @property
    def complete(self):
        return self.rounds >= self.flags["rounds"]

    def count(self):
        """Return n as it is shown."""
        total = self.flags["rounds"]
        text = str(len(self.runs)) + " partitions" * (self.over == "partitions")
        stopped = sorted(len(run.rows) for run in self.runs if run.finished)
        stopped = [rounds for rounds in stopped if rounds < total]
        if stopped:
            text += f" ({len(stopped)} stopped at {','.join(map(str, stopped))}/{total})"
        elif not self.complete:
            text += f" at {self.rounds}/{total}"
        return text + "".join(f" + 1 at {len(run.rows)}/{total}" for run in self.unfinished)


def group_runs(records, warn):
    """Return RunRecords as Groups, in the order given. warn is told of each that is left out."""
    families = {}
    for record in records:
        families.setdefault(record.family, set()).add(record.seeds)
    by_key = {}
    for record in records:
        seeds = families[record.family]
        alone = len(seeds) == len({data_seed for _, data_seed in seeds})  # on its partition
        by_key.setdefault(record.family if alone else record.key, []).append(record)
    groups = [group_of(same, warn) for same in by_key.values()]
    groups = [group for group in groups if group]
    for script in dict.fromkeys(group.script for group in groups):
        same = [group for group in groups if group.script == script]
        codes = {json.dumps(group.code) for group in same}
        unclear = [group for group in same if not group.code or differing_code(group, same)]
        if len(codes) > 1 and unclear:
            warn(f"{script}: the code of its runs differs, so they are {len(codes)} methods")
    return groups


def differing_code(group, groups):
    """Return {part: texts} of the code that differs between those of groups of group's script.

    A part that some lack has "none" among its texts where group's flags are theirs: rFedAvg+ has
    an exchange that rFedAvg has not, and its flag says so.
    """
    flags = decisive_flags(group.flags)
    coded = [other for other in groups if other.code and other.script == group.script]
    codes = [other.code for other in coded]
    alike = [other.code for other in coded if decisive_flags(other.flags) == flags]
    differing = {}
    for part in sorted(set().union(*codes)):
        texts = {code[part] for code in codes if part in code}
        same_flags = {code.get(part, "none") for code in alike}
        if len(same_flags) > 1:
            texts |= same_flags
        if len(texts) > 1:
            differing[part] = texts
    return differing


def group_of(records, warn):
    """Return the Group of records of one row; None without any round."""
    begun = []
    for record in one_per_seed(records, warn):
        if record.rows:
            begun.append(record)
        else:
            warn(f"{record.path}: left out, since it has no finished round yet")
    counted = [record for record in begun if record.finished] or begun
    if not counted:
        return None
    unfinished = [record for record in begun if record not in counted]
    return Group(counted, unfinished, min(len(record.rows) for record in counted))


def one_per_seed(records, warn):
    """Return a record a seed: twice the same run is no second sample.

    The one of which more was measured stays.
    """
    by_seed = {}
    for record in records:
        seed, _ = seeds = record.seeds
        if seeds not in by_seed:
            by_seed[seeds] = record
            continue
        first = by_seed[seeds]
        more = amount_measured(record) > amount_measured(first)
        better, worse = (record, first) if more else (first, record)
        by_seed[seeds] = better
        warn(f"{worse.path}: left out, since it is the run of {better.path} again (seed {seed})")
    return list(by_seed.values())


def amount_measured(record):
    """Return how much there is of a run: rounds, and figures in their rows."""
    return len(record.rows), sum(v is not None for row in record.rows for v in row.values())


def hardware_of(*groups):
    """Return where groups were run, as one text."""
    return " and ".join(sorted({run.hardware for group in groups for run in group.runs}))


def comparable(a, b):
    """Whether the seconds of two groups were taken alike."""
    return len({run.speed for group in (a, b) for run in group.runs}) == 1


def baseline(group, groups):
    """Return fedavg.py's group in the same setting; None without one.

    Of several it is the one with most flags in common.
    """
    fitting = [other for other in plain_groups(group, groups) if same_partitions(group, other)]

    def in_common(other):
        return sum(other.flags.get(flag) == group.flags.get(flag) for flag in other.flags)

    return max(fitting, key=in_common, default=None)


def plain_groups(group, groups):
    """Return fedavg.py's groups in the same setting, whatever the seeds of their partitions."""
    setting = [flag for flag in SETTING_FLAGS if flag not in ("rounds", "data_dir", "data_seed")]
    return [
        other
        for other in groups
        if other.script == "fedavg"
        and other.flags.get("server") == "avg"
        and all(other.flags.get(flag) == group.flags.get(flag) for flag in setting)
    ]


def same_partitions(group, other):
    return group.data_seeds == other.data_seeds


def without_baseline(group, groups):
    """Return a line on partitions that keep a group from a baseline(); None where none do."""
    near = [o for o in plain_groups(group, groups) if {*o.data_seeds} & {*group.data_seeds}]
    if not near or baseline(group, groups):
        return None
    sides = ((group.script, group, near[0]), ("fedavg", near[0], group))
    only = [(name, sorted({*a.data_seeds} - {*b.data_seeds}, key=str)) for name, a, b in sides]
    parts = [f"only {name} has --data-seed {','.join(map(str, s))}" for name, s in only if s]
    return f"{group.script}: no (x) to fedavg, whose partitions are others: {', '.join(parts)}"
