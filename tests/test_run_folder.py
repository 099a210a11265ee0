"""The run folder: what is in it, resuming, locks, damage, and from the shell Ctrl-C and kills."""

import errno
import fcntl
import functools
import linecache
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zlib

import pytest
import torch
from conftest import TINY, refusal, refused, run_once, same
from runs import assert_equal_runs, config_of, equal, rounds_in, rows_of, start, write_config

import common
import run_folder
import fedavg
import fedprox
import scaffold
from run_folder import RunFolder


class Killed(BaseException):
    """What stands for a kill: nothing catches it."""


def killed(argv, name, when=lambda *_: True):
    """Run fedavg.py until RunFolder's name is called, the first time that when(*its arguments)."""
    f = getattr(RunFolder, name)

    def killing(*args):
        if when(*args):
            raise Killed
        return f(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, name, killing)
        fedavg.main([*map(str, argv)])


def killed_in(t, argv):
    """Run fedavg.py until round t is trained, and about to be kept."""
    killed(argv, "keep", lambda folder, fed, row: row["round"] == t)


def resumed(out, *argv):
    return ["--out", str(out), "--resume", *map(str, argv)]


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two rounds of SCAFFOLD with client models, not to be changed."""
    argv = ["--local-steps", "1", "--save-clients", "--workers", "1"]
    return run_once(tmp_path_factory.mktemp("runs") / "run", scaffold, *argv)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that folder, to be changed."""
    return shutil.copytree(finished, tmp_path / "run")


def test_what_a_run_leaves(run):
    """model.pt and best.pt are the checkpoint's, which names files of each client's last round."""
    config, state = config_of(run), run_folder.load(run / "checkpoint.pt")
    assert (config["script"], config["workers"], config["flags"]["lr"]) == ("scaffold", 1, 0.01)
    assert config["threads"] >= 1 and "commit" in config
    assert config["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\S.*, \d+ cores", config["device"])
    names = "best.pt checkpoint.pt config.json metrics.jsonl model.pt".split()
    for folder, table in (("states", state["clients"]), ("clients", state["models"])):
        names += [f"{folder}/{k}-2.pt" for k in range(4)]
        for k, t, crc in table.tolist():
            assert zlib.crc32((run / folder / f"{k}-{t}.pt").read_bytes()) == crc
    assert contents(run).keys() == {*names}
    for name, part in (("model.pt", "net"), ("best.pt", "best")):
        assert same(torch.load(run / name), state[part])
    before = contents(run)
    (run / "model.pt").unlink()
    (run / "best.pt").write_bytes(b"x")
    scaffold.main(resumed(run))
    assert contents(run) == before


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
    """goes on without, and ever after, but not where its numbers are to be an uncut run's."""
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
    for rounds in (2, 3):
        assert config_of(out)["graph"] == bool(more)
        fedavg.main(resumed(out, "--rounds", rounds))
    assert (config_of(out)["graph"], rounds_in(out)) == (bool(more), 3)


