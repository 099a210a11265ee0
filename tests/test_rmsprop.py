"""RMSProp, rFedAvg's optimizer for text."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import flags

import common
import engine
import extras.glyphs
import fedavg


class Double(common.Data):
    """A data set of images in float64."""

    def normalise(self, x):
        return super().normalise(x).double()


def last(training):
    """Run a generator to its end and return its value."""
    while True:
        try:
            next(training)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("persist", [False, True])
def test_rmsprop(persist):
    """Two rounds of a client against the formula s <- 0.99 s + 0.01 g^2,
    b <- 0.9 b + g / (sqrt(s) + 1e-8), v <- v - lr b, s and b kept or not."""
    argv = "--optimizer rmsprop --momentum 0.9 --lr 0.001 --weight-decay 0.01".split()
    args = flags(*argv, *["--persist-opt"] * persist)
    data = Double(**vars(extras.glyphs.glyphs()))
    torch.manual_seed(0)
    net = common.build_net("cnn", 62).double()
    worker = engine.Worker(net, data, args, 8)
    client = common.Client(1, np.arange(32), {})
    reference = common.build_net("cnn", 62).double()
    v = {k: p.detach().clone() for k, p in net.named_parameters()}
    s = {k: torch.zeros_like(p) for k, p in v.items()}
    b = {k: torch.zeros_like(p) for k, p in v.items()}
    weights = net.state_dict()
    for t in (1, 2):
        if not persist:
            s = {k: torch.zeros_like(p) for k, p in v.items()}
            b = {k: torch.zeros_like(p) for k, p in v.items()}
        training = worker.train(client, {"round": t}, weights, fedavg.local_update)
        _, weights = last(training)
        for _ in range(args.epochs):
            reference.load_state_dict(v)
            loss = F.cross_entropy(reference(data.normalise(data.x[:32])), data.y[:32])
            grads = torch.autograd.grad(loss, list(reference.parameters()))
            for k, g in zip(v, grads):
                g = g + 0.01 * v[k]
                s[k] = 0.99 * s[k] + 0.01 * g.square()
                b[k] = 0.9 * b[k] + g / (s[k].sqrt() + 1e-8)
                v[k] = v[k] - 0.001 * b[k]
        assert all(torch.allclose(weights[k], v[k], rtol=1e-7) for k in v)
    assert ("momentum" in client.state) == persist
