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

# --- a module cut into blocks


def blocks(module, names):
    """Return module as an nn.Sequential whose blocks begin where the named parts of it do.

    module: its forward takes one tensor, and torch.fx can trace it. names: of its parts, in the
    order in which they run, the last of them its last linear layer, which runs alone: "layer1",
    "layer1.0.conv2". What runs before the first of them is the block "stem", or "stem_" where a
    named part is called so. The parameters are module's own, not copies. UserError where it cannot
    be cut so."""
    nodes = list(_trace(module).nodes)
    starts = [_start(nodes, name) for name in names]
    if starts != sorted(set(starts)) or not names:
        raise UserError("blocks: name at least one part, and each after those that run before it")
    keys = ["stem_" if "stem" in names else "stem", *(name.replace(".", "_") for name in names)]
    if len(set(keys)) < len(keys):
        raise UserError(f"blocks: two of {', '.join(names)} give blocks of one name")
    found = OrderedDict()
    cuts = [1, *starts, len(nodes) - 1]  # of placeholder and output there is one each
    for key, name, begin, end in zip(keys, ["stem", *names], cuts, cuts[1:]):
        if begin < end:
            found[key] = _block(module, nodes, begin, end, name)
    found[key] = _classifier(found[key], name)
    return nn.Sequential(found)


def _trace(module):
    """Return the graph of module's forward; UserError where it has none, or one of each mode."""
    kind, training = type(module).__name__, module.training
    try:
        graph, other = (torch.fx.Tracer().trace(module.train(mode)) for mode in (True, False))
    except Exception as e:  # whatever a forward may do with a stand-in for its input
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"blocks: torch.fx cannot trace {kind} ({why})") from e
    finally:
        module.train(training)
    if str(graph) != str(other):
        raise UserError(f"blocks: {kind} asks for its mode; use nn.Dropout, not self.training")
    *inputs, output = (node for node in graph.nodes if node.op in ("placeholder", "output"))
    if len(inputs) != 1 or not isinstance(output.args[0], torch.fx.Node):
        raise UserError(f"blocks: {kind} must take one tensor and return one")
    return graph


def _start(nodes, name):
    """Return the place of the first node of the named part; UserError if there is none."""
    for i, node in enumerate(nodes):
        if node.op == "call_module" and f"{node.target}.".startswith(f"{name}."):
            return i
    raise UserError(f"blocks: {name!r} names no part that the module's forward calls")


def _block(module, nodes, begin, end, name):
    """Return the block of nodes begin to end; UserError unless a single tensor goes in."""
    earlier = set(nodes[:begin])
    entering = {n: None for node in nodes[begin:] for n in node.all_input_nodes if n in earlier}
    if len(entering) != 1:
        others = ", ".join(map(str, entering))
        raise UserError(
            f"blocks: {name!r} cannot begin a block: {others} go past it; cut elsewhere"
        )
    graph = torch.fx.Graph()
    copies = {n: graph.placeholder("x") for n in entering}
    for node in nodes[begin:end]:
        copies[node] = graph.node_copy(node, copies.get)
    # what later nodes read of it; the last node's input is what the module returns
    leaving = [n for node in nodes[end:] for n in node.all_input_nodes if n in copies]
    graph.output(copies[(leaving or nodes[begin:end])[-1]])
    return torch.fx.GraphModule(module, graph, "Block")


def _classifier(block, name):
    """Return the common.Classifier with the weights of a block that is a linear layer alone."""
    _, *calls, _ = block.graph.nodes
    layer = block.get_submodule(name) if calls[0].op == "call_module" else None
    if len(calls) != 1 or not isinstance(layer, nn.Linear):
        raise UserError(f"blocks: {name!r} is not a linear layer that runs last and alone")
    last = common.Classifier(layer.in_features, layer.out_features, layer.bias is not None)
    last.weight, last.bias = layer.weight, layer.bias
    return last


# --- saved weights


def load_init(net, args):
    """Load the weights of --init, a state_dict, into net, but not to go on from a checkpoint.

    args.init_crc32 notes the file's checksum for config.json. A classifier, net's last block, of
    another shape stays as it is; args.init_classifier notes that, and a line says so."""
    if args.resume and pathlib.Path(args.out, "checkpoint.pt").exists():
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
    odd = sorted(weights.keys() ^ own.keys(), key=str)
    if odd:
        where = "it" if odd[0] in weights else "the network"
        raise UserError(f"--init {path}: {odd[0]!r} is in {where} alone")
    last = f"{next(reversed(net._modules))}."
    kept = {k: v for k, v in weights.items() if v.shape == own[k].shape}
    for k in own.keys() - kept.keys():
        if not k.startswith(last):
            found, wanted = tuple(weights[k].shape), tuple(own[k].shape)
            raise UserError(f"--init {path}: {k!r} is of shape {found}, not {wanted}")
    if len(kept) < len(own):
        kept = {k: v for k, v in kept.items() if not k.startswith(last)}
        args.init_classifier = "as drawn"
        if not args.quiet:
            message = "its classifier is of another shape; ours starts as drawn"
            print(f"--init {path}: {message}", file=sys.stderr)
    if not all(v.isfinite().all() for v in kept.values()):
        raise UserError(f"--init {path}: holds NaN or infinity")
    common.load_weights(net, own | kept)
