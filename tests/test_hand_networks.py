"""FedAlign, StochDepth, GradAug, FedCKA and FedMLB, which look inside the network, by hand."""

import copy

import fedalign
import fedcka
import fedmlb
import gradaug
import numpy as np
import pytest
import stochdepth
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import args_of, same
from hand import DOUBLE, batch, begin, check_step, finish
from hand import moved_network, normed_network, small_network, state_of, twins
from methods import final

import common
from extras import similarities
from extras.backbones import Head


def test_spectral_norm():
    """Against singular values; and by hand after one and two steps from (1, 1), T T' = diag(1, 9).

    The norms are sqrt(82) and then |(1, 81)| / sqrt(82), and K is the root of the last."""
    spectral_norm, exact = fedalign.spectral_norm, torch.linalg.matrix_norm
    g = torch.Generator().manual_seed(0)
    features = torch.rand(6, 20, 30, generator=g, **DOUBLE)
    assert torch.allclose(spectral_norm(features), exact(features, 2), rtol=1e-6)
    t = torch.diag(torch.tensor([1.0, 3.0], **DOUBLE))[None]
    assert spectral_norm(t, 1).item() == pytest.approx(82**0.25)
    assert spectral_norm(t, 2).item() == pytest.approx(((1 + 81**2) / 82) ** 0.25)
    assert spectral_norm(torch.zeros(2, 3, 3)).tolist() == [pytest.approx(0, abs=1e-6)] * 2
    for size in (1e-12, 1e12):  # whose fourth powers are beyond fp32
        expected = size * exact(features, 2).float()
        assert torch.allclose(spectral_norm(size * features.float()), expected, rtol=1e-5)


@pytest.mark.parametrize("scale", ["ce", "none"])
@pytest.mark.parametrize("lip_input", ["slim", "full"])
def test_fedalign_step_by_an_independent_formula(scale, lip_input):
    """CE + mu c mean((K_S - K_F)^2), K_F and f_(L-1) constant, c = CE / L_Lip constant (or 1).

    On cnn, block L is the second convolution, at width 0.25 its leading 8 -> 8 channels."""
    argv = ["--mu", "0.3", "--clip", "0", "--lip-scale", scale, "--lip-input", lip_input]
    worker, step, *_ = begin("fedalign", argv)
    x, y = batch(5)
    twin = copy.deepcopy(worker.net)
    h = twin[0](x)
    f = twin[1](h)
    ce = F.cross_entropy(twin[2:](f), y)
    h, f, (_, conv, _) = h.detach(), f.detach(), twin[1]
    f_s = F.conv2d(F.max_pool2d(h[:, :8], 2), conv.weight[:8, :8], conv.bias[:8]).relu()

    def k(a, b):
        a = F.adaptive_avg_pool2d(a, (10, 10))
        return torch.linalg.svdvals(torch.einsum("nihw,njhw->nij", a, b) / 100)[:, 0]

    lip = (k(h if lip_input == "full" else h[:, :8], f_s) - k(h, f)).square().mean()
    total = ce + 0.3 * (ce.item() / lip.item() if scale == "ce" else 1) * lip
    check_step(worker, step, x, y, twin, total, rtol=1e-6, atol=1e-7)


def test_fedalign_survives_dead_features():
    """All-zero features make T a matrix of zeros: no NaN from norm, division or gradient."""
    net = small_network()
    nn.init.constant_(net[0][0].bias, -1e3)
    worker, step, *_ = begin("fedalign", net=net)
    assert step(*batch(4)).isfinite()
    assert all(p.isfinite().all() for p in worker.net.parameters())


def test_stochdepth_probabilities():
    """rho_l = 1 - l/L (1 - rho_L), of 4 blocks at 0.8 by hand; and the code's rule."""
    found, code = stochdepth.keep_probabilities, [1, 1 - 0.2 / 3, 1 - 0.4 / 3, 0.8]
    assert found(4, 0.8) == pytest.approx([0.95, 0.9, 0.85, 0.8])
    assert found(4, 0.8, "code") == pytest.approx(code)


def test_stochastic_blocks_wherever_they_are():
    """At the top, in a stage, in a block of a stage: in the order of their depth.

    One within another's branch goes with it."""

    def residual(branch=None):
        return common.Residual(branch or nn.Conv2d(4, 4, 1), nn.Identity())

    outer = residual(nn.Sequential(residual()))
    net = nn.Sequential(residual(), nn.Sequential(nn.Sequential(residual())), outer)
    args = args_of(stochdepth, "--keep", "0.7")
    stochdepth.adapt(net, args)
    keep = [net[0].keep, net[1][0][0].keep, net[2].keep]
    assert keep == pytest.approx([0.9, 0.8, 0.7])
    assert type(net[2].branch[0]) is common.Residual


