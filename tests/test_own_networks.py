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
from conftest import TINY, plainly, refusal, same

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
        for a, b in zip(gradients(net, x, train), gradients(module, x, train), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(net(x), net[-1](net[:-1](x)))
    assert isinstance(net[-1], common.Classifier)
    assert net[:2](x).shape[1] == module.layer1[1].conv2.out_channels
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


def drops(net, x):
    """Drop by a function that is told the mode."""
    return net.b(F.dropout(net.a(x), 0.5, net.training))


def branches(net, x):
    """Take a path by the values of the input."""
    return net.b(net.a(x)) if x.sum() > 0 else net.b(x)


SKIPS = Parts("a b c d", skips)
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
        (Parts("a b", drops), ["b"], "asks for its mode; use nn.Dropout"),
        (Parts("a b", branches), ["b"], "torch.fx cannot trace Parts"),
    ],
)
def test_what_cannot_be_cut(module, names, words):
    assert re.search(f"^blocks: .*{words}", refusal(networks.blocks, module, names))


# --- saved weights


def test_init_starts_from_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CORES", 1)  # sums inside operators depend on threads
    path = tmp_path / "init.pt"
    torch.manual_seed(5)
    weights = common.build_net("cnn", 62).state_dict()
    torch.save(weights, path)
    words = [*TINY, "--init", str(path), "--rounds", "1"]
    args = common.flags("x", "x").parse_args(words)
    assert same(common.prepare_net(extras.glyphs.glyphs(), args).state_dict(), weights)
    trained = fedavg.main([*words, "--out", str(tmp_path / "run")])[0].state_dict()
    assert same(trained, fedavg.main(words, run=plainly)[0].state_dict())
    flags = json.loads((tmp_path / "run" / "config.json").read_text())["flags"]
    assert flags["init"] == str(path)
    assert flags["init_crc32"] == f"{zlib.crc32(path.read_bytes()):08x}"
    path.unlink()
    assert same(open_run(tmp_path / "run").net.state_dict(), trained)


def test_a_run_goes_on_without_the_file_of_init(tmp_path):
    """From its checkpoint; one that was killed before the first wants the same file."""
    path, out = tmp_path / "init.pt", tmp_path / "b"
    torch.manual_seed(5)
    torch.save(common.build_net("cnn", 10).state_dict(), path)
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
    with pytest.raises(common.UserError, match="init.pt: no such state_dict"):
        fedavg.main(on)
    torch.save(common.build_net("cnn", 62).state_dict(), path)
    with pytest.raises(common.UserError, match="another --init-crc32"):
        fedavg.main(on)
    path.write_bytes(kept)
    assert same(fedavg.main(on)[0].state_dict(), whole)
    assert json.loads(config)["flags"]["init_classifier"] == "as drawn"


def test_a_classifier_of_other_classes_stays_as_drawn(tmp_path, capsys):
    path, data = tmp_path / "ten.pt", extras.glyphs.glyphs()
    saved = common.build_net("cnn", 10).state_dict()
    torch.save(saved, path)
    args = common.flags("x", "x").parse_args([*TINY, "--init", str(path)])
    common.prepare_net(data, args)
    assert capsys.readouterr() == ("", "")  # --quiet
    args.quiet = False
    found = common.prepare_net(data, args).state_dict()
    line = f"--init {path}: its classifier is of another shape; ours starts as drawn\n"
    assert capsys.readouterr().err == line
    args.init = None
    drawn = common.prepare_net(data, args).state_dict()
    for name, value in found.items():
        assert torch.equal(value, (drawn if name.startswith("classifier.") else saved)[name]), name
