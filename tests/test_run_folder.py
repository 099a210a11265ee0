"""The run folder: what is in it, resuming, locks, damage."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib

import pytest
import torch
from conftest import TINY, flags, refusal, refused, same
from methods import SCRIPTS, needed
from runs import assert_equal_runs, config_of, rounds_in, rows_of, start, write_config

import common
import run_folder
import extras.glyphs
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


def original(tmp_path_factory, script, *argv):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.glyphs, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        script.main([*argv, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def four_rounds(tmp_path_factory):
    """The folder of a run of four rounds, not to be changed."""
    return original(tmp_path_factory, fedavg, *FOUR)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two rounds of SCAFFOLD with client models, not to be changed."""
    argv = [*TINY, "--local-steps", "1", "--save-clients", "--workers", "1"]
    return original(tmp_path_factory, scaffold, *argv)


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


def test_runs_of_other_data_or_code_are_others(tmp_path):
    """Also with the same flags; with all the same, a run is the same in any folder."""

    def name(out, digest, code):
        folder = RunFolder(flags("--out", str(tmp_path / out)), code)
        folder.digests = {"samples": digest}
        folder.out.mkdir()
        folder.create(1, 1)
        return folder.config["run"]

    a, b = name("a", 1, {"aggregate": "x"}), name("b", 1, {"aggregate": "x"})
    assert a == b
    assert len({a, name("c", 2, {"aggregate": "x"}), name("d", 1, {"aggregate": "y"})}) == 3


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


@pytest.mark.parametrize("t", [1, 2, 3])
def test_resume_after_a_kill_inside_a_round(tmp_path, four_rounds, t):
    """Checkpoints are written every second round; a row was being written."""
    killed_in(t, [*FOUR, "--out", tmp_path / "cut"])
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as f:
        f.write('{"round": 9, "te')
    fedavg.main(resumed(tmp_path / "cut"))
    assert_equal_runs(four_rounds, tmp_path / "cut")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_method_resumes(tmp_path, name):
    """Two rounds, then two more, are four, bit for bit."""
    argv = [*TINY, "--sample", "0.5", "--local-steps", "3", *needed(name), "--eval-every", "2"]
    SCRIPTS[name].main([*argv, "--rounds", "4", "--out", str(tmp_path / "whole")])
    SCRIPTS[name].main([*argv, "--rounds", "2", "--out", str(tmp_path / "cut")])
    SCRIPTS[name].main(resumed(tmp_path / "cut", "--rounds", 4))
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_rounds_and_another_interval(tmp_path, four_rounds):
    """A plain --resume goes by what the last checkpoint was written with."""
    out = tmp_path / "cut"
    fedavg.main([*FOUR, "--rounds", "1", "--out", str(out)])
    killed_in(3, resumed(out, "--rounds", 4, "--checkpoint-every", 1))
    found = config_of(out)["flags"]
    assert (rounds_in(out), found["rounds"], found["checkpoint_every"]) == (2, 4, 1)
    killed_in(4, resumed(out))
    assert rounds_in(out) == 3
    fedavg.main(resumed(out, "--quiet"))
    assert_equal_runs(four_rounds, out)
    before = contents(out)
    fedavg.main(resumed(out, "--quiet"))  # nothing left to do
    assert contents(out) == before


def test_nothing_is_written_before_the_first_checkpoint(tmp_path, four_rounds):
    """Of a resumed run: not a row, a flag or a client's file goes that was there."""
    out = tmp_path / "cut"
    argv = [*FOUR, "--save-clients", "--out", out]
    killed(argv, RunFolder, "checkpoint", lambda folder, fed: fed.server["round"] == 4)
    before = contents(out)
    killed(resumed(out, "--rounds", 5), RunFolder, "checkpoint")
    assert contents(out).items() >= before.items()
    fedavg.main(resumed(out))
    assert_equal_runs(four_rounds, out)


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


def test_a_new_folder_is_taken_by_the_first(tmp_path, capsys, monkeypatch):
    """The second is refused before it loads data, and the first goes on as if nothing was."""
    out, second = tmp_path / "run", []
    argv = [*TINY, "--rounds", "1", "--out", str(out)]
    load_data = common.load_data

    def load(args):  # while the first loads its data
        assert not second, "the second loads data"
        second.append(True)
        refused(capsys, fedavg, argv, "another process", str(out))
        assert out.is_dir()
        return load_data(args)

    monkeypatch.setattr(common, "load_data", load)
    fedavg.main(argv)
    assert len(rows_of(out)) == 1


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


def replaced(old, new):
    return lambda content: re.sub(old, new, content, count=1)


