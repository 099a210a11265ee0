"""Every method ends with the weights of --plain, bit for bit, by how many workers, cut or not."""

import functools
import json

import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, plainly, same
from methods import SCRIPTS, SHORT, VARIANTS, needed
from runs import VARIES, assert_equal_runs, rows_of

import common
import fedavg


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def unevaluated(monkeypatch):
    """Leave the evaluation out, which takes the most of a short run and changes no weight."""
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))


def check(name, out, *argv):
    """Check that the plain run and the engine end with the same weights."""
    words = [*TINY, *needed(name, argv), "--workers", "1", *argv]
    weights = SCRIPTS[name].main(words, run=plainly)[0].state_dict()
    assert same(weights, SCRIPTS[name].main([*words, "--out", str(out)])[0].state_dict())


@pytest.mark.parametrize("name, more", [*VARIANTS, ("fedavg", "--augment rotate10,crop,flip")])
def test_every_method(tmp_path, unevaluated, name, more):
    """And two workers, whose run ends after two rounds and goes on, leave what one leaves."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*SHORT, *more.split()]
    check(name, one, *words)
    words = [*TINY, *needed(name, words), *words, "--rounds", "2", "--workers", "2"]
    SCRIPTS[name].main([*words, "--out", str(two)])
    SCRIPTS[name].main(["--resume", "--rounds", "3", "--out", str(two)])
    assert_equal_runs(one, two)
    assert sum(row["samples"] for row in rows_of(one)) < 3 * 2 * 4 * 16  # not all batches are full


@pytest.mark.parametrize(
    "name, more",
    [
        ("fedavg", "--validation 0.1 --client-test --eval-every 2"),
        ("rfedavg", "--sample 0.5"),
        ("scaffold", "--client-test"),
    ],
)
def test_rows_are_those_of_the_run(tmp_path, name, more):
    """All but times, memory and checksums, server["report"] included; in metrics.jsonl too."""
    words = [*TINY, "--rounds", "3", "--workers", "1", *more.split()]
    _, rows = SCRIPTS[name].main([*words, "--out", str(tmp_path / "run")])
    _, found = SCRIPTS[name].main([*words, "--plain", "--out", str(tmp_path / "plain")])
    assert [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").open()] == found
    assert [row.keys() - {"crc32"} for row in rows] == [row.keys() for row in found]
    for a, b in zip(rows, found):
        assert {k: a[k] for k in b if k not in VARIES} == {k: b[k] for k in b if k not in VARIES}
        assert a["seconds"].keys() == b["seconds"].keys()


def test_dropout_is_of_the_client_and_round(tmp_path, unevaluated):
    """By --plain, two workers, and a run that is cut and goes on, whatever was drawn before."""
    net = common.build_net("cnn", 62)
    net[2].append(nn.Dropout(0.5))
    run = functools.partial(common.run, net=net)
    words = [*TINY, "--local-steps", "3", "--workers", "2", "--out"]
    plain, _ = fedavg.main([*words[:-1], "--rounds", "2", "--workers", "1", "--plain"], run=run)
    fedavg.main([*words, str(tmp_path / "cut"), "--rounds", "1"], run=run)
    torch.rand(1)
    resume = ["--resume", "--rounds", "2", "--workers", "2", "--out", str(tmp_path / "cut")]
    cut, _ = fedavg.main(resume, run=run)
    assert same(plain.state_dict(), cut.state_dict())
    net[2][-1].p = 0.0
    without, _ = fedavg.main([*words, str(tmp_path / "without"), "--rounds", "2"], run=run)
    assert not same(without.state_dict(), cut.state_dict())


@pytest.mark.parametrize("run", [plainly, common.run])
def test_draws_after_round_are_of_a_client(tmp_path, run):
    """Whatever worker draws: of this seed, round, and client, or the first one; in eval mode."""
    found = []

    def after_round(worker, clients, server, args):
        assert not any(worker.map(lambda w, _: torch.tensor(w.net.training), clients))
        numbers = worker.map(lambda w, _: torch.tensor(w.rng("x").random()), clients)
        keys = [(args.seed, server["round"], client.id) for client in clients]
        wanted = [common.seeded_rng("x", *key).random() for key in keys]
        found.append(numbers == [torch.tensor(number) for number in wanted])
        found.append(worker.rng("x").random() == wanted[0])

    words = "--local-steps 1 --workers 2 --out".split()
    run(flags(*words, str(tmp_path / "run")), fedavg.local_update, after_round=after_round)
    assert found == [True] * 4


def test_on_round_ends_a_plain_run(capsys):
    """It says each round in a line; training ends after the next round that is evaluated."""
    words = [word for word in TINY if word != "--quiet"]
    args, seen = flags(*words, "--plain", "--rounds", "5", "--eval-every", "3"), []
    args.quiet = False

    def on_round(row, net):
        seen.append(row["round"])
        return row["round"] == 2

    _, rows = common.run(args, fedavg.local_update, on_round=on_round)
    assert seen == [1, 2, 3] and [row["round"] for row in rows] == [1, 2, 3]
    lines = capsys.readouterr().out.splitlines()
    starts = ["plain run", "round   1/5", "round   2/5", "round   3/5", "last "]
    assert [line.startswith(start) for line, start in zip(lines, starts)] == [True] * 5


@pytest.mark.parametrize("workers", ["1", "2"])
def test_threads_follow_the_engine_s(tmp_path, monkeypatch, unevaluated, workers):
    """On two cores, one worker of two threads or two of one: sums inside operators differ."""
    monkeypatch.setattr(common, "CORES", 2)
    argv = "--model resnet56 --batch-size 16 --local-steps 3 --clients 2 --rounds 1".split()
    check("fedavg", tmp_path / "run", *argv, "--workers", workers)
