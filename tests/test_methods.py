"""Every method script: it runs, it is FedAvg when switched off, its numbers are right, its diff is small."""

import ast
import copy
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
from conftest import TINY, args_of, same
from torch.utils._python_dispatch import TorchDispatchMode

import common
import fedalign
import fedavg
import fedcka
import feddyn
import fedgkd
import fedntd
import fedprox
import gradaug
import moon
import qfedavg
import rfedavg
import scaffold
import stochdepth

ROOT = pathlib.Path(common.__file__).parent
METHODS = {  # script: (flags that switch the method off, most code lines that it may change against fedavg.py)
    "fedavg": ([], 0),
    "fedprox": (["--mu", "0"], 4),
    "moon": (["--mu", "0"], 18),
    "mixup": (["--gamma", "0"], 13),
    "stochdepth": (["--keep", "1"], 41),
    "gradaug": (["--mu", "0"], 45),
    "fedalign": (["--mu", "0", "--clip", "0"], 41),
    "fedcka": (["--mu", "0"], 67),
    "scaffold": (None, 56),
    "fedmlb": (["--lambda1", "0", "--lambda2", "0"], 49),
    "fedkd": (["--gamma", "0"], 23),
    "fedntd": (["--ntd-beta", "0"], 20),
    "fedgkd": (["--gamma", "0"], 20),
    "feddyn": (["--dyn-alpha", "0", "--weighting", "samples"], 38),
    "rfedavg": (["--lam", "0"], 87),
    "qfedavg": (None, 38),
}
RESNET = [
    "--model",
    "resnet56",
    "--local-steps",
    "2",
    "--clients",
    "2",
    "--batch-size",
    "16",
    "--rounds",
    "1",
]
SCRIPTS = {name: importlib.import_module(name) for name in METHODS}


def final(name, out, *argv):
    small = (
        RESNET if name == "stochdepth" and "--model" not in argv else []
    )  # it needs residual blocks
    net, rows = SCRIPTS[name].main([*TINY, *small, "--out", str(out), *argv])
    return net.state_dict(), rows


PLAIN = {}


def plain_final(out, *argv):
    """final() of fedavg.py, run once for each set of flags."""
    if argv not in PLAIN:
        PLAIN[argv] = final("fedavg", out, *argv)[0]
    return PLAIN[argv]


def test_every_script_is_listed():
    assert {p.stem for p in ROOT.glob("*.py") if "\ndef local_update(" in p.read_text()} == set(
        METHODS
    )


@pytest.mark.parametrize("name", METHODS)
def test_trains(tmp_path, name):
    """Three rounds (a client's last model and the server's memory act from the second on) change the weights, unlike FedAvg's."""
    flags = [*(RESNET if name == "stochdepth" else []), "--rounds", "3", "--weighting", "uniform"]
    flags += ["--projection", "256"] if name == "moon" else []
    weights, rows = final(name, tmp_path / "on", *flags)
    assert len(rows) == 3 and all(v.isfinite().all() for v in weights.values())
    assert same(weights, plain_final(tmp_path / "plain", *flags)) == (name == "fedavg")


@pytest.mark.parametrize(
    "name, model",
    [(name, "cnn") for name, (off, _) in METHODS.items() if off is not None]
    + [
        (name, "resnet56")
        for name in ("stochdepth", "gradaug", "fedalign", "fedcka", "fedmlb", "rfedavg")
    ],
)  # these might touch batch norm
def test_off_is_fedavg(tmp_path, name, model):
    flags = (
        RESNET if model == "resnet56" else ["--model", model, "--sample", "0.5", "--epochs", "2"]
    )
    flags = [
        *flags,
        *(["--projection", "256"] if name == "moon" else []),
        *(["--clip", "10"] if name == "fedmlb" else []),
    ]
    off, _ = final(name, tmp_path / "off", *flags, *METHODS[name][0])
    assert same(off, plain_final(tmp_path / "plain", *flags))


@pytest.mark.parametrize(
    "name, flags, plain",
    [
        ("qfedavg", ["--q", "0"], ["--weighting", "uniform"]),
        ("fedavg", ["--server", "avgm", "--server-momentum", "0"], []),
        ("scaffold", ["--rounds", "1"], ["--rounds", "1"]),
        ("scaffold", ["--rounds", "1", "--momentum", "0"], ["--rounds", "1", "--momentum", "0"]),
        ("feddyn", ["--dyn-alpha", "0"], ["--weighting", "uniform"]),
    ],
)
def test_off_is_nearly_fedavg(tmp_path, name, flags, plain):
    """Where the formula rounds differently: the same to 1e-6."""
    a, b = final(name, tmp_path / "off", *flags)[0], final("fedavg", tmp_path / "plain", *plain)[0]
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


VARIANTS = [
    *((name, []) for name in METHODS),
    ("scaffold", ["--correction", "gradient"]),
    ("fedmlb", ["--dyn-alpha", "0.1"]),
    ("rfedavg", ["--variant", "rfedavg"]),
    ("rfedavg", ["--reading", "code", "--noise", "3"]),
    ("fedkd", ["--hint", "features"]),
]


@pytest.mark.parametrize("name, more", VARIANTS)
def test_one_closure_serves_all_clients(tmp_path, monkeypatch, name, more):
    """What a captured CUDA graph does: the step of a worker's first client is run for all others, in all rounds."""
    flags = [
        "--workers",
        "1",
        "--lr-decay",
        "0.9",
        *more,
        *(["--rounds", "2"] if name == "stochdepth" else ["--epochs", "2"]),
    ]
    expected, _ = final(name, tmp_path / "each", *flags)
    monkeypatch.setattr(common.Worker, "keep_first_step", True)
    assert same(expected, final(name, tmp_path / "first", *flags)[0])


class Waits(TorchDispatchMode):
    """Raises on what, on a GPU, makes the host wait for the device, or copies from the host: neither may be in a CUDA graph."""

    aten = torch.ops.aten
    WAITING = {
        aten._local_scalar_dense,
        aten.is_nonzero,
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten._unique2,
        aten.unique_consecutive,
        aten.bincount,
        aten.lift_fresh,
    }  # the last: a tensor of Python's numbers

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = (
            args[1]
            if func.overloadpacket in (self.aten.index, self.aten.index_put_, self.aten.index_put)
            else ()
        )
        if func.overloadpacket in self.WAITING or any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in masks
        ):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_waits_are_found():
    x = torch.ones(3)
    with Waits():
        x.add(1).mul_(x)[torch.arange(2)].sum()
        for waiting in (
            lambda: x.sum().item(),
            lambda: bool(x[0] > 0),
            lambda: x[x > 0],
            lambda: torch.tensor(1.0),
            lambda: x.nonzero(),
            lambda: torch.equal(x, x),
        ):
            with pytest.raises(AssertionError, match="waits"):
                waiting()


@pytest.mark.parametrize(
    "name, more",
    [
        *VARIANTS,
        ("fedcka", ["--similarity-metric", "kernel-cka"]),
        ("fedavg", ["--clip", "1", "--augment", "rotate10,crop,flip", "--nesterov"]),
    ],
)
def test_steps_never_wait_for_the_device(tmp_path, monkeypatch, name, more):
    """Whole steps, from the choice of samples to the optimizer, in both rounds, when methods have their last models."""
    step, count = common.Worker._step, []

    def watched(worker, *args):
        with Waits():
            step(worker, *args)
        count.append(args)

    monkeypatch.setattr(common.Worker, "_step", watched)
    final(name, tmp_path / "run", "--workers", "1", "--rounds", "2", *more)
    assert len(count) > 3


def test_the_closure_test_catches_a_stale_tensor(tmp_path, monkeypatch):
    """fedprox.py with w as a plain list of copies instead of pinned tensors must not pass for right."""
    source = (ROOT / "fedprox.py").read_text()
    broken = source.replace(
        'worker.pin("w", list(net.parameters()))', "[p.detach().clone() for p in net.parameters()]"
    )
    assert broken != source
    module = {"__name__": "broken"}
    exec(compile(broken, str(tmp_path / "broken.py"), "exec"), module)
    flags = [*TINY, "--workers", "1", "--mu", "0.1"]
    expected = module["main"]([*flags, "--out", str(tmp_path / "each")])[0].state_dict()
    monkeypatch.setattr(common.Worker, "keep_first_step", True)
    assert not same(
        expected, module["main"]([*flags, "--out", str(tmp_path / "first")])[0].state_dict()
    )


