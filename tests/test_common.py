"""common.py: partitions, data, networks, engine, aggregation."""

import argparse
import json
import math
import pathlib

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, same
from PIL import Image
from torchvision.transforms import functional as tv

import common
import fedavg

LABELS = np.random.default_rng(0).integers(10, size=3000)


def flags(*argv):
    return common.flags("test", "test").parse_args([*TINY, *argv])


# --- partitions


def split(kind, labels, clients, seed):
    return {
        "dirichlet": lambda: common.dirichlet_partition(labels, clients, 0.3, seed),
        "balanced": lambda: common.balanced_dirichlet_partition(labels, clients, 0.3, seed),
        "iid": lambda: common.iid_partition(labels, clients, seed),
        "similarity": lambda: common.similarity_partition(labels, clients, 35, seed),
    }[kind]()


@pytest.mark.parametrize("kind", ["dirichlet", "balanced", "iid", "similarity"])
def test_partition_covers_every_sample_once_and_follows_the_seed(kind):
    parts = split(kind, LABELS, 7, seed=3)
    assert len(parts) == 7 and all(part.dtype == np.int64 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(3000))
    assert all(np.array_equal(a, b) for a, b in zip(parts, split(kind, LABELS, 7, seed=3)))
    assert not np.array_equal(parts[0], split(kind, LABELS, 7, seed=4)[0])
    if kind != "dirichlet":
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1  # 3000 = 7 * 428 + 4


def test_dirichlet_balancing_rule():
    """At alpha -> 0 a class goes to one client. With two equal classes and two clients whoever gets the first class then
    holds n / 2 and may have nothing more, so the second goes to the other. Without the rule half of all seeds fail."""
    labels = np.repeat([0, 1], 50)
    for seed in range(8):
        a, b = common.dirichlet_partition(labels, 2, 1e-4, seed)
        assert {labels[a].min(), labels[b].min()} == {0, 1} and len(set(labels[a])) == len(
            set(labels[b])
        ) == 1


def test_dirichlet_skew_and_minimum():
    def entropy(alpha):
        parts = common.dirichlet_partition(LABELS, 10, alpha, 0)
        assert min(map(len, parts)) >= 10
        shares = [np.bincount(LABELS[p], minlength=10) / len(p) for p in parts]
        return np.mean([-(s[s > 0] * np.log(s[s > 0])).sum() for s in shares])

    assert entropy(0.1) < entropy(1) < entropy(1000) and entropy(1000) > 0.98 * math.log(10)


@pytest.mark.parametrize("clients, alpha", [(301, 1.0), (290, 0.01)])
def test_dirichlet_gives_up(clients, alpha):
    with pytest.raises(common.UserError, match="fewer --clients"):
        common.dirichlet_partition(LABELS, clients, alpha, 0)


def test_balanced_dirichlet_draws_as_weighted_sampling_without_replacement():
    """The first client's class counts against numpy's own weighted draw without replacement with the same weights, each
    averaged over 400 draws. Class 2 is scarce, so plain multinomial counts would be far off."""
    labels, m, counts, expected = np.repeat([0, 1, 2], [60, 60, 6]), 63, [], []
    p = np.random.default_rng(7).dirichlet(np.full(3, 2.0))

    class Fixed:  # the same p for every draw; all else is random
        def __init__(self, rng):
            self.rng = rng

        def __getattr__(self, name):
            return getattr(self.rng, name)

        def dirichlet(self, alpha):
            return p

    keyed = common.keyed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "keyed", lambda *key: Fixed(keyed(*key)))
        for seed in range(400):
            counts.append(
                np.bincount(
                    labels[common.balanced_dirichlet_partition(labels, 2, 1.0, seed)[0]],
                    minlength=3,
                )
            )
            drawn = keyed("reference", seed).choice(
                126, m, replace=False, p=p[labels] / p[labels].sum()
            )
            expected.append(np.bincount(labels[drawn], minlength=3))
    error = np.sqrt(np.var(counts, 0) / 400 + np.var(expected, 0) / 400)
    assert (np.abs(np.mean(counts, 0) - np.mean(expected, 0)) < 4 * error + 1e-9).all()


