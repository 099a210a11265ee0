"""What a method's code is: a run is of its script's name and of what its functions do."""

import argparse
import ast
import collections
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import marshal
import math
import os
import pathlib
import sys
import types

import numpy as np
import torch
import torch.nn as nn

from common import UserError


class Code:
    """What a method's functions do, so that another method of the same name is told apart.

    parts: {"local_update": "NAME DIGEST", ...} of a Method; files: that hold the code. A digest is
    of the syntax of a function and of all that it names: functions, classes and plain values,
    wherever they stand. Comments, docstrings and formatting do not count. What is in common.py,
    extras/ and installed packages counts by its name, a tensor of many values or one that is
    trained by its shape, another object by its type. Nor does what the functions change: a list
    that they append to, a global or an attribute that they set outside __init__."""

    def __init__(self, method=None):
        self.files, self.parts = set(), {}
        self.within = []  # what is being looked into, by id
        for part, f in method._asdict().items() if method else ():
            if f is not None:
                digest = self.digest(f)
                while isinstance(f, functools.partial):
                    f = f.func
                self.parts[part] = f"{getattr(f, '__name__', type(f).__name__)} {digest}"

    def digest(self, value):
        """Return eight hexadecimal digits of what value is or does."""
        self.seen, self.written = set(), set()
        return hashlib.sha256(json.dumps(self.of(value)).encode()).hexdigest()[:8]

    def of(self, value):
        """Return what value is or does, as nested lists."""
        if id(value) in self.within:  # it holds itself
            return getattr(value, "__qualname__", "itself")
        self.within.append(id(value))
        try:
            return self._of_parts(value)
        finally:
            self.within.pop()

    def _of_parts(self, value):
        for kind, parts_of in KINDS.items():
            if isinstance(value, kind):
                own = is_own(type(value).__module__)
                return self.of([type(value), parts_of(value)] if own else parts_of(value))
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return [self.of(v) for v in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(self.of(v)) for v in sorted(value, key=name_of))
        if isinstance(value, dict):
            pairs = [(json.dumps(self.of(k)), v) for k, v in value.items()]
            pairs.sort(key=lambda pair: pair[0])
            return [[json.loads(k), self._of_named(json.loads(k), v)] for k, v in pairs]
        return self._of_object(value)

    def _of_named(self, name, value):
        """Return of(value), but of what the code itself writes to its class alone."""
        code = inspect.isroutine(value) or isinstance(value, (type, types.ModuleType))
        if code or name not in self.written:
            return self.of(value)
        return self.of(type(value)) if is_own(type(value).__module__) else "state"

    def _of_object(self, value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        module = getattr(value, "__module__", None)
        if not is_own(module):
            return f"{module}.{name}"
        if id(value) in self.seen:
            return name
        self.seen.add(id(value))
        if inspect.isfunction(value) and is_own(value.__globals__.get("__name__")):
            return [name, self._source(value.__code__), self.of(read_by(value, self.written))]
        if hasattr(value, "__wrapped__"):  # by a decorator, which is in its source
            return [name, self.of(value.__wrapped__)]
        if isinstance(value, type):
            own = {k: v for k, v in vars(value).items() if k[:2] != "__" or inspect.isfunction(v)}
            for f in filter(inspect.isfunction, own.values()):
                self._source(f.__code__)  # for what they write
            return [name, self.of(value.__bases__), self.of(own)]
        return [self.of(type(value)), self.of(getattr(value, "__dict__", None))]

    def _source(self, code):
        """Return the syntax of a function's source, or its bytecode where there is none."""
        self.files.add(os.path.realpath(code.co_filename))
        with contextlib.suppress(OSError, SyntaxError):
            text = "".join(inspect.findsource(code)[0])
            compiled = compile(text, code.co_filename, "exec", dont_inherit=True)
            # a file that was edited since it was imported is not what runs
            if marshal.dumps(code, 0) in [marshal.dumps(inner, 0) for inner in codes_in(compiled)]:
                tree = ast.parse(text)
                self.written |= set(map(repr, written_in(tree)))
                return [syntax(f) for f in ast.walk(tree) if begins_at(f, code)]
        return [[c.co_code.hex(), self.of(c.co_names), self._constants(c)] for c in codes_in(code)]

    def _constants(self, code):
        return [self.of(value) for value in code.co_consts if not inspect.iscode(value)]


def bound(value):
    """Return what a functools.partial or partialmethod is made of."""
    return value.func, value.args, value.keywords


def contents(value):
    """Return what a tensor or an array is: its values where they are few and are not trained."""
    shape = [type(value).__name__, str(value.dtype), list(value.shape)]
    trained = getattr(value, "requires_grad", False) or getattr(value, "is_sparse", False)
    few = math.prod(value.shape) <= FEW and not trained and str(value.dtype) != "object"
    return [*shape, repr(value.tolist())] if few else shape


def layers(net):
    """Return what the modules in a network are and with what they were made; no weights."""
    return [
        (name, type(m), {k: v for k, v in vars(m).items() if k[0] != "_" and k != "training"})
        for name, m in net.named_modules()
    ]


FEW = 1000  # values of a tensor that count
KINDS = {  # what stands for its parts
    functools.partial: bound,
    functools.partialmethod: bound,
    functools.cached_property: lambda value: value.func,
    property: lambda value: (value.fget, value.fset, value.fdel),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.SimpleNamespace: vars,
    argparse.Namespace: vars,
    collections.deque: lambda value: (list(value), value.maxlen),
    np.generic: lambda value: (str(value.dtype), repr(value.item())),
    np.ndarray: contents,
    torch.Tensor: contents,
    nn.Module: layers,
}


def name_of(value):
    """Return by what the members of a set are ordered, whatever order Python keeps them in."""
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)


