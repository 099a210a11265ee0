"""Networks from elsewhere: a module cut into blocks, saved weights, a trial before training."""

import copy
import dataclasses
import hashlib
import pathlib
import sys
from collections import OrderedDict

import numpy as np
import torch
import torch.fx
import torch.nn as nn
import torch.nn.functional as F

import common
from common import UserError

CUT = "common.blocks(module, names) cuts a module into them"


# --- a module cut into blocks


def blocks(module, names):
    """Return module as an nn.Sequential whose blocks begin where the named parts of it do.

    module: its forward takes one tensor, and torch.fx can trace it. names: of its parts, in the
    order in which they run, the last of them its last linear layer, which runs alone: "layer1",
    "layer1.0.conv2". What runs before the first of them is the block "stem", or "stem_" where a
    named part is called so. The parameters are module's own, not copies. UserError where it cannot
    be cut so."""
    graph = _trace(module)
    nodes = list(graph.nodes)
    starts = [_start(nodes, name) for name in names]
    if starts != sorted(set(starts)) or not names:
        raise UserError("blocks: name at least one part, and each behind those that run before it")
    places = {node: i for i, node in enumerate(nodes)}
    cuts = [1, *starts, len(nodes) - 1]  # of placeholder and output there is one each
    keys, stem = [name.replace(".", "_") for name in names], "stem"
    while stem in keys:
        stem += "_"
    if len(set(keys)) < len(keys):
        same = [name for name, key in zip(names, keys) if keys.count(key) > 1]
        raise UserError(f"blocks: {' and '.join(same)} give blocks of one name; cut at one of them")
    found = OrderedDict()
    for key, name, begin, end in zip([stem, *keys], ["stem", *names], cuts, cuts[1:]):
        if begin < end:
            found[key] = _block(module, nodes, places, begin, end, name)
    found[keys[-1]] = _classifier(found[keys[-1]], names[-1])
    return nn.Sequential(found)


def _trace(module):
    """Return the graph of module's forward; UserError where it has none, or one of each mode."""
    training = module.training
    try:
        graphs = [torch.fx.Tracer().trace(module.train(mode)) for mode in (True, False)]
    except Exception as e:  # whatever a forward may do with a stand-in for its input
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"blocks: torch.fx cannot trace {type(module).__name__} ({why})") from e
    finally:
        module.train(training)
    if str(graphs[0]) != str(graphs[1]):
        kind = type(module).__name__
        raise UserError(f"blocks: {kind} asks for its mode; use nn.Dropout, not self.training")
    inputs = [node for node in graphs[0].nodes if node.op == "placeholder"]
    outputs = [node for node in graphs[0].nodes if node.op == "output"]
    if len(inputs) != 1 or not isinstance(outputs[0].args[0], torch.fx.Node):
        raise UserError(f"blocks: {type(module).__name__} must take one tensor and return one")
    return graphs[0]


def _start(nodes, name):
    """Return the place of the first node of the named part; UserError if there is none."""
    for i, node in enumerate(nodes):
        if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
            return i
    raise UserError(f"blocks: {name!r} names no part that the module's forward calls")


def _block(module, nodes, places, begin, end, name):
    """Return the block of nodes begin to end; UserError unless a single tensor goes in."""
    inside = nodes[begin:end]
    needed = [n for node in nodes[begin:] for n in node.all_input_nodes if places[n] < begin]
    entering = list(OrderedDict.fromkeys(needed))
    if len(entering) != 1:
        others = ", ".join(str(node) for node in entering)
        raise UserError(
            f"blocks: {name!r} cannot begin a block: {others} go past it; cut elsewhere"
        )
    graph, copies = torch.fx.Graph(), {}
    copies[entering[0]] = graph.placeholder("x")
    for node in inside:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    leaving = nodes[-1].args[0] if end == len(nodes) - 1 else None
    later = [n for node in nodes[end:] for n in node.all_input_nodes if n in copies]
    graph.output(copies[leaving or (later or inside)[-1]])
    return torch.fx.GraphModule(module, graph, "Block")


def _classifier(block, name):
    """Return the common.Classifier with the weights of a block that is a linear layer alone."""
    calls = [node for node in block.graph.nodes if node.op not in ("placeholder", "output")]
    layer = block.get_submodule(name) if calls[0].op == "call_module" else None
    if len(calls) != 1 or not isinstance(layer, nn.Linear):
        raise UserError(f"blocks: {name!r} is not a linear layer that runs last and alone")
    if not {"weight", "bias"} <= layer._parameters.keys():
        raise UserError(
            f"blocks: {name!r} makes its weights of others, as by weight_norm; undo that"
        )
    last = common.Classifier(layer.in_features, layer.out_features, layer.bias is not None)
    last.weight, last.bias = layer.weight, layer.bias
    return last


# --- saved weights


def note_init(args):
    """Note the digest of --init's file in args; UserError if there is none.

    A run that goes on from its checkpoint has no need of the file."""
    if not _resumes(args):
        if not pathlib.Path(args.init).is_file():
            raise UserError(f"--init {args.init}: no such file")
        args.init_sha256 = file_digest(args.init)


def _resumes(args):
    """Return whether the weights to go on from are a checkpoint's."""
    return args.resume and pathlib.Path(args.out, "checkpoint.pt").exists()


