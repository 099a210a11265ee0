"""Own data: tensors of any shape, map-style data sets, folders of images with clients."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, make_folder, plainly, refusal, refused
from PIL import Image

import common
import engine
import extras.glyphs
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


def trained(tmp_path, data, net, *argv, script=fedavg, name="run"):
    run = functools.partial(common.run, data=data, net=net)
    words = [*BARE, "--partition", "iid", "--out", str(tmp_path / name), *argv]
    return script.main(words, run=run)


def said(capsys, tmp_path, data, net, *argv):
    """Return the standard output and error of a run of own data that is not quiet."""
    words = [word for word in BARE if word != "--quiet"]
    run = functools.partial(common.run, data=data, net=net)
    fedavg.main([*words, "--rounds", "1", "--out", str(tmp_path / "run"), *argv], run=run)
    shutil.rmtree(tmp_path / "run")
    return capsys.readouterr()


def linear():
    return nn.Sequential(nn.Linear(6, 3))


@pytest.mark.parametrize(
    "net, words",
    [
        (lambda: nn.Sequential(*linear(), nn.ReLU()), "net: ends in ReLU; leave it out"),
        (lambda: nn.Sequential(nn.Sequential(*linear(), nn.Softmax(1))), "ends in Softmax"),
        (linear, ""),
    ],
)
def test_a_network_that_gives_no_logits_is_told(capsys, tmp_path, net, words):
    err = said(capsys, tmp_path, tables(), net(), "--partition", "iid").err
    assert words in err and ("ends in" in err) == bool(words)


@pytest.mark.parametrize("lr", [0.1, 1e6])
def test_a_run_that_diverged_says_so(capsys, tmp_path, lr):
    """Its loss is finite, so that nothing else stops it."""
    argv = ["--partition", "iid", "--lr", str(lr), "--momentum", "0", "--weight-decay", "0"]
    for more in ([], ["--plain"]):
        *_, line = said(capsys, tmp_path, tables(), linear(), *argv, *more).out.splitlines()
        assert ("diverged, test loss " in line) == (lr > 1)


def test_a_single_class_is_refused(tmp_path, capsys):
    root = make_folder(tmp_path / "data", classes=("ape",))
    refused(capsys, fedavg, [*TINY, "--dataset", "folder", "--data-dir", root], "one class alone")


def test_writers_by_name(capsys, tmp_path):
    """Clients of names are those of numbers in the names' order, test samples included.

    Without writers_test= a line says that client_acc is not of the clients' own samples."""
    names, more = np.array(["cy", "ann", "bob", "dee"])[np.arange(80) % 4], []
    clients = ["--partition", "natural", "--client-test"]
    data = tables()
    for writers in (names, np.array([2, 0, 1, 3])[np.arange(80) % 4], names.tolist()):
        own_data = dataclasses.replace(data, writers=writers, writers_test=writers[:40])
        torch.manual_seed(0)
        args = flags(*clients)
        parts = common.partition(own_data, args)
        more.append([*parts, *partitions.client_test_indices(own_data, parts, args)])
        assert len(set(own_data.writers[parts[0]])) == 1
    for same_parts in zip(*more):
        assert all(np.array_equal(part, same_parts[0]) for part in same_parts)
    assert "share" not in said(capsys, tmp_path, own_data, linear(), *clients).err
    data = dataclasses.replace(data, writers=names)
    line = "--client-test: no writers_test; each client"
    assert said(capsys, tmp_path, data, linear(), *clients).err.count(line) == 1
    assert line not in said(capsys, tmp_path, data, linear(), *clients[2:]).err


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"writers": np.arange(50) % 4}, "writers"),
        ({"writers": np.arange(80) % 4 / 2}, "writers"),
        ({"writers": np.arange(80) % 4, "writers_test": np.arange(7) % 4}, "writers_test"),
    ],
)
def test_writers_of_other_samples(fields, name):
    data = dataclasses.replace(tables(), **fields)
    line = refusal(common.partition, data, flags("--partition", "natural"))
    assert line.startswith(f"data: {name} must name or number")


