"""The networks: sizes, blocks, narrow sub-networks; the small ones of extras/backbones.py."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import common
from extras.backbones import Bypass


@pytest.mark.parametrize(
    "name, classes, channels, size, projection, count",
    [  # methods' published sizes; docs/networks.md has the others
        ("resnet56", 10, 3, 32, 0, 591_322),
        ("resnet56", 10, 3, 32, 256, 722_906),
        ("resnet56", 100, 3, 32, 256, 746_036),
        ("resnet18", 200, 3, 64, 256, 11_621_896),
        ("resnet18-gn", 200, 3, 32, 0, 11_271_432),
        ("cnn-mcmahan", 10, 3, 28, 0, 1_664_970),
        ("cnn-mcmahan", 62, 1, 28, 0, 1_690_046),
    ],
)
def test_parameter_counts(name, classes, channels, size, projection, count):
    net = common.build_net(name, classes, channels, size, projection).eval()
    assert sum(p.numel() for p in net.parameters()) == count
    x = torch.randn(2, channels, size, size)
    assert net(x).shape == (2, classes)
    assert torch.equal(net[-1](net[:-1](x)), net(x))


SHAPES = """vgg9 32x32 64x32 128x16 128x16 256x8 256x8
mobilenet 32x34 16x34 24x17 32x9 64x5 96x5 160x5 1280x5
resnet8 16x16 16x16 32x8 64x4
shufflenet 24x32 240x16 480x8 960x4
squeezenet 96x16 128x16 128x16 256x8 256x8 384x8 384x8 512x4 512x4
cnn 16x28 32x10
resnet56 16x32 64x32 128x16 256x8
resnet18-gn 64x32 64x32 128x16 256x8 512x4"""


@pytest.mark.parametrize("line", SHAPES.splitlines())
def test_feature_maps(line):
    """Channels and height of the feature maps of a 32x32 image."""
    name, *shapes = line.split()
    net, h = common.build_net(name, 100).eval(), torch.randn(2, 3, 32, 32)
    for block, shape in zip(net, shapes):
        h = block(h)
        channels, size = map(int, shape.split("x"))
        assert h.shape == (2, channels, size, size)
    groups = {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)}
    assert groups == ({2} if name in common.EXTRA_NETS or "gn" in name else set())  # FedMLB's


def test_simple_cnn_layer_by_layer():
    """Five layers with weights of PyTorch's own distribution, ReLU behind all but the last."""
    net, x = common.build_net("simple-cnn", 10), torch.randn(5, 3, 32, 32)
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [m.weight.shape[0] for m in layers] == [6, 16, 120, 84, 10]
    h = x
    for conv in layers[:2]:
        h = F.max_pool2d(conv(h).relu(), 2)
    h = layers[3](layers[2](h.flatten(1)).relu()).relu()
    assert torch.allclose(net(x), layers[4](h), atol=1e-6)
    for layer in layers:
        bound = layer.weight[0].numel() ** -0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound


def test_make_divisible():
    """Multiples of 8, halves up, at least 90% of the exact width; never under 8 or above all.

    Of 51.2 48 is 93.75%; of 11.2 8 is 71%; of 93.44 88 is 94%."""
    cases = [(256, 0.25), (16, 0.8), (40, 0.6), (64, 0.8), (16, 0.7), (128, 0.73), (16, 0.1)]
    found = [common.make_divisible(*case) for case in [*cases, (3, 0.25), (50, 1.0)]]
    assert found == [64, 16, 24, 48, 16, 96, 8, 3, 50]


@pytest.mark.parametrize(
    "name", ["resnet56", "resnet18-gn", "cnn", "mobilenet", "shufflenet", "squeezenet"]
)
def test_at_width_one_is_the_plain_call(name):
    """Of groups and concatenations there are no narrow networks."""
    torch.manual_seed(0)
    net = common.build_net(name, 10).train()
    x, before = torch.randn(4, 3, 32, 32), {k: v.clone() for k, v in net.named_buffers()}
    narrow = common.at_width(net, x, 1.0)
    assert all(torch.equal(v, before[k]) for k, v in net.named_buffers())
    assert torch.equal(narrow, net(x))
    if name in ("mobilenet", "shufflenet", "squeezenet"):
        kind = "grouped convolutions" if name == "mobilenet" else "Concat"
        with pytest.raises(common.UserError, match=f"{kind} is not defined; use another --model"):
            common.at_width(net, x, 0.5)


