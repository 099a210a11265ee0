"""On a GPU: graphs, streams and precisions train the same model. Skipped without one."""

import json

import pytest
import torch
from conftest import needs_gpu, same
from methods import METHODS, OFF, RESNET, VARIANTS, final

pytestmark = needs_gpu
CUDA = ["--device", "cuda", "--deterministic"]


# graphs of parts, for many sub-networks, and of short batches that come often
GRAPHS = [*VARIANTS, ("gradaug", "--subnets 4"), ("fedavg", "--epochs 8")]


@pytest.mark.parametrize("name, more", GRAPHS)
@pytest.mark.parametrize("model", ["cnn", "resnet56"])
def test_graph_and_eager_agree(tmp_path, name, more, model):
    if name == "stochdepth" and model == "cnn":
        pytest.skip("stochdepth needs residual blocks")
    argv = [*CUDA, "--model", model, "--epochs", "2", "--workers", "1", "--lr-decay", "0.9"]
    graph, _ = final(name, tmp_path / "graph", *argv, *more.split())
    assert json.loads((tmp_path / "graph" / "config.json").read_text())["graph"]  # none has failed
    eager, _ = final(name, tmp_path / "eager", *argv, *more.split(), "--no-graph")
    for k in graph:
        assert torch.allclose(graph[k].double(), eager[k].double(), rtol=1e-4, atol=1e-5), k


@pytest.mark.parametrize("name", METHODS)
def test_streams_agree(tmp_path, name):
    one, _ = final(name, tmp_path / "one", *CUDA, "--epochs", "2", "--workers", "1")
    for workers in ("3", "auto"):
        several, _ = final(name, tmp_path / workers, *CUDA, "--epochs", "2", "--workers", workers)
        assert same(one, several), workers


@pytest.mark.parametrize("name", OFF)
def test_gpu_off_is_fedavg(tmp_path, name):
    """And FedAvg itself is the same in each run, with graphs and streams."""
    argv = RESNET if name == "stochdepth" else ["--epochs", "2", "--model", "cnn"]
    off, _ = final(name, tmp_path / "off", *CUDA, *argv, *OFF[name])
    assert same(off, final("fedavg", tmp_path / "plain", *CUDA, *argv)[0])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gpu_precisions_train(tmp_path, name, precision):
    weights, _ = final(name, tmp_path / "run", "--device", "cuda", "--precision", precision)
    assert all(v.isfinite().all() for v in weights.values())
