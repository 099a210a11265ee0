"""Own data: tensors of any shape, map-style data sets, folders of images with clients."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, plainly, refusal
from PIL import Image
from support import make_clients

import common
import engine
import fedavg
from extras import images, own, partitions

BARE = [word for word in TINY if word not in ("--dataset", "glyphs", "--model", "cnn")]


def tables(n=120, columns=6, dtype=torch.float32):
    """Return a Data of n rows of numbers, of which three decide the class, and a third to test."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(n, columns))).to(dtype)
    y = x[:, :3].argmax(1)
    third = n // 3
    return common.Data(x[third:], y[third:], x[:third], y[:third], 3)


def trained(tmp_path, data, net, *argv):
    run = functools.partial(common.run, data=data, net=net)
    words = [*BARE, "--partition", "iid", "--out", str(tmp_path / "run"), *argv]
    return fedavg.main(words, run=run)


def said(capsys, tmp_path, data, net, *argv):
    """Return the standard output and error of a run of own data that is not quiet."""
    run = functools.partial(common.run, data=data, net=net)
    words = [word for word in BARE if word != "--quiet"]
    fedavg.main([*words, "--rounds", "1", "--out", str(tmp_path / "run"), *argv], run=run)
    shutil.rmtree(tmp_path / "run")
    return capsys.readouterr()


NAMES = ["cy", "ann", "bob", "dee"]


def linear():
    return nn.Sequential(nn.Linear(6, 3))


@pytest.mark.parametrize(
    "last, words",
    [
        ([nn.ReLU()], "net: ends in ReLU; leave it out"),
        ([nn.Sequential(nn.Softmax(1))], "ends in Softmax"),
        ([], ""),
    ],
)
def test_a_network_that_gives_no_logits_is_told(capsys, tmp_path, last, words):
    net = nn.Sequential(*linear(), *last)
    err = said(capsys, tmp_path, tables(), net, "--partition", "iid").err
    assert words in err and ("ends in" in err) == bool(words)


@pytest.mark.parametrize("lr", [0.1, 1e6])
def test_a_run_that_diverged_says_so(capsys, tmp_path, lr):
    """Its loss is finite, so that nothing else stops it."""
    argv = ["--partition", "iid", "--lr", str(lr), "--momentum", "0", "--weight-decay", "0"]
    for more in ([], ["--plain"]):
        *_, line = said(capsys, tmp_path, tables(), linear(), *argv, *more).out.splitlines()
        assert ("diverged, test loss " in line) == (lr > 1)


def test_writers_by_name(capsys, tmp_path):
    """As by numbers in the names' order; without writers_test= a line says whose client_acc is."""
    names, numbers = (np.array(v)[np.arange(80) % 4] for v in (NAMES, [2, 0, 1, 3]))
    clients, data, found = ["--partition", "natural", "--client-test"], tables(), []
    for writers in (names, numbers, names.tolist()):
        own_data = dataclasses.replace(data, writers=writers, writers_test=writers[:40])
        torch.manual_seed(0)
        args = flags(*clients)
        parts = common.partition(own_data, args)
        found.append([*parts, *partitions.client_test_indices(own_data, parts, args)])
        assert len(set(own_data.writers[parts[0]])) == 1
    for same_parts in zip(*found):
        assert all(np.array_equal(part, same_parts[0]) for part in same_parts)
    assert "share" not in said(capsys, tmp_path, own_data, linear(), *clients).err
    data = dataclasses.replace(data, writers=names)
    line = "--client-test: not by writer; each client"
    assert said(capsys, tmp_path, data, linear(), *clients).err.count(line) == 1
    assert line in said(capsys, tmp_path, data, linear(), *clients[2:]).err


# --- tensors


