"""Data sets in their own formats on disk; words, their vectors, and the methods on text."""

import functools
import importlib
import json

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import IMAGENET, TINY, args_of, check_graph, flags, needs_gpu, plainly, same
from PIL import Image
from support import make_femnist, make_imagenet, make_sent140, make_tiny_imagenet, text_flags
from torchvision import datasets, transforms
from torchvision.transforms import functional as tv

import common
import engine
import extras.glyphs
import fedavg
import rfedavg
from extras import readers, text


def test_femnist(tmp_path, monkeypatch):
    content = make_femnist(tmp_path)
    root = tmp_path / "femnist"
    data = readers.femnist(root)
    assert (data.x.shape, data.classes) == ((56, 1, 28, 28), 62)
    assert len(data.y_test) == len(data.writers_test)
    for user, name in enumerate(sorted(content["test"])):  # numbered in the order of their names
        for part, x, y, writers in (
            ("train", data.x, data.y, data.writers),
            ("test", data.x_test, data.y_test, data.writers_test),
        ):
            expected = content[part].get(name, {"x": np.zeros((0, 784)), "y": []})
            assert y[writers == user].tolist() == expected["y"]
            pixels = data.normalise(x[writers == user]).numpy().reshape(-1, 784)
            assert np.allclose(pixels, 2 * np.reshape(expected["x"], (-1, 784)) - 1, atol=1e-6)
    (path,) = (root / "test").glob("*.json")
    shard = json.loads(path.read_text())  # a user may have nothing
    shard["num_samples"].append(0)
    shard["users"].append("nobody")
    shard["user_data"]["nobody"] = {"x": [], "y": []}
    path.write_text(json.dumps(shard))
    assert torch.equal(readers.femnist(root).x_test, data.x_test)
    monkeypatch.setattr(readers, "read_leaf", None)  # read once
    assert torch.equal(readers.femnist(root).x, data.x)


def test_tiny_imagenet(tmp_path, monkeypatch):
    root = make_tiny_imagenet(tmp_path)
    argv = ["--dataset", "tiny-imagenet", "--data-dir", str(tmp_path)]
    data = common.load_data(flags(*argv))
    assert (data.x.shape, data.classes) == ((9, 3, 64, 64), 3)
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    pixels = np.array(Image.open(root / "train/n03/images/n03_1.JPEG"))
    assert torch.equal(data.x[7], torch.from_numpy(pixels).permute(2, 0, 1))
    assert data.y_test.tolist() == [2, 0, 1]
    assert data.x_test.double().mean((1, 2, 3)).round().tolist() == [0, 50, 100]
    assert data.mean.flatten().tolist() == pytest.approx([0.4802, 0.4481, 0.3975])
    assert data.std.flatten().tolist() == pytest.approx([0.2770, 0.2691, 0.2821])
    monkeypatch.setattr(readers, "decode_images", None)  # decoded once
    half = common.load_data(flags(*argv, "--normalise", "half", "--image-size", "32"))
    assert half.x.shape == (9, 3, 32, 32)
    extremes = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    assert half.normalise(extremes)[:, 0, 0, 0].tolist() == [-1, 1]
    none = common.load_data(flags(*argv, "--normalise", "none"))
    assert none.normalise(extremes)[:, 0, 0, 0].tolist() == [0, 1]
    torch.testing.assert_close(none.normalise(data.x), data.x.float() / 255)
    cifar = common.load_data(flags("--normalise", "cifar10"))
    assert cifar.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    assert cifar.std.flatten().tolist() == pytest.approx([0.2470, 0.2435, 0.2616])


def imagenet_flags(root, size, *argv):
    words = "--dataset imagenet-200 --partition iid --clients 2 --batch-size 4".split()
    return [*words, "--data-dir", str(root), "--image-size", str(size), *argv]


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def centre(path):
    """Return an image of 64 x 48 pixels scaled to 42 x 32, then its central 28 x 28."""
    return tensor(tv.center_crop(tv.resize(Image.open(path), 32), 28))


