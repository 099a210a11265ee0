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
        *((name, "resnet56") for name in ON_RESNET.split()),
    ],
)
def test_off_is_fedavg(tmp_path, name, model):
    flags = ["--model", model, "--sample", "0.5", "--epochs", "2"]
    if model == "resnet56":
        flags = [*RESNET]
    if name == "moon":
        flags += ["--projection", "256"]
    if name == "fedmlb":
        flags += ["--clip", "10"]
    off, _ = final(name, tmp_path / "off", *flags, *OFF[name])
    assert same(off, plain_final(tmp_path / "plain", *flags))


@pytest.mark.parametrize(
    "name, flags, plain",
    [
        ("qfedavg", "--q 0", "--weighting uniform"),
        ("fedavg", "--server avgm --server-momentum 0", ""),
        ("scaffold", "--rounds 1", "--rounds 1"),
        ("scaffold", "--rounds 1 --momentum 0", "--rounds 1 --momentum 0"),
        ("feddyn", "--dyn-alpha 0", "--weighting uniform"),
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


@pytest.mark.parametrize(
    "name, down, up",
    [
        ("fedavg", 1, 1),
        ("moon", 1, 1),
        ("fedcka", 1, 1),
        ("fedmlb", 1, 1),
        ("feddyn", 1, 1),
        ("ditto", 1, 1),
        ("fitnet", 1, 1),
        ("scaffold", 2, 2),
        ("fedgkd", 2, 1),
    ],
)
def test_bytes_follow_the_methods_account(tmp_path, name, down, up):
    """In units of sampled clients and models, from the second round on.

    Model S, parameters P; without batch norm P = S."""
    weights, rows = final(name, tmp_path / name)
    size = 4 * common.nbytes(weights)
    assert (rows[1]["bytes_down"] / size, rows[1]["bytes_up"] / size) == (down, up)
    if name == "fedgkd":
        assert rows[0]["bytes_down"] == size  # its first round
        off = final("fedgkd", tmp_path / "off", "--gamma", "0")[1]
        assert off[1]["bytes_down"] == size


def test_bytes_of_qfedavg_fednova_and_noisy_rfedavg(tmp_path):
    """h_k and a_k are one number in float64; a delta has 256 in fp32."""
    for name in ("qfedavg", "fednova"):
        weights, rows = final(name, tmp_path / name)
        size = common.nbytes(weights)
        assert (rows[0]["bytes_down"], rows[0]["bytes_up"]) == (4 * size, 4 * (size + 8))
    _, rows = final("rfedavg_dp", tmp_path / "dp")
    assert [row["bytes_down"] for row in rows] == [4 * size, 4 * (size + 4 * 256)]
    assert [row["bytes_up"] for row in rows] == [4 * (size + 4 * 256)] * 2
