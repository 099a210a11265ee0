"""What clients send and what the server makes of it; the engine: batches, precision, a GPU."""

import math
import os
import types

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import args_of, flags
from virtual_gpu import machine

import common
import engine
import extras.glyphs
import fedavg
from extras import backbones, text


def test_mean_against_numpy():
    """Parameters and batch-norm statistics with weights 1/4 and 3/4; counters are the last's."""
    net, received = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), common.Received()
    net[0].vectors = nn.Parameter(torch.zeros(2))  # named as words' vectors are
    torch.manual_seed(0)
    like = net.state_dict()
    sent = [{k: torch.randn(v.shape) if v.ndim else v + n for k, v in like.items()} for n in (4, 7)]
    for i, (alpha, weights) in enumerate(zip((0.25, 0.75), sent)):
        received.add(common.Client(i, np.arange(3), {}, alpha), dict(weights))
    assert received.mean.keys() == like.keys()
    for k, v in received.mean.items():
        first, second = (weights[k].numpy() for weights in sent)
        averaged = sent[0][k].is_floating_point()
        expected = 0.25 * first + 0.75 * second if averaged else 7
        assert np.allclose(v.numpy(), expected, atol=1e-7), k


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
    client.record("four", four)
    for send in (client.sum, client.record):
        send("again", three, sent=False)
    assert client.upload(three) is three and client.download(four) is four
    assert client.download(None) is None
    assert (client.bytes_up, client.bytes_down) == (12 + 32 + 12, 32)


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


@pytest.mark.parametrize("tree", [np.ones(2), {"t": torch.ones(1), "n": [1.0]}])
def test_only_tensors_are_summed(tree):
    with pytest.raises(common.UserError, match="client.sum.'a'.*where a tensor should be"):
        common.Client(0, np.arange(3)).sum("a", tree)