def test_stochastic_block():
    """In eval mode relu(keep F + I); a skipped branch has a gradient, of zeros."""
    plain = common.build_net("resnet8", 10)[2][0]
    block, x = stochdepth.StochasticResidual(plain, 0.7).eval(), torch.randn(4, 16, 8, 8)
    assert torch.equal(block(x), F.relu(0.7 * block.branch(x) + block.shortcut(x)))
    block.train().mask.zero_()
    block(x).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in block.branch.parameters())


def test_stochdepth_step():
    """Each block by its own number of the step's row; a skipped branch's statistics stay."""
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4)) for _ in range(3)]
    blocks = [common.Residual(branch, nn.BatchNorm2d(4)) for branch in branches]
    stages = nn.Sequential(*blocks[:2]), nn.Sequential(blocks[2])
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(nn.Conv2d(3, 4, 5, 4), *stages, pool, common.Classifier(4, 62))
    stochdepth.adapt(net, common.argparse.Namespace(keep=0.4, rule="paper", model="test"))
    worker, step, *_ = begin("stochdepth", net=net)
    rows = [[1, 0, 0], [0, 1, 1], [1, 1, 0], [0, 0, 1]]
    worker.draws["kept"][:4] = torch.tensor(rows)
    x, y = batch()
    for t, kept in enumerate(rows):
        worker.t.fill_(t)
        twin, before = copy.deepcopy(worker.net), state_of(worker.net)
        h = twin[0](x)
        for b, block in zip(kept, [*twin[1], *twin[2]]):
            h = (b * block.branch(h) + block.shortcut(h)).relu()
        total = F.cross_entropy(twin[4](h.mean((2, 3))), y)
        check_step(worker, step, x, y, twin, total)
        skipped = [i for i, b in zip(("1.0.branch", "1.1.branch", "2.0.branch"), kept) if not b]
        for name, plain in twin.named_buffers():
            if "running" in name:
                stays = name.startswith(tuple(skipped))
                found, expected = worker.net.get_buffer(name), before[name] if stays else plain
                assert torch.allclose(found, expected, rtol=0 if stays else 1e-10, atol=0), name


def test_stochdepth_draws_each_block_at_its_rate():
    """A thousand steps' rows: within 4 standard errors."""
    net = common.build_net("resnet56", 62)
    args = common.argparse.Namespace(keep=0.5, rule="paper", model="resnet56")
    stochdepth.adapt(net, args)
    assert set(net.state_dict()) == set(common.build_net("resnet56", 62).state_dict())
    worker, *_ = begin("stochdepth", ["--keep", "0.5", "--model", "resnet56"], net=net)
    assert worker.draws["kept"].shape == (40, 18)
    drawn = []
    worker.draw = lambda name, f: drawn.append(f(np.random.default_rng(0), 1000))
    next(stochdepth.local_update(worker, None, {}, worker.args))
    [kept] = drawn
    assert np.abs(kept.mean(0) - stochdepth.keep_probabilities(18, 0.5)).max() < 0.06
    covariance = np.cov(kept.T)  # of two blocks 0, with a standard error of at most 0.008
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 0.032
    assert set(np.unique(kept)) == {0.0, 1.0}


def test_gradaug_shapes():
    """The widest first; the narrowest is always --min-width, but with --widths paper."""
    worker, *_, args, _ = begin("gradaug", ["--subnets", "2"])
    assert len(worker.variants) == 4
    assert {r for s in worker.variants for _, r in s} <= {32, 28, 24, 20}
    channels, rng = (16, 32, 64, 128, 256), np.random.default_rng(0)
    many = gradaug.draw_variants(rng, 400, args, channels, [32, 28, 24, 20])
    assert all(s[0][0] >= s[1][0] == gradaug.same_channels(0.8, channels) for s in many)
    assert len({s[0][0] for s in many}) > 5 and len({(a, b) for (_, a), (_, b) in many}) == 16
    args.widths = "paper"
    many = gradaug.draw_variants(rng, 400, args, channels, [32])
    assert len({s[1][0] for s in many}) > 5


def sliced(net, x, c, flatten):
    """Return the logits of test_gradaug_step()'s sub-network of c of 32 channels on x."""
    (conv1, norm, _), (conv2, group, _), (*_, linear, _), classifier = net
    h = F.conv2d(x, conv1.weight[:c], None, stride=4)
    h = F.batch_norm(h, None, None, norm.weight[:c], norm.bias[:c], training=True).relu()
    h = F.conv2d(h, conv2.weight[:c, :c], conv2.bias[:c], padding=1)
    h = F.group_norm(h, 2, group.weight[:c], group.bias[:c]).relu()
    if flatten:  # a linear layer behind maps of 2 x 2: four inputs of each channel
        h = F.max_pool2d(h, 3).flatten(1)
        h = F.linear(h, linear.weight[:c, : 4 * c], linear.bias[:c]).relu()
    else:
        h = F.linear(h.mean((2, 3)), linear.weight[:c, :c], linear.bias[:c]).relu()
    return F.linear(h, classifier.weight[:, :c], classifier.bias)


