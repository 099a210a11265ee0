"""Small federations, each in a folder of its own that holds "data" and "run"."""

import contextlib
import pathlib
import shutil
import tempfile

import common
import extras.glyphs
from chaotic.children import run
from chaotic.cut import Cut
from conftest import make_folder

common.NETS["cnn"] = lambda channels, size: common._plain(channels, size, (4,), 3, 0, (8,))
extras.glyphs.GLYPHS = (120, 40)
FEDERATION = [
    *"--dataset folder --data-dir data --model cnn --augment none --partition iid".split(),
    *"--clients 3 --local-steps 2 --batch-size 6 --quiet --device cpu".split(),
]
METHODS = [  # each sort of state: of clients, of the server, of optimizers
    "fedavg --checkpoint-every 2 --client-test --save-clients",
    "scaffold --eval-every 2 --persist-opt --sample 0.7 --save-clients",
    "moon --checkpoint-every 2 --eval-every 2 --client-test --sample 0.7",
    "rfedavg --client-test --persist-opt --optimizer rmsprop --workers 2 --save-clients",
    "fedgkd --checkpoint-every 3 --eval-every 2 --server adam",
]


def train(folder, method, *argv, how="list", at=0):
    """Run, or resume, a method in folder, cut so at an operation; return its Outcome."""
    script, *words = method.split()
    argv = [*FEDERATION, *words, "--out", "run", *argv]
    if (folder / "run" / "config.json").exists():
        argv.append("--resume")
    return run(script, *argv, before=Cut(how, at, folder).install)


def files_of(folder):
    """Return the files of a folder, {path: bytes}; temporary ones do not count."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".tmp"]
    return {path: path.read_bytes() for path in paths if path.is_file()}


class World:
    """Uncut runs of the METHODS, of two rounds and of four, and the data they were made from.

    A run of method i and so many rounds lies in root/ROUNDS-i, its data without it in root/new."""

    def __init__(self, root, seed):
        self.root, self.seed = root, seed
        make_folder(root / "new" / "data", (8, 8), counts=(18, 6))
        self.operations = []  # of each method's run of four rounds: their names, in order
        for i, method in enumerate(METHODS):
            for rounds in (2, 4):
                folder = shutil.copytree(root / "new", root / f"{rounds}-{i}")
                outcome = train(folder, method, "--rounds", rounds)
                if outcome.fault(0):
                    raise SystemExit(f"{method}: {outcome.fault(0)}")
            self.operations.append(outcome.out.split())

    @contextlib.contextmanager
    def copy(self, name):
        """Yield a copy of a folder, with its files' times, to be changed and removed."""
        with tempfile.TemporaryDirectory(dir=self.root) as place:
            yield pathlib.Path(shutil.copytree(self.root / name, pathlib.Path(place, "copy")))
