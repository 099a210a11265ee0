"""hessian_eval.py: against explicit Hessians and plain formulas, and its runs from end to end."""

import functools

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, refused_amid_output
from tqdm import tqdm

import common
import run_folder
import fedavg
import hessian_eval
from analysis import hessian, runs
from extras import text

QUICK = "--samples 4 --probes 2 --max-iterations 2 --diagonal none".split()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches_of():
    """Return batches of 4, 4 and 3 samples: a mean over samples is not one over batches."""
    torch.manual_seed(1)
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randint(3, (11,))
    return list(zip(x.split(4), y.split(4)))


def weights(net):
    return hessian.flatten(hessian.trainable(net)).detach()


def product_of(net, batches, loss=F.cross_entropy):
    return functools.partial(hessian.hvp, net, batches, loss=loss)


@pytest.fixture
def small():
    """A network's parameters, its Hessian by torch.func.hessian, and the product with it."""
    net, batches = mlp(), batches_of()
    x, y = (torch.cat(parts) for parts in zip(*batches))

    def loss_at(v):
        first, bias, second, last = v.split([12, 4, 12, 3])
        out = torch.tanh(x @ first.view(4, 3).T + bias) @ second.view(3, 4).T + last
        return F.cross_entropy(out, y)

    w = weights(net)
    return w, torch.func.hessian(loss_at)(w), product_of(net, batches)


# --- products, trace and diagonal


