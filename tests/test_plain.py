"""--plain trains every method to the weights of the engine, bit for bit."""

import json

import pytest
import torch
from conftest import TINY, flags, plainly, refused, same
from methods import METHODS, SCRIPTS, SHORT, VARIANTS, final_once, needed

import common
import fedavg

ENGINE = [  # what the engine does beside the method's steps
    "--augment rotate10,crop,flip",
    "--sample 0.5",
    "--drop-last --batch-size 60",
    "--persist-opt",
    "--server adam",
    "--server avgm",
    "--server yogi",
    "--weighting uniform",
    "--clip 0.5 --lr-decay 0.5",
    "--local-steps 7",
    "--epochs 2 --no-nesterov --rounds 2",
    "--optimizer rmsprop --momentum 0 --lr 0.001",
    "--optimizer rmsprop --lr 0.001 --persist-opt",
    "--partition natural",
    "--model resnet56 --batch-size 16 --local-steps 2 --clients 2 --rounds 2",
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Give a worker one thread, however many there are: sums inside operators depend on it."""
    monkeypatch.setattr(common, "CORES", 1)


@pytest.fixture
def unevaluated(monkeypatch):
    """Leave the evaluation out, which takes the most of a short run and changes no weight."""
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))


def check(name, out, *argv):
    """Check that the plain run and the engine end with the same weights, which are finite."""
    argv = [*argv, "--workers", "1"] if "--workers" not in argv else argv
    words = [*TINY, *needed(name, argv), *argv]
    weights = SCRIPTS[name].main(words, run=plainly)[0].state_dict()
    assert all(v.isfinite().all() for v in weights.values())
    assert same(weights, final_once(name, out, *argv))


@pytest.mark.parametrize("name, more", VARIANTS)
def test_every_method(tmp_path, unevaluated, name, more):
    check(name, tmp_path / "run", *SHORT, *more.split())


@pytest.mark.parametrize("more", ENGINE)
def test_the_engine(tmp_path, unevaluated, more):
    check("fedavg", tmp_path / "run", "--rounds", "3", *more.split())


@pytest.mark.parametrize("name", ["fedavg", "moon", "rfedavg_code"])
def test_text(tmp_path, unevaluated, name):
    """Sentiment140's CSV, an LSTM on random word vectors."""
    lines = []
    for i in range(40):
        words = " ".join("abcdefgh"[j] for j in range(i % 7 + 1))
        start = f'"{4 * (i % 2)}","{i}","date","NO_QUERY","user{i % 3}"'
        lines.append(f'{start},"{words} is {"glad" if i % 2 else "sad"}"\n')
    (tmp_path / "sent140").mkdir()
    (tmp_path / "sent140" / "tweets.csv").write_text("".join(lines), encoding="latin-1")
    argv = "--dataset sent140 --model lstm --vectors random --partition natural --clients 3"
    argv = [*argv.split(), "--data-dir", str(tmp_path), "--batch-size", "5"]
    check(name, tmp_path / "run", *argv)


TIMES = ("seconds", "samples_per_s", "peak_memory", "crc32")


@pytest.mark.parametrize(
    "name, more",
    [
        ("fedavg", "--validation 0.1 --client-test --eval-every 2"),
        ("fedavg", "--drop-last --batch-size 60 --precision bf16"),
        ("rfedavg", "--sample 0.5"),
        ("qfedavg", ""),
        ("scaffold", "--client-test"),
    ],
)
def test_rows_are_those_of_the_run(tmp_path, name, more):
    """All but times, memory and checksums, server["report"] included."""
    words = [*TINY, "--rounds", "3", "--workers", "1", *more.split()]
    _, rows = SCRIPTS[name].main([*words, "--out", str(tmp_path / "run")])
    _, found = SCRIPTS[name].main([*words, "--plain"])
    assert [row.keys() - {"crc32"} for row in rows] == [row.keys() for row in found]
    for a, b in zip(rows, found):
        assert {k: a[k] for k in b if k not in TIMES} == {k: b[k] for k in b if k not in TIMES}
        assert a["seconds"].keys() == b["seconds"].keys()


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


def test_a_plain_run_keeps_what_out_asks_for(tmp_path, capsys):
    """config.json, metrics.jsonl and model.pt; a folder that is there is not touched."""
    out = tmp_path / "new" / "run"
    net, rows = fedavg.main([*TINY, "--plain", "--out", str(out)])
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "metrics.jsonl", "model.pt"]
    assert [json.loads(line) for line in (out / "metrics.jsonl").open()] == rows
    assert same(torch.load(out / "model.pt", weights_only=True), net.state_dict())
    config = json.loads((out / "config.json").read_text())
    assert (config["script"], config["flags"]["clients"]) == ("fedavg", 4)
    refused(capsys, fedavg, [*TINY, "--plain", "--out", str(out)], "--out", "exists already")


@pytest.mark.parametrize("more", [["--resume"], ["--workers", "2"], ["--save-clients"]])
def test_what_a_plain_run_cannot_do(capsys, run, more):
    more = [*more, "--out", str(run)] if more == ["--resume"] else [*TINY, *more]
    refused(capsys, fedavg, ["--plain", *more], "argument --plain: not with --")


def test_every_script_takes_run(tmp_path):
    """main(argv, run=...) hands over what that script gives common.run(), and trains nothing."""
    for name in METHODS:
        seen = []

        def run(args, local_update, *more, seen=seen, **named):
            seen.append((args.script, local_update))

        SCRIPTS[name].main([*TINY, *needed(name)], run=run)
        assert seen == [(name, SCRIPTS[name].local_update)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_threads_follow_the_engine_s(tmp_path, monkeypatch, unevaluated, workers):
    """On two cores, one worker of two threads or two of one: sums inside operators differ."""
    monkeypatch.setattr(common, "CORES", 2)
    argv = "--model resnet56 --batch-size 16 --local-steps 3 --clients 2 --rounds 1".split()
    check("fedavg", tmp_path / "run", *argv, "--workers", workers)
