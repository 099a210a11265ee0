"""Random images of a data set's shape, for what depends on no content: costs and speeds."""

import dataclasses

import torch

import common

SHAPES = {  # channels, pixels, classes
    "cifar100": (3, 32, 100),
    "cifar10": (3, 32, 10),
    "mnist": (1, 28, 10),
    "emnist": (1, 28, 62),
    "femnist": (1, 28, 62),
    "tiny-imagenet": (3, 64, 200),
    "imagenet-200": (3, 224, 200),
    "glyphs": (3, 32, 62),
}


def images(args, samples):
    """Return a data set of that many training samples, with labels in turn, and one test sample.

    Images have the shape of args.dataset; of other data sets it repeats the first samples."""
    if args.dataset not in SHAPES:
        data = common.load_data(args)
        rows = torch.arange(samples) % len(data.y)
        return dataclasses.replace(data, x=data.x[rows], y=data.y[rows], writers=None)
    channels, size, classes = SHAPES[args.dataset]
    size = args.image_size or size
    generator = torch.Generator().manual_seed(args.seed)
    shape = (samples, channels, size, size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.arange(samples) % classes
    return common.Data(x, y, x[:1], y[:1], classes)