def test_products(small):
    """Of one vector, and of all unit vectors at once; of a constant gradient they are zero."""
    w, matrix, product = small
    unit = torch.eye(len(w), dtype=torch.float64)
    torch.testing.assert_close(product(unit), matrix, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(product(unit[3]), matrix[3], rtol=1e-9, atol=1e-12)
    linear = product_of(mlp(), batches_of(), lambda out, y: 0 * out.sum() + 3)
    assert not linear(unit[0]).any()


def test_trace_and_diagonal(small):
    w, matrix, product = small
    probes = hessian.random_signs(w, 1000, at_once=1000)
    mean, error, used = hessian.hutchinson(product, probes, lambda d: d.sum(1))
    off = matrix - torch.diag(matrix.diagonal())  # the variance of v' H v is 2 ||off||^2
    assert used == 1000
    assert float(error) == pytest.approx(float(off.norm()) * (2 / 1000) ** 0.5, rel=0.1)
    assert abs(mean - matrix.trace()) < 3 * error < 0.2 * abs(mean)
    d, error, _ = hessian.hutchinson(product, hessian.random_signs(w, 1000, at_once=1000))
    assert ((d - matrix.diagonal()).abs() < 5 * error + 1e-12).all()
    assert float(d.sum()) == pytest.approx(float(mean), rel=1e-9) and d.shape == w.shape


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tol", [0.2, 0.01])
def test_trace_stops_when_its_mean_stands_still(small, sign, tol):
    """At the first probe that moves the running mean by less than tol, of traces of either sign."""
    w, matrix, product = small
    signs = torch.cat(list(hessian.random_signs(w, 100)))
    means = (((signs @ matrix) * signs).sum(1).cumsum(0) / torch.arange(1, 101)).tolist()
    shifts = [abs(b - a) / (abs(a) + 1e-6) for a, b in zip(means, means[1:])]
    stop = next(i for i, shift in enumerate(shifts, 2) if shift < tol)
    signs = hessian.random_signs(w, 100)
    found = hessian.hutchinson(lambda v: sign * product(v), signs, lambda d: d.sum(1), tol)
    assert found[2] == stop and float(found[0]) == pytest.approx(sign * means[stop - 1], rel=1e-6)


def test_products_of_an_lstm_run_without_fused_kernels():
    """By those in float64, which has none; cuDNN and oneDNN are as they were afterwards."""
    torch.manual_seed(0)
    layers = text.Embedding(9, 3), text.Recurrent(3, 4, last=True), nn.Linear(4, 2)
    net, x, seen = nn.Sequential(*layers), torch.randint(1, 9, (5, 6)), []
    net[0].vectors.normal_()

    def loss(out, y):
        seen.append((torch.backends.cudnn.enabled, torch._C._get_mkldnn_enabled()))
        return F.cross_entropy(out, y)

    def product():
        w, y = weights(net), torch.tensor([0, 1, 1, 0, 1])
        return hessian.hvp(net, [(x, y)], torch.ones_like(w), loss).double()

    torch.testing.assert_close(product(), (net.double(), product())[1], rtol=1e-3, atol=1e-5)
    assert seen == [(False, False)] * 2
    assert torch.backends.cudnn.enabled and torch._C._get_mkldnn_enabled()


# --- eigenvalues


def test_top_eigenpairs(small):
    w, matrix, product = small
    expected = torch.linalg.eigvalsh(matrix)
    start = next(hessian.random_signs(w, 1))[0]
    values, vectors, residuals, steps = hessian.top_eigenpairs(product, start, 4, 1e-9)
    np.testing.assert_allclose(values, expected.flip(0)[:4], rtol=1e-5)
    assert steps <= len(w) and (residuals <= 1e-9 * values).all()
    for value, v, residual in zip(values, vectors, residuals):  # the residual is that of the pair
        assert float(v.norm()) == pytest.approx(1)
        assert (matrix @ v - value * v).norm() <= residual + 1e-9
    _, _, residuals, steps = hessian.top_eigenpairs(product, start, steps=2)
    assert steps == 2 and residuals[0] > 1e-6  # not there yet


HARD = [([-5, 0.01, 0.005, *[-1] * 5], 0.01), ([-5, 2, 1], 2)]
HARD += [([-0.1, *np.linspace(-5, -4, 99)], -0.1)]


@pytest.mark.parametrize("curvature, top", HARD)
def test_lambda_max_at_the_default_tolerance(curvature, top):
    """Where power iteration would find another value; it ends before the basis is exhausted."""
    c = torch.tensor(curvature, dtype=torch.float64)
    start = next(hessian.random_signs(c, 1))[0]
    (value,), (vector,), (residual,), steps = hessian.top_eigenpairs(lambda v: c * v, start)
    assert value == pytest.approx(top, rel=2e-3) and residual <= 1e-3 * abs(top)
    assert float((c * vector - value * vector).norm()) <= residual + 1e-9 and steps < 50


def test_lanczos_keeps_its_basis_orthonormal():
    """In fp32 too, where a single orthogonalisation of each vector leaves more."""
    c = torch.linspace(1, 2, 300) ** 20
    *_, basis = hessian.lanczos(lambda v: c * v, torch.ones(300), 60)
    gram = torch.stack(basis).double() @ torch.stack(basis).double().T
    assert (gram - torch.eye(60)).abs().max() < 1e-6


@pytest.mark.parametrize("top, rest, steps", [(1, 100, 1), (1, 100.5, 2), (4, 390, 1), (4, 410, 2)])
def test_lanczos_takes_100_rounding_errors_for_zero(top, rest, steps):
    """Of the largest value: what the first product leaves, rest, is then no new direction."""
    rest *= torch.finfo(torch.float64).eps
    matrix = torch.tensor([[top, rest], [rest, 0]], dtype=torch.float64)
    start = torch.tensor([1.0, 0], dtype=torch.float64)
    assert hessian.top_eigenpairs(matrix.mv, start, 2)[3] == steps


def test_density_moments(small):
    """Sums of weights times powers of nodes are v' H^p v / n, exactly, for p < 2 steps."""
    w, matrix, product = small
    nodes, weights = hessian.density(product, hessian.random_signs(w, 3), 5)
    for theta, weight, (v,) in zip(nodes, weights, hessian.random_signs(w, 3)):
        u = v
        for p in range(2 * 5):
            assert (weight * theta**p).sum() == pytest.approx(float(v @ u) / len(u), rel=1e-5)
            u = matrix @ u
    ((nodes,), (weights,)) = hessian.density(product, hessian.random_signs(w, 1), 100)
    spectrum = torch.linalg.eigvalsh(matrix).numpy()  # all steps: every eigenvalue is a node
    assert np.abs(spectrum[:, None] - nodes).min(1).max() < 1e-9
    assert len(nodes) == len(w) and weights.sum() == pytest.approx(1)


# --- H_N, H_D and the loss surface


def test_loss_surface():
    net, batches = mlp(), batches_of()
    before, unit = weights(net), torch.eye(31, dtype=torch.float64)
    surface = hessian_eval.loss_surface(net, batches, unit[0], unit[-1], [-1, 0, 2])
    assert torch.equal(weights(net), before)
    x, y = map(torch.cat, zip(*batches))
    with torch.no_grad():
        net[0].weight[0, 0] += 2
        net[2].bias[2] -= 1
        assert surface[2, 0] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-9)


# --- runs


def batch_of(run, index, samples=20):
    """Return one batch (x, y) of the samples that --samples takes of index."""
    index = common.seeded_rng("samples", 0).choice(index, samples, replace=False)
    return run.data.normalise(run.data.x[index]), run.data.y[index]


def trace_of(net, batches, tol=0):
    probes = hessian.random_signs(weights(net), 200 if tol else 3)
    return hessian.hutchinson(product_of(net, batches), probes, lambda d: d.sum(1), tol)


