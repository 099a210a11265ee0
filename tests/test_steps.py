"""Several workers train what one trains."""

import pytest
from conftest import same
from methods import METHODS, SHORT, final, final_once

import common


@pytest.mark.parametrize("name", METHODS)
def test_workers_give_the_same_model(tmp_path, monkeypatch, name):
    """Several clients at once or one after the other: the same arithmetic in the same order."""
    monkeypatch.setattr(
        common, "CORES", 1
    )  # one thread each, as sums inside operators depend on it
    monkeypatch.setattr(common, "evaluate", lambda *_: (0.0, 0.0))  # which takes the most time
    argv = SHORT if name == "stochdepth" else ["--local-steps", "4"]
    one = final_once(name, tmp_path / "one", *argv, "--workers", "1")
    three, _ = final(name, tmp_path / "three", *argv, "--workers", "3")
    assert same(one, three)
