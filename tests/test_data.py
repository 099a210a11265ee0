"""Data sets in their own formats on disk, the networks and partitions that go with them."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, same
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as tv

import common
import fedavg
import fedmlb


def flags(*argv):
    return common.flags("test", "test").parse_args([*TINY, *argv])


def refused(capsys, argv, *words):
    """One line on stderr with all the words, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        fedavg.main([*TINY, *argv])
    out, err = capsys.readouterr()
    assert (
        stop.value.code == 2
        and len(err.splitlines()) == 1
        and out == ""
        and all(word in err for word in words)
    ), err


# --- FEMNIST: LEAF's JSON


def leaf_user(rng, n, classes=62):
    return {
        "x": (rng.integers(256, size=(n, 784)) / 255).tolist(),
        "y": rng.integers(classes, size=n).tolist(),
    }


def make_femnist(root, users=(12, 3, 7, 20, 5, 9)):
    """Two shards of training users and one of test users, a third as many samples each; f3_12 is in the test shard alone."""
    rng, names = np.random.default_rng(0), [f"f{i:02d}_{n}" for i, n in enumerate(users)]
    made = {}
    for part, shards in (("train", [names[:4], names[4:]]), ("test", [[*names, "f99_12"]])):
        (root / "femnist" / part).mkdir(parents=True, exist_ok=True)
        for i, shard in enumerate(shards):
            data = {
                name: leaf_user(rng, max(1, int(name[4:]) // (1 if part == "train" else 3)))
                for name in shard
            }
            counts = [len(data[name]["y"]) for name in shard]
            (root / "femnist" / part / f"all_data_{i}_{part}.json").write_text(
                json.dumps({"users": shard, "num_samples": counts, "user_data": data})
            )
            made[part] = {**made.get(part, {}), **data}
    return made


def test_femnist(tmp_path, monkeypatch):
    made = make_femnist(tmp_path)
    data = common.femnist(tmp_path / "femnist")
    assert (
        data.x.shape == (56, 1, 28, 28)
        and data.classes == 62
        and len(data.y_test) == len(data.writers_test)
    )
    for user, name in enumerate(sorted(made["test"])):  # numbered in the order of their names
        for part, x, y, writers in (
            ("train", data.x, data.y, data.writers),
            ("test", data.x_test, data.y_test, data.writers_test),
        ):
            expected = made[part].get(name, {"x": np.zeros((0, 784)), "y": []})
            assert y[writers == user].tolist() == expected["y"]
            assert np.allclose(
                data.normalise(x[writers == user]).numpy().reshape(-1, 784),
                2 * np.reshape(expected["x"], (-1, 784)) - 1,
                atol=1e-6,
            )
    (path,) = (tmp_path / "femnist" / "test").glob("*.json")
    shard = json.loads(path.read_text())  # a user may have nothing
    (
        shard["num_samples"].append(0),
        shard["users"].append("nobody"),
        shard["user_data"].update(nobody={"x": [], "y": []}),
    )
    path.write_text(json.dumps(shard))
    assert torch.equal(common.femnist(tmp_path / "femnist").x_test, data.x_test)
    monkeypatch.setattr(common, "_shards", None)  # read once
    assert torch.equal(common.femnist(tmp_path / "femnist").x, data.x)


def test_writers_are_grouped_and_tested_together(tmp_path):
    """Users are dealt to clients whole; the test set is that of the chosen users; IID rows deal the same samples."""
    make_femnist(tmp_path)
    argv = ["--dataset", "femnist", "--data-dir", str(tmp_path), "--clients", "2", "--users", "5"]
    data = common.load_data(flags(*argv, "--partition", "natural"))
    parts = common.partition(data, flags(*argv, "--partition", "natural"))
    groups = [set(data.writers[p]) for p in parts]
    assert sorted(map(len, groups)) == [2, 3] and not groups[0] & groups[1]
    assert all(np.isin(data.writers, list(g)).sum() == len(p) for g, p in zip(groups, parts))
    assert set(data.writers_test) == groups[0] | groups[1] and len(data.x_test) == len(
        data.writers_test
    )
    mixed = common.partition(data, flags(*argv, "--partition", "natural-iid"))
    assert np.array_equal(np.sort(np.concatenate(mixed)), np.sort(np.concatenate(parts)))
    assert abs(len(mixed[0]) - len(mixed[1])) <= 1 and set(data.writers[mixed[0]]) & set(
        data.writers[mixed[1]]
    )
    with pytest.raises(common.UserError, match="--users 7: the data set has 6 writers"):
        common.natural_groups(data.writers, 2, 0, 7)


def cut(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


def edit(change):
    def apply(path):
        shard = json.loads(path.read_text())
        change(shard, shard["users"][1])
        path.write_text(json.dumps(shard))

    return apply


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, ["line 1, column", "cut short"]),
        (
            lambda p: p.write_bytes(p.read_bytes().replace(b'", "f01', b'",\n "\xff01', 1)),
            ["line 2", "UTF-8"],
        ),
        (lambda p: p.write_text("[" * 99999), ["all_data_0"]),
        (edit(lambda s, u: s.update(users=[], num_samples=[])), ["no samples"]),
        (edit(lambda s, u: s.update(num_samples=5)), ["not a shard"]),
        (edit(lambda s, u: s["user_data"][u]["y"].__setitem__(0, "a")), ["f01_3"]),
        (lambda p: p.write_text("[1, 2]"), ["not a shard"]),
        (edit(lambda s, u: s["user_data"].pop(u)), ["not a shard", "f01_3"]),
        (edit(lambda s, u: s["user_data"][u]["x"].pop()), ["f01_3", "(2, 3)", "3"]),
        (edit(lambda s, u: s["user_data"][u]["x"][1].pop()), ["f01_3"]),
        (edit(lambda s, u: s["user_data"][u].update(x=[[0.5] * 100] * 3)), ["f01_3", "784"]),
        (edit(lambda s, u: s["user_data"][u]["y"].__setitem__(0, 62)), ["f01_3", "0 to 61"]),
        (edit(lambda s, u: s["num_samples"].pop()), ["num_samples"]),
        (edit(lambda s, u: s["user_data"][u]["x"][0].__setitem__(5, 255)), ["f01_3", "0 to 1"]),
        (lambda p: p.unlink(), ["no *.json", "LEAF", "femnist"]),
    ],
)
def test_damaged_shards(tmp_path, capsys, damage, words):
    make_femnist(tmp_path, users=(2, 3, 1, 2))
    (tmp_path / "femnist" / "train" / "all_data_1_train.json").unlink()
    path = tmp_path / "femnist" / "train" / "all_data_0_train.json"
    damage(path)
    where = path if path.exists() and "no samples" not in words else path.parent
    refused(capsys, ["--dataset", "femnist", "--data-dir", str(tmp_path)], str(where), *words)


