"""The run folder: what is in it, resuming, locks, damage."""

import argparse
import contextlib
import errno
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib

import pytest
import torch
from conftest import TINY, flags, refused
from methods import SCRIPTS, needed
from runs import assert_equal_runs, config_of, rounds_in, rows_of, start, without_checksums

import common
import run_folder
import extras.glyphs
import fedavg
import fedprox
import scaffold


class Killed(BaseException):
    """What stands for a kill: nothing catches it."""


def killed_after(out, rounds):
    """Return common.evaluate() that is killed in the round after so many."""
    evaluate = common.evaluate

    def killed(*args):
        if rounds_in(out) == rounds:
            raise Killed
        return evaluate(*args)

    return killed


def killed_in(t, method):
    """Return a method of RunFolder, of a row or a Federation, that is killed in round t."""

    def killed(folder, of):
        if t == (of["round"] if isinstance(of, dict) else of.server["round"]):
            raise Killed
        return method(folder, of)

    return killed


# --- what is in it


def test_config_records_the_run(tmp_path):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--out", str(out), "--workers", "2"])
    config = config_of(out)
    assert config["script"] == "fedavg"
    assert config["workers"] == 2
    assert config["threads"] >= 1
    assert config["flags"]["lr"] == 0.01
    assert config["versions"]["torch"] == torch.__version__
    assert "commit" in config
    assert re.fullmatch(r"\S.*, \d+ cores", config["device"])
    names = "config.json metrics.jsonl checkpoint.pt model.pt best.pt states"
    assert {path.name for path in out.iterdir()} == set(names.split())