@pytest.mark.parametrize("name", METHODS)
def test_workers_give_the_same_model(tmp_path, name):
    """Two clients at once on a thread each, or one on one thread: the same arithmetic in the same order."""
    torch_threads = common.CORES
    try:
        common.CORES = (
            1  # one thread a worker in both runs, so that sums inside operators agree too
        )
        one, _ = final(name, tmp_path / "one", "--workers", "1")
        three, _ = final(name, tmp_path / "three", "--workers", "3")
    finally:
        common.CORES = torch_threads
    assert same(one, three)


@pytest.mark.parametrize("name", METHODS)
def test_docstring_command_parses(name):
    command = SCRIPTS[name].__doc__.replace("\\\n", " ").strip().splitlines()[-1].split()
    assert command[:2] == ["python", f"{name}.py"]
    args = args_of(SCRIPTS[name], *command[2:])
    assert args.dataset in ("cifar100", "cifar10", "mnist")
    assert args.clients in (10, 16, 20, 100)


def code(path):
    """Lines of a script without its docstring, blank lines and comment lines."""
    source = path.read_text()
    docstring = ast.parse(source).body[0]
    return [
        line.rstrip()
        for line in source.splitlines()[docstring.end_lineno :]
        if line.strip() and not line.strip().startswith("#")
    ]