def test_imagenet_200(tmp_path):
    root, args = make_imagenet(tmp_path), flags(*imagenet_flags(tmp_path, 28))
    data = common.load_data(args)
    names = [f"n{i:08d}" for i in range(9)]
    wnids = np.random.RandomState(1993).choice(names, 3, replace=False).tolist()
    assert (data.classes, data.image_size) == (3, 28)
    assert len(data.paths) == len(data.y) == len(set(data.paths)) == 12
    assert (data.x.shape, data.x_test.shape) == ((0, 3, 28, 28), (6, 3, 28, 28))
    assert [path.split("/")[-2] for path in data.paths] == np.repeat(wnids, 4).tolist()
    labels = [sorted(wnids).index(wnid) for wnid in wnids]
    assert data.y.tolist() == np.repeat(labels, 4).tolist()
    assert torch.equal(data.x_test[3], centre(root / "val" / wnids[1] / "1.JPEG"))
    assert IMAGENET == (1000, 200, 500)
    worker = engine.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8)
    ((x, y),) = worker.batches(common.Client(0, np.array([7, 2, 11])))  # not augmented
    assert torch.equal(x, data.normalise(torch.stack([centre(data.paths[i]) for i in (7, 2, 11)])))
    assert y.tolist() == data.y[[7, 2, 11]].tolist()


def test_imagenet_200_is_augmented_by_its_draws(tmp_path):
    """Two epochs in batches of 2 and 1, each image by draws of seed, round and client."""
    make_imagenet(tmp_path)
    args = flags(*imagenet_flags(tmp_path, 28, "--batch-size", "2", "--epochs", "2"))
    data, client, batches = common.load_data(args), common.Client(0, np.array([7, 2, 11])), []
    worker = engine.Worker(common.build_net("cnn", 3, 3, 28), data, args, 8)

    def local_update(worker, client, server, args):
        def step(x, y):
            batches.append((x.clone(), y.clone()))
            return worker.net(x).sum() * 0

        yield step

    list(worker.train(client, {"round": 2}, worker.net.state_dict(), local_update))
    rng = common.seeded_rng("batches", args.seed, 2, 0)
    tables = common.batch_tables(client.index, 4, args, worker.net, data, rng)
    jitter, flip = transforms.ColorJitter(0.4, 0.4, 0.4), transforms.RandomHorizontalFlip()
    augment = transforms.Compose([transforms.RandomResizedCrop(28), jitter, flip])
    assert [len(x) for x, _ in batches] == [2, 1, 2, 1]
    for row, (x, y) in enumerate(batches):
        for i in range(len(x)):
            index = tables["index"][row, i]
            torch.manual_seed(tables["seed"][row, i])
            image = augment(Image.open(data.paths[index]))
            assert torch.equal(x[i : i + 1], data.normalise(tensor(image)[None]))
            assert y[i] == data.y[index]


@pytest.mark.parametrize(
    "script, more", [(fedavg, ["--workers", "2"]), (rfedavg, []), (fedavg, ["--augment", "none"])]
)
def test_training_on_streamed_images(tmp_path, script, more):
    make_imagenet(tmp_path)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, *more)]
    net, rows = script.main([*argv, "--out", str(tmp_path / "a")])
    script.main([*argv, "--rounds", "1", "--out", str(tmp_path / "b")])
    on = ["--out", str(tmp_path / "b"), "--resume", "--rounds", "2", "--quiet"]
    assert rows[1]["samples"] == 12
    assert same(net.state_dict(), script.main(on)[0].state_dict())


@needs_gpu
def test_streamed_images_on_a_gpu(tmp_path):
    make_imagenet(tmp_path)
    argv = [*TINY, *imagenet_flags(tmp_path, 24, "--device", "cuda")]
    check_graph(tmp_path, fedavg, argv, 1e-4)


