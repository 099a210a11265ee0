"""FedMLB's pathways against plain computations."""

import fedmlb
import pytest
import torch.nn as nn
import torch.nn.functional as F
from conftest import same
from hand import batch, begin, check_step, normed_network, state_of, twins, two_networks
from extras.backbones import Head
from methods import final

import common


@pytest.mark.parametrize(
    "flags, chosen, divisor",
    [
        ("", [1, 2, 3, 4, 5], 5),
        ("--pathways 1,3", [1, 3], 2),
        ("--pathways 5 --divisor all", [5], 5),
    ],
)
@pytest.mark.parametrize("direction", ["local-global", "global-local"])
def test_fedmlb_step(flags, chosen, divisor, direction):
    """Every hybrid pathway from the input, gradients by autograd of the whole."""
    net = normed_network(blocks=5)
    weights = ["--lambda1", "0.7", "--lambda2", "0.4", "--tau", "2", "--direction", direction]
    worker, step, *_, w = begin("fedmlb", [*weights, *flags.split()], net=net)
    x, y = batch()
    twin, glob = twins(worker, w)
    glob.eval().requires_grad_(False)
    before = state_of(worker.nets["glob"])
    q = twin(x)
    total = F.cross_entropy(q, y)
    for m in chosen:
        first, second = (twin, glob) if direction == "local-global" else (glob, twin)
        h = x
        for i in range(7):
            h = (first if i < m else second)[i](h)
        soft, log_soft = F.softmax(h / 2, 1), F.log_softmax(q / 2, 1)
        distance = (soft * (soft.log() - log_soft)).sum(1).mean()
        total = total + (0.7 * F.cross_entropy(h, y) + 0.4 * distance) / divisor
    check_step(worker, step, x, y, twin, total)
    assert same(before, state_of(worker.nets["glob"]))
    assert same(before, w)


def test_fedmlb_cuts_behind_blocks_with_parameters():
    """Not behind a pooling, nor behind a head."""
    assert fedmlb.pathway_cuts(common.build_net("resnet18-gn", 10)) == [1, 2, 3, 4, 5]
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Head(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert fedmlb.pathway_cuts(net) == [1]


def test_fedmlb_updates_batch_norm_once():
    net = two_networks("resnet56", 62)
    worker, step, *_ = begin("fedmlb", ["--direction", "global-local"], net=net)
    x, y = batch(3)
    step(x[:, :, ::2, ::2], y)
    assert {v.item() for k, v in worker.net.state_dict().items() if "num_batches" in k} == {1}
    assert all(p.isfinite().all() for p in worker.net.parameters())


def test_fedmlb_trains_where_a_hybrid_is_certain():
    """Eval-mode tails of a fresh resnet56 give logits near 100, whose softmax has zeros: no NaN."""
    worker, step, *_ = begin("fedmlb", net=two_networks("resnet56", 62))
    worker.net.float()
    worker.nets["glob"].float()
    x, y = batch(3)
    assert step(200 * x.float(), y).isfinite()
    assert all(p.isfinite().all() for p in worker.net.parameters())


def test_fedmlb_with_feddyn(tmp_path):
    """Without pathways it is FedDyn; with them both terms act."""
    flags = ["--dyn-alpha", "0.1"]
    dyn, _ = final("feddyn", tmp_path / "dyn", *flags)
    off, _ = final("fedmlb", tmp_path / "mlb", *flags, "--lambda1", "0", "--lambda2", "0")
    both, _ = final("fedmlb", tmp_path / "both", *flags)
    assert same(off, dyn)
    assert not same(both, dyn)
