"""Every method script trains, and is FedAvg when its own terms are switched off."""

import pytest
import torch
from conftest import TINY, args_of, refused, same
from methods import METHODS, OFF, RESNET, SCRIPTS, final, needed, plain_final

import common


@pytest.mark.parametrize("name", METHODS)
def test_trains(tmp_path, name):
    """Three rounds change the weights, otherwise than FedAvg's.

    A client's last model and the server's memory act from the second round on."""
    flags = needed(name) if name in ("stochdepth", "fedbn") else []
    flags = [*flags, "--rounds", "3", "--weighting", "uniform"]
    flags += ["--projection", "256"] if name == "moon" else []
    weights, rows = final(name, tmp_path / "on", *flags)
    assert len(rows) == 3
    assert all(v.isfinite().all() for v in weights.values())
    assert same(weights, plain_final(tmp_path / "plain", *flags)) == (name in ("fedavg", "ditto"))


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


def test_defaults_are_the_papers():
    seen = {name: args_of(SCRIPTS[name], *needed(name)) for name in METHODS}
    align, depth, aug = (seen[name] for name in ("fedalign", "stochdepth", "gradaug"))
    assert (align.mu, align.width, align.clip) == (0.45, 0.25, 10)
    assert (align.lip_scale, align.lip_input) == ("ce", "slim")
    assert (depth.rule, aug.widths, aug.subnets) == ("paper", "code", 2)
    moon = seen["moon"]
    assert (moon.mu, moon.temperature, moon.projection) == (1, 0.5, 256)
    assert moon.frozen_mode == "eval"
    assert (seen["stochdepth"].keep, seen["mixup"].gamma, seen["fedprox"].mu) == (0.9, 0.1, 1e-4)
    assert (seen["fedcka"].mu, seen["fedcka"].layers, seen["gradaug"].min_width) == (3, 2, 0.8)
    assert (seen["fedmlb"].lambda1, seen["fedmlb"].lambda2) == (1, 1)
    assert (seen["fedmlb"].direction, seen["fedmlb"].divisor) == ("local-global", "selected")
    assert (seen["fedmlb"].tau, seen["fedntd"].tau, seen["fedntd"].weighting_rule) == (
        1,
        1,
        "convex",
    )
    assert (seen["fedcka"].similarity_metric, seen["scaffold"].option) == ("linear-cka", 2)
    assert (seen["qfedavg"].h, seen["qfedavg"].lipschitz) == ("paper", 1)
    assert (seen["fedgkd"].gamma, seen["fedgkd"].buffer) == (0.2, 5)
    assert (seen["feddyn"].dyn_alpha, seen["feddyn"].weighting) == (0.1, "uniform")
    assert (seen["qfedavg"].q, seen["fedkd"].gamma, seen["fitnet"].gamma) == (1, 0.2, 1)
    assert {seen[name].lam for name in ("rfedavg", "rfedavg_code", "rfedavg_dp")} == {1e-4}
    assert seen["ditto"].lam == 1
    assert seen["rfedavg"].variant == seen["rfedavg_code"].variant == "rfedavg+"


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
    "name, argv, word",
    [
        ("fedcka", "--layers 8", "--layers"),
        ("fedmlb", "--pathways 9", "--pathways"),
        ("fedmlb", "--pathways 1,x", "--pathways"),
        ("stochdepth", "", "--model"),
        ("stochdepth", "--keep 1", "--model"),
        ("fedbn", "", "--model cnn: no batch norm"),
        ("fedkd", "--gamma 3", "--gamma"),
        ("fedntd", "--ntd-beta 3", "--ntd-beta"),
        ("rfedavg_dp", "--noise 1", "--noise-clip"),
        ("rfedavg_dp", "--noise-clip 0", "--noise-clip"),
        ("rfedavg", "--noise 1", "--noise"),
        ("fedcka", "--batch-size 2", "--batch-size"),
        ("scaffold", "--correction gradient --persist-opt", "--persist-opt"),
        ("gradaug", "--resolutions 32,x", "--resolutions"),
    ],
)
def test_bad_method_flags(tmp_path, capsys, name, argv, word):
    refused(capsys, SCRIPTS[name], [*TINY, "--out", tmp_path / "run", *argv.split()], word)
    assert not (tmp_path / "run").exists()


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