def test_similarity_zero_gives_each_client_one_class():
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 40))
    assert all(
        len(set(labels[p])) == 1 and len(p) == 20
        for p in common.similarity_partition(labels, 20, 0, 0)
    )
    mixed = common.similarity_partition(labels, 20, 50, 0)
    for p in (
        mixed
    ):  # 10 samples of one class, or of two neighbours where a chunk straddles them, and 10 of any
        counts = np.bincount(labels[p], minlength=10)
        assert len(p) == 20 and (counts > 0).sum() > 2 and (counts[:-1] + counts[1:]).max() >= 10


def test_natural_partition_covers_the_chosen_writers():
    writers = np.array([5, 5, 8, 9, 8, 5, 2])
    for seed in range(5):
        parts = common.natural_partition(writers, 3, seed)
        chosen = [writers[p[0]] for p in parts]
        assert len(set(chosen)) == 3
        assert all(np.array_equal(p, np.flatnonzero(writers == w)) for p, w in zip(parts, chosen))
    with pytest.raises(common.UserError, match="4 writers"):
        common.natural_partition(writers, 5, 0)


@pytest.mark.parametrize(
    "text",
    [
        "{0: [0, 3], 1: [2, 1]}",
        "{0: {0, 3}, 1: {2, 1}}",
        '{"0": [0, 3], "1": [2, 1]}',
        "[[0, 3], [2, 1]]",
        '{"1": [2, 1], "0": [0, 3]}',
    ],
)
def test_file_partition(tmp_path, text):
    (tmp_path / "split").write_text(text)
    assert [sorted(p.tolist()) for p in common.file_partition(tmp_path / "split", 4, 2)] == [
        [0, 3],
        [1, 2],
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{0: [0, 3], 1: [2]}", "leaves out 1 of 4"),
        ("{0: [0, 3], 1: [2, 4]}", "client 1 .* 0 to 3"),
        ("{0: [0, 3], 1: [2, -1]}", "client 1"),
        ("{0: [0, 3], 1: [2, 0]}", "client 1 .* before"),
        ("{0: [0, 1, 2, 3]}", "--clients 1"),
        ("__import__('os')", "neither"),
        ("{0: [0, 3], 1: [2, 1", "neither"),
        ("{0: 3, 1: 4}", "list of indices"),
        ("7", "list of indices"),
        ("{[1]: [0]}", "neither"),
        ("[" * 9999, "neither"),
        ('{"a": [0, 3], "b": [1, 2]}', "numbers"),
        ("[[0, 3], [2, true]]", "client 1"),
    ],
)
def test_file_partition_refuses(tmp_path, text, message):
    (tmp_path / "split").write_text(text)
    with pytest.raises(common.UserError, match=message):
        common.file_partition(tmp_path / "split", 4, 2)


# --- data


SIZES = common.GLYPHS  # before the tests shrink them


def test_glyphs_follow_the_seed_and_have_writers():
    assert SIZES == (20_000, 4_000)
    a, again, other = (
        common._glyphs.__wrapped__((600, 200), 0),
        common._glyphs.__wrapped__((600, 200), 0),
        common.glyphs(seed=1),
    )
    assert (
        a.x.shape == (600, 3, 32, 32)
        and a.x_test.shape == (200, 3, 32, 32)
        and a.x.dtype == torch.uint8
        and a.classes == 62
    )
    assert (
        torch.equal(a.x, again.x)
        and torch.equal(a.y_test, again.y_test)
        and not torch.equal(a.x, other.x)
    )
    assert len(a.writers) == 600 and len(set(a.writers)) > 2
    # a writer's paper has one colour, so the corner pixels vary less within a writer than between writers
    corner = a.x[:, :, :3, :3].double().mean((2, 3)).numpy()
    within = np.mean([corner[a.writers == w].var(0) for w in set(a.writers)])
    assert within < 0.5 * corner.var(0).mean()


