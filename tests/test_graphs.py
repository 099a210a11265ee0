"""Steps as CUDA graphs, shown on the CPU, where they are lists of operations on fixed tensors."""

import contextlib
import dataclasses
import json

import pytest
import torch
import torch.nn as nn
from conftest import TINY, same
from methods import final, final_once
from torch.utils._python_dispatch import TorchDispatchMode

import common
import engine
import extras.glyphs
import fedavg
import gradaug

# the CPU's learning rate is a number, which a graph keeps; so it must not decay here
FIXED = "--rounds 3 --local-steps 4 --sample 0.5 --workers 1".split()
# --rule code changes what is drawn, not the step
# each way that a step reads what changes; benchmarks/gpu.py tries all variants on a GPU
STEPS = "fedavg moon mixup stochdepth gradaug fedalign scaffold fedmlb feddyn rfedavg".split()


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """Notes the operations that run inside a with block, and takes back what they have written."""

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made = [], {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RuntimeError("operation not permitted when stream is capturing")
        for t in common.tensors_in([*args, *kwargs.values()]):
            if address(t) not in self.made and address(t) not in self.before:
                storage = t.untyped_storage()
                self.before[address(t)] = storage, storage.clone()
        out = func(*args, **kwargs)
        for t in common.tensors_in(out):
            if address(t) not in self.before:
                self.made[address(t)] = t.untyped_storage()
        self.operations.append((func, args, kwargs, out))
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, content in self.before.values():
            storage.copy_(content)


class Graph:
    """A CUDAGraph. What a replay has made is lost afterwards, but for what the engine holds."""

    count = 0

    def __init__(self):
        Graph.count += 1

    def pool(self):
        return "pool"

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.recording.operations:
            values = common.tensors_in(func(*args, **kwargs))
            for old, new in zip(common.tensors_in(out), values):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        held = set(map(address, common.tensors_in([v for _, v in Graph.worker.graphs.values()])))
        for place, storage in self.recording.made.items():
            if place not in held:  # another graph of the worker would write there
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(63)  # 0.747, if of floats


@contextlib.contextmanager
def capture(graph, pool, stream):
    with Recording() as graph.recording:
        yield


class Worker(engine.Worker):
    """A worker on the CPU that believes in a GPU when it asks whether a graph pays."""

    def _graph_pays(self, size):
        Graph.worker, self.cuda = self, True
        try:
            return super()._graph_pays(size)
        finally:
            self.cuda = False


@pytest.fixture
def graphs(monkeypatch):
    """Return a function that lets workers capture graphs; expected runs come before it."""
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))

    def on():
        monkeypatch.setattr(engine, "Worker", Worker)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(Graph, "count", 0)

    return on


@pytest.mark.parametrize("name", STEPS)
def test_a_replayed_step_is_the_step(tmp_path, capsys, graphs, name):
    """Weights are equal bit for bit, and each graph is captured once."""
    expected = final_once(name, tmp_path / "eager", *FIXED)
    graphs()
    found, _ = final(name, tmp_path / "graphs", *FIXED)
    assert capsys.readouterr().err == ""  # no capture has failed
    assert same(expected, found)
    assert Graph.count == len(Graph.worker.graphs) > 0


def wide_net():
    """Return a network with batch norm, of which a sub-network has 24 or 32 channels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 5, 4), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        common.Classifier(32, 62),
    )


@pytest.mark.parametrize("subnets", [1, 2, 4])
def test_gradaug_has_a_graph_a_part(tmp_path, capsys, graphs, subnets):
    """Full batches and short ones in turns: the full network, the optimizer and each student."""
    seen = set()

    def run(args, local_update, **rest):
        def observed(worker, *more):
            method = local_update(worker, *more)
            yield next(method)
            drawn = zip(worker.sizes, worker.variants)
            seen.update(part for size, parts in drawn for part in parts if size == 32)

        return common.run(args, observed, data=extras.glyphs.glyphs(), net=wide_net())

    argv = [*TINY, "--epochs", "2", "--workers", "1", "--subnets", str(subnets)]
    expected, _ = gradaug.main([*argv, "--out", str(tmp_path / "eager")], run=run)
    graphs()
    found, _ = gradaug.main([*argv, "--out", str(tmp_path / "graphs")], run=run)
    assert capsys.readouterr().err == ""
    assert same(expected.state_dict(), found.state_dict())
    assert len(seen) >= 4
    others = {("_batch", 32), ("full",), ("step",)}
    assert set(Graph.worker.graphs) == {("narrow", *part) for part in seen} | others
    assert Graph.count == len(Graph.worker.graphs)


def test_parts_without_a_graph_mix_with_those_that_have_one(tmp_path, monkeypatch, graphs):
    """More parts than graphs: the rest runs without, on the same gradients."""
    argv = [*FIXED, "--subnets", "3"]
    expected = final_once("gradaug", tmp_path / "eager", *argv)
    graphs()
    monkeypatch.setattr(engine, "MOST_GRAPHS", 5)
    assert same(expected, final("gradaug", tmp_path / "graphs", *argv)[0])
    assert Graph.count == 5


def test_a_part_that_cannot_be_captured(tmp_path, monkeypatch, capsys, graphs):
    """Half of a step is graphs then; it ends without, as do all that follow."""
    argv = [*FIXED, "--subnets", "2"]
    expected = final_once("gradaug", tmp_path / "eager", *argv)
    graphs()

    def resize(x, *rest):
        if Graph.count > 4:
            x.sum().item()
        return original(x, *rest)

    original = gradaug.resize
    monkeypatch.setattr(gradaug, "resize", resize)
    found, _ = final("gradaug", tmp_path / "graphs", *argv)
    assert same(expected, found)
    assert capsys.readouterr().err.startswith("gradaug.py: its step cannot be a CUDA graph")
    assert json.loads((tmp_path / "graphs" / "config.json").read_text())["graph"] is False


@pytest.mark.parametrize("epochs, captured", [(7, 1), (8, 3)])
def test_batch_sizes_that_come_often_have_a_graph(tmp_path, graphs, epochs, captured):
    """Clients of 64 + 20 and 64 + 13 samples: a short batch an epoch, of either size."""

    def run(args, local_update, **rest):
        data = extras.glyphs.glyphs()
        data = dataclasses.replace(data, x=data.x[:161], y=data.y[:161])
        return common.run(args, local_update, data=data, net=wide_net())

    argv = [*TINY, "--partition", "file", "--split-file", str(tmp_path / "split.json")]
    argv += ["--clients", "2", "--workers", "1", "--epochs", str(epochs)]
    parts = {0: list(range(84)), 1: list(range(84, 161))}
    (tmp_path / "split.json").write_text(json.dumps(parts))
    expected, _ = fedavg.main([*argv, "--out", str(tmp_path / "eager")], run=run)
    graphs()
    found, _ = fedavg.main([*argv, "--out", str(tmp_path / "graphs")], run=run)
    assert same(expected.state_dict(), found.state_dict())
    assert Graph.count == captured
    assert set(Graph.worker.graphs) == ({32, 20, 13} if captured == 3 else {32})
