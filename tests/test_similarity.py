"""analysis/similarity.py: the estimator and the layers against their definitions, and a run."""

import itertools
import json

import numpy as np
import pytest
import torch

import common
from analysis import runs, similarity


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
        return sum(w * float(similarity.hsic(*map(similarity.gram, pq))) for *pq, w in batches)

    a, b = (net[0](x).detach() for net in nets)  # the first layer
    expected = mean_hsic(a, b) / (mean_hsic(a, a) * mean_hsic(b, b)) ** 0.5
    assert values[1][0] == pytest.approx(expected, rel=1e-9)


def test_layer_names():
    names = similarity.layer_names(common.build_net("resnet56", 10))
    assert names[:3] == ["stem", "stage1.1", "stage1.2"]


def test_similarity_of_a_run(run, capsys):
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
