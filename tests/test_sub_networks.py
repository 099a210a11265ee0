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


@pytest.mark.parametrize(
    "name, shapes",
    [  # channels and height of the feature maps of a 32x32 image
        ("vgg9", "32x32 64x32 128x16 128x16 256x8 256x8"),
        ("mobilenet", "32x34 16x34 24x17 32x9 64x5 96x5 160x5 1280x5"),
        ("resnet8", "16x16 16x16 32x8 64x4"),
        ("shufflenet", "24x32 240x16 480x8 960x4"),
        ("squeezenet", "96x16 128x16 128x16 256x8 256x8 384x8 384x8 512x4 512x4"),
        ("cnn", "16x28 32x10"),
        ("resnet56", "16x32 64x32 128x16 256x8"),
        ("resnet18-gn", "64x32 64x32 128x16 256x8 512x4"),
    ],
)
def test_feature_maps(name, shapes):
    net, h = common.build_net(name, 100).eval(), torch.randn(2, 3, 32, 32)
    for block, shape in zip(net, shapes.split()):
        h = block(h)
        channels, size = map(int, shape.split("x"))
        assert h.shape == (2, channels, size, size)
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    groups = {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)}
    assert groups == ({2} if name in common.EXTRA_NETS or "gn" in name else set())  # FedMLB's


def test_simple_cnn_layer_by_layer():
    """Five layers with weights of PyTorch's own distribution, ReLU behind all but the last."""
    net, x = common.build_net("simple-cnn", 10), torch.randn(5, 3, 32, 32)
    layers = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [m.weight.shape[0] for m in layers] == [6, 16, 120, 84, 10]
    h = x
    for conv in layers[:2]:
        h = F.max_pool2d(F.relu(F.conv2d(h, conv.weight, conv.bias)), 2)
    h = h.flatten(1)
    for fc in layers[2:4]:
        h = F.relu(h @ fc.weight.T + fc.bias)
    assert torch.allclose(net[:-1](x), h, atol=1e-6)
    last = layers[4]
    assert torch.allclose(net(x), h @ last.weight.T + last.bias, atol=1e-6)
    for layer in layers:
        bound = layer.weight[0].numel() ** -0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound


@pytest.mark.parametrize(
    "channels, width, kept",
    [
        (256, 0.25, 64),
        (16, 0.8, 16),  # 12.8
        (40, 0.6, 24),
        (64, 0.8, 48),  # 51.2, of which 48 is 93.75%
        (16, 0.7, 16),  # 11.2, of which 8 is 71%
        (128, 0.73, 96),  # 93.44, of which 88 is 94%
        (16, 0.1, 8),
        (3, 0.25, 3),
    ],
)
def test_make_divisible(channels, width, kept):
    """Multiples of 8, halves up, at least 90% of the exact width; never under 8 or above all."""
    assert common.make_divisible(channels, width) == kept


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
        with pytest.raises(common.UserError, match="is not defined; use another --model"):
            common.at_width(net, x, 0.5)


def test_at_width_is_the_narrow_network():
    """A quarter of a bottleneck block, spelled out on the leading channels; gradients stay inside.

    128 -> 64 -> 64 -> 256 channels, stride 2."""
    torch.manual_seed(0)
    stage = common.build_net("resnet56", 10)[3][:1].double().train()
    x = torch.randn(3, 32, 16, 16, dtype=torch.float64)
    (c1, n1, _, c2, n2, _, c3, n3), (c4, n4) = stage[0].branch, stage[0].shortcut

    def norm(x, layer, c):
        layer.bias.data.uniform_(-1, 1)
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        z = (x - mean) / (var + 1e-5).sqrt()
        return z * layer.weight[:c, None, None] + layer.bias[:c, None, None]

    h = norm(F.conv2d(x, c1.weight[:16, :32]), n1, 16).relu()
    h = norm(F.conv2d(h, c2.weight[:16, :16], stride=2, padding=1), n2, 16).relu()
    h = norm(F.conv2d(h, c3.weight[:64, :16]), n3, 64)
    expected = (h + norm(F.conv2d(x, c4.weight[:64, :32], stride=2), n4, 64)).relu()
    out = common.at_width(stage, x, 0.25)
    assert out.shape == (3, 64, 8, 8)
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-10)
    out.square().sum().backward()
    grad = c2.weight.grad
    assert grad[:16, :16].abs().min() > 0
    assert grad[16:].abs().max() == 0 == grad[:, 16:].abs().max()
    assert n1.num_batches_tracked == 0


