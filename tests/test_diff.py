"""A script's diff against fedavg.py is its method, and the command in its docstring parses."""

import ast
import difflib

import pytest
from conftest import args_of
from methods import METHODS, ROOT, SCRIPTS


def docstring_lines(source):
    """Return the numbers of the lines of all docstrings: of the module, classes and functions."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code(name):
    """Return the lines of a script without docstrings, blank lines and lines of comment."""
    source = (ROOT / f"{name}.py").read_text()
    left_out = docstring_lines(source)
    return [
        line.rstrip()
        for number, line in enumerate(source.splitlines(), 1)
        if number not in left_out and line.strip() and not line.strip().startswith("#")
    ]


def changed_lines(name):
    """Return the lines of code that a script adds to fedavg.py and takes from it."""
    diff = difflib.ndiff(code("fedavg"), code(name))
    return [line for line in diff if line[0] in "+-"]


def test_docstrings_are_not_code(tmp_path, monkeypatch):
    source = '"""Module."""\n\n# comment\nclass A:\n    """Class."""\n\n    def f(self):\n'
    source += '        """Two\n        lines."""\n        return """text"""  # no docstring\n'
    (tmp_path / "sample.py").write_text(source)
    monkeypatch.setattr("test_diff.ROOT", tmp_path)
    expected = ["class A:", "    def f(self):", '        return """text"""  # no docstring']
    assert code("sample") == expected


@pytest.mark.parametrize("name", METHODS)
def test_the_diff_is_the_method(name):
    changed = changed_lines(name)
    lost = [line for line in changed if line.startswith("-")]
    assert len(changed) <= METHODS[name] <= 50
    assert len(lost) <= 2, lost


@pytest.mark.parametrize("name", METHODS)
def test_docstring_command_parses(name):
    command = SCRIPTS[name].__doc__.replace("\\\n", " ").strip().splitlines()[-1].split()
    assert command[:2] == ["python", f"{name}.py"]
    args = args_of(SCRIPTS[name], *command[2:])
    assert args.dataset in ("cifar100", "cifar10", "mnist")
    assert args.clients in (10, 16, 20, 100, 500)