def test_missing_data_say_what_to_do(tmp_path, capsys):
    refused(
        capsys,
        ["--dataset", "femnist", "--data-dir", str(tmp_path)],
        "femnist/train",
        "preprocess.sh",
        "copy both",
    )
    refused(
        capsys,
        ["--dataset", "tiny-imagenet", "--data-dir", str(tmp_path)],
        "tiny-imagenet-200/wnids.txt",
        "unzip http://cs231n",
    )


# --- images


def make_tiny_imagenet(root, wnids=("n03", "n01", "n02"), size=64):
    rng, root = np.random.default_rng(0), root / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate(wnids):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for j in range(3):
            Image.fromarray(rng.integers(256, size=(size, size, 3)).astype(np.uint8)).save(
                root / "train" / wnid / "images" / f"{wnid}_{j}.JPEG"
            )
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
        Image.fromarray(np.full((size, size), 50 * i, np.uint8)).save(
            root / "val" / "images" / f"val_{i}.JPEG"
        )  # grey ones exist
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def test_tiny_imagenet(tmp_path, monkeypatch):
    root = make_tiny_imagenet(tmp_path)
    args = flags("--dataset", "tiny-imagenet", "--data-dir", str(tmp_path))
    data = common.load_data(args)
    assert (
        data.x.shape == (9, 3, 64, 64)
        and data.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        and data.classes == 3
    )
    assert torch.equal(
        data.x[7],
        torch.from_numpy(np.array(Image.open(root / "train/n03/images/n03_1.JPEG"))).permute(
            2, 0, 1
        ),
    )
    assert data.y_test.tolist() == [2, 0, 1] and [
        round(v) for v in data.x_test.double().mean((1, 2, 3)).tolist()
    ] == [0, 50, 100]
    assert data.mean.flatten().tolist() == pytest.approx(
        [0.4802, 0.4481, 0.3975]
    ) and data.std.flatten().tolist() == pytest.approx([0.2770, 0.2691, 0.2821])
    monkeypatch.setattr(common, "_decode", None)  # decoded once
    half = common.load_data(
        flags(
            "--dataset",
            "tiny-imagenet",
            "--data-dir",
            str(tmp_path),
            "--normalise",
            "half",
            "--image-size",
            "32",
        )
    )
    assert half.x.shape == (9, 3, 32, 32) and half.normalise(
        torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    )[:, 0, 0, 0].tolist() == [-1, 1]
    cifar = common.load_data(flags("--normalise", "cifar10"))
    assert cifar.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    assert cifar.std.flatten().tolist() == pytest.approx([0.2470, 0.2435, 0.2616])


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            lambda r: [p.unlink() for p in (r / "train/n02/images").iterdir()],
            ["train/n02/images", "no images"],
        ),
        (
            lambda r: (r / "val/val_annotations.txt").write_text(
                "val_0.JPEG\tn03\t0\t0\t1\t1\nval_1.JPEG\n"
            ),
            ["val_annotations.txt, line 2", "''"],
        ),
        (
            lambda r: (r / "val/val_annotations.txt").write_text(
                "val_0.JPEG\tn03\nval_1.JPEG\tn01\n"
            ),
            ["val_annotations.txt", "no image of class n02"],
        ),
        (
            lambda r: (r / "val/images/val_1.JPEG").unlink(),
            ["val_annotations.txt, line 2", "val_1.JPEG"],
        ),
        (
            lambda r: (r / "val/val_annotations.txt").write_bytes(b"\xff\xfe\x00"),
            ["val_annotations.txt, line 1", "UTF-8"],
        ),
        (
            lambda r: Image.new("RGB", (48, 64)).save(r / "train/n01/images/n01_1.JPEG"),
            ["n01_1.JPEG", "48x64", "64x64"],
        ),
        (
            lambda r: (r / "train/n01/images/n01_1.JPEG").write_bytes(b"no jpeg"),
            ["n01_1.JPEG", "not a readable image"],
        ),
    ],
)
def test_damaged_tiny_imagenet(tmp_path, capsys, damage, words):
    damage(make_tiny_imagenet(tmp_path))
    refused(capsys, ["--dataset", "tiny-imagenet", "--data-dir", str(tmp_path)], *words)


def make_imagenet(root, monkeypatch, classes=9):
    """Folders of nine classes, of which three are drawn, with four of their six images."""
    monkeypatch.setattr(common, "IMAGENET", (classes, 3, 4))
    rng = np.random.default_rng(0)
    for i in range(classes):
        for part, count in (("train", 6), ("val", 2)):
            (root / "imagenet" / part / f"n{i:08d}").mkdir(parents=True)
            for j in range(count):
                pixels = np.kron(rng.integers(256, size=(3, 4, 3)), np.ones((16, 16, 1))).astype(
                    np.uint8
                )  # 64 x 48 pixels, in squares
                Image.fromarray(pixels).save(
                    root / "imagenet" / part / f"n{i:08d}" / f"{j}.JPEG", format="PNG"
                )
    return root / "imagenet"


def test_imagenet_200_classes():
    """The first classes that FedAlign's authors list, by their place in the order of all 1000: n01729322, n01514668, n04550184, ..."""
    assert np.random.RandomState(1993).choice(np.arange(1000), 200, replace=False)[:5].tolist() == [
        54,
        7,
        894,
        512,
        126,
    ]
    assert common.IMAGENET == (1000, 200, 500)


