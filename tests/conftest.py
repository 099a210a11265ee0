import argparse
import functools
import pathlib
import shutil
import sys
import unittest.mock

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402
import extras.glyphs  # noqa: E402
import extras.readers  # noqa: E402
import fedavg  # noqa: E402

GLYPHS = extras.glyphs.GLYPHS  # before the tests shrink them
IMAGENET = extras.readers.IMAGENET
TINY = [
    *"--dataset glyphs --model cnn --clients 4 --rounds 2 --epochs 1 --batch-size 32".split(),
    *"--quiet --device cpu".split(),
]

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


@pytest.fixture(autouse=True)
def small_glyphs(monkeypatch):
    """Draw 600 + 200 glyphs and few of ImageNet, on one thread: two fight over small tensors."""
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (600, 200))
    monkeypatch.setattr(extras.readers, "IMAGENET", (9, 3, 4))
    torch.set_num_threads(1)


@pytest.fixture
def one_thread(monkeypatch):
    """Give a worker one thread, however many there are: sums inside operators depend on it."""
    monkeypatch.setattr(common, "CORES", 1)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def plainly(args, *callbacks, **more):
    """Train as common.run() does with --plain."""
    workers = args.workers if args.workers == 1 else "auto"  # by which a worker's threads go
    args = argparse.Namespace(**{**vars(args), "plain": True, "workers": workers})
    return common.run(args, *callbacks, **more)


def check_graph(folder, script, argv, rtol):
    """Check that a GPU ends with the same weights by CUDA graphs as without, but for rounding."""
    graph, eager = (
        script.main([*argv, "--deterministic", flag, "--out", str(folder / flag)])[0].state_dict()
        for flag in ("--graph", "--no-graph")
    )
    assert all(torch.allclose(v, eager[k], rtol, rtol / 10) for k, v in graph.items())


def args_of(script, *argv):
    """Return the parsed flags with which a script's main() calls run()."""
    return script.main(list(argv), run=lambda args, *_, **__: args)


def flags(*argv):
    """Return the shared flags of a small run, changed by argv."""
    return common.flags("test", "test").parse_args([*TINY, *argv])


def from_shell(script, argv):
    """Call a script's main as its command line does."""
    argv = [getattr(script, "__file__", "fedavg.py"), *map(str, argv)]
    with unittest.mock.patch.object(sys, "argv", argv), common.one_line_errors():
        return script.main()


def refusal(f, *args, **options):
    """Return the line with which f refuses to run, "" if it runs."""
    try:
        f(*args, **options)
    except common.UserError as e:
        return str(e)
    return ""


def refused(capsys, script, argv, *words, code=2, alone=True):
    """Check that a script prints an error alone, in one line with all words, and ends with code."""
    with pytest.raises(SystemExit) as stop:
        from_shell(script, argv)
    out, err = capsys.readouterr()
    assert stop.value.code == code, err
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if alone or "error:" in line]
    assert "error:" in line
    assert out == "" or not alone
    for word in words:
        assert word in line, err


refused_amid_output = functools.partial(refused, alone=False)


def make_folder(root, size=(12, 12), mode="RGB", classes=("ape", "bee"), counts=(3, 2)):
    """Write an image folder of so many training and test images a class; return root."""
    rng = np.random.default_rng(0)
    shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
    for part, count in zip(("train", "test"), counts):
        for name in classes:
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(256, size=shape).astype(np.uint8)
                Image.fromarray(pixels, mode).save(root / part / name / f"{i}.png")
    return root


def run_once(out, script, *argv):
    """Run a script into out, on 600 glyphs, outside of a test; return out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.glyphs, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        script.main([*TINY, *argv, "--out", str(out)])
    return out


@pytest.fixture
def started(monkeypatch):
    """What stands for the children of the package reproduce."""
    import makers

    monkeypatch.setattr(makers.jobs, "run_child", makers.Started())
    return makers.jobs.run_child


@pytest.fixture(scope="session")
def original_run(tmp_path_factory):
    """The folder of a run with client models on 600 glyphs, not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "a"
    return run_once(out, fedavg, "--clients", "3", "--save-clients", "--no-nesterov")


@pytest.fixture
def run(original_run, tmp_path):
    """A copy of the folder of original_run, to be changed."""
    return shutil.copytree(original_run, tmp_path / "a")
