"""rFedAvg, its noisy variant and its authors' reading, by hand."""

import functools

import numpy as np
import pytest
import qfedavg
import rfedavg
import rfedavg_code
import rfedavg_dp
import scaffold
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import TINY, args_of, flags, same
from hand import batch, begin, check_step, finish, normed_network, state_of, twins
from methods import SCRIPTS, final

import common
import engine
import run_folder
import extras.glyphs


@pytest.mark.parametrize(
    "name, argv, chosen, down",
    [
        ("rfedavg", "--variant rfedavg", [1, 4, 7], 10),
        ("rfedavg", "--variant rfedavg+", [1, 4, 7], 1),
        ("rfedavg_dp", "", [1, 4, 7], 1),
        ("rfedavg_code", "--variant rfedavg", [1, 4], 2),
        ("rfedavg_code", "--variant rfedavg+", [0, 1, 4], 1),
    ],
)
def test_rfedavg_step(name, argv, chosen, down):
    """rfedavg: CE + lam mean_j |phi - delta_j|^2; rfedavg+: CE + lam |phi - mean_j delta_j|^2.

    0 trains, 0, 1, 3 and 4 are sampled; down: deltas that are downloaded. The reading of the code
    takes those of sampled clients alone, in rfedavg+ the own one too."""
    g = torch.Generator().manual_seed(0)
    deltas = {j: torch.randn(256, generator=g) for j in (0, 1, 4, 7)}
    x, y = batch()
    argv = [*argv.split(), "--lam", "0.3", "--clients", "10"]
    server = {"clients": [0, 1, 3, 4], "deltas": {}}
    for j, delta in [*((j, delta + 1) for j, delta in deltas.items()), *deltas.items()]:
        if name == "rfedavg_code":  # each in place of another one
            common.keep_row(server["deltas"], j, delta)
        else:
            SCRIPTS[name].keep(server, j, delta)
    worker, step, generator, client, args, w = begin(name, argv, server=server)
    twin, _ = twins(worker, w)
    phi = twin[:-1](x)
    others, mean = torch.stack([deltas[j] for j in chosen]), phi.mean(0)
    if "rfedavg" in argv:
        r_k = (mean - others).square().sum(1).mean()
    else:
        r_k = (mean - others.mean(0)).square().sum()
    total = F.cross_entropy(twin[-1](phi), y) + 0.3 * r_k
    check_step(worker, step, x, y, twin, total, rtol=1e-5, atol=1e-6)  # features are fp32
    assert client.bytes_down == 4 * 256 * down
    finish(generator)
    assert ("delta" in client.records) == ("rfedavg" in argv)  # or after the new global model


@pytest.mark.parametrize("module", [rfedavg, rfedavg_dp])
def test_sums_over_deltas_stay_exact(module):
    """After thousands of deltas in place of others, as if they had just been added up."""
    g = torch.Generator().manual_seed(0)
    server, deltas = {}, {}
    for _ in range(3000):
        k = int(torch.randint(20, (), generator=g))
        deltas[k] = 30 * torch.randn(8, generator=g)
        module.keep(server, k, deltas[k])
    stacked = torch.stack(list(deltas.values())).double()
    expected = stacked.sum(0)
    if module is rfedavg:
        expected = torch.cat([expected, stacked.square().sum()[None]])
    assert server["sum"].dtype == torch.float64
    assert torch.allclose(server["sum"], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "script, variant, sample, down",
    [
        (rfedavg, "rfedavg", "1", 4),
        (rfedavg, "rfedavg+", "1", 1),
        (rfedavg, "rfedavg+", "0.5", 1),
        (rfedavg_code, "rfedavg", "1", 3),
        (rfedavg_code, "rfedavg+", "0.5", 1),
    ],
)
def test_rfedavg_deltas(tmp_path, script, variant, sample, down):
    """Deltas of the local network at the end of the round, or of the new one, in eval mode.

    Bytes are 4S + 4dN down, 4S + 4d up; with sampling rfedavg+ downloads the new model again."""
    data, out = extras.glyphs.glyphs(), tmp_path / "run"
    argv = [*TINY, "--variant", variant, "--sample", sample, "--rounds", "3", "--out", str(out)]
    run = functools.partial(common.run, data=data, net=normed_network())
    net, rows = script.main([*argv, "--save-clients"], run=run)
    size, delta = common.nbytes(net.state_dict()), 4 * 16
    sampled, again = (4, 0) if sample == "1" else (2, size)
    expected = sampled * (size + down * delta + again)
    assert [row["bytes_down"] for row in rows[1:]] == [expected] * 2
    assert all(row["bytes_up"] == sampled * (size + delta) for row in rows)
    assert rows[1]["bytes_delta"] == sampled * (down + 1) * delta
    assert ("synchronise" in rows[0]["seconds"]) == (variant == "rfedavg+")
    deltas = run_folder.load(out / "checkpoint.pt")["server"]["deltas"]
    parts = common.partition(data, flags())
    for k in rows[-1]["clients"]:
        rng, chosen = np.random.default_rng([*b"delta", 0, 3, k]), parts[k]  # seed, round, client
        if script is rfedavg_code:
            chosen = rng.permutation(chosen)[:32]
        if variant == "rfedavg":
            net.load_state_dict(run_folder.load(out / "clients" / f"{k}-3.pt"))
        mean = net.eval()[:-1](data.normalise(data.x[chosen])).mean(0)
        assert torch.allclose(common.rows_of(deltas, [k], 16)[0], mean, atol=1e-5)