def test_imagenet_200(tmp_path, monkeypatch):
    root = make_imagenet(tmp_path, monkeypatch)
    argv = [
        "--dataset",
        "imagenet-200",
        "--data-dir",
        str(tmp_path),
        "--image-size",
        "28",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--batch-size",
        "4",
    ]
    data = common.load_data(flags(*argv))
    rng = np.random.RandomState(1993)
    chosen = rng.choice([f"n{i:08d}" for i in range(9)], 3, replace=False).tolist()
    assert (
        data.classes == 3
        and len(data.paths) == len(data.y) == 12
        and data.x_test.shape == (6, 3, 28, 28)
        and data.x.shape == (0, 3, 28, 28)
    )
    assert [p.split("/")[-2] for p in data.paths] == np.repeat(chosen, 4).tolist() and len(
        set(data.paths)
    ) == 12
    assert (
        data.y.tolist() == np.repeat([sorted(chosen).index(c) for c in chosen], 4).tolist()
        and data.image_size == 28
    )

    def centre(path):  # 64 x 48 to 42 x 32, then the central 28 x 28
        return torch.from_numpy(
            np.array(tv.center_crop(tv.resize(Image.open(path), 32), 28))
        ).permute(2, 0, 1)

    assert torch.equal(data.x_test[3], centre(root / "val" / chosen[1] / "1.JPEG"))
    worker = common.Worker(common.build_net("cnn", 3, 3, 28), data, flags(*argv), 8)
    client = common.Client(0, np.array([7, 2, 11]), {})
    ((x, y),) = worker.batches(client)
    assert (
        torch.equal(x, data.normalise(torch.stack([centre(data.paths[i]) for i in client.index])))
        and y.tolist() == data.y[client.index].tolist()
    )
    # two epochs in batches of 2 and 1 at --batch-size 2: each image by its own draws, which follow seed, round and client
    args = flags(*argv, "--batch-size", "2", "--epochs", "2")
    worker, seen = common.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8), []

    def local_update(worker, client, server, args):
        def step(x, y):
            seen.append((x.clone(), y.clone()))
            return worker.net(x).sum() * 0

        yield step

    list(worker.round(client, {"round": 2}, worker.net.state_dict(), 1.0, local_update))
    tables = worker._draw(client.index, 4, common.keyed("batches", args.seed, 2, 0))
    crop = [
        transforms.RandomResizedCrop(28),
        transforms.ColorJitter(0.4, 0.4, 0.4),
        transforms.RandomHorizontalFlip(),
    ]
    assert [len(x) for x, _ in seen] == [2, 1, 2, 1]
    for row, (x, y) in enumerate(seen):
        for i in range(len(x)):
            image = Image.open(data.paths[tables["index"][row, i]])
            torch.manual_seed(tables["seed"][row, i])
            for transform in crop:
                image = transform(image)
            image = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
            assert (
                torch.equal(x[i : i + 1], data.normalise(image))
                and y[i] == data.y[tables["index"][row, i]]
            )


@pytest.mark.parametrize(
    "script, more",
    [("fedavg", ["--workers", "2"]), ("rfedavg", []), ("fedavg", ["--augment", "none"])],
)
def test_training_on_streamed_images(tmp_path, monkeypatch, script, more):
    make_imagenet(tmp_path, monkeypatch)
    argv = [
        *TINY,
        "--dataset",
        "imagenet-200",
        "--data-dir",
        str(tmp_path),
        "--image-size",
        "24",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--batch-size",
        "4",
        *more,
    ]
    run = importlib.import_module(script).main
    net, rows = run([*argv, "--out", str(tmp_path / "a")])
    run([*argv, "--rounds", "1", "--out", str(tmp_path / "b")])
    again, _ = run(["--out", str(tmp_path / "b"), "--resume", "--rounds", "2", "--quiet"])
    assert rows[1]["samples"] == 12 and same(net.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            lambda r: [p.write_bytes(b"no") for p in r.glob("train/*/*")],
            ["train/n", "not a readable image"],
        ),
        (lambda r: [p.unlink() for p in r.glob("val/*/*")], ["val/n", "no images"]),
        (lambda r: [p.unlink() for p in r.glob("train/*/[0-2]*")], ["3 images", "4"]),
        (
            lambda r: (r / "train").rename(r / "moved"),
            ["imagenet/train", "0 folders", "image-net.org"],
        ),
    ],
)
def test_damaged_imagenet(tmp_path, monkeypatch, capsys, damage, words):
    damage(make_imagenet(tmp_path, monkeypatch))
    argv = [
        "--dataset",
        "imagenet-200",
        "--data-dir",
        str(tmp_path),
        "--image-size",
        "28",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    refused(capsys, argv, *words)
    refused(capsys, [*argv, "--augment", "crop"], "--augment", "imagenet-200")


def test_emnist_is_turned_upright(monkeypatch):
    from torchvision import datasets

    x = torch.arange(3 * 28 * 28).view(3, 28, 28).to(torch.uint8)

    def fake(root, train, download, split):
        assert download and split == "byclass"
        return type(
            "Fake",
            (),
            {"data": x, "targets": torch.tensor([0, 61, 9]), "classes": list(common.CHARACTERS)},
        )

    monkeypatch.setattr(datasets, "EMNIST", fake)
    data = common.load_data(flags("--dataset", "emnist"))
    assert (
        data.x.shape == (3, 1, 28, 28) and data.classes == 62 and data.x[1, 0, 2, 20] == x[1, 20, 2]
    )
    assert (
        common.resolve_augment(flags("--dataset", "emnist"))
        == {}
        == common.resolve_augment(flags("--dataset", "femnist"))
    )


# --- text


def make_sent140(root, users=(("ann", 12), ("bob", 8), ("cy", 5), ("dee", 1)), seed=0):
    rng, rows = np.random.default_rng(seed), []
    for user, n in users:
        rows += [
            (
                user,
                label,
                f"{user} is {'glad' if label else 'sad'} today, {' '.join(rng.choice(list('pqrstuvw'), rng.integers(1, 6)))}!",
            )
            for label in rng.integers(2, size=n)
        ]
    (root / "sent140").mkdir(parents=True, exist_ok=True)
    lines = [
        f'"{4 * label}","{i}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","{user}","{text}"\n'
        for i, (user, label, text) in enumerate(rows)
    ]
    (root / "sent140" / "tweets.csv").write_text("".join(lines), encoding="latin-1")
    return rows


def text_flags(root, *argv):
    return [
        "--dataset",
        "sent140",
        "--data-dir",
        str(root),
        "--model",
        "lstm",
        "--vectors",
        "random",
        "--batch-size",
        "5",
        *argv,
    ]


def test_tokens():
    """By the rules of torchtext's basic_english, worked out by hand."""
    assert common.tokens('Isn\'t "this" GREAT?! yes: no;maybe (a,b)... <br />x') == [
        "isn",
        "'",
        "t",
        "this",
        "great",
        "?",
        "!",
        "yes",
        "no",
        "maybe",
        "(",
        "a",
        ",",
        "b",
        ")",
        ".",
        ".",
        ".",
        "x",
    ]
    assert common.tokens(" \t") == []


def test_sent140(tmp_path):
    """The two most active users; a tenth of their 20 tweets is the test set; words by frequency, then alphabet, of training tweets."""
    rows = make_sent140(tmp_path)
    args = flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "2"))
    data = common.load_data(args)
    assert (len(data.x), len(data.x_test), data.classes, data.x.dtype) == (18, 2, 2, torch.int16)

    def read(x):
        return [
            " ".join({0: "", 1: "?"}.get(w) if w < 2 else data.words[w - 2] for w in row).strip()
            for row in x.tolist()
        ]

    made = {(" ".join(common.tokens(text)), label, user) for user, label, text in rows[:20]}
    names = np.array(["ann", "bob"])
    found = list(zip(read(data.x), data.y.tolist(), names[data.writers])) + list(
        zip(read(data.x_test), data.y_test.tolist(), names[data.writers_test])
    )
    assert all(
        any(
            m[1:] == f[1:] and all(a in ("?", b) for a, b in zip(f[0].split(), m[0].split()))
            for m in made
        )
        for f in found
    )
    counts = {w: sum(line.split().count(w) for line in read(data.x)) for w in data.words}
    assert (
        data.words == sorted(counts, key=lambda w: (-counts[w], w))
        and min(counts.values()) > 0
        and "cy" not in counts
    )
    few = common.sent140(tmp_path / "sent140", args, vocabulary=6)
    assert few.words == data.words[:4] and few.x.max() == 5 and (few.x == 1).any()


