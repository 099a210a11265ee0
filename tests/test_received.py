"""The seam between clients and server: what clients send, how it is added up, who weighs what."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, parts_of, same

import common
import run_folder
import fedavg


def net_with_statistics():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def random_weights(net, rng, count):
    """Return a state_dict like net's with random numbers, and count in integer counters."""
    return {
        k: torch.from_numpy(rng.normal(size=v.shape).astype(np.float32))
        if v.is_floating_point()
        else torch.full_like(v, count)
        for k, v in net.state_dict().items()
    }


def test_mean_against_numpy():
    """Parameters and batch-norm statistics with weights 1/4 and 3/4; counters are the last's."""
    net, rng, received = net_with_statistics(), np.random.default_rng(0), common.Received()
    sent = [random_weights(net, rng, count) for count in (4, 7)]
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


def test_mean_is_summed_in_the_order_of_the_clients():
    """In fp32 0 + 2^24 + 1 - 2^24 is 0, and 0 + 2^24 - 2^24 + 1 is 1."""
    for values, expected in (((2.0**24, 1.0, -(2.0**24)), 0), ((2.0**24, -(2.0**24), 1.0), 1)):
        received = common.Received()
        for i, value in enumerate(values):
            client = common.Client(i, np.arange(1), {}, 1.0)
            client.sum("s", torch.tensor([value]))
            received.add(client, {"w": torch.tensor([value])})
        assert received.mean["w"].item() == received.sums["s"].item() == expected


def test_word_vectors_are_not_averaged():
    """Nobody trains them: they stay as they are to the last bit."""
    received, vectors = common.Received(), torch.tensor([0.1, 0.2])
    for i in range(3):
        client = common.Client(i, np.arange(1), {}, 1 / 3)
        received.add(client, {"0.vectors": vectors.clone(), "w": torch.ones(1)})
    assert torch.equal(received.mean["0.vectors"], vectors)


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


def test_median_of_the_clients(tmp_path):
    """An aggregator that needs all models apart has them recorded."""
    models = []

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        client.record("w", worker.net.state_dict(), sent=False)

    def aggregate(net, received, server, args):
        models[:] = received.records["w"].values()
        median = {k: torch.stack([w[k] for w in models]).median(0).values for k in models[0]}
        common.load_weights(net, median)

    args = flags("--clients", "3", "--out", str(tmp_path / "run"))
    net, rows = common.run(args, local_update, aggregate)
    assert len(models) == 3
    for k, v in net.state_dict().items():
        values = np.stack([w[k].numpy() for w in models])
        assert np.array_equal(v.numpy(), np.median(values, 0)), k
    assert rows[1]["bytes_up"] == 3 * common.nbytes(net.state_dict())


def weights_seen(out, *argv):
    """Return the clients' weights in the first round of a run."""
    seen = []

    def aggregate(net, received, server, args):
        seen.append([client.weight for client in received.clients])
        common.average(net, received, server, args)

    args = flags("--rounds", "1", "--out", str(out), *argv)
    common.run(args, fedavg.local_update, aggregate)
    return seen[0]


@pytest.mark.parametrize("argv", ["", "--weighting uniform", "--drop-last"])
def test_weights_of_the_average(tmp_path, argv):
    sizes = np.array([len(part) for part in parts_of(flags())])
    if argv == "--drop-last":
        sizes = sizes // 32
    if argv == "--weighting uniform":
        sizes = np.ones(4)
    seen = weights_seen(tmp_path / "run", *argv.split())
    assert seen == pytest.approx(sizes / sizes.sum())


def test_uniform_weights_skip_clients_without_training(tmp_path):
    """--drop-last with batches larger than the smallest client: it is not trained, and weighs 0."""
    sizes = np.array([len(part) for part in parts_of(flags())])
    size = int(sizes.min()) + 1
    argv = ["--drop-last", "--batch-size", str(size), "--weighting", "uniform"]
    trained = sizes >= size
    assert weights_seen(tmp_path / "run", *argv) == pytest.approx(trained / trained.sum())


def test_own_data_and_network(tmp_path):
    """run() from Python on tensors and an nn.Sequential of one's own; its run can be resumed."""

    def own():
        torch.manual_seed(5)
        x, y = torch.randint(0, 256, (120, 1, 6, 6), dtype=torch.uint8), torch.arange(120) % 3
        x[y == 1] //= 2
        data = common.Data(x[:90], y[:90], x[90:], y[90:], classes=3)
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
        return {"data": data, "net": net}

    def trained(*argv):
        words = [*TINY, "--partition", "iid", *argv]
        args = common.flags("test", "mine").parse_args(words)
        return common.run(args, fedavg.local_update, **own())

    net, rows = trained("--rounds", "4", "--out", str(tmp_path / "whole"))
    assert (len(rows), rows[0]["samples"]) == (4, 90)
    assert net[1].in_features == 36
    config = run_folder.read_config(tmp_path / "whole")
    assert config["flags"]["dataset"].startswith("own-")
    assert config["flags"]["model"].startswith("own-")
    assert config["script"] == "mine"
    trained("--rounds", "2", "--out", str(tmp_path / "cut"))
    again, _ = trained("--rounds", "4", "--out", str(tmp_path / "cut"), "--resume")
    assert same(net.state_dict(), again.state_dict())


def test_own_table_of_floats_passes_through(tmp_path):
    """Twelve columns, of which three say the class: a linear network learns it, unnormalised."""
    x = torch.randn(600, 12)
    y = x[:, :3].argmax(1)
    data = common.Data(x[:500], y[:500], x[500:], y[500:], 3)
    assert torch.equal(data.normalise(x), x)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    argv = "--clients 3 --partition iid --rounds 3 --epochs 5 --batch-size 32 --lr 0.1".split()
    run = functools.partial(common.run, data=data, net=net)
    out = ["--quiet", "--device", "cpu", "--out", str(tmp_path / "run")]
    _, rows = fedavg.main([*argv, *out], run=run)
    assert rows[-1]["test_acc"] > 80


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
