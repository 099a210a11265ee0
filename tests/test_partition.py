"""How samples go to clients: partitions, writers, clients' test sets, their description."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from conftest import TINY, flags, refusal
from runs import config_of
from support import make_femnist

import common
import fedavg
from analysis import partition as analysis_partition
from analysis import pictures
from extras import partitions, readers

LABELS = np.random.default_rng(0).integers(10, size=3000)


def dirichlet(*words):
    return common.dirichlet_partition(LABELS, *words)[0]


def test_shards_are_runs_of_sorted_labels():
    """12 shards of five, four a label; dealt in order client 0 had 15 of a label, evenly 5."""
    labels = np.random.default_rng(1).permutation(np.repeat([0, 1, 2], 20))
    parts = partitions.shards_partition(labels, 4, 3, 0)
    counts = np.array([np.bincount(labels[part], minlength=3) for part in parts])
    assert (counts.sum(1) == 15).all() and (counts % 5 == 0).all() and counts[0].max() == 10
    places = np.flatnonzero(np.isin(np.argsort(labels, kind="stable"), parts[0]))
    assert len({place // 5 for place in places}) > 3  # a shard is of any samples of its label
    assert flags("--partition", "shards").shards == 2


def test_dirichlet_balancing_rule():
    """At alpha -> 0 a class goes to one client, who may have no more with half of all samples.

    So both end with two classes; without the rule more than half of all seeds give one three."""
    labels = np.repeat([0, 1, 2, 3], 25)
    for seed in range(8):
        a, b = common.dirichlet_partition(labels, 2, 1e-4, seed)[0]
        assert [(len(part), len(set(labels[part]))) for part in (a, b)] == [(50, 2), (50, 2)]


@pytest.mark.parametrize("clients, each", [(10, 2), (10, 1), (25, 3), (4, 10)])
def test_labels_partition(clients, each):
    """Each client has its own label and others, each label equally many samples a client."""
    parts = partitions.labels_partition(LABELS, 10, clients, each, 0)
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(1) == each).all()
    assert all(counts[i, i % 10] for i in range(clients))
    assert (counts.sum(0) == np.bincount(LABELS)).all()
    assert max(np.ptp(column[column > 0]) for column in counts.T) <= 1


def digest(parts):
    arrays = np.concatenate([[len(part) for part in parts], *parts]).astype("<i8")
    return hashlib.sha256(arrays.tobytes()).hexdigest()[:16]


def client_tests():
    y = torch.from_numpy(LABELS)
    data = common.Data(y[:, None], y, y[:500, None], y[:500], 10)
    args = flags("--partition", "dirichlet", "--data-seed", "3")
    return partitions.client_test_indices(data, dirichlet(7, 0.3, 3), args)


WRITERS = LABELS * 7 % 13 + np.arange(3000) % 5
SPLITS = [  # a split, and its digest
    (lambda: dirichlet(7, 0.3, 3), "78b906738019acf1"),
    (lambda: dirichlet(60, 0.3, 2), "38eb7feb183686be"),  # the second draw
    (lambda: dirichlet(40, 0.001, 1), "abc27c4d9a02213d"),  # the 271st draw
    (lambda: common.iid_partition(LABELS, 7, 3), "c16bf002454b8ff6"),
    (lambda: partitions.similarity_partition(LABELS, 7, 35, 3), "1f761bec1c641bc1"),
    (lambda: partitions.labels_partition(LABELS, 10, 25, 3, 3), "6f67d783abea030a"),
    (lambda: partitions.natural_partition(WRITERS, 4, 3, 9), "6b3f21d5c7afb1b2"),
    (lambda: partitions.natural_iid_partition(WRITERS, 4, 3, 9), "b1a19a9e9337010f"),
    (lambda: partitions.balanced_dirichlet_partition(LABELS, 7, 0.3, 3), "749af1122d8486dd"),
    (lambda: partitions.balanced_dirichlet_partition(LABELS, 299, 0.05, 1), "9ffbbb9eb47a7a19"),
    (lambda: partitions.shards_partition(LABELS, 7, 2, 3), "1d8e3ac68cea8fb8"),
    (client_tests, "9e5f7e6182e29d71"),
]


@pytest.mark.parametrize("split, expected", SPLITS)
def test_splits_stay_what_they_were(split, expected):
    """Results that were published on them can be repeated."""
    parts = split()
    assert digest(parts) == expected
    assert all(part.dtype == np.int64 for part in parts)


def test_dirichlet_moves_what_is_missing():
    """The fewest, by the tests of fill_up(); of 20 after all draws, as rounding may help."""
    cases = (300, 1.0, 211, "d7c526fe0db21e47"), (20, 0.01, 85, "a047bafc62657230")
    for clients, alpha, moved, expected in cases:
        parts, found = common.dirichlet_partition(LABELS, clients, alpha, 0)
        assert (min(map(len, parts)), found, digest(parts)) == (10, moved, expected)


def test_no_fewer_moves_would_do():
    """Against all ways to give seven samples to three clients."""
    rng = np.random.default_rng(0)
    everything = np.array(list(itertools.product(range(3), repeat=7)))
    sizes = np.stack([(everything == k).sum(1) for k in range(3)], 1)
    for min_size in (1, 2):
        allowed = everything[sizes.min(1) >= min_size]
        for _ in range(100):
            owner = rng.choice(3, 7, p=rng.dirichlet(np.ones(3)))
            filled, moved = partitions.fill_up(owner, 3, min_size, rng.permutation(7))
            assert np.bincount(filled, minlength=3).min() >= min_size
            assert moved == (filled != owner).sum() == (allowed != owner).sum(1).min()


def test_a_run_says_how_many_samples_were_moved(tmp_path, capsys):
    """In its first line and in config.json; a resumed run has the same split."""
    words = [word for word in TINY if word != "--quiet"]
    words += "--alpha 0.1 --rounds 1 --local-steps 1 --sample 0.01 --out".split()
    fedavg.main([*words, str(tmp_path / "a"), *"--clients 200 --min-size 3".split()])
    moved = config_of(tmp_path / "a")["moved"]
    assert moved > 0 and "200 clients of 3 to " in capsys.readouterr().out
    fedavg.main(["--out", str(tmp_path / "a"), "--resume", "--rounds", "2"])
    assert f"({moved} of them moved for --min-size)" in capsys.readouterr().out
    fedavg.main([*words, str(tmp_path / "b"), *"--clients 3 --min-size 1".split()])
    assert config_of(tmp_path / "b")["moved"] == 0 and "moved" not in capsys.readouterr().out


def test_balanced_dirichlet_draws_without_replacement(monkeypatch):
    """Two samples of class 0 and two of class 1, two clients, p = (0.8, 0.2) for both classes.

    By hand: the weights are 0.8, 0.8, 0.2, 0.2. The first client's first sample is of class 0 with
    probability 1.6 / 2, then the second with 0.8 / 1.2; both of class 0: 8/15. Both of class 1:
    0.4 / 2 * 0.2 / 1.8 = 1/45. With replacement it would be 0.64 and 0.04."""

    class Fixed(np.random.Generator):
        def dirichlet(self, alpha):
            return np.array([0.8, 0.2])

    monkeypatch.setattr(partitions, "seeded_rng", lambda name, seed: Fixed(np.random.PCG64(seed)))
    labels = np.array([0, 1, 1, 0])
    draws = 4000
    counts = np.zeros(3)  # draws in which the first client gets 0, 1 or 2 samples of class 1
    for seed in range(draws):
        first, _ = partitions.balanced_dirichlet_partition(labels, 2, 1.0, seed)
        counts[labels[first].sum()] += 1
    expected = np.array([8 / 15, 4 / 9, 1 / 45])
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) < 4 * deviation).all()


def test_similarity_mixes_a_share():
    """At 50% 10 of 20 are of any class, 10 of one, or of two where a chunk straddles them."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 40))
    for part in partitions.similarity_partition(labels, 20, 0, 0):
        assert (len(set(labels[part])), len(part)) == (1, 20)
    for part in partitions.similarity_partition(labels, 20, 50, 0):
        counts = np.bincount(labels[part], minlength=10)
        assert len(part) == 20 and (counts > 0).sum() > 2
        assert (counts[:-1] + counts[1:]).max() >= 10