def test_sent140_leak(tmp_path, capsys):
    """With the authors' leak clients hold all their tweets, the test ones too; the words are still of training tweets alone."""
    make_sent140(tmp_path)
    argv = text_flags(tmp_path, "--partition", "natural", "--clients", "2")
    sound, leaky = common.load_data(flags(*argv)), common.load_data(flags(*argv, "--leak"))
    rows = [
        {tuple(row) for row in x.tolist()} for x in (sound.x, sound.x_test, leaky.x, leaky.x_test)
    ]
    assert (
        len(leaky.x) == 20
        and rows[2] == rows[0] | rows[1]
        and rows[3] == rows[1]
        and leaky.words == sound.words
    )
    assert len(sound.x) + len(sound.x_test) == 20
    refused(capsys, [*argv[:-4], "--partition", "iid", "--leak"], "--leak", "natural")


def test_sent140_partitions(tmp_path):
    make_sent140(tmp_path)
    whole = common.load_data(
        flags(*text_flags(tmp_path, "--partition", "similarity", "--clients", "2"))
    )
    assert len(whole.x) + len(whole.x_test) == 26  # all users
    args = flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "2", "--users", "3"))
    data = common.load_data(args)
    parts = common.partition(data, args)
    assert (
        sorted(len(set(data.writers[p])) for p in parts) == [1, 2]
        and sum(map(len, parts)) == len(data.x) == 22
    )
    for seed in range(
        20
    ):  # in about two of which the only tweet of the last user would be a test one
        data = common.load_data(
            flags(
                *text_flags(
                    tmp_path, "--partition", "natural", "--clients", "4", "--data-seed", str(seed)
                )
            )
        )
        assert (
            set(data.writers) == {0, 1, 2, 3}
            and len(data.x) in (23, 24)
            and len(data.x) + len(data.x_test) == 26
        )


def test_sent140_of_leaf(tmp_path):
    def shard(users):
        data = {
            u: {
                "x": [
                    [str(i), "date", "NO_QUERY", u, f"{u} says \u00e9{i}", "training"]
                    for i in range(n)
                ],
                "y": [i % 2 for i in range(n)],
            }
            for u, n in users.items()
        }
        return json.dumps(
            {
                "users": list(data),
                "num_samples": [len(d["y"]) for d in data.values()],
                "user_data": data,
            }
        )

    for part, users in (
        ("train", {"ann": 5, "bob": 3}),
        ("test", {"ann": 1, "bob": 2, "cat": 9}),
    ):  # cat cannot train
        (tmp_path / "sent140" / part).mkdir(parents=True)
        (tmp_path / "sent140" / part / "all.json").write_text(shard(users))
    data = common.load_data(
        flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "2"))
    )
    assert (
        data.y.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
        and data.writers.tolist() == [0] * 5 + [1] * 3
        and data.writers_test.tolist() == [0, 1, 1]
    )
    assert [[data.words[w - 2] for w in row] for row in data.x.tolist()][6] == [
        "bob",
        "says",
        "\u00e91",
    ]


