"""What clients keep between rounds: files that are read when a client trains, and no earlier."""

import torch
from conftest import TINY, same
from runs import assert_equal_runs

import run_folder
import scaffold
from run_folder import States


def states_in(folder, *kept):
    """Return States after clients have left what kept says, (client, value, round) each."""
    states = States(folder / "states")
    for k, value, t in kept:
        keep(states, k, value, t)
    return states


def keep(states, k, value, t):
    """Let client k leave a state in round t."""
    tree = {"c": [torch.full((2, 3), value).t(), torch.tensor(value)]}
    states.note(k, states.write(k, tree, t))


def names(states):
    return sorted(path.name for path in states.folder.iterdir())


def test_a_state_comes_back_with_its_strides(tmp_path):
    states = states_in(tmp_path, (7, 1.5, 1))
    assert states.get(8, {}) == {}
    matrix, number = states.get(7, {})["c"]
    assert torch.equal(matrix, torch.full((3, 2), 1.5))
    assert (matrix.stride(), number) == ((1, 3), 1.5)


def test_old_versions_go_after_the_commit_alone(tmp_path):
    """Versions between two checkpoints go at once: no kill leads back to them."""
    states = states_in(tmp_path, (7, 1.0, 1), (8, 1.0, 1))
    states.commit(1)
    for t, there in ((2, ["7-1.pt", "7-2.pt", "8-1.pt"]), (3, ["7-1.pt", "7-3.pt", "8-1.pt"])):
        keep(states, 7, float(t), t)
        states.sync()
        assert names(states) == there
    states.commit(3)
    assert names(states) == ["7-3.pt", "8-1.pt"]


def test_a_checkpoint_leads_back_to_its_versions(tmp_path):
    """Whatever was written after it; what it does not name goes at the end of the run."""
    states = states_in(tmp_path, (7, 1.0, 1))
    states.commit(1)
    table = states.table()
    for k in (7, 9):
        keep(states, k, 2.0, 2)
    (states.folder / "mine.pt").write_bytes(b"a user's own")
    (states.folder / "1-1.pt").mkdir()
    again = States(states.folder)
    again.restore(table, 1)
    assert again.get(7, {})["c"][1] == 1 and again.get(9, {}) == {}
    again.sweep()
    assert names(again) == ["1-1.pt", "7-1.pt", "mine.pt"]


def test_a_state_that_was_emptied_stays_empty(tmp_path):
    states = states_in(tmp_path)
    assert states.write(7, {}, 1) is None
    keep(states, 7, 1.0, 1)
    states.note(7, states.write(7, {}, 2))
    assert states.get(7, {}) == {} and states.versions[7][0] == 2


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
