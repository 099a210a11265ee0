"""extras/: loaded when asked for, and one line that names the missing file when not there."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import common

ROOT = pathlib.Path(common.__file__).parent


def run(folder, *argv):
    """Run python in folder, without this project's own on its path."""
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def copy(folder, *names):
    for name in names:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)


def one_line(result, *words):
    """Check that a program ended with one line on stderr that has all the words, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--dataset femnist", "extras/readers.py: needed by --dataset femnist"),
        ("--dataset tiny-imagenet", "extras/readers.py: needed by --dataset tiny-imagenet"),
        ("--dataset glyphs --model vgg9", "extras/backbones.py: needed by --model vgg9"),
        (
            "--dataset sent140 --model lstm --vectors random",
            "extras/text.py: needed by --dataset sent140",
        ),
    ],
)
def test_a_missing_file_is_one_line(tmp_path, argv, message):
    copy(tmp_path, "common.py", "fedavg.py", "extras/glyphs.py")
    result = run(tmp_path, "fedavg.py", "--quiet", "--device", "cpu", *argv.split())
    one_line(result, message, "copy it beside common.py")


def test_leaf_shards_of_tweets_need_the_readers(tmp_path):
    copy(tmp_path, "common.py", "fedavg.py", "extras/text.py")
    (tmp_path / "data" / "sent140" / "train").mkdir(parents=True)
    argv = "--dataset sent140 --model lstm --vectors random --quiet --device cpu".split()
    one_line(run(tmp_path, "fedavg.py", *argv), "extras/readers.py", "sent140")


def test_importing_common_loads_no_extras():
    code = "import sys, common; print([m for m in sys.modules if m.startswith('extras')])"
    assert run(ROOT, "-c", code).stdout == "[]\n"


def test_an_error_within_a_file_is_not_a_missing_file(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    import extras

    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        common.import_extra("broken", "--dataset femnist")
    with pytest.raises(common.UserError, match="extras/none.py: needed by --model none"):
        common.import_extra("none", "--model none")
