"""docs/add-a-method.md: FedNova against the formula, the tables of the contract, the own loop."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags
from methods import METHODS, ROOT
from test_docs import blocks_of

import common
import extras.glyphs
import fednova
import moon
import run_folder
import scaffold

PAGE = ROOT / "docs" / "add-a-method.md"


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
    a = [fednova.weight_of_steps(k, 0.5, False) for k in steps]
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


def test_the_loop_of_the_docs_learns():
    """MOON keeps its clients' models, SCAFFOLD its control variates; both classify."""
    [block] = [block for block in blocks_of(PAGE) if block.text.startswith("# own_loop.py\n")]
    names = {"__name__": "own_loop"}
    exec(compile(block.text, "own_loop.py", "exec"), names)
    accuracy, states, nets = (names[k] for k in ("accuracy", "states", "nets"))
    assert min(accuracy.values()) > 0.75
    assert type(nets[scaffold]).__mro__[1] is nn.Module
    assert [states[moon][k].keys() for k in range(3)] == [{"net"}] * 3
    assert all(states[scaffold][k]["c"][0].abs().max() > 0 for k in range(3))


def test_table_of_what_a_worker_needs():
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| (`net`.*) \|$", PAGE.read_text(), re.M)
    listed = {name: b for a, b in rows for name in re.findall(r"`(\w+)`", a)}
    assert listed.keys() == {*METHODS} and sum(a.count(",") + 1 for a, _ in rows) == len(METHODS)
    for name, attributes in listed.items():
        used = re.findall(r"\bw(?:orker)?\.(\w+)", (ROOT / f"{name}.py").read_text())
        assert set(re.findall(r"`(\w+)`", attributes)) == {*used}, name