@pytest.mark.parametrize("diagonal", ["elementwise", "tensor"])
def test_hessian_eval_of_a_run(run, capsys, diagonal):
    """The numbers are those of the functions on the samples that the flags name.

    By tensor: all clients' data for each client's diagonal, all ordered pairs."""
    flags = "--samples 20 --probes 3 --max-iterations 4 --density 1 --landscape 3 --diagonal"
    hessian_eval.main([str(run), *flags.split(), diagonal])
    out = capsys.readouterr().out
    assert "lambda_max" in out and "raise --probes" in out
    for path in run.glob("hessian*"):
        assert f"wrote {path}\n" in out
    result = runs.read_result(run, "hessian")
    arrays, opened = np.load(run / "hessian.npz", allow_pickle=False), runs.open_run(run)
    d = arrays["diagonals"]
    norms, everyone = np.linalg.norm(d, axis=1), np.concatenate(opened.parts)
    trace = trace_of(opened.net, [batch_of(opened, everyone)])[0]
    assert result["trace"]["value"] == pytest.approx(float(trace), rel=1e-3)
    assert arrays["landscape_loss"].shape == (3, 3) and len(result["eigenvalues"]) == 2
    for k, measured in enumerate(d):
        net, index = opened.client_net(k), opened.parts[k]
        product = product_of(net, [batch_of(opened, everyone if diagonal == "tensor" else index)])
        expected, _, _ = hessian.hutchinson(product, hessian.random_signs(weights(net), 3))
        if diagonal == "tensor":
            parts = expected.split([p.numel() for p in net.parameters()])
            expected = torch.stack([part.sum() for part in parts])
        np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-4 * norms[k])
    pairs = np.ones((3, 3), bool) if diagonal == "tensor" else np.triu(np.ones((3, 3), bool), 1)
    differences, cosines = (norms[:, None] - norms) ** 2, d @ d.T / np.outer(norms, norms)
    assert result["H_N"] == pytest.approx(differences[pairs].mean(), rel=1e-4)
    assert result["H_D"] == pytest.approx(cosines[pairs].mean(), rel=1e-4)


def test_hessian_eval_as_the_authors(run):
    """best.pt, ten augmented batches, and a trace that stops."""
    state = run_folder.load(run / "checkpoint.pt")
    best = {k: v * 0.5 if v.is_floating_point() else v for k, v in state["best"].items()}
    run_folder.save({**state, "best": best}, run / "checkpoint.pt")
    opened, words = runs.open_run(run), "--authors --batch-size 1".split()

    def batches(*more, frozen=False):
        args = hessian_eval.parse_flags([str(run), *words, *more])
        index = np.concatenate(opened.parts)
        return hessian_eval.Batches(opened, index, args, tqdm(disable=True), frozen)

    frozen, anew, other = batches(frozen=True), batches(), batches("--seed", "1", frozen=True)
    drawn = [[int(y) for _, y in one] for one in (frozen, frozen, other, anew, anew)]
    assert len(drawn[0]) == 10 and drawn[0] == drawn[1] != drawn[2] and drawn[3] != drawn[4]
    more = "--probes 200 --max-iterations 2 --diagonal none"
    hessian_eval.main([str(run), *words, *more.split()])
    result = runs.read_result(run, "hessian")
    assert result["samples"] == 10 and result["weights"] == "best.pt" and "H_N" not in result
    train = batches()
    expected = trace_of(opened.load_net(opened.best), train, tol=1e-3)[0]
    assert result["trace"]["value"] == pytest.approx(float(expected), rel=1e-3)
    assert 2 < result["trace"]["probes"] == train.iterations < 200


def test_the_authors_diagonal_draws_batches_for_each_probe(run):
    """It is of the loop that makes the trace: the same probes, batches and end."""
    args = hessian_eval.parse_flags([str(run), *"--authors --batch-size 1".split()])
    opened = runs.open_run(run)
    batches, found = [], []
    for reduce in lambda d: d.sum(1), lambda d: d:
        index = np.concatenate(opened.parts)
        batches.append(hessian_eval.Batches(opened, index, args, tqdm(disable=True)))
        found.append(hessian_eval.estimate(opened.net, batches[-1], args, reduce))
    (trace, _, probes), (diagonal, *_) = found
    assert [one.iterations for one in batches] == [probes, probes] and probes > 2
    assert float(diagonal.sum()) == pytest.approx(float(trace), rel=1e-4)


def test_a_negative_eigenvalue_counts_as_found(capsys):
    pairs = [{"value": value, "residual": 1e-4} for value in (2.0, -1.0, 0.01)]
    hessian_eval.warn("run", {"eigenvalues": pairs}, 3)
    assert "run: 1 eigenvalues not found" in capsys.readouterr().out


def test_hessian_eval_goes_on_after_results(run, tmp_path, capsys):
    """A run that has its result is not analysed again; a stopped run is finished."""
    b = tmp_path / "b"
    argv = [*TINY, "--local-steps", "1", "--rounds", "3", "--out", str(b)]
    fedavg.main(argv, run=functools.partial(common.run, on_round=lambda row, net: True))
    hessian_eval.main([str(run), *QUICK, "--top", "4"])
    assert "4 eigenvalues not found" in capsys.readouterr().out
    written = (run / "hessian.npz").stat().st_mtime_ns
    hessian_eval.main([str(run), str(b), *QUICK, "--top", "4"])
    out = capsys.readouterr().out
    assert out.count("already analysed") == 1
    assert [line.split()[0] for line in out.splitlines()[-2:]] == [str(run), str(b)]
    assert (run / "hessian.npz").stat().st_mtime_ns == written
    hessian_eval.main([str(b), *QUICK, "--top", "4"])
    assert "already analysed" in capsys.readouterr().out
    refused_amid_output(capsys, hessian_eval, [run, *QUICK], "hessian.json", "--name")