def test_statistics_and_normalise():
    x = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    data = common.Data(x, torch.zeros(50).long(), x, torch.zeros(50).long(), 2)
    pixels = x.numpy().astype(np.float64) / 255
    assert np.allclose(data.mean.flatten(), pixels.mean((0, 2, 3)), atol=1e-6) and np.allclose(
        data.std.flatten(), pixels.std((0, 2, 3)), atol=1e-6
    )
    z = data.normalise(x).double()
    assert (
        z.mean((0, 2, 3)).abs().max() < 1e-5
        and (z.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    )


def test_augmentation_equals_a_loop_over_images():
    x = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)
    draws = common.draw_augment(
        {"crop": True, "flip": True, "rotate": 15}, np.random.default_rng(0), (40,), 32
    )
    assert (
        draws["crop"].min() == 0
        and draws["crop"].max() == 8
        and 0 < draws["flip"].sum() < 40
        and 10 < np.abs(draws["rotate"]).max() <= 15
    )
    draws = {k: torch.from_numpy(v) for k, v in draws.items()}

    def one(i, names):
        image = x[i]
        if "rotate" in names:
            image = tv.rotate(image, draws["rotate"][i].item())
        if "crop" in names:
            top, left = draws["crop"][i].tolist()
            image = tv.crop(tv.pad(image, 4), top, left, 32, 32)
        return tv.hflip(image) if "flip" in names and draws["flip"][i] else image

    for names in (["crop"], ["flip"], ["crop", "flip"]):
        fast = common.apply_augment(x, {k: draws[k] for k in names})
        assert torch.equal(fast, torch.stack([one(i, names) for i in range(40)]))
    fast, slow = common.apply_augment(x, draws), torch.stack([one(i, draws) for i in range(40)])
    assert (
        fast == slow
    ).float().mean() > 0.999  # a source position on the border of two pixels may round either way


def test_augment_flag():
    assert common.resolve_augment(flags("--augment", "rotate10,crop,flip")) == {
        "rotate": 10,
        "crop": True,
        "flip": True,
    }
    assert (
        common.resolve_augment(flags("--augment", "none")) == {} == common.resolve_augment(flags())
    )  # glyphs: mirrored is another character
    assert common.resolve_augment(flags("--dataset", "cifar10")) == {"crop": True, "flip": True}


def make_folder(root, size=(12, 12), mode="RGB", classes=("ape", "bee")):
    rng = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 2)):
        for name in classes:
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(
                    256, size=(*size[::-1], 3) if mode == "RGB" else size[::-1]
                ).astype(np.uint8)
                Image.fromarray(pixels, mode).save(root / part / name / f"{i}.png")
    return root


def test_folder_decodes_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    root = make_folder(tmp_path)
    data = common.folder(root)
    assert (
        data.x.shape == (6, 3, 12, 12)
        and data.x_test.shape == (4, 3, 12, 12)
        and data.y.tolist() == [0, 0, 0, 1, 1, 1]
        and data.classes == 2
    )
    assert torch.equal(
        data.x[4], torch.from_numpy(np.array(Image.open(root / "train/bee/1.png"))).permute(2, 0, 1)
    )
    decode, calls = common._decode, []
    monkeypatch.setattr(common, "_decode", lambda *a: calls.append(1) or decode(*a))
    assert torch.equal(common.folder(root).x, data.x) and not calls
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(root / "train/bee/1.png")
    assert common.folder(root).x[4].max() == 0 and calls == [1]
    next(root.glob(".cache-*.pt")).write_bytes(b"damaged")
    assert common.folder(root).x[4].max() == 0 and calls == [1, 1]
    assert common.folder(root, 8).x.shape == (6, 3, 8, 8)


def test_folder_keeps_grey_images_grey(tmp_path):
    root = make_folder(tmp_path, mode="L")
    assert common.folder(root).x.shape == (6, 1, 12, 12)
    Image.fromarray(np.full((12, 12, 3), (1, 2, 3), np.uint8)).save(root / "train/bee/2.png")
    data = common.folder(root)  # one in colour: all are read so
    assert (
        data.x.shape == (6, 3, 12, 12)
        and data.x[5, :, 0, 0].tolist() == [1, 2, 3]
        and (data.x[0, 0] == data.x[0, 2]).all()
    )


def test_torchvision_layouts(monkeypatch, tmp_path):
    """CIFAR keeps an HWC numpy array and a list of labels, MNIST a tensor without channels."""
    from torchvision import datasets

    class Fake:
        def __init__(self, shape, classes):
            rng = np.random.default_rng(0)
            self.data, self.targets, self.classes = (
                rng.integers(256, size=shape).astype(np.uint8),
                [1] * shape[0],
                classes,
            )

    monkeypatch.setattr(
        datasets,
        "CIFAR10",
        lambda root, train, download: Fake((6 if train else 2, 32, 32, 3), list("0123456789")),
    )
    data = common.load_data(flags("--dataset", "cifar10"))
    assert (
        data.x.shape == (6, 3, 32, 32)
        and data.x_test.shape == (2, 3, 32, 32)
        and data.classes == 10
    )
    assert data.x[3, 1, 5, 7] == Fake((6, 32, 32, 3), []).data[
        3, 5, 7, 1
    ] and data.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    monkeypatch.setattr(
        datasets,
        "MNIST",
        lambda root, train, download: Fake((6 if train else 2, 28, 28), list("0123456789")),
    )
    data = common.load_data(flags("--dataset", "mnist", "--image-size", "16"))
    assert data.x.shape == (6, 1, 16, 16) and data.x.dtype == torch.uint8


