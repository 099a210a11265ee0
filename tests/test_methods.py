"""Every method script: it runs, it is FedAvg when switched off, its numbers are right, its diff is small."""
import ast
import difflib
import importlib
import pathlib
import re
import shlex

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, same

import common
import fedalign
import fedavg
import fedprox

ROOT = pathlib.Path(common.__file__).parent
METHODS = {  # script: (flags that switch the method off, most code lines that it may change against fedavg.py)
    "fedavg": ([], 0),
    "fedprox": (["--mu", "0"], 4),
    "fedalign": (["--mu", "0", "--clip", "0"], 42),
}
SCRIPTS = {name: importlib.import_module(name) for name in METHODS}


def final(name, out, *argv):
    net, rows = SCRIPTS[name].main([*TINY, "--out", str(out), *argv])
    return net.state_dict(), rows


def test_every_script_is_listed():
    assert {p.stem for p in ROOT.glob("*.py")} - {"common"} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_trains(tmp_path, name):
    weights, rows = final(name, tmp_path / "on")
    assert len(rows) == 2 and all(v.isfinite().all() for v in weights.values())
    plain, _ = final("fedavg", tmp_path / "plain")
    assert same(weights, plain) == (name == "fedavg")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["cnn", "resnet56"])
def test_off_is_fedavg(tmp_path, name, model):
    flags = ["--model", model] + (["--local-steps", "2", "--clients", "2", "--batch-size", "16", "--rounds", "1"] if model == "resnet56" else ["--sample", "0.5", "--epochs", "2"])
    off, _ = final(name, tmp_path / "off", *flags, *METHODS[name][0])
    assert same(off, final("fedavg", tmp_path / "plain", *flags)[0])


@pytest.mark.parametrize("name", METHODS)
def test_one_closure_serves_all_clients(tmp_path, monkeypatch, name):
    """What a captured CUDA graph does: the step of a worker's first client is run for all others, in all rounds."""
    flags = ["--workers", "1", "--epochs", "2", "--lr-decay", "0.9"]
    expected, _ = final(name, tmp_path / "each", *flags)
    monkeypatch.setattr(common.Worker, "keep_first_step", True)
    assert same(expected, final(name, tmp_path / "first", *flags)[0])


def test_the_closure_test_catches_a_stale_tensor(tmp_path, monkeypatch):
    """fedprox.py with w as a plain list of copies instead of pinned tensors must not pass for right."""
    source = (ROOT / "fedprox.py").read_text()
    broken = source.replace('worker.pin("w", list(net.parameters()))', "[p.detach().clone() for p in net.parameters()]")
    assert broken != source
    module = {"__name__": "broken"}
    exec(compile(broken, str(tmp_path / "broken.py"), "exec"), module)
    flags = [*TINY, "--workers", "1", "--mu", "0.1"]
    expected = module["main"]([*flags, "--out", str(tmp_path / "each")])[0].state_dict()
    monkeypatch.setattr(common.Worker, "keep_first_step", True)
    assert not same(expected, module["main"]([*flags, "--out", str(tmp_path / "first")])[0].state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_workers_give_the_same_model(tmp_path, name):
    """Two clients at once on a thread each, or one on one thread: the same arithmetic in the same order."""
    torch_threads = common.CORES
    try:
        common.CORES = 1  # one thread a worker in both runs, so that sums inside operators agree too
        one, _ = final(name, tmp_path / "one", "--workers", "1")
        three, _ = final(name, tmp_path / "three", "--workers", "3")
    finally:
        common.CORES = torch_threads
    assert same(one, three)


@pytest.mark.parametrize("name", METHODS)
def test_docstring_command_parses(name):
    command = SCRIPTS[name].__doc__.strip().splitlines()[-1].split()
    assert command[:2] == ["python", f"{name}.py"]
    parser_args = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "run", lambda args, *_: parser_args.append(args))
        SCRIPTS[name].main(command[2:])
    assert parser_args[0].dataset == "cifar100" and parser_args[0].model == "resnet56" and parser_args[0].clients == 16


def code(path):
    """Lines of a script without its docstring, blank lines and comment lines."""
    source = path.read_text()
    docstring = ast.parse(source).body[0]
    return [line.rstrip() for line in source.splitlines()[docstring.end_lineno:] if line.strip() and not line.strip().startswith("#")]


def changed_lines(name):
    return sum(line[0] in "+-" for line in difflib.ndiff(code(ROOT / "fedavg.py"), code(ROOT / f"{name}.py")))


@pytest.mark.parametrize("name", METHODS)
def test_the_diff_is_the_method(name):
    plain, script = code(ROOT / "fedavg.py"), code(ROOT / f"{name}.py")
    lost = [line for line in difflib.ndiff(plain, script) if line.startswith("-")]
    assert changed_lines(name) <= METHODS[name][1] and len(lost) <= 2, lost


