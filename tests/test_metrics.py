"""Evaluation and the rows of metrics.jsonl."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, flags, parts_of, same

import common
import run_folder
import extras.glyphs
import fedavg
from extras import metrics


def test_evaluate_counts_the_whole_test_set():
    """In eval mode, whichever the network is in: image by image it is the same then."""
    data, net = extras.glyphs.glyphs(), common.build_net("resnet8", 62).train()
    net(data.normalise(data.x[:50]))  # statistics that are no batch's
    predicted = torch.zeros(200, dtype=torch.long)
    accuracy, loss = common.evaluate(net, data, flags(), predicted=predicted)
    assert not net.training
    out = torch.cat([net(data.normalise(x[None])) for x in data.x_test])
    assert torch.equal(predicted, out.argmax(1))
    hits = (predicted == data.y_test).double()
    assert accuracy == pytest.approx(100 * hits.mean().item())
    assert loss == pytest.approx(F.cross_entropy(out, data.y_test).item(), rel=1e-5)


@pytest.mark.parametrize(
    "y, predicted, balanced, f1",
    [
        # recalls 2/3, 0, 1; F1 2*2/(3+3), 0/(1+1), 2*1/(1+1); no class 3 anywhere
        ([0, 0, 0, 1, 2], [0, 0, 1, 0, 2], 500 / 9, 500 / 9),
        # class 3 is predicted alone: no recall, F1 0; class 1 is neither
        ([0, 0, 2, 2], [0, 3, 2, 2], 75, 100 * (2 / 3 + 1 + 0) / 3),
        ([1, 1], [1, 1], 100, 100),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0] * 10, 50, 100 * 18 / 19 / 2),  # accuracy 90
    ],
)
def test_metrics_of_scikit_learn(y, predicted, balanced, f1):
    found = metrics.readings(torch.tensor(y), torch.tensor(predicted), 4)
    assert found["test_balanced_acc"] == pytest.approx(balanced)
    assert found["test_macro_f1"] == pytest.approx(f1)


def test_metrics_against_their_definitions():
    """Class by class, from precision and recall, on random labels of which some are absent."""
    rng = np.random.default_rng(0)
    y, predicted = rng.integers(1, 8, 50), rng.integers(3, 12, 50)
    recalls, scores = [], []
    for c in sorted({*y, *predicted}):
        tp = ((y == c) & (predicted == c)).sum()
        recall = tp / max(1, (y == c).sum())
        precision = tp / max(1, (predicted == c).sum())
        recalls += [recall] if c in y else []
        scores.append(2 * precision * recall / max(1e-9, precision + recall))
    found = metrics.readings(torch.from_numpy(y), torch.from_numpy(predicted), 15)
    assert found["test_balanced_acc"] == pytest.approx(100 * np.mean(recalls))
    assert found["test_macro_f1"] == pytest.approx(100 * np.mean(scores))


@pytest.mark.parametrize("more", [[], ["--plain"]])
def test_metric_all_is_of_the_evaluated_network(tmp_path, more):
    argv = ["--metric", "all", "--eval-every", "2", "--client-test", "--lr", "0.1"]
    net, rows = fedavg.main([*TINY, *argv, *more, "--out", str(tmp_path / "run")])
    names = {"test_balanced_acc", "test_macro_f1"}
    assert not names & rows[0].keys() and names < rows[1].keys()
    data = extras.glyphs.glyphs()
    predicted = net.eval()(data.normalise(data.x_test)).argmax(1)
    found = metrics.readings(data.y_test, predicted, 62)
    assert {k: rows[1][k] for k in names} == pytest.approx(found)
    assert 0 < found["test_balanced_acc"] != pytest.approx(rows[1]["test_acc"])


def test_summary():
    """EMA of 10, 20 with factor 0.9: (0.9 * 1 + 2) / 0.19 by hand.

    The last five of 1..6 have mean 4 and population deviation sqrt(2)."""

    def summary(*values):
        return common.summary([{"test_acc": value} for value in values])

    assert summary(10, None, 20)["acc_ema"] == pytest.approx(2.9 / 0.19)
    assert summary(1, 2, 3, 4, 5, 6) | {"acc_ema": 0} == {
        "acc_ema": 0,
        "acc_last5_mean": 4,
        "acc_last5_std": pytest.approx(math.sqrt(2)),
        "best_acc": 6,
    }
    names = ("acc_ema", "acc_last5_mean", "acc_last5_std", "best_acc")
    assert summary(None) == dict.fromkeys(names)


def test_metrics(tmp_path):
    out = tmp_path / "run"
    argv = "--lr-decay 0.5 --eval-every 2 --rounds 3 --save-clients".split()
    net, rows = fedavg.main([*TINY, "--out", str(out), *argv])
    assert rows == [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["lr"] for row in rows] == [0.01, 0.005, 0.0025]
    assert [row["test_acc"] is None for row in rows] == [True, False, False]
    size = common.nbytes(net.state_dict())
    for row in rows:
        assert row["samples"] == 600
        assert row["clients"] == [0, 1, 2, 3]
        assert row["bytes_down"] == row["bytes_up"] == 4 * size
        assert row["samples_per_s"] == pytest.approx(600 / row["seconds"]["train"])
        assert row["peak_memory"] > 1e6
        assert set(row["seconds"]) == {"train", "aggregate", "evaluate", "other"}
        assert 3 < row["train_loss"] < 5
    assert rows[2]["best_acc"] == max(rows[1]["test_acc"], rows[2]["test_acc"])
    assert same(run_folder.load(out / "model.pt"), net.state_dict())
    # what was saved is what was averaged, by sample counts
    clients = [run_folder.load(out / "clients" / f"{k}-3.pt") for k in range(4)]
    sizes = np.array([len(part) for part in parts_of(flags())])
    expected = sum(n / 600 * c["classifier.weight"].double() for n, c in zip(sizes, clients))
    assert torch.allclose(net[-1].weight.double(), expected, atol=1e-6)


def test_validation_picks_the_best(tmp_path, monkeypatch):
    """60 of the 600 training samples, on which round 1 is best; the clients have the others."""
    scores = {200: iter([(1.0, 9.0), (3.0, 9.0), (2.0, 9.0)]), 60: iter([(7.0, 8.0), (5.0, 8.0)])}
    evaluated = []

    def evaluate(net, data, args, pool_map=map, predicted=None):
        evaluated.append((data.x_test, data.y_test, [v.clone() for v in net.parameters()]))
        return next(scores[len(data.y_test)], (6.0, 8.0))

    monkeypatch.setattr(common, "evaluate", evaluate)
    out = tmp_path / "run"
    words = [*TINY, "--rounds", "3", "--local-steps", "1", "--validation", "0.1"]
    _, rows = fedavg.main([*words, "--epochs", "1", "--out", str(out)])
    assert [row["val_acc"] for row in rows] == [7, 5, 6]
    assert [row["val_loss"] for row in rows] == [8, 8, 8]
    assert [row["test_acc"] for row in rows] == [1, 3, 2]
    assert [row["best_acc"] for row in rows] == [1, 1, 1]
    best = list(run_folder.load(out / "best.pt").values())
    assert all(torch.equal(a, b) for a, b in zip(best, evaluated[1][2]))
    data, args = extras.glyphs.glyphs(), flags("--validation", "0.1")
    kept = common.load_data(args)
    assert len(kept.x) == len(kept.y) == len(kept.writers) == 540
    assert torch.equal(kept.x_val, evaluated[1][0]) and torch.equal(kept.y_val, evaluated[1][1])

    def images(*parts):
        return sorted(image.numpy().tobytes() for part in parts for image in part)

    assert images(kept.x, kept.x_val) == images(data.x)
    other = common.load_data(flags("--validation", "0.1", "--data-seed", "1"))
    assert len(other.x_val) == 60


def test_own_samples_for_validation(tmp_path):
    """--validation 0 holds out none, and takes those that are there; 0.5 some of the others."""
    data = extras.glyphs.glyphs()
    own = dataclasses.replace(data, x_val=data.x_test[:50], y_val=data.y_test[:50])
    words = ["--local-steps", "1", "--rounds", "1", "--model", "cnn"]
    for i, (given, more, shown) in enumerate(
        [(data, [], False), (own, [], True), (data, ["--validation", "0.5"], True)]
    ):
        args = flags(*words, *more, "--out", str(tmp_path / str(i)))
        _, rows = common.run(args, fedavg.local_update, data=given)
        assert ("val_acc" in rows[0]) == shown


def test_table_of_rows(tmp_path):
    """As a dict of tensors, and one tensor in a file: of at most twice the rows."""
    g, table, expected = torch.Generator().manual_seed(0), {}, {}
    assert common.rows_of(table, [1, 2], 5).shape == (0, 5)
    for _ in range(500):
        k = int(torch.randint(10**6, 10**6 + 100, (), generator=g))
        row = torch.randn(5, generator=g)
        assert torch.equal(common.keep_row(table, k, row), expected.get(k, torch.zeros(5)))
        expected[k] = row
    assert torch.equal(
        common.rows_of(table, reversed(expected), 5), torch.stack([*expected.values()])
    )
    assert common.rows_of(table, [3], 5).shape == (0, 5)
    run_folder.save({"server": table}, tmp_path / "table")
    assert len(table["values"]) < 2 * len(expected)
    loaded = run_folder.load(tmp_path / "table")["server"]
    assert torch.equal(common.rows_of(loaded, expected, 5), torch.stack([*expected.values()]))
