"""common.py and a script are enough, copied into an empty folder, or called from Python."""

import copy
import functools
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import TINY, args_of, from_shell, refusal, same
from methods import METHODS, ROOT, SCRIPTS, needed
from runs import assert_equal_runs, config_of, rounds_in
from support import make_mnist

import common
import run_folder
import fedalign
import fedavg
import moon
import scaffold
from extras import own

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
    for file in pathlib.Path(folder).iterdir():
        sys.modules.pop(file.stem, None)
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    make_mnist(root, "MNIST", 240, 40)
    return [*STEPS, "--data-dir", str(root)]


def run(folder, command, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


MISSING = [  # a folder of copies, flags, and what the line names
    ("fedmlb", "--dyn-alpha 0.1", "feddyn.py"),
    ("fedcka", "--similarity-metric kernel-cka", "similarities.py"),
    ("fedavg", "--workers 2", "--workers: copy engine.py and run_folder.py beside common.py"),
    ("fedavg", "--save-clients", "--save-clients: copy engine.py and run_folder.py beside"),
    ("fedavg", "--resume --out run", "engine.py: needed by --resume"),
    ("fedavg", "--server adam", "extras/servers.py: needed by --server"),
    ("fedavg", "--dataset glyphs", "extras/glyphs.py: needed by --dataset glyphs"),
    ("fedavg", "--dataset femnist", "extras/readers.py: needed by --dataset femnist"),
    ("fedavg", "--model vgg9", "extras/backbones.py: needed by --model vgg9"),
    ("fedavg", "--dataset sent140 --model lstm --vectors random", "extras/text.py: needed by"),
    ("fedavg", "--partition similarity", "extras/partitions.py: needed by --partition"),
    ("fedavg", "--client-test", "extras/partitions.py: needed by --client-test"),
    # with the engine there too: it needs these only at the end of a round
    ("engine", "--server-lr 0.5 --out run", "servers.py: needed by --server and --server-lr"),
    ("engine", "--metric all --out run", "extras/metrics.py: needed by --metric"),
]


def test_every_script_trains_on_its_own(tmp_path, steps):
    """Without any other file of the project; where a flag needs one, a line names it at once."""
    copies = {name: [name, "common"] for name in METHODS}
    copies["engine"] = ["fedavg", "common", "engine", "run_folder"]
    for folder, files in copies.items():
        (tmp_path / folder).mkdir()
        for file in files:
            shutil.copy(ROOT / f"{file}.py", tmp_path / folder)
    calls = [(name, " ".join(needed(name))) for name in METHODS]
    calls += [(folder, argv) for folder, argv, _ in MISSING]
    lines = [
        " ".join([str(tmp_path / folder), copies[folder][0], *steps, argv])
        for folder, argv in calls
    ]
    done = run(tmp_path, [sys.executable, "-c", LOOP], input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert found[: len(METHODS)] == [*METHODS]
    for line, (_, _, file) in zip(found[len(METHODS) :], MISSING, strict=True):
        assert file in line and "copy" in line
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize("words", ["--lr 0", "--clients 601 --partition iid", "--resume"])
def test_a_mistake_is_an_exception_with_the_shell_s_line(tmp_path, capsys, words):
    out = [] if "--resume" in words else ["--out", str(tmp_path / "run")]
    words = [*TINY, *out, *words.split()]
    line = refusal(fedavg.main, words)
    assert capsys.readouterr() == ("", "") and line
    with pytest.raises(SystemExit) as stop:
        from_shell(fedavg, words)
    assert (stop.value.code, capsys.readouterr().err) == (2, f"fedavg.py: error: {line}\n")


def test_args_for_are_the_words_flags():
    """On, off, both spellings, lists and None."""
    args = own.args_for(fedalign, clients=64, mu=0.1, drop_last=True, nesterov=False, leak=False)
    words = "--clients 64 --mu 0.1 --drop-last --no-nesterov"
    assert args == args_of(fedalign, *words.split())
    assert own.args_for(fedalign, client_number=7, lr=None).clients == 7
    assert own.args_for(SCRIPTS["fedmlb"], pathways=[1, 2]).pathways == [1, 2]
    assert own.args_for(moon, model="resnet56").projection == 256  # which the script derives
    for flag, value, takes in (
        ("lr", False, "a value, not False"),
        ("mu", True, "a value, not True"),
        ("graph", 0, "True or False, not 0"),
        ("quiet", 1, "True or False, not 1"),
    ):
        line = refusal(own.args_for, fedalign, **{flag: value})
        assert f"argument --{flag}: takes {takes}" in line


def test_main_takes_args_for(tmp_path):
    """With what the script hands over beside its flags: SCAFFOLD's aggregation."""
    small = {"dataset": "glyphs", "model": "cnn", "clients": 4, "rounds": 2, "local_steps": 2}
    small |= {"batch_size": 32, "quiet": True, "device": "cpu"}
    args = own.args_for(scaffold, **small, out=tmp_path / "a")
    before = dict(vars(args))
    net, rows = scaffold.main(args)
    words = [*TINY, "--local-steps", "2", "--out", str(tmp_path / "b")]
    assert same(net.state_dict(), scaffold.main(words)[0].state_dict())
    assert vars(args) == before  # the run notes nothing in them
    with pytest.raises(common.UserError, match="flags of scaffold.py"):
        moon.main(args)


def test_stopped_and_resumed_is_the_whole_run(tmp_path):
    """Stopped in round 2, which is not evaluated: it ends after round 3, whole; it goes on."""
    words = "--rounds 5 --eval-every 3 --local-steps 2 --checkpoint-every 4 --out".split()
    seen, out = [], tmp_path / "cut"

    def on_round(row, net):
        seen.append((copy.deepcopy(row), {k: v.clone() for k, v in net.state_dict().items()}))
        row["seconds"].clear()
        return row.pop("round") == 2

    run = functools.partial(common.run, on_round=on_round)
    net, rows = fedavg.main([*TINY, *words, str(out)], run=run)
    assert [row for row, _ in seen] == rows and len(rows) == rounds_in(out) == 3
    assert same(seen[2][1], net.state_dict()) and not same(seen[0][1], seen[1][1])
    assert same(run_folder.load(out / "model.pt"), net.state_dict())
    assert config_of(out)["stopped"] == 3
    fedavg.main(["--out", str(out), "--resume"])
    assert "stopped" not in config_of(out)
    fedavg.main([*TINY, *words, str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", out)


def test_a_stopped_run_that_goes_on_keeps_no_older_model(tmp_path, monkeypatch):
    words = [*TINY, "--rounds", "4", "--local-steps", "1", "--out", str(tmp_path / "run")]
    run = functools.partial(common.run, on_round=lambda row, net: True)
    fedavg.main(words, run=run)
    assert (tmp_path / "run" / "model.pt").exists()

    def fails(*_):
        raise OSError("disk full")

    for name in ("write_rows", "write_config", "publish"):  # of a checkpoint
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(run_folder.RunFolder, name, fails)
            fedavg.main([*words, "--resume"])
        assert not (tmp_path / "run" / "model.pt").exists()
