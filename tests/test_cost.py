"""analysis/cost.py: against published counts, counts by hand, and torch's counter of FLOPs."""

import json

import pytest
import torch
from conftest import refused_amid_output
from torch.utils.flop_counter import FlopCounterMode

import common
import gradaug
from analysis import cost, runs, synthetic

FEDAVG = 87_237_632  # MACs of ResNet56 on a 32x32 image with 100 classes
WEIGHTS = 605_460  # of its convolutions and linear layers
# the paper's 3 x 87,368,704 counts the classifiers of the frozen networks, which do not run
MOON = 3 * 87_368_704 - 2 * 25_600
SLIM = [(32, 16, 16, 1), (16, 16, 8, 9), (16, 64, 8, 1), (32, 64, 8, 1)]
SLIM += 5 * [(64, 16, 8, 1), (16, 16, 8, 9), (16, 64, 8, 1)]
# FedAlign's last stage at a quarter of its width: inputs, outputs, side, kernel
FEDALIGN = FEDAVG + sum(i * o * side**2 * k for i, o, side, k in SLIM)


def counts(script, *argv, model="resnet56"):
    """Return MACs per sample, parameters and bytes of a script on CIFAR-100 in batches of two."""
    words = f"--dataset cifar100 --model {model} --batch-size 2 --device cpu".split()
    result = cost.count(runs.method_call(script, [*words, *argv]), 300)
    return result["macs_per_sample"], result["parameters"], result["bytes"]


@pytest.mark.parametrize("input_gradient, backward", [(False, 2700), (True, 5400)])
def test_backward_of_grouped_convolutions(input_gradient, backward):
    """Twice the forward pass, once where the input takes no gradient.

    4 -> 6 channels in 2 groups, 3x3, on 5x5: 2,700 MACs."""
    conv = torch.nn.Conv2d(4, 6, 3, padding=1, groups=2)
    x = torch.randn(1, 4, 5, 5, requires_grad=input_gradient)
    with cost.Counter() as counter:
        conv(x).sum().backward()
    assert sum(counter.macs.values()) == 2700 + counter.macs["backward"] == 2700 + backward


@pytest.mark.parametrize(
    "script, flags, forward, expected, stored",
    [
        ("fedavg", "", FEDAVG, FEDAVG, WEIGHTS),
        ("fedprox", "", FEDAVG, FEDAVG, 2 * WEIGHTS),
        ("moon", "", MOON, MOON, 3 * 737_044),
        ("stochdepth", "", FEDAVG, 82.89e6, WEIGHTS),
        ("fedalign", "", FEDALIGN, FEDALIGN, WEIGHTS),
        # the mean over widths and resolutions of the authors' rule; Table 5 has 133.9
        ("gradaug", "--subnets 1 --resolutions 32,28,24,20", 127.6e6, 127.6e6, WEIGHTS),
    ],
)
def test_table_five(script, flags, forward, expected, stored):
    macs, parameters, _ = counts(script, *flags.split())
    assert macs["forward"] == pytest.approx(forward, rel=0.01 if script == "gradaug" else 0)
    assert macs["expected"] == pytest.approx(expected, rel=0.01 if script == "gradaug" else 1e-4)
    assert parameters["papers"] == stored
    # an input takes no gradient, and frozen networks none at all
    assert 1.9 < macs["backward"] / (forward / 3 if script == "moon" else forward) < 2.1
    assert (macs["products"] > 1e6) == (script == "fedalign")


def test_what_is_outside_steps_stored_and_sent():
    """rFedAvg: one forward over the data a round, and N d numbers down, rFedAvg+ d. SCAFFOLD: a
    variate in both directions. FedPer: all but the classifier. FedProx: a copy of parameters."""
    net = common.build_net("cnn", 100)
    size, d = common.nbytes(net.state_dict()), net[-1].in_features
    plain, _, traffic = counts("fedavg", model="cnn")
    assert traffic == {"down": size, "up": size} and plain["round"] == 0
    for variant, clients in (("rfedavg", 16), ("rfedavg+", 1)):
        macs, _, traffic = counts("rfedavg", "--variant", variant, model="cnn")
        assert macs["forward"] == plain["forward"]
        assert macs["round"] == pytest.approx(plain["forward"] - 100 * d)
        assert traffic == {"down": size + 4 * clients * d, "up": size + 4 * d}
    _, stored, traffic = counts("scaffold", model="cnn")
    assert traffic == {"down": 2 * size, "up": 2 * size} and stored["kept"] * 4 == size
    head = common.nbytes(net[-1].state_dict())
    assert counts("fedper", model="cnn")[2] == {"down": size - head, "up": size - head}
    net = common.build_net("resnet56", 100)
    state = sum(v.numel() for v in net.state_dict().values() if v.is_floating_point())
    assert counts("fedavg")[1]["full"] == state
    parameters = sum(p.numel() for p in net.parameters())
    assert counts("fedprox", "--mu", "0.1")[1]["full"] == state + parameters


def test_two_subnetworks(monkeypatch):
    """Each sub-network's width and resolution, by torch's counter of FLOPs."""
    shapes = (0.9, 24), (0.8, 20)
    monkeypatch.setattr(gradaug, "draw_variants", lambda rng, steps, *_: [shapes] * steps)
    forward = counts("gradaug")[0]["forward"]
    net = common.build_net("resnet56", 100).eval()
    x = torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        net(x)
        for width, resolution in shapes:
            common.at_width(net, gradaug.resize(x, resolution, False), width)
    assert forward == flops.get_total_flops() / 2 / 2 == 153_691_744


def test_an_lstm_counts_as_a_layer(monkeypatch):
    """Two of 256 on 7 words of 300 numbers, then two classes; none of it are other products."""
    data = synthetic.text(8, 7)["data"]
    data.x.clamp_(min=1)  # no sentence is shorter
    monkeypatch.setattr(common, "load_data", lambda args: data)
    macs, *_ = counts("fedavg", *"--dataset sent140 --vectors random".split(), model="lstm")
    assert macs["forward"] == 7 * 4 * 256 * (300 + 3 * 256) + 2 * 256 and macs["products"] == 0


def test_images_need_no_files():
    """They have the channels by which their data set is normalised, and its size."""
    sizes = {"mnist": 28, "emnist": 28, "femnist": 28, "tiny-imagenet": 64, "imagenet-200": 224}
    for dataset, (mean, _) in common.STATISTICS.items():
        args = common.flags("x", "x").parse_args(["--dataset", dataset, "--data-dir", "/nowhere"])
        side = sizes.get(dataset, 32)
        assert synthetic.images(args, 4).x.shape == (4, len(mean), side, side)


def test_cost_prints(capsys):
    flags = "--dataset femnist --model cnn-mcmahan --batch-size 4 --device cpu --data-dir /nowhere"
    result = cost.main(["fedprox.py", *flags.split()])
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result and result["macs_per_sample"]["forward"] > 0
    assert "MFLOPs) a sample: convolutions" in out


@pytest.mark.parametrize(
    "argv, word",
    [
        ("nothing", "no such script"),
        ("common", "not the script of a method"),
        ("moon --nonsense", "--nonsense"),
        ("fedavg --batch-size 1", "--batch-size"),
    ],
)
def test_cost_refuses(capsys, argv, word):
    refused_amid_output(capsys, cost, argv.split(), word)