def changed_lines(name):
    return sum(
        line[0] in "+-"
        for line in difflib.ndiff(code(ROOT / "fedavg.py"), code(ROOT / f"{name}.py"))
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_diff_is_the_method(name):
    plain, script = code(ROOT / "fedavg.py"), code(ROOT / f"{name}.py")
    lost = [line for line in difflib.ndiff(plain, script) if line.startswith("-")]
    assert changed_lines(name) <= METHODS[name][1] and len(lost) <= 2, lost


def test_readme_table_of_methods():
    """README's changed-line counts are those of the scripts."""
    rows = re.findall(r"^\| `(\w+)\.py` \|.*\| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    assert {name: int(count) for name, count in rows} == {
        name: changed_lines(name) for name in METHODS
    }


def readme_commands():
    return [
        line.split("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]


def test_readme_commands_parse():
    commands = [line for line in readme_commands() if re.match(r"python fed\w+\.py", line)]
    assert len(commands) >= 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for command in commands:
            words = shlex.split(command)
            if not {"--resume", "--similarity-of"} & {*words}:  # which need a run
                args_of(SCRIPTS[words[1].removesuffix(".py")], *words[2:])


# --- hand numbers


def worker_of(net, *argv, script=fedavg):
    """A worker on net in float64, and the step of its client, not yet trained."""
    args = args_of(script, *TINY, "--momentum", "0", "--weight-decay", "0", *argv)
    worker = common.Worker(net, common.glyphs(), args, 4)
    worker.net.double().train()
    client = common.Client(0, np.arange(8), {})
    return worker, next(script.local_update(worker, client, {"round": 1}, args))


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
    assert loss.item() == pytest.approx(
        -np.log(q[range(4), y]).mean() + mu / 2 * sum((s**2).sum() for s in d), rel=1e-12
    )
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
                pooled = a[i, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean((1, 2))
                t[i] += np.outer(pooled, b[i, :, row, column]) / 4
    assert np.allclose(
        fedalign.transmitting_matrix(torch.from_numpy(a), torch.from_numpy(b)).numpy(),
        t,
        rtol=1e-12,
    )


def test_spectral_norm():
    """Against singular values: of relu features, on which ten steps from ones are accurate to 1e-6; of matrices of both
    signs, with more steps; and of [[1, 0], [0, 3]] by hand after one and two steps from (1, 1): T T' = diag(1, 9), so the
    norms are sqrt(82) and then |(1, 81)| / sqrt(82), and K is the root of the last."""
    g = torch.Generator().manual_seed(0)
    features = torch.rand(6, 20, 30, dtype=torch.float64, generator=g)
    assert torch.allclose(
        fedalign.spectral_norm(features), torch.linalg.matrix_norm(features, 2), rtol=1e-6
    )
    signed = torch.randn(6, 5, 4, dtype=torch.float64, generator=g)
    assert torch.allclose(
        fedalign.spectral_norm(signed, 500), torch.linalg.matrix_norm(signed, 2), rtol=1e-6
    )
    t = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))[None]
    assert fedalign.spectral_norm(t, 1).item() == pytest.approx(82**0.25)
    assert fedalign.spectral_norm(t, 2).item() == pytest.approx(((1 + 81**2) / 82) ** 0.25)
    assert fedalign.spectral_norm(torch.zeros(2, 3, 3)).tolist() == [pytest.approx(0, abs=1e-6)] * 2
    for size in (1e-12, 1e12):  # whose fourth powers are beyond fp32
        assert torch.allclose(
            fedalign.spectral_norm(size * features.float()),
            size * torch.linalg.matrix_norm(features, 2).float(),
            rtol=1e-5,
        )


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
    worker, step = worker_of(
        net,
        "--mu",
        str(mu),
        "--lr",
        str(lr),
        "--clip",
        "0",
        "--lip-scale",
        scale,
        "--lip-input",
        lip_input,
        script=fedalign,
    )
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
    f_s = F.conv2d(
        F.max_pool2d(h[:, :8], 2), p["conv2.1.weight"][:8, :8], p["conv2.1.bias"][:8]
    ).relu()

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
    assert step(
        torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    ).isfinite()
    assert all(p.isfinite().all() for p in worker.net.parameters())


# --- CUDA

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["cnn", "resnet56"])
def test_graph_and_eager_agree(tmp_path, name, model):
    if name == "stochdepth" and model == "cnn":
        pytest.skip("stochdepth needs residual blocks")
    flags = [
        "--device",
        "cuda",
        "--model",
        model,
        "--epochs",
        "2",
        "--deterministic",
        "--workers",
        "1",
        "--lr-decay",
        "0.9",
    ]
    graph, _ = final(name, tmp_path / "graph", *flags)
    eager, _ = final(name, tmp_path / "eager", *flags, "--no-graph")
    assert all(
        torch.allclose(graph[k].double(), eager[k].double(), rtol=1e-4, atol=1e-5) for k in graph
    )


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_streams_agree(tmp_path, name):
    flags = ["--device", "cuda", "--epochs", "2", "--deterministic"]
    one, _ = final(name, tmp_path / "one", *flags, "--workers", "1")
    assert all(
        same(one, final(name, tmp_path / workers, *flags, "--workers", workers)[0])
        for workers in ("3", "auto")
    )


@needs_gpu
@pytest.mark.parametrize("name", [name for name, (off, _) in METHODS.items() if off is not None])
def test_gpu_off_is_fedavg(tmp_path, name):
    flags = ["--device", "cuda", "--deterministic", "--epochs", "2", "--model", "cnn"]
    assert same(
        final(name, tmp_path / "off", *flags, *METHODS[name][0])[0],
        final("fedavg", tmp_path / "plain", *flags)[0],
    )


@needs_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gpu_precisions_train(tmp_path, precision):
    for name in METHODS:
        weights, _ = final(name, tmp_path / name, "--device", "cuda", "--precision", precision)
        assert all(v.isfinite().all() for v in weights.values())


# --- hand numbers of the other methods

DOUBLE = dict(dtype=torch.float64)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def cross_entropy(z, y):
    return -np.log(softmax(z)[np.arange(len(y)), y]).mean()


def kl(p, q):
    return (p * np.log(p / q)).sum(1).mean()


def two_networks(model="cnn", classes=62, **kw):
    """A global network, and a worker whose own has moved on from it by a small random step."""
    torch.manual_seed(3)
    return common.build_net(model, classes, **kw)


def perturb(net, scale=0.05, seed=0):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(scale * torch.randn(p.shape, generator=g, dtype=p.dtype))


def batch(n=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 32, 32, generator=g, **DOUBLE), torch.randint(0, 62, (n,), generator=g)


def state_of(net):
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


def numpy_logits(net, x):
    with torch.no_grad():
        return copy.deepcopy(net).eval()(x).numpy()


def begin(name, argv=(), net=None, state=None, server=None, seed=3):
    """A worker in float64 with the step of its client; frozen helpers hold the global weights, the network has moved on."""
    script = SCRIPTS[name]
    flags = ["--momentum", "0", "--weight-decay", "0", "--lr", "0.1"]
    args = args_of(script, *TINY, *flags, *argv)
    net = net or two_networks(projection=args.projection or 0)
    worker = common.Worker(net.double(), common.glyphs(), args, 40)
    batches = worker.batches
    worker.batches = lambda client: ((x.double(), y) for x, y in batches(client))
    client = common.Client(0, np.arange(8), dict(state or {}))
    server = {"round": 2, "clients": [0, 1], **(server or {})}
    worker._begin(client, server, net.state_dict(), [6] * 4)
    generator = script.local_update(worker, client, server, args)
    step = next(generator)
    w = state_of(worker.net)
    perturb(worker.net)
    return worker, step, generator, client, args, w


def gradients(worker, step, x, y):
    """(loss, {name: gradient}) of one step of plain SGD, from how far it moved the parameters."""
    before = {k: p.detach().clone() for k, p in worker.net.named_parameters()}
    loss = step(x, y).item()
    return loss, {k: (before[k] - p.detach()) / 0.1 for k, p in worker.net.named_parameters()}


def check_gradients(found, loss, params):
    expected = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    for k, e in zip(params, expected):
        assert torch.allclose(
            found[k], torch.zeros_like(found[k]) if e is None else e, rtol=1e-6, atol=1e-9
        ), k


def at(net, weights):
    """A function x -> net(x) at the weights, differentiable in them."""
    return lambda x: torch.func.functional_call(net, weights, (x,))


def test_contrastive_loss_by_hand():
    """cos = 1 to z_glob and 0 to z_prev, temperature 1/2: -log(e^2 / (e^2 + e^0)); and the other way round."""
    z, other = torch.tensor([[2.0, 0.0]], **DOUBLE), torch.tensor([[0.0, 5.0]], **DOUBLE)
    e2 = np.exp(2)
    assert moon.contrastive_loss(z, 3 * z, other, 0.5).item() == pytest.approx(
        -np.log(e2 / (e2 + 1))
    )
    assert moon.contrastive_loss(z, other, 3 * z, 0.5).item() == pytest.approx(
        -np.log(1 / (e2 + 1))
    )
    assert moon.contrastive_loss(z, -z, other, 0.5).item() == pytest.approx(
        -np.log((1 / e2) / (1 / e2 + 1))
    )


def test_moon_step():
    prev = two_networks().double()
    perturb(prev, 0.2, seed=9)
    worker, step, generator, client, args, w = begin(
        "moon", ["--mu", "0.6"], state={"net": state_of(prev)}
    )
    x, y = batch()
    params = {k: p.detach().clone().requires_grad_() for k, p in worker.net.named_parameters()}
    features, glob_z, prev_z = (
        worker.net[:-1],
        at(worker.net[:-1], {k: v for k, v in w.items() if "classifier" not in k})(x),
        prev[:-1](x).detach(),
    )
    z = at(features, {k: v for k, v in params.items() if "classifier" not in k})(x)
    out = z @ params["classifier.weight"].T + params["classifier.bias"]
    cos = [(z * o).sum(1) / z.norm(dim=1) / o.norm(dim=1) / 0.5 for o in (glob_z, prev_z)]
    total = F.cross_entropy(out, y) - 0.6 * (cos[0] - torch.logsumexp(torch.stack(cos), 0)).mean()
    loss, grads = gradients(worker, step, x, y)
    assert loss == pytest.approx(total.item(), rel=1e-6)
    check_gradients(grads, total, params)
    with pytest.raises(StopIteration):
        next(generator)
    assert same(client.state["net"], worker.net.state_dict()) and not same(client.state["net"], w)


@pytest.mark.parametrize("name", ["moon", "fedcka"])
def test_contrast_is_left_out_before_a_client_has_a_model(name):
    worker, step, *_ = begin(name)
    x, y = batch()
    expected = cross_entropy(numpy_logits(worker.net, x), y.numpy())
    assert step(x, y).item() == pytest.approx(expected, rel=1e-9)


def test_mixup_step():
    worker, step, _, _, args, _ = begin("mixup", ["--gamma", "0.8"])
    x, y = batch(n=5)  # a short batch: the permutation stays within it
    beta, order = worker.row("beta").item(), worker.row("order")[:5].argsort()
    assert 0 < beta < 1 and sorted(order.tolist()) == [0, 1, 2, 3, 4]
    z = numpy_logits(worker.net, beta * x + (1 - beta) * x[order])
    assert step(x, y).item() == pytest.approx(
        beta * cross_entropy(z, y.numpy()) + (1 - beta) * cross_entropy(z, y[order].numpy()),
        rel=1e-9,
    )
    draws = worker.draws["beta"]
    drawn = {}
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the rows that the script draws, twenty thousand of them
        patch.setattr(
            worker,
            "draw",
            lambda name, f: drawn.update({name: f(np.random.default_rng(0), 20_000)}),
        )
        next(SCRIPTS["mixup"].local_update(worker, None, {}, args))
    assert drawn["beta"].shape == (20_000,) and draws.shape == (40,)  # one number a batch
    assert drawn["beta"].var() == pytest.approx(
        1 / (4 * (2 * 0.8 + 1)), rel=0.03
    )  # of Beta(gamma, gamma)


def test_stochdepth_probabilities():
    """rho_l = 1 - l/L (1 - rho_L): of 4 blocks at 0.8 by hand 0.95, 0.9, 0.85, 0.8; the code's rule 1, 1 - 0.2/3, ..., 0.8."""
    assert stochdepth.keep_probabilities(4, 0.8) == pytest.approx([0.95, 0.9, 0.85, 0.8])
    assert stochdepth.keep_probabilities(4, 0.8, "code") == pytest.approx(
        [1, 1 - 0.2 / 3, 1 - 0.4 / 3, 0.8]
    )


def test_stochastic_block():
    """Kept: relu(F + I), statistics move; skipped: relu(I), they stand still and gradients are zero; eval: relu(keep F + I)."""
    torch.manual_seed(0)
    plain = common.build_net("resnet56", 10)[2][0].double()
    block = stochdepth.StochasticResidual(plain, 0.7)
    x = torch.randn(4, 64, 8, 8, **DOUBLE)
    block.train()
    norms = [m for m in block.branch if isinstance(m, nn.BatchNorm2d)]
    block.kept.zero_()
    out = block(x)
    out.sum().backward()
    with torch.no_grad():
        assert torch.equal(out, F.relu(copy.deepcopy(plain.shortcut)(x)))
    assert all(n.num_batches_tracked == 0 and n.running_mean.abs().max() == 0 for n in norms)
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in block.branch.parameters())
    assert plain.shortcut[1].num_batches_tracked == 1
    block.kept.fill_(1)
    expected = copy.deepcopy(plain).train()
    assert torch.allclose(block(x), expected(x)) and all(n.num_batches_tracked == 1 for n in norms)
    assert torch.allclose(norms[0].running_mean, expected.branch[1].running_mean)
    block.eval()
    assert torch.allclose(block(x), F.relu(0.7 * block.branch(x) + block.shortcut(x)))


def test_stochdepth_draws_each_block_at_its_rate():
    net = common.build_net("resnet56", 62)
    args = common.argparse.Namespace(keep=0.5, rule="paper", model="resnet56")
    stochdepth.adapt(net, args)
    assert set(net.state_dict()) == set(common.build_net("resnet56", 62).state_dict())
    worker, step, *_ = begin("stochdepth", ["--keep", "0.5", "--model", "resnet56"], net=net)
    worker.sizes = [6] * 40
    drawn = []
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # the rows that the script draws, a thousand of them
        patch.setattr(
            worker, "draw", lambda name, f: drawn.append(f(np.random.default_rng(0), 1000))
        )
        next(stochdepth.local_update(worker, None, {}, worker.args))
    assert (
        np.abs(drawn[0].mean(0) - stochdepth.keep_probabilities(18, 0.5)).max() < 0.06
    )  # 4 standard errors
    assert set(np.unique(drawn[0])) == {0.0, 1.0} and worker.draws["kept"].shape == (40, 18)
    with pytest.raises(common.UserError, match="residual"):
        stochdepth.adapt(common.build_net("cnn", 62), args)