@pytest.mark.parametrize("module", [rfedavg, rfedavg_dp])
def test_mean_feature_counts_samples_of_unequal_batches(module):
    """Features 1 and 2, then 6: their mean is 3, and not that of 1.5 and 6."""
    net = nn.Sequential(nn.Identity(), common.Classifier(1, 2))
    batches = [(torch.tensor([[1.0], [2.0]]), None), (torch.tensor([[6.0]]), None)]
    assert module.mean_feature(net, batches).tolist() == [3]


def test_rfedavg_noise():
    """Clipped to norm C; the noise has standard deviation sigma C / B, B = 32."""
    argv = [*TINY, "--noise", "2", "--noise-clip", "0.01"]
    args, delta = args_of(rfedavg_dp, *argv), torch.full((256,), 3.0)
    rngs = [common.seeded_rng("test", i) for i in range(60)]
    draws = torch.stack([rfedavg_dp.noisy(delta, rng, args) for rng in rngs])
    assert draws.std(0).mean().item() == pytest.approx(2 * 0.01 / 32, rel=0.1)
    assert draws.mean(0).norm().item() == pytest.approx(0.01, rel=0.2)
    args.noise = 0.0
    short = delta / delta.norm() / 200  # of norm 0.005, which is not clipped
    assert torch.allclose(rfedavg_dp.noisy(short, rngs[0], args), short)


def test_rfedavg_without_noise_or_clipping_is_rfedavg_plus(tmp_path):
    argv = "--rounds 3 --local-steps 2 --lam 0.1".split()
    plus, _ = final("rfedavg", tmp_path / "plus", *argv)
    for noise, clip in (("0", "1e9"), ("1", "1")):
        words = [*argv, "--noise", noise, "--noise-clip", clip]
        assert same(plus, final("rfedavg_dp", tmp_path / noise, *words)[0]) == (noise == "0")


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_dp", "rfedavg_code"])
def test_rfedavg_has_no_term_without_another_client(name):
    """In the first round there are no deltas: the loss is CE, and nothing more is downloaded."""
    worker, step, _, client, _, w = begin(name, ["--lam", "1"])
    twin, _ = twins(worker, w)
    x, y = batch()
    assert step(x, y).item() == pytest.approx(F.cross_entropy(twin(x), y).item(), rel=1e-9)
    assert client.bytes_down == 0


def test_measuring_leaves_the_network_alone():
    """Losses, features and gradients are those of eval mode, and move no statistic."""
    net = common.build_net("resnet8", 62)
    worker = engine.Worker(net, extras.glyphs.glyphs(), flags("--model", "resnet8"), 4)
    before, client = state_of(worker.net), common.Client(0, np.arange(12), {})
    worker._begin(client, {"round": 1}, net.state_dict())
    [(x, y)] = worker.batches(client)
    frozen = worker.frozen("test")
    with torch.no_grad():
        z, loss = frozen[:-1](x).mean(0), F.cross_entropy(frozen(x), y)
    for module in (rfedavg, rfedavg_dp):
        delta = module.mean_feature(worker.net, worker.batches(client))
        assert torch.allclose(delta, z, atol=1e-6)
    found = qfedavg.local_loss(worker.net, worker.batches(client), 12)
    assert torch.allclose(found.float(), loss)
    assert worker.net.training
    scaffold.gradient(worker.net, worker.batches(client), 12)
    assert same(before, worker.net.state_dict())
    assert worker.net.training
