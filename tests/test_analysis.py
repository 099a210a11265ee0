"""analysis/runs.py: opening finished runs and keeping results; what is said of bad run folders."""

import importlib
import json
import os
import pathlib
import runpy
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import TINY, refused_amid_output, same
from runs import config_of, write_config
from tqdm import tqdm

import common
import run_folder
import extras.glyphs
import fedavg
import hessian_eval
import moon
import stochdepth
from analysis import features, pictures, runs, similarity


@pytest.mark.parametrize("name", ["cost", "similarity", "features", "partition"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_runs_as_a_module(name, monkeypatch, capsys):
    """`python -m analysis.NAME --help` opens with the module's docstring; a mistake is a line."""
    for flag, code in (("--help", 0), ("--nonsense", 2)):
        monkeypatch.setattr("sys.argv", [name, flag])
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(f"analysis.{name}", run_name="__main__", alter_sys=True)
        out, err = capsys.readouterr()
        assert (stop.value.code or 0) == code and len(err.splitlines()) == code / 2
        summary = importlib.import_module(f"analysis.{name}").__doc__.splitlines()[0]
        assert code or summary in out


# --- opening runs


RESNET = "--model resnet56 --local-steps 1 --batch-size 4"


@pytest.mark.parametrize("script, flags", [(stochdepth, RESNET), (moon, "--projection 16")])
def test_open_run_restores_the_network(tmp_path, monkeypatch, script, flags):
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (200, 20))
    out = tmp_path / "a"
    net, rows = script.main([*TINY, "--rounds", "1", *flags.split(), "--out", str(out)])
    opened = runs.open_run(out)
    assert [type(m) for m in opened.net.modules()] == [type(m) for m in net.modules()]
    evaluation = common.evaluate(opened.net, opened.data, opened.args)
    assert evaluation == (rows[-1]["test_acc"], rows[-1]["test_loss"])


def test_images_on_disk(run):
    """Data with paths has no x; the batches and features are of what images() decodes."""
    opened, seeds_of_calls = runs.open_run(run), []
    index, net, stored = opened.parts[0][:20], opened.client_net(0), opened.data.x
    expected = features.features(net, opened.data, index)

    def images(batches, seeds=None):
        seeds_of_calls.append(seeds)
        return (stored[torch.as_tensor(rows)] for rows in batches)

    def batches(*words):
        args = hessian_eval.parse_flags([str(run), *words])
        return hessian_eval.Batches(opened, index, args, tqdm(disable=True))

    opened.data.x, opened.data.images = stored[:0], images
    torch.testing.assert_close(features.features(net, opened.data, index), expected)
    ((x, y),) = batches()
    torch.testing.assert_close(x, opened.data.normalise(stored[np.sort(index)]))
    assert torch.equal(y, opened.data.y[np.sort(index)])
    opened.args.dataset = "imagenet-200"  # augmented by seeds where files are decoded
    assert len(list(batches("--batch-size", "1", "--authors"))) == 10
    assert [len(seeds) for seeds in seeds_of_calls[-1]] == 10 * [1]
    assert seeds_of_calls[1] is None


def test_the_checkpoint_is_opened_in_full_precision(run):
    """model.pt and best.pt are for people; what an analysis sees is the checkpoint's."""
    expected = runs.open_run(run)
    for name in ("model.pt", "best.pt"):
        (run / name).unlink()
    write_config(run, flags=config_of(run)["flags"] | {"precision": "bf16"})
    opened = runs.open_run(run)
    assert opened.args.precision == "fp32"
    assert same(opened.net.state_dict(), expected.net.state_dict())
    assert same(opened.best_net().state_dict(), expected.best_net().state_dict())


# --- keeping results


def test_failed_pictures_lose_nothing(run, capsys):
    def broken(plt, content):
        raise ValueError(content)

    runs.keep(runs.open_run(run), "a", {"x": 1}, {"y": np.ones(2)}, {"z": (broken, "no ink")})
    assert json.loads((run / "a.json").read_text()) == {"x": 1, "round": 2}
    assert (run / "a.npz").exists()
    assert "no picture a-z.pdf: " in capsys.readouterr().out


@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_analysis_killed_while_it_writes_is_repeated(run, monkeypatch, done):
    """Killed before the array, the picture or the result is there."""
    pytest.importorskip("matplotlib")
    writes = iter([os.replace] * done)

    def replace(*paths):
        next(writes, lambda *_: sys.exit("killed"))(*paths)  # nothing catches SystemExit

    drawn = {"layers": (lambda plt: plt.figure(),)}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "replace", replace)
        runs.keep(runs.open_run(run), "a", {"x": 1}, {"y": np.ones(2)}, drawn)
    assert [path.suffix for path in sorted(run.glob("a*[a-z]"))] == [".pdf", ".npz"][2 - done :]
    assert runs.read_result(run, "a") is None
    similarity.main([str(run), "--name", "a"])
    assert "x" not in runs.read_result(run, "a") and (run / "a-layers.pdf").stat().st_size > 1000