def test_gradaug_step():
    """CE + mu (KL_1 + KL_2), the students by at_width on resized images, the teacher constant."""
    worker, step, _, _, args, _ = begin("gradaug", ["--subnets", "2", "--mu", "0.4"])
    assert len(worker.shapes) == 4 and all(
        len(s) == 2 and s[0][0] >= s[1][0] for s in worker.shapes
    )
    least = gradaug.same_channels(0.8, (16, 32, 84, 120, 256))
    assert all(
        shape[-1][0] == least for shape in worker.shapes
    )  # the narrowest is always --min-width
    assert {r for s in worker.shapes for _, r in s} <= {32, 28, 24, 20}
    channels, rng = (16, 32, 64, 128, 256), np.random.default_rng(0)
    many = gradaug.draw_shapes(rng, 400, args, channels, [32, 28, 24, 20])
    assert {r for s in many for _, r in s} == {32, 28, 24, 20} and len({s[0][0] for s in many}) > 5
    args.widths = "paper"
    assert (
        len({s[1][0] for s in gradaug.draw_shapes(rng, 400, args, channels, [32])}) > 5
    )  # then all are random
    worker.shape = ((0.9, 24), (0.5, 20))
    x, y = batch()
    params = {k: p.detach().clone().requires_grad_() for k, p in worker.net.named_parameters()}
    twin = copy.deepcopy(worker.net)
    for (_, p), value in zip(twin.named_parameters(), params.values()):
        p.data = value.data
    out = twin(x)
    teacher, total = out.detach().softmax(1), F.cross_entropy(out, y)
    for width, size in worker.shape:
        small = F.interpolate(
            F.interpolate(x, (size, size), mode="bilinear", align_corners=True),
            (32, 32),
            mode="bilinear",
            align_corners=True,
        )
        student = common.at_width(twin, small, width).log_softmax(1)
        total = total + 0.4 * (teacher * (teacher.log() - student)).sum(1).mean()
    expected = torch.autograd.grad(total, list(twin.parameters()))
    loss, grads = gradients(worker, step, x, y)
    assert loss == pytest.approx(total.item(), rel=1e-9)
    assert all(torch.allclose(g, e, rtol=1e-6, atol=1e-9) for g, e in zip(grads.values(), expected))


def test_gradaug_defaults_and_same_channels():
    mus = [args_of(gradaug, *TINY, "--subnets", n).mu for n in "1234"]
    assert mus == [2.0, 1.75, 1.5, 1.25]
    assert common.make_divisible(50, 1.0) == 50
    for width in (0.8, 0.813, 0.9, 0.999, 1.0):
        found = gradaug.same_channels(width, (16, 32, 64, 128, 256))
        assert found <= width and all(
            common.make_divisible(c, found) == common.make_divisible(c, width)
            for c in (16, 32, 64, 128, 256)
        )


def test_cka():
    """Gram form = feature form ||B'A||^2 / (||A'A|| ||B'B||) to 1e-10; invariant to rotations and scaling; 1 with itself."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 40, generator=g, **DOUBLE), torch.randn(9, 25, generator=g, **DOUBLE) + 2
    ca, cb = a - a.mean(0), b - b.mean(0)
    feature_form = (cb.T @ ca).square().sum() / ((ca.T @ ca).norm() * (cb.T @ cb).norm())
    assert abs(fedcka.linear_cka(a, b) - feature_form) < 1e-10 and 0 < feature_form < 1
    q, _ = torch.linalg.qr(torch.randn(40, 40, generator=g, **DOUBLE))
    assert (
        abs(fedcka.linear_cka(3 * a @ q, b) - feature_form) < 1e-10
        and abs(fedcka.linear_cka(a, a) - 1) < 1e-10
    )
    d = ((a[:, None] - a[None]) ** 2).sum(2)
    k = torch.exp(-d / (2 * d.flatten().median()))
    d = ((b[:, None] - b[None]) ** 2).sum(2)
    l = torch.exp(-d / (2 * d.flatten().median()))
    h = torch.eye(9, **DOUBLE) - 1 / 9
    even = [v[:8] for v in (a, b)]
    grams = []
    for v in even:  # numpy's median averages the middle two
        d = ((v[:, None] - v[None]) ** 2).sum(2)
        grams.append(torch.exp(-d / (2 * float(np.median(d.numpy())))))
    centre = torch.eye(8, **DOUBLE) - 1 / 8
    centred = [centre @ v @ centre for v in grams]
    assert (
        abs(
            fedcka.kernel_cka(*even)
            - (centred[0] * centred[1]).sum() / (centred[0].norm() * centred[1].norm())
        )
        < 1e-10
    )
    hsic = lambda k, l: torch.trace(k @ h @ l @ h)  # noqa: E731
    assert abs(fedcka.kernel_cka(a, b) - hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()) < 1e-10
    assert fedcka.squared_frobenius(a[:, :25], b).item() == pytest.approx(
        -((a[:, :25] - b) ** 2).sum().item() / 225
    )
    assert fedcka.vectorized_cosine(a[:, :25], b).item() == pytest.approx(
        ((a[:, :25] * b).sum() / (a[:, :25].norm() * b.norm())).item()
    )
    ones = torch.ones(4, 3, requires_grad=True)
    fedcka.linear_cka(ones, torch.ones(4, 3)).backward()
    assert ones.grad.isfinite().all()


def test_cka_in_single_precision():
    """As in float64 whatever the activations' scale and mean, gradient too."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 2000, generator=g), torch.randn(64, 2000, generator=g)
    a[:, 0] += 30 * b[:, 0]
    for cka in (fedcka.linear_cka, fedcka.kernel_cka):
        for scale, mean in ((1, 0), (1e3, 0), (1e-6, 0), (1, 20)):
            found = []
            for dtype in (torch.float32, torch.float64):
                x, y = ((scale * v + mean).to(dtype) for v in (a, b))
                x.requires_grad_()
                s = cka(x, y)
                s.backward()
                found.append((s.item(), x.grad.double() * scale))
            (s, grad), (exact, exact_grad) = found
            assert (
                s == pytest.approx(exact, rel=1e-4)
                and (grad - exact_grad).norm() < 1e-3 * exact_grad.norm()
            ), (cka, scale, mean)


def test_fedcka_step():
    prev = two_networks().double()
    perturb(prev, 0.2, seed=9)
    worker, step, generator, client, args, w = begin(
        "fedcka", ["--mu", "0.6"], state={"net": state_of(prev)}
    )
    x, y = batch()
    twin, glob = copy.deepcopy(worker.net), copy.deepcopy(worker.net)
    glob.load_state_dict(w)
    out, total, a, g, p = twin(x), 0, x, x, x
    for m in (0, 1):
        a, g, p = twin[m](a), glob[m](g).detach(), prev[m](p).detach()
        center = [v.flatten(1) - v.flatten(1).mean(0) for v in (a, g, p)]
        grams = [v @ v.T for v in center]
        s = [(grams[0] * gram).sum() / grams[0].norm() / gram.norm() for gram in grams[1:]]
        total = total - torch.log(s[0].exp() / (s[0].exp() + s[1].exp())) / 2
    total = F.cross_entropy(out, y) + 0.6 * total
    expected = torch.autograd.grad(total, list(twin.parameters()))
    loss, grads = gradients(worker, step, x, y)
    assert loss == pytest.approx(total.item(), rel=1e-6)
    assert all(torch.allclose(f, e, rtol=1e-6, atol=1e-9) for f, e in zip(grads.values(), expected))
    assert not step(x[:2], y[:2]).isnan()
    with pytest.raises(StopIteration):
        next(generator)
    assert same(client.state["net"], worker.net.state_dict()) and not same(client.state["net"], w)


def test_fedcka_layers():
    """Of a ResNet the stem and the first residual block are the first two; cnn's seven layers include its output."""
    net = common.build_net("resnet50", 10)
    assert (
        fedcka.layers(net)[:3] == [net[0], net[1][0], net[1][1]]
        and len(fedcka.layers(net)) == 1 + 16 + 2
    )
    worker, step, *_ = begin(
        "fedcka", ["--layers", "7"], state={"net": state_of(two_networks().double())}
    )
    assert step(*batch()).isfinite()


