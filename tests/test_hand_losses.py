"""Losses and steps of FedProx, MOON, Mixup, and those that distil, against hand computations."""

import copy

import fedgkd
import fedntd
import fedprox
import fitnet
import mixup
import moon
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, args_of, same
from hand import (
    DOUBLE,
    batch,
    begin,
    check_step,
    close,
    cross_entropy,
    finish,
    gradients,
    kl,
    moved_network,
    normed_network,
    numpy_logits,
    perturb,
    received_of,
    softmax,
    state_of,
    twins,
)

import common
import engine
import extras.glyphs

# --- FedProx


def test_fedprox_step_by_hand():
    """A linear classifier z = W x + b of two inputs and three classes, v = w + d, d of both signs.

    By hand
        dL/dW = (softmax(z) - onehot(y))' x / n + mu d_W,
        dL/db = mean(softmax(z) - onehot(y)) + mu d_b,
    the new v is v - lr dL/dv, and the loss has mu/2 |d|^2."""
    mu, lr = 0.7, 0.3
    argv = [*TINY, "--momentum", "0", "--weight-decay", "0", "--mu", str(mu), "--lr", str(lr)]
    args = args_of(fedprox, *argv)
    worker = engine.Worker(nn.Sequential(common.Classifier(2, 3)), extras.glyphs.glyphs(), args, 4)
    worker.net.double().train()
    client = common.Client(0, np.arange(8), {})
    step = next(fedprox.local_update(worker, client, {"round": 1}, args))
    w = [p.detach().clone().numpy() for p in worker.net.parameters()]
    d = [np.array([[1.0, -2.0], [0.5, 0.0], [-0.25, 3.0]]), np.array([0.1, -0.2, 0.3])]
    with torch.no_grad():
        for p, shift in zip(worker.net.parameters(), d):
            p.add_(torch.from_numpy(shift))
    v = [a + b for a, b in zip(w, d)]
    x = np.array([[1.0, 2.0], [-1.0, 0.5], [0.0, -3.0], [2.0, 2.0]])
    y = np.array([0, 2, 1, 1])
    z = x @ v[0].T + v[1]
    error = softmax(z) - np.eye(3)[y]
    expected = [v[0] - lr * (error.T @ x / 4 + mu * d[0]), v[1] - lr * (error.mean(0) + mu * d[1])]
    loss = step(torch.from_numpy(x), torch.from_numpy(y))
    by_hand = cross_entropy(z, y) + mu / 2 * sum((shift**2).sum() for shift in d)
    assert loss.item() == pytest.approx(by_hand, rel=1e-12)
    for p, e in zip(worker.net.parameters(), expected):
        assert np.allclose(p.detach().numpy(), e, rtol=1e-12)


def test_add_proximal_by_hand():
    """v = (3, 1), w = (1, 2), mu 0.5: the value is 0.25 (4 + 1), the gradient gets 0.5 (2, -1)."""
    net = nn.Linear(2, 1, bias=False).double()
    net.weight.data = torch.tensor([[3.0, 1.0]], **DOUBLE)
    net.weight.grad = torch.tensor([[10.0, 20.0]], **DOUBLE)
    value = common.add_proximal(net, [torch.tensor([[1.0, 2.0]], **DOUBLE)], 0.5)
    assert value.item() == pytest.approx(1.25)
    assert net.weight.grad.tolist() == [[11, 19.5]]
    assert net.weight.tolist() == [[3, 1]]


# --- MOON


def test_contrastive_loss_by_hand():
    """cos = 1 to z_glob and 0 to z_prev, temperature 1/2: -log(e^2 / (e^2 + e^0)); and reversed."""
    z, other = torch.tensor([[2.0, 0.0]], **DOUBLE), torch.tensor([[0.0, 5.0]], **DOUBLE)
    e2 = np.exp(2)
    loss = moon.contrastive_loss
    assert loss(z, 3 * z, other, 0.5).item() == pytest.approx(-np.log(e2 / (e2 + 1)))
    assert loss(z, other, 3 * z, 0.5).item() == pytest.approx(-np.log(1 / (e2 + 1)))
    assert loss(z, -z, other, 0.5).item() == pytest.approx(-np.log((1 / e2) / (1 / e2 + 1)))


