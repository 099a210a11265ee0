"""The loop against numpy: sampling, batches, SGD, RMSProp, averages, evaluation, rows."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, flags, plainly

import common
import run_folder
import extras.glyphs
import fedavg
from extras import metrics

CLASSES, COLUMNS = 3, 5


class Double(common.Data):
    def normalise(self, x):
        return super().normalise(x).double()


def data_of(n=90):
    """Return a Data of rows of numbers, whose class is the largest of the first three columns."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, COLUMNS)).astype(np.float32)
    y = x[:, :CLASSES].argmax(1)
    return Double(x[30:], y[30:], x[:30], y[:30], CLASSES)


def softmax_loss(x, y, v):
    """Return the mean cross-entropy of a linear classifier v = (W, b), its gradient, its hits."""
    z = x @ v[0].T + v[1]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(CLASSES)[y]) / len(y)
    return -np.log(p[range(len(y)), y]).mean(), [error.T @ x, error.sum(0)], z.argmax(1) == y


def batches_of(part, args, rng):
    size, full = args.batch_size, len(part) // args.batch_size * args.batch_size
    each = len(range(0, full if args.drop_last else len(part), size))
    epochs = -(-args.local_steps // each) if args.local_steps else args.epochs
    orders = rng.permuted(np.tile(part, (epochs, 1)), axis=1)
    return [o[i * size : (i + 1) * size] for o in orders for i in range(each)][: args.local_steps]


def train_by_numpy(v, m, x, y, batches, lr, args):
    """Return (W, b), the optimizer's state and losses after a client's steps."""
    losses, (m, s) = [], m
    for index in batches:
        loss, g, _ = softmax_loss(x[index], y[index], v)
        losses.append(loss * len(index))
        norm = np.sqrt(sum((a**2).sum() for a in g))
        factor = min(1, args.clip / (norm + 1e-6)) if args.clip else 1  # as torch
        g = [factor * a + args.weight_decay * b for a, b in zip(g, v)]
        if args.optimizer == "rmsprop":
            s = [0.99 * a + 0.01 * b**2 for a, b in zip(s, g)]
            g = [b / (np.sqrt(a) + 1e-8) for a, b in zip(s, g)]
        m = [args.momentum * a + b for a, b in zip(m, g)]
        nesterov = args.nesterov and args.optimizer == "sgd"
        step = [b + args.momentum * a for a, b in zip(m, g)] if nesterov else m
        v = [a - lr * b for a, b in zip(v, step)]
    return v, (m, s), losses


def readings(accuracies):
    weights, last = 0.9 ** np.arange(len(accuracies))[::-1], np.array(accuracies[-5:])
    return {
        "acc_ema": weights @ accuracies / weights.sum(),
        "acc_last5_mean": last.sum() / len(last),
        "acc_last5_std": (((last - last.mean()) ** 2).sum() / len(last)) ** 0.5,
        "best_acc": max(accuracies),
    }


def loop_by_numpy(data, v, parts, args):
    x, x_test = data.x.double().numpy(), data.x_test.double().numpy()
    y, y_test = data.y.numpy(), data.y_test.numpy()
    kept, rows, accuracies = {}, [], []
    count = max(1, int(np.floor(args.clients * args.sample + 0.5)))
    for t in range(1, args.rounds + 1):
        rng = np.random.default_rng([*b"sample", args.seed, t])
        clients = sorted(rng.choice(args.clients, count, replace=False).tolist())
        ends, shares, losses, samples = [], [], 0, 0
        lr = args.lr * args.lr_decay ** (t - 1)
        for k in clients:
            rng = np.random.default_rng([*b"batches", args.seed, t, k])
            batches, m = batches_of(parts[k], args, rng), ([0, 0], [0, 0])
            if args.persist_opt:
                m = kept.get(k, m)
            end, kept[k], found = train_by_numpy(v, m, x, y, batches, lr, args)
            ends.append(end)
            n = len(parts[k]) // args.batch_size if args.drop_last else len(parts[k])
            shares.append(1 if args.weighting == "uniform" else n)
            losses, samples = losses + sum(found), samples + sum(map(len, batches))
        v = [sum(s * a for s, a in zip(shares, each)) / sum(shares) for each in zip(*ends)]
        loss, _, hits = softmax_loss(x_test, y_test, v)
        accuracies.append(100 * hits.mean())
        row = {"round": t, "lr": lr, "clients": clients, "samples": samples, "test_loss": loss}
        row |= {"train_loss": losses / samples, "test_acc": accuracies[-1]} | readings(accuracies)
        traffic = 8 * count * sum(a.size for a in v)
        rows.append(row | {"bytes_down": traffic, "bytes_up": traffic})
    return v, rows


@pytest.mark.parametrize("run", [plainly, common.run])
@pytest.mark.parametrize(
    "argv",
    [
        "--sample 0.5 --lr-decay 0.8",  # 2.5 clients are 3
        "--sample 0.1 --epochs 3 --momentum 0",  # 0.5 are 1
        "--sample 0.4 --weighting uniform --no-nesterov --seed 3",
        "--drop-last --clip 0.2 --data-seed 2",
        "--local-steps 5 --persist-opt --weight-decay 0.1",
        "--optimizer rmsprop --lr 0.001 --weight-decay 0.01",
        "--optimizer rmsprop --lr 0.001 --persist-opt",
    ],
)
def test_the_loop_by_numpy(tmp_path, argv, run):
    words = "--clients 5 --partition dirichlet --min-size 4 --rounds 6 --epochs 2 --batch-size 4"
    out = ["--out", str(tmp_path / "run")]
    args, data = flags(*words.split(), "--lr", "0.2", *argv.split(), *out), data_of()
    torch.manual_seed(1)
    net = nn.Sequential(common.Classifier(COLUMNS, CLASSES)).double()
    v = [p.detach().numpy().copy() for p in net.parameters()]
    found, rows = run(args, fedavg.local_update, data=data, net=net)
    expected, by_numpy = loop_by_numpy(data, v, common.partition(data, args), args)
    for a, b in zip(found.parameters(), expected):
        assert np.allclose(a.detach().numpy(), b, rtol=1e-8, atol=1e-10)
    for row, numbers in zip(rows, by_numpy, strict=True):
        assert row["clients"] == numbers.pop("clients")
        assert {k: row[k] for k in numbers} == pytest.approx(numbers, rel=1e-6)


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
        ([1, 1], [1, 7], 50, 100 * (2 / 3 + 0) / 2),  # the network has more outputs than classes
    ],
)
def test_metrics_of_scikit_learn(y, predicted, balanced, f1):
    found = metrics.readings(torch.tensor(y), torch.tensor(predicted), 4)
    assert found["test_balanced_acc"] == pytest.approx(balanced)
    assert found["test_macro_f1"] == pytest.approx(f1)


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


