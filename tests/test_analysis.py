"""analysis/: finished runs and results, features, similarity; what is said of bad run folders."""

import importlib
import itertools
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
def test_open_run_restores_the_network(tmp_path, monkeypatch, capsys, script, flags):
    """It is without the clients' models, which an analysis asks for."""
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (200, 20))
    out = tmp_path / "a"
    net, rows = script.main([*TINY, "--rounds", "1", *flags.split(), "--out", str(out)])
    opened = runs.open_run(out)
    evaluation = common.evaluate(opened.net, opened.data, opened.args)
    assert evaluation == (rows[-1]["test_acc"], rows[-1]["test_loss"])
    refused_amid_output(capsys, similarity, [out], "missing", "--save-clients")


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
    assert same(opened.best, expected.best)


# --- keeping results


def test_failed_pictures_lose_nothing(run, capsys):
    def broken(plt, content):
        raise ValueError(content)

    runs.keep(runs.open_run(run), "a", {"x": 1}, {"y": np.ones(2)}, {"z": (broken, "no ink")})
    expected = {"script": "fedavg", "x": 1, "round": 2}
    assert json.loads((run / "a.json").read_text()) == expected and (run / "a.npz").exists()
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
    kept = runs.keep(runs.open_run(run), "a", {"x": 1})
    assert runs.read_result(run, "a") == kept == {"script": "fedavg", "x": 1, "round": 2}
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


# --- features


def test_features_of_a_run(run, capsys):
    flags = "--clients 0,2 --classes 3,5,7 --samples 20 --no-tsne"
    features.main([str(run), *flags.split()])
    out = capsys.readouterr().out
    assert all(f"wrote {path}\n" in out for path in run.glob("features*"))
    opened, arrays = runs.open_run(run), np.load(run / "features.npz", allow_pickle=False)
    index, labels = arrays["index_2"], arrays["label_2"]
    assert set(labels) <= {3, 5, 7} and (opened.data.y[index].numpy() == labels).all()
    z = opened.client_net(2)[:-1](opened.data.normalise(opened.data.x[index])).detach()
    np.testing.assert_allclose(arrays["client_2"], z.numpy(), atol=1e-5)