@pytest.mark.parametrize(
    "line, words",
    [
        (b'"4","1","date","NO_QUERY","ann"\n', ["line 5", "5 columns"]),
        (b'"2","1","d","q","u","text"\n', ["line 5", "'2'"]),
        (b'"4","1","d","q","u","cut', ["line 5", "end of data"]),
        (b'"4","1","d","q","u","a"b"\n', ["line 5"]),
        (b"\n", ["line 5", "0 columns"]),
    ],
)
def test_damaged_csv(tmp_path, capsys, line, words):
    make_sent140(tmp_path)
    path = tmp_path / "sent140" / "tweets.csv"
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(good[:4]) + line + (b"".join(good[5:]) if line.endswith(b"\n") else b"")
    )
    refused(capsys, text_flags(tmp_path), f"{path}, line", *words)
    path.unlink()
    refused(
        capsys,
        text_flags(tmp_path),
        "no *.csv",
        "trainingandtestdata.zip",
        "training.1600000.processed.noemoticon.csv",
    )


def test_word_vectors(tmp_path):
    (tmp_path / "glove.txt").write_text("the 1 2.5 -3\nb\u00e9 4e-1 0 1\nsad 7 8 9\n")
    vectors = common.word_vectors(str(tmp_path / "glove.txt"), ["sad", "zzz", "the"])
    assert vectors.tolist() == [[0, 0, 0], [0, 0, 0], [7, 8, 9], [0, 0, 0], [1, 2.5, -3]]
    random = common.word_vectors("random", ["a"] * 998)
    assert (
        random.shape == (1000, 300)
        and not random[0].any()
        and random[1:].std() == pytest.approx(0.4, rel=0.01)
    )
    assert torch.equal(random, common.word_vectors("random", ["b"] * 998)) and not torch.equal(
        random, common.word_vectors("random", ["a"] * 998, 1)
    )


@pytest.mark.parametrize(
    "content, words",
    [
        (b"glad 1 2\nsad 3\n", ["line 2", "2 numbers"]),
        (b"glad 1 2\nsad x 2\n", ["line 2", "x"]),
        (b"glad 1 2\ns\xff 1 2\n", ["line 2", "utf-8"]),
        (b"glad 1 2\nsad nan 1\n", ["line 2", "finite"]),
        (b"qqq 1 2\n", ["none of"]),
        (b"", ["none of"]),
        (b"glad\n", ["line 1"]),
        (None, ["no such file"]),
    ],
)
def test_damaged_vectors(tmp_path, capsys, content, words):
    make_sent140(tmp_path)
    if content is not None:
        (tmp_path / "glove.txt").write_bytes(content)
    refused(
        capsys,
        [*text_flags(tmp_path), "--partition", "iid", "--vectors", str(tmp_path / "glove.txt")],
        "--vectors",
        "glove.txt",
        *words,
    )


def test_text_flags(tmp_path, capsys):
    make_sent140(tmp_path)
    argv = text_flags(tmp_path)
    for more, words in (
        (["--model", "cnn", "--vectors", ""], ["--model", "lstm"]),
        (["--dataset", "glyphs"], ["lstm", "sent140"]),
        (["--image-size", "28"], ["--image-size"]),
        (["--augment", "flip"], ["--augment"]),
        (["--normalise", "half"], ["--normalise"]),
        (["--vectors", ""], ["--vectors", "glove.6B.zip"]),
        (["--users", "9"], ["--users"]),
        (["--dataset", "glyphs", "--model", "cnn"], ["--vectors"]),
        (["--partition", "natural", "--users", "3"], ["--users", "--clients"]),
        (["--partition", "natural", "--clients", "9"], ["9", "4 writers"]),
    ):
        refused(capsys, [*argv, *more], *words)


def text_data(*lengths):
    """Texts of those lengths, and their network in float64."""
    rng = np.random.default_rng(0)
    x = torch.zeros(len(lengths), max(lengths) + 3, dtype=torch.int16)
    for row, n in zip(x, lengths):
        row[:n] = torch.from_numpy(rng.integers(1, 12, size=n))
    torch.manual_seed(0)
    net = common.build_net("lstm", 2, 12, 7).double()
    net[0][0].vectors[1:].normal_()
    return x, net