def test_writers_may_be_a_list():
    numbers = np.arange(80) % 4
    parts = [
        common.partition(dataclasses.replace(tables(), writers=w), flags("--partition", "natural"))
        for w in (numbers, numbers.tolist())
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*parts))


def test_a_name_is_part_of_the_run_folder_s(tmp_path):
    data = tables()
    named = dataclasses.replace(data, name="heart")
    assert digest_of(named) == digest_of(data).replace("own-", "own-heart-")


# --- tensors


def digest_of(data):
    """Return what --dataset is of a Data."""
    args = flags()
    engine.name_own(args, data, None)
    return args.dataset


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
    flag = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]["dataset"]
    assert flag == digest_of(data)


class Last(nn.Module):
    """An LSTM's output of the last step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


def test_sequences_of_numbers(tmp_path):
    """int64 stays int64 and is not normalised: what an embedding wants."""
    rng = np.random.default_rng(0)
    x = rng.integers(20, size=(90, 9))
    y = x[:, -1] % 2
    data = common.Data(x[:60], y[:60], x[60:], y[60:], 2)
    assert data.x.dtype == torch.int64
    assert torch.equal(data.normalise(data.x), torch.from_numpy(x[:60]))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 5), Last(), common.Classifier(7, 2))
    trained(tmp_path, data, net, "--rounds", "2")
    args = flags("--partition", "iid")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 5), Last(), common.Classifier(7, 2))
    plainly(args, fedavg.local_update, data=data, net=net)


Y = torch.arange(6) % 3
X = torch.zeros(6, 4)


@pytest.mark.parametrize(
    "fields, words",
    [
        ((X, Y[:5], X, Y), "x has 6 samples, and its labels are of shape [5]"),
        ((X[:0], Y[:0], X, Y), "x has 0 samples, and its labels are of shape [0]"),
        ((X, Y.float(), X, Y), "labels of x are torch.float32 from 0.0 to 2.0, not integers"),
        ((X, Y + 1, X, Y), "labels of x are torch.int64 from 1 to 3, not integers from 0 to 2"),
        ((X, Y, X, Y - 1), "labels of x_test are torch.int64 from -1 to 1, not integers"),
        ((X, Y, X[:, :3], Y), "x_test is [6, 3] torch.float32, and x [6, 4] torch.float32; only"),
        ((torch.cat([X[:2], X[2:] / 0]), Y, X, Y), "x holds NaN or infinity, as in [2]"),
    ],
)
def test_bad_tensors(fields, words):
    """The line says what was found."""
    assert words in refusal(common.Data, *fields, 3)


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--augment flip", "argument --augment"),
        ("--image-size 16", "--image-size and"),
        ("--normalise half", "--normalise: not for data="),
        ("--partition natural", "no writers in --dataset"),
    ],
)
def test_flags_that_do_not_go_with_own_data(tmp_path, argv, words):
    net = nn.Sequential(common.Classifier(6, 3))
    with pytest.raises(common.UserError, match=words):
        trained(tmp_path, tables(), net, *argv.split())
    assert not (tmp_path / "run").exists()


def test_a_named_network_wants_images(tmp_path):
    with pytest.raises(common.UserError, match="argument --model: .* pass net="):
        trained(tmp_path, tables(), None, "--model", "cnn")
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


class Pairs:
    """A map-style data set of a list."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


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
        pairs = Pairs([(Image.fromarray(p, mode), i % 2) for i, p in enumerate(pixels)])
        data = own.data_of(pairs, pairs)
        expected = torch.from_numpy(pixels).view(4, 5, 7, -1).permute(0, 3, 1, 2)
        assert torch.equal(data.x, expected)
        arrays = Pairs([(x.numpy(), np.int32(y)) for x, y in zip(data.x, data.y)])
        assert torch.equal(own.data_of(arrays, arrays).x, expected)


GOOD = [(torch.zeros(3), 0), (torch.zeros(3), 1)]


