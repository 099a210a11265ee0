"""The cells of the papers' tables and figures, each with the command line that measures it.

cells.txt holds the papers' protocols as rules, and says how they are read; published.csv holds the
published numbers, most of which are cells. `python -m reproduce` runs the cells, and compare knows
a run as a cell's by its flags.
"""

import csv
import functools
import itertools
import pathlib
import re
import shlex
from typing import NamedTuple

from analysis.runs import method_call
import common

HERE = pathlib.Path(__file__).parent
COSTS = {"mflops_fwd", "gflops_fwd", "params_M"}  # metrics that no run measures


class Cell(NamedTuple):
    """A cell of a published table or figure, and the command that measures it."""

    paper: str
    table: str
    dataset: str
    model: str
    setting: str
    method: str
    detail: str = ""  # what tells cells of one published row apart
    command: str = ""  # SCRIPT.py and its flags
    caveat: str = ""  # in what the published number is another than ours, or may be: a sentence

    @property
    def key(self):
        """The cell's row in published.csv: paper, table, data set, network, setting, method."""
        return self[:6]

    @property
    def words(self):
        """What the patterns of cells.txt are compared with."""
        parts = [self.dataset, self.model, self.method, *self.setting.split(";"), self.detail]
        return [f"table={self.table}", *parts]

    @property
    def label(self):
        """Data set, network and setting, as one line."""
        return " ".join(filter(None, (self.dataset, self.model, self.setting, self.detail)))

    @property
    def script(self):
        return self.command.split()[0].removesuffix(".py")


def parsed_flags(command):
    """Return the flags of a command line, {name: value}, as its script's own parser gives them.

    Raises UserError if the script refuses them."""
    script, *words = shlex.split(command)
    return common.flag_values(method_call(script.removesuffix(".py"), words).args)


@functools.cache
def sections():
    """Return the lines of cells.txt by section, {name: [line, ...]}, without comments."""
    found = {}
    for line in (HERE / "cells.txt").read_text().replace("\\\n", "").splitlines():
        if line.startswith("["):
            lines = found[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def rules(section, sign=":"):
    """Yield (patterns, text) of the lines "PATTERN ... : TEXT" of a section."""
    for line in sections()[section]:
        patterns, found, text = re.fullmatch("(.*?) (::?) (.*)", line).groups()
        if found == sign:
            yield patterns.split(), text


def matched(patterns, words):
    """Return the text that * stands for if words have all patterns, "" without *; else None."""
    text = ""
    for pattern in patterns:
        regex = re.escape(pattern.lstrip("!")).replace(r"\*", "(.*)").replace(r"\|", "|")
        found = [match for word in words if (match := re.fullmatch(regex, word))]
        if bool(found) == pattern.startswith("!"):
            return None
        text += "".join(found[0].groups() if found else ())
    return text


def texts(section, words, sign=":"):
    """Return the texts of a section's lines whose patterns words have, as one."""
    return " ".join(t for p, t in rules(section, sign) if matched(p, words) is not None)


def command_of(cell):
    """Return the command of a cell, by all rules of its paper that apply to it."""
    words, script, own, flags = cell.words, "", [], {}
    for patterns, text in rules(cell.paper):
        if (value := matched(patterns, words)) is None:
            continue
        text = text.replace("**", ",".join(value)).replace("*", value)
        parts = re.split(r" (?=--|\+)", text)
        if parts[0].endswith(".py"):  # in place of another script and its flags
            flags = {flag: part for flag, part in flags.items() if flag not in own}
            script, own = parts[0], [part.split()[0] for part in parts[1:]]
        words += [part[1:] for part in parts if part.startswith("+")]
        flags |= {part.split()[0]: part for part in parts if part.startswith("--")}
    return " ".join([script, *flags.values()])


@functools.cache
def read_published():
    """Return published.csv, {key of a Cell: {metric: (value, deviation)}}, both as printed."""
    lines = (HERE / "published.csv").read_text().splitlines()
    numbers = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = tuple(row[field] for field in Cell._fields[:6])
        numbers.setdefault(key, {})[row["metric"]] = row["value"], row["std"]
    return numbers


def own_cells():
    """Yield the cells of the section [cells], one for each combination of its {a,b}."""
    for line in sections()["cells"]:
        parts = re.split(r"\{(.*?)\}", line)
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        for combination in itertools.product(*choices):
            yield Cell(*"".join(combination).split())


@functools.cache
def all_cells():
    """Return every cell, {(paper, table): [Cell, ...]}; those of one setting together."""
    own = list(own_cells())
    listed = {cell.key for cell in own}
    rows = [key for key, metrics in read_published().items() if not set(metrics) <= COSTS]
    tables = {}
    for cell in [Cell(*key) for key in rows if key not in listed] + own:
        caveat = texts(cell.paper, cell.words, "::")
        cell = cell._replace(command=command_of(cell), caveat=caveat)
        tables.setdefault(cell[:2], {}).setdefault(cell[2:5], []).append(cell)
    tables = {table: sum(settings.values(), []) for table, settings in tables.items()}
    for line in sections()["figures"]:
        paper, figure, sources, *words = line.split()
        cells = [cell for table in sources.split("|") for cell in tables[paper, table]]
        drawn = [cell for cell in cells if matched(words, cell.words) is not None]
        tables[paper, figure] = [cell._replace(table=figure) for cell in drawn]
    return tables


@functools.cache
def homes():
    """Return {command: the first cell with its flags, but for what is measured beside}.

    There its run lies: a run of several tables is made once."""
    first, found = {}, {}
    for cell in itertools.chain(*all_cells().values()):
        parts = frozenset(re.split(" (?=--)", cell.command)) - {"--save-clients", "--client-test"}
        found[cell.command] = first.setdefault(parts, cell)
    return found