def test_more_rounds_and_another_interval(tmp_path):
    """A plain --resume goes by what the last checkpoint was written with."""
    out = tmp_path / "cut"
    words = [*TINY, "--rounds", "4", "--persist-opt", "--checkpoint-every", "2"]
    fedavg.main([*words, "--rounds", "1", "--out", str(out)])
    killed_in(3, resumed(out, "--rounds", 4, "--checkpoint-every", 1, "--save-clients"))
    found = config_of(out)["flags"]
    assert (rounds_in(out), found["rounds"], found["checkpoint_every"]) == (2, 4, 1)
    killed_in(4, resumed(out))
    assert rounds_in(out) == 3
    fedavg.main(resumed(out, "--quiet"))
    fedavg.main([*words, "--save-clients", "--out", str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", out)
    before = contents(out)
    fedavg.main(resumed(out, "--quiet"))  # nothing left to do
    assert contents(out) == before


def test_best_is_of_a_round_with_a_row(tmp_path):
    """Round 2, the last, is the best, but not evaluated once the run is extended to 4."""
    argv = [*TINY, "--eval-every", "3"]
    killed_in(2, [*argv, "--rounds", "2", "--out", tmp_path / "cut"])
    fedavg.main(resumed(tmp_path / "cut", "--rounds", 4))
    fedavg.main([*argv, "--rounds", "4", "--out", str(tmp_path / "whole")])
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_other_versions_are_told(run, capsys, monkeypatch):
    before = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setitem(run_folder.VERSIONS, "torch", "9.0.0")
    monkeypatch.setitem(run_folder.VERSIONS, "instructions", "SVE")
    scaffold.main(resumed(run))
    changed = f"torch {torch.__version__} (now 9.0.0) and instructions {before} (now SVE)"
    assert capsys.readouterr().err == f"{run}: began with {changed}\n"


def test_one_process_a_run(tmp_path, capsys):
    """A second process is refused, and changes nothing; a kill in the first moments leaves none."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json.123.tmp").write_text("{")
    argv = [*TINY, "--out", str(out), "--rounds", "1"]
    for words in (argv, [*argv[:-1], "2", "--resume"]):
        held, before = os.open(out, os.O_RDONLY), contents(out)
        fcntl.flock(held, fcntl.LOCK_EX)
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


REFUSED = [
    (scaffold, ["--out", "RUN"], ["RUN", "exists already", "--resume"]),
    (scaffold, ["--out", "RUN/model.pt"], ["model.pt"]),
    (scaffold, ["--out", "RUN", "--resume", "--lr", "0.5"], ["--lr", "0.5", "0.01"]),
    (scaffold, ["--out", "RUN", "--resume", "--rounds", "1"], ["--rounds", "1", "2"]),
    (scaffold, ["--out", "RUN", "--resume", "--plain"], ["--plain: not with --resume"]),
    (fedprox, ["--out", "RUN", "--resume"], ["scaffold.py", "fedprox.py"]),
    (scaffold, ["--out", "RUN/none", "--resume"], ["none", "no run"]),
    (scaffold, ["--out", "RUN/..", "--resume"], ["did you mean"]),
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


def saved(tree):
    return lambda path: run_folder.save(tree, path)


def written(content):
    return lambda path: path.write_bytes(content)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def marked(path):
    """Mark a tensor's record as a folder: torch then reads nothing, and takes what memory held."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"archive/data/0") - 8] ^= 16
    path.write_bytes(content)


def another(path):
    """Put that of another run of the same command in its place; its seconds differ."""
    argv = [*TINY, "--local-steps", "1", "--save-clients", "--workers", "1"]
    scaffold.main([*argv, "--out", str(path.parent.parent / "other")])
    shutil.copy(path.parent.parent / "other" / path.name, path)


DAMAGES = [  # file, how, words of the refusal
    ("config.json", written(b"[]"), ["config.json is damaged"]),
    ("config.json", pipe, ["config.json"]),
    ("metrics.jsonl", written(b""), ["metrics.jsonl: damaged, or of another run"]),
    ("metrics.jsonl", written(100_000 * b"["), ["metrics.jsonl: damaged"]),
    ("metrics.jsonl", pipe, ["metrics.jsonl: not a file"]),
    ("checkpoint.pt", os.unlink, ["checkpoint.pt: missing"]),
    ("checkpoint.pt", pipe, ["checkpoint.pt: not a file"]),
    ("checkpoint.pt", marked, ["checkpoint.pt: not a readable", "checksums are not those"]),
    ("checkpoint.pt", lambda path: torch.save(Evil(), path), ["checkpoint.pt: not a readable"]),
    ("checkpoint.pt", saved([1, 2]), ["checkpoint.pt: not a checkpoint of this run"]),
    ("checkpoint.pt", another, ["metrics.jsonl"]),
    ("states/1-2.pt", os.unlink, ["1-2.pt: no such client state"]),
    ("states/1-2.pt", saved({"c": [torch.zeros(3)]}), ["1-2.pt: not a readable", "checkpoint.pt"]),
]


@pytest.mark.parametrize("name, damage, words", DAMAGES)
def test_damage(run, tmp_path, capsys, monkeypatch, name, damage, words):
    """One line names the file, and all stays as it is; once it is put back, the run goes on."""
    monkeypatch.chdir(tmp_path)
    whole = (run / name).read_bytes()
    damage(run / name)
    before = contents(run)
    assert before.get(name) != whole
    refused(capsys, scaffold, resumed(run, "--rounds", 3), *words)
    assert contents(run).items() >= before.items() and not (tmp_path / "pwned").exists()
    (run / name).unlink(missing_ok=True)
    (run / name).write_bytes(whole)
    scaffold.main(resumed(run, "--rounds", 3))
    assert len(rows_of(run)) == 3


@pytest.mark.parametrize("name", ["some.pt", "config.json", "metrics.jsonl"])
def test_a_flipped_bit_is_noticed(run, name):
    """In any byte: the file is refused, or read as before; of rows those before it count."""
    path, config = run / name, config_of(run)
    tree = {"a": torch.arange(3), "b": [1.5, "c"], "d": torch.ones(3).bfloat16()}
    run_folder.save(tree, run / "some.pt")
    read = {
        "some.pt": lambda: run_folder.load(path),
        "config.json": lambda: run_folder.read_config(run),
        "metrics.jsonl": lambda: run_folder.read_rows(run, config),
    }[name]
    whole, expected = path.read_bytes(), read()
    for i, byte in enumerate(whole):
        path.write_bytes(whole[:i] + bytes([byte ^ 1 << i % 8]) + whole[i + 1 :])
        try:
            found = read()
        except common.UserError as e:
            assert "\n" not in str(e), i
        else:
            assert equal(found, expected[: len(found)] if type(found) is list else expected), i


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
    killed(more, "write_config")
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


# --- what tells a run's code from other code


SOURCE = '''
import torch.nn.functional as F
SCALE = 2.0
def loss_of(out, y):
    return F.cross_entropy(out, y) * SCALE  # a helper
def local_update(worker, client, server, args, power=1):
    """Train."""
    def step(x, y):
        loss = loss_of(worker.net(x), y) ** power
        loss.backward()
        return loss
    yield step
'''
CHANGES = [  # whether the code is another one then
    ("# a helper", "# that helps\n", False),
    ('"""Train."""', '"""Train a client."""', False),
    ("SCALE = 2.0", "SCALE = 3.0", True),
    ("power=1", "power=2", True),
]


def function_of(path, source=SOURCE):
    path.write_text(source)
    return runpy.run_path(str(path))["local_update"]


def code_of(f, **more):
    return run_folder.code_of(common.Method(f, common.average, **more))


@pytest.mark.parametrize("old, new, other", CHANGES)
def test_what_counts(tmp_path, old, new, other):
    """The function's file, but its comments; of common.py the name alone counts."""
    a = function_of(tmp_path / "a.py")
    b = function_of(tmp_path / "b.py", SOURCE.replace(old, new))
    assert (code_of(a) != code_of(b)) == other
    assert code_of(a) == code_of(functools.partial(a, power=2))
    found = code_of(a, adapt=b)
    assert (found["aggregate"], found["adapt"]) == ("average", code_of(b)["local_update"])


def test_a_resume_by_other_code_is_refused(tmp_path):
    words, path = [*TINY, "--local-steps", "1", "--rounds", "1"], tmp_path / "mine.py"
    parser = common.flags("", "mine")
    args = parser.parse_args([*words, "--out", str(tmp_path / "run")])
    common.run(args, function_of(path))
    args = parser.parse_args(["--out", str(tmp_path / "run"), "--resume", "--rounds", "2"])
    other = function_of(path, SOURCE.replace("SCALE = 2.0", "SCALE = 3.0"))
    assert "mine.py began with another local_update" in refusal(common.run, args, other)
    common.run(args, function_of(path))


def test_a_notebook(monkeypatch):
    """All of a cell counts but its comments; where there is no source, the function's name."""

    def cell(text, name, kept=True):
        lines = text.splitlines(True) if kept else []
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        exec(compile(text, name, "exec"), found := {"__name__": "__main__"})
        return code_of(found["local_update"])["local_update"]

    one = cell(SOURCE, "<cell 1>")
    assert one == cell(f"{SOURCE}\n# said\n", "<cell 2>")
    assert one != cell(f"{SOURCE}\nX = 1\n", "<cell 3>")
    assert cell(SOURCE, "<cell 4>", kept=False) == "local_update"


# --- from the shell


def test_interrupts(tmp_path, monkeypatch):
    """Ctrl-C twice, as timeout sends it: a line says how to go on, and no thread holds it up."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    out = tmp_path / "run"
    argv = [*TINY, "--rounds", "5000", "--workers", "2", "--batch-size", "8", "--out", str(out)]
    process = start("fedavg", *argv, stderr=subprocess.PIPE)
    while not rounds_in(out) and process.poll() is None:
        time.sleep(0.02)
    for pause in (0.03, 0.003):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1, err
    assert f"--out {out} --resume" in err


def test_closed_streams(tmp_path):
    """as of a service: nothing is said, and no file of the run takes the number of stderr."""

    def close():
        for number in range(3):
            os.close(number)

    argv = [*TINY[:-3], "--device", "cpu", "--local-steps", "1", "--out", str(tmp_path / "run")]
    assert start("fedavg", *argv, preexec_fn=close).wait(200) == 0
    assert rounds_in(tmp_path / "run") == 2
