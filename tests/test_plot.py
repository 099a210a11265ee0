"""Pictures of runs: curves and lines by hand, and the files that --plot writes."""

import re
import sys

import pytest
from makers import PLAIN, is_refused, make_groups, make_run, run_compare

from reproduce.figures import curve
from reproduce.plot import lines_over


def test_curves_by_hand(tmp_path):
    """Mean and deviation over seeds at evaluated rounds, 1, 3, 6, 10 seconds and kB in all."""
    a = make_run(tmp_path / "a", accuracies=(10, None, 30, 40))
    b = make_run(tmp_path / "b", seed=1, accuracies=(20, None, 30, 60))
    (group,) = make_groups(a, b)
    points = curve(group, "rounds", "test_acc")
    assert [(at, mean.mean) for at, mean in points] == [(1, 15), (3, 30), (4, 50)]
    assert [mean.std for _, mean in points] == [pytest.approx(50**0.5), 0, pytest.approx(200**0.5)]
    assert [at for at, _ in curve(group, "seconds", "test_acc")] == [1, 6, 10]
    assert [1e6 * at for at, _ in curve(group, "bytes", "test_acc")] == pytest.approx([1, 6, 10])
    (single,) = make_groups(a)
    assert {mean.std for _, mean in curve(single, "rounds", "acc_ema")} == {None}


def test_matplotlib_may_be_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run_compare(capsys, make_run(tmp_path / "a"), "--plot", tmp_path / "x.png")
    assert is_refused(result, "need matplotlib")


@pytest.fixture
def drawn(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: figures.append(figure) or close(figure))
    return figures


@pytest.mark.parametrize("name, start", [("x.png", b"\x89PNG"), ("x.pdf", b"%PDF")])
def test_pictures(tmp_path, capsys, drawn, name, start):
    """Of what a method reports, too; accuracy has a band of its deviation, sqrt 2."""
    line = f"{PLAIN} --rounds 1"
    runs = [make_run(tmp_path / str(s), line, s, (10 + 2 * s,), x_y=0.5) for s in (0, 1)]
    flags = ["--x", "bytes", "--y", "accuracy,test_loss,x_y"]
    assert run_compare(capsys, *runs, "--plot", tmp_path / name, *flags)[0] == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [ax.get_ylabel() for ax in drawn[0].axes] == ["test accuracy (%)", "test loss", "x y"]
    band = drawn[0].axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((11 - 2**0.5, 11 + 2**0.5))


def groups_of(folder, *commands):
    """Return Groups of two finished runs each, whose last accuracies are 10, 14; 20, 24; ..."""
    runs = []
    for i, command in enumerate(commands, 1):
        for seed in (0, 1):
            path = folder / f"{i}-{seed}"
            runs.append(make_run(path, f"{command} --rounds 1", seed, [10 * i + 4 * seed]))
    return make_groups(*runs)


PROX = "fedprox.py --dataset glyphs --epochs"
# x and commands; then each line of the picture, in order of x, its points with their command's
# number: a level without the flag, a line for each value of others, one of those left alone
LINES = f"""
mu | fedprox.py --mu 1 | fedavg.py | fedprox.py --mu 0.01
    FedProx: 0.01=3 1.0=1
    FedAvg: None=2
mu | {PROX} 1 --mu 1 | {PROX} 1 --mu 1 --lr 1 | {PROX} 1 --mu 2 | {PROX} 1 --mu 2 --lr 1
    FedProx, lr 0.01: 1.0=1 2.0=3
    FedProx, lr 1.0: 1.0=2 2.0=4
epochs | {PROX} 5 | {PROX} 1 | {PROX} 2 --batch-size 8 | {PROX} 4 --batch-size 4 | {PROX} 3 --lr 0.5
    FedProx, batch_size 64, lr 0.01: 1=2 5=1
    FedProx, batch_size 8 4, lr 0.01: 2=3 4=4
    FedProx, batch_size 64, lr 0.5: 3=5
pathways | fedmlb.py --pathways 2,3 | fedmlb.py --pathways 1 | fedmlb.py --pathways 1,2,3
    FedMLB: 1=2 2,3=1 1,2,3=3
s/round | {PROX} 5 | {PROX} 1 | {PROX} 2 --clients 8
    FedProx, clients 16: 1.0=1 1.0=2
    FedProx, clients 8: 1.0=3
"""


