"""What the tests of the package reproduce share: run folders by hand, and its commands."""

import functools
import importlib
import json
import pathlib
import re
import shlex

import pytest

import common
import methods
import run_folder
from reproduce import __main__ as reproduce_command
from reproduce import compare, jobs
from reproduce.cells import all_cells, parsed_flags
from reproduce.runs import group_runs, read_run
from runs import config_of

ROOT = pathlib.Path(common.__file__).parent
PAPER = re.compile(r"^(FedAlign|FedCKA|FedMLB|rFedAvg) paper, ", re.M)  # in docstrings
OF_PAPERS = [name for name, script in methods.SCRIPTS.items() if PAPER.search(script.__doc__)]
CELLS = all_cells()
PLAIN = "fedavg.py --dataset glyphs --rounds 4"  # what make_run() makes if nothing is said
GLYPHS = "--dataset glyphs --model cnn --clients 2 --rounds 4 --epochs 1"


def make_run(folder, command=PLAIN, seed=0, accuracies=(10, 20, 30, 40), **more):
    """Make a run folder by hand, finished if there are as many accuracies as rounds.

    Round t took t seconds and 1000 t bytes, half of them up; more: of every row.
    """
    flags = parsed_flags(f"{command} --seed {seed} --out {folder}")
    folder.mkdir(parents=True)
    config = {"run": f"{seed:08x}", "script": command.split(".py")[0], "flags": flags}
    config |= {"workers": 1, "threads": 1, "device": "x86_64, 2 cores", "code": None}
    config |= {"versions": {"torch": "2.15.0"}, "commit": "0123456789+"}
    (folder / "config.json").write_text(json.dumps(run_folder.sealed(config)))
    rows = []
    for number, accuracy in enumerate(accuracies, 1):
        row = {"round": number, "test_acc": accuracy, "test_loss": 1.0, "clients": [0, 1]}
        row |= {"train_loss": 2.0, "bytes_down": 500 * number, "bytes_up": 500 * number}
        row |= {"seconds": {"train": number / 2, "evaluate": number / 2}}
        rows.append({**row, **common.summary([*rows, row]), **more})
    write_rows(folder, rows)
    (folder / "checkpoint.pt").touch()
    if len(rows) >= flags["rounds"]:
        (folder / "model.pt").touch()
    return folder


def read_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tables_in(text):
    """Return the Markdown tables of a text: of each the cells of its rows."""
    found = (table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.M))
    return [[[c.strip() for c in line.strip("|").split("|")] for line in table] for table in found]


def write_rows(folder, rows):
    """Write metrics.jsonl of rows, with their checksums."""
    crc, text = int(config_of(folder)["run"], 16), ""
    for row in rows:
        row = run_folder.sealed(row, crc)
        crc = row["crc32"]
        text += json.dumps(row) + "\n"
    (folder / "metrics.jsonl").write_text(text)


def make_cell_run(folder, cell, accuracy, **more):
    """Make a finished run of a cell, of one accuracy in all rounds."""
    rounds = parsed_flags(cell.command)["rounds"]
    return make_run(folder, cell.command, accuracies=[accuracy] * rounds, **more)


def make_groups(*folders):
    return group_runs([read_run(folder) for folder in folders], print)


def cells_by_method(paper, table):
    return {cell.method: cell for cell in CELLS[paper, table]}


def cell_folder(runs, cell):
    """Return where the command makes the run of a cell with seed 0, without those of several."""
    table = f"{cell.paper.lower()}-{cell.table.lower()}"
    return runs / table / (jobs.slug(f"{cell.label} {cell.method}") + "-seed0")


def run_reproduce(capsys, *argv, main=reproduce_command.main):
    with pytest.raises(SystemExit) as e:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return e.value.code, out, err


run_compare = functools.partial(run_reproduce, main=compare.main)


def is_refused(result, *messages):
    """Whether a command ended with code 2 and one line, which has the messages, and no output."""
    code, out, err = result
    return code == 2 and not out and err.count("\n") == 1 and all(m in err for m in messages)


def run_child_here(line, *_):
    """Run [SCRIPT.py, flags...] in this process, as jobs.run_child does in one of its own."""
    importlib.import_module(line[0].removesuffix(".py")).main(line[1:])
    return 0


class Started(list):
    """The lines that were started, in place of jobs.run_child; codes: {script: exit code}."""

    codes = {}

    def __call__(self, line, *_):
        self.append(line)
        if line[0] in self.codes:
            return self.codes[line[0]]
        at = line.index("--out")
        command = shlex.join(line[:at])
        flags = parsed_flags(command)
        make_run(pathlib.Path(line[at + 1]), command, flags["seed"], [9.0] * flags["rounds"])
        return 0
