"""Text: Sentiment140 in its formats, words and their vectors, the LSTM, and the methods on them."""

import importlib
import json

import numpy as np
import pytest
import torch
from conftest import TINY, flags, from_shell, needs_gpu
from support import make_sent140, refused, text_flags

import common
import fedmlb
from extras import text

# --- Sentiment140


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
    """The two most active users; a tenth of their 20 tweets is the test set; words by frequency,
    then alphabet, of training tweets."""
    rows = make_sent140(tmp_path)
    args = flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "2"))
    data = common.load_data(args)
    assert (len(data.x), len(data.x_test), data.classes, data.x.dtype) == (18, 2, 2, torch.int16)

    names = np.array(["ann", "bob"])
    tweets = [
        *zip(read(data, data.x), data.y.tolist(), names[data.writers]),
        *zip(read(data, data.x_test), data.y_test.tolist(), names[data.writers_test]),
    ]
    expected = {(" ".join(text.tokens(line)), label, user) for user, label, line in rows[:20]}

    def matches(tweet, row):
        words = zip(tweet[0].split(), row[0].split())
        return tweet[1:] == row[1:] and all(a in ("?", b) for a, b in words)

    assert all(any(matches(tweet, row) for row in expected) for tweet in tweets)
    lines = read(data, data.x)
    counts = {word: sum(line.split().count(word) for line in lines) for word in data.words}
    assert data.words == sorted(counts, key=lambda word: (-counts[word], word))
    assert min(counts.values()) > 0
    assert "cy" not in counts
    few = text.sent140(tmp_path / "sent140", args, vocabulary=6)
    assert few.words == data.words[:4]
    assert few.x.max() == 5
    assert (few.x == 1).any()


def test_sent140_leak(tmp_path, capsys):
    """With the authors' leak clients hold all their tweets, the test ones too; the words are still
    of training tweets alone."""
    make_sent140(tmp_path)
    natural = ["--partition", "natural", "--clients", "2"]
    plain = common.load_data(flags(*text_flags(tmp_path, *natural)))
    leak = common.load_data(flags(*text_flags(tmp_path, *natural, "--leak")))

    def rows(x):
        return {tuple(row) for row in x.tolist()}

    assert len(leak.x) == 20
    assert rows(leak.x) == rows(plain.x) | rows(plain.x_test)
    assert rows(leak.x_test) == rows(plain.x_test)
    assert leak.words == plain.words
    assert len(plain.x) + len(plain.x_test) == 20
    argv = text_flags(tmp_path, "--partition", "iid", "--leak")
    refused(capsys, argv, "--leak", "natural")


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


def test_sent140_of_leaf(tmp_path):
    def tweets(user, n):
        x = []
        for i in range(n):
            x.append([str(i), "date", "NO_QUERY", user, f"{user} says \u00e9{i}", "training"])
        return {"x": x, "y": [i % 2 for i in range(n)]}

    for part, users in (
        ("train", {"ann": 5, "bob": 3}),
        ("test", {"ann": 1, "bob": 2, "cat": 9}),  # cat cannot train
    ):
        shard = {
            "users": list(users),
            "num_samples": list(users.values()),
            "user_data": {user: tweets(user, n) for user, n in users.items()},
        }
        (tmp_path / "sent140" / part).mkdir(parents=True)
        (tmp_path / "sent140" / part / "all.json").write_text(json.dumps(shard))
    argv = text_flags(tmp_path, "--partition", "natural", "--clients", "2")
    data = common.load_data(flags(*argv))
    assert data.y.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    assert data.writers.tolist() == [0] * 5 + [1] * 3
    assert data.writers_test.tolist() == [0, 1, 1]
    assert read(data, data.x)[6] == "bob says \u00e91"


@pytest.mark.parametrize(
    "line, words",
    [
        (b'"4","1","date","NO_QUERY","ann"\n', ["expected 6, got 5"]),
        (b'"2","1","d","q","u","text"\n', ["'2'"]),
        (b'"4","1","d","q","u","cut', ["end of data"]),
    ],
)
def test_damaged_csv(tmp_path, capsys, line, words):
    make_sent140(tmp_path)
    path = tmp_path / "sent140" / "tweets.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    rest = lines[5:] if line.endswith(b"\n") else []
    path.write_bytes(b"".join([*lines[:4], line, *rest]))
    refused(capsys, text_flags(tmp_path), f"{path}, line 5", *words)
    path.unlink()
    refused(capsys, text_flags(tmp_path), "no *.csv", "trainingandtestdata.zip")


