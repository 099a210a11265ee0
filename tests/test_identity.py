"""extras/identity.py: what counts as the same code, in files, notebooks and partial functions."""

import functools
import importlib.util
import json
import linecache
import os
import runpy
import subprocess
import sys

import pytest
from conftest import TINY, refused
from methods import ROOT
from runs import config_of, rounds_in

import common
import run_folder
import fedavg
from extras.identity import Code

SOURCE = '''
import argparse
import collections
import functools
import numpy as np
import torch
import torch.nn.functional as F
import common
import helpers
from fedavg import local_update as average_update

SCALE = 2.0
MATRIX = np.ones((2, 2), np.float32)
OPTIONS = argparse.Namespace(power=2)
NAMES = {"a": [1, 2]}
net = None

class Trim:
    """Trims."""
    share = 0.1

    def __init__(self, n):
        self.n = n

    @property
    def half(self):
        return self.n / 2

    @functools.cached_property
    def kept(self):
        return self.n - 5

    def raised(self, by):
        return self.n + by

    more = functools.partialmethod(raised, by=11)

    def __call__(self, net, received, server, args):
        return self.n * self.share

def loss_of(out, y):
    return F.cross_entropy(out, y) * SCALE

def local_update(worker, client, server, args):
    """The loss times SCALE."""
    net, opt = worker.net, worker.opt
    def step(x, y):
        out = net(x)  # a forward pass
        loss = loss_of(out, y)
        return loss + helpers.term(out) + len(NAMES)
    yield step

def twice(f):
    @functools.wraps(f)
    def both(*args, **options):
        return 2 * f(*args, **options)
    return both

@twice
@torch.no_grad()
def aggregate(net, received, server, args, trim=0.1):
    import later
    from helpers import late
    def deep():
        return 3 + len(MATRIX) + OPTIONS.power + late() + later.value()
    return deep() * trim

def made(k):
    def inner(net, received, server, args):
        return k
    return inner

METHODS = {
    "plain": aggregate,
    "partial": functools.partial(aggregate, trim=0.2),
    "object": Trim(4),
    "lambda": lambda net, received, server, args: 5,
    "closure": made(6),
    "bound": Trim(7).__call__,
    "float32": made(np.float32(0.5)),
    "int64": made(np.int64(12)),
    "deque": made(collections.deque([13], maxlen=14)),
    "tensor": made(torch.tensor([15, 16])),
    "module": made(torch.nn.Conv2d(17, 18, 3)),
    "long": made(torch.zeros(2000)),
    "trained": made(torch.zeros(2, requires_grad=True)),
}
'''
HELPERS = "def term(out):\n    return 0.5 * out.mean()\n\ndef other():\n    return 1\n"
HELPERS += "def late():\n    return 19\n"
LATER = "def value():\n    return 20\n\ndef other():\n    return 21\n"
STEPS = [*TINY, "--clients", "2", "--local-steps", "1", "--rounds", "1"]
KINDS = ["plain", "partial", "object", "lambda", "closure", "bound", "float32", "tensor", "module"]