def test_config_keeps_the_words_of_the_command(tmp_path):
    """Without --out and --resume.

    After --resume --rounds 5 a plain --resume goes on to 5."""
    out = tmp_path / "run"
    words = [*TINY, "--comm_round", "1", "--local-steps=1"]
    recorded = [*TINY, "--rounds", "1", "--local-steps=1"]
    fedavg.main([*words, "--out", str(out)])
    assert config_of(out)["argv"] == recorded
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, 2))
        fedavg.main(["--out", str(out), "--resume", "--rounds", "5"])
    assert rounds_in(out) == 2
    assert config_of(out)["argv"] == [*recorded, "--rounds", "5"]
    fedavg.main([f"--out={out}", "--resume"])
    assert rounds_in(out) == 5
    assert config_of(out)["argv"] == [*recorded, "--rounds", "5"]
    fedavg.main([*TINY, "--local-steps", "1", "--rounds", "5", "--out", str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", out)


# --- resuming


@pytest.mark.parametrize("more", [[], ["--deterministic"]])
def test_a_resumed_run_whose_graph_fails(tmp_path, capsys, more):
    """goes on without, but not where its numbers are to be those of an uncut run."""
    out, evaluate = tmp_path / "run", common.evaluate
    words = [*TINY, "--local-steps", "1", "--rounds", "1", *more]
    fedavg.main([*words, "--out", str(out)])
    before = (out / "metrics.jsonl").read_bytes()

    def failing(net, data, args, *rest):
        args.capture = False
        return evaluate(net, data, args, *rest)

    resume = ["--out", str(out), "--resume", "--rounds", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "evaluate", failing)
        if more:
            refused(capsys, fedavg, resume, str(out), "CUDA graph", "--deterministic")
        else:
            fedavg.main(resume)
    assert config_of(out)["graph"] == bool(more)
    if more:
        assert (out / "metrics.jsonl").read_bytes() == before
    fedavg.main(resume)
    assert rounds_in(out) == 2


KILLED = ["scaffold", "rfedavg"]  # by the clock; tests/chaos.py kills at every file operation


@pytest.mark.parametrize("name", KILLED)
def test_resume_after_kill(tmp_path, name):
    """SIGKILL at a random moment of rounds 1 to 3 and again of 3 to 6, then --resume.

    Equal to an uncut run bit for bit."""
    argv = [*TINY, "--rounds", "8", "--persist-opt", "--sample", "0.5", "--checkpoint-every", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    SCRIPTS[name].main([*argv, "--out", str(whole)])
    for attempt, rounds in enumerate((random.randint(1, 3), random.randint(3, 6))):
        delay = random.uniform(0, 0.15)
        print(f"killed {delay:.3f} s after round {rounds}")
        process = start(name, *argv, "--out", str(cut), *["--resume"] * attempt)
        while process.poll() is None and rounds_in(cut) < rounds:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (cut / "model.pt").exists()
    SCRIPTS[name].main([*argv, "--out", str(cut), "--resume"])
    assert_equal_runs(whole, cut)
    assert not list(cut.glob("**/*.tmp"))


FOUR = [*TINY, "--rounds", "4", "--persist-opt", "--checkpoint-every", "2"]


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory):
    """The folder of a run of four rounds, not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.glyphs, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        fedavg.main([*FOUR, "--out", str(out)])
    return out


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_resume_after_a_kill_inside_a_round(tmp_path, four_rounds, rounds):
    """Cut in the evaluation of a round, so after its training.

    Checkpoints are written every second round; a row was being written."""
    out = tmp_path / "cut"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, rounds - 1))
        fedavg.main([*FOUR, "--out", str(out)])
    with (out / "metrics.jsonl").open("a") as f:
        f.write('{"round": 9, "te')
    fedavg.main(["--out", str(out), "--resume"])  # its own flags are the defaults
    assert_equal_runs(four_rounds, out)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_method_resumes(tmp_path, name):
    """Two rounds, then two more, are four, bit for bit."""
    argv = [*TINY, "--sample", "0.5", "--local-steps", "3", *needed(name), "--eval-every", "2"]
    SCRIPTS[name].main([*argv, "--rounds", "4", "--out", str(tmp_path / "whole")])
    SCRIPTS[name].main([*argv, "--rounds", "2", "--out", str(tmp_path / "cut")])
    SCRIPTS[name].main(["--out", str(tmp_path / "cut"), "--resume", "--rounds", "4"])
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_rounds_on_resume(tmp_path, four_rounds):
    out = tmp_path / "cut"
    fedavg.main([*FOUR, "--rounds", "2", "--out", str(out)])
    fedavg.main(["--out", str(out), "--resume", "--rounds", "4", "--quiet"])
    assert_equal_runs(four_rounds, out)
    assert config_of(out)["flags"]["rounds"] == 4
    before = (out / "metrics.jsonl").read_text()
    fedavg.main(["--out", str(out), "--resume", "--quiet"])  # nothing left to do
    assert (out / "metrics.jsonl").read_text() == before


def test_the_interval_of_checkpoints_may_change(tmp_path, four_rounds):
    """Cut in round 4, before the first checkpoint; plain --resume keeps the new interval."""
    out = tmp_path / "cut"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, 3))
        fedavg.main([*FOUR, "--checkpoint-every", "9", "--out", str(out)])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, 0))
        fedavg.main(["--out", str(out), "--resume", "--checkpoint-every", "1"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, 1))
        fedavg.main(["--out", str(out), "--resume"])
    assert (out / "checkpoint.pt").exists()
    fedavg.main(["--out", str(out), "--resume"])
    assert_equal_runs(four_rounds, out)


def test_best_is_of_a_round_with_a_row(tmp_path):
    """Round 2, the last, is evaluated and the best; cut behind that, the run goes on to 4.

    There it is not evaluated, and best.pt must be that of a run that was never cut."""
    argv = [*TINY, "--eval-every", "3", "--checkpoint-every", "1"]

    out, whole = tmp_path / "cut", tmp_path / "whole"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_folder.RunFolder, "append", killed_in(2, run_folder.RunFolder.append))
        fedavg.main([*argv, "--rounds", "2", "--out", str(out)])
    assert [row["test_acc"] for row in rows_of(out)] == [None]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", killed_after(out, 2))  # in round 3
        fedavg.main(["--out", str(out), "--resume", "--rounds", "4"])
    assert not list(out.glob("best*"))
    fedavg.main(["--out", str(out), "--resume"])
    fedavg.main([*argv, "--rounds", "4", "--out", str(whole)])
    assert_equal_runs(whole, out)
    assert (
        run_folder.load(out / "best.pt").stamp["round"]
        == run_folder.best_row(rows_of(out))["round"]
    )


def test_a_damaged_best_model_is_found_on_resume(tmp_path):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--out", str(out)])
    raw = bytearray((out / "best.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / "best.pt").write_bytes(raw)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(common.UserError, match="best.pt: not a readable model"):
        fedavg.main(["--out", str(out), "--resume", "--rounds", "3"])
    assert (out / "metrics.jsonl").read_bytes() == before
    weights = run_folder.load(out / "model.pt")
    run_folder.save(weights, out / "best.pt", {**weights.stamp, "round": 9})
    with pytest.raises(common.UserError, match="best.pt: its round is 9"):
        fedavg.main(["--out", str(out), "--resume", "--rounds", "3"])
    (out / "best.pt").unlink()
    (out / "best.pt").symlink_to("best.pt")
    with pytest.raises(common.UserError, match="best.pt: not a readable model"):
        fedavg.main(["--out", str(out), "--resume", "--rounds", "3"])


def test_a_missing_best_model_is_told(tmp_path, capsys):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--out", str(out)])
    (out / "best.pt").unlink()
    fedavg.main(["--out", str(out), "--resume"])
    t = run_folder.best_row(rows_of(out))["round"]
    line = f"{out / 'best.pt'}: missing, and with it the model of round {t}, the best\n"
    assert capsys.readouterr().err == line


def test_other_versions_are_told(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--rounds", "1", "--local-steps", "1", "--out", str(out)])
    monkeypatch.setitem(run_folder.VERSIONS, "torch", "9.0.0")
    fedavg.main(["--out", str(out), "--resume"])
    assert capsys.readouterr().err == f"{out}: began with torch {torch.__version__} (now 9.0.0)\n"


def test_best_waits_for_its_checkpoint(tmp_path):
    """best.pt of the last checkpoint stays while rounds behind it may yet be forgotten."""
    out = tmp_path / "run"
    argv = [*TINY, "--rounds", "3", "--checkpoint-every", "2", "--out", str(out)]
    accuracies = iter([10.0, 20.0, 30.0])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(common, "evaluate", lambda *_: (next(accuracies), 1.0))
        patch.setattr(
            run_folder.RunFolder, "checkpoint", killed_in(3, run_folder.RunFolder.checkpoint)
        )
        fedavg.main(argv)
    assert run_folder.load(out / "best.pt").stamp["round"] == 2
    assert run_folder.load(out / "best-3.pt").stamp["round"] == 3
    assert not (out / "best-1.pt").exists()


# --- locks


def lock(out):
    """Lock a run's folder as another process would; return what to close."""
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def test_one_process_a_run(tmp_path, capsys):
    """A second process on a run's folder is refused, and changes nothing.

    After a kill in the first moments a run starts anew."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json.123.tmp").write_text("{")
    argv = [*TINY, "--out", str(out), "--rounds", "1"]
    held = lock(out)
    refused(capsys, fedavg, argv, "another process", str(out))
    os.close(held)
    fedavg.main(argv)
    before, held = rows_of(out), lock(out)
    refused(capsys, fedavg, [*argv[:-1], "2", "--resume"], "another process", str(out))
    os.close(held)
    assert rows_of(out) == before
    fedavg.main([*argv[:-1], "2", "--resume"])
    assert len(rows_of(out)) == 2


def test_a_new_folder_is_taken_by_the_first(tmp_path, capsys, monkeypatch):
    """The second is refused before it loads data, and the first goes on as if nothing was."""
    out, second = tmp_path / "run", []
    argv = [*TINY, "--rounds", "1", "--out", str(out)]
    load_data = common.load_data

    def load(args):  # while the first loads its data
        if second:
            raise AssertionError("the second loads data")
        second.append(True)
        refused(capsys, fedavg, argv, "another process", str(out))
        assert out.is_dir()
        return load_data(args)

    monkeypatch.setattr(common, "load_data", load)
    fedavg.main(argv)
    assert len(rows_of(out)) == 1
    refused(capsys, fedavg, argv, str(out), "--resume")


def test_two_run_folders_on_one_path(tmp_path):
    args = flags("--out", str(tmp_path / "run"))
    first, second = run_folder.RunFolder(args), run_folder.RunFolder(args)
    first.take()
    with pytest.raises(common.UserError, match="another process"):
        second.take()
    second.close()
    assert (tmp_path / "run").is_dir()
    first.create(1, 1)
    with pytest.raises(common.UserError, match="another process"):
        second.take()
    second.close()
    assert config_of(tmp_path / "run")["script"] == "test"
    first.close()
    with pytest.raises(common.UserError, match="exists already"):
        second.take()
    second.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_folder_that_goes_before_it_is_locked(tmp_path, monkeypatch, again):
    """Its owner fails and removes it; a third process may have made one of that name again."""
    out = tmp_path / "run"
    folder, flock = run_folder.RunFolder(flags("--out", str(out))), fcntl.flock

    def late(lock, how):
        out.rmdir()
        if again:
            out.mkdir()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(common.UserError, match="another process"):
        folder.take()
    folder.close()
    assert out.exists() == again
    assert not run_folder.LOCKS


def test_runs_of_other_data_or_code_are_others(tmp_path):
    """Also with the same flags; with all the same, a run is the same in any folder."""

    def run_id(out, digest, parts):
        code = argparse.Namespace(parts=parts, files=())
        folder = run_folder.RunFolder(flags("--out", str(tmp_path / out)), code)
        folder.know_data({"samples": digest})
        folder.out.mkdir()
        folder.create(1, 1)
        return folder.config["run"]

    a, b, other_data, other_code = (
        run_id("a", 1, {"aggregate": "x"}),
        run_id("b", 1, {"aggregate": "x"}),
        run_id("c", 2, {"aggregate": "x"}),
        run_id("d", 1, {"aggregate": "y"}),
    )
    assert a == b
    assert len({a, other_data, other_code}) == 3


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    """One that decodes images for a run outlives it by seconds when the run is killed."""
    args = flags("--out", str(tmp_path / "run"))
    first, second = run_folder.RunFolder(args), run_folder.RunFolder(args)
    first.take()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    with pytest.raises(common.UserError, match="another process"):
        second.take()
    os.close(first.lock)  # as a kill does: without a word to the system's locks
    try:
        second.take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        run_folder.LOCKS.discard(first.lock)
        second.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_without_locks_a_run_says_so_once(tmp_path, capsys, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    runs_without_locks(tmp_path / "run", capsys)


def test_a_system_without_fcntl(tmp_path, capsys, monkeypatch):
    """Nor resource, as Windows."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    runs_without_locks(tmp_path / "run", capsys)


def runs_without_locks(out, capsys):
    argv = [*TINY, "--local-steps", "1", "--out", str(out)]
    fedavg.main([*argv, "--rounds", "1"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{out}: cannot be locked here" in err
    fedavg.main(["--out", str(out), "--resume", "--rounds", "2"])
    assert len(rows_of(out)) == 2
    assert capsys.readouterr().err.count("cannot be locked here") == 1
    with pytest.raises(common.UserError):
        fedavg.main([*argv, "--clients", "61", "--out", str(out / "new")])
    assert not (out / "new").exists()


def test_a_failed_start_leaves_no_folder(tmp_path, capsys):
    out = tmp_path / "new" / "run"
    refused(capsys, fedavg, [*TINY, "--clients", "61", "--out", out], "--clients")
    assert not out.exists()
    out.mkdir(parents=True)  # an empty one is taken, and then goes too
    refused(capsys, fedavg, [*TINY, "--clients", "61", "--out", out], "--clients")
    assert not out.exists()
    fedavg.main([*TINY, "--rounds", "1", "--local-steps", "1", "--out", str(out)])
    assert len(rows_of(out)) == 1


def test_a_file_in_the_folders_place(tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    refused(capsys, fedavg, [*TINY, "--out", tmp_path / "run"], "exists already")
    assert (tmp_path / "run").read_text() == "mine"


def test_runs_are_not_overwritten(tmp_path, capsys):
    out = tmp_path / "run"
    argv = [*TINY, "--out", out]
    fedavg.main([*TINY, "--out", str(out)])
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    refused(capsys, fedavg, argv, str(out), "--resume")
    refused(capsys, fedavg, [*argv, "--resume", "--lr", "0.5"], "--lr", "0.5", "0.01")
    refused(capsys, fedavg, [*argv, "--resume", "--rounds", "1"], "--rounds", "1", "2")
    refused(capsys, fedprox, [*argv, "--resume"], "fedavg.py", "fedprox.py")
    argv = [*TINY, "--out", tmp_path / "none", "--resume"]
    refused(capsys, fedavg, argv, "none", "no run")
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


# --- leftovers

LEFT_BY_A_KILL = [
    "config.json.7.tmp",
    "best.pt.7.tmp",
    "best-7.pt",
    "best-2.pt.7.tmp",
    "clients.2.tmp/1.pt",
    "clients/1.pt.7.tmp",
    "states/1-1.pt",
    "states/1-2.pt.7.tmp",
]
A_USERS_OWN = [
    "clients.3.tmp/x.pt",
    "notes.tmp",
    "a.json.7.tmp",
    "best-of-all.pt",
    "clients/x.tmp",
    "states/mine.pt",
]


def test_resume_deletes_what_a_kill_left_and_nothing_else(tmp_path):
    """Also of a run that was finished, where no checkpoint is written any more."""
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--save-clients", "--out", str(out)])
    before = {path.relative_to(out) for path in out.glob("**/*")}
    (out / "clients.2.tmp").mkdir()
    (out / "clients.3.tmp").mkdir()
    (out / "best-9.pt").mkdir()
    for name in [*LEFT_BY_A_KILL, *A_USERS_OWN]:
        (out / name).write_text("x")
    fedavg.main(["--out", str(out), "--resume"])
    added = {str(path.relative_to(out)) for path in out.glob("**/*")} - set(map(str, before))
    assert added == {*A_USERS_OWN, "clients.3.tmp", "best-9.pt"}


def test_a_longer_run_keeps_the_clients_of_its_own_last_round_alone(tmp_path):
    out = tmp_path / "run"
    argv = [*TINY, "--local-steps", "1", "--sample", "0.5", "--save-clients", "--out", str(out)]
    for rounds in (2, 3):
        if rounds == 3:
            (out / "clients" / "0 (1).pt").write_text("mine")
        _, rows = fedavg.main([*argv, "--rounds", str(rounds), *["--resume"] * (rounds == 3)])
        saved = {path.stem for path in (out / "clients").iterdir()} - {"0 (1)"}
        assert saved == set(map(str, rows[-1]["clients"]))
    assert (out / "clients" / "0 (1).pt").read_text() == "mine"
    assert rows[1]["clients"] != rows[2]["clients"]


def test_a_longer_run_that_is_refused_in_its_first_new_round_loses_nothing(tmp_path, capsys):
    """A client's state is read when the client trains, after others have sent their models."""
    out = tmp_path / "run"
    argv = [*TINY, "--local-steps", "1", "--save-clients", "--workers", "1", "--out", out]
    scaffold.main([*map(str, argv)])
    state = max((out / "states").iterdir())
    state.write_bytes(b"")
    before = {path: path.read_bytes() for path in out.glob("**/*.*") if path.is_file()}
    refused(capsys, scaffold, [*argv, "--rounds", 3, "--resume"], state.name)
    assert {path: path.read_bytes() for path in before} == before
    scaffold.main(["--out", str(out), "--resume"])  # is finished, as it was


def test_a_file_in_the_place_of_clients_is_refused_before_training(tmp_path, capsys):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--out", str(out)])
    (out / "clients").write_text("mine")
    argv = ["--out", out, "--resume", "--rounds", 3, "--save-clients"]
    refused(capsys, fedavg, argv, "--save-clients", "clients is not a folder")
    fedavg.main(["--out", str(out), "--resume", "--rounds", "3"])


def test_a_folder_in_the_place_of_a_clients_model_loses_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    argv = [*TINY, "--rounds", 1, "--local-steps", "1", "--save-clients", "--out", out]
    fedavg.main([*map(str, argv)])
    (out / "clients" / "2.pt").unlink()
    (out / "clients" / "2.pt").mkdir()
    refused(capsys, fedavg, ["--out", out, "--resume", "--rounds", 2], "2.pt")
    assert (out / "model.pt").exists()


def test_a_folder_with_a_users_own_file_is_not_taken(tmp_path, capsys):
    (tmp_path / "notes.tmp").write_text("mine")
    refused(capsys, fedavg, [*TINY, "--out", tmp_path], "exists already")
    assert (tmp_path / "notes.tmp").read_text() == "mine"


# --- damage


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def run_to_damage(tmp_path_factory):
    """The folder of a run of two rounds."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.glyphs, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        fedavg.main([*TINY, "--out", str(out)])
    return out


@pytest.fixture
def damaged(run_to_damage):
    """The same folder, whose files are put back afterwards."""
    files = {path: path.read_bytes() for path in run_to_damage.iterdir() if path.is_file()}
    yield run_to_damage
    for path, content in files.items():
        path.write_bytes(content)


def resumed(out):
    return ["--out", str(out), "--resume", "--rounds", "3", "--quiet"]


def without_checksum(rows):
    """Return rows as somebody leaves them who has edited them."""
    return re.sub(rb', "crc32": \d+', b"", rows)


FOREIGN = {
    "script": "fedavg",
    "net": {"x": torch.ones(1)},
    "server": {"round": 2},
    "clients": {},
}


@pytest.mark.parametrize("tree", [{"net": {}}, [1, 2], FOREIGN, "moon", "evil"])
def test_foreign_checkpoints(tmp_path, capsys, damaged, tree):
    path = damaged / "checkpoint.pt"
    if tree == "moon":
        tree = {**torch.load(path), "script": "moon"}
    if tree == "evil":
        tree = Evil(f"touch {tmp_path}/pwned")
    torch.save(tree, path)
    before = (damaged / "metrics.jsonl").read_bytes()
    refused(capsys, fedavg, resumed(damaged), "checkpoint.pt")
    assert (damaged / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("part", [0, 0.5])
def test_a_cut_checkpoint(capsys, damaged, part):
    path, before = damaged / "checkpoint.pt", (damaged / "metrics.jsonl").read_bytes()
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    refused(capsys, fedavg, resumed(damaged), "checkpoint.pt")
    assert (damaged / "metrics.jsonl").read_bytes() == before


def test_the_checkpoint_of_another_run(tmp_path, capsys, damaged):
    rows = (damaged / "metrics.jsonl").read_bytes()
    fedavg.main([*TINY, "--seed", "5", "--out", str(tmp_path / "other")])
    other = (tmp_path / "other" / "checkpoint.pt").read_bytes()
    (damaged / "checkpoint.pt").write_bytes(other)
    refused(capsys, fedavg, resumed(damaged), "checkpoint.pt", "another run", "5 for --seed")
    (damaged / "checkpoint.pt").unlink()
    refused(capsys, fedavg, resumed(damaged), "checkpoint.pt", "missing")
    assert (damaged / "metrics.jsonl").read_bytes() == rows


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: b"",
        lambda rows: b"5\n5\n",
        lambda rows: b"\xff\xfe\n" + rows,
        lambda rows: rows.replace(b"test_acc", b"acc"),
        lambda rows: rows.replace(b'"round": 1', b'"round": 7'),
        lambda rows: re.sub(rb'"train_loss": 4', b'"train_loss": 5', rows, count=1),
        lambda rows: rows.splitlines()[0] + b"\n",
        lambda rows: b"[" * 100_000 + b"\n" + rows,
        without_checksum,
    ],
)
def test_damaged_metrics(capsys, damaged, damage):
    path = damaged / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    refused(capsys, fedavg, resumed(damaged), "metrics.jsonl", "damaged")


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"test_acc": ', b'"test_acc": NaN, "_": '),
        (b'"train_loss": ', b'"train_loss": 9' + 400 * b"9"),
        (b'"clients": [0', b'"clients": ["0"'),
    ],
)
def test_damaged_metrics_of_before_there_were_checksums(capsys, damaged, old, new):
    without_checksums(damaged)
    path = damaged / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(old, new))
    assert path.read_bytes() != before
    refused(capsys, fedavg, resumed(damaged), "metrics.jsonl", "damaged")


@pytest.mark.parametrize(
    "old, new, word",
    [
        ("", "{", "config.json"),
        ("", "[]", "config.json"),
        ('"threads"', '"thread"', "config.json"),
        ('"argv"', '"words"', "config.json"),
        ('"cnn"', '"vit"', "--model"),
        ('"clients": 4', '"clients": 0', "--clients"),
        ('"clients": 4', '"clients": 5', "--clients"),
        (r'"threads": \d+', '"threads": 0', "config.json"),
        (r'"threads": \d+', '"threads": 1' + 30 * "0", "config.json"),
        (r'"workers": \d+', '"workers": -1', "config.json"),
        (r'"versions": {[^}]*}', '"versions": null', "config.json is damaged"),
        (r'"code": {[^}]*}', '"code": ["a"]', "config.json is damaged"),
        (r'"rows_crc32": \d+', '"rows_crc32": "x"', "config.json is damaged"),
        (r'"checkpoint_every": \d+', '"checkpoint_every": "x"', "config.json is damaged"),
        ("", 100_000 * "[", "config.json"),
        ("", '{"flags": ' + 5000 * "9", "config.json"),
    ],
)
def test_damaged_config(capsys, damaged, old, new, word):
    path = damaged / "config.json"
    before = path.read_text()
    after = re.sub(old, new, before) if old else new
    assert after != before
    path.write_text(after)
    refused(capsys, fedavg, resumed(damaged), "config.json is damaged")
    if old:  # a folder of before there were checksums
        path.write_text(re.sub(r',\s*"crc32": \d+', "", after))
    refused(capsys, fedavg, resumed(damaged), word)


def test_rows_of_another_run(tmp_path, capsys, damaged):
    """Whole by themselves, but not those that the checkpoint was written behind."""
    fedavg.main([*TINY, "--seed", "5", "--out", str(tmp_path / "other")])
    other = (tmp_path / "other" / "metrics.jsonl").read_bytes()
    (damaged / "metrics.jsonl").write_bytes(other)
    refused(capsys, fedavg, resumed(damaged), "metrics.jsonl: damaged, or of another run")


def test_other_rows_of_the_same_run(tmp_path, capsys, damaged):
    """Made by the same command, but not those that the checkpoint was written behind."""
    fedavg.main([*TINY, "--out", str(tmp_path / "other")])
    other = (tmp_path / "other" / "metrics.jsonl").read_bytes()
    (damaged / "metrics.jsonl").write_bytes(other)
    refused(capsys, fedavg, resumed(damaged), "checkpoint.pt: its rows_checksum is")


def test_a_flipped_bit_of_config_or_rows(damaged):
    """Of 200 bytes of each: found, or of no account."""
    rng = random.Random(0)
    for name, read in (("config.json", config_read), ("metrics.jsonl", read_rows)):
        path = damaged / name
        good, content = path.read_bytes(), read(path)
        for i in rng.sample(range(len(good)), 200):
            flipped = bytes([good[i] ^ 1 << rng.randrange(8)])
            path.write_bytes(good[:i] + flipped + good[i + 1 :])
            with contextlib.suppress(common.UserError):
                found = read(path)
                for a, b in zip(content, found, strict=True):  # the checksum's name may be hit
                    assert all(b.get(k) == v for k, v in a.items() if k != "crc32"), (name, i)
        path.write_bytes(good)


def config_read(path):
    return [run_folder.read_config(path.parent)]


def read_rows(path):
    """Return all rows; UserError for a damaged one."""
    try:
        return list(run_folder.read_rows(path.read_bytes().splitlines(), config_of(path.parent)))
    except ValueError as e:
        raise common.UserError(e) from None


def test_checksums_of_rows_by_hand(run_to_damage):
    """Each is the CRC-32 of the row without it, begun with that of the row before.

    The first is begun with that of the name of the run."""
    checksum = zlib.crc32(config_of(run_to_damage)["run"].encode())
    for line in (run_to_damage / "metrics.jsonl").read_text().splitlines():
        row, _, rest = line.partition(', "crc32": ')
        checksum = zlib.crc32(f"{row}}}".encode(), checksum)
        assert rest == f"{checksum}}}"


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt"])
def test_a_pipe_in_a_files_place(capsys, damaged, name):
    """is refused; reading it would wait for ever."""
    content = (damaged / name).read_bytes()
    (damaged / name).unlink()
    os.mkfifo(damaged / name)
    refused(capsys, fedavg, resumed(damaged), name, "not a file")
    (damaged / name).unlink()
    (damaged / name).write_bytes(content)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_what_is_deleted_during_a_run_is_written_again(tmp_path, four_rounds, name):
    out = tmp_path / "run"
    evaluate = common.evaluate

    def deleting(*args):
        if rounds_in(out) == 2:
            (out / name).unlink()
        return evaluate(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "evaluate", deleting)
        fedavg.main([*FOUR, "--out", str(out)])
    assert_equal_runs(four_rounds, out)
    assert config_of(out)["flags"] | {"out": ""} == config_of(four_rounds)["flags"] | {"out": ""}
    fedavg.main(["--out", str(out), "--resume"])


def test_a_folder_that_cannot_be_read(capsys):
    """A name longer than names may be is refused by the system, as a folder of others may be."""
    refused(
        capsys, fedavg, ["--out", 300 * "a", "--resume"], "config.json cannot be read", "too long"
    )


def test_what_was_put_back_resumes(run_to_damage):
    """After all damages the run goes on."""
    fedavg.main(resumed(run_to_damage))
    assert len(rows_of(run_to_damage)) == 3


def test_full_disk_is_one_line(tmp_path):
    """No file may grow beyond 300 kB here, which is how a full disk looks from inside.

    The first checkpoint has 600."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    argv = [*TINY, "--out", str(tmp_path / "run")]
    process = start("fedavg", *argv, before=limit, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert len(err.splitlines()) == 1, err
    assert "too large" in err
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_divergence_names_round_and_client(tmp_path, capsys):
    out = tmp_path / "run"

    def local_update(worker, client, server, args):
        if server["round"] == 2 and client.id == 2:
            with torch.no_grad():
                worker.net[0][0].weight[0, 0, 0, 0] = float("nan")
        yield from fedavg.local_update(worker, client, server, args)

    parser = common.flags("x", "fedavg")
    common.run(parser.parse_args([*TINY, "--rounds", "1", "--out", str(out)]), local_update)
    good = (out / "checkpoint.pt").read_bytes()
    args = parser.parse_args(resumed(out))
    args.shell = True
    with pytest.raises(SystemExit) as stop:
        common.run(args, local_update)
    err = capsys.readouterr().err
    assert stop.value.code == 1
    assert len(err.splitlines()) == 1
    assert "round 2, client 2" in err
    assert "keeps the checkpoint" in err
    assert (out / "checkpoint.pt").read_bytes() == good
    assert len(rows_of(out)) == 1


def test_files_of_the_last_round_go_when_rounds_grow(tmp_path):
    """Client models of round 1 are not left among those of round 4, nor is its model.pt."""
    out = tmp_path / "run"
    words = [*TINY, "--sample", "0.5", "--local-steps", "1", "--save-clients"]
    fedavg.main([*words, "--rounds", "1", "--out", str(out)])
    earlier = {path.name for path in (out / "clients").iterdir()}
    fedavg.main(["--out", str(out), "--resume", "--rounds", "4", "--save-clients"])
    rows = rows_of(out)
    assert earlier == {f"{k}.pt" for k in rows[0]["clients"]}
    assert {path.name for path in (out / "clients").iterdir()} == {
        f"{k}.pt" for k in rows[-1]["clients"]
    }
    assert earlier != {path.name for path in (out / "clients").iterdir()}


def test_a_kill_while_rounds_grow_loses_no_file(tmp_path):
    """Those of the last round go when the first new one is kept, or that of the next resume."""
    out = tmp_path / "run"
    words = [*TINY, "--local-steps", "1", "--save-clients", "--out", str(out)]
    fedavg.main([*words, "--rounds", "1"])
    more = ["--out", str(out), "--resume", "--rounds", "3"]
    for owner, name, rounds in (
        (common, "measure_round", 1),
        (run_folder.RunFolder, "write_config", 1),
        (run_folder.RunFolder, "exchange_clients", 3),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owner, name, raise_killed)
            fedavg.main(more)
        assert config_of(out)["flags"]["rounds"] == rounds
        assert (out / "model.pt").exists()
        assert len(list((out / "clients").iterdir())) == 4
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_folder.RunFolder, "append", raise_killed)
        fedavg.main(more[:-2])
    assert not (out / "model.pt").exists()
    assert not (out / "clients").exists()


def raise_killed(*_, **__):
    raise Killed
