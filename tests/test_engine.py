"""The engine: batches, a worker's round, what methods may use of it, keyed randomness."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, flags, same

import common
import engine
import extras.glyphs
import fedavg


def tiny_worker(*argv):
    """Return a worker on glyphs, the data and the flags."""
    args, data = flags(*argv), extras.glyphs.glyphs()
    torch.manual_seed(0)
    net = common.build_net(args.model, data.classes).to(memory_format=torch.channels_last)
    return engine.Worker(net, data, args, 60), data, args


def play(worker, client, weights, round_=1, method=fedavg.local_update):
    """Return the client and its weights after one client's round."""
    batches = worker.train(client, {"round": round_}, weights, method)
    while True:
        try:
            next(batches)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize(
    "n, argv, batch_norm, sizes",
    [
        (25, "--epochs 2", False, [10, 10, 5, 10, 10, 5]),
        (21, "", False, [10, 10, 1]),
        (21, "", True, [10, 10]),  # batch norm needs two samples
        (4, "", False, [4]),
        (4, "--drop-last", False, []),
        (25, "--drop-last", False, [10, 10]),
        (25, "--local-steps 5", False, [10, 10, 5, 10, 10]),
        (4, "--local-steps 3", False, [4, 4, 4]),
    ],
)
def test_batches_of_a_round(n, argv, batch_norm, sizes):
    args = flags("--batch-size", "10", *argv.split())
    assert common.batch_sizes(n, args, batch_norm) == sizes


@pytest.mark.parametrize("model, persist", [("resnet8", False), ("cnn", True)])
def test_worker_equals_a_plain_loop(model, persist):
    """One client's round against torch.optim.SGD on the same batches.

    With short batches, clipping, decay and a second round, which persist begins with the first's
    momentum."""
    argv = ["--model", model, "--clip", "0.5", "--lr-decay", "0.5", "--augment", "crop"]
    argv += ["--persist-opt"] * persist
    worker, data, args = tiny_worker(*argv, "--epochs", "2")
    client = common.Client(3, np.arange(50, 90), {})
    net = common.build_net(model, 62).to(memory_format=torch.channels_last)
    options = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    opt = torch.optim.SGD(net.parameters(), **options)
    for round_ in (1, 2):
        client, found = play(
            worker, client, {k: v.clone() for k, v in net.state_dict().items()}, round_
        )
        if not persist:
            opt = torch.optim.SGD(net.parameters(), **options)
        opt.param_groups[0]["lr"] = 0.01 * 0.5 ** (round_ - 1)
        rng = common.seeded_rng("batches", 0, round_, 3)
        tables = common.batch_tables(client.index, 4, args, net, data, rng)
        losses = []
        net.train()
        for i, size in enumerate([32, 8, 32, 8]):
            index, crop = (torch.from_numpy(tables[k][i, :size]) for k in ("index", "crop"))
            x = data.normalise(common.apply_augment(data.x[index], {"crop": crop}))
            x = x.contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(net(x), data.y[index])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            losses.append(loss.item() * size)
        # bit for bit, but for the last bit of a buffer that torch's two kernels hand on
        exact = {"rtol": 0, "atol": 1e-7 * persist}
        expected = net.state_dict()
        assert all(torch.allclose(found[k], expected[k], **exact) for k in expected)
        assert client.loss.item() == pytest.approx(sum(losses), abs=1e-4)
        assert client.samples == 80


def test_pins_stay_where_they_are():
    worker, _, _ = tiny_worker()
    a, (b, c) = worker.pin("a", 2.0), worker.pin("bc", [torch.ones(2), torch.zeros(3)])
    assert worker.pin("a", 3.0) is a
    assert a == 3
    assert worker.pin("bc", [b + 1, c])[0] is b
    assert b.tolist() == [2, 2]


def test_frozen_networks_stay_where_they_are():
    worker, _, _ = tiny_worker()
    glob = worker.frozen("glob")
    with torch.no_grad():
        for p in worker.net.parameters():
            p.add_(1)
    old = {k: v.clone() for k, v in glob.state_dict().items()}
    assert not glob.training
    assert not any(p.requires_grad for p in glob.parameters())
    assert not same(old, worker.net.state_dict())
    assert worker.frozen("glob") is glob
    assert same(glob.state_dict(), worker.net.state_dict())
    assert worker.frozen("glob", old) is glob
    assert same(glob.state_dict(), old)


def test_drawn_rows_follow_the_step():
    """draw() hands out a row a step, from the client's own stream, and stays where it is."""
    worker, _, args = tiny_worker("--batch-size", "10")
    seen, tables = [], []

    def local_update(worker, client, server, args):
        worker.draw("noise", lambda rng, steps: rng.random((steps, 2)))
        tables.append(worker.draws["noise"].data_ptr())
        step = next(fedavg.local_update(worker, client, server, args))

        def watched(x, y):
            seen.append(worker.drawn("noise").tolist())
            return step(x, y)

        yield watched

    for k in (0, 1):
        client = common.Client(k, np.arange(25), {})
        play(worker, client, worker.global_net.state_dict(), method=local_update)
    rows = [common.seeded_rng("noise", args.seed, 1, k).random((3, 2)).tolist() for k in (0, 1)]
    assert seen == [*rows[0], *rows[1]]
    assert tables[0] == tables[1]


def test_local_update_yields_once():
    worker, _, _ = tiny_worker("--local-steps", "1")

    def local_update(worker, client, server, args):
        for step in fedavg.local_update(worker, client, server, args):
            yield step
            yield step

    client = common.Client(0, np.arange(9), {})
    with pytest.raises(RuntimeError, match="yields once"):
        play(worker, client, worker.global_net.state_dict(), method=local_update)


def test_bf16_is_for_blocks_alone():
    """The logits, and what a method computes from them, are fp32; gradients outside are exact."""
    worker, data, _ = tiny_worker("--precision", "bf16")
    plain, x = common.build_net("cnn", 62), data.normalise(data.x[:8])
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


def test_memory_follows_the_sampled_clients(tmp_path):
    """Client state exists for clients that took part, and for no other."""
    out = tmp_path / "run"
    argv = "--clients 12 --sample 0.25 --persist-opt --partition iid".split()
    _, rows = fedavg.main([*TINY, *argv, "--out", str(out)])
    seen = set(rows[0]["clients"]) | set(rows[1]["clients"])
    assert len(rows[0]["clients"]) == 3
    assert rows[0]["clients"] != rows[1]["clients"]
    files = list((out / "states").iterdir())
    assert {int(path.name.split("-")[0]) for path in files} == seen
    assert len(files) == len(seen)
