"""docs/add-a-method.md: FedNova against the formula, the tables of the contract, the own loop."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, plainly
from methods import METHODS, ROOT, SCRIPTS, needed
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


class Seen:
    """A worker that notes in names what is used of it."""

    def __init__(self, worker, names):
        vars(self).update(worker=worker, names=names)

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.worker, name)

    def map(self, f, clients):
        self.names.add("map")
        return self.worker.map(lambda worker, client: f(Seen(worker, self.names), client), clients)

    def __setattr__(self, name, value):
        self.names.add(name)
        setattr(self.worker, name, value)


VARIANTS = {
    "scaffold": [["--option", "1"]],
    "rfedavg": [["--variant", "rfedavg"]],
    "rfedavg_code": [["--variant", "rfedavg"]],
}


def used(name, monkeypatch):
    """Return what a script uses of its worker, in two rounds of a step a client."""
    names = set()

    def run(args, local_update, aggregate=None, after_round=None, adapt=None):
        def update(worker, *rest):
            yield from local_update(Seen(worker, names), *rest)

        def after(worker, *rest):
            after_round(Seen(worker, names), *rest)

        plainly(args, update, aggregate, after if after_round else None, adapt)

    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))
    for more in [[], *VARIANTS.get(name, [])]:
        argv = [*TINY, *needed(name), "--rounds", "2", "--local-steps", "1", *more]
        SCRIPTS[name].main(argv, run=run)
    return names


@pytest.mark.parametrize("name", METHODS)
def test_table_of_what_a_worker_needs(name, monkeypatch):
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| (`net`.*) \|$", PAGE.read_text(), re.M)
    listed = [attributes for scripts, attributes in rows if f"`{name}`" in scripts]
    assert len(listed) == 1
    assert set(re.findall(r"`(\w+)`", listed[0])) == used(name, monkeypatch)
