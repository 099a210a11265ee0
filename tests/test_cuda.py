"""On a GPU, beside what benchmarks/gpu.py compares there. Skipped without one."""

import pytest
from conftest import needs_gpu, same
from methods import METHODS, OFF, RESNET, final

pytestmark = needs_gpu
CUDA = ["--device", "cuda", "--deterministic"]


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