def test_fedkd_steps():
    x, y = batch()
    worker, step, *_, w = begin("fedkd")
    z, teacher = numpy_logits(worker.net, x), copy.deepcopy(worker.net)
    teacher.load_state_dict(w)
    expected = 0.8 * cross_entropy(z, y.numpy()) + 0.2 * kl(
        softmax(numpy_logits(teacher, x)), softmax(z)
    )
    assert step(x, y).item() == pytest.approx(expected, rel=1e-9)
    worker, step, *_, w = begin("fedkd", ["--hint", "features", "--gamma", "0.5"])
    hint, h, t = 0, x, x
    for mine, other in zip(copy.deepcopy(worker.net)[:-1], teacher[:-1]):
        h, t = mine(h), other(t)
        hint += ((h - t) ** 2).mean().item() / 6
    assert step(x, y).item() == pytest.approx(cross_entropy(z, y.numpy()) + 0.5 * hint, rel=1e-9)


def test_fitnet_compares_behind_the_pooling():
    """resnet18-gn has five features: of the stem, stages 1 to 3, and stage 4 after its pooling."""
    net = two_networks("resnet18-gn", 10)
    worker, step, *_, w = begin("fedkd", ["--hint", "features"], net=net)
    x, y = batch(2)[0][:, :, ::4, ::4], torch.tensor([1, 7])
    mine, glob = copy.deepcopy(worker.net), copy.deepcopy(worker.net)
    glob.load_state_dict(w)
    h, t, total = x, x, 0
    for m in range(6):
        h, t = mine[m](h), glob[m](t)
        total += ((h - t) ** 2).mean().item() / 5 if m != 4 else 0
    assert step(x, y).item() == pytest.approx(
        F.cross_entropy(mine[6](h), y).item() + total, rel=1e-9
    )


def test_not_true_divergence_by_hand():
    """Three classes, true one 0: logits (9, 0, log 3) of the teacher give (1/4, 3/4) without it, those of the student (1/2, 1/2)."""
    teacher, out = (
        torch.tensor([[9.0, 0.0, np.log(3)]], **DOUBLE),
        torch.tensor([[-7.0, 2.0, 2.0]], **DOUBLE, requires_grad=True),
    )
    found = fedntd.not_true_divergence(out, teacher, torch.tensor([0]), 1.0)
    assert found.item() == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))
    found.backward()
    assert out.grad[0].numpy() == pytest.approx([0, 0.5 - 0.25, 0.5 - 0.75])
    halved = fedntd.not_true_divergence(out, teacher, torch.tensor([0]), 2.0)
    p = 1 / (1 + 3**0.5)
    assert halved.item() == pytest.approx(p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p)))


@pytest.mark.parametrize(
    "rule, formula",
    [("convex", lambda ce, d: 0.7 * ce + 0.3 * d), ("sum", lambda ce, d: ce + 4 * d)],
)
def test_fedntd_weights(rule, formula):
    x, y = batch()
    worker, step, *_, w = begin("fedntd", ["--weighting-rule", rule, "--tau", "2"])
    z = numpy_logits(worker.net, x)
    teacher = copy.deepcopy(worker.net)
    teacher.load_state_dict(w)
    t = numpy_logits(teacher, x)
    rest = np.array([[c for c in range(62) if c != label] for label in y.tolist()])
    p, q = (softmax(np.take_along_axis(v, rest, 1) / 2) for v in (t, z))
    assert step(x, y).item() == pytest.approx(
        formula(cross_entropy(z, y.numpy()), kl(p, q)), rel=1e-9
    )


def test_fedgkd_step_and_buffer(tmp_path):
    mean = two_networks().double()
    perturb(mean, 0.1, seed=4)
    x, y = batch()
    worker, step, _, client, args, _ = begin("fedgkd", server={"mean": state_of(mean)})
    z = numpy_logits(worker.net, x)
    assert step(x, y).item() == pytest.approx(
        cross_entropy(z, y.numpy()) + 0.1 * kl(softmax(numpy_logits(mean, x)), softmax(z)), rel=1e-9
    )
    assert client.bytes_down == common.nbytes(mean.state_dict())
    worker, step, _, client, *_ = begin("fedgkd")  # the first round has no teacher
    assert (
        step(x, y).item() == pytest.approx(cross_entropy(z, y.numpy()), rel=1e-9)
        and client.bytes_down == 0
    )
    net, server, args.buffer = nn.Linear(2, 1), {}, 2
    history = [state_of(net)]
    for i in range(3):
        weights = {k: v + i + 1 for k, v in history[-1].items()}
        fedgkd.aggregate(
            net, iter([common.Upload(None, 1.0, weights, {}, None, None, 0)]), server, args
        )
        history.append(weights)
        expected = {k: torch.stack([h[k] for h in history[-2:]]).mean(0) for k in weights}
        assert (
            all(torch.allclose(server["mean"][k], expected[k]) for k in weights)
            and len(server["buffer"]) == 2
        )


def uploads_of(net, shifts, alphas, messages=None):
    base = state_of(net)
    return iter(
        [
            common.Upload(
                common.Client(i, np.arange(3), {}),
                a,
                {k: v + s for k, v in base.items()},
                (messages or {}).get(i, {}),
                None,
                None,
                0,
            )
            for i, (s, a) in enumerate(zip(shifts, alphas))
        ]
    )


def server_args(*argv):
    return common.flags("x", "x").parse_args([*TINY, *argv])


def test_server_optimizers_by_hand():
    """One weight. Clients end 2 and -4 away from it with weights 3/4 and 1/4, so Delta = 0.5 in the first round, then -1.
    avgm (beta 0.4, lr 1): m = 0.5, then 0.2 - 1. adam (0.9, 0.99, tau 0.1, lr 0.5): m = 0.05, v = 0.99 * 0.01 + 0.01 * 0.25;
    then m = 0.045 - 0.1, v = 0.99 v + 0.01."""
    for server_flags, steps in [
        ([], [0.5, -1]),
        (["--server-lr", "0.5"], [0.25, -0.5]),
        (["--server", "avgm"], [0.5, -0.8]),
        (["--server", "avgm", "--server-momentum", "0"], [0.5, -1]),
        (
            ["--server", "adam", "--server-tau", "0.1", "--server-lr", "0.5"],
            [
                0.5 * 0.05 / ((0.0099 + 0.0025) ** 0.5 + 0.1),
                0.5 * -0.055 / ((0.99 * 0.0124 + 0.01) ** 0.5 + 0.1),
            ],
        ),
    ]:
        net, server, args = nn.Linear(1, 1, bias=False).double(), {}, server_args(*server_flags)
        for shifts, step in zip([(2, -4), (-2, 2)], steps):
            before = net.weight.item()
            common.average(net, uploads_of(net, shifts, (0.75, 0.25)), server, args)
            assert net.weight.item() - before == pytest.approx(step, abs=1e-9), server_flags
    assert (
        server_args("--server", "adam").server_lr,
        server_args("--server", "adam").server_momentum,
    ) == (0.01, 0.9)
    assert (
        server_args("--server", "avgm").server_lr,
        server_args("--server", "avgm").server_momentum,
    ) == (1, 0.4)


def test_server_steps_leave_statistics_averaged():
    net = nn.Sequential(nn.BatchNorm1d(2)).double()
    common.average(
        net,
        uploads_of(net, (2, 4), (0.5, 0.5)),
        {"m": {k: torch.full_like(v, -9) for k, v in net.named_parameters()}},
        server_args("--server", "avgm"),
    )
    assert net[0].running_mean.tolist() == [3, 3] and net[0].weight.tolist() == pytest.approx(
        [1 + 3 - 0.4 * 9] * 2
    )


def test_qfedavg_by_hand():
    """Two weights (1, -2); client ends at (1.5, -2) and (1, -4), losses 2 and 0.5, q 2, L = 1/lr = 10 in round 3. Then Dw = (-5, 0), (0, 20),
    D = 4 (-5, 0), 0.25 (0, 20), h = 2 * 2 * 25 + 10 * 4 = 140 and 2 * 0.5 * 400 + 10 * 0.25 = 402.5: w - (-20, 5) / 542.5.
    The rFedAvg code's h, L = 1: Dw = (-0.5, 0), (0, 2), D = (-2, 0), (0, 0.5), h = 4 * 4 + 4 = 20 and 0.25 + 0.25 = 0.5."""
    for flags, total, h in [([], [-20, 5], 542.5), (["--h", "rfedavg"], [-2, 0.5], 20.5)]:
        net = nn.Linear(2, 1, bias=False).double()
        decay = ["--lr", "0.4", "--lr-decay", "0.5"]
        seen = [args_of(qfedavg, *TINY, "--q", "2", *decay, *flags)]
        net.weight.data = torch.tensor([[1.0, -2.0]], **DOUBLE)
        ups = list(
            uploads_of(
                net,
                (0, 0),
                (0.5, 0.5),
                {
                    0: {"loss": torch.tensor(2.0, **DOUBLE)},
                    1: {"loss": torch.tensor(0.5, **DOUBLE)},
                },
            )
        )
        ups[0].weights["weight"], ups[1].weights["weight"] = (
            torch.tensor([[1.5, -2]], **DOUBLE),
            torch.tensor([[1.0, -4]], **DOUBLE),
        )
        qfedavg.aggregate(net, iter(ups), {"round": 3}, seen[0])
        assert net.weight[0].tolist() == pytest.approx(
            [1 - total[0] / h, -2 - total[1] / h], rel=1e-7
        )


