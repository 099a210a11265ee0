"""Run folders as the package reproduce reads them: figures by hand, groups, damaged files."""

import dataclasses
import re

import pytest
from makers import (
    PLAIN,
    is_refused,
    make_groups,
    make_run,
    read_rows,
    run_compare,
    write_rows,
)
from runs import config_of, write_config

from reproduce.cells import parsed_flags
from reproduce.figures import Mean, figures, means
from reproduce.plot import lines_over
from reproduce.runs import (
    Group,
    baseline,
    comparable,
    decisive_flags,
    group_runs,
    read_run,
)


def test_figures_by_hand(tmp_path):
    """Accuracies 0, 10, 20, -, 40, 50, 60 (one round without evaluation).

    Last five: 10, 20, 40, 50, 60: mean 36, deviation sqrt((26^2 + 16^2 + 4^2 + 14^2 + 24^2) / 5) =
    sqrt(344). EMA by its recursion a <- 0.9 a + 0.1 x from 0, over 1 - 0.9^i.
    """
    accuracies = (0, 10, 20, None, 40, 50, 60)
    run = read_run(make_run(tmp_path / "a", "fedavg.py --rounds 7", accuracies=accuracies))
    average = 0
    ema = {}
    for i, accuracy in enumerate((0, 10, 20, 40, 50, 60), 1):
        average = 0.9 * average + 0.1 * accuracy
        ema[i] = average / (1 - 0.9**i)
    got = figures(run, 7, at=[2, 4, 7], targets=[ema[4] - 0.01, ema[4] + 0.01, 60])
    assert (got["last"], got["best"]) == (60, 60)
    assert got["last five"] == pytest.approx(36)
    assert got["their deviation"] == pytest.approx(344**0.5)
    assert got["EMA"] == pytest.approx(ema[6]) and got["EMA@2"] == pytest.approx(ema[2])
    assert got["EMA@4"] is None
    rounds = [value for name, value in got.items() if name.startswith("to ")]
    assert rounds == [5, 6, None]  # the fourth evaluation was in round 5
    assert got["s/round"] == 4  # of 1, 2, ..., 7 seconds and kB
    assert got["MB/round"] == pytest.approx(0.004)
    assert figures(run, 3)["last"] == 20


def test_means_by_hand():
    mean = Mean.of([1.0, 4.0, 7.0])
    assert (mean.mean, mean.n) == (4, 3)
    assert mean.std == pytest.approx(3)  # sqrt((9 + 0 + 9) / 2)
    assert Mean.of([5.0]).std is None
    assert Mean.of([None, 2.0]).missed == 1


def test_seconds_are_medians_and_bytes_are_means(tmp_path):
    """Of rounds 1 to 4 the last took 100 seconds and a megabyte.

    Median 2.5 seconds, mean (1 + 2 + 3) kB + 1 MB over 4.
    """
    folder = make_run(tmp_path / "a")
    rows = read_rows(folder)
    seconds = {"train": 90.0, "evaluate": 10.0}
    rows[3].update(seconds=seconds, bytes_up=999_000, bytes_down=1000)
    write_rows(folder, rows)
    run = read_run(folder)
    got = figures(run, 4, targets=[run.rows[1]["acc_ema"]])
    assert (got["s/round"], got["train s/round"]) == (2.5, 1.25)
    assert got["MB/round"] == pytest.approx(1.006 / 4)
    assert got[f"to {run.rows[1]['acc_ema']:g}%"] == 2  # a target is reached by what equals it


def test_what_decides_a_result(tmp_path):
    """--precision does, --workers does not; an augmentation counts as what it comes to."""
    more = ["", "--augment none", "--workers 2", "--data-dir x"]
    more += ["--precision bf16", "--augment flip", "--data-seed 1"]
    folders = [make_run(tmp_path / str(i), f"{PLAIN} {m}", seed=i) for i, m in enumerate(more)]
    names = [[run.path.name for run in group.runs] for group in make_groups(*folders)]
    assert names == [["0", "1", "2", "3"], ["4"], ["5"], ["6"]]
    folder = "fedavg.py --dataset folder --data-dir x --rounds 4"
    more = ["", "--augment none", "--augment crop,flip", "--augment auto"]
    folders = [make_run(tmp_path / f"f{i}", f"{folder} {m}", seed=i) for i, m in enumerate(more)]
    write_config(folders[0], augment="none")  # its images are grey
    names = [[run.path.name for run in group.runs] for group in make_groups(*folders)]
    assert names == [["f0", "f1"], ["f2", "f3"]]