@pytest.mark.parametrize(
    "train, words",
    [
        (Pairs([]), "train has no samples by an index"),
        (Pairs([*GOOD, (torch.zeros(4), 0)]), "train[2] is no .* x is (4,) .* and (3,)"),
        (Pairs([*GOOD, (torch.zeros(3), 0.5)]), "train[2] is no (x, integer y)"),
        (Pairs([*GOOD, (torch.zeros(3), -1)]), "labels of x are torch.int64 from -1 to 1"),
    ],
)
def test_data_sets_that_do_not_fit(train, words):
    line = refusal(own.data_of, train, Pairs(GOOD))
    assert all(word in line for word in words.split(" .* ")), line


# --- folders of images with clients


def make_clients(root, clients=("zoe", "amy", "bob")):
    """Write train/CLIENT/CLASS/* and test alike; amy has no bee. Return root."""
    for client in clients:
        make_folder(root / "made" / client)
        for part in ("train", "test"):
            (root / part).mkdir(exist_ok=True)
            (root / "made" / client / part).rename(root / part / client)
            if client == "amy":
                shutil.rmtree(root / part / client / "bee")
    return root


def shade(path):
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


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
    assert torch.equal(data.x[14], shade(root / "train/zoe/bee/2.png"))


def test_natural_partition_of_a_folder(tmp_path, capsys):
    root = make_clients(tmp_path)
    words = ["--dataset", "folder", "--data-dir", str(root), "--image-size", "32"]
    words += ["--partition", "natural", "--clients", "3", "--client-test"]
    args = flags(*words)
    data = common.load_data(args)
    parts = common.partition(data, args)
    assert sorted(map(len, parts)) == [3, 6, 6]
    assert all(len(set(data.writers[part])) == 1 for part in parts)
    tests = partitions.client_test_indices(data, parts, args)
    for part, test in zip(parts, tests):
        assert set(data.writers[part]) == set(data.writers_test[test])
    _, rows = fedavg.main([*TINY, *words, "--out", str(tmp_path / "run")])
    assert len(rows) == 2
    few = [*TINY, *words, "--clients", "4", "--out", tmp_path / "few"]
    refused(capsys, fedavg, few, "--clients 4", "3 writers")


def nested(root):
    make_folder(root)
    (root / "train" / "cow").mkdir()
    (root / "train" / "ape").rename(root / "train" / "cow" / "ape")


def deep(root):
    make_clients(root / "x")
    (root / "train").mkdir()
    (root / "x" / "train").rename(root / "train" / "year")
    (root / "x" / "test").rename(root / "test")


MISPLACED = [  # how images lie, the partition, and what the line names
    (nested, "iid", "train/bee/0.png and {}/train/cow/ape/0.png"),
    (deep, "iid", "no images"),
    (make_clients, "iid", "train/amy/ape/0.png"),  # clients are not taken for classes
    (make_folder, "natural", "train/ape/0.png"),
]


@pytest.mark.parametrize("make, partition, words", MISPLACED)
def test_layouts_are_told_apart(tmp_path, capsys, make, partition, words):
    root = tmp_path / "images"
    make(root)
    argv = [*TINY, "--dataset", "folder", "--data-dir", root, "--partition", partition]
    layouts = "found; images lie in train/CLASS/*, or with --partition natural train/CLIENT/"
    refused(capsys, fedavg, [*argv, "--out", tmp_path / "run"], words.format(root), layouts)
    assert not (tmp_path / "run").exists()


# --- a split that leaves samples out


def test_partial_split(tmp_path, capsys):
    split = tmp_path / "split.json"
    split.write_text(json.dumps([[5, 3, 1], [0, 599], list(range(100, 140)), [7, 8]]))
    words = ["--partition", "file", "--split-file", str(split)]
    refused(capsys, fedavg, [*TINY, *words, "--out", tmp_path / "run"], "--partial-split")
    args = flags(*words, "--partial-split")
    parts = common.partition(extras.glyphs.glyphs(), args)
    assert [part.tolist() for part in parts[:2]] == [[5, 3, 1], [0, 599]]
    assert sum(map(len, parts)) == 47
    split.write_text(json.dumps([[5, 3, 1], [3], [1], [2]]))
    words += ["--partial-split", "--out", tmp_path / "run"]
    refused(capsys, fedavg, [*TINY, *words], "--split-file", "sample 1 more than once")
    refused(capsys, fedavg, [*TINY, "--partial-split"], "--partial-split", "--partition file")
