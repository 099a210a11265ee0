"""Every method script trains, and is FedAvg when its own terms are switched off."""

import pytest
import torch
from conftest import args_of, needs_gpu, same
from methods import METHODS, OFF, RESNET, SCRIPTS, final, plain_final

import common


# of the resnet: methods that might touch batch norm
ON_RESNET = "stochdepth gradaug fedalign fedcka fedmlb mixup rfedavg rfedavg_code rfedavg_dp ditto"


CASES = [(name, "cnn") for name in OFF if name != "stochdepth"]
CASES += [(name, "resnet8") for name in ON_RESNET.split()]


GPU = ["--device", "cuda", "--deterministic"]


@pytest.mark.parametrize("device", [[], pytest.param(GPU, marks=needs_gpu)], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name, model", CASES)
def test_off_is_fedavg(tmp_path, name, model, device):
    flags = ["--sample", "0.5"] if model == "cnn" else [*RESNET]
    if name == "moon":
        flags += ["--projection", "256"]
    if name == "fedmlb":
        flags += ["--clip", "10"]
    flags += device
    off, _ = final(name, tmp_path / "off", *flags, *OFF[name])
    assert same(off, plain_final(tmp_path / "plain", *flags))


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gpu_precisions_train(tmp_path, name, precision):
    final(name, tmp_path / "run", "--device", "cuda", "--precision", precision)


# On all local data, of which each has as much: the mean gradient, whatever the variates.
ONE_STEP = "--partition iid --momentum 0 --weight-decay 0 --local-steps 1 --batch-size 150"
UNTRAINED = "--drop-last --batch-size 142 --rounds 2"  # more than the smallest client has


@pytest.mark.parametrize(
    "name, flags, plain",
    [
        ("qfedavg", "--q 0", "--weighting uniform"),
        ("fedavg", "--server avgm --server-momentum 0", ""),
        ("scaffold", "--rounds 1", "--rounds 1"),
        ("scaffold", "--rounds 1 --momentum 0", "--rounds 1 --momentum 0"),
        ("scaffold", f"{ONE_STEP} --rounds 3", f"{ONE_STEP} --rounds 3"),
        ("feddyn", "--dyn-alpha 0", "--weighting uniform"),
        ("qfedavg", f"--q 0 {UNTRAINED}", f"--weighting uniform {UNTRAINED}"),
        ("qfedavg", "--q 0 --server avgm", "--weighting uniform --server avgm"),
        ("qfedavg", "--q 0 --server-lr 0.5", "--weighting uniform --server-lr 0.5"),
        ("fednova", "--local-steps 3", "--local-steps 3"),
    ],
)
def test_off_is_nearly_fedavg(tmp_path, name, flags, plain):
    """Where the formula rounds differently: the same to 1e-6."""
    a, _ = final(name, tmp_path / "off", *flags.split())
    b = plain_final(tmp_path / "plain", *plain.split())
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


DEFAULTS = """scaffold: correction=step; scaffold --momentum 0: correction=gradient;
scaffold --option 1: correction=gradient; scaffold --option 1 --correction step: correction=step;
scaffold --momentum 0 --optimizer rmsprop: correction=step; fedntd: ntd_beta=0.3;
fedntd --weighting-rule sum: ntd_beta=1; fedmlb: weighting=samples;
fedmlb --dyn-alpha 0.1: weighting=uniform; feddyn: weighting=uniform; fedalign: clip=10;
fedmlb --dyn-alpha 0.1 --weighting samples: weighting=samples;
gradaug --subnets 1: mu=2; gradaug --subnets 2: mu=1.75; gradaug --subnets 3: mu=1.5;
gradaug --subnets 4: mu=1.25; moon --model cnn: projection=0; moon: projection=256;
fedavg --server adam: server_lr=0.01 server_momentum=0.9;
fedavg --server yogi: server_lr=0.01 server_momentum=0.9;
fedavg --server avgm: server_lr=1 server_momentum=0.4"""


@pytest.mark.parametrize("line", DEFAULTS.split(";"))
def test_defaults_that_follow_other_flags(line):
    """And those that papers ask for."""
    (name, *argv), defaults = (part.split() for part in line.split(": "))
    args = vars(args_of(SCRIPTS[name], *argv))
    for name, value in (default.split("=") for default in defaults):
        assert args[name] == (float(value) if value[0].isdigit() else value)


def test_bytes_of_qfedavg_fednova_and_noisy_rfedavg(tmp_path):
    """h_k and a_k are one number in float64; a delta has 256 in fp32."""
    for name in ("qfedavg", "fednova"):
        weights, rows = final(name, tmp_path / name)
        size = common.nbytes(weights)
        assert (rows[0]["bytes_down"], rows[0]["bytes_up"]) == (4 * size, 4 * (size + 8))
    _, rows = final("rfedavg_dp", tmp_path / "dp")
    assert [row["bytes_down"] for row in rows] == [4 * size, 4 * (size + 4 * 256)]
    assert [row["bytes_up"] for row in rows] == [4 * (size + 4 * 256)] * 2