def test_moon_step():
    prev = moved_network(0.2, seed=9)
    state = {"net": state_of(prev)}
    worker, step, generator, client, _, w = begin("moon", ["--mu", "0.6"], state=state)
    x, y = batch()
    twin, glob = twins(worker, w)
    z = twin[:-1](x)
    cos = [
        (z * o).sum(1) / z.norm(dim=1) / o.norm(dim=1) / 0.5
        for o in (glob[:-1](x).detach(), prev[:-1](x).detach())
    ]
    contrast = -(cos[0] - torch.logsumexp(torch.stack(cos), 0)).mean()
    total = F.cross_entropy(twin[-1](z), y) + 0.6 * contrast
    expected = torch.autograd.grad(total, list(twin.parameters()))
    loss, grads = gradients(worker, step, x, y)
    assert loss == pytest.approx(total.item(), rel=1e-6)
    assert close(grads, expected)
    finish(generator)
    assert same(client.state["net"], worker.net.state_dict())
    assert not same(client.state["net"], w)


def linear_network(seed):
    """Return a network with batch norm in float64, whose running statistics are of no batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), common.Classifier(4, 3)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.rand(4) + 0.5)
        net[1].bias.normal_()
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
    return net


def normed_feature(x, weights, mode):
    """Return the feature of linear_network() at weights, a state_dict, written out."""
    h = x @ weights["0.weight"].T + weights["0.bias"]
    if mode == "train":
        mean, variance = h.sum(0) / len(h), (h - h.sum(0) / len(h)).square().sum(0) / len(h)
    else:
        mean, variance = weights["1.running_mean"], weights["1.running_var"]
    return (h - mean) / (variance + 1e-5).sqrt() * weights["1.weight"] + weights["1.bias"]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_moon_frozen_networks(mode):
    """train: batch norm of the frozen networks takes the statistics of each batch.

    Their running ones, which it moves, count in no later step and in no later client's round."""
    prev, argv = linear_network(9), ["--mu", "0.5", "--frozen-mode", mode]  # 0.5: exact in fp32
    state = {"net": state_of(prev)}
    worker, step, *_, w = begin("moon", argv, net=linear_network(3), state=state)
    g = torch.Generator().manual_seed(0)
    for _ in range(2):
        x, y = torch.randn(6, 5, generator=g, **DOUBLE), torch.randint(0, 3, (6,), generator=g)
        mine = {k: p.detach().clone().requires_grad_() for k, p in worker.net.named_parameters()}
        z = normed_feature(x, mine, "train")
        a, b = (normed_feature(x, weights, mode) for weights in (w, state_of(prev)))
        t, u = ((z * o).sum(1) / z.norm(dim=1) / o.norm(dim=1) / 0.5 for o in (a, b))
        out = z @ mine["2.weight"].T + mine["2.bias"]
        total = F.cross_entropy(out, y) + 0.5 * -(t.exp() / (t.exp() + u.exp())).log().mean()
        expected = torch.autograd.grad(total, list(mine.values()))
        loss, grads = gradients(worker, step, x, y)
        assert loss == pytest.approx(total.item(), rel=1e-12)
        assert close(grads, expected, rtol=1e-9, atol=1e-12)
    for net, weights in (("glob", w), ("prev", state_of(prev))):
        assert all(p.grad is None for p in worker.nets[net].parameters())
        moved = not same(state_of(worker.nets[net]), weights)
        assert moved == (mode == "train")
    args = args_of(moon, *TINY, "--momentum", "0", *argv)
    client, server = common.Client(1, np.arange(8), {}), {"round": 2, "clients": [1]}
    worker._begin(client, server, w)
    generator = moon.local_update(worker, client, server, args)
    next(generator)
    assert same(state_of(worker.nets["glob"]), w)
    finish(generator)
    assert same(client.state["net"], w)


