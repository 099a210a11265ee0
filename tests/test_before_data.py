"""Mistakes in flags alone are found before the data set is read, which may take minutes."""

import functools

import pytest
import torch
from conftest import TINY, make_folder, refused
from methods import SCRIPTS

import common


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    def load_data(args):
        raise AssertionError("the data set was read")

    monkeypatch.setattr(common, "load_data", load_data)


MISTAKES = [
    ("fedavg", "--dataset tiny-imagenet --partition natural", ["--partition natural", "femnist"]),
    ("fedavg", "--dataset cifar100 --partition natural-iid", ["--partition natural-iid"]),
    ("fedcka", "--layers 99", ["--layers", "cnn has 7"]),
    ("fedcka", "--layers 99 --dataset folder", ["--layers", "cnn has 7"]),
    ("fedcka", "--batch-size 2", ["--batch-size", "at least 3"]),
    ("fedmlb", "--pathways 1,99 --dataset imagenet-200", ["--pathways", "1 to"]),
    ("stochdepth", "", ["--model cnn", "residual"]),
    ("stochdepth", "--dataset sent140 --model lstm --vectors /etc/hosts", ["--model lstm"]),
    ("fedalign", "--model squeezenet", ["--model squeezenet", "sub-network"]),
    ("fedalign", "--model mobilenet", ["--model mobilenet", "sub-network"]),
    ("gradaug", "--model shufflenet --dataset cifar10", ["--model shufflenet", "sub-network"]),
    ("gradaug", "--model lstm --dataset sent140 --vectors random", ["--model lstm", "sub-network"]),
    ("fedavg", "--model resnet56 --batch-size 1", ["--batch-size", "batch norm"]),
    ("fedavg", "--dataset mnist --image-size 10", ["--image-size", "too small"]),
    ("fedavg", "--dataset mnist --normalise cifar10", ["--normalise cifar10", "three channels"]),
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
    refused(capsys, SCRIPTS[script], argv, "--model squeezenet", "sub-network")


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, place):
    (tmp_path / "file").write_text("kept")
    refused(capsys, SCRIPTS["fedavg"], [*TINY, "--out", tmp_path / place], str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("text, words", [("[[0], [1]]", ["2 clients", "4"]), ("[1", ["JSON"])])
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
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(common.importlib, "import_module", missing)
    refused(capsys, SCRIPTS["fedavg"], [*TINY, *argv.split()], file, "copy it")


GOOD = [
    ("fedavg", "--dataset glyphs --partition natural"),
    ("fedavg", "--dataset sent140 --model lstm --vectors random --partition natural"),
    ("gradaug", "--model squeezenet --mu 0"),
    ("gradaug", "--model squeezenet --min-width 1"),
    ("fedalign", "--model mobilenet --mu 0"),
    ("stochdepth", "--model resnet18 --dataset folder"),
    ("fedavg", "--dataset folder --normalise cifar10 --image-size 28"),
    ("fedcka", "--batch-size 2 --mu 0"),
    ("fedcka", "--layers 7"),
]


@pytest.mark.parametrize("script, argv", GOOD)
def test_what_may_go_on_to_the_data(tmp_path, script, argv):
    with pytest.raises(AssertionError, match="the data set was read"):
        SCRIPTS[script].main([*TINY, "--out", str(tmp_path / "run"), *argv.split()])


@pytest.mark.parametrize("dataset", ["folder", "glyphs"])
def test_init_is_not_judged_by_a_stand_in(tmp_path, capsys, monkeypatch, dataset):
    """Of a folder's images the shapes are not known before; of known ones one line is said once."""
    monkeypatch.undo()
    folder = make_folder(tmp_path / "images", (28, 28))
    classes, size = (2, 28) if dataset == "folder" else (10, 32)
    torch.save(common.build_net("cnn", classes, 3, size).state_dict(), tmp_path / "init.pt")
    words = [*TINY, "--dataset", dataset, "--data-dir", folder, "--init", tmp_path / "init.pt"]
    words += ["--clients", "1", "--partition", "iid", "--rounds", "1", "--local-steps", "1"]
    words = [str(word) for word in words if word != "--quiet"]
    SCRIPTS["fedavg"].main([*words, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err.count("its classifier is of another shape")
    assert said == (dataset == "glyphs")


def test_own_data_and_networks_are_looked_at_themselves(tmp_path):
    """Whatever the flags of data sets say, whose defaults are FedAlign's."""
    x, y = torch.randint(0, 256, (60, 1, 28, 28), dtype=torch.uint8), torch.arange(60) % 3
    data = common.Data(x, y, x, y, 3, writers=torch.arange(60).numpy() // 15)
    run = functools.partial(common.run, data=data)
    argv = "--model cnn --clients 4 --partition natural --rounds 1 --epochs 1 --quiet".split()
    _, rows = SCRIPTS["fedavg"].main([*argv, "--out", str(tmp_path / "run")], run=run)
    assert len(rows) == 1


@pytest.mark.parametrize("name, shape", common.SHAPES.items())
def test_networks_take_the_shapes_that_are_known(name, shape):
    classes, channels, size = shape
    net = common.build_net("cnn", classes, channels, size)
    assert net(torch.zeros(2, channels, size, size)).shape == (2, classes)


def test_known_shapes_are_those_of_the_files(tmp_path, monkeypatch):
    monkeypatch.undo()
    data = common.glyphs(60, 30)
    assert common.SHAPES["glyphs"] == (data.classes, data.x.shape[1], data.x.shape[3])
    assert make_folder(tmp_path).exists()
