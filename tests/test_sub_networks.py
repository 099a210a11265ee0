"""The networks of the main tables, their blocks, and their narrow sub-networks."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import common


@pytest.mark.parametrize(
    "name, classes, channels, size, projection, count",
    [  # methods' published sizes
        ("resnet56", 100, 3, 32, 0, 614_452),
        ("resnet56", 10, 3, 32, 0, 591_322),
        ("resnet56", 10, 3, 32, 256, 722_906),
        ("resnet56", 100, 3, 32, 256, 746_036),
        ("resnet18", 200, 3, 64, 0, 11_279_112),
        ("resnet18", 200, 3, 64, 256, 11_621_896),
        ("resnet18-gn", 100, 3, 32, 0, 11_220_132),
        ("resnet18-gn", 200, 3, 32, 0, 11_271_432),
        ("resnet50", 100, 3, 32, 256, 28_246_948),
        ("cnn", 10, 3, 32, 0, 151_802),
        ("cnn-moon", 10, 3, 32, 0, 92_626),
        ("simple-cnn", 10, 3, 32, 0, 62_006),
        ("cnn-mcmahan", 10, 1, 28, 0, 1_663_370),
        ("cnn-mcmahan", 10, 3, 28, 0, 1_664_970),
        ("cnn-mcmahan", 62, 1, 28, 0, 1_690_046),
    ],
)
def test_parameter_counts(name, classes, channels, size, projection, count):
    net = common.build_net(name, classes, channels, size, projection)
    assert sum(p.numel() for p in net.parameters()) == count
    x = torch.randn(2, channels, size, size)
    net.eval()
    assert net(x).shape == (2, classes)
    assert torch.equal(net[-1](net[:-1](x)), net(x))


def counts(name, classes):
    """Return the number of parameters of each block."""
    blocks = common.build_net(name, classes)
    return [sum(p.numel() for p in block.parameters()) for block in blocks]


def test_block_sizes():
    assert counts("resnet56", 100)[1:4] == [27_648, 113_152, 447_488]
    assert counts("resnet18-gn", 100) == [1_856, 147_968, 525_568, 2_099_712, 8_393_728, 0, 51_300]
    assert counts("cnn", 10) == [1_216, 12_832, 96_120, 10_164, 7_140, 21_760, 2_570]
    assert common.nbytes(common.build_net("resnet56", 100).state_dict()) == 2_494_240


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


def test_outputs_of_the_blocks_of_cnn():
    """Of convolutions post-ReLU and pre-pooling; the 256 features have no activation."""
    net, x = common.build_net("cnn", 10), torch.randn(1, 3, 32, 32)
    assert net[0](x).shape == (1, 16, 28, 28)
    assert net[:2](x).shape == (1, 32, 10, 10)
    assert net[:2](x).min() == 0
    assert net[:-1](x).min() < 0


def test_make_divisible():
    """Multiples of 8, halves up, at least 90% of the exact width.

    0.25 * 256 = 64; 0.8 * 16 = 12.8 -> 16; 0.6 * 40 = 24; 0.8 * 64 = 51.2 -> 48 (93.75%); 0.7 * 16
    = 11.2 -> 8 would be 71%, so 16; 0.73 * 128 = 93.44 -> 96, though 88 would be 94%; never under 8
    or above all channels."""
    cases = [
        (256, 0.25),
        (16, 0.8),
        (40, 0.6),
        (64, 0.8),
        (16, 0.7),
        (128, 0.73),
        (16, 0.1),
        (3, 0.25),
    ]
    found = [common.make_divisible(channels, width) for channels, width in cases]
    assert found == [64, 16, 24, 48, 16, 96, 8, 3]


@pytest.mark.parametrize("name", ["resnet56", "resnet18-gn", "cnn"])
def test_at_width_one_is_the_plain_call(name):
    torch.manual_seed(0)
    net = common.build_net(name, 10).train()
    x, before = torch.randn(4, 3, 32, 32), {k: v.clone() for k, v in net.named_buffers()}
    narrow = common.at_width(net, x, 1.0)
    assert all(torch.equal(v, before[k]) for k, v in net.named_buffers())
    assert torch.equal(narrow, net(x))


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


def test_at_width_of_a_network_that_flattens_maps():
    """cnn at 0.5: 8 and 16 channels, 16 * 25 inputs of the first linear layer, all classes."""
    net, x = common.build_net("cnn", 10), torch.randn(2, 3, 32, 32)
    h = F.conv2d(x, net[0][0].weight[:8], net[0][0].bias[:8]).relu()
    h = F.conv2d(F.max_pool2d(h, 2), net[1][1].weight[:16, :8], net[1][1].bias[:16]).relu()
    h = F.max_pool2d(h, 2).flatten(1)
    for fc, n in ((net[2][2], 64), (net[3][0], 40), (net[4][0], 40), (net[5][0], 128)):
        h = F.linear(h, fc.weight[:n, : h.shape[1]], fc.bias[:n])
        h = h if fc is net[5][0] else h.relu()
    expected = F.linear(h, net[6].weight[:, :128], net[6].bias)
    assert torch.allclose(common.at_width(net, x, 0.5), expected, atol=1e-6)


def test_at_width_refuses_what_it_cannot_slice():
    with pytest.raises(common.UserError, match="grouped"):
        common.at_width(nn.Conv2d(16, 16, 3, groups=2), torch.randn(1, 16, 8, 8), 0.5)
    with pytest.raises(common.UserError, match="LSTM"):
        common.at_width(nn.LSTM(16, 16), torch.randn(1, 2, 16), 0.5)
