"""Steps as CUDA graphs, workers as streams: on a virtual GPU the weights are those of the CPU."""

import dataclasses
import json
import sys
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import virtual_gpu
from methods import ROOT
from virtual_gpu import SUITE, compare, machine, train

import common
import engine
import extras.glyphs
import gradaug


@pytest.mark.parametrize("case", SUITE)
def test_a_virtual_gpu_trains_like_the_cpu(case):
    assert compare(case) == []


def plant(monkeypatch, name, old, new):
    """Replace a text in a script or in engine.py for the rest of the test."""
    path = ROOT / f"{name}.py"
    source = path.read_text()
    assert old in source
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source.replace(old, new, 1), path, "exec"), vars(module))


OUT = "        out = net(x)\n"
PINNED = 'worker.pin("w", list(net.parameters()))'
WAIT = "self.stream.wait_stream(torch.cuda.current_stream(self.device))"
BACK = "torch.cuda.current_stream(self.device).wait_stream(self.stream)"


@pytest.mark.parametrize(
    "name, old, new, seen",
    [
        ("fedavg", OUT, f"{OUT}        float(out.sum())\n", "inside a capture"),
        ("fedavg", OUT, f"{OUT}        out[y > 3].sum()\n", "a mask"),
        (
            "fedavg",
            OUT,
            OUT.replace("x)", "x) + net[0][0].weight.new_ones(1, device='cpu')"),
            "cpu",
        ),
        ("fedprox", PINNED, "[p.detach().clone() for p in net.parameters()]", "freed"),
        ("engine", WAIT, "pass", "race"),
        ("engine", BACK, "pass", "race"),
        ("engine", 'group["lr"].fill_(self.lr)', 'group["lr"] = self.lr', "a replay"),
        ("engine", "torch._foreach_copy_(state, before)", "pass", "out of range"),
        ("gradaug", "opt.zero_grad(set_to_none=False)", "opt.zero_grad()", "weights"),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch, name, old, new, seen):
    plant(monkeypatch, name, old, new)
    script = "fedavg" if name == "engine" else name
    assert any(seen in problem for problem in compare(f"{script} --model cnn"))


def test_a_step_that_cannot_be_captured_runs_without(monkeypatch):
    """It waits for the GPU: one line says so, and the weights are those of the CPU."""
    plant(monkeypatch, "fedavg", OUT, f"{OUT}        float(out.detach().sum())\n")
    found, line = compare("fedavg --no-graph --model cnn"), compare("fedavg --model cnn")
    assert found == []
    assert [problem.split(":")[0] for problem in line] == [
        "_local_scalar_dense inside a capture",
        "fedavg.py",
        "no graph was replayed",
    ]


LINE = "fedavg.py: its step cannot be a CUDA graph, so it runs without: a replay does not do"


@pytest.mark.parametrize("changes", ["client.id", "server['round']"])
def test_a_graph_that_keeps_what_changes_is_let_go(monkeypatch, changes):
    """It is compared when it is new, for another client and in another round: there is one line,
    and the weights are those of the CPU."""
    plant(monkeypatch, "fedavg", OUT, OUT.replace("x)", f"x) * (1 + {changes})"))
    problems = compare("fedavg --model cnn --rounds 3")
    assert [problem[: len(LINE)] for problem in problems] == [LINE]


def test_a_graph_that_does_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(virtual_gpu.CUDAGraph, "replay", lambda self: None)
    line, none = compare("fedavg --model cnn")
    assert (line[: len(LINE)], none) == (LINE, "no graph was replayed")


def test_what_parts_return_outlives_other_parts(monkeypatch):
    """b's mean is read after a, whose graph is the older one and may write where b's has lain."""

    def local_update(worker, client, server, args):
        net, opt = worker.net, worker.opt
        worker.variants = [("a",), ("b", "a"), ("b", "a"), ("a",)][: len(worker.sizes)]

        def a(x, y):
            opt.zero_grad(set_to_none=False)
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        def b(x):
            return (x * 2).mean((1, 2, 3), keepdim=True)

        def step(x, y):
            means = [worker.segment(b, x) for _ in worker.variant[1:]]
            loss = worker.segment(a, x, y)
            for p in net.parameters():
                p.grad.add_(sum(mean.mean() for mean in means))
            worker.segment(opt.step)
            return loss

        yield step

    monkeypatch.setattr(sys.modules["fedavg"], "local_update", local_update)
    assert compare("fedavg --model cnn") == []


def test_a_thread_may_ask_the_gpu_during_a_capture(tmp_path, capsys):
    """As that of NCCL does under torchrun."""
    with machine() as gpu:
        gpu.watched = True
        train("fedavg --model cnn", "cuda", tmp_path / "run")
    assert gpu.replays > 0
    assert capsys.readouterr().err == ""


def test_gradients_of_the_proximal_term_carry_no_graph():
    """It would keep nodes of one stream alive in the next step."""
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    common.add_proximal(net, [torch.zeros(2, 2), torch.zeros(2)], 1.0)
    assert not any(p.grad.requires_grad for p in net.parameters())


@pytest.fixture
def workers(monkeypatch):
    """Return a list of the workers that are made, the last of them on the virtual GPU."""
    made = []

    class Worker(engine.Worker):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(engine, "Worker", Worker)
    return made


def wide_net():
    """Return a network with batch norm, of which a sub-network has 24 or 32 channels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 32, 5, 4), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        common.Classifier(32, 62),
    )


@pytest.mark.parametrize("subnets, most", [(3, 256), (3, 5)])
def test_gradaug_has_a_graph_a_part(monkeypatch, workers, subnets, most):
    """The full network, the optimizer and each student, on full batches and not on short ones;
    beyond the most graphs the rest runs without, on the same gradients."""
    monkeypatch.setattr(engine, "MOST_GRAPHS", most)
    seen = set()

    def drawn(*args):
        variants = draw(*args)
        seen.update(part for parts in variants[::3] + variants[1::3] for part in parts)
        return variants

    draw = gradaug.draw_variants
    monkeypatch.setattr(gradaug, "draw_variants", drawn)
    assert compare(f"gradaug --subnets {subnets}", net=wide_net()) == []
    graphs = set(workers[-1].graphs)
    wanted = {("narrow", *part) for part in seen} | {("_batch", 8), ("full",), ("step",)}
    assert graphs == wanted if most == 256 else len(graphs) == most


def test_a_part_that_cannot_be_captured(monkeypatch, workers):
    """Half of a step is graphs then; it ends without, as do all that follow."""

    def resize(x, *rest):
        if len(virtual_gpu.gpu.graphs) > 3:
            x.sum().item()
        return original(x, *rest)

    original = gradaug.resize
    monkeypatch.setattr(gradaug, "resize", resize)
    problems = compare("gradaug --subnets 2", net=wide_net())
    assert [problem.split(":")[0] for problem in problems] == [
        "_local_scalar_dense inside a capture",
        "gradaug.py",
    ]
    assert workers[-1].args.capture is False


@pytest.mark.parametrize("steps, sizes", [(15, {8}), (24, {8, 4, 3})])
def test_batch_sizes_that_come_often_have_a_graph(tmp_path, workers, steps, sizes):
    """Clients of 20 and 11 samples: a short batch an epoch, of either size."""
    (tmp_path / "split.json").write_text(json.dumps({0: [*range(20)], 1: [*range(20, 31)]}))
    case = f"fedavg --partition file --split-file {tmp_path}/split.json --local-steps {steps}"
    data = extras.glyphs.glyphs()
    data = dataclasses.replace(data, x=data.x[:31], y=data.y[:31])
    assert compare(case, data=data, net=wide_net()) == []
    assert set(workers[-1].graphs) == sizes


FREE = "empty empty_like empty_strided _unsafe_view lift_fresh detach alias".split()


@pytest.mark.parametrize(
    "name, most",
    [("fedavg", 90), ("fedprox", 100), ("scaffold", 100), ("feddyn", 135), ("stochdepth", 110)],
)
def test_a_step_starts_few_operations(tmp_path, name, most):
    """A loop over the network's 30 parameters would add that many, or several times that.

    On a GPU each is a kernel or, of foreach, a few."""
    with machine() as gpu:
        train(f"{name} --clients 1 --rounds 1 --local-steps 1", "cuda", tmp_path)
        names = [getattr(func, "overloadpacket", func).__name__ for func, *_ in gpu.graphs[0].calls]
    assert 80 < len([n for n in names if n not in FREE]) <= most