def test_metrics(tmp_path):
    """What numpy's loop cannot tell: rounds without evaluation, times, memory."""
    argv = ["--eval-every", "2", "--rounds", "3", "--out", str(tmp_path / "run")]
    _, rows = fedavg.main([*TINY, *argv])
    assert [row["test_acc"] is None for row in rows] == [True, False, False]
    for row in rows:
        assert row["samples_per_s"] == pytest.approx(600 / row["seconds"]["train"])
        assert row["peak_memory"] > 1e6
        assert set(row["seconds"]) == {"train", "aggregate", "evaluate", "other"}


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
    _, rows = fedavg.main([*words, "--out", str(out)])
    found = [[row[k] for k in ("val_acc", "val_loss", "test_acc", "best_acc")] for row in rows]
    assert found == [[7, 8, 1, 1], [5, 8, 3, 1], [6, 8, 2, 1]]
    best = list(run_folder.load(out / "best.pt").values())
    assert all(torch.equal(a, b) for a, b in zip(best, evaluated[1][2]))
    kept = common.load_data(flags("--validation", "0.1"))
    assert len(kept.x) == len(kept.y) == len(kept.writers) == 540
    assert torch.equal(kept.x_val, evaluated[1][0]) and torch.equal(kept.y_val, evaluated[1][1])
    again = torch.cat([kept.x, kept.x_val]).flatten(1).unique(dim=0)
    assert torch.equal(again, extras.glyphs.glyphs().x.flatten(1).unique(dim=0))


@pytest.mark.parametrize("own, more, shown", [(0, "0", False), (50, "0", True), (0, "0.5", True)])
def test_own_samples_for_validation(tmp_path, own, more, shown):
    """--validation 0 holds out none, and takes those that are there; 0.5 some of the others."""
    data = extras.glyphs.glyphs()
    if own:
        data = dataclasses.replace(data, x_val=data.x_test[:own], y_val=data.y_test[:own])
    words = f"--local-steps 1 --rounds 1 --validation {more} --out {tmp_path}/run"
    args = flags(*words.split())
    _, [row] = common.run(args, fedavg.local_update, data=data)
    assert ("val_acc" in row) == shown


def test_table_of_rows(tmp_path):
    """As a dict of tensors, and one tensor in a file: of at most twice the rows."""
    g, table, expected = torch.Generator().manual_seed(0), {}, {}
    assert common.rows_of(table, [1, 2], 5).shape == (0, 5)
    for _ in range(500):
        k = int(torch.randint(10**6, 10**6 + 100, (), generator=g))
        row = torch.randn(5, generator=g)
        assert torch.equal(common.keep_row(table, k, row), expected.get(k, torch.zeros(5)))
        expected[k] = row
    assert common.rows_of(table, [3], 5).shape == (0, 5)
    assert len(table["values"]) < 2 * len(expected)
    run_folder.save({"server": table}, tmp_path / "table")
    for found in (table, run_folder.load(tmp_path / "table")["server"]):
        rows = common.rows_of(found, reversed(expected), 5)
        assert torch.equal(rows, torch.stack([*expected.values()]))
