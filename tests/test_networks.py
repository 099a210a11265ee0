"""The small networks of extras/backbones.py, and the table of all networks."""

import pytest
import torch

import common
import fedmlb
from extras.backbones import Bypass

SMALL = [  # sizes and branch points of FedMLB's authors; feature maps of a 32x32 image
    ("vgg9", 3_539_428, 6, [(32, 32), (64, 32), (128, 16), (128, 16), (256, 8), (256, 8)]),
    (
        "mobilenet",
        2_369_380,
        7,
        [(32, 34), (16, 34), (24, 17), (32, 9), (64, 5), (96, 5), (160, 5), (1280, 5)],
    ),
    ("resnet8", 83_892, 4, [(16, 16), (16, 16), (32, 8), (64, 4)]),  # ours, 6n + 2 layers
    ("shufflenet", 1_012_108, 4, [(24, 32), (240, 16), (480, 8), (960, 4)]),
    (
        "squeezenet",
        781_156,
        8,
        [(96, 16), *[(128, 16)] * 2, *[(256, 8)] * 2, *[(384, 8)] * 2, *[(512, 4)] * 2],
    ),
]


@pytest.mark.parametrize("name, count, cuts, shapes", SMALL)
def test_small_networks(name, count, cuts, shapes):
    net = common.build_net(name, 100).eval()
    assert sum(p.numel() for p in net.parameters()) == count
    assert fedmlb.pathway_cuts(net) == list(range(1, cuts + 1))
    h = torch.randn(2, 3, 32, 32)
    for block, (channels, size) in zip(net, shapes):
        h = block(h)
        assert h.shape == (2, channels, size, size)
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 100)
    groups = {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)}
    assert groups == ({2} if name in common.EXTRA_NETS else set())  # FedMLB's


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


def test_layers_of_the_small_networks():
    """Which layers follow each other in a unit; the one that halves a ShuffleNet stage pools its
    input beside the branch, a MobileNet unit ends without activation; biases of VGG-9's
    convolutions start at zero."""
    unit = "Conv GroupNorm ReLU ChannelShuffle Conv GroupNorm Conv GroupNorm"
    stage = common.build_net("shufflenet", 10).stage2
    assert layers(stage[0]) == f"AvgPool {unit} ReLU"
    pool, branch = stage[0][0]
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    assert layers(stage[1].branch) == layers(branch) == unit
    mobilenet = common.build_net("mobilenet", 10)
    unit = "Conv GroupNorm ReLU6 Conv GroupNorm ReLU6 Conv GroupNorm"
    assert layers(mobilenet.stage2[1]) == unit
    assert layers(mobilenet.head).endswith("Conv GroupNorm Conv GroupNorm ReLU6")
    squeezenet = common.build_net("squeezenet", 10)
    assert layers(squeezenet.fire2) == " ".join(3 * ["Conv GroupNorm ReLU"])
    vgg9 = common.build_net("vgg9", 10)
    assert layers(vgg9[0]) == "Conv GroupNorm ReLU"
    assert layers(vgg9[2]) == "MaxPool Conv GroupNorm ReLU"
    convolutions = [m for m in vgg9.modules() if isinstance(m, torch.nn.Conv2d)]
    assert not any(m.bias.any() for m in convolutions)


@pytest.mark.parametrize("name", ["mobilenet", "shufflenet", "squeezenet"])
def test_no_sub_networks_of_groups_and_concatenations(name):
    net = common.build_net(name, 10).train()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(common.at_width(net, x, 1.0), net(x))
    with pytest.raises(common.UserError, match="is not defined; use another --model"):
        common.at_width(net, x, 0.5)
