"""analysis/runs.py: opening finished runs and keeping results; what is said of bad run folders."""

import importlib
import json
import os
import runpy

import numpy as np
import pytest
import torch
from conftest import TINY, refused_amid_output, same
from runs import config_of, write_config
from tqdm import tqdm

import common
import extras.glyphs
import fedavg
import hessian_eval
import moon
import stochdepth
from analysis import features, runs, similarity


@pytest.mark.parametrize("name", ["cost", "similarity", "features"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_runs_as_a_module(name, monkeypatch, capsys):
    """`python -m analysis.NAME --help` opens with the module's docstring."""
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"analysis.{name}", run_name="__main__", alter_sys=True)
    assert not stop.value.code
    summary = importlib.import_module(f"analysis.{name}").__doc__.splitlines()[0]
    assert summary in capsys.readouterr().out


# --- opening runs


@pytest.mark.parametrize(
    "script, flags",
    [
        (stochdepth, "--model resnet56 --local-steps 1 --batch-size 4"),
        (moon, "--projection 16"),
    ],
)
def test_open_run_restores_the_network(tmp_path, monkeypatch, script, flags):
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (200, 20))
    out = tmp_path / "a"
    net, rows = script.main([*TINY, "--rounds", "1", *flags.split(), "--out", str(out)])
    opened = runs.open_run(out)
    assert [type(m) for m in opened.net.modules()] == [type(m) for m in net.modules()]
    evaluation = common.evaluate(opened.net, opened.data, opened.args)
    assert evaluation == (rows[-1]["test_acc"], rows[-1]["test_loss"])


def test_runs_are_opened_in_full_precision(run):
    write_config(run, flags=config_of(run)["flags"] | {"precision": "bf16"})
    assert runs.open_run(run).args.precision == "fp32"


def test_images_on_disk(run):
    """Data with paths has no x; the batches and features are of what images() decodes."""
    opened = runs.open_run(run)
    index = opened.parts[0][:20]
    net = opened.client_net(0)
    stored = opened.data.x
    labels = opened.data.y
    expected = features.features(net, opened.data, index)
    seeds_of_calls = []

    def images(batches, seeds=None):
        seeds_of_calls.append(seeds)
        return (stored[torch.as_tensor(rows)] for rows in batches)

    opened.data.x = stored[:0]
    opened.data.images = images
    torch.testing.assert_close(features.features(net, opened.data, index), expected)
    plain = hessian_eval.Batches(opened, index, 64, tqdm(disable=True))
    ((x, y),) = plain
    torch.testing.assert_close(x, opened.data.normalise(stored[np.sort(index)]))
    assert torch.equal(y, labels[np.sort(index)])
    opened.args.dataset = "imagenet-200"  # augmented by seeds where files are decoded
    single = hessian_eval.Batches(opened, index, 1, tqdm(disable=True))
    assert len(list(hessian_eval.AuthorsBatches(single))) == 10
    assert [len(seeds) for seeds in seeds_of_calls[-1]] == 10 * [1]
    assert seeds_of_calls[1] is None


# --- keeping results


def test_failed_pictures_lose_nothing(run):
    pytest.importorskip("matplotlib")

    def broken(plt):
        raise ValueError("no picture")

    analysis = runs.Analysis({"x": 1}, {"y": np.ones(2)}, {"z": broken})
    with pytest.raises(ValueError):
        runs.keep_analysis(runs.open_run(run), "a", analysis)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    expected = {"x": 1, "round": 2, "rows_checksum": last["crc32"]}
    assert json.loads((run / "a.json").read_text()) == expected
    assert (run / "a.npz").exists()


class Killed(BaseException):
    """What stands for a kill: nothing catches it."""


@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_analysis_killed_while_it_writes_is_repeated(run, monkeypatch, done):
    """Killed before the array, the picture or the result is there; nothing is left of it."""
    pytest.importorskip("matplotlib")
    similarity.main([str(run), "--name", "whole"])
    written = sorted(path.name.replace("whole", "a") for path in run.glob("whole*"))
    analysis = runs.Analysis({"x": 1}, {"y": np.ones(2)}, {"layers": lambda plt: plt.figure()})
    opened = runs.open_run(run)
    changes, replace = [], os.replace

    def killed(*paths):
        if len(changes) == done:
            (run / "a-layers.pdf.7.tmp").touch()
            raise Killed
        changes.append(paths)
        replace(*paths)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killed)
        runs.keep_analysis(opened, "a", analysis, ["layers"])
    assert not (run / "a.json").exists()
    similarity.main([str(run), "--name", "a"])
    assert sorted(path.name for path in run.glob("a[.-]*")) == written
    (run / "a.unfinished").touch()  # as a kill behind the last write leaves it
    with pytest.raises(common.UserError, match="exists already"):
        runs.check_new(run, "a")
    assert not (run / "a.unfinished").exists()


