"""The data set of --dataset glyphs: 62 drawn characters, by writers of their own hands."""

import copy
import functools

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import common

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
GLYPHS = (20_000, 4_000)  # training and test images


def load(args):
    """Return the data set of --dataset glyphs."""
    return glyphs(seed=args.data_seed)


def glyphs(seed=0):
    """Return the 62 characters 0-9 A-Z a-z as 32x32 RGB images, drawn with Pillow's own font.

    Each is drawn by a writer with a slant, size, stroke and colours of his own, about 100 training
    images a writer. Deterministic by seed."""
    return copy.copy(_glyphs(GLYPHS, seed))  # a caller may change it


@functools.lru_cache(1)
def _glyphs(sizes, seed):
    """Return the data set of glyphs; sizes: (training images, test images)."""
    n = sum(sizes)
    writers = max(2, n // 120)
    rng = common.seeded_rng("glyphs", seed)
    y, writer = rng.integers(62, size=n), rng.integers(writers, size=n)

    def style(spread_writers, spread_images):
        """Draw a writer's habit, and how closely each of his images follows it: (n,) float32."""
        habit = rng.normal(0, spread_writers, writers)
        return (habit[writer] + rng.normal(0, spread_images, n)).astype(np.float32)

    slant = style(0.25, 0.08)
    turn = style(0.12, 0.08)  # radians
    weight = style(0.4, 0.1) + 0.5  # of the stroke: 0 thin, 1 bold
    size = 1.1 + style(0.12, 0.06)
    stretch = 1 + style(0.10, 0.05)  # of the height alone
    right = style(0.03, 0.06)  # shifts, in half image sides
    down = style(0.03, 0.06)
    ink = rng.uniform(0, 0.35, (writers, 3))  # RGB
    paper = rng.uniform(0.6, 1, (writers, 3))
    ink = (ink[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32)
    paper = (paper[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32)

    y, weight = torch.from_numpy(y), torch.from_numpy(weight).clamp(0, 1).view(n, 1, 1, 1)
    ink, paper = (torch.from_numpy(colour).view(n, 3, 1, 1) for colour in (ink, paper))
    theta = _affine_maps(turn, slant, size, stretch, right, down)
    thin = _stencils(64)
    bold = F.max_pool2d(thin, 3, 1, 1)
    images = []
    for i in torch.arange(n).split(2000):
        stroke = torch.lerp(thin[y[i]], bold[y[i]], weight[i])
        grid = F.affine_grid(theta[i], (len(i), 1, 32, 32), align_corners=False)
        mask = F.grid_sample(stroke, grid, align_corners=False)
        image = torch.lerp(paper[i], ink[i], mask)
        image += torch.from_numpy(rng.standard_normal(image.shape, np.float32)) * 0.08
        images.append((image.clamp(0, 1) * 255).round().byte())
    x, x_test = torch.cat(images).split(sizes)
    y, y_test = y.split(sizes)
    writers, writers_test = np.split(writer, sizes[:1])
    fields = {"writers": writers, "writers_test": writers_test, "names": [*CHARACTERS]}
    return common.Data(x.clone(), y, x_test.clone(), y_test, 62, **fields)


def _stencils(side):
    """Return the characters, white on black: (62, 1, side, side) float32 in [0, 1]."""
    font = ImageFont.load_default(size=44)
    stencils = np.zeros((62, 1, side, side), np.float32)
    for i, character in enumerate(CHARACTERS):
        image = Image.new("L", (side, side))
        ImageDraw.Draw(image).text((side / 2, side / 2), character, 255, font, anchor="mm")
        stencils[i, 0] = np.asarray(image) / 255
    return torch.from_numpy(stencils)


def _affine_maps(turn, slant, size, stretch, right, down):
    """Return the maps (n, 2, 3) from a pixel's place in the image to its place in the stencil.

    A rotation by turn, times a shear by slant, times scales 1 / size and stretch, and a shift; all
    arguments (n,)."""
    cos, sin = np.cos(turn) / size, np.sin(turn) / size
    x = cos, sin + slant * cos, right  # in the stencil, of the image's x, its y, and 1
    y = -sin * stretch, (cos - slant * sin) * stretch, down
    return torch.from_numpy(np.stack([*x, *y], 1)).view(-1, 2, 3)
