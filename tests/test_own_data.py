"""Own data of any sort, and own networks: modules cut into blocks, saved weights."""

import dataclasses
import functools
import json
import re
import shutil
import zlib

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from conftest import TINY, flags, plainly, refusal, same
from PIL import Image
from support import make_clients

import common
import engine
import extras.glyphs
import fedavg
from analysis.runs import open_run
from extras import images, networks, own, partitions

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


def linear(outputs=3):
    return nn.Sequential(nn.Linear(6, outputs))


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
    """As by numbers in the names' order, also far ones that differ by 1, and those below 0.

    Without writers_test= a line says whose client_acc is."""
    four = ["cy", "ann", "bob", "dee"], [2, 0, 1, 3]
    names, numbers = (np.array(values)[np.arange(80) % 4] for values in four)
    clients, data, found = ["--partition", "natural", "--client-test"], tables(), []
    far, below = numbers + 1_700_000_000_000_000_000, (numbers - 1) * 10**11
    for writers in (names, numbers, names.tolist(), far, far.tolist(), below):
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


def test_arrays_become_tensors():
    """Of any kind of number, names of np.unique and samples to choose best.pt by included."""
    names, y = np.unique(["bee", "ant", "bee"], return_inverse=True)
    x, held = np.eye(3), {"x_val": np.eye(3)[:2], "y_val": y[:2].astype(np.int32)}
    data = common.Data(x, y.astype(np.uint16), torch.eye(3).half(), y, 2, names=names, **held)
    assert data.names == ["ant", "bee"]
    assert {v.dtype for v in (data.x, data.x_test, data.x_val)} == {torch.float32}
    for labels in data.y, data.y_test, data.y_val:
        assert labels.dtype == torch.int64 and labels.tolist() == y[: len(labels)].tolist()


def test_a_volume_trains(tmp_path):
    """torch refuses channels_last to a network with 3-d convolutions."""
    x, y = torch.randn(24, 1, 4, 4, 4), torch.arange(24) % 3
    net = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), common.Classifier(16, 3))
    found, rows = trained(tmp_path, common.Data(x, y, x, y, 3), net)
    assert np.isfinite(rows[-1]["test_loss"]) and found[0].weight.shape == (2, 1, 3, 3, 3)


