"""The command reproduce benchmark: its table by hand, its pages, and all of it on glyphs."""

import functools
import re

import numpy as np
import pytest
from makers import CELLS, ROOT, is_refused, make_run, read_rows
from makers import run_reproduce, tables_in
from runs import config_of, write_config

from reproduce import benchmark
from reproduce.cells import read_published
from reproduce.runs import read_run

CELL = {(c.setting, c.method): c for c in CELLS["NIID-Bench", "CIFAR-10"]}


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """The project's README.md and a page with the marks, as files of the test; the latter."""
    page = tmp_path / "benchmark.md"
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    page.write_text("before\n{}old\n{}after\n".format(*benchmark.MARKS))
    for name, place in ("README", "README.md"), ("PAGE", page), ("PICTURE", "benchmark.svg"):
        monkeypatch.setattr(benchmark, name, tmp_path / place)
    monkeypatch.setattr(benchmark, "KEPT", tmp_path / "kept" / "benchmark")
    return page


def make(root, method, k, accuracies, name=None, setting="alpha=0.5", before=1.0, **more):
    """Make a run of a cell on partition k: 46 rounds at an accuracy before those given."""
    command = f"{CELL[setting, method].command} --data-seed {k}"
    folder = root / "benchmark" / f"{name or method.lower()}-ds{k}"
    return make_run(folder, command, accuracies=[before] * 46 + [*accuracies], **more)


def test_the_table_by_hand(tmp_path, capsys, pages):
    """Differences are of runs on one partition; what is not finished counts after round 10."""
    runs = tmp_path / "runs"
    make(runs, "FedAvg", 0, (10, 20, 30, 40), client_acc_worst=8.0)
    make(runs, "FedAvg", 1, (10, 20, 30, 50), before=2.0, client_acc_worst=9.0)
    more = {"before": 3.0, "bytes_up": 10200}  # + 12750 down, over 25500
    make(runs, "SCAFFOLD", 0, (10, 41, 42, 46), seconds={"train": 0.5}, **more)
    other = make(runs, "SCAFFOLD", 1, (10, 20, 30, 48), seconds={"train": 99.0}, **more)
    write_config(other, device="NVIDIA H200")  # whose seconds do not compare
    make(runs, "FedNova", 2, (10, 20, 30, 44))  # where FedAvg has not been
    slower = make(runs, "FedProx", 0, (10, 20, 30), before=4.0)
    write_config(slower, versions={"instructions": "AVX2"})
    assert run_reproduce(capsys, "benchmark", "--publish", "--runs", runs)[:2] == (0, "")
    early, last = pages.read_text().partition("Two labels")[0].split("the last round:")
    head = "method | accuracy | over FedAvg | worst client | s | MB | rounds to |"
    own = "45.00 +- 7.07 (2) | - | 8.50 +- 0.71 (2) | 1.00x | 1.00x | 50 +- 0 | 68.2"
    other = "47.00 +- 1.41 (2) | +2.00 +- 5.66 (2) | - | 0.50x | 0.90x | 50+ (1 of 2: 48) | 69.8"
    for line in (
        f"{head} published |",
        f"FedAvg | {own} |",
        f"SCAFFOLD | {other} |",
        "FedNova | 44.00 (1) | - | - | - | - | - | 66.8 |",
    ):
        assert f"\n| {line}\n" in last
    assert "\nNo finished run: FedProx, FedAlign, FedCKA," in last
    for line in (
        f"{head}\n",
        "FedAvg | 1.50 +- 0.71 (2) | - | 8.50",
        "SCAFFOLD | 3.00 +- 0.00 (2) | +1.50 +- 0.71 (2) | - | 0.50x | 2.35x | 1 +- 0 |\n",
        "FedProx | 4.00 (1) | +3.00 (1) | - | - | 1.00x | 1 |\n",
    ):
        assert f"\n| {line}" in early


