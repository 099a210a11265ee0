"""From Python: errors are exceptions, flags by name, a callback after each round."""

import functools

import pytest
import torch
from conftest import TINY, args_of, from_shell, refusal, same
from methods import SCRIPTS
from runs import assert_equal_runs, config_of, rounds_in

import common
import run_folder
import fedalign
import fedavg
import moon
import scaffold
from extras import own


@pytest.mark.parametrize("words", ["--lr 0", "--clients 601 --partition iid", "--resume"])
def test_a_mistake_is_an_exception_with_the_shell_s_line(tmp_path, capsys, words):
    out = [] if "--resume" in words else ["--out", str(tmp_path / "run")]
    words = [*TINY, *out, *words.split()]
    line = refusal(fedavg.main, words)
    assert capsys.readouterr() == ("", "") and line
    with pytest.raises(SystemExit) as stop:
        from_shell(fedavg, words)
    assert (stop.value.code, capsys.readouterr().err) == (2, f"fedavg.py: error: {line}\n")


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), KeyboardInterrupt()])
def test_other_ends_of_a_run_are_exceptions_too(tmp_path, monkeypatch, capsys, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(common, "measure_round", fails)
    with pytest.raises(type(error)):
        fedavg.main([*TINY, "--local-steps", "1", "--out", str(tmp_path / "run")])
    assert capsys.readouterr() == ("", "")


def test_args_for_are_the_words_flags():
    """On, off, both spellings, lists and None; what a script derives from flags is there."""
    args = own.args_for(fedalign, clients=64, mu=0.1, drop_last=True, nesterov=False, leak=False)
    words = "--clients 64 --mu 0.1 --drop-last --no-nesterov"
    assert args == args_of(fedalign, *words.split())
    assert own.args_for(fedalign, client_number=7, lr=None).clients == 7
    assert own.args_for(SCRIPTS["fedmlb"], pathways=[1, 2]).pathways == [1, 2]
    assert own.args_for(moon, model="cnn").projection == 0
    assert own.args_for(moon, model="resnet56").projection == 256
    for flag, value, takes in (
        ("lr", False, "a value, not False"),
        ("mu", True, "a value, not True"),
        ("graph", 0, "True or False, not 0"),
        ("quiet", 1, "True or False, not 1"),
    ):
        line = refusal(own.args_for, fedalign, **{flag: value})
        assert f"argument --{flag}: takes {takes}" in line


def test_main_takes_args_for(tmp_path):
    """With what the script hands over beside its flags: SCAFFOLD's aggregation."""
    small = {"dataset": "glyphs", "model": "cnn", "clients": 4, "rounds": 2, "local_steps": 2}
    small |= {"batch_size": 32, "quiet": True, "device": "cpu"}
    args = own.args_for(scaffold, **small, out=tmp_path / "a")
    before = dict(vars(args))
    net, rows = scaffold.main(args)
    words = [*TINY, "--local-steps", "2", "--out", str(tmp_path / "b")]
    assert same(net.state_dict(), scaffold.main(words)[0].state_dict())
    assert vars(args) == before  # the run notes nothing in them
    with pytest.raises(common.UserError, match="flags of scaffold.py"):
        moon.main(args)


def test_stopped_and_resumed_is_the_whole_run(tmp_path):
    """Stopped in round 2, which is not evaluated: it ends after round 3, whole; it goes on."""
    words = "--rounds 5 --eval-every 3 --local-steps 2 --checkpoint-every 4 --out".split()
    seen, out = [], tmp_path / "cut"

    def on_round(row, net):
        seen.append((row, {k: v.clone() for k, v in net.state_dict().items()}))
        return row["round"] == 2

    run = functools.partial(common.run, on_round=on_round)
    net, rows = fedavg.main([*TINY, *words, str(out)], run=run)
    assert [row for row, _ in seen] == rows and len(rows) == rounds_in(out) == 3
    assert same(seen[2][1], net.state_dict()) and not same(seen[0][1], seen[1][1])
    assert same(run_folder.load(out / "model.pt"), net.state_dict())
    assert config_of(out)["stopped"] == 3
    fedavg.main(["--out", str(out), "--resume"])
    assert "stopped" not in config_of(out)
    fedavg.main([*TINY, *words, str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", out)


def test_a_stopped_run_that_goes_on_keeps_no_older_model(tmp_path, monkeypatch):
    words = [*TINY, "--rounds", "4", "--local-steps", "1", "--out", str(tmp_path / "run")]
    run = functools.partial(common.run, on_round=lambda row, net: True)
    fedavg.main(words, run=run)
    assert (tmp_path / "run" / "model.pt").exists()

    def fails(*_):
        raise OSError("disk full")

    for name, there in (("write_config", True), ("publish", False)):  # of a checkpoint
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(run_folder.RunFolder, name, fails)
            fedavg.main([*words, "--resume"])
        assert (tmp_path / "run" / "model.pt").exists() == there


def test_two_runs_in_a_process(tmp_path):
    """The second is what it is alone: nothing of others is left."""
    words = [*TINY, "--local-steps", "2", "--out"]
    a, _ = fedavg.main([*words, str(tmp_path / "a")])
    fedavg.main([*words, str(tmp_path / "other"), "--seed", "1"])
    torch.rand(5)
    moon.main([*words, str(tmp_path / "moon")])
    b, _ = fedavg.main([*words, str(tmp_path / "b")])
    assert same(a.state_dict(), b.state_dict())
    a, b = (config_of(tmp_path / k)["flags"] for k in "ab")
    assert a == {**b, "out": a["out"]}
