"""Open finished runs, call a method's script without training, and keep results beside a run.

An analysis of a run reads the folder that a method's script wrote, and writes NAME.npz,
NAME-KEY.pdf and, last, NAME.json into it, which stays while it is of the run's last round."""

import argparse
import collections
import dataclasses
import importlib
import io
import json
import math
import pathlib

import numpy as np
import torch.nn as nn
from tqdm import tqdm

import common
import run_folder
from analysis import pictures

ROOT = pathlib.Path(__file__).parent.parent  # the folder of the method scripts


def file_name(text):
    """Return text if it can name the files of an analysis; an argparse type."""
    if not text or "/" in text or "\\" in text or text.lower() == "config":  # the run's own
        what = "takes a name of files, without slashes and not config"
        raise argparse.ArgumentTypeError(f"{what}, not {text!r}")
    return text


def add_run_flags(parser, name):
    """Add --device, --data-dir and --name, whose default is name, to the parser of an analysis."""
    add = parser.add_argument
    add("--device", type=common.device_name, default="auto", help="auto, cpu, cuda or cuda:N")
    add("--data-dir", metavar="DIR", help="where the data are, if they have moved since the run")
    add("--name", type=file_name, default=name, help="of the files written to the run folder")


MethodCall = collections.namedtuple("MethodCall", "args method")


def method_call(script, argv=()):
    """Return what `python SCRIPT.py argv` hands to common.run(): parsed flags and common.Method.

    Raises UserError if script (a name without .py) is no method's, or does not take the flags."""
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


@dataclasses.dataclass
class FinishedRun:
    """A finished run, opened for analysis."""

    path: pathlib.Path
    script: str
    args: argparse.Namespace
    data: common.Data
    parts: list  # the training indices of each client
    net: nn.Module  # the global network, in eval mode
    rows: list  # of metrics.jsonl
    best: dict  # the weights of the best round
    models: run_folder.States  # the clients' of the last round
    clients: list  # the ids of the clients of the last round
    title: str  # a line above pictures

    def client_net(self, client):
        """Return the network of a client (its id) after the last round; UserError if not kept."""
        if client not in self.clients:
            why = f"client {client} was not in the last round, which had "
            raise common.UserError(f"{self.path}: {why}{', '.join(map(str, self.clients))}")
        if client not in self.models.versions:
            why = "missing; runs with --save-clients keep the client models of the last round"
            raise common.UserError(f"{self.models.folder}: {why}")
        return self.load_net(self.models.get(client))

    def load_net(self, weights):
        """Return a copy of the network with weights, of the run. UserError for NaN or infinity."""
        net = common.copy_net(self.net)
        net.load_state_dict(weights)
        if not all(v.isfinite().all() for v in net.state_dict().values() if v.is_floating_point()):
            raise common.UserError(f"{self.path}: its weights hold NaN or infinity")
        return net


def open_run(path, device="auto", data_dir=None):
    """Return the FinishedRun in the folder path.

    Its data, partition and network are made anew from its recorded flags, in fp32; device and
    data_dir, unless None, replace the run's. UserError for a folder that is no finished run, or
    holds files that are not its own, and for data that are not the run's."""
    path = pathlib.Path(path)
    config = run_folder.read_config(path)
    flags, rows = config["flags"], run_folder.read_rows(path, config)
    whole = len(rows) >= config.get("stopped", flags["rounds"])
    state, committed = run_folder.read_checkpoint(path, config) if whole else ({}, [])
    if not whole or len(committed) < len(rows):
        why = f"or metrics.jsonl is damaged; --out {path} --resume goes on, or says what is damaged"
        raise common.UserError(f"{path}: has not finished, {why}")
    if flags["dataset"].startswith("own-") or flags["model"].startswith("own-"):
        raise common.UserError(f"{path}: its data or network came from Python, not from flags")
    if not math.isfinite(rows[-1]["test_loss"]):
        raise common.UserError(f"{path}: has diverged, test loss {rows[-1]['test_loss']}")
    words = ["--resume", f"--out={path}", f"--device={device}", "--precision=fp32"]
    words += [f"--data-dir={data_dir}"] if data_dir else []
    call = method_call(config["script"], words)
    call.args.init = None  # its weights are the checkpoint's
    fed = common.begin(call.args, call.method.adapt, None, None)
    digests = run_folder.data_digests(fed.data, fed.parts + (fed.tests or []))
    run_folder.check_same(path, config, "data", digests)
    models = run_folder.States(path / "clients", "model")
    models.restore(state["models"], rows[-1]["round"])
    title = ", ".join((config["script"], call.args.dataset, call.args.model))
    what = path, config["script"], call.args, fed.data, fed.parts, fed.net, rows
    run = FinishedRun(*what, state["best"], models, rows[-1]["clients"], title)
    run.net = run.load_net(state["net"])
    return run


def read_result(path, name):
    """Return NAME.json of the run folder path; None unless it is there, of the run's last round."""
    try:
        result = json.loads((pathlib.Path(path) / f"{name}.json").read_text())
        rows = pathlib.Path(path, "metrics.jsonl").read_bytes().splitlines()
        return result if result["round"] == json.loads(rows[-1])["round"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def analyse(path, args, measure):
    """Keep measure(run, args), which is as keep() takes it, of the run in path; return its result.

    args: those of add_run_flags() and more. UserError if the run has a result of that name."""
    if read_result(path, args.name):
        why = "exists already; give this analysis another --name"
        raise common.UserError(f"{pathlib.Path(path, args.name)}.json: {why}")
    run = open_run(path, args.device, args.data_dir)
    return keep(run, args.name, *measure(run, args))


def keep(run, name, result, arrays=None, drawn=None):
    """Write an analysis to the folder of a FinishedRun, print the names of the files; return it.

    result: a dict, for NAME.json. arrays: {key: array}, for NAME.npz. drawn: {key: (draw, ...)} for
    NAME-KEY.pdf, by pictures.write(). NAME.json comes last and says of which round all of it is;
    until it is there the analysis may be repeated. A picture that fails is a line and no more."""
    if arrays:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        write(run.path / f"{name}.npz", buffer.getvalue())
    for key, picture in (drawn or {}).items():
        try:
            pictures.write(run.path / f"{name}-{key}.pdf", *picture)
            tqdm.write(f"wrote {run.path / name}-{key}.pdf")
        except Exception as e:
            tqdm.write(f"{run.path}: no picture {name}-{key}.pdf: {e}")
    result = {"script": run.script, **result, "round": run.rows[-1]["round"]}
    write(run.path / f"{name}.json", f"{json.dumps(result, indent=1)}\n".encode())
    return result


def write(path, content):
    run_folder.write_atomically(path, content)
    tqdm.write(f"wrote {path}")


def table(lines, markdown=False):
    """Return dicts with the same keys as a table; columns without content are left out."""
    columns = [c for c in lines[0] if any(line[c] not in ("", "-") for line in lines)]
    cells = [columns, *([str(line[column]) for column in columns] for line in lines)]
    if markdown:
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
        head, *body = ["| " + " | ".join(row) + " |" for row in escaped]
        return "\n".join([head, "|" + "---|" * len(columns), *body])
    widths = [max(map(len, column)) for column in zip(*cells)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in cells]
    return "\n".join("  ".join(row).rstrip() for row in padded)
