"""The loop against numpy: sampling, batches, SGD, weights, averages, evaluation, rows."""

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import flags, plainly

import common
import fedavg

CLASSES, COLUMNS = 3, 5


def data_of(n=90):
    """Return a Data of rows of numbers, whose class is the largest of the first three columns."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, COLUMNS)).astype(np.float32)
    y = x[:, :CLASSES].argmax(1)
    return common.Data(x[30:], y[30:], x[:30], y[:30], CLASSES)


def softmax_loss(x, y, v):
    """Return the mean cross-entropy of a linear classifier v = (W, b), its gradient, its hits."""
    z = x @ v[0].T + v[1]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(CLASSES)[y]) / len(y)
    return -np.log(p[range(len(y)), y]).mean(), [error.T @ x, error.sum(0)], z.argmax(1) == y


def batches_of(part, args, rng):
    """Return the samples of each step of a client's round."""
    size, full = args.batch_size, len(part) // args.batch_size * args.batch_size
    each = len(range(0, full if args.drop_last else len(part), size))
    epochs = -(-args.local_steps // each) if args.local_steps else args.epochs
    orders = rng.permuted(np.tile(part, (epochs, 1)), axis=1)
    return [o[i * size : (i + 1) * size] for o in orders for i in range(each)][: args.local_steps]


def train_by_numpy(v, m, x, y, batches, lr, args):
    """Return (W, b), momentum and losses after a client's steps of SGD."""
    losses = []
    for index in batches:
        loss, g, _ = softmax_loss(x[index], y[index], v)
        losses.append(loss * len(index))
        norm = np.sqrt(sum((a**2).sum() for a in g))
        factor = min(1, args.clip / norm) if args.clip else 1
        g = [factor * a + args.weight_decay * b for a, b in zip(g, v)]
        m = [args.momentum * a + b for a, b in zip(m, g)]
        step = [b + args.momentum * a for a, b in zip(m, g)] if args.nesterov else m
        v = [a - lr * b for a, b in zip(v, step)]
    return v, m, losses


def readings(accuracies):
    """Return what a row says of the accuracies so far."""
    weights, last = 0.9 ** np.arange(len(accuracies))[::-1], np.array(accuracies[-5:])
    return {
        "acc_ema": weights @ accuracies / weights.sum(),
        "acc_last5_mean": last.sum() / len(last),
        "acc_last5_std": (((last - last.mean()) ** 2).sum() / len(last)) ** 0.5,
        "best_acc": max(accuracies),
    }


def loop_by_numpy(data, v, parts, args):
    """Return (W, b) after the rounds, and what their rows say."""
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
            batches, m = batches_of(parts[k], args, rng), [0, 0]
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
        traffic = 4 * count * sum(a.size for a in v)
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
    ],
)
def test_the_loop_by_numpy(tmp_path, argv, run):
    words = "--clients 5 --partition dirichlet --min-size 4 --rounds 6 --epochs 2 --batch-size 4"
    out = ["--out", str(tmp_path / "run")]
    args, data = flags(*words.split(), "--lr", "0.2", *argv.split(), *out), data_of()
    torch.manual_seed(1)
    net = nn.Sequential(common.Classifier(COLUMNS, CLASSES))
    v = [p.detach().double().numpy() for p in net.parameters()]
    found, rows = run(args, fedavg.local_update, data=data, net=net)
    expected, by_numpy = loop_by_numpy(data, v, common.partition(data, args), args)
    for a, b in zip(found.parameters(), expected):
        assert np.allclose(a.detach().numpy(), b, atol=1e-6)
    for row, numbers in zip(rows, by_numpy, strict=True):
        assert row["clients"] == numbers.pop("clients")
        assert {k: row[k] for k in numbers} == pytest.approx(numbers, rel=1e-5)
