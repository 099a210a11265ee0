"""What clients keep between rounds: files that are read when a client trains, and no earlier."""

import re
import shutil

import pytest
import torch
from conftest import TINY, refused, same
from runs import assert_equal_runs, without_checksums

import common
import engine
import run_folder
import extras.glyphs
import scaffold


def state_of(value):
    return {"c": [torch.full((2, 3), value).t(), torch.tensor(value)]}


@pytest.fixture
def states(tmp_path):
    found = run_folder.States(tmp_path / "states")
    found.folder.mkdir()
    return found


def names(states):
    return sorted(path.name for path in states.folder.iterdir())


def keep(states, k, value, t):
    """Let client k leave a state in round t."""
    states.note(k, states.write(k, state_of(value), t))


def test_a_state_comes_back_with_its_strides(states):
    """From memory and from the file."""
    assert states.read(7) == {}
    keep(states, 7, 1.5, 1)
    for _ in range(2):  # reading takes it out of the cache
        (matrix, number) = states.read(7)["c"]
        assert torch.equal(matrix, torch.full((3, 2), 1.5))
        assert matrix.stride() == (1, 3)
        assert number == 1.5


def test_old_versions_go_after_the_commit_alone(states):
    """Versions between two checkpoints go at once: no kill leads back to them."""
    keep(states, 7, 1.0, 1)
    keep(states, 8, 1.0, 1)
    states.sync()
    states.commit(1)
    keep(states, 7, 2.0, 2)
    assert names(states) == ["7-1.pt", "7-2.pt", "8-1.pt"]
    keep(states, 7, 3.0, 3)
    assert names(states) == ["7-1.pt", "7-3.pt", "8-1.pt"]
    states.sync()
    assert names(states) == ["7-1.pt", "7-3.pt", "8-1.pt"]
    states.commit(3)
    assert names(states) == ["7-3.pt", "8-1.pt"]


def test_a_checkpoint_leads_back_to_its_versions(states):
    """Whatever was written after it; the files of a kill are cleared away."""
    keep(states, 7, 1.0, 1)
    states.commit(1)
    table = states.table()
    keep(states, 7, 2.0, 2)
    keep(states, 9, 2.0, 2)
    (states.folder / "9-3.pt.12.tmp").write_bytes(b"cut")
    again = run_folder.States(states.folder)
    again.read_table(table)
    again.restore(1)
    assert names(again) == ["7-1.pt"]
    assert again.read(7)["c"][1] == 1
    assert again.read(9) == {}


def test_a_state_that_was_emptied_stays_empty(states):
    assert states.write(7, {}, 1) is None
    keep(states, 7, 1.0, 1)
    states.note(7, states.write(7, {}, 2))
    assert states.read(7) == {}
    assert states.versions[7][0] == 2


def test_the_cache_is_bounded(states, monkeypatch):
    """The newest states stay; 28 bytes each, room for three of them."""
    monkeypatch.setattr(run_folder.States, "CACHE", 100)
    for k in range(9):
        keep(states, k, float(k), 1)
    assert list(states.cache) == [6, 7, 8]
    assert states.cached == 84
    assert [states.read(k)["c"][1] for k in (0, 8)] == [0, 8]
    assert (list(states.cache), states.cached) == ([6, 7], 56)


def test_a_cached_state_of_an_earlier_version_is_not_used(states):
    """As where another process trained the client since."""
    keep(states, 7, 1.0, 1)
    other = run_folder.States(states.folder)
    other.read_table(states.table())
    states.note(7, other.write(7, state_of(2.0), 2))
    assert states.read(7)["c"][1] == 2


def test_all_files_are_synced_before_the_checkpoint(tmp_path, monkeypatch):
    """And none before: once a checkpoint, in the last of two rounds."""
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
    events = [name for name in events if not re.match("run|best|model", name)]
    twice = [f"{k}-{t}.pt" for t in (1, 2) for k in range(4)]  # of round 1 nothing is left
    assert sorted(events[:8]) == sorted(twice)
    assert events[8:] == ["states", "checkpoint.pt"]