def test_lstm_is_torchs_on_packed_sequences():
    """The network of blocks against nn.LSTM's two layers on packed sequences, forward and gradients; padding makes no difference."""
    x, net = text_data(5, 1, 9, 3)
    packed = torch.nn.LSTM(7, 256, 2, batch_first=True).double()
    names = [
        (f"{kind}_l{layer}", dict(block.lstm.named_parameters())[f"{kind}_l0"])
        for layer, block in enumerate((net[0][1], net[1]))
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    packed.load_state_dict(dict(names))
    embedded = net[0][0].vectors[x.long()]
    _, (h, _) = packed(
        torch.nn.utils.rnn.pack_padded_sequence(
            embedded, (x != 0).sum(1), batch_first=True, enforce_sorted=False
        )
    )
    z = net[:-1](x)
    assert (
        z.shape == (4, 256)
        and torch.allclose(z, h[1], atol=1e-12)
        and torch.equal(net[-1](z), net(x))
        and torch.allclose(net(x[:, :9]), net(x), atol=1e-12)
    )
    net(x).sin().sum().backward()
    net[-1](h[1]).sin().sum().backward()
    for name, p in names:
        assert torch.allclose(p.grad, dict(packed.named_parameters())[name].grad, atol=1e-12), name
    assert net(torch.zeros(1, 4, dtype=torch.int16)).isfinite().all()  # a text without words
    assert net.eval()[1].lstm.training  # cuDNN has no backward pass otherwise


def test_lstm_sizes():
    net = common.build_net("lstm", 2, 3000, 300)
    assert (
        sum(p.numel() for p in net.parameters()) == 1_098_242
        and common.nbytes(net.state_dict()) == 7_992_968
    )
    assert common.nbytes(dict(net.named_parameters())) == 4_392_968 and fedmlb.pathway_cuts(
        net
    ) == [1, 2]
    x = torch.ones(2, 3, dtype=torch.int16)
    assert torch.equal(common.at_width(net, x, 1.0), net(x))
    with pytest.raises(common.UserError, match="LSTM is not defined"):
        common.at_width(net, x, 0.5)


def test_text_is_trimmed_to_the_batch():
    x, _ = text_data(5, 1, 9, 3)
    data = common.Data(x, torch.zeros(4).long(), x, torch.zeros(4).long(), 2, words=["a"])
    assert data.normalise(x).shape == (4, 9) and data.normalise(x[1:2]).shape == (1, 1)
    assert torch.equal(data.normalise(x[[0, 1]]), x[[0, 1], :5]) and data.normalise(
        torch.zeros_like(x)
    ).shape == (4, 1)


TEXT_METHODS = [
    ["fedavg"],
    ["fedprox"],
    ["moon"],
    ["scaffold"],
    ["scaffold", "--option", "1"],
    ["feddyn"],
    ["qfedavg", "--q", "1e-4"],
    ["rfedavg", "--variant", "rfedavg", "--lam", "0.1"],
    ["rfedavg", "--lam", "0.1"],
    ["fedkd"],
    ["fedkd", "--hint", "features"],
    ["fedntd"],
    ["fedgkd"],
    ["fedmlb"],
    ["fedmlb", "--direction", "global-local"],
]


@pytest.mark.parametrize("method", TEXT_METHODS, ids=" ".join)
def test_methods_on_text(tmp_path, method):
    """Three rounds, in which the word vectors stay as they were to the last bit and all else moves; one closure serves all clients."""
    make_sent140(tmp_path)
    argv = [
        *TINY,
        *text_flags(
            tmp_path,
            "--optimizer",
            "rmsprop",
            "--momentum",
            "0",
            "--lr",
            "0.001",
            "--partition",
            "natural",
            "--clients",
            "3",
            "--rounds",
            "3",
            "--workers",
            "1",
            "--persist-opt",
        ),
        *method[1:],
    ]
    script = importlib.import_module(method[0])
    net, rows = script.main([*argv, "--out", str(tmp_path / "run")])
    data = common.load_data(
        flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "3"))
    )
    assert torch.equal(net[0][0].vectors, common.word_vectors("random", data.words))
    assert (
        all(v.isfinite().all() for v in net.state_dict().values())
        and rows[0]["train_loss"] != rows[2]["train_loss"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Worker, "keep_first_step", True)
        again, _ = script.main([*argv, "--out", str(tmp_path / "again")])
    assert same(net.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    "method, words",
    [
        (["mixup"], "words"),
        (["gradaug"], "text"),
        (["fedalign"], "LSTM"),
        (["stochdepth"], "residual"),
    ],
)
def test_methods_that_need_images(tmp_path, capsys, method, words):
    make_sent140(tmp_path)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(method[0]).main(
            [
                *TINY,
                *text_flags(tmp_path, "--clients", "2", "--partition", "iid"),
                "--out",
                str(tmp_path / "run"),
            ]
        )
    err = capsys.readouterr().err
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and words in err


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


@needs_gpu
@pytest.mark.parametrize("method", TEXT_METHODS, ids=" ".join)
def test_text_on_a_gpu(tmp_path, method):
    """As a CUDA graph and without; cuDNN's LSTM within, its frozen copies in eval mode, RMSProp's state restored after capture."""
    make_sent140(tmp_path)
    argv = [
        *TINY,
        *text_flags(
            tmp_path,
            "--optimizer",
            "rmsprop",
            "--lr",
            "0.0001",
            "--partition",
            "natural",
            "--clients",
            "3",
            "--device",
            "cuda",
            "--deterministic",
            "--workers",
            "1",
            "--epochs",
            "2",
            "--persist-opt",
            "--momentum",
            "0",
        ),
        *method[1:],
    ]
    script = importlib.import_module(method[0])
    graph, eager = (
        script.main([*argv, flag, "--out", str(tmp_path / flag)])[0].state_dict()
        for flag in ("--graph", "--no-graph")
    )
    assert all(torch.allclose(graph[k], eager[k], rtol=1e-3, atol=1e-4) for k in graph)


@needs_gpu
def test_streamed_images_on_a_gpu(tmp_path, monkeypatch):
    make_imagenet(tmp_path, monkeypatch)
    argv = [
        *TINY,
        "--dataset",
        "imagenet-200",
        "--data-dir",
        str(tmp_path),
        "--image-size",
        "24",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--batch-size",
        "4",
        "--device",
        "cuda",
        "--deterministic",
    ]
    graph, eager = (
        fedavg.main([*argv, flag, "--out", str(tmp_path / flag)])[0].state_dict()
        for flag in ("--graph", "--no-graph")
    )
    assert all(torch.allclose(graph[k], eager[k], rtol=1e-4, atol=1e-5) for k in graph)


# --- clients' test sets, and describing a partition


def test_test_partition_follows_the_classes():
    """Client 0 holds 3/4 of class 0 and all of class 2, client 1 the rest; nobody holds class 3. 8, 4, 2 and 5 test samples."""
    y, y_test = (
        torch.tensor([0, 0, 0, 0, 1, 1, 2]),
        torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 5),
    )
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    data, parts = (
        common.Data(x.expand(7, 1, 8, 8), y, x.expand(19, 1, 8, 8), y_test, 4),
        [np.array([0, 6, 1, 2]), np.array([3, 5, 4])],
    )
    tests = common.test_partition(data, parts, flags("--partition", "dirichlet", "--clients", "2"))
    assert [np.bincount(y_test.numpy()[t], minlength=4).tolist() for t in tests] == [
        [6, 0, 2, 0],
        [2, 4, 0, 0],
    ]
    assert len(set(np.concatenate(tests))) == 14
    args = flags("--partition", "similarity", "--similarity", "0", "--clients", "20")
    glyphs = common.glyphs()
    parts = common.partition(glyphs, args)
    for part, test in zip(parts, common.test_partition(glyphs, parts, args)):
        assert set(glyphs.y_test[test].tolist()) <= set(glyphs.y[part].tolist())


