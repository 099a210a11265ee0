"""hessian_eval.py: against explicit Hessians and plain formulas, and its runs from end to end."""

import functools
import json
import shutil

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
import hessian_eval as h
from analysis import runs
from extras import text

QUICK = "--samples 4 --probes 2 --max-iterations 2 --diagonal none".split()


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches_of(n=11, seed=1):
    """Return batches of 4, 4 and 3 samples: a mean over samples is not one over batches."""
    torch.manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = torch.randint(3, (n,))
    return list(zip(x.split(4), y.split(4)))


def mlp_hessian(loss=F.cross_entropy):
    return h.Hessian(mlp(), batches_of(), loss)


def explicit(hessian):
    """Return the Hessian by torch.func.hessian on all samples at once, (n, n)."""
    x, y = (torch.cat(parts) for parts in zip(*hessian.batches))
    names = [name for name, _ in hessian.net.named_parameters()]
    w = torch.cat([p.detach().flatten() for p in hessian.net.parameters()])

    def loss_at(v):
        parameters = dict(zip(names, hessian.unflatten(v)))
        return hessian.loss(torch.func.functional_call(hessian.net, parameters, (x,)), y)

    return torch.func.hessian(loss_at)(w)


def diagonal_hessian(curvature, batches=1):
    """Return the Hessian of sum c_i w_i^2 / 2 and its curvature c, float64: a diagonal matrix."""
    curvature = torch.tensor(curvature, dtype=torch.float64)
    net = nn.Linear(len(curvature), 1, bias=False).double()

    def loss(out, y):
        return (net.weight[0].square() * curvature).sum() / 2 + 0 * out.sum()

    x = torch.zeros(2, len(curvature), dtype=torch.float64)
    sizes = [2, 1][:batches]
    return h.Hessian(net, [(x[:n], torch.zeros(n)) for n in sizes], loss), curvature


# --- products, trace and diagonal


def test_products_eigenvalues_trace_and_diagonal():
    hessian = mlp_hessian()
    matrix = explicit(hessian)
    n = len(matrix)
    product = hessian.product(torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(product, matrix, rtol=1e-9, atol=1e-12)
    expected, eigenvectors = torch.linalg.eigh(matrix)
    value, vector, (report,) = h.top_eigenvalues(hessian, 1, 1e-12, 5000)
    assert value[0].item() == pytest.approx(expected[-1].item(), rel=1e-5)
    assert report["converged"]
    assert abs(float(vector[0] @ eigenvectors[:, -1])) == pytest.approx(1, abs=1e-5)
    values, vectors, reports = h.top_eigenvalues(hessian, 4, 1e-9, n)
    torch.testing.assert_close(values, expected.flip(0)[:4], rtol=1e-5, atol=0)
    assert all(r["converged"] for r in reports)
    for v, q, r in zip(values, vectors, reports):  # the residual is that of the pair
        assert (matrix @ q - v * q).norm() <= r["residual"] + 1e-9
    hessian.batches = [tuple(torch.cat(parts) for parts in zip(*hessian.batches))]
    mean, error, probes = h.trace(hessian, 1000)
    off = matrix - torch.diag(matrix.diagonal())  # the variance of v' H v is 2 ||off||^2
    assert probes == 1000
    assert error == pytest.approx(float(off.norm()) * (2 / 1000) ** 0.5, rel=0.1)
    assert abs(mean - float(matrix.trace())) < 3 * error < 0.2 * abs(mean)
    d, error, _ = h.diagonal(hessian, 1000)
    assert ((d - matrix.diagonal()).abs() < 5 * error + 1e-12).all()
    assert float(d.sum()) == pytest.approx(mean, rel=1e-9)
    sums = h.diagonal(hessian, 20, per_tensor=True).mean  # of the same probes
    parts = hessian.unflatten(h.diagonal(hessian, 20).mean)
    expected = torch.stack([part.sum() for part in parts])
    torch.testing.assert_close(sums, expected, rtol=1e-9, atol=1e-12)


def test_hutchinson_is_exact_on_a_diagonal_hessian():
    """Signs square to one: diagonal, trace and a standard error of zero to 1e-5, of any probe."""
    hessian, curvature = diagonal_hessian([3.0, -1.0, 0.5, 7.0], batches=2)
    d, error, _ = h.diagonal(hessian, 3)
    torch.testing.assert_close(d, curvature, rtol=1e-5, atol=0)
    assert float(error.norm()) < 1e-12
    assert h.trace(hessian, 3).mean == pytest.approx(9.5, rel=1e-5)
    values, _, _ = h.top_eigenvalues(hessian, 1, 1e-12, 500)
    assert values[0].item() == pytest.approx(7, rel=1e-5)
    values, _, _ = h.top_eigenvalues(hessian, 4, 1e-9, 10)
    assert values.tolist() == pytest.approx([7, 3, 0.5, -1], rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_trace_stops_when_its_mean_stands_still(sign):
    """At the first probe that moves the running mean by less than tol, in either direction.

    Of traces of either sign.
    """
    hessian = mlp_hessian()
    matrix = explicit(hessian)
    for v in h.probe_chunks(hessian, 100, 0, 100):
        values = ((v @ matrix) * v).sum(1)
        means = (values.cumsum(0) / torch.arange(1, 101)).tolist()
    shifts = [abs(b - a) / (abs(a) + 1e-6) for a, b in zip(means, means[1:])]
    signed = mlp_hessian(lambda out, y: sign * F.cross_entropy(out, y))
    for tol in (0.2, 0.05, 0.01):
        stop = next(i for i, shift in enumerate(shifts, 2) if shift < tol)
        mean, _, probes = h.trace(signed, 100, tol=tol)
        assert probes == stop
        assert mean == pytest.approx(sign * means[stop - 1], rel=1e-6)


def test_products_of_an_lstm_after_set_up():
    common.set_up_device(common.flags("", "test").parse_args([]))
    torch.manual_seed(0)
    layers = text.Embedding(9, 3), text.Recurrent(3, 4, last=True), nn.Linear(4, 2)
    net = nn.Sequential(*layers).eval()
    net[0].vectors.normal_()
    x = torch.randint(1, 9, (5, 6))
    y = torch.randint(2, (5,))
    enabled = torch.backends.cudnn.enabled
    hessian = h.Hessian(net, [(x, y)])
    v = torch.randn(hessian.n, generator=torch.Generator().manual_seed(1))
    product = hessian.product(v)
    sides = []
    for step in (1e-2, -2e-2):
        with torch.no_grad():
            for p, d in zip(hessian.parameters, hessian.unflatten(v)):
                p.add_(d, alpha=step)
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), hessian.parameters)
        sides.append(torch.cat([g.flatten() for g in gradients]))
    expected = (sides[0] - sides[1]) / 2e-2
    atol = 2e-3 * float(product.abs().max())
    torch.testing.assert_close(product, expected, rtol=2e-2, atol=atol)
    assert torch.backends.cudnn.enabled == enabled