def module_of(folder, source=SOURCE, helpers=HELPERS, name="mine"):
    """Return the module of a source, imported from folder beside its helpers."""
    folder.mkdir(exist_ok=True)
    for stem, text in (("helpers", helpers), (name, source)):
        path = folder / f"{stem}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(stem, path)
        module = sys.modules[stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A function of sources that returns the parts of their Code, by a kind of aggregate."""
    for name in ("mine", "helpers", "later"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "later")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "later.py").write_text(LATER)
    count = iter(range(99))

    def parts(source=SOURCE, kind="plain", **options):
        module = module_of(tmp_path / str(next(count)), source, **options)
        return Code(common.Method(module.local_update, module.METHODS[kind])).parts

    return parts


@pytest.mark.parametrize(
    "old, new",
    [
        ("  # a forward pass", ""),
        ('    """The loss times SCALE."""\n', ""),
        ('    """Trims."""\n', '    """Trims the most."""\n'),
        ("SCALE = 2.0\n", "SCALE = 2.0  # of the loss\n\n\n"),
        ("        return loss + helpers.term(out)", "        return (loss\n  + helpers.term(out))"),
        ("net = None", "net = torch.ones(3)"),  # net is an attribute, and a local name
        ('{"a": [1, 2]}', "dict(a=[1, 2])"),
        ("\nMETHODS", "\ndef main():\n    print(9)\n\nMETHODS"),
    ],
)
def test_what_does_not_count(parts, old, new):
    assert SOURCE.count(old) == 1 or old.startswith("  ")
    for kind in KINDS:
        assert parts(SOURCE.replace(old, new, 1), kind) == parts(kind=kind)


@pytest.mark.parametrize(
    "kind, part, old, new",
    [
        ("plain", "local_update", "loss = loss_of(out, y)", "loss = 2 * loss_of(out, y)"),
        (
            "plain",
            "local_update",
            "cross_entropy(out, y)",
            "cross_entropy(out, y, reduction='sum')",
        ),
        ("plain", "local_update", "SCALE = 2.0", "SCALE = 3.0"),
        ("plain", "local_update", "[1, 2]", "[1, 3]"),
        ("plain", "aggregate", "return 3", "return 4"),
        ("plain", "aggregate", "trim=0.1", "trim=0.3"),
        ("plain", "aggregate", "2 * f(*args", "3 * f(*args"),
        ("plain", "aggregate", "@torch.no_grad()", "@torch.enable_grad()"),
        ("partial", "aggregate", "trim=0.2", "trim=0.4"),
        ("partial", "aggregate", "return 3", "return 4"),
        ("object", "aggregate", "Trim(4)", "Trim(5)"),
        ("object", "aggregate", "self.n * self.share", "self.n + self.share"),
        ("object", "aggregate", "share = 0.1", "share = 0.2"),
        ("bound", "aggregate", "Trim(7)", "Trim(8)"),
        ("lambda", "aggregate", "args: 5", "args: 6"),
        ("closure", "aggregate", "made(6)", "made(9)"),
        ("plain", "aggregate", "np.ones((2, 2)", "np.zeros((2, 2)"),
        ("plain", "aggregate", "power=2", "power=3"),
        ("object", "aggregate", "self.n / 2", "self.n / 3"),
        ("object", "aggregate", "self.n - 5", "self.n - 6"),
        ("object", "aggregate", "self.n + by", "self.n - by"),
        ("object", "aggregate", "raised, by=11", "raised, by=12"),
        ("float32", "aggregate", "np.float32(0.5)", "np.float32(0.25)"),
        ("float32", "aggregate", "np.float32(0.5)", "np.float64(0.5)"),
        ("int64", "aggregate", "np.int64(12)", "np.int64(13)"),
        ("deque", "aggregate", "[13]", "[14]"),
        ("deque", "aggregate", "maxlen=14", "maxlen=15"),
        ("tensor", "aggregate", "[15, 16]", "[15, 17]"),
        ("module", "aggregate", "17, 18, 3", "17, 18, 5"),
        ("module", "aggregate", "18, 3)", "18, 3, stride=2)"),
        ("long", "aggregate", "zeros(2000", "zeros(2001"),
    ],
)
def test_what_counts(parts, kind, part, old, new):
    """and nothing but the part that was changed is another."""
    assert SOURCE.count(old) == 1
    before, after = parts(kind=kind), parts(SOURCE.replace(old, new), kind)
    assert {key for key in before if before[key] != after[key]} == {part}


def test_helpers_of_another_file_count_where_they_are_used(parts):
    assert parts(helpers=HELPERS.replace("0.5", "0.6")) != parts()
    assert parts(helpers=HELPERS.replace("return 1\n", "return 2\n")) == parts()


def test_what_is_imported_in_a_function_counts(parts, tmp_path):
    """Imported before or not, as `import` or as `from ... import`."""
    before = parts()
    assert (
        parts(helpers=HELPERS.replace("return 19", "return 22"))["aggregate"] != before["aggregate"]
    )
    assert sys.modules.pop("later")
    assert parts() == before
    for old, same in (("return 21", True), ("return 20", False)):
        del sys.modules["later"]
        (tmp_path / "later.py").write_text(LATER.replace(old, "return 2323"))
        assert (parts() == before) is same


KEPT = """
import numpy as np
hist, table, total, step = [], {}, np.zeros(2), 0

class Counter:
    def __init__(self, n):
        self.n, self.calls, self.found = n, 0, []

    def __call__(self, net, received, server, args, seen=[], *, more={}):
        self.calls += 1
        self.found.append(self.calls)
        seen.append(1)
        more[self.calls] = 1

def local_update(worker, client, server, args):
    global step
    step += 1
    hist.append(step)
    table[step] = hist[-1]
    total[0] = step
    yield hist, table, total, FACTORS

FACTORS = [1]
aggregate = Counter(2)
METHODS = {"plain": aggregate}
"""


def test_what_the_code_itself_changes_does_not_count(parts, tmp_path):
    """Else the second seed of a notebook is of another method, and a resume there refused."""
    before = parts(KEPT)
    mine = sys.modules["mine"]
    for _ in range(2):
        next(mine.local_update(0, 0, 0, 0))
        mine.aggregate(0, 0, 0, 0)
        assert Code(common.Method(mine.local_update, mine.aggregate)).parts == before
    for part, old, new in (
        ("aggregate", "Counter(2)", "Counter(3)"),
        ("local_update", "[1]", "[2]"),
    ):
        changed = parts(KEPT.replace(f"= {old}", f"= {new}"))
        assert {key for key in before if before[key] != changed[key]} == {part}


class Odd:
    """An object with which no digest is to be had."""

    @property
    def __dict__(self):
        raise OSError("odd")


ITSELF = {"list": [1]}
ITSELF["list"].append(ITSELF)
ODD = Odd()


def test_what_no_digest_is_to_be_had_of_runs(tmp_path, capsys):
    """What holds itself has one; else a line says that there is none."""

    def aggregate(net, received, server, args):
        common.average(net, received, server, args)
        return ITSELF

    def odd(net, received, server, args):
        common.average(net, received, server, args)
        return ODD

    start([*STEPS, "--out", str(tmp_path / "a")], fedavg.local_update, aggregate)
    assert config_of(tmp_path / "a")["code"]["aggregate"].startswith("aggregate ")
    capsys.readouterr()
    start([*STEPS, "--quiet", "--out", str(tmp_path / "b")], fedavg.local_update, odd)
    line = "config.json keeps no digest of the code (OSError: odd)\n"
    assert capsys.readouterr().err == line and config_of(tmp_path / "b")["code"] is None


def test_what_is_trained_counts_by_its_shape(parts):
    for kind, old, new in (
        ("trained", "zeros(2, r", "ones(2, r"),
        ("long", "zeros(2000", "ones(2000"),
    ):
        assert parts(SOURCE.replace(old, new), kind) == parts(kind=kind)


def test_a_file_edited_since_its_import_is_not_what_runs(tmp_path, monkeypatch):
    for name in ("mine", "helpers"):
        monkeypatch.setitem(sys.modules, name, None)
    module = module_of(tmp_path)
    method = common.Method(module.local_update, module.aggregate)
    before = Code(method).parts
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.replace("return 3", "return 44"))
    edited = Code(method).parts
    again = module_of(tmp_path, SOURCE.replace("return 3", "return 44"))
    assert Code(common.Method(again.local_update, again.aggregate)).parts != edited != before


HASHED = """
import sys
sys.path[:0] = [{root!r}, {folder!r}]
import common, alpha, beta, gamma, delta
from extras.identity import Code
TABLE = {{delta.one: 1, gamma.one: 2}}
SET = {{alpha.one, beta.one, gamma.one, delta.one}}
def local_update(worker, client, server, args):
    return alpha.one, beta.one, gamma.one, delta.one
def aggregate(net, received, server, args):
    return TABLE, SET
print(Code(common.Method(local_update, aggregate)).parts)
"""


def test_the_same_code_is_the_same_in_every_process(tmp_path):
    """Whatever order Python keeps sets in, and wherever in memory a function lies."""
    for name in ("alpha", "beta", "gamma", "delta"):
        (tmp_path / f"{name}.py").write_text(f"def one():\n    return '{name}'\n")
    script = tmp_path / "script.py"
    script.write_text(HASHED.format(root=str(ROOT), folder=str(tmp_path)))
    found = set()
    for seed in "0123":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script)]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert len(found) == 1


def cell(number, text, space):
    """Run the cell of a notebook as IPython does, which keeps its text for inspect."""
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), space)
    return Code(common.Method(space["local_update"], common.average)).parts


CELL = """
def local_update(worker, client, server, args):
    net = worker.net
    def step(x, y):
        return loss_of(net(x)) * mu
    yield step
"""


def test_notebooks(monkeypatch):
    """A cell that is run again, with a word for --resume or with comments, is the same."""
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    space = {"__name__": "__main__", "mu": 0.1}
    exec("def loss_of(out):\n    return out.mean()", space)  # without its source
    first = cell(1, CELL, space)
    assert cell(2, f"# again\n{CELL}\nnet = 'run(--resume)'", space) == first
    assert cell(3, CELL.replace("net(x)", "-net(x)"), space) != first
    assert cell(4, CELL, space | {"mu": 0.2}) != first
    exec("def loss_of(out):\n    return out.mean()", space)
    assert cell(5, CELL, space) == first
    exec("def loss_of(out):\n    return out.sum()", space)
    assert cell(6, CELL, space) != first


def test_a_script_is_the_same_imported_and_run(tmp_path, monkeypatch):
    """Its module is __main__ in one case, and in the other has its name."""
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["fedavg.py", *STEPS, "--out", str(out)])
    runpy.run_path(str(ROOT / "fedavg.py"), run_name="__main__")
    code = config_of(out)["code"]
    assert code == Code(common.Method(fedavg.local_update, common.average)).parts
    assert code["local_update"].startswith("local_update ") and len(code["local_update"]) == 21


FORWARDS = """
import torch.nn as nn

class Twice(nn.Module):
    def __init__(self, power=1):
        super().__init__()
        self.power = power

    def forward(self, x):
        return 2 * x**self.power

def net(stride=1, p=0.1):
    first = nn.Conv2d(3, 4, 3, stride, padding=1)
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Twice(), nn.Linear(4, 3))
    return nn.Sequential(nn.Sequential(first, nn.Dropout(p)), last)