def test_pages_and_results(tmp_path, capsys, pages):
    """Runs are kept without their place, and the pages are made of those."""
    pytest.importorskip("matplotlib")
    runs = tmp_path / "runs"
    for k in (0, 1):
        make(runs, "FedAvg", k, (10, 20, 30, 40))
        make(runs, "MOON", k, (10, 20, 30, 41 + k), before=2.0)
    make(runs, "FedAvg", 0, (1, 2, 3, 4), "labels2-fedavg", "labels=2")
    make_run(
        runs / "benchmark" / "mixup-ds0", CELL["alpha=0.5", "Mixup"].command, accuracies=[9] * 9
    )
    with (runs / "benchmark" / "moon-ds1" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 51')  # which is being written
    run_reproduce(capsys, "benchmark", "--publish", "--runs", runs)
    kept = tmp_path / "kept" / "benchmark" / "moon-ds1"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "metrics.jsonl"]
    assert config_of(kept)["flags"]["out"] == "results/benchmark/moon-ds1"
    assert len(read_rows(kept)) == 50 and not (kept.parent / "mixup-ds0").exists()
    text = pages.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert sorted(drawn) == ["benchmark-early.svg", "benchmark.svg"]
    assert "| MOON | 41.50 +- 0.71 (2) | +1.50 +- 0.71 (2) |" in text
    readme = (tmp_path / "README.md").read_text()
    row = r"^\| \[`(\w+)\.py`\].* \| (.*) \| .* \| .* \|$"
    shown = re.findall(row, readme, re.M)
    accuracies = {name: text for name, text in shown if not text.startswith(("-", "own"))}
    assert accuracies == {"moon": "+1.00 +- 0.00 (2)", "fedavg": "1.00 +- 0.00 (2)"}  # of round 10
    assert re.search(r"Two labels a client, after the last .*(\n.*){3}\n\| FedAvg \| 4\.00 ", text)
    (kept / "metrics.jsonl").write_text("")  # a kill amid an earlier --publish
    run_reproduce(capsys, "benchmark", "--publish", "--runs", runs)
    run_reproduce(capsys, "benchmark", "--publish", "--runs", tmp_path / "kept")
    assert pages.read_text() == text
    assert drawn == {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}


def test_curves_are_of_shared_partitions_in_their_colours(tmp_path):
    """Of those of all methods, or of the one that most have: then without the other methods."""
    plt = pytest.importorskip("matplotlib.pyplot")
    folders = {
        "FedAvg": [make(tmp_path, "FedAvg", k, (1, 2), before=10.0 * k) for k in (0, 1)],
        "MOON": [make(tmp_path, "MOON", 1, (1, 2), before=5.0)],
    }

    def drawn():
        runs = {k: [read_run(f) for f in own] for k, own in folders.items()}
        ax = plt.figure().gca()
        benchmark.draw_accuracies(ax, runs, {"MOON": "red"})  # its colour in the panel above
        return [(line.get_ydata()[0], line.get_color()) for line in ax.lines]

    assert drawn() == [(10.0, "#d55e00"), (5.0, "red")]
    folders["FedGKD"] = [make(tmp_path, "FedGKD", 0, (1, 2), before=7.0)]
    folders["FedNova"] = [make(tmp_path, "FedNova", 0, (1, 2), before=8.0)]
    assert [mean for mean, _ in drawn()] == [0.0, 7.0, 8.0]
    plt.close("all")


def test_curves_are_of_the_methods_with_the_most_partitions(tmp_path):
    """Best first; a method of fewer would leave one partition to all of them."""
    plt = pytest.importorskip("matplotlib.pyplot")
    gains = {"FedAvg": (0, 0), "MOON": (1, 1), "FedNova": (2, 3), "FedDyn": (9,)}
    found = {}
    for method, each in gains.items():
        folders = [make(tmp_path, method, k, (1, 2)) for k in range(len(each))]
        found[method] = [read_run(f) for f in folders], [{"over FedAvg": gain} for gain in each]
    figure = benchmark.draw_settings(plt, {"after round 10": found})
    drawn = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert drawn == ["FedAvg", "FedNova", "MOON"]
    assert [text.get_text() for text in figure.axes[1].get_yticklabels()][-1] == "FedDyn (1)"
    plt.close("all")


def test_runs_of_other_flags_are_not_published(tmp_path, capsys, pages):
    """Nor is anything written to a page without its marks."""
    folder = make(tmp_path, "MOON", 0, (1, 2, 3, 4))
    write_config(folder, flags=config_of(folder)["flags"] | {"lr": 0.5})
    argv = ["benchmark", "--publish", "--runs", tmp_path]
    assert is_refused(run_reproduce(capsys, *argv), "another --lr (0.5, now 0.01)", "moon-ds0")
    assert is_refused(run_reproduce(capsys, *argv, "--quick"), "argument --publish")
    pages.write_text("old")
    argv[-1] = tmp_path / "none"
    assert is_refused(run_reproduce(capsys, *argv), f"{pages} has no line <!-- benchmark --> and")
    assert pages.read_text() == "old"