def test_a_shared_weight_takes_the_server_s_step():
    """From 1 half of the way to 3, under both of its names."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    for p in net.parameters():
        nn.init.ones_(p)
    received = common.Received()
    received.mean = {name: torch.full_like(v, 3) for name, v in net.state_dict().items()}
    common.average(net, received, {}, flags("--server-lr", "0.5"))
    assert all((v == 2).all() for v in net.state_dict().values())


def test_a_mean_of_pixels_alone():
    """What of mean= and std= is not given is computed, as both are."""
    x, y = torch.randint(0, 256, (9, 3, 4, 4), dtype=torch.uint8), torch.arange(9) % 2
    both = common.Data(x, y, x, y, 2)
    for name, other in ("mean", "std"), ("std", "mean"):
        half = common.Data(x, y, x, y, 2, **{name: torch.full((3,), 0.25)})
        assert getattr(half, name).flatten().tolist() == [0.25] * 3
        assert torch.equal(getattr(half, other), getattr(both, other))


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


def test_sequences_of_numbers(tmp_path):
    """int64 stays int64 and is not normalised: what an embedding wants."""
    x = np.random.default_rng(0).integers(20, size=(90, 9))
    y = x[:, -1] % 2
    data = common.Data(x[:60], y[:60], x[60:], y[60:], 2)
    assert data.x.dtype == torch.int64
    assert torch.equal(data.normalise(data.x), torch.from_numpy(x[:60]))
    net = nn.Sequential(nn.Embedding(20, 5), nn.Flatten(), common.Classifier(45, 2))
    args = flags("--partition", "iid", "--out", str(tmp_path / "run"))
    _, rows = common.run(args, fedavg.local_update, data=data, net=net)
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


@pytest.mark.parametrize("model, shape", [("resnet8", (8, 8, 3)), ("cnn", (3, 8, 12))])
def test_images_of_another_shape_are_told(model, shape):
    """With the channels last, or not square where the network needs squares."""
    x, y = torch.zeros(6, *shape, dtype=torch.uint8), torch.arange(6) % 3
    data, words = common.Data(x, y, x, y, 3), ["--model", model]
    assert f"not [6, {', '.join(map(str, shape))}]" in refusal(common.net_for, data, flags(*words))
    oblong = common.Data(*[x.new_zeros(6, 3, 8, 12), y] * 2, 3)
    assert common.net_for(oblong, flags("--model", "resnet8"))(oblong.x.float()).shape == (6, 3)


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


def test_data_of_two_data_sets():
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
B, P = X.byte(), X.long().view(6, 1, 2, 2)
GOOD = [(torch.zeros(3), 0), (torch.zeros(3), 1)]
NATURAL, FROZEN = flags("--partition", "natural"), linear().requires_grad_(False)


def of_writers(**fields):
    return common.partition(dataclasses.replace(tables(), **fields), NATURAL)


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda: common.Data(X, Y[:5], X, Y, 3), "x has 6 samples, and its labels are of"),
        (lambda: common.Data(X[:0], Y[:0], X, Y, 3), "x has 0 samples, and its labels are of"),
        (lambda: common.Data(X, Y.float(), X, Y, 3), "x are torch.float32 from 0.0 to 2.0, not"),
        (lambda: common.Data(X, Y + 1, X, Y, 3), "from 1 to 3, not integers from 0 to 2"),
        (lambda: common.Data(X, Y, X, Y - 1, 3), "x_test are torch.int64 from -1 to 1, not"),
        (lambda: common.Data(X, Y, X[:, :3], Y, 3), "x_test is [6, 3] torch.float32, and x [6, 4]"),
        (lambda: common.Data(X / 0, Y, X, Y, 3), "x holds NaN or infinity, as in [0]"),
        (lambda: common.Data(X, Y, X, Y, 3, x_val=X, y_val=Y + 1), "x_val are torch.int64 from 1"),
        (lambda: common.Data(X, Y, X, Y, 3, mean=(0.5,)), "mean and std are of uint8"),
        (lambda: common.Data(B, Y, B, Y, 3, mean=[127.0] * 4), "mean must be of pixels in [0, 1]"),
        (lambda: common.Data(B, Y, B, Y, 3, std=[0.5] * 2), "a channel, not [0.5, 0.5]"),
        (lambda: common.Data(B, Y, B, Y, 3, std=[0, 0.5, 0.5, 0.5]), "std must be of pixels in"),
        (lambda: common.Data(X, Y, X, Y, 3, writers=W[:5]), "data: writers must name or number"),
        (lambda: of_writers(writers=["ann", None] * 40), "must all be names, or all be"),
        (lambda: of_writers(writers=W / 2), "data: writers must name or number"),
        (lambda: of_writers(writers=W, writers_test=W[:7]), "data: writers_test must name or"),
        (lambda: common.prepare_net(tables(), flags(), net=FROZEN), "has frozen parameters"),
        (lambda: common.prepare_net(tables(), flags(), net=linear(2)), "for labels from 0 to 2"),
        (lambda: common.net_for(common.Data(*[P, Y] * 2, 3), flags()), "of uint8 or floats"),
        (lambda: own.data_of([], GOOD), "train has no samples by an index"),
        (lambda: own.data_of(torch.utils.data.ChainDataset([]), GOOD), "has no samples by an"),
        (lambda: own.data_of([(Image.new("I;16", (2, 2)), 0)], GOOD), "with more than 8 bits"),
        (lambda: own.data_of([*GOOD, (torch.zeros(4), 0)], GOOD), "train[2] is no (x, integer y)"),
        (lambda: own.data_of([*GOOD, (torch.zeros(3), 0.5)], GOOD), "train[2] is no (x, integer"),
    ],
)
def test_what_does_not_fit(f, words):
    assert words in refusal(f)


RESNET = ["layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]


def gradients(net, x, train):
    net.zero_grad()
    out = net.train(train)(x)
    out.square().sum().backward()
    return [out, *(p.grad.clone() for p in net.parameters())]


def test_blocks_of_resnet18():
    """Bit for bit the module's own forward and gradients, in both modes, with its parameters."""
    torch.manual_seed(0)
    module = torchvision.models.resnet18(num_classes=10)
    x = torch.randn(4, 3, 32, 32)
    net = networks.blocks(module, RESNET)
    assert [name for name, _ in net.named_children()] == ["stem", *RESNET]
    assert {id(p) for p in net.parameters()} == {id(p) for p in module.parameters()}
    for train in (True, False):
        for a, b in zip(gradients(net, x, train), gradients(module, x, train), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(net(x), net[-1](net[:-1](x)))
    assert isinstance(net[-1], common.Classifier)
    assert net[:2](x).shape[1] == module.layer1[1].conv2.out_channels
    assert same(common.copy_net(net).state_dict(), net.state_dict())
    deep = networks.blocks(module, ["layer1.1", "layer2", "fc"])
    assert [name for name, _ in deep.named_children()] == ["stem", "layer1_1", "layer2", "fc"]


class Parts(nn.Module):
    """Linear layers by their names, and a function of them and x."""

    def __init__(self, names, f):
        super().__init__()
        self.f = f
        for name in names.split():
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        return self.f(self, x)


def skips(net, x):
    """The first layer's output also goes past the second."""
    h = net.a(x)
    return net.d(net.c(net.b(h)) + h)


SKIPS = Parts("a b c d", skips)
DROPS = Parts("a b", lambda net, x: net.b(F.dropout(net.a(x), 0.5, net.training)))
BRANCHES = Parts("a b", lambda net, x: net.b(net.a(x)) if x.sum() > 0 else net.b(x))
NAMED = Parts("first stem body_0 fc", lambda net, x: net.fc(net.body_0(net.body(net.stem(x)))))
NAMED.body = nn.Sequential(nn.Linear(4, 4))  # body.0 beside body_0


def test_a_block_that_may_begin_after_a_skip():
    """The sum is of d's block, and nothing else goes in."""
    x = torch.randn(3, 4)
    net = networks.blocks(SKIPS, ["b", "d"])
    assert [len(list(block.parameters())) for block in net] == [2, 4, 2]
    assert torch.equal(net(x), SKIPS(x))


@pytest.mark.parametrize(
    "module, names, words",
    [
        (NAMED, ["body.0", "body_0", "fc"], "two of body.0, body_0, fc give blocks of one name"),
        (SKIPS, ["c", "d"], "'c' cannot begin a block: b, a go past it"),
        (SKIPS, ["c", "a"], "after those that run before"),
        (SKIPS, ["e"], "'e' names no part"),
        (SKIPS, [], "at least one"),
        (SKIPS, ["a"], "'a' is not a linear layer"),
        (DROPS, ["b"], "asks for its mode; use nn.Dropout"),
        (BRANCHES, ["b"], "torch.fx cannot trace Parts"),
    ],
)
def test_what_cannot_be_cut(module, names, words):
    assert re.search(f"^blocks: .*{words}", refusal(networks.blocks, module, names))


def saved(path, classes):
    torch.manual_seed(5)
    weights = common.build_net("cnn", classes).state_dict()
    torch.save(weights, path)
    return weights


def test_init_starts_from_the_weights(tmp_path, one_thread):
    path, out = tmp_path / "init.pt", tmp_path / "run"
    weights, words = saved(path, 62), [*TINY, "--init", str(path), "--rounds", "1"]
    found = common.prepare_net(extras.glyphs.glyphs(), flags("--init", str(path)))
    assert same(found.state_dict(), weights)
    trained = fedavg.main([*words, "--out", str(out)])[0].state_dict()
    assert same(trained, fedavg.main(words, run=plainly)[0].state_dict())
    noted = json.loads((out / "config.json").read_text())["flags"]
    crc = f"{zlib.crc32(path.read_bytes()):08x}"
    assert (noted["init"], noted["init_crc32"]) == (str(path), crc)
    path.unlink()
    assert same(open_run(out).net.state_dict(), trained)


def test_a_run_goes_on_without_the_file_of_init(tmp_path):
    """From its checkpoint; one that was killed before the first wants the same file."""
    path, out = tmp_path / "init.pt", tmp_path / "b"
    saved(path, 10)
    words = [*TINY, "--init", str(path), "--local-steps", "2"]
    whole = fedavg.main([*words, "--rounds", "3", "--out", str(tmp_path / "a")])[0].state_dict()
    fedavg.main([*words, "--out", str(out)])
    kept = path.read_bytes()
    path.unlink()
    on = ["--resume", "--rounds", "3", "--out", str(out)]
    assert same(fedavg.main(on)[0].state_dict(), whole)
    config = (out / "config.json").read_bytes()
    shutil.rmtree(out)
    (out / "states").mkdir(parents=True)
    (out / "config.json").write_bytes(config)
    assert "init.pt: no such state_dict" in refusal(fedavg.main, on)
    saved(path, 62)
    assert "another --init-crc32" in refusal(fedavg.main, on)
    path.write_bytes(kept)
    assert same(fedavg.main(on)[0].state_dict(), whole)
    assert json.loads(config)["flags"]["init_classifier"] == "as drawn"


@pytest.mark.parametrize("quiet", [True, False])
def test_a_classifier_of_other_classes_stays_as_drawn(tmp_path, capsys, quiet):
    path, data = tmp_path / "ten.pt", extras.glyphs.glyphs()
    weights, args = saved(path, 10), flags("--init", str(path))
    args.quiet = quiet
    found = common.prepare_net(data, args).state_dict()
    line = f"--init {path}: its classifier is of another shape; ours starts as drawn\n"
    assert capsys.readouterr().err == ("" if quiet else line)
    drawn = common.prepare_net(data, flags()).state_dict()
    for name, value in found.items():
        expected = drawn if name.startswith("classifier.") else weights
        assert torch.equal(value, expected[name]), name


def test_a_classifier_of_other_features_stays_as_drawn(tmp_path):
    """Whole, also where its bias would fit."""
    old, new = (nn.Sequential(nn.Flatten(), common.Classifier(n, 3)) for n in (8, 18))
    torch.save(old.state_dict(), tmp_path / "old.pt")
    args = flags("--init", str(tmp_path / "old.pt"))
    assert same(common.prepare_net(tables(), args, net=new).state_dict(), new.state_dict())