# --- networks


@pytest.mark.parametrize(
    "name, classes, channels, size, projection, count",
    [  # methods' published sizes
        ("resnet56", 100, 3, 32, 0, 614_452),
        ("resnet56", 10, 3, 32, 0, 591_322),
        ("resnet56", 10, 3, 32, 256, 722_906),
        ("resnet56", 100, 3, 32, 256, 746_036),
        ("resnet18", 200, 3, 64, 0, 11_279_112),
        ("resnet18", 200, 3, 64, 256, 11_621_896),
        ("resnet18-gn", 100, 3, 32, 0, 11_220_132),
        ("resnet18-gn", 200, 3, 32, 0, 11_271_432),
        ("resnet50", 100, 3, 32, 256, 28_246_948),
        ("cnn", 10, 3, 32, 0, 151_802),
        ("cnn-moon", 10, 3, 32, 0, 92_626),
        ("cnn-mcmahan", 10, 1, 28, 0, 1_663_370),
        ("cnn-mcmahan", 10, 3, 28, 0, 1_664_970),
        ("cnn-mcmahan", 62, 1, 28, 0, 1_690_046),
    ],
)
def test_parameter_counts(name, classes, channels, size, projection, count):
    net = common.build_net(name, classes, channels, size, projection)
    assert sum(p.numel() for p in net.parameters()) == count
    x = torch.randn(2, channels, size, size)
    net.eval()
    assert net(x).shape == (2, classes) and torch.equal(net[-1](net[:-1](x)), net(x))


def test_block_sizes():
    def counts(name, classes):
        return [
            sum(p.numel() for p in block.parameters()) for block in common.build_net(name, classes)
        ]

    assert counts("resnet56", 100)[1:4] == [27_648, 113_152, 447_488]
    assert counts("resnet18-gn", 100) == [1_856, 147_968, 525_568, 2_099_712, 8_393_728, 0, 51_300]
    assert counts("cnn", 10) == [1_216, 12_832, 96_120, 10_164, 7_140, 21_760, 2_570]
    assert common.nbytes(common.build_net("resnet56", 100).state_dict()) == 2_494_240
    net, x = common.build_net("cnn", 10), torch.randn(1, 3, 32, 32)
    assert (
        net[0](x).shape == (1, 16, 28, 28)
        and net[:2](x).shape == (1, 32, 10, 10)
        and net[:2](x).min() == 0
    )
    assert net[:-1](x).min() < 0  # the 256 features have no activation


def test_make_divisible():
    """Multiples of 8, halves up, at least 90% of the exact width: 0.25 * 256 = 64; 0.8 * 16 = 12.8 -> 16; 0.6 * 40 = 24;
    0.8 * 64 = 51.2 -> 48 (93.75%); 0.7 * 16 = 11.2 -> 8 would be 71%, so 16; never under 8 or above all channels."""
    assert [
        common.make_divisible(c, w)
        for c, w in [(256, 0.25), (16, 0.8), (40, 0.6), (64, 0.8), (16, 0.7), (16, 0.1), (3, 0.25)]
    ] == [64, 16, 24, 48, 16, 8, 3]


@pytest.mark.parametrize("name", ["resnet56", "resnet18-gn", "cnn"])
def test_at_width_one_is_the_plain_call(name):
    torch.manual_seed(0)
    net = common.build_net(name, 10).train()
    x, before = torch.randn(4, 3, 32, 32), {k: v.clone() for k, v in net.named_buffers()}
    narrow = common.at_width(net, x, 1.0)
    assert all(torch.equal(v, before[k]) for k, v in net.named_buffers())
    assert torch.equal(narrow, net(x))