def codes_in(code):
    """Return a code object and all inside it."""
    inner = [codes_in(value) for value in code.co_consts if inspect.iscode(value)]
    return [code, *itertools.chain(*inner)]


def read_by(f, written=()):
    """Return what a function reads that is not handed to it: [{name: value}, ...], defaults.

    Defaults under a name in written, as repr(), are left out, where they are no plain values."""
    words = [i for code in codes_in(f.__code__) for i in dis.get_instructions(code)]
    names = {i.argval for i in words if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {i.argval for i in words if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    attributes |= {i.argval for i in words if i.opname == "IMPORT_FROM"}
    read = [{name: f.__globals__[name] for name in sorted(names & f.__globals__.keys())}]
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not bound yet
            read.append({name: cell.cell_contents})
    modules = imported({i.argval for i in words if i.opname == "IMPORT_NAME"})
    read += [modules] if modules else []
    modules = []
    for values in read:  # which grows by what is read of the user's modules
        for module in filter(inspect.ismodule, values.values()):
            if is_own(module.__name__) and module not in modules:
                modules.append(module)
                members = sorted(attributes & vars(module).keys())
                read.append({name: vars(module)[name] for name in members})
    defaults, names = f.__defaults__, f.__code__.co_varnames[: f.__code__.co_argcount]
    if defaults:
        named = zip(names[-len(defaults) :], defaults)
        kept = (list, dict, set)
        defaults = ["state" if repr(n) in written and isinstance(v, kept) else v for n, v in named]
    return [*read, defaults, f.__kwdefaults__]


def imported(names):
    """Return the modules that a function imports in its body, {name: module}: the user's alone."""
    modules = {}
    for name in sorted(names):
        with contextlib.suppress(Exception):  # a module that is not there is none of its code
            if is_own(name, importlib.util.find_spec(name).origin):
                modules[name] = importlib.import_module(name)
    return modules


def is_own(module, file=None):
    """Return whether a module, by its name, is not common.py, extras/, Python's or installed."""
    root = str(module).partition(".")[0]
    if module is None or root in {
        "common",
        "engine",
        "run_folder",
        "extras",
        *sys.stdlib_module_names,
    }:
        return False
    file = file or getattr(sys.modules.get(module), "__file__", None) or ""
    installed = {"site-packages", "dist-packages"} & set(pathlib.Path(file).parts)
    return root == "__main__" or not installed


def written_in(tree):
    """Return the names of what functions write to, those that set up an object left out.

    By an assignment to a part, a method that changes it in place, or global."""
    functions = [f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda))]
    setups = [f for f in functions if getattr(f, "name", "") in SETUPS]
    inside, outside = (set(itertools.chain(*map(ast.walk, fs))) for fs in (functions, setups))
    names = set()
    for node in inside - outside:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            names.update(node.names)
        changed = changed_by(node)
        while isinstance(changed, (ast.Attribute, ast.Subscript)):
            names.add(getattr(changed, "attr", ""))
            changed = changed.value
        names.add(getattr(changed, "id", ""))
    return names


def changed_by(node):
    """Return the node of what a node of a syntax tree changes in place; None if nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        called = node.func.attr
        in_place = called in CHANGES or (called[-1:] == "_" and called[-2:] != "__")
        return node.func.value if in_place else None
    stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    return node if stored and not isinstance(node, ast.Name) else None


SETUPS = ("__init__", "__new__", "__post_init__")
CHANGES = set("append appendleft add clear discard extend insert pop popitem popleft".split())
CHANGES |= set("remove reverse setdefault sort update".split())


def begins_at(node, code):
    """Return whether a node of a syntax tree is a function in the first line of code."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    lines = [part.lineno for part in (node, *getattr(node, "decorator_list", ()))]
    return min(lines) == code.co_firstlineno


def syntax(node):
    """Return a syntax tree as nested lists, without places and docstrings.

    Nor what is empty, in which Pythons differ."""
    if isinstance(node, list):
        text = [isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in node]
        return [syntax(n) for n, silent in zip(node, text) if not silent]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(k, v) for k, v in ast.iter_fields(node) if v is not None and v != []]
    return [type(node).__name__, *([k, syntax(v)] for k, v in fields)]


def check_same(out, recorded, code):
    """Raise UserError where code is not what began the run in out; recorded: that Code's parts."""
    for part in {**recorded, **code.parts}:
        begun, now = recorded.get(part, "none"), code.parts.get(part, "none")
        if begun != now:
            raise UserError(
                f"--out {out}: began with another {part}, {begun}, where now it is {now}; bring "
                "that back, or start a new run with another --out"
            )