@pytest.mark.parametrize(
    "text, partial, message",
    [
        ("{0: [0, 3], 1: [2, 1]}", False, ""),
        ("{0: {0, 3}, 1: {2, 1}}", False, ""),
        ("[[0, 3], [2, 1]]", False, ""),
        ('{"1": [2, 1], "0": [0, 3]}', False, ""),
        ("{0: [0, 3], 1: [2]}", True, ""),
        ("{0: [0, 3], 1: [2]}", False, "leaves out 1 of 4 samples, as 1; --partial-split"),
        ("{0: [0, 3], 1: [2, 4]}", True, "an index is not an integer from 0 to 3"),
        ("{0: [0, 3], 1: [2, -1]}", True, "from 0 to 3"),
        ("{0: [0, 3], 1: [2, 1.0]}", False, "from 0 to 3"),
        ("[[false, true], [2, 3]]", False, "from 0 to 3"),
        ("{(0, 3), (2, 1)}", False, "list of indices"),
        ("{0: [0, 3], 1: [2, 0]}", True, "gives sample 0 more than once"),
        ("{0: [0, 1, 2, 3]}", False, "--clients 1"),
        ("[[], []]", False, "leaves out 4 of 4 samples"),
        ("__import__('os')", False, "neither"),
        ("[" * 9999, False, "neither"),
        ("{0: 3, 1: 4}", False, "list of indices"),
        ("7", False, "list of indices"),
        ('{"a": [0, 3], "b": [1, 2]}', False, "numbers"),
    ],
)
def test_file_partition(tmp_path, text, partial, message):
    path = tmp_path / "split"
    path.write_text(text)
    words = [path, 4, 2, *[True] * partial]
    if message:
        line = refusal(partitions.file_partition, *words)
        assert line.startswith(f"--split-file {path}: ") and message in line
    else:
        parts = partitions.file_partition(*words)
        assert [sorted(part.tolist()) for part in parts] == [[0, 3], [2] if partial else [1, 2]]


