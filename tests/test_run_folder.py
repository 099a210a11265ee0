"""The run folder: what is in it, resuming, locks, damage."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib

import pytest
import torch
from conftest import TINY, refusal, refused, run_once, same
from methods import SCRIPTS, needed
from runs import assert_equal_runs, config_of, rounds_in, rows_of, start, write_config

import common
import run_folder
import fedavg
import fedprox
import scaffold
from run_folder import RunFolder


class Killed(BaseException):
    """What stands for a kill: nothing catches it."""


def killed(argv, owner, name, when=lambda *_: True, script=fedavg):
    """Run a script until owner.name is called, the first time that when(arguments) is true."""
    f = getattr(owner, name)

    def killing(*args):
        if when(*args):
            raise Killed
        return f(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, killing)
        script.main([*map(str, argv)])


def killed_in(t, argv):
    """Run fedavg.py until round t is trained, and about to be kept."""
    killed(argv, RunFolder, "keep", lambda folder, fed, row: row["round"] == t)


def resumed(out, *argv):
    return ["--out", str(out), "--resume", *map(str, argv)]


def contents(out):
    """Return {path: bytes} of a folder."""
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


FOUR = [*TINY, "--rounds", "4", "--persist-opt", "--checkpoint-every", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two rounds of SCAFFOLD with client models, not to be changed."""
    argv = ["--local-steps", "1", "--save-clients", "--workers", "1"]
    return run_once(tmp_path_factory.mktemp("runs") / "run", scaffold, *argv)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that folder, to be changed."""
    return shutil.copytree(finished, tmp_path / "run")


# --- what is in it


def test_what_a_run_leaves(tmp_path):
    out = tmp_path / "run"
    net, rows = fedavg.main([*TINY, "--out", str(out), "--workers", "2"])
    assert (
        sorted(contents(out)) == "best.pt checkpoint.pt config.json metrics.jsonl model.pt".split()
    )
    config = config_of(out)
    assert (config["script"], config["workers"], config["flags"]["lr"]) == ("fedavg", 2, 0.01)
    assert config["threads"] >= 1 and "commit" in config
    assert config["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\S.*, \d+ cores", config["device"])
    state = run_folder.load(out / "checkpoint.pt")
    assert same(torch.load(out / "model.pt"), state["net"]) and same(state["net"], net.state_dict())
    assert same(torch.load(out / "best.pt"), state["best"])
    assert state["rows_crc32"] == rows[-1]["crc32"]


def test_clients_files(run):
    """Each is of the client's last round, and of the checksum that the checkpoint says."""
    state = run_folder.load(run / "checkpoint.pt")
    for folder, table in (("states", state["clients"]), ("clients", state["models"])):
        assert {p.name for p in (run / folder).iterdir()} == {f"{k}-2.pt" for k in range(4)}
        for k, t, crc in table.tolist():
            assert zlib.crc32((run / folder / f"{k}-{t}.pt").read_bytes()) == crc


def test_checksums_by_hand(run):
    """Each is the CRC-32 of the object without it, a row's begun with that of the row before.

    The first row's is begun with the name of the run."""
    config = config_of(run)
    crc = config.pop("crc32")
    assert zlib.crc32(json.dumps(config).encode()) == crc
    crc = int(config["run"], 16)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row, _, rest = line.partition(', "crc32": ')
        crc = zlib.crc32(f"{row}}}".encode(), crc)
        assert rest == f"{crc}}}"


# --- resuming


def test_the_flags_of_the_run_are_the_defaults(tmp_path):
    """For what --resume gives alone; those that decide nothing may be others."""
    out = tmp_path / "run"
    fedavg.main([*TINY, "--rounds", "1", "--local-steps=1", "--server", "adam", "--out", str(out)])
    parser = common.flags("test", "fedavg")
    parser.add_argument("--needed", required=True)
    with pytest.raises(common.UserError, match="--needed"):
        parser.parse_args(resumed(out))
    write_config(out, flags=config_of(out)["flags"] | {"needed": "x"})
    args = parser.parse_args(resumed(out, "--rounds", 5, "--workers", 2))
    changed = {"out": str(out), "resume": True, "rounds": 5, "workers": 2}
    assert common.flag_values(args) == config_of(out)["flags"] | changed
    fresh = parser.parse_args(["--needed", "y"])  # the parser has its own defaults again
    assert (fresh.local_steps, fresh.rounds, fresh.server) == (None, 25, "avg")
    for words, message in ((["--resume"], "--out"), (["--resume", "--out"], "--out")):
        assert message in refusal(parser.parse_args, words)