def test_at_width_is_the_narrow_network():
    """A quarter of a bottleneck block, spelled out with functional calls on the leading channels; gradients stay inside."""
    torch.manual_seed(0)
    stage = (
        common.build_net("resnet56", 10)[3][:1].double().train()
    )  # 128 -> 64 -> 64 -> 256 channels, stride 2
    x = torch.randn(3, 32, 16, 16, dtype=torch.float64)
    (c1, n1, _, c2, n2, _, c3, n3), (c4, n4) = stage[0].branch, stage[0].shortcut

    def norm(x, layer, c):
        layer.bias.data.uniform_(-1, 1)
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        return (x - mean) / (var + 1e-5).sqrt() * layer.weight[:c, None, None] + layer.bias[
            :c, None, None
        ]

    h = norm(F.conv2d(x, c1.weight[:16, :32]), n1, 16).relu()
    h = norm(F.conv2d(h, c2.weight[:16, :16], stride=2, padding=1), n2, 16).relu()
    h = norm(F.conv2d(h, c3.weight[:64, :16]), n3, 64)
    expected = (h + norm(F.conv2d(x, c4.weight[:64, :32], stride=2), n4, 64)).relu()
    out = common.at_width(stage, x, 0.25)
    assert out.shape == (3, 64, 8, 8) and torch.allclose(out, expected, rtol=1e-10, atol=1e-10)
    out.square().sum().backward()
    assert (
        c2.weight.grad[:16, :16].abs().min() > 0
        and c2.weight.grad[16:].abs().max() == 0 == c2.weight.grad[:, 16:].abs().max()
    )
    assert n1.num_batches_tracked == 0


def test_at_width_of_a_network_that_flattens_maps():
    """cnn at 0.5: 8 and 16 channels, the leading 16 * 25 inputs of the first linear layer, all classes."""
    net, x = common.build_net("cnn", 10), torch.randn(2, 3, 32, 32)
    h = F.conv2d(x, net[0][0].weight[:8], net[0][0].bias[:8]).relu()
    h = F.conv2d(F.max_pool2d(h, 2), net[1][1].weight[:16, :8], net[1][1].bias[:16]).relu()
    h = F.max_pool2d(h, 2).flatten(1)
    for fc, n in ((net[2][2], 64), (net[3][0], 40), (net[4][0], 40), (net[5][0], 128)):
        h = F.linear(h, fc.weight[:n, : h.shape[1]], fc.bias[:n])
        h = h if fc is net[5][0] else h.relu()
    assert torch.allclose(
        common.at_width(net, x, 0.5), F.linear(h, net[6].weight[:, :128], net[6].bias), atol=1e-6
    )


def test_at_width_refuses_what_it_cannot_slice():
    with pytest.raises(common.UserError, match="grouped"):
        common.at_width(nn.Conv2d(16, 16, 3, groups=2), torch.randn(1, 16, 8, 8), 0.5)
    with pytest.raises(common.UserError, match="LSTM"):
        common.at_width(nn.LSTM(16, 16), torch.randn(1, 2, 16), 0.5)


# --- engine


def tiny_worker(*argv):
    args, data = flags(*argv), common.glyphs()
    torch.manual_seed(0)
    net = common.build_net(args.model, data.classes).to(memory_format=torch.channels_last)
    return common.Worker(net, data, args, 60), data, args


def play(worker, client, weights, round_=1, method=fedavg):
    """The Upload of one client's round."""
    batches = worker.round(client, {"round": round_}, weights, 1.0, method.local_update)
    while True:
        try:
            next(batches)
        except StopIteration as stop:
            return stop.value


def test_batches_of_a_round():
    def sizes(n, *argv, bn=False):
        return common.batch_sizes(n, flags("--batch-size", "10", *argv), bn)

    assert sizes(25, "--epochs", "2") == [10, 10, 5, 10, 10, 5]
    assert sizes(21) == [10, 10, 1] and sizes(21, bn=True) == [
        10,
        10,
    ]  # batch norm needs two samples
    assert (
        sizes(4) == [4] and sizes(4, "--drop-last") == [] and sizes(25, "--drop-last") == [10, 10]
    )
    assert sizes(25, "--local-steps", "5") == [10, 10, 5, 10, 10] and sizes(
        4, "--local-steps", "3"
    ) == [4, 4, 4]