def test_qfedavg_uploads_the_loss_of_the_global_model():
    worker, step, generator, client, _, _ = begin("qfedavg")
    net, data = two_networks().double(), worker.data
    expected = cross_entropy(
        numpy_logits(net, data.normalise(data.x[:8]).double()), data.y[:8].numpy()
    )
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert (
        stop.value.value["loss"].item() == pytest.approx(expected, rel=1e-6) and worker.net.training
    )


def test_feddyn_by_hand():
    """A step from v = w + d has the gradient of CE, minus h, plus alpha d; then h <- h - alpha (v - w). On the server with
    alpha 0.5, N = 4 and clients 2 and -4 away from w: h = -0.5/4 (-2) = 0.25, w <- w - 1 - 0.25 / 0.5."""
    h = [
        0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), **DOUBLE)
        for p in two_networks().parameters()
    ]
    worker, step, generator, client, args, w = begin(
        "feddyn", ["--dyn-alpha", "0.3"], state={"h": [v.clone() for v in h]}
    )
    x, y = batch()
    twin = copy.deepcopy(worker.net)
    ce = torch.autograd.grad(F.cross_entropy(twin(x), y), list(twin.parameters()))
    names = [k for k, _ in twin.named_parameters()]
    expected = {
        k: g - h_ + 0.3 * (p - w[k]) for k, g, h_, p in zip(names, ce, h, twin.parameters())
    }
    _, grads = gradients(worker, step, x, y)
    assert all(torch.allclose(grads[k], expected[k], rtol=1e-6, atol=1e-9) for k in names)
    with pytest.raises(StopIteration):
        next(generator)
    for k, new, old, p in zip(names, client.state["h"], h, worker.net.parameters()):
        assert torch.allclose(new, old - 0.3 * (p - w[k]))
    net, server, args = nn.Linear(1, 1, bias=False).double(), {}, server_args()
    args.dyn_alpha, args.clients, before = 0.5, 4, net.weight.item()
    feddyn.aggregate(net, uploads_of(net, (2, -4), (0.5, 0.5)), server, args)
    assert net.weight.item() == pytest.approx(before - 1 - 0.25 / 0.5) and server["h"][
        "weight"
    ].item() == pytest.approx(0.25)


def test_scaffold_effective_steps():
    """The weights of the gradients in the sum of the updates of SGD with momentum m, counted by running it on a gradient of 1."""
    for m, nesterov in [(0, False), (0.9, False), (0.9, True), (0.5, True)]:
        p = nn.Parameter(torch.zeros((), **DOUBLE))
        opt = torch.optim.SGD([p], 1.0, m, nesterov=nesterov)
        for _ in range(7):
            p.grad = torch.ones((), **DOUBLE)
            opt.step()
        assert scaffold.effective_steps(7, m, nesterov) == pytest.approx(-p.item())


LATER = ["--lr", "0.2", "--lr-decay", "0.5"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        LATER,
        ["--momentum", "0.9", *LATER],
        ["--momentum", "0.9", "--no-nesterov", "--correction", "gradient"],
        ["--momentum", "0.5", "--correction", "gradient"],
    ],
)
def test_scaffold_renews_its_variate_by_the_mean_gradient(flags):
    """Option II on a loss that is linear in the weights, so that the gradient is g in every step. Corrected in the gradient,
    w - w_k = K~ lr (g - c_k + c), and c_k+ = c_k - c + (w - w_k) / (K~ lr) = g. Corrected after the step, w - w_k is
    lr (K~ g + K (c - c_k)), K~ = K without momentum, and c_k+ = c_k - c + (w - w_k) / (K lr) = K~/K g."""
    net = nn.Sequential(common.Classifier(4, 3))
    args_state = {"c": [torch.full((3, 4), 0.5, **DOUBLE), torch.full((3,), -0.25, **DOUBLE)]}
    server = {"c": [torch.full((3, 4), -1.5, **DOUBLE), torch.full((3,), 2.0, **DOUBLE)]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            F, "cross_entropy", lambda out, y: out.sum(0) @ torch.tensor([1.0, -2.0, 0.5], **DOUBLE)
        )
        worker, step, generator, client, args, w = begin(
            "scaffold", flags, net=net, state=args_state, server=server
        )
        worker.net.load_state_dict(w)
        x = torch.tensor([[1.0, 2.0, -3.0, 0.0]], **DOUBLE)
        for _ in range(4):
            step(x, torch.tensor([0]))
        with pytest.raises(StopIteration) as stop:
            next(generator)
    factor = (
        1
        if "gradient" in flags or "--momentum" not in flags
        else scaffold.effective_steps(4, 0.9, True) / 4
    )
    g = [
        factor * torch.outer(torch.tensor([1.0, -2.0, 0.5], **DOUBLE), x[0]),
        factor * torch.tensor([1.0, -2.0, 0.5], **DOUBLE),
    ]
    assert all(torch.allclose(c, e, rtol=1e-9) for c, e in zip(client.state["c"], g))
    assert all(
        torch.allclose(dc, e - c, rtol=1e-9)
        for dc, e, c in zip(stop.value.value["dc"], g, args_state["c"])
    )
    assert client.bytes_down == 8 * 15
    if (
        "--momentum" not in flags
    ):  # lr is 0.1 in LATER's second round too; four plain steps of lr (g - c_k + c)
        assert torch.allclose(worker.net[0].weight, w["0.weight"] - 4 * 0.1 * (g[0] - 0.5 - 1.5))


def test_scaffold_option_one_and_server():
    """Option I: c_k+ is the gradient at w of the loss over all local data. Server: c <- c + (sum of c_k+ - c_k) / N."""
    worker, step, generator, client, args, w = begin("scaffold", ["--option", "1"])
    data, net = worker.data, two_networks().double()
    net.load_state_dict(w)
    expected = torch.autograd.grad(
        F.cross_entropy(net(data.normalise(data.x[:8]).double()), data.y[:8]),
        list(net.parameters()),
    )
    with pytest.raises(StopIteration):
        next(generator)
    assert all(
        torch.allclose(c, e, rtol=1e-5, atol=1e-7) for c, e in zip(client.state["c"], expected)
    )
    net, server, args = (
        nn.Linear(1, 1, bias=False).double(),
        {"c": [torch.tensor([[1.0]], **DOUBLE)]},
        server_args("--clients", "8"),
    )
    scaffold.aggregate(
        net,
        uploads_of(
            net,
            (1, 1),
            (0.5, 0.5),
            {i: {"dc": [torch.tensor([[d]], **DOUBLE)]} for i, d in ((0, 3.0), (1, -7.0))},
        ),
        server,
        args,
    )
    assert server["c"][0].item() == pytest.approx(1 + (3 - 7) / 8)


def test_scaffold_is_the_averaged_gradient(tmp_path):
    """Full participation, equal sizes, plain SGD, one local step on all local data: w - lr * mean gradient, whatever the
    variates; and the server's c is the mean of the clients' in every round."""
    flags = [
        "--partition",
        "iid",
        "--momentum",
        "0",
        "--weight-decay",
        "0",
        "--local-steps",
        "1",
        "--batch-size",
        "150",
        "--rounds",
        "3",
    ]
    fedavg_w, _ = final("fedavg", tmp_path / "fedavg", *flags)
    scaffold_w, _ = final("scaffold", tmp_path / "scaffold", *flags)
    assert all(torch.allclose(fedavg_w[k], scaffold_w[k], atol=1e-6) for k in fedavg_w)
    c = common.load(tmp_path / "scaffold" / "checkpoint.pt")["server"]["c"]
    states = [common.load(p)["c"] for p in (tmp_path / "scaffold" / "states").iterdir()]
    assert len(states) == 4 and all(
        torch.allclose(a, torch.stack(b).mean(0), atol=1e-6) for a, b in zip(c, zip(*states))
    )


