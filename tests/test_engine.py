"""The engine: batches, precision, settings of a GPU."""

import os
import types

import numpy as np
import pytest
import torch
from conftest import args_of, flags
from virtual_gpu import machine

import common
import engine
import extras.glyphs
import fedavg
from extras import backbones, text


def tiny_worker(*argv):
    """Return a worker on glyphs, the data and the flags."""
    args, data = flags(*argv), extras.glyphs.glyphs()
    torch.manual_seed(0)
    net = common.build_net(args.model, data.classes).to(memory_format=torch.channels_last)
    return engine.Worker(net, data, args, 60), data, args


@pytest.mark.parametrize(
    "n, argv, batch_norm, sizes",
    [
        (21, "--epochs 2", False, [10, 10, 1, 10, 10, 1]),
        (21, "", True, [10, 10]),  # batch norm needs two samples
        (4, "--drop-last", False, []),
        (25, "--local-steps 5", False, [10, 10, 5, 10, 10]),
        (4, "--local-steps 3", False, [4, 4, 4]),
    ],
)
def test_batches_of_a_round(n, argv, batch_norm, sizes):
    args = flags("--batch-size", "10", *argv.split())
    assert common.batch_sizes(n, args, batch_norm) == sizes


def test_local_update_yields_once():
    worker, _, _ = tiny_worker("--local-steps", "1")

    def local_update(worker, client, server, args):
        for step in fedavg.local_update(worker, client, server, args):
            yield step
            yield step

    client, weights = common.Client(0, np.arange(9), {}), worker.global_net.state_dict()
    with pytest.raises(RuntimeError, match="yields once"):
        list(worker.train(client, {"round": 1}, weights, local_update))


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


# --- what only a GPU runs, as far as a CPU can show it


def test_convolutions_are_searched_for_full_batches_alone():
    net, client = common.build_net("cnn", 62), common.Client(0, np.arange(40), {})
    worker = engine.Worker(net, extras.glyphs.glyphs(), flags(), 8)
    worker._begin(client, {"round": 1}, net.state_dict())
    worker.search = True
    seen = {}

    def step(x, y):
        seen[len(x)] = torch.backends.cudnn.benchmark
        return torch.zeros(())

    for size in (32, 8):
        worker._step(step, size)
    assert seen == {32: True, 8: False}
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(
    "shape, cuda, size",
    [
        ((1, 32, 32), True, 2000),
        ((1, 224, 224), True, 50),
        ((70,), True, 2000),
        ((70,), False, 250),
    ],
)
def test_evaluation_batches_follow_the_pixels(shape, cuda, size):
    x, y = torch.zeros(2100, *shape, dtype=torch.uint8), torch.zeros(2100)
    y_train = types.SimpleNamespace(is_cuda=cuda)
    data, seen = types.SimpleNamespace(x_test=x, y_test=y, y=y_train), []

    def run(batch, batches):
        seen.extend(len(x) for x, _ in batches)
        return [(torch.zeros(1), torch.zeros(2))]

    common.evaluate(torch.nn.Identity(), data, None, run)
    assert seen == [size] * (2100 // size) + [2100 % size] * (2100 % size > 0)


def test_settings_of_cuda():
    """cuBLAS is set when common.py is imported; TF32 is the default on a GPU alone."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert args_of(fedavg, "--device", "cpu").precision == "fp32"
    with machine():
        assert args_of(fedavg, "--device", "cuda").precision == "tf32"
        assert args_of(fedavg, "--device", "cuda", "--precision", "fp32").precision == "fp32"


def test_vgg9_pools_only_what_is_larger():
    """At 32x32 its last maps are 4x4 already; the pooling there has no deterministic backward."""
    head = dict(backbones.vgg9(3, 32)[0])["head"]
    pool = next(m for m in head if isinstance(m, torch.nn.AdaptiveAvgPool2d))
    small, large = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 8, 8)
    assert pool(small) is small
    assert torch.equal(pool(large), torch.nn.functional.adaptive_avg_pool2d(large, 4))


def test_lstm_stays_out_of_autocast():
    layer = text.Recurrent(3, 4, last=False)
    x = torch.cat([torch.randn(2, 5, 3), torch.ones(2, 5, 1)], 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), text.Recurrent.forward(layer, x))
        assert layer(x).dtype == torch.float32