@pytest.mark.parametrize(
    "layer, shape, word",
    [
        (nn.Conv2d(16, 16, 3, groups=2), (1, 16, 8, 8), "grouped"),
        (nn.LSTM(16, 16), (1, 2, 16), "LSTM"),
    ],
)
def test_at_width_refuses_what_it_cannot_slice(layer, shape, word):
    with pytest.raises(common.UserError, match=word):
        common.at_width(layer, torch.randn(shape), 0.5)


def test_bypasses_and_shuffles():
    """Fire modules 3, 5 and 7 add their input, as do the 2 + 2 + 3 + 2 + 2 - 1 units of MobileNet
    that keep size and width; ShuffleNet deals the channels of 3 groups in turn."""
    blocks = common.build_net("squeezenet", 10).named_children()
    assert [name for name, b in blocks if isinstance(b, Bypass)] == ["fire3", "fire5", "fire7"]
    units = common.build_net("mobilenet", 10).modules()
    assert sum(isinstance(m, Bypass) for m in units) == 1 + 2 + 3 + 2 + 2
    block = Bypass(torch.nn.Conv2d(2, 2, 1))
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(block(x), block.branch(x) + x)
    layers = common.build_net("shufflenet", 10).modules()
    shuffle = next(m for m in layers if isinstance(m, torch.nn.ChannelShuffle))
    numbers = torch.arange(6.0).view(1, 6, 1, 1)
    assert shuffle(numbers).flatten().tolist() == [0, 2, 4, 1, 3, 5]


def layers(module):
    """Return the kinds of layers of a module in order, without their 2d."""
    leaves = [m for m in module.modules() if not any(m.children())]
    return " ".join(type(m).__name__.removesuffix("2d") for m in leaves)


SHUFFLE = "Conv GroupNorm ReLU ChannelShuffle Conv GroupNorm Conv GroupNorm"


@pytest.mark.parametrize(
    "name, part, expected",
    [
        ("shufflenet", "stage2.0", f"AvgPool {SHUFFLE} ReLU"),  # which halves: it pools its input
        ("shufflenet", "stage2.1.branch", SHUFFLE),
        ("mobilenet", "stage2.1", "Conv GroupNorm ReLU6 Conv GroupNorm ReLU6 Conv GroupNorm"),
        ("mobilenet", "head", "*Conv GroupNorm Conv GroupNorm ReLU6"),
        ("squeezenet", "fire2", "Conv GroupNorm ReLU Conv GroupNorm ReLU Conv GroupNorm ReLU"),
        ("vgg9", "0", "Conv GroupNorm ReLU"),
        ("vgg9", "2", "MaxPool Conv GroupNorm ReLU"),
    ],
)
def test_layers_of_the_small_networks(name, part, expected):
    """Which layers follow each other in a unit."""
    net = common.build_net(name, 10)
    found = layers(net[int(part)] if part.isdigit() else net.get_submodule(part))
    assert found == expected or (expected[0] == "*" and found.endswith(expected[1:]))
    for m in net.modules():
        if name == "shufflenet" and isinstance(m, nn.AvgPool2d):
            assert (m.kernel_size, m.stride, m.padding) == (3, 2, 1)
        if name == "vgg9" and isinstance(m, nn.Conv2d):
            assert not m.bias.any()
