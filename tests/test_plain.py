"""plain.py trains every method to the weights of common.run(), bit for bit."""

import pytest
import torch
import torch.nn as nn
from conftest import TINY, flags, same
from methods import METHODS, SCRIPTS, SHORT, VARIANTS, final_once, needed

import common
import fedavg
import plain

ENGINE = [  # what the engine does beside the method's steps
    "--augment rotate10,crop,flip",
    "--sample 0.5",
    "--drop-last --batch-size 60",
    "--persist-opt",
    "--server adam",
    "--server avgm",
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
    """Check that plain.run() and common.run() end with the same weights, which are finite."""
    argv = [*argv, "--workers", "1"] if "--workers" not in argv else argv
    words = [*TINY, *needed(name, argv), *argv]
    weights = SCRIPTS[name].main(words, run=plain.run)[0].state_dict()
    assert all(v.isfinite().all() for v in weights.values())
    assert same(weights, final_once(name, out, *argv))


@pytest.mark.parametrize("name, more", VARIANTS)
def test_every_method(tmp_path, unevaluated, name, more):
    check(name, tmp_path / "run", *SHORT, *more.split())


@pytest.mark.parametrize("more", ENGINE)
def test_the_engine(tmp_path, unevaluated, more):
    check("fedavg", tmp_path / "run", "--rounds", "3", *more.split())


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mixup", "rfedavg", "gradaug"])
def test_any_number_of_workers(tmp_path, unevaluated, name):
    check(name, tmp_path / "run", "--local-steps", "4", "--persist-opt", "--workers", "3")


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


def test_own_data_and_network(tmp_path):
    def own():
        torch.manual_seed(5)
        x, y = torch.randint(0, 256, (90, 1, 4, 4), dtype=torch.uint8), torch.arange(90) % 3
        data = common.Data(x[:60], y[:60], x[60:], y[60:], 3)
        return data, nn.Sequential(nn.Flatten(), nn.Linear(16, 8), common.Classifier(8, 3))

    results = []
    for run in (plain.run, common.run):
        data, net = own()
        args = flags("--partition", "iid", "--out", str(tmp_path / run.__module__))
        results.append(run(args, fedavg.local_update, data=data, net=net)[0].state_dict())
    assert same(*results)


def test_accuracies_are_those_of_the_run(tmp_path, capsys):
    """plain.run() returns (round, accuracy, test loss)s, and prints them without --quiet."""
    _, rows = fedavg.main([*TINY, "--out", str(tmp_path / "run")])
    loud = [word for word in TINY if word != "--quiet"]
    _, found = fedavg.main(loud, run=plain.run)
    assert found == [(row["round"], row["test_acc"], row["test_loss"]) for row in rows]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["round   1", "round   2"]


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


@pytest.mark.parametrize("words", [[], ["--help"], ["nosuch"], ["common"], ["plain"]])
def test_a_script_must_be_named(capsys, words):
    with pytest.raises(SystemExit) as stop:
        plain.main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("plain.py: error: name a method's script first")