def test_each_epoch_visits_every_sample_once():
    worker, _, _ = tiny_worker("--batch-size", "10", "--epochs", "3")
    index = np.arange(100, 125)
    table = worker._draw(index, 9, common.keyed("test"))["index"].reshape(3, 30)
    assert all(sorted(epoch[:25]) == index.tolist() for epoch in table) and not np.array_equal(
        table[0], table[1]
    )
    worker, _, _ = tiny_worker("--batch-size", "10", "--drop-last", "--epochs", "3")
    table = worker._draw(index, 6, common.keyed("test"))["index"].reshape(3, 20)
    assert all(len(set(epoch)) == 20 and set(epoch) <= set(index) for epoch in table)


@pytest.mark.parametrize("model", ["cnn", "resnet56"])
def test_worker_equals_a_plain_loop(model):
    """One client's round against torch.optim.SGD on the same batches, with short batches, clipping, decay and a second round."""
    worker, data, args = tiny_worker(
        "--model", model, "--epochs", "2", "--clip", "0.5", "--lr-decay", "0.5", "--augment", "crop"
    )
    client, net = (
        common.Client(3, np.arange(50, 90), {}),
        common.build_net(model, 62).to(memory_format=torch.channels_last),
    )
    for round_ in (1, 2):
        weights = {k: v.clone() for k, v in net.state_dict().items()}
        upload = play(worker, client, weights, round_)
        opt = torch.optim.SGD(
            net.parameters(),
            0.01 * 0.5 ** (round_ - 1),
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
        )
        tables = worker._draw(client.index, 4, common.keyed("batches", 0, round_, 3))
        losses = []
        net.train()
        for i, size in enumerate([32, 8, 32, 8]):
            index, crop = (torch.from_numpy(tables[k][i, :size]) for k in ("index", "crop"))
            x = data.normalise(common.apply_augment(data.x[index], {"crop": crop})).contiguous(
                memory_format=torch.channels_last
            )
            loss = F.cross_entropy(net(x), data.y[index])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            losses.append(loss.item() * size)
        assert same(upload.weights, net.state_dict())
        assert (
            upload.loss.item() == pytest.approx(sum(losses) / 80, abs=1e-6)
            and upload.samples == 80
            and upload.finite
        )


def test_persistent_momentum():
    """--persist-opt continues with the momentum of the client's last round, one-step rounds being one long run then."""

    def two_rounds(*argv):
        worker, _, _ = tiny_worker("--local-steps", "1", *argv)
        client = common.Client(0, np.arange(32), {})
        first = play(worker, client, worker.net.state_dict())
        return play(worker, client, first.weights, 2).weights, client.state

    fresh, state = two_rounds()
    kept, kept_state = two_rounds("--persist-opt")
    assert not same(fresh, kept) and state == {} and len(kept_state["momentum"]) == 14


def test_pins_and_frozen_networks_stay_where_they_are():
    worker, _, _ = tiny_worker()
    a, (b, c) = worker.pin("a", 2.0), worker.pin("bc", [torch.ones(2), torch.zeros(3)])
    glob = worker.frozen("glob")
    with torch.no_grad():
        for p in worker.net.parameters():
            p.add_(1)
    old = {k: v.clone() for k, v in glob.state_dict().items()}
    assert (
        worker.pin("a", 3.0) is a
        and a == 3
        and worker.pin("bc", [b + 1, c])[0] is b
        and b.tolist() == [2, 2]
    )
    assert (
        not glob.training
        and not any(p.requires_grad for p in glob.parameters())
        and not same(old, worker.net.state_dict())
    )
    assert worker.frozen("glob") is glob and same(glob.state_dict(), worker.net.state_dict())
    assert worker.frozen("glob", old) is glob and same(glob.state_dict(), old)


def test_average_by_hand():
    """Parameters and batch-norm statistics with weights 1/4 and 3/4, against three lines of numpy."""
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    rng = np.random.default_rng(0)
    clients = [
        {
            k: torch.from_numpy(rng.normal(size=v.shape).astype(np.float32))
            if v.is_floating_point()
            else v + i
            for k, v in net.state_dict().items()
        }
        for i in (4, 7)
    ]
    uploads = [
        common.Upload(None, alpha, weights, {}, None, None, 0)
        for alpha, weights in zip((0.25, 0.75), clients)
    ]
    common.average(net, iter(uploads), {}, flags())
    for k, v in net.state_dict().items():
        expected = (
            0.25 * clients[0][k].numpy() + 0.75 * clients[1][k].numpy()
            if v.is_floating_point()
            else 7
        )
        assert np.allclose(v.numpy(), expected, atol=1e-7), k