def test_readme_table_of_methods():
    """README's changed-line counts are those of the scripts."""
    rows = re.findall(r"^\| `(\w+)\.py` \|.*\| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert {name: int(count) for name, count in rows} == {name: changed_lines(name) for name in METHODS}


def readme_commands():
    return [line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
            for line in block.replace("\\\n", " ").splitlines()]


def test_readme_commands_parse():
    commands = [line for line in readme_commands() if re.match(r"python fed\w+\.py", line)]
    assert len(commands) >= 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "run", lambda args, *_: args)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for command in commands:
            words = shlex.split(command)
            if "--resume" not in words:
                SCRIPTS[words[1].removesuffix(".py")].main(words[2:])


# --- hand numbers


def worker_of(net, *argv, script=fedavg):
    """A worker on net in float64, and the step of its client, not yet trained."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "run", lambda args, *_: seen.append(args))
        script.main([*TINY, "--momentum", "0", "--weight-decay", "0", *argv])
    worker = common.Worker(net, common.glyphs(), seen[0], 4)
    worker.net.double().train()
    client = common.Client(0, np.arange(8), {})
    return worker, next(script.local_update(worker, client, {"round": 1}, seen[0]))


def test_fedprox_step_by_hand():
    """A linear classifier z = W x + b of two inputs and three classes, with v = w + d, d of both signs. By hand
        dL/dW = (softmax(z) - onehot(y))' x / n + mu d_W,   dL/db = mean(softmax(z) - onehot(y)) + mu d_b,
    the new v is v - lr dL/dv, and the loss has mu/2 |d|^2."""
    mu, lr = 0.7, 0.3
    net = nn.Sequential(common.Classifier(2, 3))
    worker, step = worker_of(net, "--mu", str(mu), "--lr", str(lr), script=fedprox)
    w = [p.detach().clone().numpy() for p in worker.net.parameters()]
    d = [np.array([[1.0, -2.0], [0.5, 0.0], [-0.25, 3.0]]), np.array([0.1, -0.2, 0.3])]
    with torch.no_grad():
        for p, shift in zip(worker.net.parameters(), d):
            p.add_(torch.from_numpy(shift))
    v = [a + b for a, b in zip(w, d)]
    x, y = np.array([[1.0, 2.0], [-1.0, 0.5], [0.0, -3.0], [2.0, 2.0]]), np.array([0, 2, 1, 1])
    z = x @ v[0].T + v[1]
    q = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    error = q - np.eye(3)[y]
    expected = [v[0] - lr * (error.T @ x / 4 + mu * d[0]), v[1] - lr * (error.mean(0) + mu * d[1])]
    loss = step(torch.from_numpy(x), torch.from_numpy(y))
    assert loss.item() == pytest.approx(-np.log(q[range(4), y]).mean() + mu / 2 * sum((s**2).sum() for s in d), rel=1e-12)
    for p, e in zip(worker.net.parameters(), expected):
        assert np.allclose(p.detach().numpy(), e, rtol=1e-12)


def test_transmitting_matrix_by_loops():
    """1/(HW) sum_p a_p b_p' with the 4 x 4 input averaged over 2 x 2 squares to the output's positions."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 5, 2, 2))
    t = np.zeros((2, 3, 5))
    for i in range(2):
        for row in range(2):
            for column in range(2):
                pooled = a[i, :, 2 * row:2 * row + 2, 2 * column:2 * column + 2].mean((1, 2))
                t[i] += np.outer(pooled, b[i, :, row, column]) / 4
    assert np.allclose(fedalign.transmitting_matrix(torch.from_numpy(a), torch.from_numpy(b)).numpy(), t, rtol=1e-12)


def test_spectral_norm():
    """Against singular values: of relu features, on which ten steps from ones are accurate to 1e-6; of matrices of both
    signs, with more steps; and of [[1, 0], [0, 3]] by hand after one and two steps from (1, 1): T T' = diag(1, 9), so the
    norms are sqrt(82) and then |(1, 81)| / sqrt(82), and K is the root of the last."""
    g = torch.Generator().manual_seed(0)
    features = torch.rand(6, 20, 30, dtype=torch.float64, generator=g)
    assert torch.allclose(fedalign.spectral_norm(features), torch.linalg.matrix_norm(features, 2), rtol=1e-6)
    signed = torch.randn(6, 5, 4, dtype=torch.float64, generator=g)
    assert torch.allclose(fedalign.spectral_norm(signed, 500), torch.linalg.matrix_norm(signed, 2), rtol=1e-6)
    t = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))[None]
    assert fedalign.spectral_norm(t, 1).item() == pytest.approx(82**0.25)
    assert fedalign.spectral_norm(t, 2).item() == pytest.approx(((1 + 81**2) / 82)**0.25)
    assert fedalign.spectral_norm(torch.zeros(2, 3, 3)).tolist() == [pytest.approx(0, abs=1e-6)] * 2
    for size in (1e-12, 1e12):  # whose fourth powers are beyond fp32
        assert torch.allclose(fedalign.spectral_norm(size * features.float()), size * torch.linalg.matrix_norm(features, 2).float(), rtol=1e-5)


