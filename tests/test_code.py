"""What tells a run's code from other code: what counts, and what is refused."""

import functools
import linecache
import runpy

import pytest
from conftest import TINY, refusal

import common
import run_folder

SOURCE = '''
import torch.nn.functional as F
SCALE = 2.0
def loss_of(out, y):
    return F.cross_entropy(out, y) * SCALE  # a helper
def local_update(worker, client, server, args, power=1):
    """Train."""
    def step(x, y):
        loss = loss_of(worker.net(x), y) ** power
        loss.backward()
        return loss
    yield step
'''
CHANGES = [  # whether the code is another one then
    ("# a helper", "# that helps", False),
    ('"""Train."""', '"""Train a client."""', False),
    ("SCALE = 2.0", "SCALE  =  2.0\n\n", False),
    ("SCALE = 2.0", "SCALE = 3.0", True),
    ("* SCALE", "+ SCALE", True),
    ("power=1", "power=2", True),
]


def function_of(path, source=SOURCE):
    """Return local_update of a script with this source."""
    path.write_text(source)
    return runpy.run_path(str(path))["local_update"]


def code_of(f, **more):
    return run_folder.code_of(common.Method(f, common.average, **more))


@pytest.mark.parametrize("old, new, other", CHANGES)
def test_what_counts(tmp_path, old, new, other):
    """A resume is refused by a line that names the script, or goes on."""
    words, path = [*TINY, "--local-steps", "1", "--rounds", "1"], tmp_path / "mine.py"
    parser = common.flags("", "mine")
    args = parser.parse_args([*words, "--out", str(tmp_path / "run")])
    common.run(args, functools.partial(function_of(path), power=1))
    args = parser.parse_args(["--out", str(tmp_path / "run"), "--resume", "--rounds", "2"])
    changed = function_of(path, SOURCE.replace(old, new))
    line = refusal(common.run, args, functools.partial(changed, power=1))
    assert ("mine.py began with another local_update" in line) == other, line
    assert bool(line) == other


def test_names_and_digests(tmp_path):
    """Functions of one name are told apart by their files; of common.py the name alone counts."""
    a, b = function_of(tmp_path / "a.py"), function_of(tmp_path / "b.py", f"{SOURCE}\nX = 1\n")
    assert code_of(a)["aggregate"] == "average"
    assert code_of(a) != code_of(b) and code_of(a) == code_of(functools.partial(a, power=2))
    assert code_of(a, adapt=b)["adapt"] == code_of(b)["local_update"]


def test_a_notebook(monkeypatch):
    """All of a cell counts but its comments; where there is no source, the function's name."""

    def cell(text, name):
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), found := {"__name__": "__main__"})
        return code_of(found["local_update"])["local_update"]

    one = cell(SOURCE, "<cell 1>")
    assert one == cell(f"{SOURCE}\n# said\n", "<cell 2>") != "local_update"
    assert one != cell(SOURCE.replace("** power", "* power"), "<cell 3>")
    assert one != cell(f"{SOURCE}\nX = 1\n", "<cell 4>")
    exec(SOURCE, found := {"__name__": "__main__"})
    assert code_of(found["local_update"])["local_update"] == "local_update"
