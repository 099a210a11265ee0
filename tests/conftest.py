import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402

TINY = [
    "--dataset",
    "glyphs",
    "--model",
    "cnn",
    "--clients",
    "4",
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--batch-size",
    "32",
    "--quiet",
]


@pytest.fixture(autouse=True)
def small_glyphs(monkeypatch):
    """600 + 200 drawn images wherever a test says --dataset glyphs; one thread, since two fight over small tensors."""
    monkeypatch.setattr(common, "GLYPHS", (600, 200))
    torch.set_num_threads(1)


def same(a, b):
    """Whether two state dicts are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def args_of(script, *argv):
    """The parsed flags with which a script's main() calls run()."""
    return script.main(list(argv), run=lambda args, *_, **__: args)
