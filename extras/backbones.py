"""The small networks of FedMLB's appendix, with GroupNorm of two groups.

Their exact shapes are those of the authors' later repository (FedACG). Each function takes the
channels and the size of the images and returns the blocks, [(name, module), ...], and the width of
the features, as common.NETS wants it. torchvision's networks of these names are others: with batch
norm or no norm at all, and ShuffleNet's second version."""

import torch
import torch.nn as nn

from common import Residual, global_pool, he_init

# units, outputs and stride of the first unit, for 32x32 images
MOBILE_STAGES = (1, 16, 1), (2, 24, 2), (3, 32, 2), (4, 64, 2), (3, 96, 1), (3, 160, 1), (1, 320, 1)
SHUFFLE_STAGES = (4, 240), (8, 480), (4, 960)  # units, outputs
FIRES = (16, 16, 32, 32, 48, 48, 64, 64)  # channels to squeeze to; outputs: 8 times that


class Bypass(nn.Module):
    """branch(x) + x."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return self.branch(x) + x


class Concat(nn.ModuleList):
    """The channels of all modules' outputs; what follows could not take a leading slice."""

    sliceable = False

    def forward(self, x):
        return torch.cat([module(x) for module in self], 1)


class Head(nn.Sequential):
    """A block after which FedMLB's authors do not branch, though it has parameters."""

    branches = False


class PoolLarger(nn.AdaptiveAvgPool2d):
    """Adaptive pooling where there is something to pool.

    Its backward pass is not deterministic on a GPU, and --deterministic refuses it."""

    def forward(self, x):
        return x if x.shape[2:] == (self.output_size,) * 2 else super().forward(x)


def _layer(inputs, outputs, size, activation=nn.ReLU, **options):
    """Return the list of a convolution with bias, GroupNorm and activation (None: without).

    options: of nn.Conv2d; the padding keeps the size of the map if they do not name one."""
    options.setdefault("padding", size // 2)
    layers = [nn.Conv2d(inputs, outputs, size, **options), nn.GroupNorm(2, outputs)]
    return [*layers, activation()] if activation else layers


def vgg9(channels, size):
    """VGG-9 with GroupNorm."""
    blocks = []
    for i, outputs in enumerate((32, 64, 128, 128, 256, 256), 1):
        layers = _layer(channels, outputs, 3)
        nn.init.zeros_(layers[0].bias)
        pool = [nn.MaxPool2d(2)] if i in (3, 5) else []
        blocks.append((f"conv{i}", nn.Sequential(*pool, *layers)))
        channels = outputs
    pool = [nn.MaxPool2d(2), PoolLarger(4), nn.Flatten()]
    linear = [nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return he_init([*blocks, ("head", Head(*pool, *linear))], 512)


def mobilenet(channels, size):
    """MobileNetV2 with GroupNorm, its stem a 1x1 convolution with padding 1."""
    blocks = [("stem", nn.Sequential(*_layer(channels, 32, 1, nn.ReLU6, padding=1)))]
    inputs = 32
    for i, (units, outputs, stride) in enumerate(MOBILE_STAGES, 1):
        expansion = 1 if i == 1 else 6
        stage = [_inverted(inputs, outputs, stride, expansion)]
        stage += [_inverted(outputs, outputs, 1, expansion) for _ in range(units - 1)]
        blocks.append((f"stage{i}", nn.Sequential(*stage)))
        inputs = outputs
    _, last = blocks.pop()
    head = Head(*last, *_layer(inputs, 1280, 1, nn.ReLU6))
    return [*blocks, ("head", head), global_pool()], 1280


def _inverted(inputs, outputs, stride, expansion):
    """Return an inverted residual block: wider by expansion within, with depthwise convolution."""
    width = inputs * expansion
    branch = nn.Sequential(
        *_layer(inputs, width, 1, nn.ReLU6),
        *_layer(width, width, 3, nn.ReLU6, stride=stride, groups=width),
        *_layer(width, outputs, 1, None),
    )
    return Bypass(branch) if stride == 1 and inputs == outputs else branch


def shufflenet(channels, size):
    """ShuffleNet (version 1) of three groups, with GroupNorm."""
    blocks = [("stem", nn.Sequential(*_layer(channels, 24, 3)))]
    inputs = 24
    for i, (units, outputs) in enumerate(SHUFFLE_STAGES, 2):
        stage = [_shuffled(inputs, outputs)]
        stage += [_shuffled(outputs, outputs) for _ in range(units - 1)]
        blocks.append((f"stage{i}", nn.Sequential(*stage)))
        inputs = outputs
    return [*blocks, global_pool()], 960


def _shuffled(inputs, outputs):
    """Return a unit of ShuffleNet.

    The first of a stage is wider, halves the resolution and puts its input beside the branch."""
    first = inputs != outputs
    middle = outputs // 4
    branch = nn.Sequential(
        *_layer(inputs, middle, 1, groups=3),
        nn.ChannelShuffle(3),
        *_layer(middle, middle, 3, None, stride=2 if first else 1, groups=middle),
        *_layer(middle, outputs - inputs if first else outputs, 1, None, groups=3),
    )
    if first:
        return nn.Sequential(Concat([nn.AvgPool2d(3, 2, 1), branch]), nn.ReLU())
    return Residual(branch, nn.Identity())


def squeezenet(channels, size):
    """SqueezeNet with GroupNorm and bypasses around every other fire module.

    Its last 1x1 convolution, averaged over all positions, is the classifier on averaged
    features."""
    blocks = [("stem", nn.Sequential(*_layer(channels, 96, 3), nn.MaxPool2d(2)))]
    inputs = 96
    for i, squeeze in enumerate(FIRES, 2):
        module = _fire(inputs, squeeze, 8 * squeeze)
        if i in (4, 8):
            module = nn.Sequential(module, nn.MaxPool2d(2))
        blocks.append((f"fire{i}", Head(*module) if i == 9 else module))
        inputs = 8 * squeeze
    return [*blocks, global_pool()], 512


def _fire(inputs, squeeze, outputs):
    """Return a fire module: a 1x1 convolution to squeeze channels, then a 1x1 beside a 3x3."""
    expand = Concat([nn.Sequential(*_layer(squeeze, outputs // 2, k)) for k in (1, 3)])
    module = nn.Sequential(*_layer(inputs, squeeze, 1), expand)
    return Bypass(module) if inputs == outputs and outputs < 512 else module