@pytest.mark.parametrize("text", re.split(r"\n(?! )", LINES.strip()))
def test_lines_against_a_flag_by_hand(tmp_path, text):
    (x, *commands), *expected = (line.split(" | ") for line in text.split("\n    "))
    groups, found = groups_of(tmp_path, *commands), []
    for _, (_, label, points) in lines_over(groups, None, x):
        numbered = (f"{value}={groups.index(group) + 1}" for value, group in points)
        found.append([f"{label}: {' '.join(numbered)}"])
    assert found == expected


def test_seconds_of_other_machines_are_a_line_of_their_own(tmp_path):
    groups = groups_of(tmp_path, f"{PROX} 5", f"{PROX} 1")
    for run in groups[1].runs:
        run.config["device"] = "H200"
    labels = [label for _, (_, label, _) in lines_over(groups, None, "s/round")]
    assert labels == ["FedProx, x86_64, 2 cores", "FedProx, H200"]


def draw_over(capsys, folder, x, *commands):
    groups = groups_of(folder, *commands)
    runs = [run.path for group in groups for run in group.runs]
    assert run_compare(capsys, *runs, "--plot", folder / "x.png", f"--x=--{x}")[0] == 0


def test_pictures_against_a_flag(tmp_path, capsys, drawn):
    commands = "rfedavg.py --lam 0.1", "rfedavg.py --lam 1e-5", "fedavg.py"
    draw_over(capsys, tmp_path, "lam", *commands)
    (ax,) = drawn[0].axes
    (points,) = ax.containers
    assert points.lines[0].get_xydata().tolist() == [[1e-5, 22], [0.1, 12]]
    bar = points.lines[2][0].get_segments()[1][:, 1].tolist()
    assert bar == pytest.approx([12 - 8**0.5, 12 + 8**0.5])
    (level,) = (line for line in ax.get_lines() if line.get_label() == "FedAvg")
    assert list(level.get_ydata()) == [32, 32]
    assert ax.get_xscale() == "log"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("--lam", "test accuracy (%)")


@pytest.mark.parametrize("flag, label", [("pathways", "1,2"), ("local-steps", "3")])
def test_words_on_the_axis(tmp_path, capsys, drawn, flag, label):
    """Of which a missing one is a value too, beside numbers as well."""
    draw_over(capsys, tmp_path, flag, f"fedmlb.py --{flag} {label}", "fedmlb.py")
    ax = drawn[-1].axes[0]
    assert [text.get_text() for text in ax.get_xticklabels()] == [label, "default"]
    points = [bars.lines[0].get_xydata().tolist() for bars in ax.containers]
    assert sum(points, []) == [[0, 12], [1, 22]]


CUT = "1 of {} rows are of runs that were cut, and are not drawn"
UNDRAWN = [  # runs, flags, what is said, and the exit code, or whether there is a picture
    ("level", "--x layers", "argument --x: layers is no flag that decides these runs", 2),
    ("level", "--x workers", "argument --x: workers is no flag", 2),
    ("level", "--x split-file", "argument --x: split_file is no flag", 2),  # of which none has one
    ("level", "--y stap", "'stap' is none of accuracy, ema, worst, acc_ema, acc_last5_mean", 2),
    ("cut whole", "--x mu --y accuracy", CUT.format(2), True),
    ("cut", "--x mu --y accuracy", CUT.format(1), False),
    ("cut level", "--x mu", CUT.format(2), True),  # all with the flag were cut
    ("cut level", "--x mu --y worst", "worst: not measured in these runs", False),
    ("cut level", "--x mu --y worst,ema", "worst: not measured in these runs", True),
]


@pytest.mark.parametrize("names, flags, message, drawn", UNDRAWN)
def test_what_is_not_drawn(tmp_path, capsys, names, flags, message, drawn):
    """Runs that were cut are no points, nor is what was not measured."""
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "cut", "fedprox.py --mu 1 --rounds 4", accuracies=[1.0, 2.0])
    make_run(tmp_path / "whole", "fedprox.py --mu 2 --rounds 4")
    make_run(tmp_path / "level", PLAIN)
    runs, picture = [tmp_path / name for name in names.split()], tmp_path / "x.png"
    code, _, err = run_compare(capsys, *runs, *flags.split(), "--plot", picture)
    assert code == (2 if drawn == 2 else 0) and message in err
    assert picture.exists() == (drawn is True)