def test_the_page_is_of_the_results_kept(tmp_path, capsys, pages, monkeypatch):
    """docs/benchmark.md is what --publish makes of results/benchmark/, with every method."""
    pytest.importorskip("matplotlib")
    text = (ROOT / "docs" / "benchmark.md").read_text()
    pages.write_text(text)
    monkeypatch.setattr(benchmark, "KEPT", ROOT / "results" / "benchmark")
    assert run_reproduce(capsys, "benchmark", "--publish", "--runs", tmp_path / "none")[0] == 0
    assert pages.read_text() == text
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    assert all(re.search(f"(\\n\\|| run:|,) {re.escape(method)}[ ,.]", text) for _, method in CELL)


def test_the_command_on_glyphs(tmp_path, capsys, started):
    """Runs, a table of their numbers and a picture; given again it runs nothing."""
    pytest.importorskip("matplotlib")
    flags = "--dataset glyphs --rounds 2 --local-steps 2 --clients 2 --labels 62 --data-seeds 2"
    argv = ["benchmark", *flags.split(), "--only", "fedavg,FedNova", "--runs", tmp_path]
    code, out, _ = run_reproduce(capsys, *argv)
    assert code == 0 and "8 of 8 runs finished" in out and len(started) == 8
    root = tmp_path / "benchmark-glyphs-clients2-labels62-local-steps2"
    assert (root / "picture.png").exists()
    assert "10:\n\nmethod" not in out  # no run has ten rounds
    assert "68.2" not in out  # published of another data set
    assert re.search(r"\nFedNova +9\.00 \+- 0\.00 \(2\) ", out)
    flags = config_of(root / "labels2-fedavg-ds1")["flags"]
    assert (flags["partition"], flags["data_seed"], flags["seed"]) == ("labels", 1, 0)
    assert run_reproduce(capsys, *argv)[0] == 0 and len(started) == 8


def test_quick(tmp_path, capsys):
    argv = ["benchmark", "--quick", "--only", "moon", "--dry-run", "--runs", tmp_path]
    (line,) = run_reproduce(capsys, *argv)[1].splitlines()
    assert "--rounds 5 --epochs 1" in line and line.endswith("benchmark-epochs1/moon-ds0")


def accuracies(name, column="test_acc"):
    return np.array([row[column] for row in read_rows(ROOT / "results" / name)])


def fedavg_beside(name):
    if name.startswith("benchmark-niid/"):
        return "benchmark-niid/fedavg"
    if "/validation-" in name:
        xeon = "Xeon" in config_of(ROOT / "results" / name)["device"]
        return f"benchmark-weights/validation-fedavg{'-xeon' * xeon}"
    return f"benchmark/{'labels2-' * ('labels2-' in name)}fedavg-{name[-3:]}"


def tables_of_runs():
    """Yield the rows of the pages' tables whose last column names a run, {heading: cell}."""
    for page in "benchmark.md", "benchmark-why.md":
        text = (ROOT / "docs" / page).read_text().replace("−", "-")
        for heads, _, *rows in tables_in(text):
            if heads[-1] == "runs":
                yield from (dict(zip(heads, cells, strict=True)) for cells in rows)


@pytest.mark.parametrize("row", list(tables_of_runs()), ids=lambda row: row["runs"].strip("`"))
def test_a_number_of_the_pages_is_its_run_s(row):
    """A column's rounds are in its heading; it is over FedAvg's run unless that says "here"."""
    name, checked = row["runs"].strip("`"), 0
    for head, cell in row.items():
        rounds = re.search(r"(\d+)(?:(?: to |, )(\d+))?$", head)
        if not rounds or not cell:
            continue
        first, last = int(rounds[1]), int(rounds[2] or rounds[1])
        column = "val_acc" if "held out" in head else "test_acc"
        over = accuracies(name, column)[first - 1 : last]
        if "here" not in head:
            over = over - accuracies(fedavg_beside(name), column)[first - 1 : last]
        assert len(over) == last - first + 1
        check_numbers(cell, [over.mean()])
        checked += 1
    assert checked > 1


def runs_elsewhere():
    kept = (ROOT / "results/benchmark-weights").iterdir()
    return sorted(run.name for run in kept if re.match(r"avx|h200", run.name))