def test_word_vectors_count_by_the_name_of_their_file():
    def flags(vectors):
        command = f"fedavg.py --dataset sent140 --model lstm --vectors {vectors}"
        return decisive_flags(parsed_flags(command))

    assert flags("data/g.txt") == flags("/mnt/g.txt") != flags("random")


def test_only_plain_fedavg_on_the_same_machine_is_a_baseline(tmp_path):
    commands = ["fedprox.py", "fedavg.py --server avgm", "fedavg.py --server adam", "fedavg.py"]
    folders = [
        make_run(tmp_path / str(i), f"{command} --dataset glyphs --rounds 4")
        for i, command in enumerate(commands)
    ]
    prox, *others, plain = make_groups(*folders)
    assert baseline(prox, [prox, *others]) is None
    assert baseline(prox, [prox, *others, plain]) is plain
    assert comparable(prox, plain)
    (run,) = plain.runs
    for change in (
        {"config": {**run.config, "workers": 2}},
        {"config": {**run.config, "device": "H"}},
        {"flags": {**plain.flags, "precision": "bf16"}},
    ):
        assert not comparable(prox, Group([dataclasses.replace(run, **change)], []))


def test_of_the_same_run_the_one_with_more_figures_stays(tmp_path, capsys):
    """and accuracies of clients say of how many runs they are."""
    a = make_run(tmp_path / "a0")
    more = {"client_acc_worst": 7.0, "personal_acc_mean": 64.5}
    b = make_run(tmp_path / "b0", f"{PLAIN} --client-test", **more)
    c = make_run(tmp_path / "c1", seed=1)
    _, out, err = run_compare(capsys, a, b, c)
    assert "a0: left out" in err and "7.00 (n = 1)" in out and "64.50 (n = 1)" in out
    _, out, _ = run_compare(capsys, c, b)
    assert "7.00 (n = 1)" in out


def test_groups_are_runs_that_differ_by_seed_only(tmp_path):
    """The machine's flags count for nothing, others do.

    The same seed twice is one run; cut runs do not enter a mean.
    """
    longer = "fedavg.py --dataset glyphs --rounds 9"
    folders = [
        make_run(tmp_path / "a0"),
        make_run(tmp_path / "a1", seed=1, accuracies=(10, 20, 30, 50)),
        make_run(tmp_path / "a2", f"{PLAIN} --workers 2", seed=2, accuracies=(1, 2)),
        make_run(tmp_path / "again"),
        make_run(tmp_path / "empty", seed=3, accuracies=()),
        make_run(tmp_path / "other", f"{PLAIN} --lr 0.02"),
        make_run(tmp_path / "cut0", longer, accuracies=(1, 2, 3)),
        make_run(tmp_path / "cut1", longer, seed=1, accuracies=(3, 4)),
    ]
    warnings = []
    records = [read_run(folder) for folder in folders]
    first, other, cut = group_runs(records, warnings.append)
    assert [run.path.name for run in first.runs] == ["a0", "a1"]
    assert first.count() == "2 + 1 at 2/4"
    assert means(first)["last"].mean == 45
    assert means(first)["last"].std == pytest.approx(50**0.5)
    assert other.count() == "1"
    assert cut.count() == "2 at 2/9"
    assert means(cut)["last"].mean == 3  # round 2 of both: 2 and 4
    again, empty = warnings
    assert "again" in again and "a0" in again and "empty" in empty


def test_a_flag_that_came_later_is_off_in_older_runs(tmp_path):
    """They are the row of runs that have it at its default, and of no others."""
    folders = [make_run(tmp_path / str(i), seed=i) for i in range(2)]
    folders.append(make_run(tmp_path / "held", f"{PLAIN} --validation 0.1", seed=2))
    flags = config_of(folders[0])["flags"]
    del flags["validation"]
    write_config(folders[0], flags=flags)
    assert [group.count() for group in make_groups(*folders)] == ["2", "1"]