def load_init(net, args):
    """Load the weights of --init, a state_dict, into net, but not to go on from a checkpoint.

    The classifier, net's last block, may be of another shape: it then stays as it is, which
    args.init_classifier notes for config.json, and a line on stderr says unless args.quiet.
    UserError for what does not fit."""
    if _resumes(args):
        return
    path = args.init
    weights, own = common.load(path, "state_dict"), net.state_dict()
    if not isinstance(weights, dict) or not all(map(torch.is_tensor, weights.values())):
        raise UserError(f"--init {path}: not a state_dict, {{name: tensor}}")
    last = f"{next(reversed(net._modules))}."
    unknown, missing = (sorted(set(a) - set(b)) for a, b in ((weights, own), (own, weights)))
    for names, what in ((missing, "lacks"), (unknown, "has")):
        if names:
            raise UserError(f"--init {path}: {what} {names[0]!r}, unlike the network")
    kept = {k: weights[k] for k in own if weights[k].shape == own[k].shape}
    for k in own:
        if k not in kept and not k.startswith(last):
            found, wanted = tuple(weights[k].shape), tuple(own[k].shape)
            raise UserError(f"--init {path}: {k!r} is of shape {found}, not {wanted}")
    if any(not v.isfinite().all() for v in kept.values() if v.is_floating_point()):
        raise UserError(f"--init {path}: holds NaN or infinity")
    if len(kept) < len(own):
        args.init_classifier = "as drawn"
        message = "its classifier is of another shape; ours starts as drawn"
        if not args.quiet:
            print(f"--init {path}: {message}", file=sys.stderr)
    common.load_weights(net, own | kept)


def file_digest(path):
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --- a trial before training


def tried(make_net, method):
    """Return make_net, a partial prepare_net of run(), which first tries the method: rehearse()."""

    def make(data):
        rehearse(method, data, make_net.keywords["args"], make_net.keywords["net"])
        return make_net(data)

    return make


def rehearse(method, data, args, net):
    """Raise UserError where a method cannot train net (None: the one that args name) on data.

    Mistakes in the method's own code, such as a name that is not defined, are raised as they are.
    One step on a few samples, on the CPU, on copies: torch's random numbers are as before."""
    if data.paths:  # whose images are not here
        return
    count = min(4, len(data.y))
    tensors = {k: getattr(data, k)[:4].cpu() for k in ("x", "y", "x_test", "y_test")}
    statistics = {k: v.cpu() for k in ("mean", "std") if (v := getattr(data, k)) is not None}
    writers = {k: v[:4] for k in ("writers", "writers_test") if (v := getattr(data, k)) is not None}
    few = dataclasses.replace(data, **tensors, **statistics, **writers)
    args = copy.copy(args)
    args.quiet, args.capture = True, False
    args.device, args.batch_size, args.drop_last = "cpu", count, False
    args.local_steps, args.persist_opt, args.deterministic = 1, False, False
    with torch.random.fork_rng([]):
        net = common.prepare_net(few, args, None, net)
        _check_outputs(net, few)
        lacks = _lacks(net)
        _watch(net)
        try:
            if method.adapt:
                method.adapt(net, args)
            worker = common.Worker(net, few, args, 1)
            client = common.Client(0, np.arange(count), {}, 1.0)
            server = {"round": 1, "clients": [0]}
            for _ in worker.train(client, server, net.state_dict(), method.local_update):
                pass
        except UserError:
            raise
        except (RuntimeError, IndexError, ValueError, AttributeError) as e:  # as of shapes
            parts = {f"'{type(module).__name__}'" for module in net.modules()}
            own = isinstance(e, AttributeError) and str(e).split(" ")[0] not in parts
            if own or "allocate memory" in str(e):
                raise
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
            has_not = f"; the network has no {', no '.join(lacks)}" if lacks else ""
            raise UserError(f"net: {args.script}.py cannot train it: {why}{has_not}") from e


def _check_outputs(net, data):
    """Raise UserError unless net gives each sample as many numbers as there are classes."""
    x = common.channels_last(data.normalise(data.x_test))
    try:
        with torch.no_grad():
            out = net(x)
            F.cross_entropy(out, data.y_test)
    except Exception as e:  # of the caller's own forward
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"net: fails on x of shape {tuple(x.shape)}, {x.dtype}: {why}") from e
    wanted = len(x), data.classes
    if tuple(out.shape) != wanted:
        raise UserError(f"net: gives {tuple(out.shape)} for {wanted[0]} samples, not {wanted}")


def _lacks(net):
    """Return what methods may miss in net, a list of words."""
    convolution = any(isinstance(m, nn.Conv2d) for m in net.modules())
    linear = isinstance(net, nn.Sequential) and isinstance(net[-1], nn.Linear)
    found = {"blocks": isinstance(net, nn.Sequential), "convolution": convolution}
    return [name for name, there in (found | {"linear last block": linear}).items() if not there]


def _watch(net):
    """Let net raise UserError where a method takes blocks or features that it has not."""
    kind = type(net)

    def no_blocks(net, *_):
        raise UserError(f"net: this method needs an nn.Sequential of blocks; {CUT}")

    def no_features(*_):
        raise UserError("net: this method needs a linear layer as the last block, on flat features")

    def item(net, index):
        part = kind.__getitem__(net, index)
        if index == slice(None, -1) and not isinstance(kind.__getitem__(net, -1), nn.Linear):
            part.forward = no_features
        return part

    if isinstance(net, nn.Sequential):
        watched = {"__getitem__": item}
    else:
        watched = dict.fromkeys(("__getitem__", "__iter__", "__len__"), no_blocks)
    net.__class__ = type(kind.__name__, (kind,), watched)