def test_feddyn_variates_sum(tmp_path):
    """The server's h is the mean over all clients of theirs, those never sampled holding 0."""
    final(
        "feddyn",
        tmp_path / "run",
        "--clients",
        "8",
        "--partition",
        "iid",
        "--sample",
        "0.25",
        "--rounds",
        "3",
    )
    h = common.load(tmp_path / "run" / "checkpoint.pt")["server"]["h"]
    states = [common.load(p)["h"] for p in (tmp_path / "run" / "states").iterdir()]
    assert 2 <= len(states) < 8 and all(
        torch.allclose(a, torch.stack(b).sum(0) / 8, atol=1e-6)
        for a, b in zip(h.values(), zip(*states))
    )


@pytest.mark.parametrize(
    "flags, chosen, divisor",
    [
        ([], [1, 2, 3, 4, 5], 5),
        (["--pathways", "1,3"], [1, 3], 2),
        (["--pathways", "5", "--divisor", "all"], [5], 5),
    ],
)
@pytest.mark.parametrize("direction", ["local-global", "global-local"])
def test_fedmlb_step(flags, chosen, divisor, direction):
    """Against a plain computation that runs every hybrid pathway from the input; gradients by autograd of the whole."""
    net = two_networks("resnet18-gn", 10)
    worker, step, _, _, args, w = begin(
        "fedmlb",
        ["--lambda1", "0.7", "--lambda2", "0.4", "--tau", "2", "--direction", direction, *flags],
        net=net,
    )
    x, y = batch(3)[0][:, :, ::4, ::4], torch.tensor([1, 7, 3])
    twin, glob = copy.deepcopy(worker.net), copy.deepcopy(worker.net)
    glob.load_state_dict(w)
    before = state_of(worker.nets["glob"])
    q = twin(x)
    total = F.cross_entropy(q, y)
    for m in chosen:
        first, second = (twin, glob) if direction == "local-global" else (glob, twin)
        h = x
        for i in range(7):
            h = (first if i < m else second)[i](h)
        soft, log_soft = F.softmax(h / 2, 1), F.log_softmax(q / 2, 1)
        total = (
            total
            + (0.7 * F.cross_entropy(h, y) + 0.4 * (soft * (soft.log() - log_soft)).sum(1).mean())
            / divisor
        )
    expected = torch.autograd.grad(total, list(twin.parameters()))
    loss, grads = gradients(worker, step, x, y)
    assert loss == pytest.approx(total.item(), rel=1e-9)
    assert all(torch.allclose(g, e, rtol=1e-6, atol=1e-9) for g, e in zip(grads.values(), expected))
    assert same(before, state_of(worker.nets["glob"])) and same(before, w)


def test_fedmlb_updates_batch_norm_once():
    net = two_networks("resnet56", 62)
    worker, step, *_ = begin("fedmlb", ["--direction", "global-local"], net=net)
    x, y = batch(3)
    step(x[:, :, ::2, ::2], y)
    assert {v.item() for k, v in worker.net.state_dict().items() if "num_batches" in k} == {1}
    assert all(p.isfinite().all() for p in worker.net.parameters())


def test_fedmlb_trains_where_a_hybrid_is_certain():
    """Eval-mode tails of a fresh resnet56 give logits near 100, whose softmax has zeros: no NaN may come of them."""
    worker, step, *_ = begin("fedmlb", net=two_networks("resnet56", 62))
    worker.net.float(), worker.nets["glob"].float()
    x, y = batch(3)
    assert step(200 * x.float(), y).isfinite() and all(
        p.isfinite().all() for p in worker.net.parameters()
    )


def test_fedmlb_with_feddyn(tmp_path):
    """Without pathways it is FedDyn; with them both terms act."""
    flags = ["--dyn-alpha", "0.1"]
    assert same(
        final("fedmlb", tmp_path / "mlb", *flags, "--lambda1", "0", "--lambda2", "0")[0],
        final("feddyn", tmp_path / "dyn", *flags)[0],
    )
    assert not same(
        final("fedmlb", tmp_path / "both", *flags)[0], final("feddyn", tmp_path / "dyn2", *flags)[0]
    )


def test_rfedavg_step():
    """Three other clients with deltas. rfedavg: CE + lam mean_j |phi - delta_j|^2; rfedavg+: CE + lam |phi - mean_j delta_j|^2."""
    g = torch.Generator().manual_seed(0)
    deltas = {j: torch.randn(256, generator=g) for j in (0, 1, 4, 7)}
    x, y = batch()
    for variant in ("rfedavg", "rfedavg+"):
        worker, step, *_, args, w = begin(
            "rfedavg",
            ["--variant", variant, "--lam", "0.3", "--clients", "10"],
            server={"deltas": deltas},
        )
        twin = copy.deepcopy(worker.net)
        phi = twin[:-1](x)
        total = F.cross_entropy(twin[-1](phi), y)
        others = torch.stack([deltas[j] for j in (1, 4, 7)])
        mean = phi.mean(0)
        total = total + 0.3 * (
            (mean - others).square().sum(1).mean()
            if variant == "rfedavg"
            else (mean - others.mean(0)).square().sum()
        )
        expected = torch.autograd.grad(total, list(twin.parameters()))
        loss, grads = gradients(worker, step, x, y)
        assert loss == pytest.approx(total.item(), rel=1e-5)
        assert all(
            torch.allclose(a, e, rtol=1e-4, atol=1e-6) for a, e in zip(grads.values(), expected)
        )  # features are fp32


def test_rfedavg_deltas(tmp_path):
    """delta: of the local network at the end of the round, or of the new global network; bytes as 4S + 4dN, 4S + 4d."""
    for variant, sample, down in (
        ("rfedavg", "1", 4 * 256),
        ("rfedavg+", "1", 256),
        ("rfedavg+", "0.5", 256),
    ):
        out = tmp_path / (variant + sample)
        net, rows = SCRIPTS["rfedavg"].main(
            [
                *TINY,
                "--variant",
                variant,
                "--sample",
                sample,
                "--rounds",
                "3",
                "--out",
                str(out),
                "--save-clients",
            ]
        )
        size, sampled = common.nbytes(net.state_dict()), 4 if sample == "1" else 2
        again = size if sample == "0.5" else 0
        assert [row["bytes_down"] for row in rows[1:]] == [sampled * (size + 4 * down + again)] * 2
        assert all(row["bytes_up"] == sampled * (size + 4 * 256) for row in rows)
        assert rows[1]["bytes_delta"] == sampled * 4 * (down + 256)
        assert ("synchronise" in rows[0]["seconds"]) == (variant == "rfedavg+")
        deltas = common.load(out / "checkpoint.pt")["server"]["deltas"]
        data, k = common.glyphs(), rows[-1]["clients"][0]
        part = common.partition(data, server_args())[k]
        if variant == "rfedavg":
            net.load_state_dict(common.load(out / "clients" / f"{k}.pt"))
        net.eval()
        with torch.no_grad():
            assert torch.allclose(
                deltas[k], net[:-1](data.normalise(data.x[part])).mean(0), atol=1e-4
            )


def test_rfedavg_noise():
    """Clipped to norm C; the noise has standard deviation sigma C / B."""
    worker, _, _, client, args, _ = begin(
        "rfedavg", ["--noise", "2", "--noise-clip", "0.01", "--variant", "rfedavg"]
    )
    draws = torch.stack(
        [
            rfedavg.delta_of(worker, common.Client(0, np.arange(8), {}), {"round": r}, args)
            for r in range(1, 60)
        ]
    )
    assert draws.std(0).mean().item() == pytest.approx(2 * 0.01 / 32, rel=0.1)
    assert draws.mean(0).norm().item() == pytest.approx(0.01, rel=0.2)


