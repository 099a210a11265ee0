"""What comes from Python instead of a command line: flags by name, own data."""

import operator

import numpy as np
import torch

import common
from common import UserError


def args_for(script, **values):
    """Return a script's parsed flags, which its main() takes in place of words.

    script: its module. values: of flags, by their names, with underscores; None is the default.
    UserError for what the script would refuse."""
    return script.main(values, run=lambda args, *_, **__: args)


def words(parser, values):
    """Return the words of a command line with values, {name: value}, for a script's own parser.

    A flag without a value takes True or False, and no other does; None is the default. UserError
    for what does not go together; names that are no flags are left to the parser."""
    found = []
    for name, value in values.items():
        flag = common.canonical(f"--{name}", parser._option_string_actions)
        action = parser._option_string_actions.get(flag)
        switch = action is not None and action.nargs == 0
        if value is None:
            continue
        if action and switch != isinstance(value, bool):
            takes = "True or False" if switch else "a value"
            parser.error(f"argument {flag}: takes {takes}, not {value!r}")
        if switch:
            off = f"--no-{flag[2:]}".replace("--no-no-", "--")
            found += [flag] if value else {off} & {*action.option_strings}  # or is off by default
        else:
            listed = isinstance(value, (list, tuple))
            found.append(f"{flag}={','.join(map(str, value)) if listed else value}")
    return found


def numbered(writers, writers_test=None):
    """Return arrays of names, of which the second may be None, as numbers in the names' order.

    UserError for a missing name, and where names and numbers are mixed."""
    names = [*writers, *([] if writers_test is None else writers_test)]
    for kind in (str, bytes, (int, np.integer)):  # numbers too, as pandas' columns of objects
        if all(isinstance(name, kind) for name in names):
            break
    else:
        raise UserError("data: writers and writers_test must all be names, or all be integers")
    number = np.unique(names, return_inverse=True)[1]
    n = len(writers)
    return number[:n], None if writers_test is None else number[n:]


def data_of(train, test):
    """Return a Data of two map-style data sets, which give (x, y) by their index.

    x: a tensor, an array or a Pillow image, of one shape; y: an integer. Each sample is read once,
    random transforms included. UserError names the sample that does not fit."""
    (x, y), (x_test, y_test) = _read(train, "train"), _read(test, "test")
    classes = max(len(getattr(train, "classes", [])), int(max(y.max(), y_test.max())) + 1)
    return common.Data(x, y, x_test, y_test, classes)


def _read(dataset, name):
    """Return all samples (n, ...) and labels (n,) of a data set, which errors call name."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not indexed or not len(dataset):
        raise UserError(f"data_of: {name} has no samples by an index, as map-style data sets do")
    x, y = None, torch.empty(len(dataset), dtype=torch.int64)
    for i in range(len(dataset)):
        try:
            sample, label = dataset[i]
            sample, y[i] = _tensor(sample), operator.index(label)
            x = sample.new_empty(len(dataset), *sample.shape) if x is None else x
            if (sample.shape, sample.dtype) != (x.shape[1:], x.dtype):
                found = f"{tuple(sample.shape)} {sample.dtype}"
                raise TypeError(f"x is {found}, and {tuple(x.shape[1:])} {x.dtype} in {name}[0]")
        except (TypeError, ValueError, RuntimeError) as e:
            raise UserError(f"data_of: {name}[{i}] is no (x, integer y) of one shape: {e}") from e
        x[i] = sample
    return x, y


def _tensor(sample):
    """Return a sample as a tensor; a Pillow image as (channels, height, width) uint8."""
    if not hasattr(sample, "convert"):
        return torch.as_tensor(sample)
    if sample.mode[0] in "IF":  # which convert() would clip at 255
        raise TypeError(f"an image of mode {sample.mode}, with more than 8 bits a pixel")
    pixels = np.array(sample.convert("L" if sample.mode in ("1", "L") else "RGB"))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1)