@pytest.mark.parametrize("more", [[], ["--deterministic"]])
def test_a_resumed_run_whose_graph_fails(tmp_path, capsys, more):
    """goes on without, but not where its numbers are to be those of an uncut run."""
    out, evaluate = tmp_path / "run", common.evaluate
    fedavg.main([*TINY, "--local-steps", "1", "--rounds", "1", *more, "--out", str(out)])
    before = contents(out)

    def failing(net, data, args, *rest):
        args.capture = False
        return evaluate(net, data, args, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "evaluate", failing)
        if more:
            words = resumed(out, "--rounds", 2)
            refused(capsys, fedavg, words, str(out), "CUDA graph", "--deterministic")
            assert contents(out) == before
        else:
            fedavg.main(resumed(out, "--rounds", 2))
    assert config_of(out)["graph"] == bool(more)
    fedavg.main(resumed(out, "--rounds", 2))
    assert rounds_in(out) == 2


@pytest.mark.parametrize("name", ["scaffold", "rfedavg"])
def test_resume_after_kill(tmp_path, name):
    """SIGKILL at random moments of rounds 1 to 3 and 3 to 6; tests/chaos.py kills everywhere."""
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
    SCRIPTS[name].main(resumed(cut))
    assert_equal_runs(whole, cut)
    assert not list(cut.glob("**/*.tmp"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_method_resumes(tmp_path, name):
    """Two rounds, then two more, are four, bit for bit."""
    argv = [*TINY, "--sample", "0.5", "--local-steps", "3", *needed(name), "--eval-every", "2"]
    SCRIPTS[name].main([*argv, "--rounds", "4", "--out", str(tmp_path / "whole")])
    SCRIPTS[name].main([*argv, "--rounds", "2", "--out", str(tmp_path / "cut")])
    SCRIPTS[name].main(resumed(tmp_path / "cut", "--rounds", 4))
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_rounds_and_another_interval(tmp_path):
    """A plain --resume goes by what the last checkpoint was written with."""
    out = tmp_path / "cut"
    fedavg.main([*FOUR, "--rounds", "1", "--out", str(out)])
    killed_in(3, resumed(out, "--rounds", 4, "--checkpoint-every", 1))
    found = config_of(out)["flags"]
    assert (rounds_in(out), found["rounds"], found["checkpoint_every"]) == (2, 4, 1)
    killed_in(4, resumed(out))
    assert rounds_in(out) == 3
    fedavg.main(resumed(out, "--quiet"))
    fedavg.main([*FOUR, "--out", str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", out)
    before = contents(out)
    fedavg.main(resumed(out, "--quiet"))  # nothing left to do
    assert contents(out) == before


def test_best_is_of_a_round_with_a_row(tmp_path):
    """Round 2, the last, is evaluated and the best; cut there, the run goes on to 4.

    There it is not evaluated, and the best is that of a run that was never cut."""
    argv = [*TINY, "--eval-every", "3"]
    killed_in(2, [*argv, "--rounds", "2", "--out", tmp_path / "cut"])
    fedavg.main(resumed(tmp_path / "cut", "--rounds", 4))
    fedavg.main([*argv, "--rounds", "4", "--out", str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"x")])
def test_copies_are_written_again(run, damage):
    """model.pt and best.pt are the checkpoint's."""
    before = contents(run)
    for name in ("model.pt", "best.pt"):
        damage(run / name)
    scaffold.main(resumed(run))
    assert contents(run) == before


def test_other_versions_are_told(run, capsys, monkeypatch):
    monkeypatch.setitem(run_folder.VERSIONS, "torch", "9.0.0")
    scaffold.main(resumed(run))
    assert capsys.readouterr().err == f"{run}: began with torch {torch.__version__} (now 9.0.0)\n"


# --- locks


def lock(out):
    """Lock a run's folder as another process would; return what to close."""
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def test_one_process_a_run(tmp_path, capsys):
    """A second process is refused, and changes nothing; a kill in the first moments leaves none."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json.123.tmp").write_text("{")
    argv = [*TINY, "--out", str(out), "--rounds", "1"]
    for words in (argv, [*argv[:-1], "2", "--resume"]):
        held, before = lock(out), contents(out)
        refused(capsys, fedavg, words, "another process", str(out))
        os.close(held)
        assert contents(out) == before
        fedavg.main(words)
    assert len(rows_of(out)) == 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, None])
def test_without_locks_a_run_says_so_once(tmp_path, capsys, monkeypatch, number):
    """On such file systems, and where there is no fcntl, nor resource, as on Windows."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number is None:
        for name in ("fcntl", "resource"):
            monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "run"
    argv = [*TINY, "--local-steps", "1", "--rounds", "1", "--out", str(out)]
    for words in (argv, resumed(out, "--rounds", 2)):
        fedavg.main(words)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"{out}: cannot be locked here" in err


def test_a_failed_start_leaves_no_folder(tmp_path, capsys):
    """And a folder that is empty is taken."""
    out = tmp_path / "new" / "run"
    for _ in range(2):
        refused(capsys, fedavg, [*TINY, "--clients", "61", "--out", out], "--clients")
        assert not out.exists()
        out.mkdir()
    fedavg.main([*TINY, "--rounds", "1", "--local-steps", "1", "--out", str(out)])
    assert len(rows_of(out)) == 1


# --- what is refused, and changes nothing


REFUSED = [
    (scaffold, ["--out", "RUN"], ["RUN", "exists already", "--resume"]),
    (scaffold, ["--out", "RUN/model.pt"], ["model.pt"]),
    (scaffold, ["--out", "RUN/states"], ["exists already"]),
    (scaffold, ["--out", "RUN", "--resume", "--lr", "0.5"], ["--lr", "0.5", "0.01"]),
    (scaffold, ["--out", "RUN", "--resume", "--rounds", "1"], ["--rounds", "1", "2"]),
    (fedprox, ["--out", "RUN", "--resume"], ["scaffold.py", "fedprox.py"]),
    (scaffold, ["--out", "RUN/none", "--resume"], ["none", "no run"]),
    (scaffold, ["--out", "RUN/..", "--resume"], ["did you mean"]),
    (scaffold, ["--out", 300 * "a", "--resume"], ["too long"]),
]


@pytest.mark.parametrize("script, argv, words", REFUSED)
def test_refused(run, capsys, script, argv, words):
    before = contents(run)
    argv, words = ([word.replace("RUN", str(run)) for word in each] for each in (argv, words))
    refused(capsys, script, argv, *words)
    assert contents(run) == before


class Evil:
    """Writes a file where it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def pickled(content):
    torch.save(Evil(), "evil.pt")
    return open("evil.pt", "rb").read()


def saved(tree):
    return lambda content: run_folder.packed(tree).getvalue()


DAMAGES = [  # file, how, words of the refusal; tests/chaos.py flips, cuts and exchanges any
    ("config.json", lambda content: b"[]", ["config.json is damaged"]),
    ("config.json", lambda content: content.replace(b'"lr": 0', b'"lr": 1'), ["is damaged"]),
    ("config.json", lambda content: 100_000 * b"[", ["config.json is damaged"]),
    ("metrics.jsonl", lambda content: b"", ["metrics.jsonl: damaged, or of another run"]),
    ("metrics.jsonl", lambda content: content.replace(b"_acc", b""), ["metrics.jsonl: damaged"]),
    ("metrics.jsonl", lambda content: 100_000 * b"[" + b"\n" + content, ["metrics.jsonl: damaged"]),
    ("checkpoint.pt", lambda content: None, ["checkpoint.pt: missing"]),
    ("checkpoint.pt", pickled, ["checkpoint.pt: not a readable"]),
    ("checkpoint.pt", saved([1, 2]), ["checkpoint.pt: not a checkpoint of this run"]),
    ("states/1-2.pt", lambda content: None, ["1-2.pt: no such client state"]),
    ("states/1-2.pt", saved({"c": [torch.zeros(3)]}), ["1-2.pt: not a readable", "checkpoint.pt"]),
]


@pytest.mark.parametrize("name, damage, words", DAMAGES)
def test_damage(run, tmp_path, capsys, monkeypatch, name, damage, words):
    """One line names the file, and all stays as it is; once it is put back, the run goes on."""
    monkeypatch.chdir(tmp_path)
    whole = (run / name).read_bytes()
    content = damage(whole)
    assert content != whole
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    before = contents(run)
    refused(capsys, scaffold, resumed(run, "--rounds", 3), *words)
    assert contents(run).items() >= before.items() and not (tmp_path / "pwned").exists()
    (run / name).write_bytes(whole)
    scaffold.main(resumed(run, "--rounds", 3))
    assert len(rows_of(run)) == 3


def test_a_checkpoint_of_another_run_of_the_same_command(run, tmp_path, capsys):
    """Whole by itself; its seconds differ."""
    argv = [*TINY, "--local-steps", "1", "--save-clients", "--workers", "1"]
    scaffold.main([*argv, "--out", str(tmp_path / "other")])
    (run / "checkpoint.pt").write_bytes((tmp_path / "other" / "checkpoint.pt").read_bytes())
    refused(capsys, scaffold, resumed(run, "--rounds", 3), "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "config.json"])
def test_a_pipe_in_a_files_place(run, capsys, name):
    """is refused; reading it would wait for ever."""
    (run / name).unlink()
    os.mkfifo(run / name)
    refused(capsys, scaffold, resumed(run, "--rounds", 3), name)


# --- leftovers, a user's files, disks


@pytest.mark.parametrize("keep", [True, False])
def test_a_longer_run_keeps_the_clients_of_its_own_last_round_alone(tmp_path, keep):
    """Those of the last round stay until another one is committed; a user's file stays."""
    out = tmp_path / "run"
    argv = [*TINY, "--local-steps", "1", "--sample", "0.5", "--save-clients", "--out", str(out)]
    fedavg.main([*argv, "--rounds", "1"])
    if keep:
        (out / "clients" / "mine.pt").write_text("mine")
    early = {name for name in contents(out) if "clients" in name}
    more = resumed(out, "--rounds", 4, *["--save-clients"] * keep)
    killed(more, RunFolder, "write_config")
    assert {name for name in contents(out) if "clients" in name} == early
    if not keep:
        write_config(out, flags=config_of(out)["flags"] | {"save_clients": False})
    _, rows = fedavg.main(more)
    own = {f"clients/{k}-4.pt" for k in rows[-1]["clients"]} | {"clients/mine.pt"}
    assert {name for name in contents(out) if "clients" in name} == (own if keep else set())
    assert (out / "clients").exists() == keep
    assert rows[0]["clients"] != rows[3]["clients"]


def test_divergence_loses_nothing(tmp_path):
    """The line names round and client; the checkpoint stays."""
    out = tmp_path / "run"

    def local_update(worker, client, server, args):
        if server["round"] == 2 and client.id == 2:
            with torch.no_grad():
                worker.net[0][0].weight[0, 0, 0, 0] = float("nan")
        yield from fedavg.local_update(worker, client, server, args)

    parser = common.flags("x", "fedavg")
    common.run(parser.parse_args([*TINY, "--rounds", "1", "--out", str(out)]), local_update)
    good = contents(out)
    with pytest.raises(FloatingPointError, match="round 2, client 2"):
        common.run(parser.parse_args(resumed(out, "--rounds", 3)), local_update)
    assert contents(out) == good


# --- what clients keep between rounds


def test_all_files_are_synced_before_the_checkpoint(tmp_path, monkeypatch):
    """And none before: once a checkpoint, in the last of two rounds; then the rows."""
    events, save, sync = [], run_folder.save, run_folder.sync_path

    def noted(call):
        def noting(*args):
            events.append(args[call is save].name)
            return call(*args)

        return noting

    monkeypatch.setattr(run_folder, "save", noted(save))
    monkeypatch.setattr(run_folder, "sync_path", noted(sync))
    argv = [*TINY, "--checkpoint-every", "2", "--local-steps", "1", "--eval-every", "2"]
    scaffold.main([*argv, "--out", str(tmp_path / "run")])
    first = next(i for i, name in enumerate(events) if name[0].isdecimal())  # threads sync them
    twice = sorted(f"{k}-{t}.pt" for t in (1, 2) for k in range(4))  # of round 1 nothing is left
    assert sorted(events[first : first + 8]) == twice
    after = [name for name in events[first + 8 :] if ".tmp" not in name and name != "run"]
    assert after == ["states", "metrics.jsonl", "checkpoint.pt", "best.pt", "model.pt"]


def test_states_are_read_when_a_client_trains(tmp_path, monkeypatch):
    """Not at the start of a resumed run."""
    argv = [*TINY, "--clients", "6", "--sample", "0.5", "--local-steps", "2"]
    scaffold.main([*argv, "--rounds", "5", "--out", str(tmp_path / "whole")])
    out, seen, load = tmp_path / "cut", [], run_folder.load
    _, rows = scaffold.main([*argv, "--rounds", "3", "--out", str(out)])
    trained = {k: row["round"] for row in rows for k in row["clients"]}
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "load", lambda *args: (seen.append(args[0]), load(*args))[1])
        _, rows = scaffold.main(["--out", str(out), "--resume", "--rounds", "4"])
    read = {path.name for path in seen if path.parent.name == "states"}
    assert read == {f"{k}-{trained[k]}.pt" for k in rows[-1]["clients"] if k in trained}
    scaffold.main(["--out", str(out), "--resume", "--rounds", "5"])
    assert_equal_runs(tmp_path / "whole", out)
    for path in (tmp_path / "whole" / "states").iterdir():
        a, b = (load(folder / path.name)["c"] for folder in (path.parent, out / "states"))
        assert same(dict(enumerate(a)), dict(enumerate(b)))
