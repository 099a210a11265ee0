"""Personal models: the docs' FedPer and Ditto, their accuracies by client, bytes of a part."""

import importlib
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, flags, plainly, same
from test_docs import ROOT, write_scripts

import common
import engine
import run_folder
import extras.glyphs
import fedavg
from extras import partitions

WORDS = [*TINY, "--rounds", "3", "--sample", "0.5", "--local-steps", "4"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Return the scripts of docs/personal.md, {name: module}."""
    folder = tmp_path_factory.mktemp("scripts")
    write_scripts(ROOT / "docs" / "personal.md", folder)
    sys.path.insert(0, str(folder))
    try:
        return {name: importlib.import_module(name) for name in ("fedper", "ditto")}
    finally:
        sys.path.remove(str(folder))


@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_engine_and_resume(tmp_path, monkeypatch, scripts, name):
    """plainly() and a resumed run end with the same weights, clients' own included."""
    monkeypatch.setattr(common, "CORES", 1)  # sums inside operators depend on threads
    main = scripts[name].main
    net, rows = main([*WORDS, "--client-test", "--workers", "1", "--out", str(tmp_path / "a")])
    assert same(net.state_dict(), main(WORDS, run=plainly)[0].state_dict())
    cut = ["--client-test", "--workers", "1", "--out", str(tmp_path / "b")]
    main([*WORDS, *cut, "--rounds", "2"])
    again, resumed = main(["--out", str(tmp_path / "b"), "--resume", "--rounds", "3"])
    assert same(net.state_dict(), again.state_dict())
    assert resumed[-1]["personal_acc"] == rows[-1]["personal_acc"]


def states_of(out):
    """Return what each client of a run keeps, {client: state}."""
    table = run_folder.load(out / "checkpoint.pt")["clients"]
    return {k: run_folder.load(out / "states" / f"{k}-{t}.pt") for k, t, _ in table.tolist()}


@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_accuracies_are_of_each_client_s_own_network(tmp_path, scripts, name):
    """By a loop of our own over the run's files; of four clients one has never taken part."""
    out = tmp_path / "run"
    words = [*WORDS, "--seed", "5", "--rounds", "2", "--client-test", "--out", str(out)]
    net, rows = scripts[name].main(words)
    args, data, states = flags(*words), extras.glyphs.glyphs(), states_of(out)
    assert len(states) == 3
    tests = partitions.client_test_indices(data, common.partition(data, args), args)
    expected, ours = [], []
    for k, test in enumerate(tests):
        for values, weights in ((expected, states.get(k, {}).get("personal", {})), (ours, {})):
            own = common.copy_net(net).eval()
            own.load_state_dict({**net.state_dict(), **weights})
            right = own(data.normalise(data.x_test[test])).argmax(1) == data.y_test[test]
            values.append(100 * right.double().mean().item())
    assert rows[-1]["personal_acc"] == pytest.approx(expected)
    assert rows[-1]["client_acc"] == pytest.approx(ours)
    [absent] = {0, 1, 2, 3} - states.keys()
    assert rows[-1]["personal_acc"][absent] == rows[-1]["client_acc"][absent]
    for key, values in (("personal_acc", expected), ("client_acc", ours)):
        found = [rows[-1][f"{key}_{k}"] for k in ("mean", "std", "worst", "best")]
        assert found == pytest.approx([f(values) for f in (np.mean, np.std, min, max)])


def test_no_personal_models_no_columns(tmp_path):
    _, rows = fedavg.main([*TINY, "--client-test", "--out", str(tmp_path / "run")])
    assert [key for key in rows[0] if key.startswith("personal")] == []
    assert len(rows[0]["client_acc"]) == 4


def test_summary_lists_all_clients():
    """Of hits 1, 0, 1, 1: client 0 has half of two, client 1 nothing to test, client 2 all."""
    tests = [np.array([0, 1]), np.array([], np.int64), np.array([2, 3])]
    found = partitions.client_summary(np.array([True, False, True, True]), tests, "x")
    assert found["x"] == [50, None, 100]
    assert (found["x_mean"], found["x_std"], found["x_var"]) == (75, 25, 625)


def test_fedper_trains_heads_apart(tmp_path, scripts):
    """The server's head stays as drawn; the clients' differ; bytes are those of the body."""
    out = tmp_path / "run"
    net, rows = scripts["fedper"].main([*TINY, "--out", str(out)])
    weights, drawn = (
        net.state_dict(),
        common.prepare_net(extras.glyphs.glyphs(), flags()).state_dict(),
    )
    head = scripts["fedper"].head(net)
    assert list(head) == ["classifier.weight", "classifier.bias"]
    for name in weights:
        assert torch.equal(weights[name], drawn[name]) == (name in head), name
    states = states_of(out)
    assert all(state["personal"].keys() == head.keys() for state in states.values())
    kept = [state["personal"]["classifier.bias"] for state in states.values()]
    assert not any(torch.equal(a, b) for a in kept for b in kept if a is not b)
    body = common.nbytes(weights) - common.nbytes(head)
    assert {row["bytes_up"] for row in rows} == {row["bytes_down"] for row in rows} == {4 * body}


def test_ditto_leaves_fedavg_alone(tmp_path, scripts):
    net, _ = scripts["ditto"].main([*TINY, "--lam", "3", "--out", str(tmp_path / "a")])
    assert same(
        net.state_dict(), fedavg.main([*TINY, "--out", str(tmp_path / "b")])[0].state_dict()
    )


def ditto_worker(scripts, state, *argv):
    """Return a worker on glyphs, Ditto's step, its generator and the client."""
    args = scripts["ditto"].main([*TINY, *argv], run=lambda args, *_: args)
    data = extras.glyphs.glyphs()
    torch.manual_seed(0)
    worker = engine.Worker(common.build_net("cnn", 62), data, args, 8)
    client = common.Client(0, np.arange(40), state)
    worker._begin(client, {"round": 1}, worker.global_net.state_dict())
    generator = scripts["ditto"].local_update(worker, client, {}, args)
    return worker, next(generator), generator, client


def test_ditto_step_by_hand(scripts):
    """v - lr (grad + lam (v - w)) in float64, from a client's own v."""
    torch.manual_seed(1)
    personal = common.build_net("cnn", 62).state_dict()
    argv = "--lam 0.7 --lr 0.05".split()
    worker, step, generator, client = ditto_worker(scripts, {"personal": personal}, *argv)
    data = worker.data
    x, y = data.normalise(data.x[:8]), data.y[:8]
    own = common.build_net("cnn", 62).double()
    own.load_state_dict(personal)
    gradient = torch.autograd.grad(F.cross_entropy(own(x.double()), y), list(own.parameters()))
    w = worker.global_net.double().parameters()
    with torch.no_grad():
        expected = [
            v - 0.05 * (g + 0.7 * (v - a)) for v, g, a in zip(own.parameters(), gradient, w)
        ]
    worker.global_net.float()
    step(x, y)
    next(generator, None)
    found = [client.state["personal"][name] for name, _ in own.named_parameters()]
    for a, b in zip(found, expected):
        assert torch.allclose(a.double(), b, atol=1e-6)
    assert not torch.allclose(found[0], personal["conv1.0.weight"], atol=1e-4)


def test_a_warm_up_is_taken_back_from_a_network_in_training(scripts, capsys):
    """Without a GPU the capture fails behind its three steps; Ditto's v is then put back too."""
    ends = []
    for cuda in (True, False):
        worker, step, generator, client = ditto_worker(scripts, {}, "--epochs", "1")
        worker.cuda = cuda
        worker._graphed(32, worker._step, (step, 32)) if cuda else worker._step(step, 32)
        next(generator, None)
        ends.append(client.state["personal"])
    assert same(*ends)


def test_a_part_of_the_model_is_counted(tmp_path):
    """Numbers of bytes, tensors, and the default, beside what is sent anyway."""

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        if client.id == 0:
            client.sends(80)
            client.receives([torch.zeros(3), {"a": torch.zeros(2, dtype=torch.float64)}])
        client.sum("more", torch.zeros(5))

    args = flags("--rounds", "1", "--out", str(tmp_path / "run"))
    net, [row] = common.run(args, local_update)
    size = common.nbytes(net.state_dict())
    assert row["bytes_up"] == 80 + 3 * size + 4 * 20
    assert row["bytes_down"] == 28 + 3 * size


@pytest.mark.parametrize("part, size", [(np.int64(500), 500), (0, 0), ([], 0)])
def test_numbers_of_bytes(part, size):
    client = common.Client(0, np.arange(4))
    client.sends(part)
    client.receives(part)
    assert client.model == {"up": size, "down": size}


def test_what_is_no_number_of_bytes():
    with pytest.raises(TypeError):
        common.Client(0, np.arange(4)).sends(0.1 * 500)


@pytest.mark.parametrize(
    "personal, words",
    [
        ({"head": torch.zeros(1)}, "no such 'head'"),
        ({"classifier.bias": torch.zeros(1)}, "no such 'classifier.bias'"),
    ],
)
def test_weights_that_are_not_the_network_s(tmp_path, personal, words):
    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        client.state["personal"] = personal

    args = flags("--client-test", "--rounds", "1", "--out", str(tmp_path / "run"))
    with pytest.raises(common.UserError, match=words):
        common.run(args, local_update)


def test_data_are_not_looked_over_for_each_client(tmp_path, monkeypatch, scripts):
    looks, check = [], common.Data._check
    monkeypatch.setattr(common.Data, "_check", lambda data: looks.append(1) or check(data))
    counts = []
    for rounds in ("1", "2"):
        looks.clear()
        words = ["--rounds", rounds, "--local-steps", "1", "--out", str(tmp_path / rounds)]
        scripts["fedper"].main([*TINY, "--client-test", *words])
        counts.append(len(looks))
    assert counts[0] == counts[1]
