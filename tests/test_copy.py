"""common.py and a single script are enough: copied into an empty folder, it trains there."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import same
from methods import METHODS, ROOT, needed

import common

STEPS = "--dataset mnist --model cnn --clients 12 --sample 0.1 --rounds 1 --local-steps 2"
STEPS = [*STEPS.split(), *"--partition iid --validation 0.1 --device cpu --quiet".split()]
LOOP = """
import pathlib, sys
import torch

for line in sys.stdin.read().splitlines():
    folder, name, *argv = line.split()
    sys.path[0] = folder
    import common
    assert pathlib.Path(common.__file__).parent == pathlib.Path(folder)
    script = __import__(name)
    net, rows = script.main(argv)
    assert len(rows) == 1
    row = rows[0]
    assert row["train_loss"] > 0 and row["bytes_up"] > 0 and row["val_acc"] is not None, row
    assert ("bytes_delta" in row) == (name in ("rfedavg", "rfedavg_code")), row
    strangers = [
        key for key, m in sys.modules.items()
        if (getattr(m, "__file__", None) or "").startswith(str(pathlib.Path(folder).parent))
    ]
    assert sorted(strangers) == sorted(["common", name]), strangers
    del sys.modules["common"], sys.modules[name]
    print(name)
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The words of a small command, on random images in MNIST's files."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "MNIST" / "raw").mkdir(parents=True)
    for part, n in (("train", 240), ("t10k", 40)):
        for name, magic, shape in (("images-idx3", 2051, (n, 28, 28)), ("labels-idx1", 2049, (n,))):
            values = rng.integers(10 if len(shape) == 1 else 256, size=shape)
            content = np.array([magic, *shape], ">i4").tobytes() + values.astype("u1").tobytes()
            (root / "MNIST" / "raw" / f"{part}-{name}-ubyte").write_bytes(content)
    return [*STEPS, "--data-dir", str(root)]


def copied(folder, *names):
    """Copy files of the project into a new folder; return it."""
    folder.mkdir()
    for name in names:
        shutil.copy(ROOT / name, folder)
    return folder


def run(folder, command, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


def test_every_script_trains_on_its_own(tmp_path, steps):
    """In one process, from a folder a script, and without any other file of the project."""
    lines = []
    for name in METHODS:
        folder = copied(tmp_path / name, "common.py", f"{name}.py")
        lines.append(" ".join([str(folder), name, *steps, *needed(name)]))
    done = run(tmp_path, [sys.executable, "-c", LOOP], input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(METHODS)


def test_fedavg_from_the_shell(tmp_path, steps):
    """--out keeps three files; with the engine and its run folder beside, there is a run."""
    folder = copied(tmp_path / "copy", "common.py", "fedavg.py")
    done = run(folder, [sys.executable, "fedavg.py", *steps, "--out", "run"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    names = ["common.py", "fedavg.py", "run"]
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == names
    kept = ["config.json", "metrics.jsonl", "model.pt"]
    assert sorted(p.name for p in (folder / "run").iterdir()) == kept
    for name in ("engine.py", "run_folder.py"):
        shutil.copy(ROOT / name, folder)
    done = run(folder, [sys.executable, "fedavg.py", *steps, "--out", "full"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (folder / "full" / "checkpoint.pt").exists()
    models = [torch.load(folder / out / "model.pt", weights_only=True) for out in ("run", "full")]
    assert same(*models)


MISSING = [  # files that are copied, a command, and what its line names
    ("fedmlb", "--dyn-alpha 0.1", "feddyn.py"),
    ("fedcka", "--similarity-metric kernel-cka", "similarities.py"),
    ("fedavg", "--workers 2", "--workers: copy engine.py and run_folder.py beside common.py"),
    ("fedavg", "--save-clients", "--save-clients: copy engine.py and run_folder.py beside"),
    ("fedavg", "--resume --out run", "engine.py: needed by --resume"),
    ("fedavg", "--server adam", "extras/servers.py: needed by --server adam"),
    ("fedavg", "--dataset glyphs", "extras/glyphs.py: needed by --dataset glyphs"),
    ("fedavg", "--dataset femnist", "extras/readers.py: needed by --dataset femnist"),
    ("fedavg", "--model vgg9", "extras/backbones.py: needed by --model vgg9"),
    ("fedavg", "--dataset sent140 --model lstm --vectors random", "extras/text.py: needed by"),
    ("fedavg", "--partition similarity", "extras/partitions.py: needed by --partition"),
    ("fedavg", "--client-test", "extras/partitions.py: needed by --client-test"),
]
LINES = """
import sys
import common

for line in sys.stdin.read().splitlines():
    name, *argv = line.split()
    try:
        __import__(name).main(argv)
        print()
    except common.UserError as e:
        print(e)
"""


def test_a_missing_file_is_one_line(tmp_path, steps):
    scripts = [f"{name}.py" for name in ("fedavg", "fedmlb", "fedcka")]
    folder = copied(tmp_path / "copy", "common.py", *scripts)
    lines = "\n".join(" ".join([name, *steps, argv]) for name, argv, _ in MISSING)
    done = run(folder, [sys.executable, "-c", LINES], input=lines)
    assert done.returncode == 0, done.stderr
    for line, (_, _, file) in zip(done.stdout.splitlines(), MISSING, strict=True):
        assert file in line and "copy" in line
    done = run(folder, [sys.executable, "fedavg.py", *steps, "--server", "adam"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_an_error_within_a_file_is_not_a_missing_file(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    import extras

    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        common.import_extra("broken", "--dataset femnist")
