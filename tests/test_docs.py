"""README.md and docs/: commands parse and run, Python blocks run, links, tables and names hold."""

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import json
import pathlib
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import typing
import unittest.mock

import pytest
import torch
import torch.nn as nn
from conftest import args_of
from makers import read_rows, run_child_here, tables_in
from methods import METHODS, ROOT, SCRIPTS, needed

import common
import extras.glyphs
import moon
import reproduce.jobs
import scaffold
from reproduce.cells import read_published

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


class Block(typing.NamedTuple):
    """A fenced block of a page. mark: the comment before it; language: sh, python, diff."""

    page: pathlib.Path
    line: int
    mark: str
    language: str
    text: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks_of(page):
    text, blocks = page.read_text(), []
    for m in re.finditer(r"(?:^<!-- (.*?) -->\n)?^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        line = text[: m.start(2)].count("\n") + 1
        blocks.append(Block(page, line, m[1] or "", m[2], m[3]))
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.mark != "not run"]


def commands(block):
    """Return the words of each command of a sh block that starts with python, without `python`."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.partition(" | ")[0]) for line in lines]
    return [w[1:] for w in words if w[:1] == ["python"] and w[1:3] != ["-m", "pytest"]]


# numbers that a shorter run prints too
SAME = r"(?:lr|momentum|decay|clip|alpha|clients|sample|batch_size) [\d.]+|[\d,]+ parameters"


def without_numbers(line):
    """Return a printed line without what another machine, commit or length of the run changes."""
    line = re.sub(r"on \w+, workers: .*|torch \S+, commit \S+", "", line)
    line = re.sub(r"  \S.*, \d+ cores$", "", line)  # a table's last column
    return " ".join(re.sub(rf"({SAME})|\d[\d.,]*", lambda m: m[1] or "#", line).split())


def check_output(block, printed):
    """Fail unless each line of the output that the page shows after a block is printed."""
    after = block.page.read_text().partition(f"{block.text}```\n")[2]
    shown = re.match(r"\n```\n(.*?)^```$", after, re.M | re.S)
    found = [without_numbers(line) for line in printed.splitlines()]
    for line in shown[1].splitlines() if shown else ():
        pattern = re.escape(without_numbers(line)).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, other) for other in found), (line, printed)


def applied(diff, source):
    """Return source with a unified diff applied; AssertionError where it does not fit."""
    for start, hunk in reversed(re.findall(r"^@@ -(\d+).*\n((?:[ +-].*\n)*)", diff, re.M)):
        lines, at, hunk = source.splitlines(keepends=True), int(start) - 1, hunk.splitlines(True)
        old, new = ([line[1:] for line in hunk if line[0] != sign] for sign in "+-")
        assert lines[at : at + len(old)] == old
        source = "".join([*lines[:at], *new, *lines[at + len(old) :]])
    return source


def write_scripts(page, folder):
    """Write the page's scripts into folder: blocks that begin with `# NAME.py`, and diffs."""
    for block in blocks_of(page):
        if block.text.startswith("--- fedavg.py"):
            name = re.search(r"^\+\+\+ (\w+\.py)$", block.text, re.M)[1]
            source = (ROOT / "fedavg.py").read_text()
            (folder / name).write_text(applied(block.text, source))
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named:
            (folder / named[1]).write_text(block.text)


class ParsedError(Exception):
    """Raised once flags are parsed, before any work."""


COMMANDS = [
    pytest.param(block, words, id=f"{block} {' '.join(words[:3])}")
    for block in BLOCKS
    if block.language == "sh"
    for words in commands(block)
]