"""


# --- runs


def median(net, received, server, args):
    common.average(net, received, server, args)


def start(words, *functions, script=fedavg.__file__):
    """Run words with functions of a method under a script's name."""
    return common.run(common.flags("", script).parse_args(words), *functions)


class Script:
    """A script of FedAvg's name, for refused()."""

    def __init__(self, *functions):
        self.functions = functions

    def main(self, argv=None):
        return start(argv, *self.functions)


def test_another_method_does_not_resume(tmp_path, capsys):
    out = str(tmp_path / "run")
    fedavg.main([*STEPS, "--out", out])
    more = ["--out", out, "--resume", "--rounds", "2"]
    aggregate = Script(fedavg.local_update, median)
    refused(capsys, aggregate, more, "another aggregate", "average", "median", out)
    again = Script(fedavg.local_update, None, lambda *_: None)
    refused(capsys, again, more, "another after_round", "none", "<lambda>")
    part = Script(functools.partial(fedavg.local_update))
    refused(capsys, part, more, "another local_update", "local_update ")
    assert rounds_in(tmp_path / "run") == 1
    fedavg.main(more)
    assert rounds_in(tmp_path / "run") == 2


def test_partial_functions_run_and_resume(tmp_path, capsys):
    def aggregate(net, received, server, args, trim):
        common.average(net, received, server, args)

    out = str(tmp_path / "run")
    start([*STEPS, "--out", out], fedavg.local_update, functools.partial(aggregate, trim=1))
    more = ["--out", out, "--resume", "--rounds", "2"]
    other = Script(fedavg.local_update, functools.partial(aggregate, trim=2))
    refused(capsys, other, more, "another aggregate", "aggregate ")
    start(more, fedavg.local_update, functools.partial(aggregate, trim=1))
    assert rounds_in(tmp_path / "run") == 2


