"""Open finished runs, call a method's script without training, and keep results beside a run.

This is what the analyses share. An analysis of a run reads the folder that a method's script wrote,
and writes NAME.json, NAME.npz and NAME-KEY.pdf into it, never over a file that exists, unless that
is of a round which is no longer the run's last.
"""

import argparse
import dataclasses
import importlib
import io
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch.nn as nn
from tqdm import tqdm

import common
import run_folder
from extras import partitions

ROOT = pathlib.Path(__file__).parent.parent  # the folder of the method scripts
FONTS = {"font.size": 10, "axes.titlesize": 10, "pdf.fonttype": 42}  # type that journals accept


# --- flags of an analysis


def file_name(text):
    """Return text if it can name the files of an analysis; an argparse type."""
    if not text or "/" in text or "\\" in text:
        raise argparse.ArgumentTypeError(
            f"takes a name without slashes, for files in the run folder, not {text!r}"
        )
    return text


def add_run_flags(parser, name):
    """Add --device, --data-dir and --name, whose default is name, to the parser of an analysis."""
    parser.add_argument(
        "--device", type=common.device_name, default="auto", help="auto, cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="where the data are, if they have moved since the run"
    )
    parser.add_argument(
        "--name", type=file_name, default=name, help="of the files written to the run folder"
    )


# --- calling a method's script


class MethodCall(NamedTuple):
    """What a script hands to common.run(): its parsed flags and its callbacks."""

    args: argparse.Namespace
    method: common.Method


def method_call(script, argv=()):
    """Return the MethodCall of `python SCRIPT.py argv`, without training.

    Raises UserError if script (a name without .py) is no method's, or does not take the flags.
    """
    if not script.isidentifier() or not (ROOT / f"{script}.py").is_file():
        raise common.UserError(f"{script}.py: no such script beside common.py")
    module = importlib.import_module(script)
    if not hasattr(module, "local_update"):
        raise common.UserError(f"{script}.py: not the script of a method")

    def record(args, local_update, aggregate=None, after_round=None, adapt=None, **_):
        aggregate = aggregate or common.average
        return MethodCall(args, common.Method(local_update, aggregate, after_round, adapt))

    try:
        return module.main(list(argv), run=record)
    except common.UserError as error:
        raise common.UserError(f"{script}.py: {error}") from None


# --- finished runs


@dataclasses.dataclass
class FinishedRun:
    """A finished run, opened for analysis.

    parts: the training indices of each client. net: the global network, in eval mode. rows: those
    of metrics.jsonl. best: the weights of the best round. models: the clients' of the last round.
    """

    path: pathlib.Path
    script: str
    args: argparse.Namespace
    data: common.Data
    parts: list
    net: nn.Module
    rows: list
    best: dict
    models: run_folder.States

    @property
    def clients(self):
        """The ids of the clients of the last round."""
        return self.rows[-1]["clients"]

    @property
    def title(self):
        """A line above pictures: script, data set, model."""
        return f"{self.script}, {self.args.dataset}, {self.args.model}"

    def client_net(self, client):
        """Return the network of a client (its id) at the end of the last round.

        Raises UserError if the run has not kept it.
        """
        if client not in self.clients:
            raise common.UserError(
                f"{self.path}: client {client} was not in the last round, which had "
                f"{', '.join(map(str, self.clients))}"
            )
        if client not in self.models.versions:
            raise common.UserError(
                f"{self.models.folder}: missing; the client models of the last round are kept by "
                "runs with --save-clients"
            )
        return self.load_net(self.models.get(client))

    def best_net(self):
        """Return the network of the best round, as best.pt holds it."""
        return self.load_net(self.best)

    def load_net(self, weights):
        """Return a copy of the network with weights, of the run. UserError for NaN or infinity."""
        net = common.copy_net(self.net)
        net.load_state_dict(weights)
        if not all(v.isfinite().all() for v in net.state_dict().values() if v.is_floating_point()):
            raise common.UserError(f"{self.path}: its weights hold NaN or infinity")
        return net


def open_run(path, device="auto", data_dir=None):
    """Return the FinishedRun in the folder path.

    Its data, partition and network are made anew from its recorded flags, in fp32. device and
    data_dir replace the run's own, the latter unless None. Raises UserError for a folder that is
    no finished run, or holds files that are not its own, and for data that are not the run's.
    """
    path = pathlib.Path(path)
    config = run_folder.read_config(path)
    flags, rows = config["flags"], read_rows(path, config)
    state, committed = run_folder.read_checkpoint(path, config)
    if len(committed) < len(rows):
        raise common.UserError(unfinished(path))
    if flags["dataset"].startswith("own-") or flags["model"].startswith("own-"):
        raise common.UserError(f"{path}: its data or network came from Python, not from flags")
    words = ["--resume", f"--out={path}", f"--device={device}", "--precision=fp32"]
    if data_dir:
        words.append(f"--data-dir={data_dir}")
    call = method_call(config["script"], words)
    torch_device = common.set_up_device(call.args)
    data = common.load_data(call.args)
    parts = common.partition(data, call.args)
    tests = partitions.client_test_indices(data, parts, call.args) if flags["client_test"] else []
    digests = run_folder.data_digests(data, parts + tests)
    run_folder.check_same(path, config, "data", digests)
    data = data.to(torch_device)
    call.args.init = None  # its weights are the checkpoint's
    net = common.prepare_net(data, call.args, call.method.adapt)
    models = run_folder.States(path / "clients", "model")
    models.restore(state["models"], rows[-1]["round"])
    run = FinishedRun(
        path, config["script"], call.args, data, parts, net, rows, state["best"], models
    )
    run.net = run.load_net(state["net"])
    return run


