"""The analyses: against explicit Hessians, published counts and plain formulas; and what they say of bad run folders."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY
from torch.utils.flop_counter import FlopCounterMode

import analysis
import common
import cost
import features
import fedavg
import fedcka
import gradaug
import hessian_eval as h
import moon
import similarity
import stochdepth


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches_of(n=11, seed=1):
    """Batches of 4, 4 and 3 samples: a mean over samples is not one over batches."""
    torch.manual_seed(seed)
    x, y = torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))
    return list(zip(x.split(4), y.split(4)))


def explicit(net, batches, loss=F.cross_entropy):
    """The Hessian by torch.func.hessian on all samples at once, (n, n)."""
    x, y = (torch.cat(parts) for parts in zip(*batches))
    names, w = (
        [name for name, _ in net.named_parameters()],
        torch.cat([p.detach().flatten() for p in net.parameters()]),
    )
    return torch.func.hessian(
        lambda v: loss(torch.func.functional_call(net, dict(zip(names, h.unflat(net, v))), (x,)), y)
    )(w)


def test_products_eigenvalues_trace_and_diagonal():
    net, batches = mlp(), batches_of()
    hessian = explicit(net, batches)
    n = len(hessian)
    torch.testing.assert_close(
        h.hessian_vector_product(net, batches, torch.eye(n, dtype=torch.float64)),
        hessian,
        rtol=1e-9,
        atol=1e-12,
    )
    expected, eigenvectors = torch.linalg.eigh(hessian)
    value, vector, (report,) = h.top_eigenvalues(net, batches, 1, 1e-12, 5000)
    assert value[0].item() == pytest.approx(expected[-1].item(), rel=1e-5) and report["converged"]
    assert abs(float(vector[0] @ eigenvectors[:, -1])) == pytest.approx(1, abs=1e-5)
    values, vectors, reports = h.top_eigenvalues(net, batches, 4, 1e-9, n)
    torch.testing.assert_close(values, expected.flip(0)[:4], rtol=1e-5, atol=0)
    assert all(r["converged"] for r in reports)
    for v, q, r in zip(values, vectors, reports):  # the residual is that of the pair
        assert (hessian @ q - v * q).norm() <= r["residual"] + 1e-9
    batches = [tuple(torch.cat(parts) for parts in zip(*batches))]
    mean, error, used = h.trace(net, batches, 1000)
    off = hessian - torch.diag(hessian.diagonal())  # the variance of v' H v is 2 ||off||^2
    assert used == 1000 and error == pytest.approx(float(off.norm()) * (2 / 1000) ** 0.5, rel=0.1)
    assert abs(mean - float(hessian.trace())) < 3 * error < 0.2 * abs(mean)
    d, error = h.diagonal(net, batches, 1000)
    assert ((d - hessian.diagonal()).abs() < 5 * error + 1e-12).all() and float(
        d.sum()
    ) == pytest.approx(mean, rel=1e-9)
    sums, _ = h.diagonal(net, batches, 20, per_tensor=True)  # of the same probes
    parts = h.unflat(net, h.diagonal(net, batches, 20)[0])
    torch.testing.assert_close(
        sums, torch.stack([part.sum() for part in parts]), rtol=1e-9, atol=1e-12
    )


def test_hutchinson_is_exact_on_a_diagonal_hessian():
    """Signs square to one: diagonal, trace and a standard error of zero to 1e-5, from any probe."""
    curvature = torch.tensor([3.0, -1.0, 0.5, 7.0], dtype=torch.float64)
    net = nn.Linear(4, 1, bias=False).double()

    def loss(out, y):
        return (net.weight[0].square() * curvature).sum() / 2 + 0 * out.sum()

    batches = [
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2)),
        (torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1)),
    ]
    d, error = h.diagonal(net, batches, 3, loss=loss)
    torch.testing.assert_close(d, curvature, rtol=1e-5, atol=0)
    assert float(error.norm()) < 1e-12
    assert h.trace(net, batches, 3, loss=loss)[0] == pytest.approx(9.5, rel=1e-5)
    assert h.top_eigenvalues(net, batches, 1, 1e-12, 500, loss=loss)[0].item() == pytest.approx(
        7, rel=1e-5
    )
    assert h.top_eigenvalues(net, batches, 4, 1e-9, 10, loss=loss)[0].tolist() == pytest.approx(
        [7, 3, 0.5, -1], rel=1e-5
    )


def test_lambda_max_where_the_most_negative_eigenvalue_is_larger():
    net = nn.Linear(3, 1, bias=False).double()
    batches = [(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2))]
    curvature = torch.tensor([-5.0, 2.0, 1.0], dtype=torch.float64)
    value, vector, (report,) = h.top_eigenvalues(
        net,
        batches,
        1,
        1e-12,
        500,
        loss=lambda out, y: (net.weight[0].square() * curvature).sum() / 2 + 0 * out.sum(),
    )
    assert value.item() == pytest.approx(2, rel=1e-5) and vector[0].abs().tolist() == pytest.approx(
        [0, 1, 0], abs=1e-4
    )


@pytest.mark.parametrize(
    "curvature, top",
    [
        ([-5, 1, *[0.5] * 500], 1),
        ([-5, 0.01, 0.005, *[-1] * 5], 0.01),
        ([5, -4.99, *[0.1] * 50], 5),
    ],
)
def test_lambda_max_at_the_default_tolerance(curvature, top):
    """Spectra on which the Rayleigh quotient of power iteration, on H or on a shifted H, stands still at another value."""
    curvature = torch.tensor(curvature, dtype=torch.float64)
    net, x = (
        nn.Linear(len(curvature), 1, bias=False).double(),
        torch.zeros(1, len(curvature), dtype=torch.float64),
    )
    value, vector, (report,) = h.top_eigenvalues(
        net,
        [(x, x[:, 0])],
        loss=lambda out, y: (net.weight[0].square() * curvature).sum() / 2 + 0 * out.sum(),
    )
    assert (
        value.item() == pytest.approx(top, rel=2e-3)
        and report["converged"]
        and report["residual"] <= 1e-3 * top
    )
    assert float((curvature * vector[0] - value * vector[0]).norm()) <= report["residual"] + 1e-9


def test_power_iteration_says_when_it_has_not_converged():
    net, batches = mlp(), batches_of()
    report = h.top_eigenvalues(net, batches, 1, 1e-12, 2)[2][0]
    assert (
        report["iterations"] == 2 + 2 and not report["converged"] and report["residual"] > 1e-6
    )  # and two of Lanczos
    curvature = torch.tensor([5, -4.99, 0.1, 0.1], dtype=torch.float64)
    start = torch.tensor([0.1, 0.1, 0.7, 0.7], dtype=torch.float64)
    value, _, report = h.power_iteration(lambda v: curvature * v, start / start.norm(), 0.5, 100)
    assert (
        report["residual"] > 0.5**0.5 * abs(value) and not report["converged"]
    )  # the quotient stands still


@pytest.mark.parametrize("sign", [1, -1])
def test_trace_stops_when_its_mean_stands_still(sign):
    """At the first probe that moves the running mean by less than tol, either way, of traces of either sign."""
    net, batches = mlp(), batches_of()
    hessian, means = explicit(net, batches), []
    for v in h._probes(net, 100, 0, 100):
        values = ((v @ hessian) * v).sum(1)
        means = (values.cumsum(0) / torch.arange(1, 101)).tolist()
    for tol in (0.2, 0.05, 0.01):
        stop = (
            next(
                i
                for i in range(1, 100)
                if abs(means[i] - means[i - 1]) < tol * (abs(means[i - 1]) + 1e-6)
            )
            + 1
        )
        mean, _, used = h.trace(
            net, batches, 100, tol=tol, loss=lambda out, y: sign * F.cross_entropy(out, y)
        )
        assert used == stop and mean == pytest.approx(sign * means[stop - 1], rel=1e-6)


def test_products_of_an_lstm_after_set_up():
    common._set_up(common.flags("", "test").parse_args([]))
    torch.manual_seed(0)
    net = nn.Sequential(
        common.Embedding(9, 3), common.Recurrent(3, 4, last=True), nn.Linear(4, 2)
    ).eval()
    net[0].vectors.normal_()
    batches, enabled = (
        [(torch.randint(1, 9, (5, 6)), torch.randint(2, (5,)))],
        torch.backends.cudnn.enabled,
    )
    w, n = h.parameters(net), sum(p.numel() for p in h.parameters(net))
    v = torch.randn(n, generator=torch.Generator().manual_seed(1))

    def gradient():
        return torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(F.cross_entropy(net(batches[0][0]), batches[0][1]), w)
            ]
        )

    product, sides = h.hessian_vector_product(net, batches, v), []
    for step in (1e-2, -2e-2):
        with torch.no_grad():
            for p, d in zip(w, h.unflat(net, v)):
                p.add_(d, alpha=step)
        sides.append(gradient())
    torch.testing.assert_close(
        product, (sides[0] - sides[1]) / 2e-2, rtol=2e-2, atol=2e-3 * float(product.abs().max())
    )
    assert torch.backends.cudnn.enabled == enabled


def test_density_moments():
    """Sums of weights times powers of nodes are v' H^p v / n, exactly, for p < 2 steps."""
    net, batches = mlp(), batches_of()
    hessian, steps = explicit(net, batches), 5
    nodes, weights = h.density(net, batches, 3, steps)
    for theta, w, v in zip(nodes, weights, h._probes(net, 3, 0, 1)):
        u = v[0]
        for p in range(2 * steps):
            assert (w * theta**p).sum() == pytest.approx(float(v[0] @ u) / len(u), rel=1e-5)
            u = hessian @ u
    nodes, _ = h.density(net, batches, 1, 100)  # all steps: the spectrum itself
    torch.testing.assert_close(
        torch.from_numpy(nodes[0]), torch.linalg.eigvalsh(hessian), rtol=1e-5, atol=1e-9
    )


