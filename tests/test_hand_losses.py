"""Losses and steps of FedProx, MOON, Mixup, and those that distil, against hand computations."""

import copy

import fedgkd
import fitnet
import mixup
import moon
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, args_of, same
from hand import batch, begin, check_step, finish, kl
from hand import normed_network, perturb, received_of, state_of, twins

import common


def test_fedprox_step():
    worker, step, *_, w = begin("fedprox", ["--mu", "0.7"])
    x, y = batch()
    twin, _ = twins(worker, w)
    distance = sum((p - w[k]).square().sum() for k, p in twin.named_parameters())
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y) + 0.35 * distance)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_moon_step(mode):
    """train: the frozen networks' running statistics move, and count in no later round."""
    prev, argv = normed_network().double(), ["--mu", "0.5", "--frozen-mode", mode]  # exact in fp32
    perturb(prev, 0.2, seed=9)
    state = {"net": state_of(prev)}
    worker, step, generator, client, args, w = begin("moon", argv, normed_network(), state)
    for seed in range(2):
        x, y = batch(seed=seed)
        twin, glob = twins(worker, w)
        frozen = [net.train(mode == "train") for net in (glob, copy.deepcopy(prev))]
        z, others = twin[:-1](x), [net[:-1](x).detach() for net in frozen]
        cos = [(z * o).sum(1) / z.norm(dim=1) / o.norm(dim=1) / 0.5 for o in others]
        contrast = -(cos[0] - torch.logsumexp(torch.stack(cos), 0)).mean()
        total = F.cross_entropy(twin[-1](z), y) + 0.5 * contrast
        check_step(worker, step, x, y, twin, total)
    finish(generator)
    assert same(client.state["net"], worker.net.state_dict())
    for net, weights in (("glob", w), ("prev", state_of(prev))):
        assert all(p.grad is None for p in worker.nets[net].parameters())
        assert same(state_of(worker.nets[net]), weights) == (mode == "eval")
    client, server = common.Client(1, np.arange(8), {}), {"round": 2, "clients": [1]}
    worker._begin(client, server, w)
    generator = moon.local_update(worker, client, server, args)
    next(generator)
    assert same(state_of(worker.nets["glob"]), w)
    finish(generator)
    assert same(client.state["net"], w)


@pytest.mark.parametrize("name", ["moon", "fedcka"])
def test_contrast_is_left_out_before_a_client_has_a_model(name):
    worker, step, *_, w = begin(name)
    x, y = batch()
    twin, _ = twins(worker, w)
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y))


def test_mixup_step():
    """Each batch, a short one too, has its own number and permutation."""
    worker, step, *_ = begin("mixup", ["--gamma", "0.8"])
    x, y = batch(n=5)
    assert worker.draws["beta"].shape == (40,)  # one number a batch
    betas = worker.draws["beta"][:4]
    orders = [row[:5].argsort().tolist() for row in worker.draws["order"][:4]]
    assert all(0 < beta < 1 for beta in betas)
    assert len(set(betas.tolist())) == len(set(map(tuple, orders))) == 4
    for t, (b, j) in enumerate(zip(betas, orders)):
        worker.t.fill_(t)
        twin = copy.deepcopy(worker.net)
        z = twin(b * x + (1 - b) * x[j])
        total = b * F.cross_entropy(z, y) + (1 - b) * F.cross_entropy(z, y[j])
        check_step(worker, step, x, y, twin, total)


def test_mixup_draws_from_beta():
    """The variance of Beta(gamma, gamma) is 1 / (4 (2 gamma + 1))."""
    drawn = mixup.draw_beta(np.random.default_rng(0), 20_000, 0.8)
    assert drawn.shape == (20_000,)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.03)
    assert (mixup.draw_beta(np.random.default_rng(0), 9, 0) == np.ones(9)).all()