def read_rows(path, config):
    """Return the rows of the run in the folder path, of whose config.json config is the content.

    UserError if it has not finished, or if they are damaged.
    """
    rows = run_folder.read_rows(path, config)
    if len(rows) < config.get("stopped", config["flags"]["rounds"]):
        raise common.UserError(unfinished(path))
    return rows


def unfinished(path):
    """Return what is said of a run of which rounds are missing."""
    return (
        f"{path}: has not finished, or metrics.jsonl is damaged; --out {path} --resume goes on, or "
        "says what is damaged"
    )


def mark_of(rows):
    """Return what tells the last of rows, and with it all: its round and its checksum."""
    return {"round": rows[-1]["round"], "rows_checksum": rows[-1]["crc32"]}


# --- results


@dataclasses.dataclass
class Analysis:
    """What an analysis writes to a run folder.

    result: for NAME.json. arrays: {key: array} for NAME.npz. pictures: {key: function} for
    NAME-KEY.pdf; a function of matplotlib.pyplot returns the figure.
    """

    result: dict[str, Any]
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    pictures: dict[str, Callable] = dataclasses.field(default_factory=dict)


def is_stale(path, name, rows):
    """Whether NAME.json in the run folder path says that it is of other rows than these."""
    try:
        result = json.loads((path / f"{name}.json").read_text())
        return any(result.get(key, value) != value for key, value in mark_of(rows).items())
    except (OSError, ValueError, AttributeError, IndexError, RecursionError):
        return False


def files_of(path, name, picture_keys):
    """Return the paths of all that an analysis may write to the run folder path."""
    endings = [".json", ".npz", *(f"-{key}.pdf" for key in picture_keys)]
    return [path / f"{name}{ending}" for ending in endings]


def check_new(path, name, picture_keys=()):
    """Raise UserError if the run folder path has a file of an analysis of that name.

    picture_keys: the keys of all pictures that the analysis may draw. What an analysis leaves that
    was killed while it wrote, with NAME.unfinished beside it, may be written again; so may one
    that is of another round than the run's last.
    """
    path = pathlib.Path(path)
    unfinished = path / f"{name}.unfinished"
    if (path / f"{name}.json").exists():
        config = run_folder.read_config(path)
        if is_stale(path, name, read_rows(path, config)):
            return
        unfinished.unlink(missing_ok=True)  # killed behind the last write
    elif unfinished.exists():
        return
    for file in files_of(path, name, picture_keys):
        if file.exists():
            raise common.UserError(f"{file}: exists already; give this analysis another --name")


def keep_analysis(run, name, analysis, picture_keys=()):
    """Write an Analysis of a FinishedRun to its folder, and print the names of the files.

    What is there of that name, which check_new() has let pass, goes first. NAME.json comes last,
    and says that all is there, and of which round; until then there is NAME.unfinished. Pictures
    that fail lose nothing else; they are left out, with a line, where matplotlib is not installed.
    """
    path = run.path
    unfinished = path / f"{name}.unfinished"
    unfinished.touch()
    for file in files_of(path, name, picture_keys):
        file.unlink(missing_ok=True)
    for leftover in path.glob("*.tmp"):
        if re.fullmatch(re.escape(name) + r"(-\w+)?\.(json|npz|pdf)\.\d+\.tmp", leftover.name):
            leftover.unlink()
    if analysis.arrays:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **analysis.arrays)
        _write(path / f"{name}.npz", buffer.getvalue())
    failed = _draw(path, name, analysis.pictures)
    result = json.dumps({**analysis.result, **mark_of(run.rows)}, indent=1)
    _write(path / f"{name}.json", f"{result}\n".encode())
    unfinished.unlink()
    if failed:
        raise failed


def _draw(path, name, pictures):
    """Write the pictures of an analysis. Return what made one fail, or None."""
    pyplot = _pyplot() if pictures else None
    if pictures and not pyplot:
        tqdm.write(f"{path}: no pictures, which need matplotlib (pip install matplotlib)")
        return None
    try:
        for key, draw in pictures.items():
            _write(path / f"{name}-{key}.pdf", _as_pdf(pyplot, draw))
    except Exception as error:
        return error
    return None


def _write(path, content):
    run_folder.write_atomically(path, content)
    tqdm.write(f"wrote {path}")


def _pyplot():
    """Return matplotlib.pyplot, without a display, or None where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    return pyplot


def _as_pdf(pyplot, draw):
    """Return the bytes of a PDF of the figure that draw(pyplot) returns."""
    buffer = io.BytesIO()
    with pyplot.rc_context(FONTS):
        figure = draw(pyplot)
        figure.savefig(buffer, format="pdf", bbox_inches="tight")
        pyplot.close(figure)
    return buffer.getvalue()