def test_norm_difference_and_direction_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, -2.0])
    assert float(h.hessian_norm_difference(a, b)) == 9 and float(
        h.hessian_direction(a, b)
    ) == pytest.approx(-0.8)


def test_loss_surface():
    net, batches = mlp(), batches_of()
    n, before = sum(p.numel() for p in net.parameters()), [p.clone() for p in net.parameters()]
    d1, d2 = torch.eye(n, dtype=torch.float64)[0], torch.eye(n, dtype=torch.float64)[-1]
    surface = h.loss_surface(net, batches, d1, d2, [-1, 0, 2])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))
    x, y = (torch.cat(parts) for parts in zip(*batches))
    with torch.no_grad():
        net[0].weight[0, 0] += 2
        net[2].bias[2] -= 1
        assert surface[2, 0] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-9)
    d = h.unflat(net, h.filter_normalised(net, 0))
    torch.testing.assert_close(d[0].norm(dim=1), net[0].weight.norm(dim=1))
    assert float(d[1].norm()) == 0


# --- cost


def macs(script, *argv, model="resnet56"):
    call = analysis.method_call(
        script,
        ["--dataset", "cifar100", "--model", model, "--batch-size", "2", "--device", "cpu", *argv],
    )
    result = cost.count(call, 300)
    return result["macs_per_sample"], result["parameters"], result["bytes"]