def test_emnist_is_turned_upright(monkeypatch):
    x = torch.arange(3 * 28 * 28).view(3, 28, 28).to(torch.uint8)

    class Fake:
        data, targets, classes = x, torch.tensor([0, 61, 9]), list(extras.glyphs.CHARACTERS)

    def fake(root, train, download, split):
        assert download and split == "byclass"
        return Fake()

    monkeypatch.setattr(datasets, "EMNIST", fake)
    data = common.load_data(flags("--dataset", "emnist"))
    assert (data.x.shape, data.classes) == ((3, 1, 28, 28), 62)
    assert data.x[1, 0, 2, 20] == x[1, 20, 2]
    assert common.resolve_augment(flags("--dataset", "emnist")) == []


def test_tokens():
    """By the rules of torchtext's basic_english, worked out by hand."""
    words = text.tokens('Isn\'t "this" GREAT?! yes: no;maybe (a,b)... <br />x')
    assert words == "isn ' t this great ? ! yes no maybe ( a , b ) . . . x".split()
    assert text.tokens(" \t") == []


def read(data, x):
    """Return texts as strings again, ? for a word outside of the vocabulary."""
    names = ["", "?", *data.words]
    return [" ".join(names[number] for number in row).strip() for row in x.tolist()]


def test_sent140(tmp_path):
    """Of the two most active users; words by frequency, then alphabet, of training tweets."""
    rows = make_sent140(tmp_path)
    args = flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "2"))
    data = common.load_data(args)
    assert (len(data.x), len(data.x_test), data.classes, data.x.dtype) == (18, 2, 2, torch.int16)
    names = np.array(["ann", "bob"])
    x, y = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    users = names[np.concatenate([data.writers, data.writers_test])]
    left = [(user, label, text.tokens(line)) for user, label, line in rows[:20]]
    for words, label, user in zip(read(data, x), y.tolist(), users):
        pairs = [zip(words.split(), row[2]) for row in left if row[:2] == (user, label)]
        assert any(all(a in ("?", b) for a, b in pair) for pair in pairs)
    lines = read(data, data.x)
    counts = {word: sum(line.split().count(word) for line in lines) for word in data.words}
    assert data.words == sorted(counts, key=lambda word: (-counts[word], word))
    assert min(counts.values()) > 0
    assert "cy" not in counts
    few = text.sent140(tmp_path / "sent140", args, vocabulary=6)
    assert few.words == data.words[:4]
    assert few.x.max() == 5 and (few.x == 1).any()


def test_sent140_leak(tmp_path):
    """Clients hold the test tweets too; the words are still of training tweets alone."""
    make_sent140(tmp_path)
    natural = ["--partition", "natural", "--clients", "2"]
    plain, leak = (
        common.load_data(flags(*text_flags(tmp_path, *natural, *more))) for more in ([], ["--leak"])
    )
    assert len(leak.x) == len(plain.x) + len(plain.x_test) == 20
    every = torch.cat([plain.x, plain.x_test]).tolist()
    assert sorted(leak.x.tolist()) == sorted(every)
    assert torch.equal(leak.x_test, plain.x_test)
    assert leak.words == plain.words


def test_sent140_partitions(tmp_path):
    make_sent140(tmp_path)
    argv = text_flags(tmp_path, "--partition", "similarity", "--clients", "2")
    whole = common.load_data(flags(*argv))
    assert len(whole.x) + len(whole.x_test) == 26  # all users
    args = flags(*text_flags(tmp_path, *"--partition natural --clients 2 --users 3".split()))
    data = common.load_data(args)
    parts = common.partition(data, args)
    assert sorted(len(set(data.writers[part])) for part in parts) == [1, 2]
    assert sum(map(len, parts)) == len(data.x) == 22
    # in about two of these seeds the only tweet of the last user would be a test one
    for seed in range(20):
        argv = ["--partition", "natural", "--clients", "4", "--data-seed", str(seed)]
        data = common.load_data(flags(*text_flags(tmp_path, *argv)))
        assert set(data.writers) == {0, 1, 2, 3}
        assert len(data.x) in (23, 24)
        assert len(data.x) + len(data.x_test) == 26


