"""common.py and a single script are enough: copied into an empty folder, it trains there."""

import shutil
import subprocess
import sys

import pytest
import torch
from conftest import same
from methods import METHODS, ROOT, needed
from support import make_mnist

import common

STEPS = "--dataset mnist --model cnn --clients 12 --sample 0.1 --rounds 1 --local-steps 2"
STEPS = [*STEPS.split(), *"--partition iid --validation 0.1 --device cpu --quiet".split()]
LOOP = """
import pathlib, sys

for line in sys.stdin.read().splitlines():
    folder, name, *argv = line.split()
    sys.path[0] = folder
    import common
    assert pathlib.Path(common.__file__).parent == pathlib.Path(folder)
    try:
        net, [row] = __import__(name).main(argv)
        assert row["train_loss"] > 0 and row["bytes_up"] > 0 and row["val_acc"] is not None, row
        assert ("bytes_delta" in row) == (name in ("rfedavg", "rfedavg_code")), row
        strangers = [
            key for key, m in sys.modules.items()
            if (getattr(m, "__file__", None) or "").startswith(str(pathlib.Path(folder).parent))
        ]
        assert sorted(strangers) == sorted(["common", name]), strangers
        print(name)
    except common.UserError as e:
        print(e)
    del sys.modules["common"], sys.modules[name]
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The words of a small command, on random images in MNIST's files."""
    root = tmp_path_factory.mktemp("data")
    make_mnist(root, "MNIST", 240, 40)
    return [*STEPS, "--data-dir", str(root)]


def run(folder, command, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


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


def test_every_script_trains_on_its_own(tmp_path, steps):
    """Without any other file of the project; where a flag needs one, a line names it."""
    lines = []
    for name in METHODS:
        folder = tmp_path / name
        folder.mkdir()
        for file in ("common.py", f"{name}.py"):
            shutil.copy(ROOT / file, folder)
        lines.append(" ".join([str(folder), name, *steps, *needed(name)]))
    lines += [" ".join([str(tmp_path / name), name, *steps, argv]) for name, argv, _ in MISSING]
    done = run(tmp_path, [sys.executable, "-c", LOOP], input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[: len(METHODS)] == [*METHODS]
    for line, (_, _, file) in zip(found[len(METHODS) :], MISSING, strict=True):
        assert file in line and "copy" in line


def test_fedavg_from_the_shell(tmp_path, steps):
    """--out keeps three files; with the engine and its run folder beside, there is a run."""
    folder, kept = tmp_path / "copy", ["config.json", "metrics.jsonl", "model.pt"]
    folder.mkdir()
    for out, names in (("run", ["common", "fedavg"]), ("full", ["engine", "run_folder"])):
        for name in names:
            shutil.copy(ROOT / f"{name}.py", folder)
        done = run(folder, [sys.executable, "fedavg.py", *steps, "--out", out])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(p.name for p in (folder / "run").iterdir()) == kept
    assert (folder / "full" / "checkpoint.pt").exists()
    models = [torch.load(folder / out / "model.pt", weights_only=True) for out in ("run", "full")]
    assert same(*models)


def test_an_error_within_a_file_is_not_a_missing_file(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    import extras

    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        common.import_extra("broken", "--dataset femnist")
