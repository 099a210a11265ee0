"""By hand: servers that do more than average, and personal models, of which they get a part."""

import json

import feddyn
import fednova
import numpy as np
import pytest
import qfedavg
import scaffold
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, args_of, flags
from hand import DOUBLE, batch, begin, check_step, close, finish
from hand import moved_network, normed_network, perturb, received_of, small_network, state_of, twins
from methods import SCRIPTS, final, needed

import common
import engine
import run_folder
import extras.glyphs
import fedavg
from extras import partitions

ALL = np.arange(501)
LATER = "--lr 0.2 --lr-decay 0.5"  # 0.1 in round 2
GRADIENT = "--correction gradient --momentum"


def one_weight():
    return nn.Linear(1, 1, bias=False).double()


def adam(m, v, tau=0.1):
    """Return FedADAM's and FedYogi's step for lr 0.5."""
    return 0.5 * m / (v**0.5 + tau)


LR, TAU = "--server-lr 0.5", "--server-tau"
YOGI = f"--server yogi --server-beta2 0.9 {LR}"


@pytest.mark.parametrize(
    "argv, steps",
    [
        ("", [0.5, -1]),
        (LR, [0.25, -0.5]),
        ("--server avgm", [0.5, -0.8]),
        (f"--server adam {LR} {TAU} 0.1", [adam(0.05, 0.0124), adam(-0.055, 0.022276)]),
        (f"--server yogi {LR} {TAU} 0.1", [adam(0.05, 0.0125), adam(-0.055, 0.0225)]),
        (f"{YOGI} {TAU} 1", [adam(0.05, 0.975, 1), adam(-0.055, 1.075, 1)]),
    ],
)
def test_server_optimizers_by_hand(argv, steps):
    """Of one weight, Delta = 0.5 in the first round, then -1.

    avgm (beta 0.4): m = 0.5, then 0.2 - 1. adam (0.9, 0.99): m = 0.05, v = 0.99 * 0.01 + 0.01 *
    0.25; then m = 0.045 - 0.1, v = 0.99 v + 0.01. yogi: v = 0.01 + 0.01 * 0.25, as Delta^2 is
    larger; at tau 1, beta2 0.9 v = 1 - 0.1 * 0.25, as it is smaller."""
    net, server, args = one_weight(), {}, flags(*argv.split())
    for shifts, step in zip([(2, -4), (-2, 2)], steps):
        before = net.weight.item()
        common.average(net, received_of(net, shifts, (0.75, 0.25)), server, args)
        assert net.weight.item() - before == pytest.approx(step, abs=1e-9)


def test_server_steps_leave_statistics_averaged():
    net = nn.Sequential(nn.BatchNorm1d(2)).double()
    m = {k: torch.full_like(v, -9) for k, v in net.named_parameters()}
    received = received_of(net, (2, 4), (0.5, 0.5))
    common.average(net, received, {"m": m}, flags("--server", "avgm"))
    assert net[0].running_mean.tolist() == [3, 3]
    assert net[0].weight.tolist() == pytest.approx([1 + 3 - 0.4 * 9] * 2)


@pytest.mark.parametrize(
    "argv, total, h", [("", [-20, 5], 542.5), ("--h rfedavg", [-2, 0.5], 20.5)]
)
def test_qfedavg_by_hand(argv, total, h):
    """Two weights (1, -2), q 2.

    Clients end at (1.5, -2) and (1, -4), their losses are 2 and 0.5; L = 1/lr = 10 in round 3. Then
        Dw = (-5, 0), (0, 20),   D = 4 (-5, 0), 0.25 (0, 20),
        h = 2 * 2 * 25 + 10 * 4 = 140 and 2 * 0.5 * 400 + 10 * 0.25 = 402.5,
    and the new weights are w - (-20, 5) / 542.5. The rFedAvg code's h, L = 1:
        Dw = (-0.5, 0), (0, 2),   D = (-2, 0), (0, 0.5),   h = 4 * 4 + 4 = 20 and 0.25 + 0.25."""
    decay = ["--lr", "0.4", "--lr-decay", "0.5"]
    args = args_of(qfedavg, *TINY, "--q", "2", *decay, *argv.split())
    net = nn.Linear(2, 1, bias=False).double()
    net.weight.data = torch.tensor([[1.0, -2.0]], **DOUBLE)
    ends = [torch.tensor([[1.5, -2]], **DOUBLE), torch.tensor([[1.0, -4]], **DOUBLE)]
    losses = [torch.tensor(loss, **DOUBLE) for loss in (2.0, 0.5)]
    lr = common.learning_rate(args, 3)

    def send(client, i):
        d, h_k = qfedavg.weighed_update([net.weight], [ends[i]], losses[i], args, lr)
        client.sum("D", d, sent=False)
        client.sum("h", h_k)

    received = received_of(net, (0, 0), (0.5, 0.5), send)
    qfedavg.aggregate(net, received, {"round": 3}, args)
    expected = [1 - total[0] / h, -2 - total[1] / h]
    assert net.weight[0].tolist() == pytest.approx(expected, rel=1e-7)