@pytest.mark.parametrize("scale", ["ce", "none"])
@pytest.mark.parametrize("lip_input", ["slim", "full"])
def test_fedalign_step_by_an_independent_formula(scale, lip_input):
    """On cnn, block L is the second convolution: 16 -> 32 channels, at width 0.25 its leading 8 -> 8. The loss is spelled out
    with functional calls and singular values, its gradient taken by autograd of
        CE + mu c mean((K_S - K_F)^2),   K_F constant, c = CE / L_Lip constant (or 1)
    with f_(L-1) detached, in float64. Clipping is off."""
    mu, lr = 0.3, 0.1
    torch.manual_seed(1)
    net = common.build_net("cnn", 62)
    worker, step = worker_of(net, "--mu", str(mu), "--lr", str(lr), "--clip", "0", "--lip-scale", scale, "--lip-input", lip_input, script=fedalign)
    x, y = torch.randn(5, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 1, 4, 1, 5])
    p = {k: v.detach().clone().requires_grad_() for k, v in worker.net.named_parameters()}
    h = F.conv2d(x, p["conv1.0.weight"], p["conv1.0.bias"]).relu()
    f = F.conv2d(F.max_pool2d(h, 2), p["conv2.1.weight"], p["conv2.1.bias"]).relu()
    z = F.max_pool2d(f, 2).flatten(1)
    for name in ("fc1.2", "fc2.0", "fc3.0", "fc4.0", "classifier"):
        z = F.linear(z, p[name + ".weight"], p[name + ".bias"])
        z = z.relu() if name in ("fc1.2", "fc2.0", "fc3.0") else z
    ce = -(z - z.logsumexp(1, keepdim=True))[range(5), y].mean()
    h, f = h.detach(), f.detach()
    f_s = F.conv2d(F.max_pool2d(h[:, :8], 2), p["conv2.1.weight"][:8, :8], p["conv2.1.bias"][:8]).relu()

    def k(a, b):
        a = F.adaptive_avg_pool2d(a, (10, 10))
        return torch.linalg.svdvals(torch.einsum("nihw,njhw->nij", a, b) / 100)[:, 0]

    lip = (k(h if lip_input == "full" else h[:, :8], f_s) - k(h, f)).square().mean()
    total = ce + mu * (ce.item() / lip.item() if scale == "ce" else 1) * lip
    total.backward()
    loss = step(x, y)
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    if scale == "ce":
        assert loss.item() == pytest.approx((1 + mu) * ce.item(), rel=1e-9)
    for name, v in worker.net.named_parameters():
        assert torch.allclose(v, p[name] - lr * p[name].grad, rtol=1e-5, atol=1e-8), name


def test_fedalign_survives_dead_features():
    """All-zero features make T a matrix of zeros: no NaN from the norm, the division or the gradient."""
    net = common.build_net("cnn", 62)
    nn.init.constant_(net[0][0].bias, -1e3)
    worker, step = worker_of(net, script=fedalign)
    assert step(torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3])).isfinite()
    assert all(p.isfinite().all() for p in worker.net.parameters())


# --- CUDA

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["cnn", "resnet56"])
def test_graph_and_eager_agree(tmp_path, name, model):
    flags = ["--device", "cuda", "--model", model, "--epochs", "2", "--deterministic", "--workers", "1", "--lr-decay", "0.9"]
    graph, _ = final(name, tmp_path / "graph", *flags)
    eager, _ = final(name, tmp_path / "eager", *flags, "--no-graph")
    assert all(torch.allclose(graph[k].double(), eager[k].double(), rtol=1e-4, atol=1e-5) for k in graph)


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_streams_agree(tmp_path, name):
    flags = ["--device", "cuda", "--epochs", "2", "--deterministic"]
    one, _ = final(name, tmp_path / "one", *flags, "--workers", "1")
    assert all(same(one, final(name, tmp_path / workers, *flags, "--workers", workers)[0]) for workers in ("3", "auto"))


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_gpu_off_is_fedavg(tmp_path, name):
    flags = ["--device", "cuda", "--deterministic", "--epochs", "2"]
    assert same(final(name, tmp_path / "off", *flags, *METHODS[name][0])[0], final("fedavg", tmp_path / "plain", *flags)[0])


@needs_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gpu_precisions_train(tmp_path, precision):
    for name in METHODS:
        weights, _ = final(name, tmp_path / name, "--device", "cuda", "--precision", precision)
        assert all(v.isfinite().all() for v in weights.values())
