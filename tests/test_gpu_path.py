"""What only a GPU runs, as far as a CPU can show it: failures, memory, batches, settings."""

import json
import os
import types

import numpy as np
import pytest
import torch
from conftest import TINY, args_of, flags
from runs import write_config
from virtual_gpu import machine

import common
import engine
import extras.glyphs
import fedavg
from extras import backbones, text


def tiny_worker(*argv):
    """Return a worker on glyphs, and the step and the client with which it has begun."""
    args = flags("--epochs", "1", *argv)
    data = extras.glyphs.glyphs()
    torch.manual_seed(0)
    net = common.build_net("cnn", 62)
    worker = engine.Worker(net, data, args, 8)
    client = common.Client(0, np.arange(40), {})
    worker._begin(client, {"round": 1}, net.state_dict())
    return worker, next(fedavg.local_update(worker, client, {}, args))


def test_a_run_notes_that_it_has_no_graphs(tmp_path):
    """config.json says so, and a resumed run keeps to it."""
    out = tmp_path / "run"
    seen, parser = [], common.flags("", "fedavg")

    def local_update(worker, *rest):
        seen.append(worker.args.capture)
        yield from fedavg.local_update(worker, *rest)

    common.run(parser.parse_args([*TINY, "--out", str(out)]), local_update)
    config = json.loads((out / "config.json").read_text())
    assert config["graph"] is True
    write_config(out, graph=False)
    seen.clear()
    words = ["--out", str(out), "--resume", "--rounds", "3"]
    common.run(parser.parse_args(words), local_update)
    assert set(seen) == {False}
    assert json.loads((out / "config.json").read_text())["graph"] is False


def test_a_full_memory_means_fewer_workers():
    """Room for five by the first one's size, and the third more is refused: three work."""
    built = []

    def build():
        if len(built) == 3:
            raise torch.OutOfMemoryError("full")
        built.append(object())
        return built[-1]

    pool = engine.Pool(build, torch.device("cpu"), 0, 1)
    with machine(memory=(500, 1000), reserved=100):
        assert len(pool._grow(9)) == 2  # 0.8 * 500 / 100 = 4 more were tried
    assert len(pool.workers) == 3
    assert pool.grow is False


def test_convolutions_are_searched_for_full_batches_alone():
    worker, _ = tiny_worker()
    worker.search = True
    seen = {}

    def step(x, y):
        seen[len(x)] = torch.backends.cudnn.benchmark
        return torch.zeros(())

    for size in (32, 8):
        worker._step(step, size)
    assert seen == {32: True, 8: False}
    assert torch.backends.cudnn.benchmark is False


PIXELS = torch.uint8


@pytest.mark.parametrize(
    "shape, dtype, cuda, size",
    [
        ((1, 32, 32), PIXELS, True, 2000),
        ((1, 28, 28), PIXELS, True, 2000),
        ((1, 64, 64), PIXELS, True, 500),
        ((1, 224, 224), PIXELS, True, 50),
        ((70,), torch.int16, True, 2000),
        ((1, 28, 28), PIXELS, False, 250),
    ],
)
def test_evaluation_batches_follow_the_pixels(shape, dtype, cuda, size):
    x, y = torch.zeros(2100, *shape, dtype=dtype), torch.zeros(2100)
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
