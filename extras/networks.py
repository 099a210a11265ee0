"""Networks from elsewhere: a module cut into blocks, saved weights."""

import pathlib
import sys
import zlib
from collections import OrderedDict

import torch
import torch.fx
import torch.nn as nn

import common
import run_folder
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


def _resumes(args):
    """Return whether the weights to go on from are a checkpoint's."""
    return args.resume and pathlib.Path(args.out, "checkpoint.pt").exists()


def load_init(net, args):
    """Load the weights of --init, a state_dict, into net, but not to go on from a checkpoint.

    args.init_crc32 notes the file's checksum for config.json. The classifier, net's last block, may
    be of another shape: it then stays as it is, which args.init_classifier notes, and a line on
    stderr says unless args.quiet. UserError for what does not fit."""
    if _resumes(args):
        return
    path, out = args.init, pathlib.Path(args.out or "")
    weights, own = run_folder.load(path, "state_dict"), net.state_dict()
    args.init_crc32 = f"{zlib.crc32(pathlib.Path(path).read_bytes()):08x}"
    if args.resume:  # it was killed before its first checkpoint
        config = run_folder.read_config(out)
        now = config["flags"] | {"init_crc32": args.init_crc32}
        run_folder.check_same(out, config, "flags", now)
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
