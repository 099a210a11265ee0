"""Run folders as the package reproduce reads them: figures by hand, groups, damaged files."""

import math
import re

import pytest
from makers import PLAIN, is_refused, make_groups, make_run, read_rows, run_compare, write_rows
from runs import config_of, write_config

from reproduce.figures import Mean, figures, means
from reproduce.plot import lines_over
from reproduce.runs import Group, baseline, comparable, group_runs, read_run


def test_figures_by_hand(tmp_path):
    """Of the last five, 10, 20, 40, 50, 60, mean 36, deviation sqrt((26^2 + 16^2 + 4^2 + ...) / 5).

    EMA by its recursion a <- 0.9 a + 0.1 x from 0, over 1 - 0.9^i. Round 7 took 100 seconds and a
    megabyte; the others 1, 2, ..., 6 seconds, half of them in training, and kB."""
    accuracies = (0, 10, 20, None, 40, 50, 60)
    folder = make_run(tmp_path / "a", "fedavg.py --rounds 7", accuracies=accuracies)
    rows = read_rows(folder)
    rows[6].update(seconds={"train": 90.0, "evaluate": 10.0}, bytes_up=999_000, bytes_down=1000)
    write_rows(folder, rows)
    run, average, ema = read_run(folder), 0, {}
    for i, accuracy in enumerate((0, 10, 20, 40, 50, 60), 1):
        average = 0.9 * average + 0.1 * accuracy
        ema[i] = average / (1 - 0.9**i)
    reached = run.rows[1]["acc_ema"]  # a target is reached by what equals it
    got = figures(run, 7, at=[2, 4, 7], targets=[ema[4] - 0.01, ema[4] + 0.01, 60, reached])
    assert (got["last"], got["best"]) == (60, 60)
    assert got["last five"] == pytest.approx(36)
    assert got["their deviation"] == pytest.approx(344**0.5)
    assert got["EMA"] == pytest.approx(ema[6]) and got["EMA@2"] == pytest.approx(ema[2])
    assert got["EMA@4"] is None
    rounds = [value for name, value in got.items() if name.startswith("to ")]
    assert rounds == [5, 6, None, 2]  # the fourth evaluation was in round 5
    assert (got["s/round"], got["train s/round"]) == (4, 2)
    assert got["MB/round"] == pytest.approx(1.021 / 7)
    assert figures(run, 3)["last"] == 20


def test_a_mean_of_what_is_not_finite():
    """A run that has diverged does not end the table of the others."""
    assert Mean.of([math.nan, 1.0]).show() == "nan +- nan"
    assert Mean.of([math.inf, 1.0, None]).show() == "inf +- nan"


def test_what_decides_a_result(tmp_path):
    """--precision does, --workers does not; an augmentation counts as what it comes to."""
    folder = "fedavg.py --dataset folder --data-dir x --rounds 4"
    text = "fedavg.py --dataset sent140 --model lstm --rounds 4 --vectors"
    runs = [PLAIN, *(f"{PLAIN} {m}" for m in ("--augment none", "--workers 2", "--data-dir x"))]
    runs += [f"{PLAIN} {m}" for m in ("--precision bf16", "--augment flip", "--data-seed 1")]
    runs += [f"{folder} {m}" for m in ("", "--augment none", "--augment crop,flip", "")]
    runs += [f"{text} {m}" for m in ("data/g.txt", "/mnt/g.txt", "random")]
    folders = [make_run(tmp_path / str(i), line, seed=i) for i, line in enumerate(runs)]
    write_config(folders[7], augment="none")  # its images are grey
    names = [" ".join(run.path.name for run in g.runs) for g in make_groups(*folders)]
    assert names == ["0 1 2 3", "4", "5", "6", "7 8", "9 10", "11 12", "13"]


