"""What comes from Python instead of a command line: flags by name, own data and networks."""

import hashlib
import operator

import numpy as np
import torch

import common
from common import UserError
from extras.identity import Code


def args_for(script, values):
    """Return the parsed flags of script, a module; see common.args_for()."""
    return script.main(values, run=lambda args, *_, **__: args)


def words(parser, values):
    """Return the words of a command line with values, {name: value}, for a script's own parser.

    A flag without a value takes True or False, and no other does; None is the default. UserError
    for what does not go together; names that are no flags are left to the parser."""
    found = []
    for name, value in values.items():
        flag = common.canonical(f"--{name}")
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


def note(args, data, net):
    """Note in args what data (a Data or None) and net (a module or None) are: own-DIGEST.

    In place of --dataset and --model: another data set, or a network of other layers, other options
    of them or another forward, is not resumed, and not compared as if it were the same. UserError
    where a flag asks for what is done to data sets that are read."""
    if data is not None:
        if args.image_size:
            raise UserError("argument --image-size: of data sets that are read, not of data=")
        if args.normalise != "dataset":
            raise UserError("argument --normalise: of data sets that are read; pass mean= and std=")
        args.dataset = f"own-{data_digest(data)}"
    if net is not None:
        shapes = [(name, list(v.shape), str(v.dtype)) for name, v in net.state_dict().items()]
        args.model = f"own-{Code().digest((net, shapes))}"


def digest(parts):
    """Return eight hexadecimal digits of the contents of buffers."""
    found = hashlib.blake2b(digest_size=4)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def data_digest(data):
    """Return the digest of all that a Data holds."""
    parts = []
    for name, value in sorted(vars(data).items()):
        array = value.cpu().numpy() if torch.is_tensor(value) else value
        known = isinstance(array, np.ndarray)
        shape = (array.shape, str(array.dtype)) if known else repr(array)
        parts += [repr((name, shape)).encode(), np.ascontiguousarray(array).data if known else b""]
    return digest(parts)


def of(train, test):
    """Return a Data of two map-style data sets, which give (x, y) by their index.

    x: a tensor, an array or a Pillow image, of one shape; y: an integer. Each sample is read once,
    so that random transforms are drawn once too. The classes are those that train names, or as many
    as the labels say. UserError names the sample that does not fit."""
    (x, y), (x_test, y_test) = _read(train, "train"), _read(test, "test")
    classes = max(len(getattr(train, "classes", [])), int(max(y.max(), y_test.max())) + 1)
    return common.Data(x, y, x_test, y_test, classes)


def _read(dataset, name):
    """Return all samples (n, ...) and labels (n,) of a data set, which errors call name."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(f"Data.of: {name} has no length or no index; map-style data sets do")
    if not len(dataset):
        raise UserError(f"Data.of: {name} is empty")
    x, y = None, torch.empty(len(dataset), dtype=torch.int64)
    for i in range(len(dataset)):
        try:
            sample, label = dataset[i]
            if getattr(label, "dtype", None) in (torch.float16, torch.float32, torch.float64):
                raise TypeError(f"its y is a {label.dtype}; y.long() makes integers")
            sample, y[i] = _tensor(sample), operator.index(label)
        except (TypeError, ValueError, RuntimeError) as e:
            raise UserError(f"Data.of: {name}[{i}] is no (x, integer y): {e}") from e
        x = sample.new_empty(len(dataset), *sample.shape) if x is None else x
        if (sample.shape, sample.dtype) != (x.shape[1:], x.dtype):
            found, first = (
                f"{tuple(s)} {t}" for s, t in ((sample.shape, sample.dtype), (x.shape[1:], x.dtype))
            )
            raise UserError(f"Data.of: {name}[{i}] is {found}, where {name}[0] is {first}")
        x[i] = sample
    return x, y


def _tensor(sample):
    """Return a sample as a tensor; a Pillow image as (channels, height, width) uint8."""
    if not hasattr(sample, "convert"):
        return torch.as_tensor(sample)
    pixels = np.array(sample.convert("L" if sample.mode in ("1", "L") else "RGB"))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1)