def test_test_partition_follows_the_writers(tmp_path):
    make_femnist(tmp_path)
    args = flags(
        "--dataset",
        "femnist",
        "--data-dir",
        str(tmp_path),
        "--partition",
        "natural",
        "--clients",
        "2",
        "--users",
        "4",
    )
    data = common.load_data(args)
    parts = common.partition(data, args)
    tests = common.test_partition(data, parts, args)
    assert [set(data.writers_test[t]) for t in tests] == [set(data.writers[p]) for p in parts]
    assert sorted(np.concatenate(tests).tolist()) == list(range(len(data.y_test)))


def test_client_accuracies(tmp_path):
    """Against accuracies measured client by client with the saved model; worst, best, 10th percentile and variance by their
    definitions. Rounds without evaluation have none."""
    argv = [
        "--partition",
        "similarity",
        "--similarity",
        "30",
        "--clients",
        "5",
        "--eval-every",
        "2",
        "--rounds",
        "3",
        "--client-test",
        "--lr",
        "0.1",
    ]
    net, rows = fedavg.main([*TINY, *argv, "--out", str(tmp_path / "run")])
    args, data = flags(*argv), common.glyphs()
    tests = common.test_partition(data, common.partition(data, args), args)
    accuracy = np.array(
        [
            (net(data.normalise(data.x_test[t])).argmax(1) == data.y_test[t]).float().mean().item()
            * 100
            for t in tests
        ]
    )
    row, s = rows[-1], np.sort(accuracy)
    assert (
        len(set(s)) > 1
        and row["client_acc_worst"] == pytest.approx(s[0], abs=1e-4)
        and row["client_acc_best"] == pytest.approx(s[-1], abs=1e-4)
    )
    assert row["client_acc_p10"] == pytest.approx(
        s[0] + 0.4 * (s[1] - s[0]), abs=1e-4
    )  # position 0.1 * 4 between the sorted five
    assert row["client_acc_var"] == pytest.approx(((s - s.mean()) ** 2).mean(), abs=1e-3)
    assert "client_acc_worst" not in rows[0] and "client_acc_worst" in rows[1]
    assert (
        common.client_summary(
            np.array([True, False]), [np.array([0]), np.array([], int), np.array([0, 1])]
        )["client_acc_worst"]
        == 50
    )
    hits, tests = (
        np.array([1, 0] * 5, bool),
        [[0], [1], [0, 1, 3], [0, 1], [0, 1, 2]],
    )  # 100, 0, 33.3, 50, 66.7 %
    assert common.client_summary(hits, list(map(np.array, tests)))[
        "client_acc_p10"
    ] == pytest.approx(0.4 * 100 / 3)


def test_describe(tmp_path, capsys):
    make_femnist(tmp_path)
    common.main(
        [
            "--describe",
            "--dataset",
            "femnist",
            "--data-dir",
            str(tmp_path),
            "--partition",
            "natural",
            "--clients",
            "6",
            "--client-test",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert (
        "56 training" in lines[0]
        and "6 clients" in lines[1]
        and "3 to 20 each" in lines[1]
        and len(lines) == 9
    )
    data = common.femnist(tmp_path / "femnist")
    for line in lines[3:]:
        _, samples, classes, largest, test, bar = line.split()
        writer = next(w for w in range(6) if (data.writers == w).sum() == int(samples))
        counts = np.bincount(data.y[data.writers == writer].numpy())
        assert (
            int(classes) == (counts > 0).sum()
            and largest == f"{counts.max() / counts.sum():.0%}"
            and len(bar) == round(50 * int(samples) / 20)
        )
        assert int(test) == (data.writers_test == writer).sum()


def test_describe_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = ["--describe", "--dataset", "glyphs", "--clients", "5", "--plot"]
    common.main([*argv, str(tmp_path / "labels.png")])
    assert Image.open(tmp_path / "labels.png").size[0] > 300
    for argv, word in (
        ([*argv, str(tmp_path / "labels.png")], "exists already"),
        ([*argv, str(tmp_path / "labels.xyz")], "xyz"),
        ([], "--describe"),
    ):
        with pytest.raises(SystemExit) as stop:
            common.main(argv)
        assert stop.value.code == 2 and word in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.png"]


# --- RMSProp


@pytest.mark.parametrize("persist", [False, True])
def test_rmsprop(persist):
    """Two rounds of a client against the formula s <- 0.99 s + 0.01 g^2, b <- 0.9 b + g / (sqrt(s) + 1e-8), v <- v - lr b, s and b kept or not."""
    args = flags(
        "--optimizer",
        "rmsprop",
        "--momentum",
        "0.9",
        "--lr",
        "0.001",
        "--weight-decay",
        "0.01",
        *["--persist-opt"] * persist,
    )

    class Double(common.Data):
        def normalise(self, x):
            return super().normalise(x).double()

    data = Double(**vars(common.glyphs()))
    torch.manual_seed(0)
    net = common.build_net("cnn", 62).double()
    worker, client = common.Worker(net, data, args, 8), common.Client(1, np.arange(32), {})
    v = {k: p.detach().clone() for k, p in net.named_parameters()}
    s, b = ({k: torch.zeros_like(p) for k, p in v.items()} for _ in range(2))
    reference = common.build_net("cnn", 62).double()
    weights = net.state_dict()
    for round_ in (1, 2):
        if not persist:
            s, b = ({k: torch.zeros_like(p) for k, p in v.items()} for _ in range(2))
        training = worker.round(client, {"round": round_}, weights, 1.0, fedavg.local_update)
        while True:
            try:
                next(training)
            except StopIteration as stop:
                weights = stop.value.weights
                break
        for _ in range(args.epochs):
            reference.load_state_dict(v)
            grads = torch.autograd.grad(
                F.cross_entropy(reference(data.normalise(data.x[:32])), data.y[:32]),
                list(reference.parameters()),
            )
            for k, g in zip(v, grads):
                g = g + 0.01 * v[k]
                s[k] = 0.99 * s[k] + 0.01 * g.square()
                b[k] = 0.9 * b[k] + g / (s[k].sqrt() + 1e-8)
                v[k] = v[k] - 0.001 * b[k]
        assert all(torch.allclose(weights[k], v[k], rtol=1e-7) for k in v)
    assert ("momentum" in client.state) == persist


# --- networks


@pytest.mark.parametrize(
    "name, count, cuts, shapes",
    [  # sizes and branch points of FedMLB's authors; feature maps of a 32x32 image
        ("vgg9", 3_539_428, 6, [(32, 32), (64, 32), (128, 16), (128, 16), (256, 8), (256, 8)]),
        (
            "mobilenet",
            2_369_380,
            7,
            [(32, 34), (16, 34), (24, 17), (32, 9), (64, 5), (96, 5), (160, 5), (1280, 5)],
        ),
        ("shufflenet", 1_012_108, 4, [(24, 32), (240, 16), (480, 8), (960, 4)]),
        (
            "squeezenet",
            781_156,
            8,
            [
                (96, 16),
                (128, 16),
                (128, 16),
                (256, 8),
                (256, 8),
                (384, 8),
                (384, 8),
                (512, 4),
                (512, 4),
            ],
        ),
    ],
)
def test_small_networks(name, count, cuts, shapes):
    net, h = common.build_net(name, 100).eval(), torch.randn(2, 3, 32, 32)
    assert sum(p.numel() for p in net.parameters()) == count
    assert fedmlb.pathway_cuts(net) == list(range(1, cuts + 1))
    for block, (channels, size) in zip(net, shapes):
        h = block(h)
        assert h.shape == (2, channels, size, size)
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 100)
    assert {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)} == {2}


