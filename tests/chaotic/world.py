"""Small federations, each in a folder of its own that holds "data" and "run"."""

import contextlib
import json
import pathlib
import re
import shutil
import tempfile

import numpy as np
import torch
from PIL import Image

import common
import run_folder
import extras.glyphs
from chaotic.children import run
from chaotic.cut import Cut
from runs import rows_of

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
RUN_MARK = re.compile(rb',\s*"rows_checksum": \d+')  # of an analysis: rows hold seconds
SIGHTS = {  # commands that read a run
    "compare": ["reproduce.compare", "run"],
    "similarity": "analysis.similarity run --device cpu --name seen".split(),
    "features": "analysis.features run --clients 0 --classes 0,1 --device cpu --name seen".split(),
}


def make_data(root, seed=0):
    """Write an image folder of 36 training and 12 test images of 8x8 pixels, of two classes."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 18), ("test", 6)):
        for name in ("ape", "bee"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(256, size=(8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


def train(folder, method, *argv, how="list", at=0, meanwhile=None):
    """Run, or resume, a method in folder, cut so at an operation; return its Outcome."""
    script, *words = method.split()
    argv = [*FEDERATION, *words, "--out", "run", *argv]
    if (folder / "run" / "config.json").exists():
        argv.append("--resume")
    return run(script, *argv, before=Cut(how, at, folder).install, meanwhile=meanwhile)


def files_of(folder):
    """Return the files of a folder, {path: bytes}; temporary ones do not count."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".tmp"]
    return {path: path.read_bytes() for path in paths if path.is_file()}


class World:
    """Uncut runs of the METHODS, of two rounds and of four, and the data they were made from.

    A run of method i and so many rounds lies in root/ROUNDS-i, its data without it in root/new."""

    def __init__(self, root, seed):
        self.root, self.seed = root, seed
        make_data(root / "new" / "data")
        self.operations = []  # of each method's run of four rounds: their names, in order
        self.memory = {}  # of seen()
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

    def see(self, folder, name, how="none", at=0, keep=False):
        """Return the Outcome of one of the SIGHTS of the run in folder, and what it shows.

        {name of a file that it wrote: its bytes}, and what it printed. keep: those files, which
        are removed otherwise."""
        outcome = run(*SIGHTS[name], before=Cut(how, at, folder).install)
        lines = [line for line in outcome.err.splitlines() if ": left out, since" not in line]
        outcome = outcome._replace(err="\n".join(lines))  # compare says so of each run
        paths = sorted(p for p in (folder / "run").glob("seen*") if p.suffix != ".tmp")
        shown = {path.name: RUN_MARK.sub(b"", path.read_bytes()) for path in paths}
        for path in [] if keep else paths:
            path.unlink()
        return outcome, {**shown, "": outcome.out}

    def seen(self, i, rounds, name):
        """Return what one of the SIGHTS shows of the uncut run of a method."""
        if (i, rounds, name) not in self.memory:
            with self.copy(f"{rounds}-{i}") as folder:
                outcome, self.memory[i, rounds, name] = self.see(folder, name)
            if outcome.fault(0, 2):
                raise SystemExit(f"{METHODS[i]}: {name}: {outcome}")
        return self.memory[i, rounds, name]


# --- two runs


def content(path):
    """Return what two files have in common that hold the same results."""
    if path.suffix == ".pt":
        with contextlib.suppress(common.UserError):
            tree = run_folder.load(path)
            return {k: v for k, v in tree.items() if k != "rows_crc32"}  # rows hold seconds
    if path.name == "config.json":
        config = json.loads(path.read_text())
        return config["script"], {k: config["flags"][k] for k in ("rounds", "seed", "lr")}
    if not path.is_file():
        return "no file"
    return rows_of(path.parent) if path.name == "metrics.jsonl" else path.read_bytes()


def equal(a, b):
    """Return whether two nests of tensors and plain values are the same bit for bit."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def difference(whole, other):
    """Return in what the run folder other differs from whole, "" if in nothing."""
    a, b = (sorted(str(p.relative_to(out)) for p in out.rglob("*")) for out in (whole, other))
    if a != b:
        return f"files {' '.join(sorted({*a} ^ {*b}))} are in one of two runs only"
    for name in a:
        if (whole / name).is_file() and not equal(content(whole / name), content(other / name)):
            return f"{name} differs from the uncut run's"
    return ""
