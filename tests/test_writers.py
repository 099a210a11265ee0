"""Who gets which samples: writers and their groups, clients' test sets, describing a partition."""

import numpy as np
import pytest
import torch
from conftest import flags
from PIL import Image
from support import make_femnist

import common
from analysis import partition as analysis_partition
from extras import partitions, readers


def test_writers_are_grouped_and_tested_together(tmp_path):
    """Users are dealt to clients whole; the test set is that of the chosen users; IID rows deal the
    same samples."""
    make_femnist(tmp_path)
    argv = ["--dataset", "femnist", "--data-dir", str(tmp_path), "--clients", "2", "--users", "5"]
    args = flags(*argv, "--partition", "natural")
    data = common.load_data(args)
    parts = common.partition(data, args)
    groups = [set(data.writers[part]) for part in parts]
    assert sorted(map(len, groups)) == [2, 3]
    assert groups == [set(g) for g in partitions.natural_groups(data.writers, 2, args.data_seed, 5)]
    assert not groups[0] & groups[1]
    for group, part in zip(groups, parts):
        assert np.isin(data.writers, list(group)).sum() == len(part)
    assert set(data.writers_test) == groups[0] | groups[1]
    assert len(data.x_test) == len(data.writers_test)
    iid_parts = common.partition(data, flags(*argv, "--partition", "natural-iid"))
    assert np.array_equal(np.sort(np.concatenate(iid_parts)), np.sort(np.concatenate(parts)))
    assert abs(len(iid_parts[0]) - len(iid_parts[1])) <= 1
    assert set(data.writers[iid_parts[0]]) & set(data.writers[iid_parts[1]])
    with pytest.raises(common.UserError, match="--users 7: the data set has 6 writers"):
        partitions.natural_groups(data.writers, 2, 0, 7)


# --- clients' test sets


def test_client_test_indices_follow_the_classes():
    """Client 0 holds 3/4 of class 0 and all of class 2, client 1 the rest; nobody holds class 3.
    8, 4, 2 and 5 test samples."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    y_test = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3] * 5)
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    data = common.Data(x.expand(7, 1, 8, 8), y, x.expand(19, 1, 8, 8), y_test, 4)
    parts = [np.array([0, 6, 1, 2]), np.array([3, 5, 4])]
    args = flags("--partition", "dirichlet", "--clients", "2")
    tests = partitions.client_test_indices(data, parts, args)
    counts = [np.bincount(y_test.numpy()[test], minlength=4).tolist() for test in tests]
    assert counts == [[6, 0, 2, 0], [2, 4, 0, 0]]
    assert len(set(np.concatenate(tests))) == 14


def test_client_test_indices_follow_the_writers(tmp_path):
    make_femnist(tmp_path)
    argv = "--dataset femnist --partition natural --clients 2 --users 4".split()
    args = flags(*argv, "--data-dir", str(tmp_path))
    data = common.load_data(args)
    parts = common.partition(data, args)
    tests = partitions.client_test_indices(data, parts, args)
    assert [set(data.writers_test[t]) for t in tests] == [set(data.writers[p]) for p in parts]
    assert sorted(np.concatenate(tests).tolist()) == list(range(len(data.y_test)))


# --- describing a partition


def test_describe(tmp_path, capsys):
    make_femnist(tmp_path)
    argv = "--dataset femnist --partition natural --clients 6 --client-test".split()
    analysis_partition.main([*argv, "--data-dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert "56 training" in lines[0]
    assert "6 clients" in lines[1]
    assert "3 to 20 each" in lines[1]
    assert len(lines) == 9
    data = readers.femnist(tmp_path / "femnist")
    for line in lines[3:]:
        _, samples, classes, largest, test, bar = line.split()
        writer = next(w for w in range(6) if (data.writers == w).sum() == int(samples))
        counts = np.bincount(data.y[data.writers == writer].numpy())
        assert int(classes) == (counts > 0).sum()
        assert largest == f"{counts.max() / counts.sum():.0%}"
        assert len(bar) == round(50 * int(samples) / 20)
        assert int(test) == (data.writers_test == writer).sum()


def test_describe_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = ["--dataset", "glyphs", "--clients", "5", "--plot"]
    analysis_partition.main([*argv, str(tmp_path / "labels.png")])
    assert Image.open(tmp_path / "labels.png").size[0] > 300
    for more, word in (
        ([str(tmp_path / "labels.png")], "exists already"),
        ([str(tmp_path / "labels.xyz")], "xyz"),
        ([str(tmp_path / "missing" / "labels.png")], "no folder"),
        ([], "--plot"),
    ):
        with pytest.raises(common.UserError, match=word):
            analysis_partition.main([*argv, *more])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.png"]
