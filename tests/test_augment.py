"""Training augmentation."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY, flags, make_folder
from torchvision.transforms import functional as tv

import common
import fedavg


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)


@pytest.fixture(scope="module")
def draws():
    augment = ["rotate15", "crop", "flip"]
    drawn = common.draw_augment(augment, np.random.default_rng(0), (40,), 32)
    return {k: torch.from_numpy(v) for k, v in drawn.items()}


def one_by_one(images, draws):
    """Return the images, each augmented by torchvision's functions."""
    found = []
    for i, image in enumerate(images):
        if "rotate" in draws:
            image = tv.rotate(image, draws["rotate"][i].item())
        if "crop" in draws:
            top, left = draws["crop"][i].tolist()
            image = tv.crop(tv.pad(image, 4), top, left, 32, 32)
        if "reflect-crop" in draws:
            top, left = draws["reflect-crop"][i].tolist()
            image = tv.crop(tv.pad(image, 4, padding_mode="reflect"), top, left, 32, 32)
        if "flip" in draws and draws["flip"][i]:
            image = tv.hflip(image)
        found.append(image)
    return torch.stack(found)


def test_draws_of_the_augmentation(draws):
    assert draws["crop"].min() == 0
    assert draws["crop"].max() == 8
    assert 0 < draws["flip"].sum() < 40
    assert 10 < draws["rotate"].abs().max() <= 15


@pytest.mark.parametrize("names", ["crop", "flip", "crop flip", "reflect-crop flip"])
def test_augmentation_equals_a_loop_over_images(images, draws, names):
    chosen = {k: draws[k.removeprefix("reflect-")] for k in names.split()}
    chosen = dict(zip(names.split(), chosen.values()))
    assert torch.equal(common.apply_augment(images, chosen), one_by_one(images, chosen))


def test_reflected_crop_is_drawn_as_a_crop(draws):
    augment = ["rotate15", "reflect-crop", "flip"]
    drawn = common.draw_augment(augment, np.random.default_rng(0), (40,), 32)
    assert (drawn["reflect-crop"] == draws["crop"].numpy()).all()
    assert (drawn["flip"] == draws["flip"].numpy()).all()


def test_rotation_equals_a_loop_over_images(images, draws):
    """A source position on the border of two pixels may round either way."""
    fast, slow = common.apply_augment(images, draws), one_by_one(images, draws)
    assert (fast == slow).float().mean() > 0.999


@pytest.mark.parametrize(
    "argv, augment",
    [
        ("--augment rotate10,crop,flip", ["rotate10", "crop", "flip"]),
        ("--augment reflect-crop,flip", ["reflect-crop", "flip"]),
        ("--augment none", []),
        ("", []),  # glyphs: a mirrored character is another one
        ("--dataset cifar10", ["crop", "flip"]),
    ],
)
def test_augment_flag(argv, augment):
    assert common.resolve_augment(flags(*argv.split())) == augment


@pytest.mark.parametrize("mode, augment", [("L", "none"), ("RGB", "crop,flip")])
def test_auto_leaves_grey_images_alone(tmp_path, capsys, mode, augment):
    """A folder of digits: the batches are as they are read; the line and config.json say so."""
    root, out = make_folder(tmp_path / "data", mode=mode), tmp_path / "run"
    words = f"--dataset folder --data-dir {root} --min-size 1 --clip 2".split()
    words = [word for word in [*TINY, *words] if word != "--quiet"]
    words += ["--model", "simple-cnn", "--image-size", "16", "--clients", "2", "--out", str(out)]
    fedavg.main(words)
    line = capsys.readouterr().out.splitlines()[0]
    assert f"lr 0.01, momentum 0.9, weight decay 0.0001, clip 2, augment {augment}; on cpu" in line
    assert line.endswith(f"workers: {min(2, common.CORES)}")
    assert json.loads((out / "config.json").read_text())["augment"] == augment
    args = flags(*words)
    data = common.load_data(args)
    assert (common.resolve_augment(args, data) == []) == (mode == "L")
    client = common.Client(0, np.arange(6))
    worker = common.PlainWorker(
        common.build_net("simple-cnn", 2, data.x.shape[1], 16), data, args, client, {"round": 1}
    )
    sums = [x.sum().item() for x, _ in worker.local_batches(client)]
    plain = data.normalise(data.x).sum().item()
    assert (sums == [pytest.approx(plain, abs=1e-2)]) == (mode == "L")
