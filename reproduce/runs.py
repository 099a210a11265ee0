"""Run folders, read from config.json and metrics.jsonl alone, and groups of runs, a row each."""

import argparse
import dataclasses
import functools
import json
import pathlib

import common
import run_folder

# Flags that may differ among the runs of a row: they do not decide the result, or only to rounding.
MACHINE_FLAGS = {*"device graph deterministic client_test metric".split()}
MACHINE_FLAGS |= common.FREE_ON_RESUME - {"rounds"}
# Flags that make the setting; what else differs between rows names the method.
SETTING_FLAGS = (
    "dataset data_dir image_size partition alpha similarity labels shards split_file "
    "data_seed users model clients sample rounds epochs local_steps batch_size"
).split()


@dataclasses.dataclass
class Run:
    """A run, as its folder tells."""

    path: pathlib.Path
    config: dict  # config.json
    flags: dict
    rows: list  # of metrics.jsonl, rounds 1, 2, ...

    @property
    def script(self):
        return self.config["script"]

    @property
    def code(self):
        """What is kept of the method's functions, {"local_update": "NAME DIGEST", ...}."""
        return self.config["code"] or {}

    @property
    def finished(self):
        """Whether it has all rounds, or was stopped by on_round."""
        return len(self.rows) in (self.flags["rounds"], self.config.get("stopped"))

    @property
    def seeds(self):
        return self.flags["seed"], self.flags["data_seed"]

    @property
    def speed(self):
        """What two runs share whose seconds compare."""
        flags = [self.flags.get(flag) for flag in ("precision", "graph", "eval_every")]
        instructions = self.config.get("versions", {}).get("instructions")  # not in old runs
        return self.config["device"], instructions, self.config["workers"], *flags

    def key(self, *without):
        """Return what two runs share that differ in their seeds and in the flags without alone."""
        flags = {k: v for k, v in decisive_flags(self.flags).items() if k not in without}
        return json.dumps([self.script, flags, self.code], sort_keys=True)


def decisive_flags(flags):
    """Return the flags that decide a result as they act, {name: value}, without the seed.

    --augment is what it comes to, as far as --dataset tells, the file of --vectors its name, and
    --data-dir is there only where it says which images they are."""
    decisive = {k: v for k, v in flags.items() if k not in MACHINE_FLAGS | {"seed"}}
    images = argparse.Namespace(dataset=flags["dataset"], augment=flags["augment"])
    decisive["augment"] = ",".join(common.resolve_augment(images)) or "none"
    decisive["vectors"] = flags["vectors"] and pathlib.Path(flags["vectors"]).name
    if flags["dataset"] == "folder":
        decisive["data_dir"] = flags["data_dir"]
    if flags["local_steps"]:
        decisive["epochs"] = None
    return decisive