@pytest.mark.parametrize("run", runs_elsewhere())
def test_another_processor_s_numbers_are_its_runs(run):
    text = (ROOT / "docs/benchmark-why.md").read_text()
    (cells,) = (row for table in tables_in(text) for row in table if f"/{run}`" in row[-1])
    own = accuracies(f"benchmark-weights/{run}")
    difference = own - accuracies(f"benchmark/{run.partition('-')[2]}")[: len(own)]
    assert cells[2] == str(len(own)) and difference[0]
    check_numbers(cells[3], [abs(difference).max()])
    if cells[4]:
        check_numbers(cells[4], [abs(np.convolve(difference, np.full(5, 0.2), "valid")).max()])


def over_fedavg(own, first, last, column="test_acc", k="012"):
    """Return the points over FedAvg, mean of rounds first to last, of each kept run that has them.

    own: a run's name but for its partition, which is one of k."""
    paths = sorted((ROOT / "results").glob(f"benchmark*/{own}-ds[{k}]"))
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    pairs = [(accuracies(name, column), accuracies(fedavg_beside(name), column)) for name in names]
    long = [pair for pair in pairs if min(map(len, pair)) >= last]
    return np.array([np.subtract(*(each[first - 1 : last] for each in p)).mean() for p in long])


deviation = functools.partial(np.std, ddof=1)
ADVISED = "SCAFFOLD", "FedAvgM", "FedLS-NTD", "FedNova", "FedDyn", "FedProx"


@pytest.mark.parametrize("method", ADVISED)
def test_the_readme_s_advice_is_of_the_runs(method):
    """Of all kept runs that are long enough; FedDyn's are those with the alpha beside them."""
    text = (ROOT / "README.md").read_text().replace("−", "-").partition("## The methods")[0]
    cells = re.search(rf"^\| {method}\b.*", text, re.M)[0].split("|")[2:5]
    own = "feddyn-alpha0.01" if method == "FedDyn" else method.lower()
    asked = (own, 10, 10), (own, 46, 50), ("labels2-" + own, 46, 50)
    for cell, over in zip(cells, (over_fedavg(*each) for each in asked), strict=True):
        check_mean(cell, over)
    for cell, last in zip(cells, (10, 50)):
        round_, rounds = over_fedavg(own, last, last), over_fedavg(own, last - 4, last)
        ahead = round_.size == 3 and verdict(round_, rounds) == "ahead"
        assert ("**" in cell) == ahead


def verdict(last, rounds):
    """Return what the page's rule says of differences after a round and in the five up to it."""
    far = [each.mean() / deviation(each) for each in (last, rounds)]
    if max(map(abs, far)) <= 1:
        return "level"
    if far[0] > 2:
        return "ahead" if far[1] > 2 else "ahead in round 10 alone"
    return "behind" if max(far) < -2 else ""


def check_numbers(text, exact):
    """Fail unless a text has these numbers, rounded as it writes them."""
    for shown, value in zip(re.findall(r"-?\d+\.\d+", text), exact, strict=True):
        assert abs(float(shown) - value) < 0.5001 * 10 ** -len(shown.partition(".")[2])


def check_mean(text, over):
    """Fail unless a text has their mean, deviation and number; none where they are empty."""
    check_numbers(text, [f(over) for f in (np.mean, deviation)[: over.size]])
    assert re.findall(r"\((\d)\)", text) == [str(over.size)] * bool(over.size)


def test_which_methods_gain():
    """Each row's differences, of n partitions or of partition 0, and the verdict of ten rounds."""
    rows = tables_of_section("Which methods gain?")[0][2:]
    assert len(rows) > 12
    for names, cell, each_one, ends, _ in rows:
        own = names.replace(", `--dyn-alpha 0.01`", "-alpha0.01").lower().split(", ")
        over = [over_fedavg(name, 10, 10) for name in own]
        asked = [each.mean() for each in over]
        if "±" in cell:
            asked.append(deviation(over[0]))
            said = verdict(over[0], over_fedavg(*own, 6, 10))
            assert cell.endswith(f"({over[0].size})" + f": {said}" * bool(said))
        else:
            assert {each.size for each in over} == {1}
        if " to " in cell:
            asked = max(asked), min(asked)
        check_numbers(cell, asked)
        check_numbers(each_one, over[0] if "±" in cell else [])
        found = [(k, v) for name in own for k in "012" for v in over_fedavg(name, 46, 50, k=k)]
        check_numbers(ends, [value for _, value in found])
        assert re.findall(r"on (\d)", ends) == [k for k, _ in found if len(found) < 3]