def test_rfedavg_code_reading(tmp_path):
    """One random batch, only clients of this round, the own delta too in rfedavg+; noise of deviation sigma / sqrt(B), on each
    delta in rfedavg and on the mean that all clients share in rfedavg+."""
    noise = 3 / 32**0.5
    deltas = {j: torch.full((256,), float(j)) for j in (0, 1, 4)}
    for variant, mean in (
        ("rfedavg", 1.0),
        ("rfedavg+", 0.5),
    ):  # of clients 0 and 1 this is client 0
        flags = ["--variant", variant, "--reading", "code"]
        worker, *_, args, _ = begin("rfedavg", flags, server={"deltas": deltas})
        assert worker.pins["mean"].mean().item() == mean and worker.pins["mean"].std() == 0
        client = common.Client(0, np.arange(64), {})
        each = rfedavg.mean_feature(worker.net, worker.batches(client))
        delta = rfedavg.delta_of(worker, client, {"round": 1}, args)
        order = common.keyed("delta", args.seed, 1, 0).permutation(64)
        batch_ = rfedavg.mean_feature(worker.net, worker.batches(common.Client(0, order[:32], {})))
        assert torch.equal(delta, batch_) and not torch.allclose(delta, each)
        worker, *_, args, _ = begin("rfedavg", [*flags, "--noise", "3"], server={"deltas": deltas})
        spread = (rfedavg.delta_of(worker, client, {"round": 1}, args) - delta).std().item()
        assert spread == (pytest.approx(noise, rel=0.2) if variant == "rfedavg" else 0)  # 256 draws
        assert worker.pins["mean"].std().item() == (
            0 if variant == "rfedavg" else pytest.approx(noise, rel=0.2)
        )
        again = rfedavg.targets(
            {"deltas": deltas, "clients": [0, 1], "round": 2},
            common.Client(1, np.arange(3), {}),
            args,
        )
        if variant == "rfedavg+":  # the same for all clients
            assert torch.equal(again.mean(0).double(), worker.pins["mean"].double())
    final(
        "rfedavg", tmp_path / "run", "--reading", "code", "--sample", "0.5", "--variant", "rfedavg"
    )


def test_scaffold_leaves_an_untrained_client_alone(tmp_path):
    """--drop-last with batches larger than the smallest client: its variate stays 0."""
    sizes = [len(p) for p in common.partition(common.glyphs(), server_args())]
    final(
        "scaffold",
        tmp_path / "run",
        "--drop-last",
        "--batch-size",
        str(min(sizes) + 1),
        "--rounds",
        "3",
    )
    version = next((tmp_path / "run" / "states").glob(f"{int(np.argmin(sizes))}-*.pt"))
    assert all(c.abs().max() == 0 for c in common.load(version)["c"])


def test_qfedavg_leaves_an_untrained_client_out(tmp_path):
    """As FedAvg with --weighting uniform does: at q = 0 they agree."""
    sizes = [len(p) for p in common.partition(common.glyphs(), server_args())]
    flags = ["--drop-last", "--batch-size", str(min(sizes) + 1), "--rounds", "2"]
    a, b = (
        final("qfedavg", tmp_path / "q", *flags, "--q", "0")[0],
        final("fedavg", tmp_path / "f", *flags, "--weighting", "uniform")[0],
    )
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def test_measuring_leaves_the_network_alone():
    """Losses, features and gradients over a client's data move no weight and no statistic of batch norm; the first two are
    those of eval mode."""
    net = common.build_net("resnet56", 62)
    worker = common.Worker(net, common.glyphs(), server_args("--model", "resnet56"), 4)
    before, client = state_of(worker.net), common.Client(0, np.arange(12), {})
    worker._begin(client, {"round": 1}, net.state_dict(), [6])
    x, y = next(worker.batches(client))
    frozen = copy.deepcopy(worker.net).eval()
    with torch.no_grad():
        z, loss = frozen[:-1](x).mean(0), F.cross_entropy(frozen(x), y)
    assert torch.allclose(rfedavg.mean_feature(worker.net, worker.batches(client)), z, atol=1e-6)
    assert torch.allclose(qfedavg.local_loss(worker.net, worker.batches(client), 12), loss)
    scaffold.gradient(worker.net, worker.batches(client), 12)
    assert same(before, worker.net.state_dict()) and worker.net.training


def test_scaffold_option_one_takes_any_number_of_samples():
    """501 samples: no part of them may be a single one, which batch norm cannot take where maps are 1x1."""
    worker = common.Worker(common.build_net("cnn", 62), common.glyphs(), server_args(), 1)
    client = common.Client(0, np.arange(501), {})
    assert [len(y) for _, y in worker.batches(client)] == [251, 250]


def test_defaults_are_the_papers():
    seen = {name: args_of(SCRIPTS[name]) for name in METHODS}
    assert (seen["fedalign"].mu, seen["fedalign"].width, seen["fedalign"].clip) == (0.45, 0.25, 10)
    assert (seen["moon"].mu, seen["moon"].temperature, seen["moon"].projection) == (1, 0.5, 256)
    assert (seen["stochdepth"].keep, seen["mixup"].gamma, seen["fedprox"].mu) == (0.9, 0.1, 1e-4)
    assert (seen["fedcka"].mu, seen["fedcka"].layers, seen["gradaug"].min_width) == (3, 2, 0.8)
    assert (
        seen["fedmlb"].lambda1,
        seen["fedmlb"].lambda2,
        seen["fedgkd"].gamma,
        seen["fedgkd"].buffer,
    ) == (1, 1, 0.2, 5)
    assert (seen["feddyn"].dyn_alpha, seen["feddyn"].weighting, seen["qfedavg"].q) == (
        0.1,
        "uniform",
        1,
    )


def test_qfedavg_takes_the_server_optimizers(tmp_path):
    """At momentum 0 and server lr 1 avgm is the plain step; at lr 0.5 the first round goes half as far."""
    plain, _ = final("qfedavg", tmp_path / "plain", "--rounds", "1")
    same_, _ = final("qfedavg", tmp_path / "same", "--rounds", "1", "--server", "avgm")
    half, _ = final("qfedavg", tmp_path / "half", "--rounds", "1", "--server-lr", "0.5")
    torch.manual_seed(0)
    w = common.build_net("cnn", 62).state_dict()
    assert all(
        torch.allclose(plain[k], same_[k], atol=1e-6)
        and torch.allclose(half[k] - w[k], (plain[k] - w[k]) / 2, atol=1e-6)
        for k in w
    )


@pytest.mark.parametrize(
    "name, argv, word",
    [
        ("fedcka", ["--layers", "8"], "--layers"),
        ("fedmlb", ["--pathways", "9"], "--pathways"),
        ("fedmlb", ["--pathways", "1,x"], "--pathways"),
        ("stochdepth", [], "--model"),
        ("fedkd", ["--gamma", "3"], "--gamma"),
        ("fedntd", ["--ntd-beta", "3"], "--ntd-beta"),
        ("rfedavg", ["--noise", "1"], "--noise-clip"),
        ("rfedavg", ["--noise-clip", "1"], "--noise-clip"),
        ("fedcka", ["--batch-size", "2"], "--batch-size"),
        ("scaffold", ["--correction", "gradient", "--persist-opt"], "--persist-opt"),
        ("gradaug", ["--resolutions", "32,x"], "--resolutions"),
    ],
)
def test_bad_method_flags(tmp_path, capsys, name, argv, word):
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[name].main([*TINY, "--out", str(tmp_path / "run"), *argv])
    err = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and len(err.splitlines()) == 1
        and word in err
        and not (tmp_path / "run").exists()
    )


def test_bytes_follow_the_methods_account(tmp_path):
    """Model S, parameters P (no batch norm: P = S), in units of sampled clients, from the second round on."""
    for name, flags, down, up in [
        ("fedavg", [], 1, 1),
        ("moon", [], 1, 1),
        ("fedcka", [], 1, 1),
        ("fedmlb", [], 1, 1),
        ("feddyn", [], 1, 1),
        ("scaffold", [], 2, 2),
        ("fedgkd", [], 2, 1),
    ]:
        net, rows = SCRIPTS[name].main([*TINY, *flags, "--out", str(tmp_path / name)])
        size = 4 * common.nbytes(net.state_dict())
        assert (rows[1]["bytes_down"] / size, rows[1]["bytes_up"] / size) == (down, up), name
    assert rows[0]["bytes_down"] == size  # fedgkd's first round
    assert final("fedgkd", tmp_path / "off", "--gamma", "0")[1][1]["bytes_down"] == size
    net, rows = SCRIPTS["qfedavg"].main([*TINY, "--out", str(tmp_path / "q")])
    assert rows[0]["bytes_up"] == 4 * (common.nbytes(net.state_dict()) + 4)