@pytest.mark.parametrize("block, words", COMMANDS)
def test_command_parses(block, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_scripts(block.page, tmp_path)
    if block.mark == "needs a GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    if words[0] == "-m":
        module, flags = importlib.import_module(words[1]), words[2:]
        if words[1] == "reproduce":  # parses the flags of scripts too
            with pytest.raises(SystemExit) as end:
                importlib.import_module("reproduce.__main__").main([*flags, "--dry-run"])
            assert end.value.code == 0
            return
    else:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        path = next(place / words[0] for place in (tmp_path, ROOT) if (place / words[0]).exists())
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module, flags = importlib.util.module_from_spec(spec), words[1:]
        spec.loader.exec_module(module)
    if hasattr(module, "local_update"):
        flags = [word for word in flags if word != "--resume"]  # which reads a run
        assert args_of(module, *flags).script
        return
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(*args):
        parse(*args)
        raise ParsedError

    def parse_args(parser, *args):
        if unknown := parse(parser, *args)[1]:
            parser.error(f"unrecognized arguments: {unknown}")
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(ParsedError):
        module.main(flags)


def runnable(block):
    """Return the commands of an unmarked sh block that a test can run in seconds."""
    if block.language != "sh" or block.mark:
        return []
    names = {f"{name}.py" for name in METHODS}
    names |= set(re.findall(r"^(?:#|\+\+\+) (\w+\.py)$", block.page.read_text(), re.M))
    modules = [["-m", "analysis.partition"]]
    modules += [["-m", "reproduce"]] if block.page.name == "first-hour.md" else []
    return [words for words in commands(block) if words[0] in names or words[:2] in modules]


RUNNABLE = {tuple(map(tuple, runnable(block))): block for block in BLOCKS if runnable(block)}


@pytest.mark.parametrize("block", RUNNABLE.values(), ids=str)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_commands_run(block, tmp_path, monkeypatch, capsys):
    """The commands of a block, one after the other, with one round and small glyphs."""
    write_scripts(block.page, tmp_path)
    monkeypatch.setattr(reproduce.jobs, "run_child", run_child_here)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    printed = ""
    for words in runnable(block):
        short = ["--rounds", "1", *["--local-steps", "1"] * (words[1] == "reproduce")]
        monkeypatch.setattr(sys, "argv", [*words, *short])
        try:
            if words[0] == "-m":
                del sys.argv[0]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                folder = tmp_path if (tmp_path / words[0]).exists() else ROOT
                runpy.run_path(str(folder / words[0]), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        read = "".join(capsys.readouterr())
        assert read
        printed += read
    check_output(block, printed.replace("local_steps", "epochs"))


def test_the_diff_of_the_first_hour():
    [block] = [b for b in BLOCKS if b.language == "sh" and b.text.startswith("diff ")]
    done = subprocess.run(["bash", "-c", block.text], cwd=ROOT, capture_output=True, text=True)
    assert f"{block.text}```\n\n```\n{done.stdout}```\n" in block.page.read_text()


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("wandb", "torch.utils.tensorboard"):  # need not be installed
        stand_in = unittest.mock.MagicMock(**{"log.return_value": None})
        stand_in.SummaryWriter().add_scalar.return_value = None
        monkeypatch.setitem(sys.modules, name, stand_in)
    source = "\n" * block.line + block.text  # so that errors name the page's lines
    names = {"__name__": "block", "__file__": str(tmp_path / "block.py")}
    exec(compile(source, block.page, "exec"), names)
    check_output(block, "".join(capsys.readouterr()))


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


def anchors(page):
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_hold(page):
    """Relative links, their anchors, and the files in backticks, by their paths from the root."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    links = re.sub(r"`[^`]*`", "", text)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", links):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
    for name in re.findall(r"`(?:python )?([\w/]+\.(?:py|md|csv|txt))[ `]", text):
        assert (ROOT / name).exists(), name


def test_all_pages_are_linked():
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*\.md)\)", README.read_text()))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def code_lines(path):
    source, dropped = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            dropped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = [line for i, line in enumerate(source.splitlines(), 1) if i not in dropped]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def changed_lines(name):
    """Return the code lines of a script that are not fedavg.py's and the other way round."""
    lines = difflib.ndiff(code_lines(ROOT / "fedavg.py"), code_lines(ROOT / f"{name}.py"))
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize("name", METHODS)
def test_help_and_command_of_a_docstring(name, capsys):
    with pytest.raises(SystemExit) as end:
        SCRIPTS[name].main(["--help"])
    printed, doc = capsys.readouterr().out, SCRIPTS[name].__doc__.strip()
    assert end.value.code == 0 and printed.startswith(doc)
    own = re.findall(r"\"(--[\w-]+)\"", (ROOT / f"{name}.py").read_text())
    assert set(re.findall(r"^  (--[\w-]+)", printed, re.M)) >= {"--rounds", *own}
    command = doc.replace("\\\n", " ").splitlines()[-1].split()
    assert command[:2] == ["python", f"{name}.py"]
    assert args_of(SCRIPTS[name], *command[2:]).script == name


def method_rows():
    """Return {script: (lines, paper's address, accuracy, time, bytes)} of README's table."""
    pattern = r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|.*\| (\d+) \| \[[^]]*\]\(([^)]*)\) \| "
    pattern += r"([^|]*) \| ([^|]*) \| ([^|]*) \|$"
    rows = re.findall(pattern, README.read_text(), re.M)
    assert len(rows) == len({name for name, *_ in rows})
    return {name: (int(lines), *cells) for name, lines, *cells in rows}


