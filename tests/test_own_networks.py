"""Own networks: modules cut into blocks, saved weights, and what a method misses in one line."""

import json
import re
import shutil
import zlib

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from conftest import TINY, plainly, refusal, refused, same

import common
import extras.glyphs
import fedavg
from extras import networks
from analysis.runs import open_run


def resnet18(classes, seed=0):
    """Return torchvision's network."""
    torch.manual_seed(seed)
    return torchvision.models.resnet18(num_classes=classes)


RESNET = ["layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]


class Tutorial(nn.Module):
    """A network as tutorials write it: functions between modules, one pooling layer for two."""

    def __init__(self, classes=3, size=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc1 = nn.Linear(16 * ((size - 4) // 2 - 2) ** 2 // 4, 24)
        self.fc2 = nn.Linear(24, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def gradients(net, x, train):
    """Return the logits of x and the gradients of their squares."""
    net.zero_grad()
    out = net.train(train)(x)
    out.square().sum().backward()
    return [out, *(p.grad.clone() for p in net.parameters())]


def test_blocks_of_resnet18():
    """Bit for bit the module's own forward and gradients, in both modes, with its parameters."""
    module = resnet18(10)
    x = torch.randn(4, 3, 32, 32)
    net = networks.blocks(module, RESNET)
    assert [name for name, _ in net.named_children()] == ["stem", *RESNET]
    assert {id(p) for p in net.parameters()} == {id(p) for p in module.parameters()}
    for train in (True, False):
        ours, theirs = gradients(net, x, train), gradients(module, x, train)
        order = [[id(p) for p in n.parameters()] for n in (net, module)]
        assert torch.equal(ours[0], theirs[0])
        for i, p in enumerate(order[0]):
            assert torch.equal(ours[1 + i], theirs[1 + order[1].index(p)])
    h = x
    for block in net[:-1]:
        h = block(h)
    assert torch.equal(net(x), net[-1](h))
    assert isinstance(net[-1], common.Classifier)
    assert [b.shape[1] for b in map(net[:2], [x])] == [module.layer1[1].conv2.out_channels]
    assert same(common.copy_net(net).state_dict(), net.state_dict())


def test_blocks_of_a_tutorial_network():
    """Functions go with the module before them; deeper names, and a single block, do too."""
    torch.manual_seed(0)
    module, x = Tutorial(), torch.randn(5, 3, 16, 16)
    net = networks.blocks(module, ["conv2", "fc1", "fc2"])
    assert torch.equal(net(x), module(x))
    assert net[0](x).shape == (5, 8, 6, 6)
    assert net[1](net[0](x)).shape == (5, 16, 2, 2) or net[1](net[0](x)).ndim == 2
    assert net[:-1](x).shape == (5, 24)
    assert torch.equal(networks.blocks(module, ["fc2"])(x), module(x))
    deep = networks.blocks(resnet18(5), ["layer1.1", "layer2", "fc"])
    assert [name for name, _ in deep.named_children()] == ["stem", "layer1_1", "layer2", "fc"]


class Skips(nn.Module):
    """The first layer's output also goes past the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h)) + h)


class Moody(nn.Module):
    """Drops by a function that is told the mode."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class Branches(Moody):
    def forward(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else self.b(x)


class Named(nn.Module):
    """Has the parts stem, not the first, and body.0 beside body_0."""

    def __init__(self):
        super().__init__()
        self.first, self.stem, self.fc = (nn.Linear(4, 4) for _ in range(3))
        self.body, self.body_0 = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.body_0(self.body(self.stem(self.first(x)))))


def test_a_block_that_may_begin_after_a_skip():
    """The sum is of d's block, and nothing else goes in."""
    module, x = Skips(), torch.randn(3, 4)
    net = networks.blocks(module, ["b", "d"])
    assert [len(list(block.parameters())) for block in net] == [2, 4, 2]
    assert torch.equal(net(x), module(x))


@pytest.mark.parametrize(
    "module, names, words",
    [
        (Named(), ["body.0", "body_0", "fc"], "two of body.0, body_0, fc give blocks of one name"),
        (Skips(), ["c", "d"], "'c' cannot begin a block: b, a go past it"),
        (Skips(), ["c", "a"], "after those that run before"),
        (Skips(), ["e"], "'e' names no part"),
        (Skips(), [], "at least one"),
        (Skips(), ["a"], "'a' is not a linear layer"),
        (Moody(), ["b"], "asks for its mode; use nn.Dropout"),
        (Branches(), ["b"], "torch.fx cannot trace Branches"),
    ],
)
def test_what_cannot_be_cut(module, names, words):
    assert re.search(f"^blocks: .*{words}", refusal(networks.blocks, module, names))


# --- saved weights


def test_init_starts_from_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CORES", 1)  # sums inside operators depend on threads
    first, _ = fedavg.main([*TINY, "--rounds", "1", "--out", str(tmp_path / "a")])
    path = tmp_path / "a" / "model.pt"
    words = [*TINY, "--init", str(path)]
    args = common.flags("x", "x").parse_args(words)
    assert same(common.prepare_net(extras.glyphs.glyphs(), args).state_dict(), first.state_dict())
    weights = fedavg.main([*words, "--out", str(tmp_path / "b")])[0].state_dict()
    assert same(weights, fedavg.main(words, run=plainly)[0].state_dict())
    other = fedavg.main([*TINY, "--out", str(tmp_path / "c")])[0].state_dict()
    assert not same(weights, other)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["flags"]["init"] == str(path)
    assert config["flags"]["init_crc32"] == f"{zlib.crc32(path.read_bytes()):08x}"
    path.write_bytes((tmp_path / "c" / "model.pt").read_bytes())
    path.unlink()
    assert same(open_run(tmp_path / "b").net.state_dict(), weights)


def test_a_run_goes_on_without_the_file_of_init(tmp_path):
    """From its checkpoint; one that was killed before the first wants the same file."""
    path = tmp_path / "init.pt"
    torch.manual_seed(5)
    torch.save(common.build_net("cnn", 10).state_dict(), path)
    words = [*TINY, "--init", str(path), "--local-steps", "2"]
    whole = fedavg.main([*words, "--rounds", "3", "--out", str(tmp_path / "a")])[0].state_dict()
    fedavg.main([*words, "--out", str(tmp_path / "b")])
    kept = path.read_bytes()
    path.unlink()
    on = ["--resume", "--rounds", "3", "--out"]
    assert same(fedavg.main([*on, str(tmp_path / "b")])[0].state_dict(), whole)
    (tmp_path / "b" / "config.json").rename(tmp_path / "config.json")
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b" / "states").mkdir(parents=True)
    (tmp_path / "config.json").rename(tmp_path / "b" / "config.json")
    with pytest.raises(common.UserError, match="init.pt: no such state_dict"):
        fedavg.main([*on, str(tmp_path / "b")])
    torch.save(common.build_net("cnn", 62).state_dict(), path)
    with pytest.raises(common.UserError, match="another --init-crc32"):
        fedavg.main([*on, str(tmp_path / "b")])
    path.write_bytes(kept)
    assert same(fedavg.main([*on, str(tmp_path / "b")])[0].state_dict(), whole)
    configs = [json.loads((tmp_path / k / "config.json").read_text()) for k in "ab"]
    assert [config["flags"]["init_classifier"] for config in configs] == ["as drawn"] * 2


def test_a_classifier_of_other_classes_stays_as_drawn(tmp_path, capsys):
    torch.manual_seed(5)
    net = common.build_net("cnn", 10)
    torch.save(net.state_dict(), tmp_path / "ten.pt")
    args = common.flags("x", "x").parse_args([*TINY, "--init", str(tmp_path / "ten.pt")])
    common.prepare_net(extras.glyphs.glyphs(), args)
    assert capsys.readouterr() == ("", "")  # --quiet
    args.quiet = False
    found = common.prepare_net(extras.glyphs.glyphs(), args).state_dict()
    assert capsys.readouterr().err.splitlines() == [
        f"--init {tmp_path / 'ten.pt'}: its classifier is of another shape; ours starts as drawn"
    ]
    args.init = None
    drawn = common.prepare_net(extras.glyphs.glyphs(), args).state_dict()
    for name, value in found.items():
        source = drawn if name.startswith("classifier.") else net.state_dict()
        assert torch.equal(value, source[name]), name


def bad_inits(path):
    weights = common.build_net("cnn", 62).state_dict()
    name = next(iter(weights))
    torch.save({**weights, name: torch.zeros(1)}, path / "shape.pt")
    torch.save({**weights, name: weights[name] * float("nan")}, path / "nan.pt")
    torch.save({**weights, "more": torch.zeros(1)}, path / "more.pt")
    torch.save(weights, path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save([1, 2], path / "list.pt")
    torch.save(common.build_net("cnn", 62), path / "module.pt")


@pytest.mark.parametrize(
    "name, words",
    [
        ("shape", ["'conv1.0.weight' is of shape (1,), not (16, 3, 5, 5)"]),
        ("nan", ["NaN"]),
        ("more", ["'more' is in it alone"]),
        ("old", ["old.pt: not a readable state_dict"]),
        ("list", ["not a state_dict"]),
        ("module", ["not a readable state_dict"]),
        ("absent", ["no such state_dict"]),
    ],
)
def test_bad_inits(tmp_path, capsys, name, words):
    bad_inits(tmp_path)
    path = tmp_path / f"{name}.pt"
    refused(capsys, fedavg, [*TINY, "--init", path, "--out", tmp_path / "run"], str(path), *words)
    assert not (tmp_path / "run").exists()