# --- eigenvalues


def test_lambda_max_where_the_most_negative_eigenvalue_is_larger():
    hessian, _ = diagonal_hessian([-5.0, 2.0, 1.0])
    value, vector, (report,) = h.top_eigenvalues(hessian, 1, 1e-12, 500)
    assert value.item() == pytest.approx(2, rel=1e-5)
    assert vector[0].abs().tolist() == pytest.approx([0, 1, 0], abs=1e-4)


@pytest.mark.parametrize(
    "curvature, top",
    [
        ([-5, 1, *[0.5] * 500], 1),
        ([-5, 0.01, 0.005, *[-1] * 5], 0.01),
        ([5, -4.99, *[0.1] * 50], 5),
    ],
)
def test_lambda_max_at_the_default_tolerance(curvature, top):
    """On spectra where the Rayleigh quotient of power iteration, on H or on a shifted H, stands
    still at another value."""
    hessian, curvature = diagonal_hessian(curvature)
    value, vector, (report,) = h.top_eigenvalues(hessian)
    assert value.item() == pytest.approx(top, rel=2e-3)
    assert report["converged"]
    assert report["residual"] <= 1e-3 * top
    assert float((curvature * vector[0] - value * vector[0]).norm()) <= report["residual"] + 1e-9


def test_power_iteration_says_when_it_has_not_converged():
    report = h.top_eigenvalues(mlp_hessian(), 1, 1e-12, 2)[2][0]
    assert report["iterations"] == 2 + 2  # and two of Lanczos
    assert not report["converged"]
    assert report["residual"] > 1e-6
    curvature = torch.tensor([5, -4.99, 0.1, 0.1], dtype=torch.float64)
    start = torch.tensor([0.1, 0.1, 0.7, 0.7], dtype=torch.float64)
    value, _, report = h.power_iteration(lambda v: curvature * v, start / start.norm(), 0.5, 100)
    assert report["residual"] > 0.5**0.5 * abs(value)  # the quotient stands still
    assert not report["converged"]


def test_density_moments():
    """Sums of weights times powers of nodes are v' H^p v / n, exactly, for p < 2 steps."""
    hessian = mlp_hessian()
    matrix = explicit(hessian)
    steps = 5
    nodes, weights = h.density(hessian, 3, steps)
    for theta, w, v in zip(nodes, weights, h.probe_chunks(hessian, 3, 0, 1)):
        u = v[0]
        for p in range(2 * steps):
            assert (w * theta**p).sum() == pytest.approx(float(v[0] @ u) / len(u), rel=1e-5)
            u = matrix @ u
    nodes, _ = h.density(hessian, 1, 100)  # all steps: the spectrum itself
    spectrum = torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(torch.from_numpy(nodes[0]), spectrum, rtol=1e-5, atol=1e-9)