AVERAGE = {"local_update": "local_update 11111111", "aggregate": "average 22222222"}
MEDIAN = AVERAGE | {"aggregate": "median 33333333"}


def test_other_code_is_another_method(tmp_path, capsys):
    """A median that calls itself fedavg is no further seed of FedAvg, nor its run again."""
    codes = [AVERAGE, AVERAGE, MEDIAN, MEDIAN | {"aggregate": "median 44444444"}, None]
    folders = []
    for i, (seed, code) in enumerate(zip((0, 1, 0, 0, 0), codes)):
        folder = make_run(tmp_path / str(i), seed=seed, accuracies=(10, 20, 30, 40 + i))
        folders.append(write_config(folder, code=code))
    code, out, err = run_compare(capsys, *folders)
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith("FedAvg ")]
    assert code == 0 and rows == [
        ["FedAvg", "aggregate=average", "#22222222"],
        ["FedAvg", "aggregate=median", "#33333333"],
        ["FedAvg", "aggregate=median", "#44444444"],
        ["FedAvg", "aggregate=none", "local_update=none"],
    ]
    assert err == ""
    _, out, _ = run_compare(capsys, *folders[:3])
    assert re.search("average #22222222 +2 ", out) and re.search("median #33333333 +1 ", out)
    lines = lines_over(make_groups(*folders[:3]), None, "lr")
    assert [label for _, (_, label, _) in lines] == [
        "FedAvg, aggregate=average #22222222",
        "FedAvg, aggregate=median #33333333",
    ]


def test_a_part_that_a_flag_brings_is_told_by_the_flag(tmp_path, capsys):
    """Where the flags are the same it is another method."""
    exchange = AVERAGE | {"after_round": "synchronise 55555555"}
    folders = [
        make_run(tmp_path / str(i), f"{PLAIN} {m}") for i, m in enumerate(("--lr 1", "", ""))
    ]
    for folder, code in zip(folders, (AVERAGE, exchange, AVERAGE)):
        write_config(folder, code=code)
    _, out, err = run_compare(capsys, *folders[:2])
    assert "after_round" not in out and err == ""
    _, out, _ = run_compare(capsys, *folders)
    assert "after_round=synchronise #55555555" in out and "after_round=none" in out


def test_a_line_being_written_does_not_count(tmp_path):
    path = make_run(tmp_path / "a")
    with open(path / "metrics.jsonl", "a") as f:
        f.write('{"round": 5, "test_a')
    assert len(read_run(path).rows) == 4


DAMAGE = [  # a file, a text in it, what stands there instead (None: no file), and what is said
    ("config.json", "", None, "no run, since it has no config.json"),
    ("config.json", '"seed": 0', '"seed": 1', "config.json is damaged"),
    ("config.json", "{", 100_000 * "[", "config.json is damaged"),
    ("metrics.jsonl", '{"round": 1', "{}\n", "it should be the row of round 1"),
    ("metrics.jsonl", '{"round": 1', "\xff\n", "line 1 is damaged, or of another run"),
    ("metrics.jsonl", '{"round": 1', 100_000 * "[", "line 1 is damaged"),
    ("metrics.jsonl", '"train_loss": 2', '"train_loss": 3', "line 1 is damaged"),
    ("metrics.jsonl", '"test_acc": 20', '"test_acc": NaN', "line 2 is damaged"),
    ("metrics.jsonl", "\n", '\n{"round": 2}\n', "line 2 is damaged"),
]


@pytest.mark.parametrize("name, old, new, message", DAMAGE)
def test_a_damaged_folder_gets_one_line(tmp_path, capsys, name, old, new, message):
    """and the others are shown; exit code 2."""
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    text = (bad / name).read_text()
    assert old in text
    (bad / name).unlink()
    if new is not None:
        (bad / name).write_text(text.replace(old, new, 1), encoding="latin-1")
    code, out, err = run_compare(capsys, bad, good)
    assert code == 2 and message in err and err.count("\n") == 1 and str(bad) in err
    assert "FedAvg" in out
    assert is_refused(run_compare(capsys, bad), message)