@pytest.mark.parametrize(
    "more, words",
    [
        (["--model", "cnn", "--vectors", ""], ["--model", "lstm"]),
        (["--image-size", "28"], ["--image-size"]),
        (["--augment", "flip"], ["--augment"]),
        (["--vectors", "", "--partition", "iid"], ["--vectors", "glove.6B.zip"]),
        (["--users", "9"], ["--users"]),
        (["--dataset", "glyphs", "--model", "cnn"], ["--vectors"]),
        (["--partition", "natural", "--users", "3"], ["--users", "--clients"]),
    ],
)
def test_text_flags(tmp_path, capsys, more, words):
    make_sent140(tmp_path)
    refused(capsys, text_flags(tmp_path, *more), *words)


# --- word vectors


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


@pytest.mark.parametrize(
    "content, words",
    [
        (b"glad 1 2\nsad 3\n", ["line 2", "size 1", "(2,)"]),
        (b"glad 1 2\ns\xff 1 2\n", ["line 2", "utf-8"]),
        (b"glad 1 2\nsad nan 1\n", ["NaN or infinity"]),
        (b"qqq 1 2\n", ["none of"]),
        (None, ["no such file"]),
    ],
)
def test_damaged_vectors(tmp_path, capsys, content, words):
    make_sent140(tmp_path)
    path = tmp_path / "glove.txt"
    if content is not None:
        path.write_bytes(content)
    argv = text_flags(tmp_path, "--partition", "iid", "--vectors", str(path))
    refused(capsys, argv, "--vectors", "glove.txt", *words)


# --- the network


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
    """The network of blocks against nn.LSTM's two layers on packed sequences, forward and
    gradients; padding makes no difference."""
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
    assert sum(p.numel() for p in net.parameters()) == 1_098_242
    assert common.nbytes(net.state_dict()) == 7_992_968
    assert common.nbytes(dict(net.named_parameters())) == 4_392_968
    assert fedmlb.pathway_cuts(net) == [1, 2]
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

TEXT_METHODS = [
    ["fedavg"],
    ["moon"],
    ["scaffold"],
    ["qfedavg", "--q", "1e-4"],
    ["rfedavg", "--variant", "rfedavg", "--lam", "0.1"],
    ["fitnet"],
    ["fedgkd"],
    ["fedper"],
    ["ditto"],
    ["fedmlb"],
    ["fedmlb", "--direction", "global-local"],
]


@pytest.mark.parametrize("method", TEXT_METHODS, ids=" ".join)
def test_methods_on_text(tmp_path, method):
    """Three rounds, in which the word vectors stay as they were to the last bit; all else moves."""
    make_sent140(tmp_path)
    words = "--optimizer rmsprop --momentum 0 --lr 0.001 --persist-opt --partition natural"
    words += " --clients 3 --rounds 3 --workers 1"
    argv = [*TINY, *text_flags(tmp_path, *words.split()), *method[1:]]
    script = importlib.import_module(method[0])
    net, rows = script.main([*argv, "--out", str(tmp_path / "run")])
    data = common.load_data(
        flags(*text_flags(tmp_path, "--partition", "natural", "--clients", "3"))
    )
    assert torch.equal(net[0][0].vectors, text.word_vectors("random", data.words))
    assert all(v.isfinite().all() for v in net.state_dict().values())
    assert rows[0]["train_loss"] != rows[2]["train_loss"]


@pytest.mark.parametrize(
    "script, words",
    [
        ("mixup", "words"),
        ("gradaug", "not of images"),
        ("fedalign", "LSTM"),
        ("stochdepth", "residual"),
    ],
)
def test_methods_that_need_images(tmp_path, capsys, script, words):
    make_sent140(tmp_path)
    argv = text_flags(tmp_path, "--clients", "2", "--partition", "iid")
    with pytest.raises(SystemExit) as stop:
        from_shell(importlib.import_module(script), [*TINY, *argv, "--out", tmp_path / "run"])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(err.splitlines()) == 1
    assert words in err


@needs_gpu
@pytest.mark.parametrize("method", TEXT_METHODS, ids=" ".join)
def test_text_on_a_gpu(tmp_path, method):
    """As a CUDA graph and without; cuDNN's LSTM within, its frozen copies in eval mode, RMSProp's
    state restored after capture."""
    make_sent140(tmp_path)
    words = "--optimizer rmsprop --momentum 0 --lr 0.0001 --persist-opt --partition natural"
    words += " --clients 3 --epochs 2 --workers 1 --device cuda --deterministic"
    argv = [*TINY, *text_flags(tmp_path, *words.split()), *method[1:]]
    script = importlib.import_module(method[0])
    weights = {}
    for flag in ("--graph", "--no-graph"):
        net, _ = script.main([*argv, flag, "--out", str(tmp_path / flag)])
        weights[flag] = net.state_dict()
    for k, v in weights["--graph"].items():
        assert torch.allclose(v, weights["--no-graph"][k], rtol=1e-3, atol=1e-4), k