def test_fedkd_step():
    """(1 - gamma) CE + gamma KL from the global model's logits, which are those of eval mode."""
    x, y = batch()
    worker, step, *_, w = begin("fedkd", ["--gamma", "0.3"], net=normed_network())
    mine, teacher = twins(worker, w)
    z, t = mine(x), teacher.eval()(x).detach()
    total = 0.7 * F.cross_entropy(z, y) + 0.3 * kl(t.softmax(1), z.softmax(1))
    check_step(worker, step, x, y, mine, total)


def test_fitnet_step():
    """Two blocks and a pooling, which goes with the second: two hints, of half the weight each."""
    x, y = batch()
    worker, step, *_, w = begin("fitnet", ["--gamma", "0.5"], net=normed_network())
    mine, teacher = twins(worker, w)
    teacher.eval().requires_grad_(False)
    first, last = mine[0](x), mine[:3](x)
    hints = [(first - teacher[0](x)).square().mean(), (last - teacher[:3](x)).square().mean()]
    total = F.cross_entropy(mine[3](last), y) + 0.5 * (hints[0] + hints[1]) / 2
    check_step(worker, step, x, y, mine, total)


def test_fitnet_compares_behind_the_pooling():
    """resnet18-gn has five features: stem, stages 1 to 3, and stage 4 after its pooling."""
    assert fitnet.hint_blocks(common.build_net("resnet18-gn", 10)) == [0, 1, 2, 3, 5]
    assert fitnet.hint_blocks(common.build_net("cnn", 10)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("rule, ce_weight, kl_weight", [("convex", 0.7, 0.3), ("sum", 1, 4)])
def test_fedntd_weights(rule, ce_weight, kl_weight):
    x, y = batch()
    argv = ["--weighting-rule", rule, "--tau", "2"]
    worker, step, *_, w = begin("fedntd", argv, net=normed_network())
    mine, teacher = twins(worker, w)
    z, t = mine(x), teacher.eval()(x).detach()
    rest = torch.tensor([[c for c in range(62) if c != label] for label in y.tolist()])
    p, q = ((v.gather(1, rest) / 2).softmax(1) for v in (t, z))
    total = ce_weight * F.cross_entropy(z, y) + kl_weight * kl(p, q)
    check_step(worker, step, x, y, mine, total)


@pytest.mark.parametrize("later, gamma", [(True, 0.3), (False, 0.3), (True, 0.0)])
def test_fedgkd_step(later, gamma):
    """The teacher's logits are those of eval mode. The first round has none."""
    mean, (x, y) = normed_network().double(), batch()
    perturb(mean, 0.1, seed=4)
    server = {"mean": state_of(mean)} if later else {}
    begun = begin("fedgkd", ["--gamma", str(gamma)], net=normed_network(), server=server)
    worker, step, _, client, _, w = begun
    mine, _ = twins(worker, w)
    z, t = mine(x), mean.eval()(x).detach()
    weight = gamma / 2 if later else 0
    total = F.cross_entropy(z, y) + weight * kl(t.softmax(1), z.softmax(1))
    check_step(worker, step, x, y, mine, total)
    assert client.bytes_down == (common.nbytes(mean.state_dict()) if weight else 0)


def test_fedgkd_buffer():
    """Of models 1, 3, 6, 10: means 1, (1 + 3) / 2, (1 + 3 + 6) / 3 and (3 + 6 + 10) / 3."""
    net, server, args = nn.Linear(2, 1), {}, args_of(fedgkd, *TINY, "--buffer", "3")
    with torch.no_grad():
        [p.zero_() for p in net.parameters()]
    for i, (model, mean) in enumerate([(1, 1), (3, 2), (6, 10 / 3), (10, 19 / 3)]):
        fedgkd.aggregate(net, received_of(net, [i + 1], [1.0]), server, args)
        assert all((v == model).all() for v in net.state_dict().values())
        assert all(torch.allclose(v, torch.full_like(v, mean)) for v in server["mean"].values())
        assert len(server["buffer"]) == min(i + 1, 3)