def test_a_result_is_kept_while_it_is_of_the_last_round(run):
    runs.keep(runs.open_run(run), "a", {"x": 1})
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


# --- refusals: an analysis, its flags, what happens to the run before, and words of the line


def without_rows(run):
    (run / "metrics.jsonl").write_text("")


def killed_amid_a_checkpoint(run):
    """It was resumed with more rounds, and has the row of the last but not its checkpoint."""
    checkpoint = (run / "checkpoint.pt").read_bytes()
    fedavg.main(["--out", str(run), "--resume", "--rounds", "3"])
    (run / "checkpoint.pt").write_bytes(checkpoint)


def exchanged(run):
    shutil.copy(run / "clients/2-2.pt", run / "clients/1-2.pt")


def not_finite(run):
    state = run_folder.load(run / "checkpoint.pt")
    next(iter(state["net"].values())).fill_(np.nan)
    run_folder.save(state, run / "checkpoint.pt")


WHOLE = pathlib.Path.exists  # no damage
ANALYSED = lambda run: (run / "seen.json").write_text('{"round": 2}')  # noqa: E731
CLIENT, UNFINISHED = "{0}/clients/1-2.pt", ["{0}", "has not finished", "--resume"]
REFUSALS = [
    ("hessian_eval", "", shutil.rmtree, ["{0}", "no run"]),
    ("similarity", "", lambda run: write_config(run, script="../evil"), ["evil", "no such script"]),
    ("similarity", "", without_rows, UNFINISHED),
    ("similarity", "", killed_amid_a_checkpoint, UNFINISHED),
    ("hessian_eval", "--diagonal none", not_finite, ["{0}", "NaN or infinity"]),
    ("hessian_eval", "", exchanged, [CLIENT, "not the one that checkpoint.pt"]),
    ("features", "", lambda run: (run / "clients/1-2.pt").unlink(), [CLIENT, "no such model"]),
    ("features", "--classes 62", WHOLE, ["--classes", "62"]),
    ("features", "--classes 1,1", WHOLE, ["--classes", "twice"]),
    ("features", "--clients 0,0", WHOLE, ["--clients", "twice"]),
    ("features", "--clients 7", WHOLE, ["client 7", "0, 1, 2"]),
    ("features", "--of own --classes 0 --samples 2", WHOLE, ["--classes", "--of all"]),
    ("similarity", "--name seen", ANALYSED, ["{0}/seen.json", "exists already", "--name"]),
    ("hessian_eval", "--name seen", ANALYSED, ["{0}/seen.json", "exists already"]),
    ("hessian_eval", "--name a/b", WHOLE, ["--name"]),
    ("hessian_eval", "--landscape 1", WHOLE, ["--landscape"]),
]


@pytest.mark.parametrize("script, flags, damage, words", REFUSALS)
def test_refuses(run, capsys, script, flags, damage, words):
    damage(run)
    module = importlib.import_module(script if script == "hessian_eval" else f"analysis.{script}")
    words = [word.format(run) for word in words]
    refused_amid_output(capsys, module, [run, *flags.split()], *words)


def test_a_run_without_client_models(tmp_path, capsys):
    fedavg.main([*TINY, "--local-steps", "1", "--rounds", "1", "--out", str(tmp_path / "a")])
    refused_amid_output(capsys, similarity, [tmp_path / "a"], "missing", "--save-clients")
