"""Several workers train what one trains."""

import pytest
from conftest import same
from methods import METHODS, SHORT, final, final_once

import common


@pytest.mark.parametrize("name", METHODS)
def test_workers_give_the_same_model(tmp_path, monkeypatch, name):
    """Several clients at once or one after the other: the same arithmetic in the same order."""
    monkeypatch.setattr(common, "CORES", 1)  # a thread each: sums inside operators depend on it
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))  # which takes the most time
    one = final_once(name, tmp_path / "one", *SHORT)
    assert same(one, final(name, tmp_path / "two", *SHORT, "--workers", "2")[0])
