"""What the tests of hand numbers share: networks, steps and aggregations without a run."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import TINY, args_of
from methods import SCRIPTS, needed

import common
import engine
import extras.glyphs

DOUBLE = {"dtype": torch.float64}
close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)


def kl(p, q):
    return (p * (p / q).log()).sum(1).mean()


def small_network(model="cnn", classes=62, **options):
    """Return a network, the same in each call."""
    torch.manual_seed(3)
    return common.build_net(model, classes, **options)


def normed_network(blocks=2):
    """Return a small network of blocks, whose batch norm differs between its two modes."""
    torch.manual_seed(5)
    net, channels = nn.Sequential(), 3
    for i in range(blocks):
        conv = nn.Conv2d(channels, 16, 5 if i == 0 else 3, 4 if i == 0 else 1, 1, bias=False)
        net.append(nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU()))
        nn.init.uniform_(net[i][1].running_mean, -1, 1)
        nn.init.uniform_(net[i][1].running_var, 0.5, 2)
        channels = 16
    net.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    return net.append(common.Classifier(16, 62))


def perturb(net, scale=0.05, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g, dtype=p.dtype))


def moved_network(scale, seed):
    """Return a network in float64 that has moved on from small_network()."""
    net = small_network().double()
    perturb(net, scale, seed)
    return net


def batch(n=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 32, 32, generator=g, **DOUBLE), torch.randint(0, 62, (n,), generator=g)


def state_of(net):
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


def begin(name, argv=(), net=None, state=None, server=None):
    """Begin a client's round in float64, four steps of six samples.

    Frozen helpers hold the global weights w; the network has moved on by a small random step.
    Returns (worker, step, generator, client, args, w)."""
    script = SCRIPTS[name]
    plain = ["--momentum", "0", "--weight-decay", "0", "--lr", "0.1"]
    args = args_of(script, *TINY, *needed(name, ["--model"]), *plain, *argv)
    net = net or small_network(projection=args.projection or 0)
    worker = engine.Worker(net.double(), extras.glyphs.glyphs(), args, 40)
    batches = worker.batches
    worker.batches = lambda client: ((x.double(), y) for x, y in batches(client))
    client = common.Client(0, np.arange(8), dict(state or {}))
    server = {"round": 2, "clients": [0, 1], **(server or {})}
    worker._begin(client, server, net.state_dict())
    worker.sizes = [6] * 4
    generator = script.local_update(worker, client, server, args)
    step = next(generator)
    w = state_of(worker.net)
    perturb(worker.net)
    return worker, step, generator, client, args, w


def finish(generator):
    """Run what comes behind the steps in a local_update."""
    assert next(generator, generator) is generator


def check_step(worker, step, x, y, twin, total, **tolerance):
    """Check a step's loss, and the gradient by which plain SGD of lr 0.1 moves, against total's.

    total: an expression in twin's parameters."""
    expected = torch.autograd.grad(total, list(twin.parameters()))
    before = [p.detach().clone() for p in worker.net.parameters()]
    loss = step(x, y).item()
    assert loss == pytest.approx(total.item(), rel=tolerance.get("rtol", 1e-9))
    moved = [(old - p.detach()) / 0.1 for old, p in zip(before, worker.net.parameters())]
    close(moved, list(expected), **tolerance)


def twins(worker, w):
    """Return copies of the worker's network: one that trains, and one that holds w."""
    mine, other = copy.deepcopy(worker.net), copy.deepcopy(worker.net)
    other.load_state_dict(w)
    return mine, other


def received_of(net, shifts, weights, send=None):
    """Return the Received of clients that end shifts away from net, after send(client, i)."""
    received, base = common.Received(), state_of(net)
    for i, (shift, weight) in enumerate(zip(shifts, weights)):
        client = common.Client(i, np.arange(3), {}, weight)
        if send:
            send(client, i)
        received.add(client, {k: v + shift for k, v in base.items()})
    return received