def test_readme_lines_changed():
    """README's table has them of every method: few, of which at most two are fedavg.py's."""
    lines = {name: row[0] for name, row in method_rows().items()}
    changed = {name: changed_lines(name) for name in METHODS}
    assert lines == {name: len(each) for name, each in changed.items()}
    assert max(lines.values()) <= 50
    assert max(sum(line[0] == "-" for line in each) for each in changed.values()) <= 2
    assert f"each of {len(METHODS)} methods" in README.read_text()


def test_readme_diff_is_the_diff():
    """README's first block is all of what FedProx changes, and its other lines are fedavg.py's."""
    [block] = [block for block in blocks_of(README) if block.language == "diff"]
    lines = block.text.splitlines()
    shown = [line for line in lines if line[0] in "+-"]
    assert shown == [line[0] + line[2:] for line in changed_lines("fedprox")]
    rest = {line[1:] for line in lines if line[0] == " "} - {"..."}
    assert rest <= set(code_lines(ROOT / "fedavg.py"))


def test_papers_are_linked():
    papers = (ROOT / "docs" / "papers.md").read_text()
    for name, (_, address, *_) in method_rows().items():
        assert address in SCRIPTS[name].__doc__ and address in papers, name


def test_readme_bytes(monkeypatch):
    """Of a third round in which all clients take part, over a model down and a model up."""
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (200, 20))
    words = (
        "--dataset glyphs --model cnn --clients 2 --local-steps 1 --batch-size 8 --plain --quiet"
    )
    for name, (*_, shown) in method_rows().items():
        net, rows = SCRIPTS[name].main([*words.split(), *needed(name), "--rounds", "3"])
        model = common.nbytes(net.state_dict()) * len(rows[2]["clients"])
        found = (rows[2]["bytes_down"] + rows[2]["bytes_up"]) / (2 * model)
        assert found == pytest.approx(float(shown), abs=0.01), name


def measured_numbers(pattern):
    """Return what docs/results.md may print of runs in results/: last, best, last five."""
    runs = [read_rows(folder) for folder in (ROOT / "results").glob(pattern)]
    lasts = [rows[-1]["test_acc"] for rows in runs]
    if len(runs) > 1:
        return {f"{statistics.mean(lasts):.2f} ± {statistics.stdev(lasts):.2f}"}
    [last] = [rows[-1] for rows in runs]
    five = f"{last['acc_last5_mean']:.2f} ± {last['acc_last5_std']:.2f}"
    stopped = f"NaN in round {last['round'] + 1}"
    return {f"{last['test_acc']:.2f}", f"{last['best_acc']:.2f}", five, stopped}


def test_results_are_those_of_the_runs():
    """Tables of runs: columns "here" against results/, "published" against published.csv."""
    numbers = [each for row in read_published().values() for each in row.values()]
    published, checked = {" ± ".join(filter(None, each)) for each in numbers}, 0
    for head, _, *rows in tables_in((ROOT / "docs" / "results.md").read_text()):
        for row in rows if head[-1] == "runs" else ():
            for title, cell in zip(head, row):
                if title.startswith("here"):
                    assert cell in measured_numbers(row[-1].strip("`")), row
                    checked += 1
                elif title.startswith("published"):
                    assert cell in published, row
            mean = {title: cell.split(" ")[0] for title, cell in zip(head, row)}
            if mean.get("difference"):
                gap = float(mean["here"]) - float(mean["published"])
                assert mean["difference"] == f"{gap:+.2f}".replace("-", "−"), row
    assert checked > 25


NETWORK_SIZES = {  # classes, channels and size, or words and the width of their vectors
    "resnet18": (200, 3, 64),
    "resnet50": (100, 3, 32, 256),
    "cnn": (10, 3, 32),
    "cnn-moon": (10, 3, 32),
    "simple-cnn": (10, 3, 32),
    "cnn-mcmahan": (10, 1, 28),
    "lstm": (2, 3000, 300),
}