# --- H_N, H_D and the loss surface


def test_norm_difference_and_direction_by_hand():
    a = torch.tensor([3.0, 4.0])
    b = torch.tensor([0.0, -2.0])
    assert float(h.hessian_norm_difference(a, b)) == 9
    assert float(h.hessian_direction(a, b)) == pytest.approx(-0.8)


def test_loss_surface():
    hessian = mlp_hessian()
    net = hessian.net
    n = hessian.n
    before = [p.clone() for p in net.parameters()]
    unit = torch.eye(n, dtype=torch.float64)
    surface = h.loss_surface(hessian, unit[0], unit[-1], [-1, 0, 2])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    x, y = (torch.cat(parts) for parts in zip(*hessian.batches))
    with torch.no_grad():
        net[0].weight[0, 0] += 2
        net[2].bias[2] -= 1
        assert surface[2, 0] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-9)
    d = hessian.unflatten(h.filter_normalised(hessian, 0))
    torch.testing.assert_close(d[0].norm(dim=1), net[0].weight.norm(dim=1))
    assert float(d[1].norm()) == 0


LOSSES_NOT_FINITE = [
    [[1, np.nan], [np.inf, 2]],
    [[np.nan, np.nan], [np.nan, np.nan]],
]


@pytest.mark.parametrize("losses", LOSSES_NOT_FINITE)
def test_surface_with_losses_that_are_not_finite(losses):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    landscape = h.Landscape(np.array([-1.0, 1]), np.array(losses), ("a", "b"))
    pyplot.close(h.draw_surface(pyplot, landscape, "title"))


# --- runs


def analysis_of(run):
    """Return the result and the arrays of the analysis in a run folder."""
    result = json.loads((run / "hessian.json").read_text())
    return result, np.load(run / "hessian.npz", allow_pickle=False)


def batch_of(run, index, samples=20):
    """Return one batch (x, y) of the samples that --samples takes of index."""
    index = common.keyed("samples", 0).choice(index, samples, replace=False)
    return run.data.normalise(run.data.x[index]), run.data.y[index]


@pytest.mark.parametrize(
    "flags",
    [
        "--density 1 --landscape 3 --directions filter",
        "--authors --top 2",
        "--diagonal none --landscape 3",
    ],
)
def test_hessian_eval_of_a_run(run, capsys, flags):
    h.main([str(run), *"--samples 20 --probes 3 --max-iterations 4".split(), *flags.split()])
    out = capsys.readouterr().out
    assert "lambda_max" in out
    for path in run.glob("hessian*"):
        assert f"wrote {path}\n" in out
    result, arrays = analysis_of(run)
    opened = runs.open_run(run)
    if "--density" in flags:
        check_numbers(opened, result, arrays)
    if "--authors" in flags:
        tensors = len(list(opened.net.parameters()))
        assert arrays["diagonals"].shape == (3, tensors)
        assert len(result["eigenvalues"]) == 2
        assert result["weights"] == "best.pt"
        assert -1 / 3 < result["H_D"] <= 1  # three of nine pairs are 1
    if "none" in flags:
        assert "H_N" not in result
    refused_amid_output(capsys, h, [run], "hessian.json", "--name")


def check_numbers(run, result, arrays):
    """The numbers are those of the functions on the samples that the flags name."""
    hessian = h.Hessian(run.net, [batch_of(run, np.concatenate(run.parts))])
    assert result["trace"]["value"] == pytest.approx(h.trace(hessian, 3).mean, rel=1e-3)
    assert arrays["landscape_loss"].shape == (3, 3)
    d = torch.from_numpy(arrays["diagonals"])
    for k, measured in enumerate(d):
        hessian = h.Hessian(run.client_net(k), [batch_of(run, run.parts[k])])
        expected = h.diagonal(hessian, 3).mean
        assert (measured - expected).norm() < 1e-3 * measured.norm()
    pairs = [(d[0], d[1]), (d[0], d[2]), (d[1], d[2])]
    differences = [float(a.norm() - b.norm()) ** 2 for a, b in pairs]
    cosines = [float(F.cosine_similarity(a, b, dim=0)) for a, b in pairs]
    assert result["H_N"] == pytest.approx(np.mean(differences), rel=1e-4)
    assert result["H_D"] == pytest.approx(np.mean(cosines), rel=1e-4)


