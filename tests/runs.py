"""What the tests of run folders share: comparing runs, and runs in processes of their own."""

import contextlib
import json
import os
import subprocess
import sys

import torch
from methods import ROOT

import common
import run_folder

VARIES = ("seconds", "samples_per_s", "peak_memory", "crc32")


def rows_of(out):
    """Return the rows of metrics.jsonl, all of them whole, without what varies between runs."""
    rows = run_folder.read_rows(out, config_of(out))
    assert len(rows) == rounds_in(out)
    return [{k: v for k, v in row.items() if k not in VARIES} for row in rows]


def config_of(out):
    return json.loads((out / "config.json").read_text())


def write_config(out, **changes):
    """Change entries of config.json, with a checksum that is right."""
    config = run_folder.sealed({**config_of(out), **changes})
    (out / "config.json").write_text(json.dumps(config))
    return out


def rounds_in(out):
    path = out / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def equal(a, b):
    """Return whether two nests of tensors and plain values are equal, strides included."""
    if torch.is_tensor(a):
        return torch.equal(a, b) and (a.stride(), a.dtype) == (b.stride(), b.dtype)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def content(path):
    """Return what two files have in common that hold the same results."""
    if path.suffix == ".pt":
        with contextlib.suppress(common.UserError):
            tree = run_folder.load(path)
            return {k: v for k, v in tree.items() if k != "rows_crc32"}  # rows hold seconds
    if path.name == "config.json":
        config = json.loads(path.read_text())
        return config["script"], {k: config["flags"][k] for k in ("rounds", "seed", "lr")}
    if not path.is_file():
        return "no file"
    return rows_of(path.parent) if path.name == "metrics.jsonl" else path.read_bytes()


def difference(whole, other):
    """Return in what the run folder other differs from whole, "" if in nothing."""
    a, b = ({str(p.relative_to(out)) for p in out.rglob("*")} for out in (whole, other))
    if a != b:
        return f"files {' '.join(sorted(a ^ b))} are in one of two runs only"
    for name in sorted(a):
        if (whole / name).is_file() and not equal(content(whole / name), content(other / name)):
            return f"{name} differs from the uncut run's"
    return ""


def assert_equal_runs(a, b):
    assert difference(a, b) == ""


def start(name, *argv, **options):
    """Start a script in a process of its own, on the small glyphs."""
    code = "import common, extras.glyphs, sys; extras.glyphs.GLYPHS = (600, 200)\n"
    code += f"import {name}\nwith common.one_line_errors({name!r}):\n    {name}.main()"
    command = [sys.executable, "-c", code, *argv]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)