def test_a_table_of_numbers(tmp_path):
    """float64 of numpy becomes float32, and passes through as it is."""
    data = tables(dtype=torch.float64)
    assert data.x.dtype == data.x_test.dtype == torch.float32
    assert torch.equal(data.normalise(data.x), data.x)
    assert data.mean is None
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), common.Classifier(8, 3))
    _, rows = trained(tmp_path, data, net, "--rounds", "3", "--epochs", "9", "--lr", "0.1")
    assert rows[-1]["test_acc"] > 80
    name = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]["dataset"]
    args = flags()
    engine.name_own(args, dataclasses.replace(data, name="heart"), None)
    assert name.startswith("own-") and args.dataset == name.replace("own-", "own-heart-")


@pytest.mark.parametrize("run", [common.run, plainly])
def test_sequences_of_numbers(tmp_path, run):
    """int64 stays int64 and is not normalised: what an embedding wants."""
    x = np.random.default_rng(0).integers(20, size=(90, 9))
    y = x[:, -1] % 2
    data = common.Data(x[:60], y[:60], x[60:], y[60:], 2)
    assert data.x.dtype == torch.int64
    assert torch.equal(data.normalise(data.x), torch.from_numpy(x[:60]))
    net = nn.Sequential(nn.Embedding(20, 5), nn.Flatten(), common.Classifier(45, 2))
    args = flags("--partition", "iid", "--out", str(tmp_path / "run"))
    _, rows = run(args, fedavg.local_update, data=data, net=net)
    assert rows[1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--augment flip", "argument --augment"),
        ("--image-size 16", "--image-size and"),
        ("--normalise half", "--normalise: not for data="),
        ("--partition natural", "no writers in --dataset"),
        ("--model cnn", "argument --model: .* pass net="),
    ],
)
def test_flags_that_do_not_go_with_own_data(tmp_path, argv, words):
    net = None if "--model" in argv else linear()
    with pytest.raises(common.UserError, match=words):
        trained(tmp_path, tables(), net, *argv.split())
    assert not (tmp_path / "run").exists()


def test_other_data_or_layers_do_not_resume(tmp_path):
    def net(width=8):
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), common.Classifier(width, 3))

    trained(tmp_path, tables(), net(), "--rounds", "1")
    more = ["--rounds", "2", "--resume"]
    with pytest.raises(common.UserError, match="another --dataset .own-"):
        trained(tmp_path, tables(n=123), net(), *more)
    with pytest.raises(common.UserError, match="another --model .own-"):
        trained(tmp_path, tables(), net(9), *more)
    _, rows = trained(tmp_path, tables(), net(), *more)  # other weights are those of the run
    assert len(rows) == 2


# --- map-style data sets


def test_data_of_two_data_sets(tmp_path):
    data = tables()
    train = torch.utils.data.TensorDataset(data.x, data.y)
    test = torch.utils.data.Subset(train, range(40))
    found = own.data_of(train, test)
    assert torch.equal(found.x, data.x) and torch.equal(found.y, data.y)
    assert torch.equal(found.x_test, data.x[:40]) and torch.equal(found.y_test, data.y[:40])
    assert found.classes == 3
    train.classes = ["a", "b", "c", "d"]
    assert own.data_of(train, test).classes == 4


def test_data_of_pillow_images_and_arrays():
    """Images stay bytes, (channels, height, width); a data set of its arrays is the same."""
    rng = np.random.default_rng(0)
    for shape, mode in (((5, 7, 3), "RGB"), ((5, 7), "L")):
        pixels = rng.integers(256, size=(4, *shape)).astype(np.uint8)
        pairs = [(Image.fromarray(p, mode), i % 2) for i, p in enumerate(pixels)]
        data = own.data_of(pairs, pairs)
        expected = torch.from_numpy(pixels).view(4, 5, 7, -1).permute(0, 3, 1, 2)
        assert torch.equal(data.x, expected)
        arrays = [(x.numpy(), np.int32(y)) for x, y in zip(data.x, data.y)]
        assert torch.equal(own.data_of(arrays, arrays).x, expected)