def test_at_width_takes_any_batch_norm():
    """Of vectors, also of flattened maps, or without weights; running statistics stay."""
    one, two = nn.BatchNorm1d(16), nn.BatchNorm2d(16, affine=False)
    for layer, x in (one, torch.randn(4, 16)), (two, torch.randn(4, 16, 2, 2)):
        narrow, whole = (common.at_width(layer, *a) for a in ((x[:, :8], 0.5), (x, 1)))
        assert torch.allclose(narrow, whole[:, :8])
        assert layer.running_mean.tolist() == [0] * 16
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Flatten(), nn.BatchNorm1d(64))
    x = torch.randn(4, 3, 2, 2)
    whole = common.at_width(net, x, 1)
    assert torch.allclose(common.at_width(net, x, 0.5), whole[:, : 8 * 4])


@pytest.mark.parametrize("between, inputs", [(nn.GLU(), 32), (nn.ConstantPad1d((0, 81), 0), 145)])
def test_at_width_one_with_other_layers_between(between, inputs):
    norm = nn.BatchNorm1d(inputs, track_running_stats=False)
    net = nn.Sequential(nn.Linear(12, 64), between, norm, nn.Linear(inputs, 8))
    x = torch.randn(4, 12)
    assert torch.equal(common.at_width(net, x, 1.0), net(x))


def test_bypasses():
    """Fire modules 3, 5 and 7 add their input, as do the 2 + 2 + 3 + 2 + 2 - 1 units of MobileNet
    that keep size and width."""
    blocks = common.build_net("squeezenet", 10).named_children()
    assert [name for name, b in blocks if isinstance(b, Bypass)] == ["fire3", "fire5", "fire7"]
    units = common.build_net("mobilenet", 10).modules()
    assert sum(isinstance(m, Bypass) for m in units) == 1 + 2 + 3 + 2 + 2
    block, x = Bypass(nn.Conv2d(2, 2, 1)), torch.randn(1, 2, 3, 3)
    assert torch.equal(block(x), block.branch(x) + x)


SHUFFLE = "Conv GroupNorm ReLU ChannelShuffle Conv GroupNorm Conv GroupNorm"
UNITS = [
    ("shufflenet", "stage2.0", f"AvgPool {SHUFFLE} ReLU"),  # which halves: it pools its input
    ("shufflenet", "stage2.1.branch", SHUFFLE),
    ("mobilenet", "stage2.1", "Conv GroupNorm ReLU6 Conv GroupNorm ReLU6 Conv GroupNorm"),
    ("mobilenet", "head", "*Conv GroupNorm Conv GroupNorm ReLU6"),
    ("squeezenet", "fire2", "Conv GroupNorm ReLU Conv GroupNorm ReLU Conv GroupNorm ReLU"),
    ("vgg9", "0", "Conv GroupNorm ReLU"),
    ("vgg9", "2", "MaxPool Conv GroupNorm ReLU"),
]


@pytest.mark.parametrize("name, part, expected", UNITS)
def test_layers_of_the_small_networks(name, part, expected):
    """Which layers follow each other in a unit; ShuffleNet deals the channels of 3 groups."""
    net = common.build_net(name, 10)
    unit = net[int(part)] if part.isdigit() else net.get_submodule(part)
    leaves = [m for m in unit.modules() if not any(m.children())]
    found = " ".join(type(m).__name__.removesuffix("2d") for m in leaves)
    assert found == expected or (expected[0] == "*" and found.endswith(expected[1:]))
    for m in leaves:
        if isinstance(m, nn.AvgPool2d):
            assert (m.kernel_size, m.stride, m.padding) == (3, 2, 1)
        if isinstance(m, nn.ChannelShuffle):
            assert m.groups == 3
        if name == "vgg9" and isinstance(m, nn.Conv2d):
            assert not m.bias.any()
