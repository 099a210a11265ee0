"""Runs beside the published numbers of the cells whose flags they have."""

import csv
import json
import re

import pytest
from makers import CELLS, cells_by_method, make_cell_run, make_groups, make_run, run_compare
from runs import write_config

from reproduce.cells import parsed_flags
from reproduce.published import matching_cells

ALIGN, CKA = cells_by_method("FedAlign", "5"), cells_by_method("FedCKA", "3")
MLB = CELLS["FedMLB", "1a"][0]
MNIST = next(cell for cell in CELLS["rFedAvg", "I"] if cell.dataset == "MNIST")
PATHWAYS = [cell for cell in CELLS["FedMLB", "6"] if cell.setting.endswith("num_pathways=4")]
SUBSETS = [(cell, [50.0 + (i > 0)] * 1000, {}) for i, cell in enumerate(PATHWAYS)]
CENTRAL = cells_by_method("FedCKA", "fig5")["centralised"]
SLOW = [40.0] * 400 + [60.0] * 600  # 60 - 20 x 0.9^i > 47 first at i = 5
BESIDE = [  # runs, (cell, accuracies, more of every row), and lines of the table
    (  # 60 and 62 in the last round, 63 and 62 in the best
        [(ALIGN["FedAlign"], [50.0] * 23 + [63.0 - i, 60.0 + 2 * i], {}) for i in (0, 1)],
        "FedAlign | acc, last | 2 | 61.00 +- 1.41 | 56.9 +- 0.5 | +4.10 | x86_64, 2 cores |",
        "FedAlign | acc, best | 2 | 62.50 +- 0.71 | 56.9 +- 0.5 | +5.60 | x86_64, 2 cores |",
    ),
    # FedMLB's Table 6 is a mean over subsets of pathways; over some of them it has no difference
    (SUBSETS, "EMA at round 1000 | 5 subsets of n = 1 | 50.80 +- 0.45 | 53.69 +- 1.43 | -2.89"),
    (SUBSETS[:2], "| 2 of 5 subsets of n = 1 | 50.50 +- 0.71 | 53.69 +- 1.43 |  | x86_64"),
    ([(MLB, SLOW, {})], "rounds to 47% | 1 | 405 | 924 | -519.00 |"),
    (  # nor has a mean of which a run does not get there
        [(MLB, SLOW, {}), (MLB, [40.0] * 1000, {})],
        "rounds to 47% | 2 | 1000+ (1 of 2: 405) | 924 |  | x86_64",
    ),
    (  # medians 21 / 13 beside 161.9 / 137.2, of a run that was cut
        [(ALIGN["FedAvg"], 25 * [1.0], {}), (ALIGN["FedProx"], 20 * [1.0], {"train": 21.0})],
        "FedProx | seconds x FedAvg | 1 at 20/25 | 1.62 | 1.18 |  | x86_64",
    ),
    (  # 64.73 / 54.82, of training alone
        [
            (CKA["None(FedAvg)"], 100 * [1.0], {"train": 10.0, "evaluate": 50.0}),
            (CKA["FrobeniusNorm"], 100 * [1.0], {"train": 30.0, "evaluate": 50.0}),
        ],
        "FrobeniusNorm | training seconds x FedAvg | 1 | 3.00 | 1.18 |",
    ),
    (  # 90, 92, 94, 96, 98: 94 +- sqrt(8)
        [(MNIST, [10.0] * 55 + [90.0, 92.0, 94.0, 96.0, 98.0], {})],
        "mean of last five +- over rounds | 1 | 94.00 +- 2.83 | 97.07 +- 0.34 | -3.07",
    ),
    ([(CENTRAL, 100 * [69.0], {})], "acc, last | 1 | 69.00 | 70 | -1.00"),
]