# --- folders of images with clients


def test_folder_with_clients(tmp_path):
    """Samples in order of clients, classes and names; writers in order of the clients' names."""
    root = make_clients(tmp_path)
    Image.fromarray(np.full((12, 12, 3), 7, np.uint8)).save(root / "train/bob/ape/1.png")
    data = images.folder(root, by_client=True)
    assert data.writers.tolist() == [0] * 3 + [1] * 6 + [2] * 6
    assert data.y.tolist() == [0, 0, 0] + 2 * [0, 0, 0, 1, 1, 1]
    assert data.writers_test.tolist() == [0] * 2 + [1] * 4 + [2] * 4
    assert data.y_test.tolist() == [0, 0] + 2 * [0, 0, 1, 1]
    assert data.classes == 2
    assert (data.x[4] == 7).all()
    pixels = torch.from_numpy(np.array(Image.open(root / "train/zoe/bee/2.png")))
    assert torch.equal(data.x[14], pixels.permute(2, 0, 1))
    words = f"--dataset folder --data-dir {root} --image-size 32 --partition natural --clients 3"
    words = [*words.split(), "--client-test", "--out", str(tmp_path / "run")]
    args = flags(*words)
    parts = common.partition(data, args)
    assert sorted(part.tolist() for part in parts) == [[0, 1, 2], [*range(3, 9)], [*range(9, 15)]]
    for part, test in zip(parts, partitions.client_test_indices(data, parts, args)):
        assert set(data.writers[part]) == set(data.writers_test[test])
    _, rows = fedavg.main([*TINY, *words])
    assert len(rows[-1]["client_acc"]) == 3


# --- what does not fit

X, Y, W = torch.zeros(6, 4), torch.arange(6) % 3, np.arange(80) % 4
GOOD = [(torch.zeros(3), 0), (torch.zeros(3), 1)]
NATURAL = flags("--partition", "natural")


def of_writers(**fields):
    return common.partition(dataclasses.replace(tables(), **fields), NATURAL)


@pytest.mark.parametrize(
    "f, words",
    [
        (
            lambda: common.Data(X, Y[:5], X, Y, 3),
            "x has 6 samples, and its labels are of shape [5]",
        ),
        (lambda: common.Data(X[:0], Y[:0], X, Y, 3), "x has 0 samples, and its labels are of"),
        (lambda: common.Data(X, Y.float(), X, Y, 3), "x are torch.float32 from 0.0 to 2.0, not"),
        (
            lambda: common.Data(X, Y + 1, X, Y, 3),
            "torch.int64 from 1 to 3, not integers from 0 to 2",
        ),
        (lambda: common.Data(X, Y, X, Y - 1, 3), "x_test are torch.int64 from -1 to 1, not"),
        (lambda: common.Data(X, Y, X[:, :3], Y, 3), "x_test is [6, 3] torch.float32, and x [6, 4]"),
        (lambda: common.Data(X / 0, Y, X, Y, 3), "x holds NaN or infinity, as in [0]"),
        (lambda: of_writers(writers=W[:50]), "data: writers must name or number"),
        (lambda: of_writers(writers=W / 2), "data: writers must name or number"),
        (lambda: of_writers(writers=W, writers_test=W[:7]), "data: writers_test must name or"),
        (lambda: own.data_of([], GOOD), "train has no samples by an index"),
        (lambda: own.data_of([*GOOD, (torch.zeros(4), 0)], GOOD), "train[2] is no (x, integer y)"),
        (
            lambda: own.data_of([*GOOD, (torch.zeros(3), 0.5)], GOOD),
            "train[2] is no (x, integer y)",
        ),
        (lambda: own.data_of([*GOOD, (torch.zeros(3), -1)], GOOD), "torch.int64 from -1 to 1"),
    ],
)
def test_what_does_not_fit(f, words):
    """The line says what was found."""
    assert words in refusal(f)
