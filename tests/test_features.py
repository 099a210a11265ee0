"""analysis/features.py: the features of a run's samples, and principal components."""

import numpy as np
import pytest
import torch

from analysis import features, pictures, runs


def test_features_of_a_run(run, capsys):
    flags = "--clients 0,2 --classes 3,5,7 --samples 20 --no-tsne"
    features.main([str(run), *flags.split()])
    out = capsys.readouterr().out
    for path in run.glob("features*"):
        assert f"wrote {path}\n" in out
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