@pytest.mark.parametrize("place", ["server", "client.state"])
@pytest.mark.parametrize(
    "value, words",
    [
        (np.float64(2), "a float64 where a tensor should be"),
        ({1, 2}, "a set where"),
        ({np.int64(2): torch.ones(1)}, "a numpy int64 as a key"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path, place, value, words):
    """When it is written, and not when the run is to be resumed."""

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        (server if place == "server" else client.state)["mine"] = [torch.ones(1), value]

    args = flags("--local-steps", "1", "--out", str(tmp_path / "a"))
    with pytest.raises(common.UserError, match=rf"{place}\['mine'\]\[1\]: {words}"):
        common.run(args, local_update)


def test_a_report_may_be_a_tensor_or_of_numpy(tmp_path):
    def aggregate(net, received, server, args):
        common.average(net, received, server, args)
        server["report"] = {"a": torch.tensor(2.5), "b": 3, "c": np.float32(0.5)}

    args = flags("--local-steps", "1", "--rounds", "1", "--out", str(tmp_path / "a"))
    _, [row] = common.run(args, fedavg.local_update, aggregate)
    assert (row["a"], row["b"], row["c"]) == (2.5, 3, 0.5)


def test_a_report_names_no_column_of_the_rows():
    def aggregate(net, received, server, args):
        server["report"] = {"test_acc": 1.0}

    with pytest.raises(common.UserError, match="have a 'test_acc' of their own"):
        common.run(flags("--local-steps", "1", "--plain"), fedavg.local_update, aggregate)


def test_tree_map_keeps_tuples():
    tree = common.tree_map(torch.neg, {"a": (torch.ones(1), [1, (2,)])})
    assert tree == {"a": (-torch.ones(1), [1, (2,)])} and type(tree["a"]) is tuple


def test_weights_of_clients_without_training():
    """Of 3, 8 and 5 samples in full batches of 4 there are none, 8 and 4."""
    clients = [common.Client(k, np.arange(n)) for k, n in enumerate((3, 8, 5))]
    for weighting, expected in (("samples", [0, 2 / 3, 1 / 3]), ("uniform", [0, 0.5, 0.5])):
        args = flags("--drop-last", "--batch-size", "4", "--weighting", weighting)
        common.set_weights(clients, args, 1)
        assert [client.weight for client in clients] == pytest.approx(expected)
    with pytest.raises(common.UserError, match="no client of round 7 has 4 samples"):
        common.set_weights(clients[:1], args, 7)


def tiny_worker(*argv):
    net = common.build_net("cnn", 62).to(memory_format=torch.channels_last)
    return engine.Worker(net, extras.glyphs.glyphs(), flags(*argv), 60)


def test_batches_of_a_round():
    """Batch norm needs two samples; test_loop.py has what else there is."""
    for argv, batch_norm, sizes in (("--epochs 2", False, 2 * [10, 10, 1]), ("", True, [10, 10])):
        args = flags("--batch-size", "10", *argv.split())
        assert common.batch_sizes(21, args, batch_norm) == sizes


def test_a_later_round_without_a_batch_is_refused_first():
    """Before any training: no flag may change in a run that goes on."""
    words = "--clients 20 --sample 0.1 --drop-last --batch-size 12 --alpha 0.3 --rounds 30"
    args = flags(*words.split(), "--min-size", "2", "--data-seed", "1")
    y = torch.arange(200) % 10
    data = common.Data(torch.randn(200, 3), y, torch.randn(9, 3), y[:9], 10)
    with pytest.raises(common.UserError, match="no client of round ") as refused:
        common.begin(args, None, data, nn.Sequential(nn.Linear(3, 10)))
    assert "round 1 " not in str(refused.value)


@pytest.mark.parametrize("values", [(0, 0.5), (torch.ones(3, 1), torch.ones(1))])
def test_a_pin_of_another_shape_or_dtype(tmp_path, values):
    """It is the value itself, as in the plain loop, and no copy in the first one's storage."""
    found = []

    def local_update(worker, client, server, args):
        found.append(worker.pin("a", values[client.id]).tolist())
        yield lambda x, y: worker.net(x).sum()

    words = "--clients 2 --local-steps 1 --rounds 1 --workers 1 --out"
    common.run(flags(*words.split(), str(tmp_path / "run")), local_update)
    assert found == [torch.as_tensor(value).tolist() for value in values]


def test_local_update_yields_once():
    worker = tiny_worker("--local-steps", "1")

    def local_update(worker, client, server, args):
        for step in fedavg.local_update(worker, client, server, args):
            yield step
            yield step

    client, weights = common.Client(0, np.arange(9), {}), worker.global_net.state_dict()
    with pytest.raises(RuntimeError, match="yields once"):
        list(worker.train(client, {"round": 1}, weights, local_update))


def test_bf16_is_for_blocks_alone():
    """The logits, and what a method computes from them, are fp32; gradients outside are exact."""
    worker = tiny_worker("--precision", "bf16")
    plain, x = common.build_net("cnn", 62), worker.data.normalise(worker.data.x[:8])
    plain.load_state_dict(worker.net.state_dict())
    out = worker.net(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, out.bfloat16().float())
    assert torch.allclose(out, plain(x), atol=0.02)
    assert worker.net[:-1](x).dtype == torch.float32
    narrow = common.at_width(worker.net[1], worker.net[0](x)[:, :8], 0.25)
    assert narrow.dtype == torch.float32
    frozen = worker.frozen("glob")
    assert torch.equal(frozen(x), out)
    assert frozen[0].forward is not worker.net[0].forward
    seen = []

    def step(x, y):
        seen.append(torch.is_autocast_enabled("cpu"))
        return worker.net(x).mean()

    worker._begin(common.Client(0, np.arange(8), {}), {"round": 1}, worker.global_net.state_dict())
    worker._step(step, 8)
    assert seen == [False]


def test_convolutions_are_searched_for_full_batches_alone():
    worker, seen = tiny_worker(), {}
    client = common.Client(0, np.arange(40), {})
    worker._begin(client, {"round": 1}, worker.global_net.state_dict())
    worker.search = True

    def step(x, y):
        seen[len(x)] = torch.backends.cudnn.benchmark
        return torch.zeros(())

    for size in (32, 8):
        worker._step(step, size)
    assert seen == {32: True, 8: False}
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(
    "side, cuda, size", [(32, 1, 2000), (64, 1, 500), (224, 1, 50), (8, 0, 250)]
)
def test_evaluation_batches_follow_the_pixels(side, cuda, size):
    x, y = torch.zeros(2100, 1, side, side, dtype=torch.uint8), torch.zeros(2100)
    y_train = types.SimpleNamespace(is_cuda=cuda)
    data, seen = types.SimpleNamespace(x_test=x, y_test=y, y=y_train), []

    def run(batch, batches):
        seen.extend(len(x) for x, _ in batches)
        return [(torch.zeros(1), torch.zeros(2))]

    common.evaluate(nn.Identity(), data, None, run)
    assert (seen[0], sum(seen)) == (size, 2100)


def test_settings_of_cuda():
    """cuBLAS is set when common.py is imported; TF32 is the default on a GPU alone."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    chosen = {"cpu": "fp32", "cuda": "tf32", "cuda --precision fp32": "fp32"}
    with machine():
        for words, precision in chosen.items():
            assert args_of(fedavg, "--device", *words.split()).precision == precision


def test_vgg9_pools_only_what_is_larger():
    """At 32x32 its last maps are 4x4 already; the pooling there has no deterministic backward."""
    head = dict(backbones.vgg9(3, 32)[0])["head"]
    pool = next(m for m in head if isinstance(m, nn.AdaptiveAvgPool2d))
    small, large = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 8, 8)
    assert pool(small) is small
    assert torch.equal(pool(large), nn.functional.adaptive_avg_pool2d(large, 4))


def test_lstm_stays_out_of_autocast():
    layer = text.Recurrent(3, 4, last=False)
    x = torch.cat([torch.randn(2, 5, 3), torch.ones(2, 5, 1)], 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), text.Recurrent.forward(layer, x))
        assert layer(x).dtype == torch.float32
