"""docs/add-a-method.md: its example FedNova against the formula, and its table of the contract."""

import dataclasses
import json
import re

import pytest
import torch
from conftest import TINY, flags
from methods import ROOT

import common
import extras.glyphs
import fedavg
import fednova
import run_folder

PAGE = ROOT / "docs" / "add-a-method.md"


def moved(steps, momentum, nesterov):
    """Return how far torch's SGD goes at lr 1 on a constant gradient of 1."""
    v = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.SGD([v], lr=1.0, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        v.grad = torch.ones_like(v)
        opt.step()
    return -v.item()


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.5, True)])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_weight_of_steps(steps, momentum, nesterov):
    found = fednova.weight_of_steps(steps, momentum, nesterov)
    assert found == pytest.approx(moved(steps, momentum, nesterov), rel=1e-12)


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
    a = [moved(k, 0.5, False) for k in steps]
    total = sum(alpha * a_k for alpha, a_k in zip(shares, a))
    expected = {name: value.clone() for name, value in w.items()}
    for k, (alpha, a_k) in enumerate(zip(shares, a)):
        w_k = run_folder.load(tmp_path / "run" / "clients" / f"{k}-1.pt")
        for name in expected:
            expected[name] += total * alpha / a_k * (w_k[name].double() - w[name])
    for name, value in net.state_dict().items():
        assert torch.allclose(value.double(), expected[name], atol=1e-6), name
    assert row["effective_steps"] == pytest.approx(total)


def test_a_client_without_a_step_weighs_none():
    """In a loop that gives it a share: a_k = 0, and no drift."""
    args, data = flags("--drop-last"), extras.glyphs.glyphs()
    client = common.Client(0, torch.arange(20).numpy(), weight=0.5)
    net = common.prepare_net(data, args)
    worker = common.PlainWorker(net, data, args, client, {"round": 1})
    common.train_client(worker, client, {"round": 1}, args, fednova.local_update)
    assert client.sums["a"].item() == 0
    assert not any(d.any() for d in client.sums["d"])


def test_fednova_of_equal_steps_is_fedavg(tmp_path):
    words = [*TINY, "--local-steps", "3"]
    found, _ = fednova.main([*words, "--out", str(tmp_path / "a")])
    plainly, _ = fedavg.main([*words, "--out", str(tmp_path / "b")])
    pairs = zip(found.state_dict().values(), plainly.state_dict().values())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_the_contract_is_whole():
    """It names what common.py's header lists, and all public fields of what methods are given."""
    table = PAGE.read_text().partition("## The contract\n")[2].partition("## The one rule\n")[0]
    [line] = re.findall(r"^    worker +(.+): PlainWorker$", common.__doc__, re.M)
    header = [f"worker.{name}" for name in re.findall(r"\w+", line) if name != "and"]
    assert len(header) > 10
    listed = set(re.findall(r"\b((?:worker|client|received)\.\w+)", table))
    assert set(header) <= listed
    fields = {f"client.{f.name}" for f in dataclasses.fields(common.Client)}
    unlisted = {"client.sums", "client.records", "client.model"}  # the engine's
    received = {f"received.{name}" for name in [*vars(common.Received()), "clients"]}
    beside = {"client.bytes_down", "client.bytes_up"}  # read at the server
    assert (fields | received) - unlisted - beside <= listed
    callbacks = set(common.Method._fields)
    assert callbacks <= set(re.findall(r"`(\w+)\(", table))