def test_backward_of_grouped_convolutions():
    """Twice the forward pass, once where the input takes no gradient: 4 -> 6 channels in 2 groups, 3x3, on 5x5: 2,700 MACs."""
    conv = torch.nn.Conv2d(4, 6, 3, padding=1, groups=2)
    for x, backward in (
        (torch.randn(1, 4, 5, 5), 2700),
        (torch.randn(1, 4, 5, 5, requires_grad=True), 5400),
    ):
        with cost.Counter({}) as counter:
            conv(x).sum().backward()
        assert counter.macs["forward"] == 2700 and counter.macs["backward"] == backward


@pytest.mark.parametrize(
    "script, forward, expected, parameters",
    [
        ("fedavg", 87_237_632, 87_237_632, 605_460),
        ("fedprox", 87_237_632, 87_237_632, 2 * 605_460),
        # the paper's 3 x 87,368,704 counts the classifiers of the frozen networks, which do not run
        ("moon", 3 * 87_368_704 - 2 * 25_600, 3 * 87_368_704 - 2 * 25_600, 3 * 737_044),
        ("stochdepth", 87_237_632, 82.89e6, 605_460),
    ],
)
def test_table_five(script, forward, expected, parameters):
    found, stored, traffic = macs(script)
    assert found["forward"] == forward and found["expected"] == pytest.approx(expected, rel=1e-4)
    assert stored["papers"] == parameters and 1.9 * 87e6 < found["backward"] < 2.1 * 87.4e6
    assert traffic["down"] == traffic["up"] == (3_020_576 if script == "moon" else 2_494_240)


