"""analysis/cost.py: against published counts, counts by hand, and torch's counter of FLOPs."""

import json

import pytest
import torch
from conftest import refused_amid_output
from torch.utils.flop_counter import FlopCounterMode

import common
import gradaug
from analysis import cost, runs

FEDAVG = 87_237_632  # MACs of ResNet56 on a 32x32 image with 100 classes
WEIGHTS = 605_460  # of its convolutions and linear layers
# the paper's 3 x 87,368,704 counts the classifiers of the frozen networks, which do not run
MOON = 3 * 87_368_704 - 2 * 25_600


def counts(script, *argv, model="resnet56"):
    """Return MACs per sample, parameters and bytes of a script on CIFAR-100 in batches of two."""
    words = f"--dataset cifar100 --model {model} --batch-size 2 --device cpu".split()
    result = cost.count(runs.method_call(script, [*words, *argv]), 300)
    return result["macs_per_sample"], result["parameters"], result["bytes"]


@pytest.mark.parametrize("input_gradient, backward", [(False, 2700), (True, 5400)])
def test_backward_of_grouped_convolutions(input_gradient, backward):
    """Twice the forward pass, once where the input takes no gradient.

    4 -> 6 channels in 2 groups, 3x3, on 5x5: 2,700 MACs.
    """
    conv = torch.nn.Conv2d(4, 6, 3, padding=1, groups=2)
    x = torch.randn(1, 4, 5, 5, requires_grad=input_gradient)
    with cost.Counter() as counter:
        conv(x).sum().backward()
    assert counter.macs["forward"] == 2700
    assert counter.macs["backward"] == backward


@pytest.mark.parametrize(
    "script, forward, expected, parameters",
    [
        ("fedavg", FEDAVG, FEDAVG, WEIGHTS),
        ("fedprox", FEDAVG, FEDAVG, 2 * WEIGHTS),
        ("moon", MOON, MOON, 3 * 737_044),
        ("stochdepth", FEDAVG, 82.89e6, WEIGHTS),
    ],
)
def test_table_five(script, forward, expected, parameters):
    macs, stored, traffic = counts(script)
    assert macs["forward"] == forward
    assert macs["expected"] == pytest.approx(expected, rel=1e-4)
    assert stored["papers"] == parameters
    assert 1.9 * 87e6 < macs["backward"] < 2.1 * 87.4e6
    assert traffic["down"] == traffic["up"] == (3_020_576 if script == "moon" else 2_494_240)


def test_table_five_fedalign():
    """87.24 M and the last stage at a quarter of its width, by hand: inputs, outputs, side, kernel.

    Its convolutions work on 64 -> 32 of 128 channels.
    """
    first = [(32, 16, 16, 1), (16, 16, 8, 9), (16, 64, 8, 1), (32, 64, 8, 1)]
    later = [(64, 16, 8, 1), (16, 16, 8, 9), (16, 64, 8, 1)]
    slim = sum(i * o * side**2 * k for i, o, side, k in first + 5 * later)
    macs, _, _ = counts("fedalign")
    assert macs["forward"] == FEDAVG + slim
    assert round(macs["forward"] / 1e6, 1) == 89.1
    assert macs["products"] > 1e6


@pytest.mark.parametrize("subnets, millions", [(1, 127.6)])
def test_table_five_gradaug(subnets, millions):
    """The mean over widths and resolutions of the authors' rule; Table 5 has 133.9 and 170.7."""
    macs, stored, _ = counts("gradaug", "--subnets", str(subnets), "--resolutions", "32,28,24,20")
    assert macs["forward"] == pytest.approx(millions * 1e6, rel=0.01)
    assert stored["papers"] == WEIGHTS


def test_cost_counts_what_happens_outside_steps():
    """rFedAvg: one forward over the data a round, and N d numbers down; SCAFFOLD: a variate in both
    directions."""
    net = common.build_net("cnn", 100)
    size = common.nbytes(net.state_dict())
    d = net[-1].in_features
    plain, _, _ = counts("fedavg", model="cnn")
    macs, _, traffic = counts("rfedavg", "--variant", "rfedavg", model="cnn")
    assert macs["forward"] == plain["forward"]
    assert macs["round"] == pytest.approx(plain["forward"] - 100 * d)
    assert traffic["down"] == size + 4 * 16 * d
    assert traffic["up"] == size + 4 * d
    _, stored, traffic = counts("scaffold", model="cnn")
    assert traffic["down"] == traffic["up"] == 2 * size
    assert stored["kept"] * 4 == size


def test_cost_of_pins():
    """FedProx reads one more copy of the parameters, but none of the statistics."""
    net = common.build_net("resnet56", 100)
    state = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    parameters = sum(p.numel() for p in net.parameters())
    assert counts("fedprox", "--mu", "0.1")[1]["full"] == state + parameters
    assert counts("fedavg")[1]["full"] == state


def test_cost_of_two_subnetworks(monkeypatch):
    """Each sub-network's width and resolution, by torch's counter of FLOPs."""
    shapes = (0.9, 24), (0.8, 20)
    monkeypatch.setattr(gradaug, "draw_variants", lambda rng, steps, *_: [shapes] * steps)
    call = runs.method_call("gradaug", "--model resnet56 --batch-size 2 --device cpu".split())
    forward = cost.count(call, 1)["macs_per_sample"]["forward"]
    net = common.build_net("resnet56", 100).eval()
    x = torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        net(x)
        for width, resolution in shapes:
            common.at_width(net, gradaug.resize(x, resolution, False), width)
    assert forward == flops.get_total_flops() / 2 / 2 == 153_691_744


@pytest.mark.parametrize(
    "dataset, model, shape",
    [
        ("femnist", "cnn-mcmahan", (1, 28, 62)),
        ("emnist", "cnn-mcmahan", (1, 28, 62)),
        ("tiny-imagenet", "cnn", (3, 64, 200)),
        ("imagenet-200", "cnn", (3, 224, 200)),
    ],
)
def test_cost_needs_no_files(dataset, model, shape):
    flags = f"--dataset {dataset} --data-dir /nowhere --model {model} --batch-size 2"
    call = runs.method_call("fedavg", flags.split())
    data = cost.images(call.args, 4)
    channels, size, classes = shape
    assert data.x.shape == (4, channels, size, size)
    assert data.classes == classes
    if dataset != "imagenet-200":
        assert cost.count(call, 2)["macs_per_sample"]["forward"] > 0


def test_cost_prints(capsys):
    flags = "--dataset glyphs --model cnn --batch-size 4 --epochs 1 --mu 0.1 --device cpu"
    result = cost.main(["fedprox.py", *flags.split()])
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    assert "MFLOPs) a sample: convolutions" in out


@pytest.mark.parametrize(
    "argv, word",
    [
        (["nothing"], "no such script"),
        (["common"], "not the script of a method"),
        (["moon", "--mu", "x"], "--mu"),
        (["moon", "--nonsense"], "--nonsense"),
    ],
)
def test_cost_refuses(capsys, argv, word):
    refused_amid_output(capsys, cost, argv, word)