def test_evaluate_counts_the_whole_test_set():
    data, net = common.glyphs(), common.build_net("cnn", 62)
    accuracy, loss = common.evaluate(net, data, flags())
    out = torch.cat([net(data.normalise(x[None])) for x in data.x_test])
    assert accuracy == pytest.approx(100 * (out.argmax(1) == data.y_test).double().mean().item())
    assert loss == pytest.approx(F.cross_entropy(out, data.y_test).item(), rel=1e-5)


def test_summary():
    """EMA of 10, 20 with factor 0.9: (0.9 * 1 + 2) / 0.19 by hand. Last five of 1..6: mean 4, population deviation sqrt(2)."""
    assert common.summary([10, 20])["acc_ema"] == pytest.approx(2.9 / 0.19)
    assert common.summary([1, 2, 3, 4, 5, 6]) | {"acc_ema": 0} == {
        "acc_ema": 0,
        "acc_last5_mean": 4,
        "acc_last5_std": pytest.approx(math.sqrt(2)),
        "best_acc": 6,
    }
    assert common.summary([]) == {
        "acc_ema": None,
        "acc_last5_mean": None,
        "acc_last5_std": None,
        "best_acc": None,
    }


def test_memory_follows_the_sampled_clients(tmp_path):
    """Client state exists for clients that took part, and for no other."""
    out = tmp_path / "run"
    _, rows = fedavg.main(
        [
            *TINY,
            "--clients",
            "12",
            "--sample",
            "0.25",
            "--persist-opt",
            "--partition",
            "iid",
            "--out",
            str(out),
        ]
    )
    seen = set(rows[0]["clients"]) | set(rows[1]["clients"])
    assert len(rows[0]["clients"]) == 3 and rows[0]["clients"] != rows[1]["clients"]
    assert {int(p.name.split("-")[0]) for p in (out / "states").iterdir()} == seen and len(
        list((out / "states").iterdir())
    ) == len(seen)


def test_metrics(tmp_path):
    out = tmp_path / "run"
    net, rows = fedavg.main(
        [
            *TINY,
            "--out",
            str(out),
            "--lr-decay",
            "0.5",
            "--eval-every",
            "2",
            "--rounds",
            "3",
            "--save-clients",
        ]
    )
    assert rows == [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3] and [row["lr"] for row in rows] == [
        0.01,
        0.005,
        0.0025,
    ]
    assert (
        rows[0]["test_acc"] is None
        and rows[1]["test_acc"] is not None
        and rows[2]["test_acc"] is not None
    )
    size = common.nbytes(net.state_dict())
    for row in rows:
        assert (
            row["samples"] == 600
            and row["clients"] == [0, 1, 2, 3]
            and row["bytes_down"] == row["bytes_up"] == 4 * size
        )
        assert (
            row["samples_per_s"] == pytest.approx(600 / row["seconds"]["train"])
            and row["peak_memory"] > 1e6
        )
        assert (
            set(row["seconds"]) == {"train", "aggregate", "evaluate", "other"}
            and 3 < row["train_loss"] < 5
        )
    assert rows[2]["best_acc"] == max(rows[1]["test_acc"], rows[2]["test_acc"])
    assert same(common.load(out / "model.pt"), net.state_dict())
    clients = [common.load(out / "clients" / f"{k}.pt") for k in range(4)]
    sizes = np.array([len(p) for p in common.partition(common.glyphs(), flags())])
    expected = sum(n / 600 * c["classifier.weight"].double() for n, c in zip(sizes, clients))
    assert torch.allclose(
        net[-1].weight.double(), expected, atol=1e-6
    )  # what was saved is what was averaged, by sample counts