def test_pictures_name_the_classes(run):
    """as their folders, or the drawn characters, are called."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names = runs.open_run(run).data.names
    assert names[:11] == [*"0123456789A"]
    labels, xy = [np.array([10, 3, 10])], [np.eye(3)[:, :2]]
    figure = pictures.scatter(pyplot, [0], labels, xy, ["x", "y"], names, "title")
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == ["3", "A"]
    pyplot.close(figure)


def test_principal_components():
    torch.manual_seed(0)
    z = torch.randn(30, 5) * torch.tensor([5.0, 3.0, 0.1, 0.1, 0.1])
    xy, shares = features.principal_components(z)
    covariance = np.cov(z.double().numpy().T)
    variances = np.linalg.eigvalsh(covariance)[::-1]
    assert np.allclose(xy.var(0, ddof=1), variances[:2])
    assert shares.sum() > 0.95


# --- similarity


def test_unbiased_hsic_by_its_definition():
    """The mean over all ordered quadruples of distinct samples of
    a_ij b_ij + a_ij b_qr - 2 a_ij b_iq."""
    torch.manual_seed(0)
    a, b = (m @ m.T for m in torch.randn(2, 6, 3, dtype=torch.float64))
    terms = [
        a[i, j] * b[i, j] + a[i, j] * b[q, r] - 2 * a[i, j] * b[i, q]
        for i, j, q, r in itertools.permutations(range(6), 4)
    ]
    expected = float(sum(terms)) / len(terms)
    assert float(similarity.hsic(a, b)) == pytest.approx(expected, rel=1e-10)


def test_layer_similarities():
    """CKA is a ratio of means over batches, weighted by their samples; three have no estimate."""
    torch.manual_seed(0)
    nets = [common.build_net("cnn", 10).eval() for _ in range(2)]
    x, sizes = torch.randn(64, 3, 32, 32), (40, 21, 3)
    values = similarity.layer_similarities(nets[0], nets, x.split(sizes))
    assert values.shape == (2, len(similarity.layer_names(nets[0])))
    assert np.allclose(values[0], 1, atol=1e-6) and (values[1] < 0.99).all()

    def mean_hsic(p, q):
        batches = zip(p.split(sizes), q.split(sizes), (40, 21))
        return sum(w * float(similarity.hsic(a @ a.T, b @ b.T)) for a, b, w in batches)

    a, b = (net[0](x).detach().flatten(1).double() for net in nets)  # the first layer
    expected = mean_hsic(a, b) / (mean_hsic(a, a) * mean_hsic(b, b)) ** 0.5
    assert values[1][0] == pytest.approx(expected, rel=1e-9)


def test_a_layer_that_does_not_vary_is_like_no_other():
    torch.manual_seed(0)
    nets = [common.build_net("cnn", 10).eval() for _ in range(2)]
    nets[0].fc1[2].weight.data.zero_()
    values = similarity.layer_similarities(nets[0], nets, [torch.randn(20, 3, 32, 32)])
    dead = similarity.layer_names(nets[0]).index("fc1")
    assert (values[0, :dead] > 0.99).all() and not values[:, dead:].any()


def test_layer_names():
    names = similarity.layer_names(common.build_net("resnet56", 10))
    assert names[:3] == ["stem", "stage1.1", "stage1.2"]


def test_similarity_of_a_run(run, capsys, monkeypatch):
    similarity.main([str(run), "--device", "cpu", "--name", "layers"])
    result = json.loads((run / "layers.json").read_text())
    opened = runs.open_run(run)
    x = opened.data.normalise(opened.data.x_test)
    expected = similarity.layer_similarities(opened.net, [opened.client_net(2)], [x])
    assert np.allclose(result["linear_cka"][2], expected[0], rtol=1e-4)
    assert max(result["mean"]) < 1 - 1e-6
    assert np.shape(result["linear_cka"]) == (3, 7)
    assert result["test_samples"] == 200
    out = capsys.readouterr().out
    assert "conv1" in out
    for path in run.glob("layers*"):
        assert f"wrote {path}\n" in out
    monkeypatch.setattr(similarity, "LEAST_SAMPLES", 201)
    refused_amid_output(capsys, similarity, [run], "needs 201 test samples")


# --- refusals: an analysis, its flags, what happens to the run before, and words of the line


def killed_amid_a_checkpoint(run):
    """It was resumed with more rounds, and has the row of the last but not its checkpoint."""
    checkpoint = (run / "checkpoint.pt").read_bytes()
    fedavg.main(["--out", str(run), "--resume", "--rounds", "3"])
    (run / "checkpoint.pt").write_bytes(checkpoint)


def not_finite(run):
    state = run_folder.load(run / "checkpoint.pt")
    next(iter(state["net"].values())).fill_(np.nan)
    run_folder.save(state, run / "checkpoint.pt")


def diverged(run):
    shutil.rmtree(run)
    argv = "--lr 1e12 --local-steps 1 --rounds 1 --save-clients --out".split()
    fedavg.main([*TINY, *argv, str(run)])


WHOLE = pathlib.Path.exists  # no damage
EXCHANGED = lambda run: shutil.copy(run / "clients/2-2.pt", run / "clients/1-2.pt")  # noqa: E731
ANALYSED = lambda run: (run / "seen.json").write_text('{"round": 2}')  # noqa: E731
CLIENT, UNFINISHED = "{0}/clients/1-2.pt", ["{0}", "has not finished", "--resume"]
REFUSALS = [
    ("hessian_eval", "", shutil.rmtree, ["{0}", "no run"]),
    ("similarity", "", lambda run: write_config(run, script="../evil"), ["evil", "no such script"]),
    ("similarity", "", lambda run: (run / "metrics.jsonl").write_text(""), UNFINISHED),
    ("similarity", "", killed_amid_a_checkpoint, UNFINISHED),
    ("hessian_eval", "--diagonal none", not_finite, ["{0}", "NaN or infinity"]),
    ("hessian_eval", "", EXCHANGED, [CLIENT, "not the one that checkpoint.pt"]),
    ("features", "", lambda run: (run / "clients/1-2.pt").unlink(), [CLIENT, "no such model"]),
    ("features", "--classes 62", WHOLE, ["--classes", "62"]),
    ("features", "--clients 7", WHOLE, ["client 7", "0, 1, 2"]),
    ("features", "--of own --classes 0 --samples 2", WHOLE, ["--classes", "--of all"]),
    ("similarity", "--name seen", ANALYSED, ["{0}/seen.json", "exists already", "--name"]),
    ("hessian_eval", "--name a/b", WHOLE, ["--name"]),
    ("similarity", "--name config", WHOLE, ["--name", "not 'config'"]),
    ("similarity", "", diverged, ["{0}", "has diverged"]),
    ("hessian_eval", "--landscape 1", WHOLE, ["--landscape"]),
]


@pytest.mark.parametrize("script, flags, damage, words", REFUSALS)
def test_refuses(run, capsys, script, flags, damage, words):
    damage(run)
    module = importlib.import_module(script if script == "hessian_eval" else f"analysis.{script}")
    words = [word.format(run) for word in words]
    refused_amid_output(capsys, module, [run, *flags.split()], *words)
