"""analysis/runs.py: opening finished runs and keeping results; what is said of bad run folders."""

import importlib
import json
import os
import runpy

import numpy as np
import pytest
import torch
from conftest import TINY, refused_amid_output
from runs import without_checksums
from tqdm import tqdm

import common
import run_folder
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
    config = json.loads((run / "config.json").read_text())
    config["argv"] += ["--precision", "bf16"]
    (run / "config.json").write_text(json.dumps(run_folder.sealed(config)))
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
    """Those of older versions; nor is anything known of a file that is no result."""
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


def other_weights():
    """Return weights of a network of ten classes, which no run here has."""
    return common.build_net("cnn", 10).state_dict()


def test_folder_without_a_run(tmp_path, capsys):
    refused_amid_output(capsys, hessian_eval, [tmp_path / "none"], "none", "no run")


def test_bad_client_models(run, original_run, capsys):
    path = run / "clients" / "1.pt"
    path.write_bytes(b"no tensors")
    for script in (hessian_eval, similarity):
        refused_amid_output(capsys, script, [run], "1.pt", "not a readable")
    path.unlink()
    for script in (hessian_eval, similarity, features):
        refused_amid_output(capsys, script, [run], "1.pt", "--save-clients")
    run_folder.save(other_weights(), path)
    refused_amid_output(capsys, hessian_eval, [run], "1.pt", "62 classes")
    refused_amid_output(capsys, features, [original_run, "--classes", "62"], "--classes", "62")
    refused_amid_output(capsys, features, [original_run, "--clients", "7"], "client 7", "0, 1, 2")


def test_bad_global_model(run, capsys):
    run_folder.save(other_weights(), run / "model.pt")
    refused_amid_output(capsys, hessian_eval, [run], "model.pt", "62 classes")
    (run / "model.pt").unlink()
    refused_amid_output(capsys, hessian_eval, [run], str(run), "not finished", "--resume")


def test_bad_config(run, original_run, capsys):
    path = run / "config.json"
    config = json.loads(path.read_text())
    config["flags"]["dataset"] = "cifar10"
    path.write_text(json.dumps(config))
    refused_amid_output(capsys, hessian_eval, [original_run, run], "config.json is damaged")
    path.write_text(json.dumps(run_folder.sealed(config)))
    refused_amid_output(capsys, hessian_eval, [original_run, run], "cifar10", "glyphs")
    path.write_text(json.dumps(run_folder.sealed({**config, "script": "../evil"})))
    refused_amid_output(capsys, similarity, [run], "config.json", "no such script")
    path.write_text("{")
    refused_amid_output(capsys, hessian_eval, [run], "config.json", "damaged")
    for wrong in ({"model": 1.5}, {"dataset": None}):
        flags = config["flags"] | wrong
        path.write_text(json.dumps(run_folder.sealed({**config, "flags": flags})))
        refused_amid_output(capsys, similarity, [run], "config.json is damaged")
    path.write_text(json.dumps(run_folder.sealed({**config, "stopped": "x"})))
    refused_amid_output(capsys, similarity, [run], "config.json is damaged")


# --- files of another round or run


def moved(run, name, other):
    """Put the file of another place under a name of the run, and return its path."""
    (run / name).write_bytes(other.read_bytes())
    return str(run / name)


def test_files_of_another_round(run, tmp_path, capsys):
    """Of the model, the best one and a client's each is refused that is not of the round named."""
    longer = tmp_path / "longer"
    argv = [*TINY, "--clients", "3", "--save-clients", "--no-nesterov", "--out", str(longer)]
    fedavg.main([*argv, "--rounds", "1"])
    first = {path: path.read_bytes() for path in longer.glob("**/*.pt")}
    fedavg.main(["--out", str(longer), "--resume", "--rounds", "2"])
    for name in ("model.pt", "clients/1.pt"):
        latest = (longer / name).read_bytes()
        (longer / name).write_bytes(first[longer / name])
        message = "its round is 1, and should be 2"
        refused_amid_output(capsys, similarity, [longer], str(longer / name), message)
        (longer / name).write_bytes(latest)
    opened = runs.open_run(longer)
    opened.best_net()
    best = run_folder.best_row(opened.rows)["round"]
    other = first[longer / "model.pt"] if best == 2 else (longer / "model.pt").read_bytes()
    (longer / "best.pt").write_bytes(other)
    argv = [longer, "--authors", "--samples", "2"]
    message = f"its round is {3 - best}, and should be {best}"
    refused_amid_output(capsys, hessian_eval, argv, "best.pt", message)
    moved(longer, "clients/1.pt", longer / "clients" / "2.pt")
    refused_amid_output(capsys, similarity, [longer], "its client is 2, and should be 1")


@pytest.mark.parametrize("rows", [b"", b'{"round": 1'])
def test_a_run_that_is_under_way_is_not_called_damaged(run, capsys, rows):
    """Nor is one that was cut in its first round, or amid a row."""
    (run / "model.pt").unlink()
    (run / "metrics.jsonl").write_bytes(rows)
    refused_amid_output(capsys, similarity, [run], str(run), "has not finished", "--resume")


def test_a_run_that_is_to_go_on_is_not_analysed(run, capsys):
    """It was resumed with more rounds, and stopped before the first of them."""
    config = json.loads((run / "config.json").read_text())
    config["flags"]["rounds"] += 1
    (run / "config.json").write_text(json.dumps(run_folder.sealed(config)))
    refused_amid_output(capsys, similarity, [run], str(run), "has not finished", "--resume")


def test_files_of_another_run(run, tmp_path, capsys):
    """Of the same network and round, from another seed; and weights that no run has written."""
    other = tmp_path / "other"
    argv = [*TINY, "--clients", "3", "--save-clients", "--no-nesterov", "--seed", "1"]
    fedavg.main([*argv, "--out", str(other)])
    path = moved(run, "clients/1.pt", other / "clients" / "1.pt")
    refused_amid_output(capsys, similarity, [run], path, "its run is")
    run_folder.save(dict(run_folder.load(run / "model.pt")), run / "model.pt")
    refused_amid_output(capsys, similarity, [run], "model.pt: not of this run")


def test_files_of_before_there_were_stamps(run):
    """A run whose config.json names no run has files that name none."""
    without_checksums(run)
    run_folder.save(dict(run_folder.load(run / "model.pt")), run / "model.pt")
    assert runs.open_run(run).run is None