SETTINGS = {
    "resnet18": (200, 3, 64),
    "resnet50": (100, 3, 32, 256),
    "cnn": (10, 3, 32),
    "cnn-moon": (10, 3, 32),
    "cnn-mcmahan": (10, 1, 28),
    "lstm": (2, 3000, 300),
}


def test_readme_table_of_networks():
    """README's parameters, blocks, and those behind which FedMLB branches."""
    text = (pathlib.Path(common.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d,]+) \| (.*) \|$", text, re.M)
    assert {name for name, *_ in rows} == set(common.NETS)
    for name, count, blocks in rows:
        net = common.build_net(name, *SETTINGS.get(name, (100, 3, 32)))
        assert sum(p.numel() for p in net.parameters()) == int(count.replace(",", "")), name
        expanded = re.sub(
            r"(\w+?)(\d)-(\d)",
            lambda m: ", ".join(f"{m[1]}{i}" for i in range(int(m[2]), int(m[3]) + 1)),
            blocks,
        )
        assert (
            expanded.replace("*", "").split(", ")
            == [block for block, _ in net.named_children()][:-1]
        ), name
        branching = ", ".join(re.findall(r"\*(.*?)\*", expanded)).split(", ")
        assert branching == [
            list(dict(net.named_children()))[cut - 1] for cut in fedmlb.pathway_cuts(net)
        ], name


def test_bypasses_and_shuffles():
    """Fire modules 3, 5 and 7 add their input, as do the 2 + 2 + 3 + 2 + 2 - 1 units of MobileNet that keep size and width;
    ShuffleNet deals the channels of 3 groups in turn."""
    assert [
        name
        for name, block in common.build_net("squeezenet", 10).named_children()
        if isinstance(block, common.Bypass)
    ] == ["fire3", "fire5", "fire7"]
    assert (
        sum(isinstance(m, common.Bypass) for m in common.build_net("mobilenet", 10).modules())
        == 1 + 2 + 3 + 2 + 2
    )
    block, x = common.Bypass(torch.nn.Conv2d(2, 2, 1)), torch.randn(1, 2, 3, 3)
    assert torch.equal(block(x), block.branch(x) + x)
    shuffle = next(
        m
        for m in common.build_net("shufflenet", 10).modules()
        if isinstance(m, torch.nn.ChannelShuffle)
    )
    assert shuffle(torch.arange(6.0).view(1, 6, 1, 1)).flatten().tolist() == [0, 2, 4, 1, 3, 5]


def test_layers_of_the_small_networks():
    """Which layers follow each other in a unit; the one that halves a ShuffleNet stage pools its input beside the branch, a
    MobileNet unit ends without activation; biases of VGG-9's convolutions start at zero."""

    def layers(module):
        return " ".join(
            type(m).__name__.removesuffix("2d") for m in module.modules() if not any(m.children())
        )

    net = {
        name: common.build_net(name, 10)
        for name in ("vgg9", "mobilenet", "shufflenet", "squeezenet")
    }
    assert (
        layers(net["shufflenet"].stage2[0])
        == "AvgPool Conv GroupNorm ReLU ChannelShuffle Conv GroupNorm Conv GroupNorm ReLU"
    )
    pool = net["shufflenet"].stage2[0][0][0]
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    assert layers(net["shufflenet"].stage2[1].branch) == layers(net["shufflenet"].stage2[0][0][1])
    assert (
        layers(net["mobilenet"].stage2[1])
        == "Conv GroupNorm ReLU6 Conv GroupNorm ReLU6 Conv GroupNorm"
    )
    assert layers(net["mobilenet"].head).endswith("Conv GroupNorm Conv GroupNorm ReLU6")
    assert layers(net["squeezenet"].fire2) == " ".join(3 * ["Conv GroupNorm ReLU"])
    assert [layers(net["vgg9"][i]) for i in (0, 2)] == [
        "Conv GroupNorm ReLU",
        "MaxPool Conv GroupNorm ReLU",
    ]
    assert not any(m.bias.any() for m in net["vgg9"].modules() if isinstance(m, torch.nn.Conv2d))


@pytest.mark.parametrize("name", ["mobilenet", "shufflenet", "squeezenet"])
def test_no_sub_networks_of_groups_and_concatenations(name):
    net, x = common.build_net(name, 10).train(), torch.randn(2, 3, 32, 32)
    assert torch.equal(common.at_width(net, x, 1.0), net(x))
    with pytest.raises(common.UserError, match="is not defined; use another --model"):
        common.at_width(net, x, 0.5)