def test_an_analysis_of_an_earlier_round_makes_way(run, capsys):
    """Its array and its picture too; a file of the user's with a name like theirs stays."""
    analysis = runs.Analysis({"x": 1}, {"y": np.ones(2)})
    runs.keep_analysis(runs.open_run(run), "a", analysis)
    refused_amid_output(capsys, similarity, [run, "--name", "a"], "a.json", "exists already")
    (run / "a-layers.pdf").write_text("of round 2")
    (run / "a-other.pdf").write_text("a user's")
    fedavg.main(["--out", str(run), "--resume", "--rounds", "3"])
    similarity.main([str(run), "--name", "a"])
    result = json.loads((run / "a.json").read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    assert (result["round"], result["rows_checksum"]) == (3, last["crc32"]) and "x" not in result
    assert not (run / "a.npz").exists() and (run / "a-other.pdf").exists()
    picture = run / "a-layers.pdf"
    assert not picture.exists() or picture.read_bytes().startswith(b"%PDF")
    refused_amid_output(capsys, similarity, [run, "--name", "a"], "a.json", "exists already")


def test_results_that_do_not_say_of_which_round_they_are_stay(run):
    """They are a user's own."""
    rows = runs.open_run(run).rows
    for text, stale in (
        ("{}", False),
        ("[]", False),
        ("{", False),
        ('{"round": 2}', False),
        ('{"round": 1}', True),
        ('{"round": 2, "rows_checksum": 1}', True),
    ):
        (run / "a.json").write_text(text)
        assert runs.is_stale(run, "a", rows) == stale, text
    assert not runs.is_stale(run, "none", rows)


def test_a_users_own_file_is_no_analysis(run):
    """Without the mark of an analysis that was killed."""
    (run / "a.npz").touch()
    with pytest.raises(common.UserError, match="a.npz: exists already"):
        runs.check_new(run, "a")


# --- bad run folders


def test_folder_without_a_run(tmp_path, capsys):
    refused_amid_output(capsys, hessian_eval, [tmp_path / "none"], "none", "no run")


def test_bad_client_models(run, original_run, capsys):
    path = run / "clients" / "1-2.pt"
    for content in (b"no tensors", (run / "clients" / "2-2.pt").read_bytes()):
        path.write_bytes(content)
        for script in (hessian_eval, similarity):
            refused_amid_output(capsys, script, [run], "1-2.pt", "not the one that checkpoint.pt")
    path.unlink()
    for script in (hessian_eval, similarity, features):
        refused_amid_output(capsys, script, [run], "1-2.pt", "no such model")
    refused_amid_output(capsys, features, [original_run, "--classes", "62"], "--classes", "62")
    refused_amid_output(capsys, features, [original_run, "--clients", "7"], "client 7", "0, 1, 2")


def test_a_run_without_client_models(tmp_path, capsys):
    fedavg.main([*TINY, "--local-steps", "1", "--rounds", "1", "--out", str(tmp_path / "a")])
    refused_amid_output(capsys, similarity, [tmp_path / "a"], "missing", "--save-clients")


def test_bad_config(run, original_run, capsys):
    config, path = config_of(run), run / "config.json"
    path.write_text(json.dumps(config | {"script": "fedprox"}))
    refused_amid_output(capsys, hessian_eval, [original_run, run], "config.json is damaged")
    write_config(run, flags=config["flags"] | {"dataset": "cifar10"})
    refused_amid_output(capsys, hessian_eval, [original_run, run], "cifar10", "glyphs")
    write_config(run, script="../evil")
    refused_amid_output(capsys, similarity, [run], "evil", "no such script")


# --- files that are not those of the last round


def test_copies_are_not_read(run):
    """model.pt and best.pt are for people; what an analysis sees is the checkpoint's."""
    expected = runs.open_run(run)
    for name in ("model.pt", "best.pt"):
        (run / name).unlink()
    opened = runs.open_run(run)
    assert same(opened.net.state_dict(), expected.net.state_dict())
    assert same(opened.best_net().state_dict(), expected.best_net().state_dict())


@pytest.mark.parametrize("rows", [b"", b'{"round": 1'])
def test_a_run_that_is_under_way_is_not_analysed(run, capsys, rows):
    """Nor is one that was cut in its first round, or amid a row."""
    (run / "metrics.jsonl").write_bytes(rows)
    refused_amid_output(capsys, similarity, [run], str(run), "has not finished", "--resume")


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_run_that_is_to_go_on_is_not_analysed(run, capsys, rounds):
    """It was resumed with more rounds, and killed before or behind the row of the last."""
    checkpoint = (run / "checkpoint.pt").read_bytes()
    fedavg.main(["--out", str(run), "--resume", "--rounds", "3"])
    (run / "checkpoint.pt").write_bytes(checkpoint)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:rounds]))
    refused_amid_output(capsys, similarity, [run], str(run), "has not finished", "--resume")


def test_files_of_another_run(run, tmp_path, capsys):
    """Of the same network and round, from another seed."""
    argv = [*TINY, "--clients", "3", "--save-clients", "--no-nesterov", "--seed", "1"]
    fedavg.main([*argv, "--out", str(tmp_path / "other")])
    for name, message in (
        ("clients/1-2.pt", "not the one that checkpoint.pt names"),
        ("checkpoint.pt", "not a checkpoint of this run"),
        ("metrics.jsonl", "metrics.jsonl is damaged"),
    ):
        whole = (run / name).read_bytes()
        (run / name).write_bytes((tmp_path / "other" / name).read_bytes())
        refused_amid_output(capsys, similarity, [run], str(run), message)
        (run / name).write_bytes(whole)
