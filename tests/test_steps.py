"""What CUDA graphs ask of a method's step, checked on the CPU, and that workers agree."""

import types

import pytest
import torch
from conftest import TINY, same
from methods import METHODS, ROOT, SHORT, VARIANTS, final, final_once
from torch.utils._python_dispatch import TorchDispatchMode

import common
import engine


# --rule code changes what is drawn, not the step
STEPS = [variant for variant in VARIANTS if variant != ("stochdepth", "--rule code")]


@pytest.fixture
def one_thread(monkeypatch):
    """Give a worker one thread, as sums inside operators depend on it; do not evaluate."""
    monkeypatch.setattr(common, "CORES", 1)
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))  # which takes the most time


@pytest.mark.parametrize("name, more", STEPS)
def test_one_closure_serves_all_clients(tmp_path, monkeypatch, one_thread, name, more):
    """The step of a worker's first client is run for all others, in all rounds.

    It is what a captured CUDA graph does."""
    argv = [*SHORT, *more.split()]
    expected = final_once(name, tmp_path / "each", *argv)
    monkeypatch.setattr(engine.Worker, "keep_first_step", True)
    assert same(expected, final(name, tmp_path / "first", *argv)[0])


def trained(module, out):
    """Return the weights of a small run of fedprox.py or of a variant of it."""
    argv = [*TINY, "--workers", "1", "--mu", "0.1", "--out", str(out)]
    return module.main(argv)[0].state_dict()


def test_the_closure_test_catches_a_stale_tensor(tmp_path, monkeypatch):
    """fedprox.py with w as a plain list of copies instead of pinned tensors must not pass."""
    source = (ROOT / "fedprox.py").read_text()
    pinned = 'worker.pin("w", list(net.parameters()))'
    broken = source.replace(pinned, "[p.detach().clone() for p in net.parameters()]")
    assert broken != source
    module = types.ModuleType("broken")
    module.__file__ = "broken.py"
    exec(compile(broken, "broken.py", "exec"), vars(module))
    expected = trained(module, tmp_path / "each")
    monkeypatch.setattr(engine.Worker, "keep_first_step", True)
    assert not same(expected, trained(module, tmp_path / "first"))


class Waits(TorchDispatchMode):
    """Raises on what makes the host wait for a GPU, or copies from the host to it.

    Neither may be in a CUDA graph."""

    aten = torch.ops.aten
    WAITING = {
        aten._local_scalar_dense,
        aten.is_nonzero,
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten._unique2,
        aten.unique_consecutive,
        aten.bincount,
        aten.lift_fresh,  # a tensor of Python's numbers
    }
    INDEXING = (aten.index, aten.index_put_, aten.index_put)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func.overloadpacket
        indices = args[1] if operator in self.INDEXING else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if operator in self.WAITING or masks:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: torch.tensor(1.0),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
    ],
)
def test_waits_are_found(waiting):
    x = torch.ones(3)
    with Waits():
        x.add(1).mul_(x)[torch.arange(2)].sum()
        with pytest.raises(AssertionError, match="waits"):
            waiting(x)


AUGMENTED = "--clip 1 --augment rotate10,crop,flip --nesterov"


@pytest.mark.parametrize("name, more", [*STEPS, ("fedavg", AUGMENTED)])
def test_steps_never_wait_for_the_device(tmp_path, monkeypatch, one_thread, name, more):
    """Whole steps, from the choice of samples to the optimizer.

    In both rounds: in the second methods have their last models."""
    step = engine.Worker._step
    sizes = []

    def watched(worker, f, size):
        with Waits():
            step(worker, f, size)
        sizes.append(size)

    monkeypatch.setattr(engine.Worker, "_step", watched)
    argv = ["--workers", "1", "--rounds", "2", "--local-steps", "4"]
    final(name, tmp_path / "run", *argv, *more.split())
    assert len(sizes) > 3


@pytest.mark.parametrize("name", METHODS)
def test_workers_give_the_same_model(tmp_path, one_thread, name):
    """Several clients at once or one after the other: the same arithmetic in the same order."""
    argv = SHORT if name == "stochdepth" else ["--local-steps", "4"]
    one = final_once(name, tmp_path / "one", *argv, "--workers", "1")
    three, _ = final(name, tmp_path / "three", *argv, "--workers", "3")
    assert same(one, three)
