"""Every method script trains, and is FedAvg when its own terms are switched off."""

import pytest
import torch
from conftest import TINY, args_of, same
from methods import OFF, RESNET, SCRIPTS, final, plain_final

import common


# of the resnet: methods that might touch batch norm
ON_RESNET = "stochdepth gradaug fedalign fedcka fedmlb mixup rfedavg rfedavg_code rfedavg_dp ditto"


@pytest.mark.parametrize(
    "name, model",
    [
        *((name, "cnn") for name in OFF if name != "stochdepth"),
        *((name, "resnet8") for name in ON_RESNET.split()),
    ],
)
def test_off_is_fedavg(tmp_path, name, model):
    flags = ["--model", model, "--sample", "0.5", "--epochs", "2"]
    if model == "resnet8":
        flags = [*RESNET]
    if name == "moon":
        flags += ["--projection", "256"]
    if name == "fedmlb":
        flags += ["--clip", "10"]
    off, _ = final(name, tmp_path / "off", *flags, *OFF[name])
    assert same(off, plain_final(tmp_path / "plain", *flags))


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


def test_shared_flags_of_a_method():
    """Clips and weightings that papers ask for."""
    assert args_of(SCRIPTS["fedalign"]).clip == 10
    assert args_of(SCRIPTS["feddyn"]).weighting == "uniform"
    assert args_of(SCRIPTS["moon"]).projection == 256


def test_defaults_that_follow_other_flags():
    def of(name, argv=""):
        return args_of(SCRIPTS[name], *TINY, *argv.split())

    assert of("scaffold").correction == "step"
    assert of("scaffold", "--momentum 0").correction == "gradient"
    assert of("scaffold", "--momentum 0 --optimizer rmsprop").correction == "step"
    assert of("fedntd").ntd_beta == 0.3
    assert of("fedntd", "--weighting-rule sum").ntd_beta == 1
    assert of("fedmlb").weighting == "samples"
    assert of("fedmlb", "--dyn-alpha 0.1").weighting == "uniform"
    assert of("fedmlb", "--dyn-alpha 0.1 --weighting samples").weighting == "samples"
    assert [of("gradaug", f"--subnets {n}").mu for n in "1234"] == [2.0, 1.75, 1.5, 1.25]
    assert of("moon").projection == 0
    for server, lr, momentum in (("adam", 0.01, 0.9), ("yogi", 0.01, 0.9), ("avgm", 1, 0.4)):
        found = of("fedavg", f"--server {server}")
        assert (found.server_lr, found.server_momentum) == (lr, momentum)


def test_bytes_of_qfedavg_fednova_and_noisy_rfedavg(tmp_path):
    """h_k and a_k are one number in float64; a delta has 256 in fp32."""
    for name in ("qfedavg", "fednova"):
        weights, rows = final(name, tmp_path / name)
        size = common.nbytes(weights)
        assert (rows[0]["bytes_down"], rows[0]["bytes_up"]) == (4 * size, 4 * (size + 8))
    _, rows = final("rfedavg_dp", tmp_path / "dp")
    assert [row["bytes_down"] for row in rows] == [4 * size, 4 * (size + 4 * 256)]
    assert [row["bytes_up"] for row in rows] == [4 * (size + 4 * 256)] * 2