def test_qfedavg_weighs_by_the_loss_of_the_global_model():
    """q 1, L = 10 in round 2: D = 10 F (w - w_k), h = |10 (w - w_k)|^2 + 10 F, F that of w."""
    worker, step, generator, client, _, w = begin("qfedavg", LATER.split())
    _, net = twins(worker, w)
    x, y = worker.data.normalise(worker.data.x[:8]).double(), worker.data.y[:8]
    loss = F.cross_entropy(net.eval()(x), y).item()
    step(*batch())
    finish(generator)
    moved = [10 * (w[k] - v.detach()) for k, v in worker.net.named_parameters()]
    close(client.sums["D"], [loss * d for d in moved])
    h = sum(d.square().sum().item() for d in moved) + 10 * loss
    assert client.sums["h"].item() == pytest.approx(h, rel=1e-6)
    assert client.bytes_up == 8  # h alone: D is in place of the weights
    assert worker.net.training


def test_fednova_by_the_formula(tmp_path):
    """A round of clients with 1 to 9 steps, from their saved models, in float64."""
    cuts = [0, 20, 120, 320, 600]
    split = [list(range(a, b)) for a, b in zip(cuts, cuts[1:])]
    (tmp_path / "split.json").write_text(json.dumps(split))
    words = [*TINY, "--partition", "file", "--split-file", str(tmp_path / "split.json")]
    words += ["--rounds", "1", "--save-clients", "--momentum", "0.5", "--no-nesterov"]
    net, [row] = fednova.main([*words, "--out", str(tmp_path / "run")])
    args, data = flags(*words), extras.glyphs.glyphs()
    parts = common.partition(data, args)
    steps = [-(-len(part) // 32) for part in parts]
    assert steps == [1, 4, 7, 9]
    w = common.prepare_net(data, args).double().state_dict()
    shares = [len(part) / 600 for part in parts]
    a = [fednova.effective_steps(k, 0.5, False) for k in steps]
    total = sum(alpha * a_k for alpha, a_k in zip(shares, a))
    expected = {name: value.clone() for name, value in w.items()}
    for k, (alpha, a_k) in enumerate(zip(shares, a)):
        w_k = run_folder.load(tmp_path / "run" / "clients" / f"{k}-1.pt")
        for name in expected:
            expected[name] += total * alpha / a_k * (w_k[name].double() - w[name])
    for name, value in net.state_dict().items():
        assert torch.allclose(value.double(), expected[name], atol=1e-6), name
    assert row["effective_steps"] == pytest.approx(total)


@pytest.mark.parametrize("name, key", [("fednova", "d"), ("scaffold", "dc")])
def test_a_client_without_a_step_changes_nothing(name, key):
    """In a loop that gives it a share: a_k = 0, no drift, and a variate that stays."""
    args, data = args_of(SCRIPTS[name], *TINY, "--drop-last"), extras.glyphs.glyphs()
    client, net = common.Client(0, np.arange(20), weight=0.5), common.prepare_net(data, args)
    server = {"round": 1, "c": [torch.ones_like(p) for p in net.parameters()]}
    worker = common.PlainWorker(net, data, args, client, server)
    common.train_client(worker, client, server, args, SCRIPTS[name].local_update)
    assert not any(v.any() for v in client.sums[key])
    assert client.sums.get("a", 0) == 0


def test_feddyn_step_by_hand():
    """The loss is CE - <h, v> + alpha/2 |v - w|^2; then h <- h - alpha (v - w) is kept."""
    g = torch.Generator().manual_seed(1)
    h = [0.1 * torch.randn(p.shape, generator=g, **DOUBLE) for p in small_network().parameters()]
    state = {"h": [v.clone() for v in h]}
    worker, step, generator, client, _, w = begin("feddyn", ["--dyn-alpha", "0.3"], state=state)
    x, y = batch()
    twin, _ = twins(worker, w)
    linear = sum((h_ * p).sum() for h_, p in zip(h, twin.parameters()))
    distance = sum((p - w[k]).square().sum() for k, p in twin.named_parameters())
    total = F.cross_entropy(twin(x), y) - linear + 0.15 * distance
    check_step(worker, step, x, y, twin, total)
    finish(generator)
    drift = [p.detach() - w[k] for k, p in worker.net.named_parameters()]
    close(client.state["h"], [old - 0.3 * v for old, v in zip(h, drift)])
    close(client.sums["drift"], drift)
    assert client.bytes_up == 0  # the server could take it from the weights


def test_feddyn_server_by_hand():
    """alpha 0.5, N = 4, clients 2 and -4 away from w: h = -0.5/4 (-2), w <- w - 1 - h / 0.5."""
    net, server = one_weight(), {}
    args = args_of(feddyn, *TINY, "--dyn-alpha", "0.5")
    before = net.weight.item()

    def send(client, i):
        client.sum("drift", [torch.tensor([[(2.0, -4.0)[i]]], **DOUBLE)], sent=False)

    feddyn.aggregate(net, received_of(net, (2, -4), (0.5, 0.5), send), server, args)
    assert net.weight.item() == pytest.approx(before - 1 - 0.25 / 0.5)
    assert server["h"][0].item() == pytest.approx(0.25)


@pytest.mark.parametrize("name, variate", [("feddyn", "h"), ("scaffold", "c")])
def test_the_server_s_variate_is_the_clients_mean(tmp_path, name, variate):
    """Over all clients, those never sampled holding 0."""
    out = tmp_path / "run"
    final(name, out, *"--clients 8 --partition iid --sample 0.25 --rounds 3".split())
    server = run_folder.load(out / "checkpoint.pt")["server"][variate]
    states = [run_folder.load(path)[variate] for path in (out / "states").iterdir()]
    assert 2 <= len(states) < 8
    for mean, each in zip(server, zip(*states)):
        assert torch.allclose(mean, torch.stack(each).sum(0) / 8, atol=1e-6)


@pytest.mark.parametrize("weight", [scaffold.effective_steps, fednova.effective_steps])
@pytest.mark.parametrize(
    "m, nesterov", [(0, False), (0.9, False), (0.9, True), (0.5, True), (0.5, False)]
)
def test_effective_steps(weight, m, nesterov):
    """The weights of the gradients in the sum of the updates, by running SGD on a gradient of 1."""
    p = nn.Parameter(torch.zeros((), **DOUBLE))
    opt = torch.optim.SGD([p], 1.0, m, nesterov=nesterov)
    for steps in range(1, 8):
        p.grad = torch.ones((), **DOUBLE)
        opt.step()
        assert weight(steps, m, nesterov) == pytest.approx(-p.item(), rel=1e-12)


@pytest.mark.parametrize(
    "argv",
    ["", LATER, f"--momentum 0.9 {LATER}", f"{GRADIENT} 0.9 --no-nesterov", f"{GRADIENT} 0.5"],
)
def test_scaffold_renews_its_variate_by_the_mean_gradient(monkeypatch, argv):
    """Option II on a loss that is linear in the weights, so that the gradient is g in every step.

    Corrected in the gradient, w - w_k = K~ lr (g - c_k + c), and
        c_k+ = c_k - c + (w - w_k) / (K~ lr) = g.
    Corrected after the step, w - w_k is lr (K~ g + K (c - c_k)), K~ = K without momentum, and
        c_k+ = c_k - c + (w - w_k) / (K lr) = K~/K g."""
    slope = torch.tensor([1.0, -2.0, 0.5], **DOUBLE)
    monkeypatch.setattr(F, "cross_entropy", lambda out, y: out.sum(0) @ slope)
    net = nn.Sequential(common.Classifier(4, 3))
    c_k = [torch.full((3, 4), 0.5, **DOUBLE), torch.full((3,), -0.25, **DOUBLE)]
    c = [torch.full((3, 4), -1.5, **DOUBLE), torch.full((3,), 2.0, **DOUBLE)]
    worker, step, generator, client, _, w = begin(
        "scaffold", argv.split(), net=net, state={"c": c_k}, server={"c": c}
    )
    worker.net.load_state_dict(w)
    x = torch.tensor([[1.0, 2.0, -3.0, 0.0]], **DOUBLE)
    for _ in range(4):
        step(x, torch.tensor([0]))
    finish(generator)
    after_the_step = "--momentum" in argv and "gradient" not in argv
    factor = scaffold.effective_steps(4, 0.9, True) / 4 if after_the_step else 1
    g = [factor * torch.outer(slope, x[0]), factor * slope]
    close(client.state["c"], g)
    close(client.sums["dc"], [new - old for new, old in zip(g, c_k)])
    assert (client.bytes_down, client.bytes_up) == (8 * 15, 8 * 15)
    if "--momentum" not in argv:  # lr is 0.1 in LATER's second round too: four plain steps
        expected = w["0.weight"] - 4 * 0.1 * (g[0] - 0.5 - 1.5)  # of lr (g - c_k + c)
        assert torch.allclose(worker.net[0].weight, expected)


def test_scaffold_option_one():
    """c_k+ is the gradient at w of the loss over all local data."""
    worker, _, generator, client, _, w = begin("scaffold", ["--option", "1"])
    _, net = twins(worker, w)
    x, y = worker.data.normalise(worker.data.x[:8]).double(), worker.data.y[:8]
    expected = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    finish(generator)
    close(client.state["c"], expected, rtol=1e-5, atol=1e-7)


def test_scaffold_option_one_takes_any_number_of_samples():
    """No part of 501 samples is a single one, which batch norm cannot take."""
    net, data, client = common.build_net("cnn", 62), extras.glyphs.glyphs(), common.Client(0, ALL)
    plain = common.PlainWorker(net, data, flags(), client, {"round": 1})
    for worker in (engine.Worker(net, data, flags(), 1), plain):
        assert [len(y) for _, y in worker.batches(client)] == [251, 250]


@pytest.mark.parametrize("name", ["fedper", "ditto", "fedbn"])
def test_accuracies_are_of_each_client_s_own_network(tmp_path, name):
    """By a loop of our own over the run's files; of four clients one has never taken part."""
    words = "--sample 0.5 --local-steps 4 --seed 5 --client-test --workers 1"
    words, out = [*TINY, *words.split(), *needed(name)], tmp_path / "run"
    net, rows = SCRIPTS[name].main([*words, "--out", str(out)])
    table = run_folder.load(out / "checkpoint.pt")["clients"].tolist()
    states = {k: run_folder.load(out / "states" / f"{k}-{t}.pt") for k, t, _ in table}
    [absent] = {0, 1, 2, 3} - states.keys()
    args, data = flags(*words), extras.glyphs.glyphs()
    tests = partitions.client_test_indices(data, common.partition(data, args), args)
    expected, ours = [], []
    for k, test in enumerate(tests):
        for values, weights in ((expected, states.get(k, {}).get("personal", {})), (ours, {})):
            own = common.copy_net(net).eval()
            own.load_state_dict({**net.state_dict(), **weights})
            right = own(data.normalise(data.x_test[test])).argmax(1) == data.y_test[test]
            values.append(100 * right.double().mean().item())
    assert rows[-1]["personal_acc"][absent] == rows[-1]["client_acc"][absent]
    for key, values in (("personal_acc", expected), ("client_acc", ours)):
        assert rows[-1][key] == pytest.approx(values)
        found = [rows[-1][f"{key}_{k}"] for k in ("mean", "std", "worst", "best")]
        assert found == pytest.approx([f(values) for f in (np.mean, np.std, min, max)])


def test_summary_lists_all_clients():
    """Of hits 1, 0, 1, 1: client 0 has half of two, client 1 nothing to test, client 2 all."""
    tests = [np.array([0, 1]), np.array([], np.int64), np.array([2, 3])]
    found = partitions.client_summary(np.array([True, False, True, True]), tests, "x")
    assert found["x"] == [50, None, 100]
    assert (found["x_mean"], found["x_std"], found["x_var"]) == (75, 25, 625)
    assert (found["x_worst"], found["x_best"], found["x_p10"]) == (50, 100, 55)


@pytest.mark.parametrize("kept", [True, False])
def test_ditto_step_by_hand(kept):
    """v, which begins at w, moves by -lr (grad F(v) + lam (v - w)); w's step is FedAvg's."""
    personal = state_of(moved_network(0.1, seed=4))
    state = {"personal": personal} if kept else {}
    worker, step, generator, client, _, w = begin("ditto", ["--lam", "0.7"], state=state)
    x, y = batch()
    twin, own = twins(worker, personal if kept else w)
    v = dict(own.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(own(x), y), list(v.values()))
    expected = [p - 0.1 * (g + 0.7 * (p - w[k])) for (k, p), g in zip(v.items(), grads)]
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y))
    finish(generator)
    close([client.state["personal"][k] for k in v], expected)
    assert client.bytes_up == client.bytes_down == 0  # beside the model


