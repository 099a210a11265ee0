"""Personal models: FedPer, FedBN and Ditto, their accuracies by client, bytes of a part."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, flags
from hand import batch, begin, check_step, close, finish, moved_network
from hand import normed_network, perturb, received_of, state_of, twins
from methods import SCRIPTS, needed

import common
import run_folder
import extras.glyphs
import fedavg
from extras import partitions


@pytest.mark.parametrize("name", ["fedper", "ditto", "fedbn"])
def test_accuracies_are_of_each_client_s_own_network(tmp_path, name):
    """By a loop of our own over the run's files; of four clients one has never taken part.

    Those of a resumed run are the same."""
    words = "--sample 0.5 --local-steps 4 --seed 5 --client-test --workers 1"
    words, out = [*TINY, *words.split(), *needed(name)], tmp_path / "run"
    net, rows = SCRIPTS[name].main([*words, "--out", str(out)])
    SCRIPTS[name].main([*words, "--rounds", "1", "--out", str(tmp_path / "b")])
    on = ["--out", str(tmp_path / "b"), "--resume", "--rounds", "2"]
    assert SCRIPTS[name].main(on)[1][-1]["personal_acc"] == rows[-1]["personal_acc"]
    table = run_folder.load(out / "checkpoint.pt")["clients"].tolist()
    states = {k: run_folder.load(out / "states" / f"{k}-{t}.pt") for k, t, _ in table}
    [absent] = {0, 1, 2, 3} - states.keys()
    args, data = flags(*words), extras.glyphs.glyphs()
    tests = partitions.client_test_indices(data, common.partition(data, args), args)
    expected, ours = [], []
    for k, test in enumerate(tests):
        for values, weights in ((expected, states.get(k, {}).get("personal", {})), (ours, {})):
            own = common.copy_net(net).eval()
            own.load_state_dict({**net.state_dict(), **weights})
            right = own(data.normalise(data.x_test[test])).argmax(1) == data.y_test[test]
            values.append(100 * right.double().mean().item())
    assert rows[-1]["personal_acc"][absent] == rows[-1]["client_acc"][absent]
    for key, values in (("personal_acc", expected), ("client_acc", ours)):
        assert rows[-1][key] == pytest.approx(values)
        found = [rows[-1][f"{key}_{k}"] for k in ("mean", "std", "worst", "best")]
        assert found == pytest.approx([f(values) for f in (np.mean, np.std, min, max)])


def test_summary_lists_all_clients():
    """Of hits 1, 0, 1, 1: client 0 has half of two, client 1 nothing to test, client 2 all."""
    tests = [np.array([0, 1]), np.array([], np.int64), np.array([2, 3])]
    found = partitions.client_summary(np.array([True, False, True, True]), tests, "x")
    assert found["x"] == [50, None, 100]
    assert (found["x_mean"], found["x_std"], found["x_var"]) == (75, 25, 625)
    assert (found["x_worst"], found["x_best"], found["x_p10"]) == (50, 100, 55)


@pytest.mark.parametrize("kept", [True, False])
def test_ditto_step_by_hand(kept):
    """The global network's step is FedAvg's; v moves by -lr (grad F(v) + lam (v - w)).

    Without a state v begins at w, from which there is no pull."""
    personal = state_of(moved_network(0.1, seed=4))
    state = {"personal": personal} if kept else {}
    worker, step, generator, client, _, w = begin("ditto", ["--lam", "0.7"], state=state)
    x, y = batch()
    twin, own = twins(worker, personal if kept else w)
    v = dict(own.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(own(x), y), list(v.values()))
    expected = [p - 0.1 * (g + 0.7 * (p - w[k])) for (k, p), g in zip(v.items(), grads)]
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y))
    finish(generator)
    assert close([client.state["personal"][k] for k in v], expected)
    assert client.bytes_up == client.bytes_down == 0  # beside the model


@pytest.mark.parametrize("name, kept", [("fedper", "3."), ("fedbn", ".1.")])
def test_what_stays_at_home(name, kept):
    """A client trains its own part and the global rest, and sends the rest.

    normed_network(): batch norm is the second layer of its two blocks, the classifier is 3."""
    other = normed_network()
    perturb(other, 0.3)
    for v in other.buffers():
        v.add_(1)
    net = normed_network()
    mine = {k: v.double() if v.is_floating_point() else v for k, v in state_of(other).items()}
    mine = {k: v for k, v in mine.items() if kept in k}
    assert len(mine) == (2 if name == "fedper" else 10)
    worker, step, generator, client, args, w = begin(name, net=net, state={"personal": mine})
    for k, v in state_of(net).items():
        assert torch.equal(w[k], mine[k] if k in mine else v), k
    x, y = batch()
    twin, _ = twins(worker, w)
    check_step(worker, step, x, y, twin, F.cross_entropy(twin(x), y))
    finish(generator)
    ends = state_of(worker.net)
    assert client.state["personal"].keys() == mine.keys()
    assert all(torch.equal(client.state["personal"][k], ends[k]) for k in mine)
    rest = common.nbytes(ends) - common.nbytes(mine)
    assert client.model == {"up": rest, "down": rest}
    before = state_of(net)
    received = received_of(net, (2, -4), (0.75, 0.25))
    SCRIPTS[name].aggregate(net, received, {}, args)
    for k, v in net.state_dict().items():
        if v.is_floating_point():
            expected = before[k] if k in mine else before[k] + 0.5
            assert torch.allclose(v, expected, rtol=1e-12, atol=1e-12), k


def test_a_part_of_the_model_is_counted(tmp_path):
    """Numbers of bytes, tensors, and the default, beside what is sent anyway."""

    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        if client.id == 0:
            client.sends(np.int64(80))
            client.receives([torch.zeros(3), {"a": torch.zeros(2, dtype=torch.float64)}])
        if client.id == 1:
            client.sends([])
            client.receives(0)
        client.sum("more", torch.zeros(5))

    args = flags("--rounds", "1", "--out", str(tmp_path / "run"))
    net, [row] = common.run(args, local_update)
    size = common.nbytes(net.state_dict())
    assert row["bytes_up"] == 80 + 2 * size + 4 * 20
    assert row["bytes_down"] == 28 + 2 * size


def test_weights_that_are_not_the_network_s(tmp_path):
    def local_update(worker, client, server, args):
        yield from fedavg.local_update(worker, client, server, args)
        client.state["personal"] = {"head": torch.zeros(1)}

    args = flags("--client-test", "--rounds", "1", "--out", str(tmp_path / "run"))
    with pytest.raises(common.UserError, match="no such 'head'"):
        common.run(args, local_update)