@pytest.mark.parametrize("name", ["moon", "fedcka"])
def test_contrast_is_left_out_before_a_client_has_a_model(name):
    worker, step, *_ = begin(name)
    x, y = batch()
    expected = cross_entropy(numpy_logits(worker.net, x), y.numpy())
    assert step(x, y).item() == pytest.approx(expected, rel=1e-9)


# --- Mixup


def test_mixup_step():
    worker, step, *_ = begin("mixup", ["--gamma", "0.8"])
    x, y = batch(n=5)  # a short batch: the permutation stays within it
    assert worker.draws["beta"].shape == (40,)  # one number a batch
    betas = worker.draws["beta"][:4]
    orders = [row[:5].argsort().tolist() for row in worker.draws["order"][:4]]
    assert all(0 < beta < 1 for beta in betas)
    assert len(set(betas.tolist())) == 4
    assert len(set(map(tuple, orders))) == 4  # each batch has its own permutation
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


# --- distillation


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


def test_not_true_divergence_by_hand():
    """Three classes, the true one 0.

    Logits (9, 0, log 3) of the teacher give (1/4, 3/4) without it, the student's (1/2, 1/2)."""
    teacher = torch.tensor([[9.0, 0.0, np.log(3)]], **DOUBLE)
    out = torch.tensor([[-7.0, 2.0, 2.0]], **DOUBLE, requires_grad=True)
    found = fedntd.not_true_divergence(out, teacher, torch.tensor([0]), 1.0)
    assert found.item() == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    found.backward()
    assert out.grad[0].numpy() == pytest.approx([0, 0.5 - 0.25, 0.5 - 0.75])
    halved = fedntd.not_true_divergence(out, teacher, torch.tensor([0]), 2.0)
    p = 1 / (1 + 3**0.5)
    assert halved.item() == pytest.approx(p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p)))


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


def test_fedgkd_step():
    """gamma/2 is 0.15; the teacher's logits are those of eval mode."""
    mean, argv = normed_network().double(), ["--gamma", "0.3"]
    perturb(mean, 0.1, seed=4)
    x, y = batch()
    server = {"mean": state_of(mean)}
    worker, step, _, client, _, w = begin("fedgkd", argv, net=normed_network(), server=server)
    mine, _ = twins(worker, w)
    z, t = mine(x), mean.eval()(x).detach()
    total = F.cross_entropy(z, y) + 0.15 * kl(t.softmax(1), z.softmax(1))
    check_step(worker, step, x, y, mine, total)
    assert client.bytes_down == common.nbytes(mean.state_dict())
    worker, step, _, client, _, w = begin("fedgkd", argv, net=normed_network())
    mine, _ = twins(worker, w)  # the first round has no teacher
    check_step(worker, step, x, y, mine, F.cross_entropy(mine(x), y))
    assert client.bytes_down == 0


def test_fedgkd_buffer():
    """The mean of the last three global models, of which the initial one, 0, is none.

    They are 1, 3, 6 and 10: means 1, (1 + 3) / 2, (1 + 3 + 6) / 3 and (3 + 6 + 10) / 3."""
    net, server, args = nn.Linear(2, 1), {}, args_of(fedgkd, *TINY, "--buffer", "3")
    with torch.no_grad():
        [p.zero_() for p in net.parameters()]
    for i, (model, mean) in enumerate([(1, 1), (3, 2), (6, 10 / 3), (10, 19 / 3)]):
        fedgkd.aggregate(net, received_of(net, [i + 1], [1.0]), server, args)
        assert all((v == model).all() for v in net.state_dict().values())
        assert all(torch.allclose(v, torch.full_like(v, mean)) for v in server["mean"].values())
        assert len(server["buffer"]) == min(i + 1, 3)
    before = copy.deepcopy(server["buffer"])
    with torch.no_grad():
        net.weight.add_(1)
    assert same(before[-1], server["buffer"][-1])  # a copy of what the network held
