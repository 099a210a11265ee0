"""The seam between clients and server: what clients send, how it is added up, who weighs what."""

import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, same

import common
import fedavg


def test_mean_against_numpy():
    """Parameters and batch-norm statistics with weights 1/4 and 3/4; counters are the last's."""
    net, received = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), common.Received()
    torch.manual_seed(0)
    like = net.state_dict()
    sent = [{k: torch.randn(v.shape) if v.ndim else v + n for k, v in like.items()} for n in (4, 7)]
    for i, (alpha, weights) in enumerate(zip((0.25, 0.75), sent)):
        received.add(common.Client(i, np.arange(3), {}, alpha), dict(weights))
    assert received.mean.keys() == net.state_dict().keys()
    for k, v in received.mean.items():
        first, second = (weights[k].numpy() for weights in sent)
        averaged = sent[0][k].is_floating_point()
        expected = 0.25 * first + 0.75 * second if averaged else 7
        assert np.allclose(v.numpy(), expected, atol=1e-7), k
    assert (received.mean["1.num_batches_tracked"], len(received.mean)) == (7, 7)
    common.average(net, received, {}, flags())
    assert same(net.state_dict(), received.mean)


def test_sums_and_records():
    """Sums in nests of tensors, records by client, also where not every client sends them."""
    received, clients = common.Received(), []
    for i in range(3):
        client = common.Client(i, np.arange(1), {}, 1 / 3)
        client.sum("nest", {"a": [torch.full((2,), float(i)), torch.tensor(10.0 * i)]})
        if i:
            client.sum("late", torch.tensor(float(i)))
            client.record("id", torch.tensor(i))
        clients.append(client)
        received.add(client, {"w": torch.ones(1)})
    assert [t.tolist() for t in received.sums["nest"]["a"]] == [[3, 3], 30]
    assert received.sums["late"].item() == 3
    assert {k: v.item() for k, v in received.records["id"].items()} == {1: 1, 2: 2}
    assert all(a is b for a, b in zip(received.clients, clients, strict=True))
    for client in clients:  # nothing of the size of a model stays
        assert client.sums == client.records == {}


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("where", ["weights", "loss"])
def test_what_is_not_finite_is_found(where, value):
    """And named, by the client that sent it."""
    received, net = common.Received(), nn.Linear(1, 1)
    for i in range(2):
        client = common.Client(i, np.arange(1), {}, 0.5, loss=value if i and where == "loss" else 1)
        sent = value if i and where == "weights" else 1.0
        received.add(client, {"w": torch.tensor([0.0, sent]), "count": torch.tensor(3)})
    if value == 1:
        return common.check_finite(net, received, 7)
    with pytest.raises(FloatingPointError, match="round 7, client 1: the local model"):
        common.check_finite(net, received, 7)


def test_bytes_that_clients_count():
    client = common.Client(0, np.arange(1), {})
    three, four = torch.ones(3), {"a": [torch.ones(4, dtype=torch.float64)]}
    client.sum("three", three)
    assert client.bytes_up == 12
    client.sum("again", three, sent=False)
    client.record("again", three, sent=False)
    assert client.bytes_up == 12
    client.record("four", four)
    assert client.bytes_up == 44
    assert client.upload(three) is three
    assert client.bytes_up == 56
    assert client.bytes_down == 0
    assert client.download(four) is four
    assert client.bytes_down == 32
    assert client.download(None) is None
    assert client.bytes_down == 32


def test_what_is_sent_is_a_copy():
    """The worker's tensors change with its next client."""
    client, value = common.Client(0, np.arange(1), {}), torch.ones(2, requires_grad=True)
    client.sum("s", [value])
    client.record("r", value)
    with torch.no_grad():
        value.add_(1)
    for sent in (client.sums["s"][0], client.records["r"]):
        assert sent.tolist() == [1, 1]
        assert not sent.requires_grad


@pytest.mark.parametrize(
    "tree", [1.0, np.ones(2), {"n": 1.0, "t": torch.ones(1)}, [torch.ones(1), 2]]
)
def test_only_tensors_are_summed(tree):
    with pytest.raises(common.UserError, match="client.sum.'a'.*where a tensor should be"):
        common.Client(0, np.arange(3)).sum("a", tree)


@pytest.mark.parametrize("place", ["server", "client.state"])
@pytest.mark.parametrize("value", [np.ones(3), np.float64(2), {1, 2}])
def test_what_cannot_be_kept_is_named(tmp_path, place, value):
    """When it is written, and not when the run is to be resumed."""

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        (server if place == "server" else client.state)["mine"] = [torch.ones(1), value]

    args = common.flags("", "x").parse_args([*TINY, "--workers", "1", "--out", str(tmp_path / "a")])
    with pytest.raises(
        common.UserError, match=rf"{place}\['mine'\]\[1\]: a {type(value).__name__} "
    ):
        common.run(args, local_update)


def test_a_report_may_be_a_tensor(tmp_path):
    def aggregate(net, received, server, args):
        common.average(net, received, server, args)
        server["report"] = {"a": torch.tensor(2.5), "b": 3}

    args = common.flags("", "x").parse_args([*TINY, "--out", str(tmp_path / "a")])
    _, rows = common.run(args, fedavg.local_update, aggregate)
    assert (rows[-1]["a"], rows[-1]["b"]) == (2.5, 3)


def test_weights_of_clients_without_training():
    """Of 3, 8 and 5 samples in full batches of 4 there are none, 8 and 4."""
    clients = [common.Client(k, np.arange(n)) for k, n in enumerate((3, 8, 5))]
    for weighting, expected in (("samples", [0, 2 / 3, 1 / 3]), ("uniform", [0, 0.5, 0.5])):
        args = flags("--drop-last", "--batch-size", "4", "--weighting", weighting)
        common.set_weights(clients, args, 1)
        assert [client.weight for client in clients] == pytest.approx(expected)
    with pytest.raises(common.UserError, match="no client of round 7 has 4 samples"):
        common.set_weights(clients[:1], args, 7)