def test_table_five_fedalign():
    """87.24 M and the last stage at a quarter of its width, by hand: its convolutions on 64 -> 32 of 128 channels."""
    block = [(32, 16, 16, 1), (16, 16, 8, 9), (16, 64, 8, 1), (32, 64, 8, 1)] + 5 * [
        (64, 16, 8, 1),
        (16, 16, 8, 9),
        (16, 64, 8, 1),
    ]
    slim = sum(i * o * side**2 * k for i, o, side, k in block)
    found, _, _ = macs("fedalign")
    assert (
        found["forward"] == 87_237_632 + slim
        and round(found["forward"] / 1e6, 1) == 89.1
        and found["products"] > 1e6
    )


@pytest.mark.parametrize("subnets, millions", [(1, 127.6)])
def test_table_five_gradaug(subnets, millions):
    """The mean over widths and resolutions of the authors' rule; Table 5 has 133.9 and 170.7."""
    found, stored, _ = macs("gradaug", "--subnets", str(subnets), "--resolutions", "32,28,24,20")
    assert (
        found["forward"] == pytest.approx(millions * 1e6, rel=0.01) and stored["papers"] == 605_460
    )


def test_cost_counts_what_happens_outside_steps():
    """rFedAvg: one forward over the data a round, and N d numbers down; SCAFFOLD: a variate in both directions."""
    net = common.build_net("cnn", 100)
    size, d, plain = (
        common.nbytes(net.state_dict()),
        net[-1].in_features,
        macs("fedavg", model="cnn")[0],
    )
    found, _, traffic = macs("rfedavg", "--variant", "rfedavg", model="cnn")
    assert found["forward"] == plain["forward"] and found["round"] == pytest.approx(
        plain["forward"] - 100 * d
    )
    assert traffic["down"] == size + 4 * 16 * d and traffic["up"] == size + 4 * d
    found, stored, traffic = macs("scaffold", model="cnn")
    assert traffic["down"] == traffic["up"] == 2 * size and stored["kept"] * 4 == size


def test_cost_of_pins():
    """FedProx reads one more copy of the parameters, but none of the statistics."""
    net = common.build_net("resnet56", 100)
    state = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    assert macs("fedprox", "--mu", "0.1")[1]["full"] == state + sum(
        p.numel() for p in net.parameters()
    )
    assert macs("fedavg")[1]["full"] == state


def test_cost_of_two_subnetworks(monkeypatch):
    """Each sub-network's own width and resolution, by torch's counter of FLOPs."""
    shapes = (0.9, 24), (0.8, 20)
    monkeypatch.setattr(gradaug, "draw_shapes", lambda rng, steps, *_: [shapes] * steps)
    call = analysis.method_call(
        "gradaug", ["--model", "resnet56", "--batch-size", "2", "--device", "cpu"]
    )
    found = cost.count(call, 1)["macs_per_sample"]["forward"]
    net, x = common.build_net("resnet56", 100), torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        net.eval()(x)
        for width, resolution in shapes:
            common.at_width(net, gradaug.resize(x, resolution, False), width)
    assert found == flops.get_total_flops() / 2 / 2 == 153_691_744


@pytest.mark.parametrize(
    "dataset, model, shape",
    [
        ("femnist", "cnn-mcmahan", (1, 28, 62)),
        ("emnist", "cnn-mcmahan", (1, 28, 62)),
        ("tiny-imagenet", "cnn", (3, 64, 200)),
        ("imagenet-200", "cnn", (3, 224, 200)),
    ],
)
def test_cost_needs_no_files(dataset, model, shape):
    call = analysis.method_call(
        "fedavg",
        ["--dataset", dataset, "--data-dir", "/nowhere", "--model", model, "--batch-size", "2"],
    )
    data = cost.images(call.args, 4)
    assert (*data.x.shape, data.classes) == (4, shape[0], shape[1], shape[1], shape[2])
    if dataset != "imagenet-200":
        assert cost.count(call, 2)["macs_per_sample"]["forward"] > 0