def test_only_plain_fedavg_on_the_same_machine_is_a_baseline(tmp_path):
    lines = [
        PLAIN.replace("avg", "prox"),
        f"{PLAIN} --server avgm",
        f"{PLAIN} --server adam",
        PLAIN,
    ]
    folders = [make_run(tmp_path / str(i), line) for i, line in enumerate(lines)]
    prox, *others, plain = make_groups(*folders)
    assert baseline(prox, [prox, *others]) is None
    assert baseline(prox, [prox, *others, plain]) is plain and comparable(prox, plain)
    for key, value in ("workers", 2), ("device", "H"), ("precision", "bf16"):
        other = read_run(folders[-1])
        (other.config if key in other.config else other.flags)[key] = value
        assert not comparable(prox, Group([other], []))


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
    """The same seed twice is one run; cut runs do not enter a mean."""
    longer = "fedavg.py --dataset glyphs --rounds 9"
    runs = {
        "a0": (PLAIN, 0, (10, 20, 30, 40)),
        "a1": (PLAIN, 1, (10, 20, 30, 50)),
        "a2": (f"{PLAIN} --workers 2", 2, (1, 2)),
        "again": (PLAIN, 0, (10, 20, 30, 40)),
        "empty": (PLAIN, 3, ()),
        "other": (f"{PLAIN} --lr 0.02", 0, (10, 20, 30, 40)),
        "cut0": (longer, 0, (1, 2, 3)),
        "cut1": (longer, 1, (3, 4)),
    }
    warnings, records = [], [read_run(make_run(tmp_path / k, *own)) for k, own in runs.items()]
    groups = group_runs(records, warnings.append)
    assert [group.count() for group in groups] == ["2 + 1 at 2/4", "1", "2 at 2/9"]
    first, _, cut = groups
    assert [run.path.name for run in first.runs] == ["a0", "a1"]
    assert means(first)["last"] == Mean(45, pytest.approx(50**0.5), 2)
    assert means(cut)["last"].mean == 3  # round 2 of both: 2 and 4
    assert "again" in warnings[0] and "a0" in warnings[0] and "empty" in warnings[1]


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
    folders = [make_run(tmp_path / str(i), seed=int(i == 1)) for i in range(5)]
    for folder, code in zip(folders, codes):
        write_config(folder, code=code)
    code, out, err = run_compare(capsys, *folders)
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith("FedAvg ")]
    assert (code, err) == (0, "") and rows == [
        ["FedAvg", "aggregate=average", "#22222222"],
        ["FedAvg", "aggregate=median", "#33333333"],
        ["FedAvg", "aggregate=median", "#44444444"],
        ["FedAvg", "aggregate=none", "local_update=none"],
    ]
    _, out, _ = run_compare(capsys, *folders[:3])
    assert re.search("average #22222222 +2 ", out) and re.search("median #33333333 +1 ", out)
    labels = [label for _, (_, label, _) in lines_over(make_groups(*folders[:3]), None, "lr")]
    assert labels == [f"FedAvg, aggregate={a}" for a in ("average #22222222", "median #33333333")]


def test_a_part_that_a_flag_brings_is_told_by_the_flag(tmp_path, capsys):
    """Where the flags are the same it is another method."""
    folders = []
    for i, more in enumerate(("--lr 1", "", "")):
        code = AVERAGE | ({"after_round": "synchronise 55555555"} if i == 1 else {})
        folders.append(write_config(make_run(tmp_path / str(i), f"{PLAIN} {more}"), code=code))
    _, out, err = run_compare(capsys, *folders[:2])
    assert "after_round" not in out and err == ""
    _, out, _ = run_compare(capsys, *folders)
    assert "after_round=synchronise #55555555" in out and "after_round=none" in out


DAMAGE = [  # a file, a text in it, what stands there instead (None: no file), and what is said
    ("config.json", "", None, "no run, since it has no config.json"),
    ("config.json", '"seed": 0', '"seed": 1', "config.json is damaged"),
    ("metrics.jsonl", '{"round": 1', "{}\n", "it should be the row of round 1"),
    ("metrics.jsonl", '{"round": 1', "\xff\n", "line 1 is damaged, or of another run"),
    ("metrics.jsonl", '"test_acc": 20', '"test_acc": NaN', "line 2 is damaged"),
]


@pytest.mark.parametrize("name, old, new, message", DAMAGE)
def test_a_damaged_folder_gets_one_line(tmp_path, capsys, name, old, new, message):
    """and the others are shown, a line that is being written does not count; exit code 2."""
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    with open(good / "metrics.jsonl", "a") as f:
        f.write('{"round": 5, "test_a')
    text = (bad / name).read_text()
    assert old in text
    (bad / name).unlink()
    if new is not None:
        (bad / name).write_text(text.replace(old, new, 1), encoding="latin-1")
    code, out, err = run_compare(capsys, bad, good)
    assert code == 2 and message in err and err.count("\n") == 1 and str(bad) in err
    assert "FedAvg" in out
    assert is_refused(run_compare(capsys, bad), message)