@pytest.mark.parametrize("flatten", [False, True])
def test_gradaug_step(flatten):
    """CE + mu (KL_1 + KL_2), students by slices of a layer of each kind, on resized images."""
    torch.manual_seed(0)
    pool, inputs = ([nn.MaxPool2d(3)], 128) if flatten else ([nn.AdaptiveAvgPool2d(1)], 32)
    norms = nn.ModuleList([nn.BatchNorm2d(32), nn.GroupNorm(2, 32)])
    for p in norms.parameters():
        nn.init.uniform_(p, 0.2, 1)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 5, 4, bias=False), norms[0], nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), norms[1], nn.ReLU()),
        nn.Sequential(*pool, nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU()),
        common.Classifier(32, 62),
    )
    worker, step, *_ = begin("gradaug", ["--subnets", "2", "--mu", "0.4"], net=net)
    worker.variant = ((0.65, 24), (0.5, 20))  # of 32 channels 24 and 16
    x, y = batch()
    twin, constant = copy.deepcopy(worker.net), copy.deepcopy(worker.net)
    out, teacher = twin(x), constant(x).detach().softmax(1)
    total = F.cross_entropy(out, y)
    options = {"mode": "bilinear", "align_corners": True}
    for channels, size in ((24, 24), (16, 20)):
        small = F.interpolate(x, (size, size), **options)
        small = F.interpolate(small, (32, 32), **options) if flatten else small
        student = sliced(twin, small, channels, flatten).softmax(1)
        total = total + 0.4 * (teacher * (teacher / student).log()).sum(1).mean()
    check_step(worker, step, x, y, twin, total)
    statistics, expected = state_of(worker.net), state_of(twin)  # of the full network alone
    assert all(torch.equal(statistics[k], expected[k]) for k in expected if "running" in k)


def test_gradaug_same_channels():
    """Of 0.813, 256 * 0.797 = 204.03 is the least that rounds to 208, as 208.1 does."""
    assert gradaug.same_channels(0.813, (16, 256)) == 0.797
    assert gradaug.same_channels(1.0, (16, 50)) == 1.0


@pytest.mark.parametrize("cka", [fedcka.cka, similarities.kernel_cka])
@pytest.mark.parametrize("scale", [0, 1, 1000])
def test_cka_of_what_does_not_vary(cka, scale):
    """Rounding is left of it after centring, which the gradient must not magnify."""
    a, b = torch.rand(1, 50).expand(20, 50) * scale, torch.rand(20, 50)
    a.requires_grad_()
    s = cka(a, b)
    s.backward()
    assert s == 0 and not a.grad.any()


@pytest.mark.parametrize("samples", [9, 8])
def test_kernel_cka(samples):
    """HSIC(j, k) = tr(j h k h), over the root of those with themselves; h centres."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(samples, 40)), rng.normal(size=(samples, 25)) + 2
    h, grams = np.eye(samples) - 1 / samples, []
    for v in (a, b):
        d = ((v[:, None] - v) ** 2).sum(2)
        grams.append(h @ np.exp(-d / (2 * np.median(d))))
    jj, jk, kk = (np.trace(grams[p] @ grams[q]) for p, q in ((0, 0), (0, 1), (1, 1)))
    found = similarities.kernel_cka(torch.from_numpy(a), torch.from_numpy(b))
    assert abs(found - jk / (jj * kk) ** 0.5) < 1e-10


@pytest.mark.parametrize("cka", [fedcka.cka, similarities.kernel_cka])
@pytest.mark.parametrize("scale, mean", [(1e3, 0), (1e-6, 0), (1, 200)])
def test_cka_in_single_precision(cka, scale, mean):
    """As in float64 without scale and mean, gradient too."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 2000, generator=g), torch.randn(64, 2000, generator=g)
    a[:, 0] += 30 * b[:, 0]
    found = []
    for dtype, factor, shift in ((torch.float32, scale, mean), (torch.float64, 1, 0)):
        x, y = ((factor * v + shift).to(dtype) for v in (a, b))
        x.requires_grad_()
        s = cka(x, y)
        s.backward()
        found.append((s.item(), x.grad.double() * factor))
    (s, grad), (exact, exact_grad) = found
    assert s == pytest.approx(exact, rel=1e-4)
    assert (grad - exact_grad).norm() < 1e-3 * exact_grad.norm()