def test_states_are_read_when_a_client_trains(tmp_path, monkeypatch):
    """Not at the start of a resumed run; without a cache as with one."""
    argv = [*TINY, "--clients", "6", "--sample", "0.5", "--local-steps", "2"]
    scaffold.main([*argv, "--rounds", "5", "--out", str(tmp_path / "whole")])
    monkeypatch.setattr(run_folder.States, "CACHE", 0)
    out, seen, load = tmp_path / "cut", [], run_folder.States._load
    monkeypatch.setattr(
        run_folder.States,
        "_load",
        lambda self, path, sum_: (seen.append(path), load(self, path, sum_))[1],
    )
    _, rows = scaffold.main([*argv, "--rounds", "3", "--out", str(out)])
    trained = {k: row["round"] for row in rows for k in row["clients"]}
    seen.clear()
    _, rows = scaffold.main(["--out", str(out), "--resume", "--rounds", "4"])
    expected = {f"{k}-{trained[k]}.pt" for k in rows[-1]["clients"] if k in trained}
    assert {path.name for path in seen} == expected
    scaffold.main(["--out", str(out), "--resume", "--rounds", "5"])
    assert_equal_runs(tmp_path / "whole", out)
    for path in (tmp_path / "whole" / "states").iterdir():
        a, b = (
            run_folder.load(folder / path.name)["c"] for folder in (path.parent, out / "states")
        )
        assert same(dict(enumerate(a)), dict(enumerate(b)))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras.glyphs, "GLYPHS", (600, 200))
        torch.set_num_threads(1)
        scaffold.main([*TINY, "--local-steps", "1", "--rounds", "1", "--out", str(out)])
    return out


def other_shape(path):
    run_folder.save({"c": [torch.zeros(3)]}, path)


def other_type(path):
    run_folder.save(common.tree_map(torch.Tensor.double, run_folder.load(path)), path)


def other_client(path):
    shutil.copy(path.with_name("2-1.pt"), path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    "damage, word",
    [
        (other_shape, "checkpoint.pt"),
        (other_type, "checkpoint.pt"),
        (other_client, "checkpoint.pt"),
        (cut, "not a readable"),
    ],
)
def test_a_wrong_state_is_one_line(tmp_path, capsys, original, damage, word):
    out = shutil.copytree(original, tmp_path / "run")
    damage(out / "states" / "1-1.pt")
    argv = ["--out", out, "--resume", "--rounds", "2"]
    refused(capsys, scaffold, argv, "states/1-1.pt", "client state", word)


def test_a_missing_state_is_one_line_at_once(tmp_path, capsys, monkeypatch, original):
    """Before anything trains, and before anything is removed."""
    out = shutil.copytree(original, tmp_path / "run")
    (out / "states" / "1-1.pt").unlink()
    (out / "states" / "1-9.pt").write_bytes(b"")
    monkeypatch.setattr(engine.Worker, "train", None)
    argv = ["--out", out, "--resume", "--rounds", "2"]
    refused(capsys, scaffold, argv, "states/1-1.pt", "no such client state")
    assert (out / "states" / "1-9.pt").exists()


def test_runs_of_before_checksums_resume(tmp_path, original):
    """Their checkpoints name {client: round}, and nothing says of which run a file is."""
    out = shutil.copytree(original, tmp_path / "run")
    without_checksums(out)
    state = dict(torch.load(out / "checkpoint.pt"))
    state["clients"] = {k: t for k, t, _ in state["clients"].tolist()}
    torch.save(state, out / "checkpoint.pt")
    scaffold.main(["--out", str(out), "--resume", "--rounds", "3"])
    whole = [*TINY, "--local-steps", "1", "--rounds", "3", "--out", str(tmp_path / "whole")]
    scaffold.main(whole)
    assert_equal_runs(tmp_path / "whole", out)
