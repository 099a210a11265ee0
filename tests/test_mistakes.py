"""Mistakes in flags, files and networks are one line, and leave no run folder."""

import functools

import pytest
import torch
from conftest import TINY, make_folder, refused
from methods import SCRIPTS

import common


MISTAKES = [
    ("fedcka", "--layers 99", ["--layers", "cnn has 7"]),
    ("fedcka", "--batch-size 2", ["--batch-size", "at least 3"]),
    ("stochdepth", "", ["--model cnn", "residual"]),
    ("fedavg", "--model resnet56 --batch-size 1", ["--batch-size", "batch norm"]),
]


@pytest.mark.parametrize("script, argv, words", MISTAKES)
def test_mistakes_are_found_first(tmp_path, capsys, script, argv, words):
    out = tmp_path / "run"
    refused(capsys, SCRIPTS[script], [*TINY, "--out", out, *argv.split()], *words)
    assert not out.exists()


@pytest.mark.parametrize("script", ["fedalign", "gradaug"])
def test_a_copied_script_is_checked_too(tmp_path, capsys, monkeypatch, script):
    """A method of another name that trains narrow networks."""
    monkeypatch.setattr(SCRIPTS[script], "__file__", str(tmp_path / "mine.py"))
    argv = [*TINY, "--out", tmp_path / "run", "--model", "squeezenet"]
    refused(capsys, SCRIPTS[script], argv, "--model", "sub-network")


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, place):
    (tmp_path / "file").write_text("kept")
    refused(capsys, SCRIPTS["fedavg"], [*TINY, "--out", tmp_path / place], str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("text, words", [("[[0], [1]]", ["--clients 2"]), ("[1", ["JSON"])])
def test_a_split_file_that_no_data_can_have(tmp_path, capsys, text, words):
    path = tmp_path / "split.json"
    path.write_text(text)
    argv = [*TINY, "--partition", "file", "--split-file", path]
    refused(capsys, SCRIPTS["fedavg"], argv, "--split-file", *words)


@pytest.mark.parametrize(
    "argv, file",
    [
        ("--server adam", "extras/servers.py"),
        ("--partition similarity", "extras/partitions.py"),
        ("--client-test", "extras/partitions.py"),
        ("--dataset femnist", "extras/readers.py"),
        ("--model vgg9", "extras/backbones.py"),
    ],
)
def test_a_file_that_was_not_copied(capsys, monkeypatch, argv, file):
    found = common.importlib.import_module

    def missing(name):
        if name.startswith("extras.") and name != "extras.glyphs":
            raise ModuleNotFoundError(name=name)
        return found(name)

    monkeypatch.setattr(common.importlib, "import_module", missing)
    refused(capsys, SCRIPTS["fedavg"], [*TINY, *argv.split()], file, "copy it")


@pytest.mark.parametrize("dataset", ["folder", "glyphs"])
def test_a_classifier_of_another_shape_is_said_once(tmp_path, capsys, monkeypatch, dataset):
    folder = make_folder(tmp_path / "images", (28, 28))
    classes, size = (10, 28) if dataset == "folder" else (10, 32)
    torch.save(common.build_net("cnn", classes, 3, size).state_dict(), tmp_path / "init.pt")
    words = [*TINY, "--dataset", dataset, "--data-dir", folder, "--init", tmp_path / "init.pt"]
    words += ["--clients", "1", "--partition", "iid", "--rounds", "1", "--local-steps", "1"]
    words = [str(word) for word in words if word != "--quiet"]
    SCRIPTS["fedavg"].main([*words, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err.count("its classifier is of another shape")
    assert said == 1


def test_own_data_and_networks_are_looked_at_themselves(tmp_path):
    """Whatever the flags of data sets say, whose defaults are FedAlign's."""
    x, y = torch.randint(0, 256, (60, 1, 28, 28), dtype=torch.uint8), torch.arange(60) % 3
    data = common.Data(x, y, x, y, 3, writers=torch.arange(60).numpy() // 15)
    run = functools.partial(common.run, data=data)
    argv = "--model cnn --clients 4 --partition natural --rounds 1 --epochs 1 --quiet".split()
    _, rows = SCRIPTS["fedavg"].main([*argv, "--out", str(tmp_path / "run")], run=run)
    assert len(rows) == 1