def test_an_own_network_on_tweets(tmp_path):
    make_sent140(tmp_path)
    words = f"--dataset sent140 --data-dir {tmp_path} --partition iid --clients 2 --rounds 1"
    count = nn.Module()  # of a tweet's words
    count.forward = lambda x: (x > 0).sum(1, keepdim=True).float()
    run = functools.partial(common.run, net=nn.Sequential(count, nn.Linear(1, 2)))
    argv = [*words.split(), "--epochs", "1", "--quiet", "--device", "cpu", "--plain"]
    assert fedavg.main(argv, run=run)[1][0]["samples"] == 23


def test_sent140_of_leaf(tmp_path):
    def tweets(user, n):
        x = [[str(i), "date", "NO_QUERY", user, f"{user} says \u00e9{i}", "t"] for i in range(n)]
        return {"x": x, "y": [i % 2 for i in range(n)]}

    # cat cannot train
    for part, n in (("train", {"ann": 5, "bob": 3}), ("test", {"ann": 1, "bob": 2, "cat": 9})):
        shard = {"users": [*n], "num_samples": [*map(float, n.values())]}
        shard["user_data"] = {user: tweets(user, n[user]) for user in n}
        (tmp_path / "sent140" / part).mkdir(parents=True)
        (tmp_path / "sent140" / part / "all.json").write_text(json.dumps(shard))
    argv = text_flags(tmp_path, "--partition", "natural", "--clients", "2")
    data = common.load_data(flags(*argv))
    assert data.y.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    with pytest.raises(ValueError, match="whose text is none"):
        text._leaf_tweets(["a text"], [0])
    assert data.writers.tolist() == [0] * 5 + [1] * 3
    assert data.writers_test.tolist() == [0, 1, 1]
    assert read(data, data.x)[6] == "bob says \u00e91"
    shard["user_data"]["cat"]["x"][3][4] = None
    (tmp_path / "sent140" / "test" / "all.json").write_text(json.dumps(shard))
    with pytest.raises(common.UserError, match="user 'cat'.*whose text is none"):
        common.load_data(flags(*argv))


def test_word_vectors(tmp_path):
    """By hand; a word may hold spaces, as in GloVe's largest file."""
    (tmp_path / "glove.txt").write_text("the 1 2.5 -3\nb\u00e9 4e-1 0 1\nsad 7 8 9\n. . 1 2 3\n")
    vectors = text.word_vectors(str(tmp_path / "glove.txt"), ["sad", "zzz", "the", ". ."])
    assert not vectors[:2].any()
    assert vectors[2:].tolist() == [[7, 8, 9], [0, 0, 0], [1, 2.5, -3], [1, 2, 3]]
    random = text.word_vectors("random", ["a"] * 998)
    assert random.shape == (1000, 300)
    assert not random[0].any()
    assert random[1:].std() == pytest.approx(0.4, rel=0.01)
    assert torch.equal(random, text.word_vectors("random", ["b"] * 998))
    assert not torch.equal(random, text.word_vectors("random", ["a"] * 998, 1))


def text_data(*lengths):
    """Return texts of those lengths, and their network in float64."""
    rng = np.random.default_rng(0)
    x = torch.zeros(len(lengths), max(lengths) + 3, dtype=torch.int16)
    for row, n in zip(x, lengths):
        row[:n] = torch.from_numpy(rng.integers(1, 12, size=n))
    torch.manual_seed(0)
    net = common.build_net("lstm", 2, 12, 7).double()
    net[0][0].vectors[1:].normal_()
    return x, net


