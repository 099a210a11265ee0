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
from analysis import features, pictures, runs, similarity


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

    def batches(*words):
        args = hessian_eval.parse_flags([str(run), *words])
        return hessian_eval.Batches(opened, index, args, tqdm(disable=True))

    ((x, y),) = batches()
    torch.testing.assert_close(x, opened.data.normalise(stored[np.sort(index)]))
    assert torch.equal(y, labels[np.sort(index)])
    opened.args.dataset = "imagenet-200"  # augmented by seeds where files are decoded
    assert len(list(batches("--batch-size", "1", "--authors"))) == 10
    assert [len(seeds) for seeds in seeds_of_calls[-1]] == 10 * [1]
    assert seeds_of_calls[1] is None


# --- keeping results


def test_failed_pictures_lose_nothing(run, capsys):
    def broken(plt, content):
        raise ValueError(content)

    runs.keep(runs.open_run(run), "a", {"x": 1}, {"y": np.ones(2)}, {"z": (broken, "no ink")})
    assert json.loads((run / "a.json").read_text()) == {"x": 1, "round": 2}
    assert (run / "a.npz").exists()
    assert "no picture a-z.pdf: " in capsys.readouterr().out


class Killed(BaseException):
    """What stands for a kill: nothing catches it."""


@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_analysis_killed_while_it_writes_is_repeated(run, monkeypatch, done):
    """Killed before the array, the picture or the result is there."""
    pytest.importorskip("matplotlib")
    changes, replace = [], os.replace

    def killed(*paths):
        if len(changes) == done:
            raise Killed
        changes.append(paths)
        replace(*paths)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killed)
        drawn = {"layers": (lambda plt: plt.figure(),)}
        runs.keep(runs.open_run(run), "a", {"x": 1}, {"y": np.ones(2)}, drawn)
    assert runs.read_result(run, "a") is None
    similarity.main([str(run), "--name", "a"])
    assert "x" not in runs.read_result(run, "a") and (run / "a-layers.pdf").stat().st_size > 1000


def test_a_result_is_kept_while_it_is_of_the_last_round(run, capsys):
    runs.keep(runs.open_run(run), "a", {"x": 1})
    refused_amid_output(capsys, similarity, [run, "--name", "a"], "a.json", "exists already")
    assert runs.read_result(run, "a") == {"x": 1, "round": 2}
    fedavg.main(["--out", str(run), "--resume", "--rounds", "3"])
    assert runs.read_result(run, "a") is None
    similarity.main([str(run), "--name", "a"])
    result = runs.read_result(run, "a")
    assert result["round"] == 3 and "x" not in result
    for text in ("{}", "[]", "{"):
        (run / "a.json").write_text(text)
        assert runs.read_result(run, "a") is None


def test_pictures_show_what_is_not_finite():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for losses in ([[1, np.nan], [np.inf, 2]], [[np.nan, np.nan], [np.nan, np.nan]]):
        figure = pictures.loss_surface(pyplot, np.array([-1.0, 1]), np.array(losses), "title")
        pyplot.close(figure)


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


def test_bad_config(run, capsys):
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
