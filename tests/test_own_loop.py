"""Take a script with you: losses to import, and the loop of docs/add-a-method.md as it stands."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, plainly
from methods import METHODS, ROOT, SCRIPTS, needed
from test_docs import blocks_of

import common
import fedalign
import fedcka
import moon
import scaffold

PAGE = ROOT / "docs" / "add-a-method.md"


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


VARIANTS = {"scaffold": [["--option", "1"]], "rfedavg": [["--variant", "rfedavg"]]}
VARIANTS["rfedavg_code"] = VARIANTS["rfedavg"]


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


def test_losses_are_functions_of_tensors():
    """Imported, they need no worker: on plain layers, with gradients."""
    torch.manual_seed(0)
    block, h = nn.Conv2d(16, 32, 3, padding=1), torch.randn(4, 16, 6, 6)
    loss = fedalign.lipschitz_loss(block, h, block(h).detach())
    assert loss > 0
    loss.backward()
    assert block.weight.grad.abs().max() > 0
    assert fedalign.lipschitz_loss(block, h, block(h).detach(), width=1.0) == 0
    a, g, p = torch.randn(3, 8, 2, 5, requires_grad=True)
    towards, away = (fedcka.linear_cka(a.flatten(1), b.flatten(1)) for b in (g, p))
    assert fedcka.layer_contrast(a, g, p) == F.softplus(away - towards)
    fedcka.layer_contrast(a, g, p).backward()
    z = torch.eye(2)
    assert moon.contrastive_loss(z, z, -z, 1.0).item() == pytest.approx(0.126928, abs=1e-6)
