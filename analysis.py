"""What the analyses of finished runs share (hessian_eval.py, similarity.py, features.py; cost.py takes method_call): opening a
run folder, calling a method's script without training, and keeping results beside the run.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import pathlib
import types

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

import common

ROOT = pathlib.Path(__file__).parent  # of the method scripts


def machine(args):
    """The words with which an analysis under args opens a run."""
    return [f"--device={args.device}", *([f"--data-dir={args.data_dir}"] if args.data_dir else [])]


def name(text):
    """An argparse type: the name of an analysis, which is no path."""
    if not text or "/" in text or "\\" in text:
        raise argparse.ArgumentTypeError(
            f"takes a name without slashes, for files in the run folder, not {text!r}"
        )
    return text


def add_machine(parser):
    """The flags of every analysis of a run."""
    parser.add_argument(
        "--device", type=common._device, default="auto", help="auto, cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="where the data are, if they have moved since the run"
    )


def method_call(script, argv=()):
    """Return what `python SCRIPT.py argv` hands to run(), without running it.

    A namespace of args, local_update, aggregate, after_round and adapt. UserError if the script is no
    method's, or does not take the flags.
    """
    if not script.isidentifier() or not (ROOT / f"{script}.py").is_file():
        raise common.UserError(f"{script}.py: no such script beside common.py")
    module, message = importlib.import_module(script), io.StringIO()
    if not hasattr(module, "local_update"):
        raise common.UserError(f"{script}.py: not the script of a method")

    def note(args, local_update, aggregate=common.average, after_round=None, adapt=None):
        return types.SimpleNamespace(
            args=args,
            local_update=local_update,
            aggregate=aggregate,
            after_round=after_round,
            adapt=adapt,
        )

    try:
        with contextlib.redirect_stderr(message):
            return module.main(list(argv), run=note)
    except SystemExit:
        why = message.getvalue().partition("error: ")[2]
        raise common.UserError(f"{script}.py: {why}") from None


@dataclasses.dataclass
class Finished:
    """A finished run, opened for analysis. net: the global network with the weights of model.pt, in eval mode."""

    path: pathlib.Path
    script: str
    args: argparse.Namespace
    data: common.Data
    parts: list
    net: nn.Module
    rows: list  # of metrics.jsonl

    def client_net(self, k):
        """The network of client k at the end of the last round. UserError if the run has not kept it."""
        path = self.path / "clients" / f"{k}.pt"
        if not path.exists():
            raise common.UserError(
                f"{path}: missing; the client models of the last round are kept by runs with --save-clients"
                if k in self.clients
                else f"{path}: client {k} was not in the last round, which had "
                f"{', '.join(map(str, self.clients))}"
            )
        return self.net_of(path)

    @property
    def clients(self):
        """Ids of the clients of the last round."""
        return self.rows[-1]["clients"]

    def net_of(self, path):
        """A copy of the network with the weights of a file."""
        net = common._copied(self.net)
        try:
            net.load_state_dict(common.load(path, "model"))
        except (
            RuntimeError,
            TypeError,
            AttributeError,
        ) as e:  # another network's, or another data set's
            what = " ".join(str(e).split())
            raise common.UserError(
                f"{path}: not the weights of this run's network, {self.args.model} with "
                f"{self.data.classes} classes ({what[:200]}{'...' * (len(what) > 200)})"
            ) from None
        if not all(v.isfinite().all() for v in net.state_dict().values() if v.is_floating_point()):
            raise common.UserError(f"{path}: holds NaN or infinity")
        return net


def open_run(path, argv=()):
    """The finished run in the folder path: its data, partition and network are made anew from its flags. argv: flags that
    replace the run's, such as --device cpu; the precision is always fp32. UserError for a folder that is no finished run, or
    a file that is not its own."""
    path = pathlib.Path(path)
    config = common.read_config(path, "")
    if not (path / "model.pt").exists():
        raise common.UserError(
            f"{path / 'model.pt'}: missing; the run has not finished (--out {path} --resume continues it)"
        )
    try:
        words = [*config["argv"], "--device=auto", *argv, "--precision=fp32"]
        call = method_call(config["script"], words)
    except common.UserError as e:
        raise common.UserError(f"{path / 'config.json'}: {e}") from None
    try:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        right = all(type(k) is int for k in rows[-1]["clients"])
        if not right or not all(
            isinstance(rows[-1][k], (int, float)) for k in ("round", "test_acc", "best_acc")
        ):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise common.UserError(f"{path / 'metrics.jsonl'}: missing or damaged") from None
    device = common._set_up(call.args)
    data = common.load_data(call.args)
    parts = common.partition(data, call.args)
    net = common.net_for(data, call.args)
    if call.adapt:
        call.adapt(net, call.args)
    net, data = net.to(device, memory_format=torch.channels_last).eval(), data.to(device)
    finished = Finished(path, config["script"], call.args, data, parts, net, rows)
    finished.net = finished.net_of(path / "model.pt")
    return finished


def check_new(path, name, pictures=()):
    """UserError if the run folder path has a file of an analysis of that name. pictures: the keys of those it may draw."""
    for file in (f"{name}.json", f"{name}.npz", *(f"{name}-{key}.pdf" for key in pictures)):
        if (pathlib.Path(path) / file).exists():
            raise common.UserError(
                f"{pathlib.Path(path) / file}: exists already; give this analysis another --name"
            )


def keep_analysis(path, name, result, arrays={}, pictures={}):
    """Write an analysis to the run folder path: result as name.json, arrays as name.npz, pictures as name-KEY.pdf. pictures:
    functions of matplotlib.pyplot that return a figure; left out, with a line, where matplotlib is not installed."""
    path = pathlib.Path(path)
    if arrays:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        common._write(path / f"{name}.npz", buffer.getvalue())
    common._write(
        path / f"{name}.json", (json.dumps(result, indent=1) + "\n").encode()
    )  # before anything that may fail
    try:
        if pictures:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
    except ImportError:
        tqdm.write(f"{path}: no pictures, which need matplotlib (pip install matplotlib)")
        pictures = {}
    for key, draw in pictures.items():
        with pyplot.rc_context(
            {"font.size": 10, "axes.titlesize": 10, "pdf.fonttype": 42}
        ):  # fonts that journals take
            figure, buffer = draw(pyplot), io.BytesIO()
            figure.savefig(buffer, format="pdf", bbox_inches="tight")
            pyplot.close(figure)
        common._write(path / f"{name}-{key}.pdf", buffer.getvalue())