def test_uniform_weights_skip_clients_without_training(tmp_path):
    """--drop-last with batches larger than the smallest client: it is not trained and has no weight, whatever the weighting."""
    sizes = np.array([len(p) for p in common.partition(common.glyphs(), flags())])
    size, seen = int(sizes.min()) + 1, []

    def aggregate(net, uploads, server, args):
        uploads = list(uploads)
        seen.extend(u.weight for u in uploads)
        common.average(net, uploads, server, args)

    common.run(
        flags(
            "--out",
            str(tmp_path / "run"),
            "--drop-last",
            "--batch-size",
            str(size),
            "--weighting",
            "uniform",
        ),
        fedavg.local_update,
        aggregate,
    )
    assert seen[:4] == [pytest.approx((n >= size) / (sizes >= size).sum()) for n in sizes]


def test_bf16_is_for_blocks_alone():
    """The logits, and what a method computes from them, are fp32; gradients outside of blocks are exact."""
    worker, data, _ = tiny_worker("--precision", "bf16")
    plain, x = common.build_net("cnn", 62), data.normalise(data.x[:8])
    plain.load_state_dict(worker.net.state_dict())
    out = worker.net(x)
    assert (
        out.dtype == torch.float32
        and torch.equal(out, out.bfloat16().float())
        and torch.allclose(out, plain(x), atol=0.02)
    )
    assert (
        worker.net[:-1](x).dtype
        == common.at_width(worker.net[1], worker.net[0](x)[:, :8], 0.25).dtype
        == torch.float32
    )
    frozen = worker.frozen("glob")
    assert torch.equal(frozen(x), out) and frozen[0].forward is not worker.net[0].forward
    seen = []
    worker._step(
        lambda x, y: seen.append(torch.is_autocast_enabled("cpu")) or worker.net(x).mean(), 8
    )
    assert seen == [False]


def test_device_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [flags("--device", d).device for d in ("auto", "cuda", "cuda:1", "cpu")] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cpu",
    ]
    assert torch.device(flags().device).index == 0


@pytest.mark.parametrize(
    "argv, shares",
    [((), None), (("--weighting", "uniform"), [1 / 4] * 4), (("--drop-last",), "batches")],
)
def test_weights_of_the_average(tmp_path, argv, shares):
    seen = []

    def aggregate(net, uploads, server, args):
        uploads = list(uploads)
        seen.append([u.weight for u in uploads])
        common.average(net, uploads, server, args)

    common.run(flags("--out", str(tmp_path / "run"), *argv), fedavg.local_update, aggregate)
    sizes = np.array([len(p) for p in common.partition(common.glyphs(), flags())])
    sizes = sizes // 32 if shares == "batches" else sizes
    assert seen[0] == pytest.approx(shares if isinstance(shares, list) else sizes / sizes.sum())


def test_keyed_randomness():
    draw = lambda *key: common.keyed(*key).integers(1 << 30, size=3).tolist()  # noqa: E731
    assert (
        draw("a", 1, 2) == draw("a", 1, 2)
        and len({str(draw(*key)) for key in [("a", 1, 2), ("b", 1, 2), ("a", 2, 1), ("a", 1)]}) == 4
    )


def test_aliases():
    args = common.flags("x", "x").parse_args(
        "--client_number 64 --client_sample .25 --comm_round=7 --partition_alpha 0.1 --batch_size 8 --wd 0 "
        "--image_size 16".split()
    )
    assert (
        args.clients,
        args.sample,
        args.rounds,
        args.alpha,
        args.batch_size,
        args.weight_decay,
        args.image_size,
    ) == (64, 0.25, 7, 0.1, 8, 0, 16)
    args = common.flags("x", "x").parse_args("--n_parties 5 --sample_fraction .5 --beta 2".split())
    assert (args.clients, args.sample, args.alpha) == (5, 0.5, 2)
    args = common.flags("x", "x").parse_args(
        "--num_of_clients 6 --participation_rate .3 --dirichlet_alpha 3".split()
    )
    assert (args.clients, args.sample, args.alpha) == (6, 0.3, 3)


def test_defaults_are_fedaligns_main_setting():
    args = vars(common.flags("x", "x").parse_args([]))
    expected = dict(
        dataset="cifar100",
        model="resnet56",
        partition="dirichlet",
        alpha=0.5,
        clients=16,
        sample=1,
        rounds=25,
        epochs=20,
        batch_size=64,
        lr=0.01,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        clip=0,
        weighting="samples",
        persist_opt=False,
        drop_last=False,
    )
    assert {k: args[k] for k in expected} == expected and isinstance(
        common.flags("x", "x"), argparse.ArgumentParser
    )
    assert pathlib.Path(common.__file__).name == "common.py"
