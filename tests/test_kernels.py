"""How many operations a step starts: on a GPU each is a kernel or, of foreach, a few."""

import collections

import numpy as np
import pytest
import torch
from methods import SCRIPTS
from torch.utils._python_dispatch import TorchDispatchMode

import common
import engine
import extras.glyphs

FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh"}


class Operations(TorchDispatchMode):
    """Counts what runs inside a with block, but for views and what computes nothing."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count[name] += not func.is_view and name not in FREE
        return func(*args, **(kwargs or {}))


def operations(name):
    """Return the number of operations of a script's second step on ResNet56."""

    def call(args, local_update, aggregate=None, after_round=None, adapt=None):
        return args, local_update, adapt

    words = "--dataset glyphs --model resnet56 --batch-size 8 --epochs 1 --device cpu".split()
    args, local_update, adapt = SCRIPTS[name].main(words, run=call)
    data = extras.glyphs.glyphs()
    worker = engine.Worker(common.prepare_net(data, args, adapt), data, args, 4)
    client, server = common.Client(0, np.arange(16), {}), {"round": 2, "clients": [0]}
    worker._begin(client, server, worker.global_net.state_dict())
    step = next(local_update(worker, client, server, args))
    worker._step(step, 8)
    with Operations() as operations:
        worker._step(step, 8)
    return operations.count.total()


def test_views_are_not_counted():
    x = torch.ones(2, 3)
    with Operations() as operations:
        x.t().detach()
        torch._foreach_add_([x, x.clone()], 1)
    assert operations.count.total() == 2


@pytest.mark.parametrize(
    "name, most",
    [
        ("fedavg", 543),
        ("fedprox", 700),
        ("scaffold", 700),
        ("feddyn", 800),
        ("stochdepth", 800),
    ],
)
def test_a_step_starts_few_operations(name, most):
    """A loop over ResNet56's 179 parameters would add that many, or several times that."""
    assert 300 < operations(name) <= most