@pytest.mark.parametrize("runs, texts", [(runs, texts) for runs, *texts in BESIDE])
def test_beside_the_published_number(tmp_path, capsys, runs, texts):
    folders = []
    for i, (cell, accuracies, seconds) in enumerate(runs):
        seed = sum(cell is other for other, *_ in runs[:i])
        more = {"seconds": seconds} if seconds else {}
        folders.append(make_run(tmp_path / str(i), cell.command, seed, accuracies, **more))
    code, out, _ = run_compare(capsys, *folders, "--markdown")
    assert code == 0 and "commit 0123456+" in out and "torch 2.15.0" in out
    for text in texts:
        assert text in out


def test_what_sets_a_published_number_apart_stands_under_the_table(tmp_path, capsys):
    """Once, however many rows are of such cells, and in the CSV; nothing without such a row."""
    a, b = [cell for cell in CELLS["FedMLB", "1a"] if cell.dataset == "Tiny-ImageNet"][:2]
    runs = [make_cell_run(tmp_path / str(i), cell, 30.0) for i, cell in enumerate((a, b, MLB))]
    _, out, _ = run_compare(capsys, *runs, "--csv", tmp_path / "all.csv")
    assert out.count(a.caveat) == 1
    assert out.index("Beside the published numbers") < out.index(a.caveat) < out.index("torch 2.15")
    for row in csv.DictReader((tmp_path / "all.csv").open()):
        assert row["caveat"] == (a.caveat if "Tiny-ImageNet" in row["setting"] else "")
    assert "authors' code" not in run_compare(capsys, runs[2])[1]


def test_each_code_has_its_line(tmp_path, capsys):
    """Runs of a cell whose code differs are rows of their own, here as in the main table."""
    runs = [make_cell_run(tmp_path / str(k), MLB, 30.0 + k) for k in range(2)]
    write_config(runs[1], code={"local_update": "another 1"})
    out = run_compare(capsys, *runs)[1].partition("Beside the published numbers")[2]
    assert re.findall(r"EMA at round 500 +1 +(\S+)", out) == ["30.00", "31.00"]


def test_runs_that_are_not_the_cell_have_no_published_number(tmp_path):
    """Other flags, though at their defaults in the cell, another partition, drawn word vectors."""
    align, avg = ALIGN["FedAlign"].command, CELLS["FedAlign", "1"][0].command
    text = next(cell.command for cell in CELLS["rFedAvg", "I"] if cell.dataset == "Sent140")
    lines = {
        align.replace("--lr 0.01", "--lr 0.02"): False,
        f"{avg} --data-seed 1": False,
        text.replace("data/glove.6B.300d.txt", "random"): False,
        text.replace("data/", "/mnt/"): True,
        f"{avg} --augment auto": True,
        f"{avg} --precision tf32": True,
        f"{avg} --precision bf16": False,
    }
    for i, (line, matches) in enumerate(lines.items()):
        accuracies = [50.0] * parsed_flags(line)["rounds"]
        (group,) = make_groups(make_run(tmp_path / str(i), line, accuracies=accuracies))
        assert bool(list(matching_cells(group))) == matches, line


def test_hessians_stand_beside_the_published_ones(tmp_path, capsys):
    """FedAlign, Table 1, FedAvg; H_N and H_D of the authors' reading alone."""
    numbers = {"trace": {"value": 6000.0}, "H_N": 11000.0, "H_D": 0.5, "round": 25}
    result = {"eigenvalues": [{"value": 300.0}], **numbers}
    for seed, diagonal in enumerate(("tensor", "elementwise")):
        run = make_run(tmp_path / str(seed), CELLS["FedAlign", "1"][0].command, seed, [50.0] * 25)
        result["settings"] = {"diagonal": diagonal}
        (run / "hessian.json").write_text(json.dumps(result))
    _, out, _ = run_compare(capsys, tmp_path / "0", tmp_path / "1")
    for text in (
        r" lambda_max +2 .* 297 +\+3\.00",
        r" H_T +2 .* 6240 +-240\.00",
        r" H_N +1 .* 11360 +-360\.00",
        r" H_D +1 .* 0\.98 +-0\.48",
    ):
        assert re.search(text, out)
    (tmp_path / "0" / "hessian.json").write_text("[]")
    assert run_compare(capsys, tmp_path / "0")[0] == 0