def gram_cka(a, b):
    j, k = ((v - v.mean(0)) @ (v - v.mean(0)).T for v in (a, b))
    return (j * k).sum() / j.norm() / k.norm()


@pytest.mark.parametrize(
    "metric, s",
    [
        ("linear-cka", gram_cka),
        ("kernel-cka", similarities.kernel_cka),
        ("frobenius", lambda a, b: -((a - b) ** 2).sum() / a.numel()),
        ("cosine", lambda a, b: (a * b).sum() / (a.norm() * b.norm())),
    ],
)
def test_fedcka_step(metric, s):
    prev = moved_network(0.2, seed=9)
    argv = ["--mu", "0.5", "--similarity-metric", metric]  # 0.5: exact in fp32
    worker, step, generator, client, _, w = begin("fedcka", argv, state={"net": state_of(prev)})
    x, y = batch()
    twin, glob = twins(worker, w)
    contrast, a, g, p = 0, x, x, x
    for m in (0, 1):
        a, g, p = twin[m](a), glob[m](g).detach(), prev[m](p).detach()
        towards, away = (s(a.flatten(1), b.flatten(1)).exp() for b in (g, p))
        contrast = contrast - torch.log(towards / (towards + away)) / 2
    total = F.cross_entropy(twin(x), y) + 0.5 * contrast
    check_step(worker, step, x, y, twin, total)
    twin, _ = twins(worker, w)  # two samples are too few to compare
    check_step(worker, step, x[:2], y[:2], twin, F.cross_entropy(twin(x[:2]), y[:2]))
    finish(generator)
    assert same(client.state["net"], worker.net.state_dict())
    assert not same(client.state["net"], w)


CHOSEN = [("", [1, 2, 3, 4, 5], 5), ("--pathways 1,3", [1, 3], 2)]
CHOSEN += [("--pathways 5 --divisor all", [5], 5)]


@pytest.mark.parametrize("flags, chosen, divisor", CHOSEN)
@pytest.mark.parametrize("direction", ["local-global", "global-local"])
def test_fedmlb_step(flags, chosen, divisor, direction):
    """Every hybrid pathway from the input, gradients by autograd of the whole."""
    net = normed_network(blocks=5)
    weights = ["--lambda1", "0.7", "--lambda2", "0.4", "--tau", "2", "--direction", direction]
    worker, step, *_, w = begin("fedmlb", [*weights, *flags.split()], net=net)
    x, y = batch()
    twin, glob = twins(worker, w)
    glob.eval().requires_grad_(False)
    before = state_of(worker.nets["glob"])
    q = twin(x)
    total = F.cross_entropy(q, y)
    for m in chosen:
        first, second = (twin, glob) if direction == "local-global" else (glob, twin)
        h = x
        for i in range(7):
            h = (first if i < m else second)[i](h)
        soft, log_soft = F.softmax(h / 2, 1), F.log_softmax(q / 2, 1)
        distance = (soft * (soft.log() - log_soft)).sum(1).mean()
        total = total + (0.7 * F.cross_entropy(h, y) + 0.4 * distance) / divisor
    check_step(worker, step, x, y, twin, total)
    assert same(before, state_of(worker.nets["glob"]))
    assert same(before, w)


def test_fedmlb_cuts_behind_blocks_with_parameters():
    """Not behind a pooling, nor behind a head."""
    assert fedmlb.pathway_cuts(common.build_net("resnet18-gn", 10)) == [1, 2, 3, 4, 5]
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Head(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert fedmlb.pathway_cuts(net) == [1]


def test_fedmlb_updates_batch_norm_once():
    worker, step, *_ = begin("fedmlb", ["--direction", "global-local"], net=normed_network(5))
    step(*batch(3))
    assert {v.item() for k, v in worker.net.state_dict().items() if "num_batches" in k} == {1}


def test_fedmlb_trains_where_a_hybrid_is_certain():
    """Eval-mode tails of a fresh resnet56 give logits near 100, whose softmax has zeros: no NaN."""
    worker, step, *_ = begin("fedmlb", net=small_network("resnet56", 62))
    for net in (worker.net, worker.nets["glob"]):
        net.float()
    x, y = batch(3)
    assert step(200 * x.float(), y).isfinite()
    assert all(p.isfinite().all() for p in worker.net.parameters())


def test_fedmlb_with_feddyn(tmp_path):
    """Without pathways it is FedDyn; with them both terms act."""
    flags, off = ["--dyn-alpha", "0.1"], ["--lambda1", "0", "--lambda2", "0"]
    dyn, _ = final("feddyn", tmp_path / "dyn", *flags)
    assert same(final("fedmlb", tmp_path / "mlb", *flags, *off)[0], dyn)
    assert not same(final("fedmlb", tmp_path / "both", *flags)[0], dyn)