def test_hessian_eval_by_tensor(run):
    """All clients' data for each client's diagonal, all ordered pairs."""
    flags = "--samples 20 --probes 3 --max-iterations 2 --diagonal tensor"
    h.main([str(run), *flags.split()])
    result, arrays = analysis_of(run)
    d = arrays["diagonals"]
    norms = np.linalg.norm(d, axis=1)
    opened = runs.open_run(run)
    batch = batch_of(opened, np.concatenate(opened.parts))
    for k, measured in enumerate(d):
        hessian = h.Hessian(opened.client_net(k), [batch])
        expected = h.diagonal(hessian, 3, per_tensor=True).mean
        np.testing.assert_allclose(measured, expected.numpy(), rtol=1e-3, atol=1e-4 * norms[k])
    assert result["H_N"] == pytest.approx(((norms[:, None] - norms) ** 2).mean(), rel=1e-6)
    assert result["H_D"] == pytest.approx((d @ d.T / np.outer(norms, norms)).mean(), rel=1e-6)


def halved(weights):
    return {k: v * 0.5 if v.is_floating_point() else v for k, v in weights.items()}


def test_hessian_eval_as_the_authors(run):
    """best.pt, ten augmented batches, and a trace that stops."""
    state = run_folder.load(run / "checkpoint.pt")
    run_folder.save({**state, "best": halved(state["best"])}, run / "checkpoint.pt")
    opened = runs.open_run(run)
    plain = h.Batches(opened, np.concatenate(opened.parts), 1, tqdm(disable=True))
    frozen = h.AuthorsBatches(plain, 0, frozen=True)
    labels = labels_of(frozen)
    assert len(labels) == 10
    assert labels_of(frozen) == labels != labels_of(h.AuthorsBatches(plain, 1, frozen=True))
    anew = h.AuthorsBatches(plain, 0)
    assert labels_of(anew) != labels_of(anew)
    flags = "--authors --batch-size 1 --probes 200 --max-iterations 2 --diagonal none"
    h.main([str(run), *flags.split()])
    result, _ = analysis_of(run)
    assert result["samples"] == 10
    assert 2 < result["trace"]["probes"] < 200
    train = h.AuthorsBatches(plain)
    hessian = h.Hessian(opened.best_net(), train)
    expected = h.trace(hessian, 200, tol=1e-3).mean
    assert result["trace"]["value"] == pytest.approx(expected, rel=1e-3)
    assert train.iterations == result["trace"]["probes"]


def labels_of(batches):
    return [y.tolist() for _, y in batches]


@pytest.fixture
def two_runs(run, tmp_path):
    shutil.copytree(run, tmp_path / "b")
    return run, tmp_path / "b"


def test_hessian_eval_names_mistakes_before_it_starts(two_runs, capsys):
    a, b = two_runs
    (b / "checkpoint.pt").write_bytes(b"")
    refused_amid_output(capsys, h, [a, b, *QUICK], "b/checkpoint.pt", "not a readable")
    refused_amid_output(capsys, h, [a, a, *QUICK], "named twice")
    refused_amid_output(capsys, h, [a, a / ".." / "a", *QUICK], "named twice")
    assert not list(a.glob("hessian*"))


def test_hessian_eval_goes_on_after_results(two_runs, capsys):
    a, b = two_runs
    h.main([str(a), *QUICK, "--top", "4"])
    assert "eigenvalues 2 to 3 are missing" in capsys.readouterr().out
    written = (a / "hessian.npz").stat().st_mtime_ns
    h.main([str(a), str(b), *QUICK, "--top", "4"])
    out = capsys.readouterr().out
    assert "already analysed" in out
    assert out.splitlines()[-2].startswith(str(a))
    assert out.splitlines()[-1].startswith(str(b))
    assert (a / "hessian.npz").stat().st_mtime_ns == written
    assert (b / "hessian.json").exists()
    result, _ = analysis_of(b)
    (b / "hessian.json").write_text(json.dumps({**result, "rows_checksum": 1}))
    h.main([str(b), *QUICK, "--top", "4"])
    assert "already analysed" not in capsys.readouterr().out  # which was of other rows
    assert analysis_of(b)[0]["rows_checksum"] == result["rows_checksum"]
    refused_amid_output(capsys, h, [a, *QUICK], "hessian.json", "--name")
    (a / "hessian.json").unlink()
    refused_amid_output(capsys, h, [a, *QUICK, "--top", "4"], "hessian.npz", "--name")
    refused_amid_output(capsys, h, [a, *QUICK, "--name", "a/b"], "--name")
    refused_amid_output(capsys, h, [a, *QUICK, "--landscape", "1"], "--landscape")


def test_hessian_eval_knows_results_of_a_stopped_run(tmp_path, capsys):
    """Which has fewer rounds than its --rounds says."""
    argv = [*TINY, "--local-steps", "1", "--rounds", "3", "--out", str(tmp_path / "a")]
    fedavg.main(argv, run=functools.partial(common.run, on_round=lambda row, net: True))
    for answer in (False, True):
        h.main([str(tmp_path / "a"), *QUICK])
        assert ("already analysed" in capsys.readouterr().out) == answer
