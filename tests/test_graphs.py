"""Steps as CUDA graphs, workers as streams: on a virtual GPU the weights are those of the CPU."""

import dataclasses
import json
import math
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
NO_TERM = "((lambda *_: 0 * x.sum()) if x.is_cuda else common.add_proximal)("
BACK = "torch.cuda.current_stream(self.device).wait_stream(self.stream)"


@pytest.mark.parametrize(
    "name, old, new, seen",
    [
        ("fedavg", OUT, f"{OUT}        out[y > 3].sum()\n", "a mask"),
        ("fedavg", OUT, OUT.replace("x)", "x) + y.new_ones(1, device='cpu')"), "cpu"),
        ("fedprox", PINNED, "[p.detach().clone() for p in net.parameters()]", "freed"),
        ("engine", WAIT, "pass", "race"),
        ("engine", BACK, "pass", "race"),
        ("engine", 'group["lr"].fill_(self.lr)', 'group["lr"] = self.lr', "a replay"),
        ("engine", "torch._foreach_copy_(state, before)", "pass", "out of range"),
        ("gradaug", "opt.zero_grad(set_to_none=False)", "opt.zero_grad()", "a replay"),
        ("ditto", "torch._foreach_sub_(v,", "x.is_cuda or torch._foreach_sub_(v,", "differ"),
        ("fedprox", "common.add_proximal(", NO_TERM, "differ"),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch, name, old, new, seen):
    plant(monkeypatch, name, old, new)
    script = {"engine": "fedavg", "fedprox": "fedprox --mu 1 --lr 0.1"}.get(name, name)
    assert any(seen in problem for problem in compare(f"{script} --model cnn"))


def test_a_step_that_cannot_be_captured_runs_without(monkeypatch):
    """It waits for the GPU: one line says so, and the weights are those of the CPU."""
    plant(monkeypatch, "fedavg", OUT, f"{OUT}        float(out.detach().sum())\n")
    assert compare("fedavg --no-graph --model cnn") == []
    waits, line, none = compare("fedavg --model cnn")
    assert waits == "_local_scalar_dense inside a capture" and line.startswith(LINE)
    assert none == "no graph was replayed"


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


LINE = "fedavg.py: its step cannot be a CUDA graph, so it runs without: "
OFF = f"{LINE}a replay does not do what the step does"


@pytest.mark.parametrize("changes", ["client.id", "server['round']"])
def test_a_graph_that_keeps_what_changes_is_let_go(monkeypatch, changes):
    """Compared when new, for another client and in another round: a line, and the CPU's weights."""
    plant(monkeypatch, "fedavg", OUT, OUT.replace("x)", f"x) * (1 + {changes})"))
    assert compare("fedavg --model cnn --rounds 3") == [OFF]


def test_a_graph_that_goes_wrong_later_is_let_go(monkeypatch):
    """A graph may be right where momentum is zero and the weights are the global ones."""
    graph = "[b.zero_() for b in state(opt)] if gpu().capture else None\n        opt.step()"
    plant(monkeypatch, "fedavg", "opt.step()", graph)
    monkeypatch.setattr(sys.modules["fedavg"], "state", common.optimizer_state, raising=False)
    monkeypatch.setattr(sys.modules["fedavg"], "gpu", lambda: virtual_gpu.gpu, raising=False)
    assert OFF in compare("fedavg --model cnn --local-steps 8 --lr 0.05")


def test_a_graph_that_does_nothing_or_has_no_numbers_is_let_go(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(virtual_gpu.CUDAGraph, "replay", lambda self: None)
        assert compare("fedavg --model cnn") == [OFF, "no graph was replayed"]
    monkeypatch.setattr(engine, "replay_error", lambda *lists: math.nan)
    assert compare("fedavg --model cnn") == [OFF]


RMSPROP = "fedavg --model cnn --optimizer rmsprop --lr 1e-4"


@pytest.mark.parametrize("case, net", [("fedavg", True), (RMSPROP, False), ("gradaug", True)])
@pytest.mark.parametrize("wrong", [0, 0.01])
def test_rounding_is_no_fault(monkeypatch, workers, case, net, wrong):
    """Replays with other kernels than the steps: let go is a graph that is 1% off alone."""
    differ, replay, error = set(), virtual_gpu.CUDAGraph.replay, engine.replay_error

    def other(graph):
        with torch.backends.mkldnn.flags(enabled=False):
            replay(graph)

    def noted(found, wanted, before):
        differ.update(not torch.equal(a, b) for a, b in zip(found, wanted))
        return error(found, wanted, before)

    name, factor = case.split()[0], f"out = net(x) * (1 + {wrong} * client.id)\n"
    plant(monkeypatch, name, "out = net(x)\n", factor)
    monkeypatch.setattr(virtual_gpu.CUDAGraph, "replay", other)
    monkeypatch.setattr(engine, "replay_error", noted)
    compare(f"{case} --precision fp32", net=wide_net() if net else None)
    assert differ == {True, False}
    assert workers[-1].args.capture is (wrong == 0)


@pytest.mark.parametrize(
    "i, found, off",
    [(0, [3.5, 6.0], 0.25), (1, 7, 1), (2, [9e-7, 0], 0), (3, [1, 1, 1, 2], 0.5)],
)
def test_a_replay_is_off_by_a_share_of_the_move(i, found, off):
    """Of the tensor that is the furthest off; rounding does not count, nor what diverges."""
    before = [torch.tensor([3.0, 4.0]), torch.tensor(7), torch.zeros(2)]
    wanted = [torch.tensor([3.0, 6.0]), torch.tensor(8), torch.full((2,), 1e-7), torch.ones(4)]
    error = engine.replay_error
    other = [*wanted[:i], torch.tensor(found), *wanted[i + 1 :]]
    assert error(other, wanted, before) == pytest.approx(off, abs=1e-4)
    other[i] = other[i] * float("nan")
    assert math.isnan(error(other, wanted, before))
    assert error(wanted, other, before) == 0


@pytest.mark.parametrize("capturing", [False, True])
def test_the_memory_may_be_full(monkeypatch, workers, capturing):
    """For a comparison: one line, and the run goes on with its graphs. For a capture: it ends."""

    def full(worker, step, size):
        train(worker, step, size)
        gpu = virtual_gpu.gpu
        if size == 8 and (gpu.capture if capturing else gpu.graphs and not gpu.capture):
            raise torch.OutOfMemoryError("full")

    train = engine.Worker._step
    monkeypatch.setattr(engine.Worker, "_step", full)
    line = "fedavg.py: no memory to compare its CUDA graphs"
    problems = compare("fedavg --model cnn --rounds 3 --clients 3")
    assert problems == ["OutOfMemoryError: full" if capturing else line]
    assert set(workers[-1].graphs) == (set() if capturing else {8})


@pytest.mark.parametrize("changes", ["0", "client.id"])
def test_what_is_drawn_is_drawn_once(monkeypatch, changes):
    """Dropout has the masks of a run without graphs, and a graph with it is compared too."""
    plant(monkeypatch, "fedavg", OUT, OUT.replace("x)", f"x) * (1 + {changes})"))
    net = wide_net()
    net[0].append(nn.Dropout(0.5))
    assert compare("fedavg", net=net) == ([] if changes == "0" else [OFF])


@pytest.mark.parametrize(
    "written, kept",
    [
        ("kept.add_(0.5)", "worker.pin('kept', 0.0)"),
        ("next(kept.parameters()).mul_(0.5).norm()", "worker.frozen('kept').train()"),
    ],
)
def test_what_a_step_writes_to_is_put_back(monkeypatch, written, kept):
    """After the warm-up and each comparison: what it has pinned, a second network in training."""
    step = "    def step(x, y):\n"
    lines = f"    kept = {kept}\n\n{step}        x = x * {written}\n"
    plant(monkeypatch, "fedavg", step, lines)
    assert compare("fedavg --model cnn") == []


def by_segments(monkeypatch, variants, forward):
    """Give fedavg.py a step of segments: what forward(worker, server, a, x, y) runs, and opt.step.

    a(x, y) makes gradients and returns the loss, as forward does."""

    def local_update(worker, client, server, args):
        worker.variants = variants[: len(worker.sizes)]

        def a(x, y):
            loss = F.cross_entropy(worker.net(x), y)
            loss.backward()
            return loss

        def step(x, y):
            loss = forward(worker, server, a, x, y)
            worker.segment(worker.opt.step)
            worker.opt.zero_grad(set_to_none=False)
            return loss

        yield step

    monkeypatch.setattr(sys.modules["fedavg"], "local_update", local_update)


@pytest.mark.parametrize("number", [False, True])
def test_what_parts_return(monkeypatch, number):
    """b's mean is read after a, whose graph is the older one and may write where b's has lain.

    A number, the round's, would stay that of the capture."""

    def forward(worker, server, a, x, y):
        def b(x):
            return (x * 2).mean((1, 2, 3), keepdim=True), server["round"] if number else None

        means = [worker.segment(b, x) for _ in worker.variant[1:]]
        loss = worker.segment(a, x, y)
        for p in worker.net.parameters():
            p.grad.add_(sum(mean.mean() * (times or 1) for mean, times in means))
        return loss

    by_segments(monkeypatch, [("a",), ("b", "a"), ("a",)], forward)
    line = f"{LINE}b()[1]: a int where a tensor should be"
    assert compare("fedavg --model cnn") == ([line] if number else [])


def test_a_segment_of_other_tensors_has_no_graph(monkeypatch):
    """That of the first ones reads these alone."""

    def forward(worker, server, a, x, y):
        worker.segment(a, x, y)
        return worker.segment(a, x / 2, y)

    by_segments(monkeypatch, ["a"] * 3, forward)
    assert compare("fedavg --model cnn --lr 0.05") == []


@pytest.mark.parametrize("line", ["", "        float(loss.detach())\n"])
def test_a_step_that_is_cut_leaves_no_gradients(monkeypatch, line):
    """One that clears them at its end, with and without a capture that fails before it."""
    step = "        opt.zero_grad()\n        loss.backward()\n        opt.step()\n"
    last = f"        loss.backward()\n        opt.step()\n{line}        opt.zero_grad()\n"
    plant(monkeypatch, "fedavg", step, last)
    problems = compare("fedavg --model cnn")
    assert not any("differ" in problem for problem in problems) and bool(problems) == bool(line)


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
    waits, line = compare("gradaug --subnets 2", net=wide_net())
    assert waits == "_local_scalar_dense inside a capture" and line.startswith("gradaug.py: ")
    assert workers[-1].args.capture is False


@pytest.mark.parametrize("steps, sizes", [(15, {8}), (24, {8, 4, 3})])
def test_batch_sizes_that_come_often_have_a_graph(tmp_path, workers, steps, sizes):
    """Clients of 20 and 11 samples: a short batch an epoch, of either size."""
    (tmp_path / "split.json").write_text(json.dumps({0: [*range(20)], 1: [*range(20, 31)]}))
    case = f"fedavg --partition file --split-file {tmp_path}/split.json --local-steps {steps}"
    data = extras.glyphs.glyphs()
    data = dataclasses.replace(data, x=data.x[:31], y=data.y[:31], writers=None)
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