def test_lstm_is_torchs_on_packed_sequences():
    """Forward and gradients, against nn.LSTM's two layers; padding makes no difference."""
    x, net = text_data(5, 1, 9, 3)
    reference = torch.nn.LSTM(7, 256, 2, batch_first=True).double()
    parameters = {}  # of net's layers, by their names in reference
    for layer, block in enumerate((net[0][1], net[1])):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            parameters[f"{kind}_l{layer}"] = getattr(block.lstm, f"{kind}_l0")
    reference.load_state_dict(parameters)
    vectors = net[0][0].vectors[x.long()]
    sequences = torch.nn.utils.rnn.pack_padded_sequence(
        vectors, (x != 0).sum(1), batch_first=True, enforce_sorted=False
    )
    _, (h, _) = reference(sequences)
    z = net[:-1](x)
    assert z.shape == (4, 256)
    assert torch.allclose(z, h[1], atol=1e-12)
    assert torch.equal(net[-1](z), net(x))
    assert torch.allclose(net(x[:, :9]), net(x), atol=1e-12)
    net(x).sin().sum().backward()
    net[-1](h[1]).sin().sum().backward()
    expected = dict(reference.named_parameters())
    for name, p in parameters.items():
        assert torch.allclose(p.grad, expected[name].grad, atol=1e-12), name
    assert net(torch.zeros(1, 4, dtype=torch.int16)).isfinite().all()  # a text without words
    assert net.eval()[1].lstm.training  # cuDNN has no backward pass otherwise


def test_lstm_sizes():
    net = common.build_net("lstm", 2, 3000, 300)
    assert common.nbytes(net.state_dict()) == 7_992_968
    x = torch.ones(2, 3, dtype=torch.int16)
    assert torch.equal(common.at_width(net, x, 1.0), net(x))
    with pytest.raises(common.UserError, match="LSTM is not defined"):
        common.at_width(net, x, 0.5)


def test_text_is_trimmed_to_the_batch():
    x, _ = text_data(5, 1, 9, 3)
    y = torch.zeros(4).long()
    data = common.Data(x, y, x, y, 2, words=["a"])
    assert data.normalise(x).shape == (4, 9)
    assert data.normalise(x[1:2]).shape == (1, 1)
    assert torch.equal(data.normalise(x[[0, 1]]), x[[0, 1], :5])
    assert data.normalise(torch.zeros_like(x)).shape == (4, 1)


# --- the methods

TEXT_METHODS = "fedavg; moon; scaffold; qfedavg --q 1e-4; rfedavg --variant rfedavg --lam 0.1"
TEXT_METHODS += "; rfedavg_code; fitnet; fedgkd; fedper; ditto; fedmlb"
TEXT_METHODS += "; fedmlb --direction global-local"


def text_argv(tmp_path, method, *argv):
    """Return a method's script and the words of its run on the tweets of three users."""
    make_sent140(tmp_path)
    method = method.split()
    words = "--optimizer rmsprop --momentum 0 --persist-opt --partition natural --clients 3"
    words = text_flags(tmp_path, *words.split(), "--workers", "1", *argv)
    return importlib.import_module(method[0]), [*TINY, *words, *method[1:]]


@pytest.mark.parametrize("method", TEXT_METHODS.split("; "))
def test_methods_on_text(tmp_path, method):
    """By the engine as by the plain loop; word vectors stay as they were to the last bit."""
    script, argv = text_argv(tmp_path, method, "--rounds", "2", "--lr", "0.001")
    net, rows = script.main([*argv, "--out", str(tmp_path / "run")])
    data = common.load_data(args_of(script, *argv))
    assert torch.equal(net[0][0].vectors, text.word_vectors("random", data.words))
    assert rows[0]["train_loss"] != rows[1]["train_loss"]
    assert same(net.state_dict(), script.main(argv, run=plainly)[0].state_dict())


@needs_gpu
@pytest.mark.parametrize("method", TEXT_METHODS.split("; "))
def test_text_on_a_gpu(tmp_path, method):
    """As a CUDA graph and without; RMSProp's state is restored after capture."""
    more = "--lr 0.0001 --epochs 2 --device cuda"
    check_graph(tmp_path, *text_argv(tmp_path, method, *more.split()), 1e-3)