def test_a_run_from_before_code_was_recorded_resumes(tmp_path):
    out = tmp_path / "run"
    fedavg.main([*STEPS, "--out", str(out)])
    config = json.loads((out / "config.json").read_text())
    del config["code"]
    (out / "config.json").write_text(json.dumps(run_folder.sealed(config)))
    fedavg.main(["--out", str(out), "--resume", "--rounds", "2"])
    assert rounds_in(out) == 2


# --- the commit


def git(folder, *words):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=folder, check=True
    )


def test_what_is_not_in_the_commit_is_marked(tmp_path, monkeypatch):
    """Changed files of the repository; a script that is untracked, elsewhere, or in no file."""
    script, other = tmp_path / "fedavg.py", tmp_path / "untracked.py"
    for path in (tmp_path / "common.py", script):
        path.write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "common.py"))
    clean = run_folder.commit()
    assert len(clean) == 40 and run_folder.commit([str(script)]) == clean
    other.write_text("")
    assert run_folder.commit([str(script)]) == clean
    for file in (other, tmp_path.parent / "x.py", "<stdin>"):
        assert run_folder.commit([str(script), str(file)]) == f"{clean}+changes"
    script.write_text("1")
    assert run_folder.commit() == f"{clean}+changes"


def test_the_files_of_a_run_s_code_are_looked_up(tmp_path, monkeypatch):
    """That of its own aggregate too, which FedAvg's local_update is not in."""
    for name in ("mine", "helpers"):
        monkeypatch.setitem(sys.modules, name, None)
    mine = module_of(tmp_path / "code")
    monkeypatch.setattr(run_folder, "commit", lambda files: sorted(files))

    def aggregate(*args):
        return mine.aggregate if args[0] is None else common.average(*args)

    start([*STEPS, "--out", str(tmp_path / "run")], fedavg.local_update, aggregate)
    helpers = str(tmp_path / "code" / "helpers.py")
    files = {fedavg.__file__, __file__, mine.__file__, helpers}
    assert config_of(tmp_path / "run")["commit"] == sorted(files)
