"""Random images of a data set's shape, and sentences, for what depends on no content: speeds."""

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


def images(args, samples, test=1):
    """Return a data set of that many images to train and to test on, with labels in turn.

    They have the shape of args.dataset's; of other data sets it repeats the first samples."""
    if args.dataset not in SHAPES:
        data = common.load_data(args)
        rows = torch.arange(samples) % len(data.y)
        return dataclasses.replace(data, x=data.x[rows], y=data.y[rows], writers=None)
    channels, size, classes = SHAPES[args.dataset]
    size = args.image_size or size
    options = {"dtype": torch.uint8, "generator": torch.Generator().manual_seed(args.seed)}
    x = torch.randint(0, 256, (samples + test, channels, size, size), **options)
    y = torch.arange(len(x)) % classes
    return common.Data(x[:samples], y[:samples], x[samples:], y[samples:], classes)


def text(samples, length):
    """Return data and net for common.run(): sentences of up to length random words, and an LSTM.

    A sentence's label is the parity of its sum."""
    torch.manual_seed(0)
    x = torch.randint(1, 50, (samples, length), dtype=torch.int16)
    x *= torch.arange(length) < torch.randint(1, length + 1, (samples, 1))
    y, cut, net = x.long().sum(1) % 2, 3 * samples // 4, common.build_net("lstm", 2, 50, 16)
    torch.nn.init.normal_(net[0][0].vectors)
    data = common.Data(x[:cut], y[:cut], x[cut:], y[cut:], 2, words=[*map(str, range(48))])
    return {"data": data, "net": net}
