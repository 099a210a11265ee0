"""Runs beside the published numbers of the cells whose flags they have."""

import csv
import json
import re

import pytest
from makers import (
    CELLS,
    cells_by_method,
    make_cell_run,
    make_groups,
    make_run,
    run_compare,
    words_of,
)

from reproduce.cells import parsed_flags
from reproduce.published import matching_cells


def test_published_number_beside_the_measured(tmp_path, capsys):
    """FedAlign, Table 5: 56.9 +- 0.5 beside 60 and 62 in the last round, 63 and 62 in the best.

    Runs with other flags match nothing.
    """
    command = cells_by_method("FedAlign", "5")["FedAlign"].command
    for seed, last in ((0, 60), (1, 62)):
        accuracies = [50.0] * 23 + [63.0 - seed, last]
        make_run(tmp_path / f"a{seed}", command, seed, accuracies)
    ones = [1.0] * 25
    make_run(tmp_path / "b", command.replace("--lr 0.01", "--lr 0.02"), accuracies=ones)
    # a flag that the line leaves at its default
    make_run(tmp_path / "c", f"{command} --lip-scale none", accuracies=ones)
    code, out, _ = run_compare(capsys, *sorted(tmp_path.iterdir()), "--markdown")
    lines = [line for line in out.splitlines() if line.startswith("| FedAlign 5")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    row = ["FedAlign 5", "CIFAR-100 ResNet56 C=16;E=20;R=25;alpha=0.5", "FedAlign"]
    cores = "x86_64, 2 cores"
    assert rows == [
        [*row, "acc, last", "2", "61.00 +- 1.41", "56.9 +- 0.5", "+4.10", cores],
        [*row, "acc, best", "2", "62.50 +- 0.71", "56.9 +- 0.5", "+5.60", cores],
    ]
    assert code == 0 and "commit 0123456+" in out and "torch 2.15.0" in out


def four_pathways():
    return [cell for cell in CELLS["FedMLB", "6"] if cell.setting.endswith("num_pathways=4")]


def test_a_number_over_several_cells(tmp_path, capsys):
    """FedMLB's Table 6 is a mean over subsets of pathways, of 54, 55, 55, 55 and 55 here."""
    for cell in four_pathways():  # 1234, 1235, ...
        pathways = words_of(cell)["pathways"]
        folder = tmp_path / pathways.replace(",", "")
        make_cell_run(folder, cell, accuracy=50.0 + int(pathways[-1]))
    _, out, _ = run_compare(capsys, *tmp_path.iterdir())
    assert re.search(
        r"num_pathways=4 +FedMLB +EMA at round 1000 +5 subsets of n = 1 "
        r"+54\.80 \+- 0\.45 +53\.69 \+- 1\.43 +\+1\.11",
        out,
    )


def test_rounds_to_a_target(tmp_path, capsys):
    """60 - 20 x 0.9^i > 47 first at i = 5; with a run that does not get there is no difference."""
    command = CELLS["FedMLB", "1a"][0].command
    run = make_run(tmp_path / "0", command, accuracies=[40.0] * 400 + [60.0] * 600)
    _, out, _ = run_compare(capsys, run)
    assert re.search(r"rounds to 47% +1 +405 +924 +-519\.00", out)
    short = make_run(tmp_path / "1", command, seed=1, accuracies=[40.0] * 1000)
    _, out, _ = run_compare(capsys, run, short)
    assert re.search(r"rounds to 47% +2 +1000\+ \(1 of 2: 405\) +924 +x86_64", out)


def test_times_are_ratios_to_fedavg(tmp_path, capsys):
    """161.9 / 137.2 = 1.18 beside 21 / 13, medians; a run that was cut gets no difference."""
    cells = cells_by_method("FedAlign", "5")
    avg = make_run(tmp_path / "avg", cells["FedAvg"].command, accuracies=[1.0] * 25)
    prox = make_run(
        tmp_path / "prox",
        cells["FedProx"].command,
        accuracies=[1.0] * 20,
        seconds={"train": 21.0},
    )
    _, out, _ = run_compare(capsys, avg, prox)
    assert re.search(r"FedProx +seconds x FedAvg +1 at 20/25 +1\.62 +1\.18 +x86_64, 2 cores\n", out)


def test_what_sets_a_published_number_apart_stands_under_the_table(tmp_path, capsys):
    """Once, however many rows are of such cells, and in the CSV; nothing without such a row."""
    a, b = [cell for cell in CELLS["FedMLB", "1a"] if cell.dataset == "Tiny-ImageNet"][:2]
    plain = CELLS["FedMLB", "1a"][0]
    assert plain.dataset == "CIFAR-100"
    tiny = [make_cell_run(tmp_path / cell.method, cell, 30.0) for cell in (a, b)]
    other = make_cell_run(tmp_path / "other", plain, 40.0)
    _, out, _ = run_compare(capsys, *tiny, other, "--csv", tmp_path / "all.csv")
    assert out.count(a.caveat) == 1
    assert out.index("Beside the published numbers") < out.index(a.caveat) < out.index("torch 2.15")
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert {row["caveat"] for row in rows if "Tiny-ImageNet" in row["setting"]} == {a.caveat}
    assert {row["caveat"] for row in rows if "Tiny-ImageNet" not in row["setting"]} == {""}
    assert "authors' code" not in run_compare(capsys, other)[1]


def test_fedcka_s_times_are_of_training(tmp_path, capsys):
    """Frobenius: 64.73 / 54.82 = 1.18 beside 30 seconds over 10, whatever evaluation took."""
    runs = []
    for cell, train in zip(CELLS["FedCKA", "3"][:2], (10.0, 30.0)):
        seconds = {"train": train, "evaluate": 50.0}
        runs.append(make_cell_run(tmp_path / cell.method, cell, 1.0, seconds=seconds))
    _, out, _ = run_compare(capsys, *runs)
    assert re.search(r"FrobeniusNorm +training seconds x FedAvg +1 +3\.00 +1\.18 ", out)


def test_rfedavg_is_compared_by_its_last_five_rounds(tmp_path, capsys):
    """97.07 +- 0.34 beside last five 90, 92, 94, 96, 98: 94 +- sqrt(8)."""
    command = next(cell.command for cell in CELLS["rFedAvg", "I"] if cell.dataset == "MNIST")
    make_run(tmp_path / "a", command, accuracies=[10.0] * 55 + [90.0, 92.0, 94.0, 96.0, 98.0])
    _, out, _ = run_compare(capsys, tmp_path / "a")
    assert re.search(
        r"mean of last five \+- over rounds +1 +94\.00 \+- 2\.83 +97\.07 \+- 0\.34 +-3\.07", out
    )


def test_runs_that_are_not_the_cell_have_no_published_number(tmp_path):
    """Another partition, word vectors that are drawn; auto augmentation is the cell's own."""
    command = CELLS["FedAlign", "1"][0].command
    text = next(cell.command for cell in CELLS["rFedAvg", "I"] if cell.dataset == "Sent140")
    lines = {
        f"{command} --data-seed 1": False,
        text.replace("data/glove.6B.300d.txt", "random"): False,
        text.replace("data/", "/mnt/"): True,
        f"{command} --augment auto": True,
    }
    for i, (line, matches) in enumerate(lines.items()):
        accuracies = [50.0] * parsed_flags(line)["rounds"]
        (group,) = make_groups(make_run(tmp_path / str(i), line, accuracies=accuracies))
        assert bool(list(matching_cells(group))) == matches, line


def test_a_mean_over_some_of_the_cells_has_no_difference(tmp_path, capsys):
    runs = [
        make_cell_run(tmp_path / str(i), cell, 50.0) for i, cell in enumerate(four_pathways()[:2])
    ]
    _, out, _ = run_compare(capsys, *runs)
    assert re.search(
        r"EMA at round 1000 +2 of 5 subsets of n = 1 +50\.00 \+- 0\.00 +53\.69 \+- 1\.43 +x86_64",
        out,
    )


@pytest.mark.parametrize(
    "name, n, published, difference",
    [
        ("lambda_max", 2, 297, "+3.00"),
        ("H_T", 2, 6240, "-240.00"),
        ("H_N", 1, 11360, "-360.00"),
        ("H_D", 1, 0.98, "-0.48"),
    ],
)
def test_hessians_stand_beside_the_published_ones(tmp_path, capsys, name, n, published, difference):
    """FedAlign, Table 1, FedAvg; H_N and H_D of the authors' reading alone."""
    result = {
        "eigenvalues": [{"value": 300.0}],
        "trace": {"value": 6000.0},
        "H_N": 11000.0,
        "H_D": 0.5,
        "round": 25,
    }
    for seed, diagonal in enumerate(("tensor", "elementwise")):
        run = make_run(tmp_path / str(seed), CELLS["FedAlign", "1"][0].command, seed, [50.0] * 25)
        settings = {"diagonal": diagonal}
        (run / "hessian.json").write_text(json.dumps({**result, "settings": settings}))
    _, out, _ = run_compare(capsys, tmp_path / "0", tmp_path / "1")
    assert re.search(rf" {name} +{n} .* {published} +{re.escape(difference)}", out)
    (tmp_path / "0" / "hessian.json").write_text("[]")
    assert run_compare(capsys, tmp_path / "0")[0] == 0


def test_the_centralised_bound(tmp_path, capsys):
    run = make_cell_run(tmp_path / "a", cells_by_method("FedCKA", "fig5")["centralised"], 69.0)
    _, out, _ = run_compare(capsys, run)
    assert re.search(r"FedCKA fig5 .*acc, last +1 +69\.00 +70 +-1\.00", out)