def flipped(content):
    """Flip a bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def saved(tree):
    return lambda content: run_folder.packed(tree).getvalue()


def pickled(content):
    torch.save(Evil(), "evil.pt")
    return open("evil.pt", "rb").read()


DEEP = 100_000 * b"["
DAMAGES = {  # {file: [(how, words of the refusal), ...]}
    "config.json": [
        (how, ["config.json is damaged"])
        for how in (
            lambda content: b"{",
            lambda content: b"[]",
            lambda content: DEEP,
            lambda content: b'{"flags": ' + 5000 * b"9",
            replaced(rb'"clients": 4', b'"clients": 5'),
            replaced(rb',\s*"crc32": \d+', b""),
        )
    ],
    "metrics.jsonl": [
        (how, ["metrics.jsonl: damaged, or of another run"])
        for how in (
            lambda content: b"",
            lambda content: b"5\n5\n",
            lambda content: b"\xff\xfe\n" + content,
            lambda content: DEEP + b"\n" + content,
            lambda content: content.splitlines()[0] + b"\n",
            replaced(rb"test_acc", b"acc"),
            replaced(rb'"train_loss": 4', b'"train_loss": 5'),
            replaced(rb', "crc32": \d+', b""),
        )
    ],
    "checkpoint.pt": [
        (lambda content: None, ["checkpoint.pt: missing"]),
        (lambda content: b"", ["checkpoint.pt: not a readable"]),
        (lambda content: content[: len(content) // 2], ["checkpoint.pt: not a readable"]),
        (flipped, ["checkpoint.pt: not a readable", "checksum"]),
        (pickled, ["checkpoint.pt: not a readable"]),
        (saved([1, 2]), ["checkpoint.pt: not a checkpoint of this run"]),
        (saved({"net": {}, "run": "0"}), ["checkpoint.pt: not a checkpoint of this run"]),
    ],
    "states/1-2.pt": [
        (lambda content: None, ["1-2.pt: no such client state"]),
        (lambda content: b"", ["1-2.pt: not a readable client state", "checkpoint.pt"]),
        (flipped, ["1-2.pt: not a readable client state", "checkpoint.pt"]),
        (saved({"c": [torch.zeros(3)]}), ["1-2.pt: not a readable", "checkpoint.pt"]),
    ],
}


@pytest.mark.parametrize(
    "name, damage, words", [(name, *case) for name, cases in DAMAGES.items() for case in cases]
)
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


@pytest.mark.parametrize(
    "name, seed",
    [("checkpoint.pt", 0), ("checkpoint.pt", 5), ("metrics.jsonl", 0), ("states/1-2.pt", 5)],
)
def test_files_of_other_runs(run, tmp_path, capsys, name, seed):
    """Whole by themselves, of other flags or of the same command, whose seconds differ."""
    argv = [*TINY, "--local-steps", "1", "--save-clients", "--workers", "1", "--seed", str(seed)]
    scaffold.main([*argv, "--out", str(tmp_path / "other")])
    (run / name).write_bytes((tmp_path / "other" / name).read_bytes())
    blamed = "metrics.jsonl" if seed == 0 else name
    refused(capsys, scaffold, resumed(run, "--rounds", 3), blamed)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "config.json"])
def test_a_pipe_in_a_files_place(run, capsys, name):
    """is refused; reading it would wait for ever."""
    (run / name).unlink()
    os.mkfifo(run / name)
    refused(capsys, scaffold, resumed(run, "--rounds", 3), name)


def test_a_flipped_bit_of_config_or_rows(run):
    """Of 200 bytes of each: found, or of no account."""
    rng, config = random.Random(0), config_of(run)
    for name, read in (
        ("config.json", lambda: [run_folder.read_config(run)]),
        ("metrics.jsonl", lambda: run_folder.read_rows(run, config)),
    ):
        good, expected = (run / name).read_bytes(), read()
        for i in rng.sample(range(len(good)), 200):
            flip = bytes([good[i] ^ 1 << rng.randrange(8)])
            (run / name).write_bytes(good[:i] + flip + good[i + 1 :])
            found = [] if refusal(read) else read()
            assert found == expected[: len(found)]
        (run / name).write_bytes(good)


# --- leftovers, a user's files, disks


LEFT_BY_A_KILL = [
    "config.json.7.tmp",
    "checkpoint.pt.7.tmp",
    "best.pt.77.tmp",
    "clients/1-1.pt",
    "states/9-3.pt",
]
A_USERS_OWN = ["notes.tmp", "a.json.7.tmp", "best-1.pt", "clients/0 (1).pt", "states/mine.pt"]


def test_resume_deletes_what_a_kill_left_and_nothing_else(run):
    """Also of a run that was finished, where no checkpoint is written any more."""
    before = set(contents(run))
    for name in [*LEFT_BY_A_KILL, *A_USERS_OWN]:
        (run / name).write_text("x")
    scaffold.main(resumed(run))
    assert set(contents(run)) - before == set(A_USERS_OWN)


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


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_what_is_deleted_during_a_run_is_written_again(tmp_path, four_rounds, name):
    out, keep = tmp_path / "run", RunFolder.keep

    def deleting(folder, fed, row):
        keep(folder, fed, row)
        if row["round"] == 2:
            (out / name).unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "keep", deleting)
        fedavg.main([*FOUR, "--out", str(out)])
    assert_equal_runs(four_rounds, out)
    assert config_of(out)["flags"] | {"out": ""} == config_of(four_rounds)["flags"] | {"out": ""}


def test_full_disk_is_one_line(tmp_path):
    """No file may grow beyond 300 kB here, which is how a full disk looks from inside."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    argv = [*TINY, "--out", str(tmp_path / "run")]
    process = start("fedavg", *argv, before=limit, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and len(err.splitlines()) == 1 and "too large" in err, err
    assert not list((tmp_path / "run").glob("*.tmp"))


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