def tables_of_section(title):
    page = (ROOT / "docs/benchmark.md").read_text().replace("−", "-")
    section = page.partition(f"### {title}\n")[2].partition("\n#")[0]
    return tables_in(section)


def test_the_published_numbers_and_ours():
    """Every run of 50 rounds beside its number, and how far means of three are below theirs."""
    (_, *rows), below, _ = tables_of_section("Which published numbers are met?")
    assert len(rows) == 1 + 8 and len(below[0]) == 1 + 4
    for name, number, *cells in rows[1:]:
        method, _, labels = name.partition(", ")
        cell = CELL["labels=2" if labels else "alpha=0.5", method]
        assert read_published()[cell.key]["acc"][0] == number
        own = "labels2-" * bool(labels) + method.lower()
        runs = [f"benchmark-niid/{own}", *(f"benchmark/{own}-ds{k}" for k in (0, 1, 2))]
        for shown, run in zip(cells, runs, strict=True):
            there = (ROOT / "results" / run).exists() and len(accuracies(run)) == 50
            check_numbers(shown, [accuracies(run)[45:].mean()] if there else [])
    for method, _, *shown in [*zip(*below)][1:]:
        names = (f"benchmark/{method}-ds{k}".lower() for k in range(3))
        last = np.array([accuracies(name)[49] for name in names])
        number = float(read_published()[CELL["alpha=0.5", method].key]["acc"][0])
        check_numbers(" ".join(shown), [number - last.mean(), deviation(last)])


def test_the_points_at_equal_cost_are_of_the_runs():
    """FedAvg's accuracy after cost * r rounds, interpolated, taken from the method's after r."""
    (_, *heads), _, *rows = tables_of_section("At equal cost")[0]
    runs = [f"benchmark/{{}}-ds{k}" for k in (0, 1, 2)] + ["benchmark-niid/{}"]
    assert len(heads) == 2 + len(runs) and len(rows) == 5
    for method, cost, rounds, *cells in rows:
        first, last = map(int, rounds.split(" to "))
        r = np.arange(first, last + 1)
        for cell, run in zip(cells, runs, strict=True):
            if cell:
                own, fedavg = (accuracies(run.format(name)) for name in (method.lower(), "fedavg"))
                assert float(cost) * last <= len(fedavg)
                beside = np.interp(float(cost) * r, np.arange(1, len(fedavg) + 1), fedavg)
                assert abs((own[r - 1] - beside).mean() - float(cell)) < 0.0501


def test_the_accuracies_of_own_networks_are_of_the_runs():
    """docs/personal.md: mean and worst of the clients after round 10; README: over FedAvg's."""
    page = (ROOT / "docs" / "personal.md").read_text()
    rows = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \| `(.*)` \|$", page, re.M)
    assert len(rows) == 4 and rows[0][2] == "benchmark/fedavg-ds0"
    readme = (ROOT / "README.md").read_text()
    for mean, worst, run in rows:
        name = "client_acc" if run == rows[0][2] else "personal_acc"
        shown = [accuracies(run, f"{name}_{each}")[9] for each in ("mean", "worst")]
        assert [mean, worst] == [f"{value:.2f}" for value in shown]
        over = shown[0] - accuracies(rows[0][2], "client_acc_mean")[9]
        script = run.partition("/")[2].removesuffix("-ds0")
        told = re.search(rf"^\| \[`{script}.py`\].*\| own: \+([\d.]+) \(1\) \|", readme, re.M)
        assert (told is None) == (script in ("fedavg", "fedavg-local"))
        assert told is None or abs(float(told[1]) - over) < 0.006


def test_the_worst_clients_are_of_the_runs():
    rows = tables_of_section("The worst client")[0][2:]
    assert len(rows) == 7
    for method, *cells in rows:
        own = method.replace(", `--dyn-alpha 0.01`", "-alpha0.01").lower()
        own = f"labels2-{own[:8]}" if "two labels" in own else own
        for cell, window in zip(cells, ((6, 10), (46, 50)), strict=True):
            over = over_fedavg(own, *window, "client_acc_worst")
            check_mean(cell, over)