def test_time_ratio(monkeypatch):
    monkeypatch.setattr(cost, "measure", lambda calls, repeats: [[1.0, 2.0, 4.0], [3.0, 8.0, 20.0]])
    assert cost.times("fedprox", ["--mu", "0.1"], 3) == {"round": 8.0, "fedavg": 2.0, "ratio": 4.0}


def test_cost_prints_and_times(capsys):
    result = cost.main(
        [
            "fedprox.py",
            "--dataset",
            "glyphs",
            "--model",
            "cnn",
            "--batch-size",
            "4",
            "--epochs",
            "1",
            "--mu",
            "0.1",
            "--device",
            "cpu",
            "--repeats",
            "1",
        ]
    )
    out = capsys.readouterr().out
    assert (
        json.loads(out.splitlines()[-1]) == result
        and result["seconds"]["ratio"] > 0
        and "FLOPs" in out
    )


@pytest.mark.parametrize(
    "argv, word",
    [
        (["nothing"], "no such script"),
        (["common"], "not the script of a method"),
        (["moon", "--mu", "x"], "--mu"),
        (["moon", "--nonsense"], "--nonsense"),
    ],
)
def test_cost_refuses(capsys, argv, word):
    refused(capsys, cost, argv, word)


# --- runs


def refused(capsys, script, argv, *words):
    with pytest.raises(SystemExit) as stop:
        script.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "error:" in line]
    assert (
        stop.value.code == 2
        and "Traceback" not in err
        and len(lines) == 1
        and all(word in lines[0] for word in words)
    ), err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with client models on 600 glyphs."""
    out = tmp_path_factory.mktemp("runs") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        fedavg.main([*TINY, "--clients", "3", "--save-clients", "--no-nesterov", "--out", str(out)])
    return out


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize(
    "script, flags",
    [
        (stochdepth, ["--model", "resnet56", "--local-steps", "1", "--batch-size", "4"]),
        (moon, ["--projection", "16"]),
    ],
)
def test_open_run_restores_the_network(tmp_path, monkeypatch, script, flags):
    monkeypatch.setattr(common, "GLYPHS", (200, 20))
    net, rows = script.main([*TINY, "--rounds", "1", *flags, "--out", str(tmp_path / "a")])
    opened = analysis.open_run(tmp_path / "a")
    assert [type(m) for m in opened.net.modules()] == [type(m) for m in net.modules()]
    assert common.evaluate(opened.net, opened.data, opened.args) == (
        rows[-1]["test_acc"],
        rows[-1]["test_loss"],
    )


def test_hessian_eval_by_tensor(run):
    """All clients' data for each client's diagonal, all ordered pairs."""
    h.main(
        [
            str(run),
            "--samples",
            "20",
            "--probes",
            "3",
            "--max-iterations",
            "2",
            "--diagonal",
            "tensor",
        ]
    )
    result, d = (
        json.loads((run / "hessian.json").read_text()),
        np.load(run / "hessian.npz")["diagonals"],
    )
    opened, n = analysis.open_run(run), np.linalg.norm(d, axis=1)
    index = common.keyed("samples", 0).choice(np.concatenate(opened.parts), 20, replace=False)
    batch = opened.data.normalise(opened.data.x[index]), opened.data.y[index]
    for k, own in enumerate(d):
        expected, _ = h.diagonal(opened.client_net(k), [batch], 3, per_tensor=True)
        np.testing.assert_allclose(own, expected.numpy(), rtol=1e-3, atol=1e-4 * n[k])
    assert result["H_N"] == pytest.approx(((n[:, None] - n) ** 2).mean(), rel=1e-6)
    assert result["H_D"] == pytest.approx((d @ d.T / np.outer(n, n)).mean(), rel=1e-6)


def test_hessian_eval_as_the_authors(run):
    """best.pt, ten augmented batches, and a trace that stops."""
    best = common.load(run / "best.pt")
    common.save(
        {k: v * 0.5 if v.is_floating_point() else v for k, v in best.items()}, run / "best.pt"
    )
    opened, bar = analysis.open_run(run), h.tqdm(disable=True)
    frozen, other, anew = (
        h.Batches(opened, np.concatenate(opened.parts), 1, bar, 10, *more)
        for more in ((0, True), (1, True), (0,))
    )
    a, b, c, first, second = (
        [y.tolist() for _, y in batches] for batches in (frozen, frozen, other, anew, anew)
    )
    assert len(a) == 10 and a == b != c and first != second
    flags = [
        str(run),
        "--authors",
        "--batch-size",
        "1",
        "--probes",
        "200",
        "--max-iterations",
        "2",
        "--diagonal",
        "none",
    ]
    h.main(flags)
    result = json.loads((run / "hessian.json").read_text())
    assert result["samples"] == 10 and 2 < result["trace"]["probes"] < 200
    net = opened.net_of(run / "best.pt")
    train = h.Batches(opened, np.concatenate(opened.parts), 1, bar, 10)
    assert result["trace"]["value"] == pytest.approx(
        h.trace(net, train, 200, tol=1e-3)[0], rel=1e-3
    )
    assert train.times == result["trace"]["probes"]


def test_hessian_eval_of_several_runs(run, tmp_path, capsys):
    """Goes on after runs that have their results; names what is wrong with any of them before it starts."""
    flags = ["--samples", "4", "--probes", "2", "--max-iterations", "2", "--diagonal", "none"]
    b = tmp_path / "b"
    shutil.copytree(run, b)
    common.save(common.build_net("cnn", 10).state_dict(), b / "model.pt")
    refused(capsys, h, [run, b, *flags], "b/model.pt", "62 classes")
    refused(capsys, h, [run, run, *flags], "named twice")
    assert not list(run.glob("hessian*"))
    shutil.copy(run / "model.pt", b)
    h.main([str(run), *flags, "--top", "4"])
    assert "eigenvalues 2 to 3 are missing" in capsys.readouterr().out
    written = (run / "hessian.npz").stat().st_mtime_ns
    h.main([str(run), str(b), *flags, "--top", "4"])
    out = capsys.readouterr().out
    assert (
        "already analysed" in out
        and out.splitlines()[-2].startswith(str(run))
        and out.splitlines()[-1].startswith(str(b))
    )
    assert (run / "hessian.npz").stat().st_mtime_ns == written and (b / "hessian.json").exists()
    refused(capsys, h, [run, *flags], "hessian.json", "--name")
    (run / "hessian.json").unlink()
    refused(capsys, h, [run, *flags, "--top", "4"], "hessian.npz", "--name")
    refused(capsys, h, [run, *flags, "--name", "a/b"], "--name")
    refused(capsys, h, [run, *flags, "--landscape", "1"], "--landscape")


def test_runs_are_opened_in_full_precision(run):
    config = json.loads((run / "config.json").read_text())
    config["flags"]["precision"] = "bf16"
    (run / "config.json").write_text(json.dumps(config))
    assert analysis.open_run(run).args.precision == "fp32"


def test_failed_pictures_lose_nothing(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")

    def broken(plt):
        raise ValueError("no picture")

    with pytest.raises(ValueError):
        analysis.keep_analysis(tmp_path, "a", {"x": 1}, {"y": np.ones(2)}, {"z": broken})
    assert (
        json.loads((tmp_path / "a.json").read_text()) == {"x": 1} and (tmp_path / "a.npz").exists()
    )
    for surface in (np.array([[1, np.nan], [np.inf, 2]]), np.full((2, 2), np.nan)):
        pyplot.close(h.draw_surface(pyplot, np.array([-1.0, 1]), surface, ("a", "b"), "title"))


def test_images_on_disk(run):
    """Data with paths has no x; the batches and features are of what images() decodes."""
    opened = analysis.open_run(run)
    index = opened.parts[0][:20]
    stored, labels, net = opened.data.x, opened.data.y, opened.client_net(0)
    expected = features.features(net, opened.data, index)
    seeds = []

    def images(batches, drawn=None):
        seeds.append(drawn)
        return (stored[torch.as_tensor(rows)] for rows in batches)

    opened.data.x, opened.data.images = stored[:0], images
    torch.testing.assert_close(features.features(net, opened.data, index), expected)
    ((x, y),) = h.Batches(opened, index, 64, h.tqdm(disable=True))
    torch.testing.assert_close(x, opened.data.normalise(stored[np.sort(index)]))
    assert torch.equal(y, labels[np.sort(index)])
    opened.args.dataset = (
        "imagenet-200"  # whose augmentation is drawn by seeds where files are decoded
    )
    assert len(list(h.Batches(opened, index, 1, h.tqdm(disable=True), 10))) == 10
    assert [len(own) for own in seeds[-1]] == 10 * [1] and seeds[1] is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--density", "1", "--landscape", "3", "--directions", "filter"],
        ["--authors", "--top", "2"],
        ["--diagonal", "none", "--landscape", "3"],
    ],
)
def test_hessian_eval_of_a_run(run, capsys, flags):
    h.main([str(run), "--samples", "20", "--probes", "3", "--max-iterations", "4", *flags])
    assert "lambda_max" in capsys.readouterr().out
    result, arrays = (
        json.loads((run / "hessian.json").read_text()),
        np.load(run / "hessian.npz", allow_pickle=False),
    )
    opened = analysis.open_run(run)
    if (
        "--density" in flags
    ):  # the numbers are those of the functions on the samples that the flags name
        index = common.keyed("samples", 0).choice(np.concatenate(opened.parts), 20, replace=False)
        x = opened.data.normalise(opened.data.x[index])
        mean, error, _ = h.trace(opened.net, [(x, opened.data.y[index])], 3)
        assert result["trace"]["value"] == pytest.approx(mean, rel=1e-3) and arrays[
            "landscape_loss"
        ].shape == (3, 3)
        d = torch.from_numpy(arrays["diagonals"])
        for k, own in enumerate(d):
            index = common.keyed("samples", 0).choice(opened.parts[k], 20, replace=False)
            batch = opened.data.normalise(opened.data.x[index]), opened.data.y[index]
            expected, _ = h.diagonal(opened.client_net(k), [batch], 3)
            assert (own - expected).norm() < 1e-3 * own.norm()
        pairs = [(0, 1), (0, 2), (1, 2)]
        assert result["H_N"] == pytest.approx(
            np.mean([float(d[i].norm() - d[j].norm()) ** 2 for i, j in pairs]), rel=1e-4
        )
        assert result["H_D"] == pytest.approx(
            np.mean([float(F.cosine_similarity(d[i], d[j], dim=0)) for i, j in pairs]), rel=1e-4
        )
    if "--authors" in flags:
        assert (
            arrays["diagonals"].shape == (3, len(list(opened.net.parameters())))
            and len(result["eigenvalues"]) == 2
        )
        assert (
            result["weights"] == "best.pt" and -1 / 3 < result["H_D"] <= 1
        )  # three of nine pairs are 1
    if "none" in flags:
        assert "H_N" not in result
    refused(capsys, h, [run], "hessian.json", "--name")


def test_bad_run_folders(run, made, tmp_path, capsys):
    refused(capsys, h, [tmp_path / "none"], "none", "no run")
    (run / "clients" / "1.pt").write_bytes(b"no tensors")
    for script in (h, similarity):
        refused(capsys, script, [run], "1.pt", "not a readable")
    (run / "clients" / "1.pt").unlink()
    for script in (h, similarity, features):
        refused(capsys, script, [run], "1.pt", "--save-clients")
    refused(capsys, fedcka, ["--similarity-of", run], "1.pt", "--save-clients")
    common.save(common.build_net("cnn", 10).state_dict(), run / "clients" / "1.pt")
    refused(capsys, h, [run], "1.pt", "62 classes")
    refused(capsys, features, [made, "--classes", "62"], "--classes", "62")
    refused(capsys, features, [made, "--clients", "7"], "client 7", "0, 1, 2")
    common.save(common.build_net("cnn", 10).state_dict(), run / "model.pt")
    refused(capsys, h, [run], "model.pt", "62 classes")
    (run / "model.pt").unlink()
    refused(capsys, h, [run], "model.pt", "not finished")
    config = json.loads((run / "config.json").read_text())
    config["flags"]["dataset"] = "cifar10"
    (run / "config.json").write_text(json.dumps(config))
    refused(capsys, h, [made, run], "cifar10", "glyphs")
    (run / "config.json").write_text(json.dumps({**config, "script": "../evil"}))
    (run / "model.pt").touch()
    refused(capsys, similarity, [run], "config.json", "no such script")
    (run / "config.json").write_text("{")
    refused(capsys, h, [run], "config.json", "damaged")


# --- similarity and features


def test_unbiased_hsic_by_its_definition():
    """The mean over all ordered quadruples of distinct samples of k_ij l_ij + k_ij l_qr - 2 k_ij l_iq."""
    torch.manual_seed(0)
    k, l = (m @ m.T for m in torch.randn(2, 6, 3, dtype=torch.float64))
    terms = [
        k[i, j] * l[i, j] + k[i, j] * l[q, r] - 2 * k[i, j] * l[i, q]
        for i in range(6)
        for j in range(6)
        for q in range(6)
        for r in range(6)
        if len({i, j, q, r}) == 4
    ]
    assert float(similarity.hsic(k, l)) == pytest.approx(float(sum(terms)) / len(terms), rel=1e-10)


def test_layer_similarities():
    torch.manual_seed(0)
    nets, x = [common.build_net("cnn", 10).eval() for _ in range(2)], torch.randn(64, 3, 32, 32)
    values = similarity.layer_similarities(nets[0], nets, x.split(32))
    assert values.shape == (2, len(similarity.layer_names(nets[0]))) and np.allclose(
        values[0], 1, atol=1e-6
    )
    assert (values[1] < 0.99).all()
    a, b = (net[0](x).detach() for net in nets)  # the first layer, from its definition
    hs = [
        [similarity.hsic(*(similarity.gram(m[i : i + 32]) for m in pair)) for i in (0, 32)]
        for pair in ((a, b), (a, a), (b, b))
    ]
    cross, aa, bb = (float(sum(v)) for v in hs)
    assert values[1][0] == pytest.approx(cross / (aa * bb) ** 0.5, rel=1e-6)
    assert similarity.layer_names(common.build_net("resnet56", 10))[:3] == [
        "stem",
        "stage1.1",
        "stage1.2",
    ]
    sizes = (40, 21, 3)  # weighted by their samples, and the last of no estimate
    uneven = similarity.layer_similarities(nets[0], nets[1:], x.split(sizes))
    hs = [
        [
            similarity.hsic(*(similarity.gram(m) for m in pair))
            for pair in zip(p.split(sizes), q.split(sizes))
        ][:2]
        for p, q in ((a, b), (a, a), (b, b))
    ]
    cross, aa, bb = (40 * float(v[0]) + 21 * float(v[1]) for v in hs)
    assert uneven[0][0] == pytest.approx(cross / (aa * bb) ** 0.5, rel=1e-9)


def test_similarity_of_a_run(run, capsys):
    fedcka.main(["--similarity-of", str(run), "--device", "cpu", "--name", "layers"])
    result = json.loads((run / "layers.json").read_text())
    opened = analysis.open_run(run)
    expected = similarity.layer_similarities(
        opened.net, [opened.client_net(2)], [opened.data.normalise(opened.data.x_test)]
    )
    assert (
        np.allclose(result["linear_cka"][2], expected[0], rtol=1e-4)
        and max(result["mean"]) < 1 - 1e-6
    )
    assert (
        np.shape(result["linear_cka"]) == (3, 7)
        and result["test_samples"] == 200
        and "conv1" in capsys.readouterr().out
    )
    refused(capsys, similarity, [run, "--name", "layers"], "layers.json", "--name")
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(rows.replace('"test_acc"', '"acc"'))
    refused(capsys, similarity, [run], "metrics.jsonl", "damaged")
    refused(capsys, features, [run, "--clients", "0,0"], "--clients", "twice")


def test_features_of_a_run(run):
    features.main(
        [str(run), "--clients", "0,2", "--classes", "3,5,7", "--samples", "20", "--no-tsne"]
    )
    opened, arrays = analysis.open_run(run), np.load(run / "features.npz", allow_pickle=False)
    index = arrays["index_2"]
    assert (
        set(arrays["label_2"]) <= {3, 5, 7}
        and (opened.data.y[index].numpy() == arrays["label_2"]).all()
    )
    z = opened.client_net(2)[:-1](opened.data.normalise(opened.data.x[index])).detach()
    np.testing.assert_allclose(arrays["client_2"], z.numpy(), atol=1e-5)


def test_principal_components():
    torch.manual_seed(0)
    z = torch.randn(30, 5) * torch.tensor([5.0, 3.0, 0.1, 0.1, 0.1])
    xy, shares = features.principal_components(z)
    covariance = np.cov(z.double().numpy().T)
    assert (
        np.allclose(xy.var(0, ddof=1), np.linalg.eigvalsh(covariance)[::-1][:2])
        and shares.sum() > 0.95
    )