def test_table_of_networks():
    """Parameters, blocks, and those behind which FedMLB branches."""
    import fedmlb

    text = (ROOT / "docs" / "networks.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d,]+) \| (.*) \|$", text, re.M)
    [model] = [flag for flag in common.flags("", "x")._actions if flag.dest == "model"]
    assert {name for name, *_ in rows} == set(model.choices)
    for name, count, blocks in rows:
        net = common.build_net(name, *NETWORK_SIZES.get(name, (100, 3, 32)))
        assert sum(p.numel() for p in net.parameters()) == int(count.replace(",", "")), name
        names, listed = [block for block, _ in net.named_children()], blocks
        for stages in re.findall(r"\w+?\d-\d", blocks):  # stage1-3
            each = [f"{stages[:-3]}{i}" for i in range(int(stages[-3]), int(stages[-1]) + 1)]
            listed = listed.replace(stages, ", ".join(each))
        assert listed.replace("*", "").split(", ") == names[:-1], name
        branching = ", ".join(re.findall(r"\*(.*?)\*", listed)).split(", ")
        assert branching == [names[cut - 1] for cut in fedmlb.pathway_cuts(net)], name


def test_notebook_runs(tmp_path, monkeypatch):
    """The code cells of docs/tour.ipynb run, its asserts hold, and their outputs are stored."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    assert len(cells) <= 20
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tour"}
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("--rounds 15", "--rounds 4")
            exec(compile(source, cell["id"], "exec"), names)
            assert cell["outputs"] or not re.search(r"^ *(print|draw)\(", source, re.M)
    last = {key: accuracies[-1] for key, accuracies in names["curves"].items()}
    assert set(last) == {(n, k) for n in ("FedAvg", "SCAFFOLD", "FedSAM") for k in (0, 1)}
    assert min(last.values()) > 30  # of five classes


# --- docs/add-a-method.md

METHOD_PAGE = ROOT / "docs" / "add-a-method.md"


def test_the_contract_is_whole():
    """It names what common.py's header lists, and all public fields of what methods are given."""
    table = (
        METHOD_PAGE.read_text().partition("## The contract\n")[2].partition("## The one rule\n")[0]
    )
    [line] = re.findall(r"^    worker +(.+): PlainWorker$", common.__doc__, re.M)
    header = [f"worker.{name}" for name in re.findall(r"\w+", line) if name != "and"]
    assert len(header) > 10
    listed = set(re.findall(r"\b((?:worker|client|received)\.\w+)", table))
    assert set(header) <= listed
    fields = {f"client.{f.name}" for f in dataclasses.fields(common.Client)}
    unlisted = "sums records model finite version".split()  # the engine's
    unlisted = {f"client.{name}" for name in unlisted}
    received = {f"received.{name}" for name in [*vars(common.Received()), "clients"]}
    beside = {"client.bytes_down", "client.bytes_up"}  # read at the server
    assert (fields | received) - unlisted - beside <= listed
    callbacks = set(common.Method._fields)
    assert callbacks <= set(re.findall(r"`(\w+)\(", table))


def test_the_loop_of_the_docs_learns():
    """MOON keeps its clients' models, SCAFFOLD its control variates; both classify."""
    [block] = [
        block for block in blocks_of(METHOD_PAGE) if block.text.startswith("# own_loop.py\n")
    ]
    names = {"__name__": "own_loop"}
    exec(compile(block.text, "own_loop.py", "exec"), names)
    accuracy, states, nets = (names[k] for k in ("accuracy", "states", "nets"))
    assert min(accuracy.values()) > 0.75
    assert type(nets[scaffold]).__mro__[1] is nn.Module
    assert [states[moon][k].keys() for k in range(3)] == [{"net"}] * 3
    assert all(states[scaffold][k]["c"][0].abs().max() > 0 for k in range(3))


def test_table_of_what_a_worker_needs():
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| (`net`.*) \|$", METHOD_PAGE.read_text(), re.M)
    listed = {name: b for a, b in rows for name in re.findall(r"`(\w+)`", a)}
    assert listed.keys() == {*METHODS} and sum(a.count(",") + 1 for a, _ in rows) == len(METHODS)
    for name, attributes in listed.items():
        used = re.findall(r"\bw(?:orker)?\.(\w+)", (ROOT / f"{name}.py").read_text())
        assert set(re.findall(r"`(\w+)`", attributes)) == {*used}, name