def as_text(value):
    """Return the value of a flag as a table shows it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "default" if value is None else str(value)


@functools.cache
def shared_flags():
    """Return the shared flags at their defaults, which a run has that is older than a flag."""
    return common.flag_values(common.flags("", "reproduce").parse_args(["--device", "cpu"]))


def read_run(path):
    """Return the Run in a folder. UserError if it is none, or damaged.

    A last line of metrics.jsonl that is being written does not count."""
    path = pathlib.Path(path)
    config = run_folder.read_config(path)
    flags = shared_flags() | config["flags"]
    flags["augment"] = config.get("augment", flags["augment"])  # what auto came to
    flags["epochs"] = None if flags["local_steps"] else flags["epochs"]
    file = path / "metrics.jsonl"
    lines = file.read_bytes().count(b"\n") if file.exists() else 0  # first: the run may go on
    rows = run_folder.read_rows(path, config)
    if len(rows) < lines:
        number = len(rows) + 1
        why = f"line {number} is damaged, or of another run"
        raise common.UserError(f"{file}: {why}; it should be the row of round {number}")
    return Run(path, config, flags, rows)


def read_runs(paths, warn):
    """Return the Runs in folders, and how many others are damaged, of which warn is told.

    Files among the paths, such as a picture that lies beside the folders, are passed over."""
    runs, damaged = [], 0
    for path in paths:
        try:
            runs += [] if pathlib.Path(path).is_file() else [read_run(path)]
        except (common.UserError, OSError) as e:
            damaged += 1
            warn(f"error: {e}")
    return runs, damaged


@dataclasses.dataclass
class Group:
    """The runs of one row, of different seeds or, each on a partition of its own, data seeds."""

    runs: list  # finished ones, or if there are none all that have a round
    unfinished: list  # cut or still going, where others are finished

    @property
    def rounds(self):
        """How many all runs have."""
        return min(len(run.rows) for run in self.runs)

    @property
    def data_seeds(self):
        return sorted({run.flags["data_seed"] for run in self.runs})

    @property
    def flags(self):
        """The flags of all runs; data_seed is a list where it varies."""
        seeds = self.data_seeds
        return self.runs[0].flags | ({"data_seed": seeds} if len(seeds) > 1 else {})

    @property
    def over(self):
        """What n counts."""
        return "partitions" if len(self.data_seeds) > 1 else "seeds"

    @property
    def script(self):
        return self.runs[0].script

    @property
    def complete(self):
        return self.rounds >= self.flags["rounds"]

    @property
    def hardware(self):
        """Where the runs were run, as one text."""
        return " and ".join(sorted({run.config["device"] for run in self.runs}))

    def count(self):
        """Return n as it is shown."""
        total = self.flags["rounds"]
        text = str(len(self.runs)) + " partitions" * (self.over == "partitions")
        stopped = sorted(len(r.rows) for r in self.runs if r.finished and len(r.rows) < total)
        if stopped:
            text += f" ({len(stopped)} stopped at {','.join(map(str, stopped))}/{total})"
        elif not self.complete:
            text += f" at {self.rounds}/{total}"
        return text + "".join(f" + 1 at {len(run.rows)}/{total}" for run in self.unfinished)


def group_runs(runs, warn):
    """Return Runs as Groups, in the order given. warn is told of each that is left out."""
    families = {}
    for run in runs:
        families.setdefault(run.key("data_seed"), set()).add(run.seeds)
    groups = {}
    for run in one_per_seed(runs, warn):
        seeds = families[run.key("data_seed")]
        alone = len(seeds) == len({data_seed for _, data_seed in seeds})  # on its partition
        groups.setdefault(run.key("data_seed") if alone else run.key(), []).append(run)
    counted = [[run for run in same if run.finished] or same for same in groups.values()]
    pairs = zip(counted, groups.values())
    return [Group(own, [run for run in same if run not in own]) for own, same in pairs]


def one_per_seed(runs, warn):
    """Return the runs that have a round: of twice the same one that of which more was measured."""
    kept = {}
    for run in runs:
        first = kept.setdefault((run.key(), run.seeds), run)
        if not run.rows:
            warn(f"{run.path}: left out, since it has no finished round yet")
        elif first is not run:
            worse, better = sorted((run, first), key=measured)
            kept[run.key(), run.seeds] = better
            warn(f"{worse.path}: left out, since it is the run of {better.path} again")
    return [run for run in kept.values() if run.rows]


def measured(run):
    """Return how much there is of a run: rounds, and figures in their rows."""
    return len(run.rows), sum(v is not None for row in run.rows for v in row.values())


def comparable(a, b):
    """Whether the seconds of two groups were taken alike."""
    return len({run.speed for group in (a, b) for run in group.runs}) == 1


def baseline(group, groups):
    """Return fedavg.py's group in the same setting, with most flags in common; None without one."""
    setting = [flag for flag in SETTING_FLAGS if flag not in ("rounds", "data_dir")]
    plain = (g for g in groups if g.script == "fedavg" and g.flags.get("server") == "avg")
    fitting = [g for g in plain if all(g.flags.get(f) == group.flags.get(f) for f in setting)]
    common_flags = [sum(g.flags.get(f) == group.flags.get(f) for f in g.flags) for g in fitting]
    return fitting[common_flags.index(max(common_flags))] if fitting else None