def test_writers_are_grouped_and_tested_together(tmp_path):
    """Users are dealt to clients whole, IID rows deal the same samples; tests are theirs."""
    make_femnist(tmp_path)
    argv = ["--dataset", "femnist", "--data-dir", str(tmp_path), "--clients", "2", "--users", "5"]
    args = flags(*argv, "--partition", "natural")
    data = common.load_data(args)
    parts = common.partition(data, args)
    groups = [set(data.writers[part]) for part in parts]
    assert sorted(map(len, groups)) == [2, 3] and not groups[0] & groups[1]
    assert groups == [set(g) for g in partitions.natural_groups(data.writers, 2, args.data_seed, 5)]
    assert sum(map(len, parts)) == np.isin(data.writers, [*groups[0], *groups[1]]).sum()
    tests = partitions.client_test_indices(data, parts, args)
    assert [set(data.writers_test[test]) for test in tests] == groups
    assert sorted(np.concatenate(tests).tolist()) == list(range(len(data.x_test)))
    iid_parts = common.partition(data, flags(*argv, "--partition", "natural-iid"))
    assert np.array_equal(np.sort(np.concatenate(iid_parts)), np.sort(np.concatenate(parts)))
    assert abs(len(iid_parts[0]) - len(iid_parts[1])) <= 1
    assert set(data.writers[iid_parts[0]]) & set(data.writers[iid_parts[1]])
    with pytest.raises(common.UserError, match="--users 7: the data set has 6 writers"):
        partitions.natural_groups(data.writers, 2, 0, 7)


def test_client_test_indices_follow_the_classes():
    """Client 0 holds 3/4 of class 0 and all of class 2, client 1 the rest, nobody class 3."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    y_test = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 5)
    data = common.Data(y[:, None], y, y_test[:, None], y_test, 4)
    parts = [np.array([0, 6, 1, 2]), np.array([3, 5, 4])]
    args = flags("--partition", "dirichlet", "--clients", "2")
    tests = partitions.client_test_indices(data, parts, args)
    counts = [np.bincount(y_test.numpy()[test], minlength=4).tolist() for test in tests]
    assert counts == [[6, 0, 2, 0], [2, 4, 0, 0]]
    assert len(set(np.concatenate(tests))) == 14


def test_describe(tmp_path, capsys):
    make_femnist(tmp_path)
    argv = "--dataset femnist --partition natural --clients 6 --client-test".split()
    analysis_partition.main([*argv, "--data-dir", str(tmp_path)])
    first, second, _, *lines = capsys.readouterr().out.splitlines()
    assert "56 training" in first and "6 clients" in second and "3 to 20 each" in second
    assert len(lines) == 6
    data = readers.femnist(tmp_path / "femnist")
    for line in lines:
        _, samples, classes, largest, test, bar = line.split()
        writer = next(w for w in range(6) if (data.writers == w).sum() == int(samples))
        counts = np.bincount(data.y[data.writers == writer].numpy())
        assert (int(classes), int(test)) == (
            (counts > 0).sum(),
            (data.writers_test == writer).sum(),
        )
        assert largest == f"{counts.max() / counts.sum():.0%}"
        assert len(bar) == round(50 * int(samples) / 20)


def test_describe_plots(tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["--dataset", "glyphs", "--clients", "5", "--plot", str(tmp_path / "labels.png")]
    analysis_partition.main(argv)
    assert Image.open(tmp_path / "labels.png").size[0] > 300
    assert "argument --plot" in refusal(analysis_partition.main, argv)  # a file that exists


@pytest.mark.parametrize("clients, classes", [(10, 62), (100, 10), (300, 200)])
def test_the_picture_labels_every_class(clients, classes):
    """By its name; where there is no room some, by whole numbers."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names = [f"kind {i}" for i in range(classes)]
    figure = pictures.label_counts(pyplot, np.ones((clients, classes)), names)
    figure.draw_without_rendering()
    for axis, shown in ((figure.axes[0].xaxis, []), (figure.axes[0].yaxis, names)):
        labels = axis.get_ticklabels()
        texts = [label.get_text() for label in labels]
        if texts != shown:
            assert len(texts) < 20 and "kind 0" not in texts and (classes > 100 or not shown)
        boxes = [label.get_window_extent() for label in labels]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
    pyplot.close(figure)
