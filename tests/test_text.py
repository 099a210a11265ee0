"""Text: Sentiment140 in its formats, words and their vectors, the LSTM, and the methods on them."""

import importlib
import json

import numpy as np
import pytest
import torch
from conftest import TINY, args_of, check_graph, flags, needs_gpu, plainly, same
from support import make_sent140, text_flags

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
    assert few.x.max() == 5
    assert (few.x == 1).any()


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


def test_sent140_of_leaf(tmp_path):
    def tweets(user, n):
        x = [[str(i), "date", "NO_QUERY", user, f"{user} says \u00e9{i}", "t"] for i in range(n)]
        return {"x": x, "y": [i % 2 for i in range(n)]}

    # cat cannot train
    for part, n in (("train", {"ann": 5, "bob": 3}), ("test", {"ann": 1, "bob": 2, "cat": 9})):
        shard = {"users": [*n], "num_samples": [*n.values()]}
        shard["user_data"] = {user: tweets(user, n[user]) for user in n}
        (tmp_path / "sent140" / part).mkdir(parents=True)
        (tmp_path / "sent140" / part / "all.json").write_text(json.dumps(shard))
    argv = text_flags(tmp_path, "--partition", "natural", "--clients", "2")
    data = common.load_data(flags(*argv))
    assert data.y.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    assert data.writers.tolist() == [0] * 5 + [1] * 3
    assert data.writers_test.tolist() == [0, 1, 1]
    assert read(data, data.x)[6] == "bob says \u00e91"


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

TEXT_METHODS = "fedavg; moon; scaffold; qfedavg --q 1e-4; rfedavg --variant rfedavg --lam 0.1"
TEXT_METHODS += (
    "; rfedavg_code; fitnet; fedgkd; fedper; ditto; fedmlb; fedmlb --direction global-local"
)


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
    assert all(v.isfinite().all() for v in net.state_dict().values())
    assert rows[0]["train_loss"] != rows[1]["train_loss"]
    assert same(net.state_dict(), script.main(argv, run=plainly)[0].state_dict())


@needs_gpu
@pytest.mark.parametrize("method", TEXT_METHODS.split("; "))
def test_text_on_a_gpu(tmp_path, method):
    """As a CUDA graph and without; RMSProp's state is restored after capture."""
    more = "--lr 0.0001 --epochs 2 --device cuda"
    check_graph(tmp_path, *text_argv(tmp_path, method, *more.split()), 1e-3)