@pytest.mark.parametrize("name, kept", [("fedper", "3."), ("fedbn", ".1.")])
def test_what_stays_at_home(name, kept):
    """A client trains its own part, of the names with kept, and the global rest, which it sends."""
    other = normed_network()
    perturb(other, 0.3)
    for v in other.buffers():
        v.add_(1)
    net = normed_network()
    mine = {k: v.double() if v.is_floating_point() else v for k, v in state_of(other).items()}
    mine = {k: v for k, v in mine.items() if kept in k}
    assert len(mine) == (2 if name == "fedper" else 10)
    worker, step, generator, client, args, w = begin(name, net=net, state={"personal": mine})
    for k, v in state_of(net).items():
        assert torch.equal(w[k], mine[k] if k in mine else v), k
    x, y = batch()
    twin, _ = twins(worker, w)
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y))
    finish(generator)
    ends = state_of(worker.net)
    assert client.state["personal"].keys() == mine.keys()
    assert all(torch.equal(client.state["personal"][k], ends[k]) for k in mine)
    rest = common.nbytes(ends) - common.nbytes(mine)
    assert client.model == {"up": rest, "down": rest}
    before = state_of(net)
    received = received_of(net, (2, -4), (0.75, 0.25))
    SCRIPTS[name].aggregate(net, received, {}, args)
    for k, v in net.state_dict().items():
        if v.is_floating_point():
            expected = before[k] if k in mine else before[k] + 0.5
            assert torch.allclose(v, expected, rtol=1e-12, atol=1e-12), k


def test_a_part_of_the_model_is_counted(tmp_path):
    """Numbers of bytes, tensors, and the default, beside what is sent anyway."""

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        if client.id == 0:
            client.sends(np.int64(80))
            client.receives([torch.zeros(3), {"a": torch.zeros(2, dtype=torch.float64)}])
        if client.id == 1:
            client.sends([])
            client.receives(0)
        client.sum("more", torch.zeros(5))

    args = flags("--rounds", "1", "--out", str(tmp_path / "run"))
    net, [row] = common.run(args, local_update)
    size = common.nbytes(net.state_dict())
    assert row["bytes_up"] == 80 + 2 * size + 4 * 20
    assert row["bytes_down"] == 28 + 2 * size


def test_weights_that_are_not_the_network_s(tmp_path):
    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        client.state["personal"] = {"head": torch.zeros(1)}

    args = flags("--client-test", "--rounds", "1", "--out", str(tmp_path / "run"))
    with pytest.raises(common.UserError, match="no such 'head'"):
        common.run(args, local_update)
