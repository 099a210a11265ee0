"""What every method script shares: the round loop, the training engine, networks, data and flags.

Read plain.py first: it is the same federation without the speed, in about a hundred lines, and the
specification that this file is held to. Then read on from here; the sections are
    the round loop, aggregation and evaluation, the engine, partitions, networks, data, flags, the
    run folder, errors and interrupts
and what not every run needs (readers of some data sets, some networks) lies in extras/.

A method script hands run() one generator function, which is called for each client of each round:

    def local_update(worker, client, server, args):
        ...                     # worker.net holds the global weights w
        def step(x, y): ...     # one optimizer step on one batch; returns the loss
        yield step              # step is run on every batch of this client
        ...                     # worker.net holds the local weights w_k, which are sent

What local_update may use (x: images (batch, channels, height, width), y: labels (batch,)):

    worker.net                  the network, an nn.Sequential of blocks, in training mode
    worker.opt, worker.lr       its optimizer, fresh in each round, and the round's learning rate
    worker.pin(name, value)     value (tensor, number or list of tensors) where step may read it
    worker.frozen(name, w)      a copy of net, in eval mode and without gradients, that holds the
                                state_dict w; by default what net holds now
    worker.draw(name, f)        random numbers of the client's round: f(rng, steps) -> a row a step
    worker.row(name)            the current step's row of what was drawn, inside step
    worker.rng(name)            a numpy Generator of the client's round, for draws outside step
    worker.sizes                sizes of the client's batches, one a step
    worker.shapes               may be set to one hashable value a step, if steps differ in more
    worker.shape                than the batch's size; worker.shape is the current one, in step
    worker.part(f, ...)         f(...), where steps differ: a part that is a CUDA graph of its own
    worker.batches(client)      (x, y) over all samples of the client, not augmented
    worker.data                 the data set, a Data
    worker.map(f, clients)      in after_round: f(worker, client) for each client, on all workers
    client.id, len(client)      the client's number and its number of training samples
    client.state                a dict of tensors that the client keeps between rounds; "personal"
                                in it is a state_dict, or a part of one: the client's own network
    client.download(tensors)    counts what the client receives beside the model
    client.sum(name, tensors)   sends tensors that are summed over the round's clients
    client.record(name, tensor) sends tensors that are kept apart, by client
    client.upload(tensors)      counts what the client sends in a second synchronisation
    client.receives(part)       counts part, tensors or a number of bytes, in place of the model
    client.sends(part)          that the client receives, or sends
    client.weight               alpha_k, its weight in the average
    server                      a dict of what the server keeps: "round" (from 1), "clients" (ids of
                                the round's clients) and the method's own

The one rule: whatever step reads besides x and y lies in tensors obtained from the worker, whose
storage is refreshed in place for each client, and step takes no decision that differs between
clients or rounds. On a GPU the step of a worker's first client is captured as a CUDA graph and
replayed for all others. A step that differs from batch to batch, as worker.shapes say, is made of
parts, of which each is captured when it first comes.
"""

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import platform
import queue
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

try:  # for seconds; scripts import this file first, so that Ctrl-C is one line from then on
    import numpy as np
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from tqdm import tqdm
except KeyboardInterrupt:
    print(f"{pathlib.Path(sys.argv[0]).name}: error: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

for name in ("stdout", "stderr"):  # closed: no file of a run may take their numbers
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, "w"))
CORES = torch.get_num_threads()  # before a run divides them among its workers
MOST_GRAPHS = 256  # of a worker: what comes then runs without
# of --deterministic; read once, when a process first uses cuBLAS
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def keyed(stream, *key):
    """Return a numpy Generator that depends on its name and its integer keys alone.

    Nothing depends on what was drawn before, so that every method sees the same clients, batches
    and augmentation, and a resumed run the same as one that was never cut."""
    return np.random.default_rng([*stream.encode(), *key])


# --------------------------------------------------------------------------------------------------
# The round loop
# --------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """What a script hands to run(), beside its flags."""

    local_update: Callable
    aggregate: Callable
    after_round: Callable | None = None
    adapt: Callable | None = None


def run(
    args,
    local_update,
    aggregate=None,
    after_round=None,
    adapt=None,
    data=None,
    net=None,
    on_round=None,
):
    """Train a federation as args say, in a run folder.

    args: what the parser of flags() returns.
    local_update(worker, client, server, args): a generator function, see the top of this file.
    aggregate(net, received, server, args): sets net, which holds the old global weights, to the new
        ones; received: a Received; by default average().
    after_round(worker, clients, server, args): a second synchronisation with the round's clients;
        worker.net holds the new global weights, in eval mode, also of those that worker.map() uses.
    adapt(net, args): changes the network before training begins. data, net: a Data and an
    nn.Sequential of blocks (see blocks()), or for methods that take no block any module, instead of
    those that --dataset and --model name. server["report"], a dict of numbers, is added to the
    round's row of metrics.jsonl.
    on_round(row, net): called behind each round with its row and the global network; once it
        returns true, training ends behind the next round that is evaluated, that one included.

    Returns the global network and the rows of metrics.jsonl. A user's mistake is a UserError; in a
    command, one line on stderr and exit code 2."""
    method = Method(local_update, aggregate or average, after_round, adapt)
    args = copy.copy(args)
    note_own(args, data, net)
    with one_line_errors(args.script, args, "use fewer --workers, a smaller --batch-size or cpu"):
        check_files(args)
        ranks = extra("ranks", "torchrun").join(args) if under_torchrun() else OneProcess()
        args.out = args.out or default_out(args)
        with contextlib.closing(ranks.folder(args, code_of(method))) as folder:
            folder.take()
            if data is None and not args.resume:
                check_before_data(args, adapt, net)
            make_net = functools.partial(prepare_net, args=args, adapt=adapt, net=net)
            if data is not None or net is not None:
                make_net = extra("networks", "data= and net=").tried(make_net, method)
            return train(begin(args, folder, ranks, data, make_net), method, on_round)


def note_own(args, data, net):
    """Note in args that the data set or the network is the caller's own, which no flag names."""
    if data is not None or net is not None:
        extra("own", "data= and net=").note(args, data, net)


def under_torchrun():
    """Return whether torchrun has started several processes, of which this is one."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


class OneProcess:
    """What a run asks of its processes, where it has one; Ranks of extras/ranks.py has several."""

    def folder(self, args, code):
        """Return the run folder, which one process writes."""
        return RunFolder(args, code)

    def in_turn(self, f):
        """Return f(), whose files one process makes and the others read."""
        return f()

    def check_net(self, net):
        """Raise UserError where processes begin with different networks."""

    def agree(self, answer):
        """Return the answer, yes or no, on which all processes go on."""
        return answer

    def train(self, pool, clients, start):
        """Yield the Uploads of all clients in order."""
        return pool.train(clients, start)

    def map(self, pool_map):
        """Return a map like pool_map(f, items) over all processes."""
        return pool_map


@dataclasses.dataclass
class Federation:
    """What lasts from round to round."""

    args: argparse.Namespace
    data: "Data"
    parts: list  # training indices of each client
    tests: list | None  # test indices of each client, with --client-test
    net: nn.Module  # the global network
    pool: "Pool"
    folder: "RunFolder"
    ranks: OneProcess
    server: dict  # what the server keeps: round, clients and the method's own


def begin(args, folder, ranks, data, make_net):
    """Load and deal out the data, build the network and the workers, and restore what is resumed.

    data: a Data, or None for the one that args name; make_net(data): builds the network. Returns a
    Federation."""
    device = set_up_device(args)
    if data is None:
        data = ranks.in_turn(lambda: load_data(args))
    else:
        data = hold_out(data, args)
    square = data.x.ndim == 4 and data.x.shape[2] == data.x.shape[3]
    if resolve_augment(args) and not (square and data.x.dtype == torch.uint8):
        raise UserError("argument --augment: for square images of uint8; use none")
    parts = partition(data, args)
    tests = client_tests(data, parts, args)
    folder.know_data(data_digests(data, parts + (tests or [])))
    data = data.to(device)
    net = make_net(data)
    ranks.check_net(net)
    steps = most_steps(parts, net, args)
    workers, threads = folder.workers or Pool.plan(args)
    pool = Pool(lambda: Worker(net, data, args, steps), device, workers, threads)
    fed = Federation(args, data, parts, tests, net, pool, folder, ranks, {"round": 0})
    if args.resume:
        folder.restore(fed)
    else:
        folder.create(workers, threads)
    return fed


def check_before_data(args, adapt, net):
    """Raise UserError for what no data set of the name that args give can mend.

    adapt, net: as of run(). The network is built for a stand-in of the data set's shape, where that
    is known; else one that suits all networks."""
    if args.partition in NATURAL and args.dataset not in WRITERS:
        raise UserError(no_writers(args))
    if args.partition not in ("dirichlet", "iid") or args.client_test:
        flag = "--client-test" if args.client_test else f"--partition {args.partition}"
        partitions = extra("partitions", flag)
        if args.partition == "file":
            partitions.read_split(args.split_file, args.clients)
    if args.server != "avg":
        extra("servers", f"--server {args.server}")
    if args.dataset in EXTRA_DATASETS:
        extra(EXTRA_DATASETS[args.dataset], f"--dataset {args.dataset}")
    check_widths(args)
    classes, channels, size = SHAPES.get(args.dataset, (2, 3, 64))
    if args.normalise != "dataset":
        extra("images", f"--normalise {args.normalise}").check_normalise(args.normalise, channels)
    size = args.image_size or size
    words = ["word"] if args.dataset == "sent140" else None
    x, y = torch.empty(0, channels, size, size), torch.empty(0)
    data = argparse.Namespace(x=x, y=y, classes=classes, words=words)
    args = argparse.Namespace(**vars(args))
    args.vectors, args.quiet = "random", True  # a file of vectors takes long to read
    if args.dataset not in SHAPES:
        args.init = None  # whose shapes are those of the data
    net = prepare_net(data, args, adapt, net)
    most_steps([range(max(2, args.batch_size))], net, args)


def check_widths(args):
    """Raise UserError where a method trains narrow sub-networks that the network does not have."""
    width = getattr(args, "width", getattr(args, "min_width", None))  # FedAlign's, GradAug's
    what = WITHOUT_WIDTHS.get(args.model)
    if what and isinstance(width, float) and width < 1 and getattr(args, "mu", 1):
        raise UserError(f"--model {args.model}: a sub-network of {what} is not defined")


def prepare_net(data, args, adapt=None, net=None):
    """Return a copy of net, or the network that args name, on data's device and in eval mode.

    adapt(net, args): changes it first."""
    torch.manual_seed(args.seed)
    net = net_for(data, args) if net is None else copy.deepcopy(net)
    if not all(p.requires_grad for p in net.parameters()):
        raise UserError("net: has frozen parameters, and methods train all of them")
    if args.init:
        extra("networks", "--init").load_init(net, args)
    if adapt:
        adapt(net, args)
    return net.to(data.y.device, memory_format=torch.channels_last).eval()


def most_steps(parts, net, args):
    """Return the most steps that a client trains in a round; UserError if there are none."""
    batch_norm = has_batch_norm(net)
    sizes = set(map(len, parts))
    if batch_norm and min(*sizes, args.batch_size) == 1:
        raise UserError(
            "a batch or a client has a single sample, and batch norm needs two; "
            "use a larger --batch-size, fewer --clients or another --model"
        )
    steps = max(len(batch_sizes(n, args, batch_norm)) for n in sizes)
    if steps == 0:
        raise UserError(f"--drop-last: no client has the {args.batch_size} samples of a batch")
    return steps


def train(fed, method, on_round=None):
    """Train the rounds that are left. Return the global network and the rows of metrics.jsonl."""
    args, folder, pool = fed.args, fed.folder, fed.pool
    say = (lambda _: None) if args.quiet else tqdm.write
    say(opening_line(fed))
    clients, stopped = sampled_clients(args), False
    bar = tqdm(
        total=args.rounds * clients,
        initial=fed.server["round"] * clients,
        unit="client",
        disable=args.quiet or None,
    )
    folder.clock = time.perf_counter()
    with pool.interrupt.handled(), contextlib.closing(pool), bar:
        for t in range(fed.server["round"] + 1, args.rounds + 1):
            pool.interrupt.check()
            fed.server["round"] = t
            received, seconds = train_round(fed, method, bar)
            if method.after_round:
                seconds["synchronise"] = synchronise(fed, received, method.after_round)
            row = measure_round(fed, received, seconds)
            keep_round(fed, row)
            bar.set_postfix_str(row_line(row, args))
            say(row_line(row, args))
            answer = on_round and on_round(folder.rows[-1], fed.net)
            stopped = bool(fed.ranks.agree(answer)) or stopped
            if stopped and row["test_acc"] is not None:
                folder.checkpoint(fed)
                folder.config["stopped"] = t
                folder.write_config()
                break
    folder.save(fed.net.state_dict(), "model.pt", folder.stamp_with_rows())
    summary_line = "last {test_acc:.2f}%, best {best_acc:.2f}%, EMA {acc_ema:.2f}%"
    say(summary_line.format(**folder.rows[-1]))
    return fed.net, folder.rows


def train_round(fed, method, bar):
    """Train the round's clients and aggregate what they send.

    Returns a Received and the seconds of both, and of what happened since the last evaluation."""
    args, server, start = fed.args, fed.server, time.perf_counter()
    server["clients"] = sample(args, server["round"])
    clients = [Client(k, fed.parts[k]) for k in server["clients"]]
    set_weights(clients, args, server["round"])
    received = Received()
    begin_client = functools.partial(train_client, fed, method)
    for upload in fed.ranks.train(fed.pool, clients, begin_client):
        keep_client(fed, upload)
        received.add(upload)
        bar.update()
    fed.pool.synchronise()
    trained = time.perf_counter()
    method.aggregate(fed.net, received, server, args)
    check_finite(fed.net, received, args, server["round"])
    return received, {
        "train": trained - start,
        "aggregate": time.perf_counter() - trained,
        "other": start - fed.folder.clock,
    }


def train_client(fed, method, worker, client):
    """Train a client as Worker.train() does, between reading and writing what it keeps.

    A generator like that. The state is let go of then: it would be sampled x state in memory."""
    states, t = fed.folder.states, fed.server["round"]
    client = Client(client.id, client.index, states.read(client.id), client.weight)  # begins anew
    weights = fed.net.state_dict()
    upload = yield from worker.train(client, fed.server, weights, method.local_update)
    upload.version = states.write(client.id, client.state, t)
    client.state = None
    return upload


def sample(args, t):
    """Return the ids of the clients of round t, in ascending order."""
    rng = keyed("sample", args.seed, t)
    return sorted(rng.choice(args.clients, sampled_clients(args), replace=False).tolist())


def sampled_clients(args):
    """Return how many clients take part in a round."""
    return max(1, int(args.clients * args.sample + 0.5))


def set_weights(clients, args, t):
    """Set each client's weight in the average of round t: its share of the samples, or 1/|S|."""
    shares = np.array([len(client) for client in clients])
    if args.drop_last:
        shares = shares // args.batch_size * args.batch_size
    if args.weighting == "uniform":
        shares = np.minimum(shares, 1)  # without training, no weight
    if shares.sum() == 0:
        n = args.batch_size
        raise UserError(
            f"--drop-last: no client sampled in round {t} has the {n} samples of a batch"
        )
    for client, weight in zip(clients, (shares / shares.sum()).tolist()):
        client.weight = weight


def keep_client(fed, upload):
    """Note which version of its state a client left and, with --save-clients, its last weights."""
    client, folder = upload.client, fed.folder
    folder.states.note(client.id, upload.version)
    t = fed.server["round"]
    if fed.args.save_clients and t == fed.args.rounds:
        stamp = folder.stamp(t, client=client.id)
        folder.save(upload.weights, f"clients.{t}.tmp/{client.id}.pt", stamp)  # until it is kept


def check_finite(net, received, args, t):
    """Raise FloatingPointError, which names the client, if a model holds NaN or infinity."""
    for upload in received.uploads:
        if not upload.finite:
            earlier = f"; {args.out} keeps the checkpoint of an earlier round"
            raise FloatingPointError(
                f"round {t}, client {upload.client.id}: the local model holds NaN or infinity"
                + earlier * (t > args.checkpoint_every)
                + "; a smaller --lr or a --clip may help"
            )
    if not torch.stack(torch._foreach_norm(list(net.parameters()))).isfinite().all():
        raise FloatingPointError(
            f"round {t}: the global model holds NaN or infinity; a smaller --server-lr may help"
        )


def synchronise(fed, received, after_round):
    """Run the method's second synchronisation on the new global weights. Return its seconds."""
    start, worker = time.perf_counter(), fed.pool.workers[0]
    for each in fed.pool.workers:
        load_weights(each.net.eval(), fed.net.state_dict())
    worker.map = fed.ranks.map(fed.pool.map_workers)
    after_round(worker, received.clients, fed.server, fed.args)
    fed.pool.synchronise()
    return time.perf_counter() - start


def measure_round(fed, received, seconds):
    """Return the round's row of metrics.jsonl; evaluate where that is due."""
    args, t, folder = fed.args, fed.server["round"], fed.folder
    start, pool_map = time.perf_counter(), fed.ranks.map(fed.pool.map)
    accuracy, loss, by_client = None, None, {}
    if t == args.rounds or t % args.eval_every == 0:
        hits = torch.zeros(len(fed.data.y_test), dtype=torch.bool)
        accuracy, loss = evaluate(fed.net, fed.data, args, pool_map, hits)
        if fed.tests:
            by_client = extra("partitions", "--client-test").client_readings(fed, hits)
    row = {"test_acc": accuracy, "test_loss": loss}
    if accuracy is not None and fed.data.x_val is not None:
        held = dataclasses.replace(fed.data, x_test=fed.data.x_val, y_test=fed.data.y_val)
        row["val_acc"], row["val_loss"] = evaluate(fed.net, held, args, pool_map)
    folder.clock = time.perf_counter()
    uploads, size = received.uploads, nbytes(fed.net.state_dict())
    samples = sum(upload.samples for upload in uploads)
    train_loss = sum(float(upload.loss) * upload.samples for upload in uploads) / max(1, samples)
    report = fed.server.pop("report", {})
    return {
        "round": t,
        **row,
        "train_loss": train_loss,
        "lr": learning_rate(args, t),
        "clients": fed.server["clients"],
        "samples": samples,
        "seconds": {**seconds, "evaluate": folder.clock - start},
        "samples_per_s": samples / seconds["train"],
        "bytes_down": sum(c.bytes_down + c.model.get("down", size) for c in received.clients),
        "bytes_up": sum(c.bytes_up + c.model.get("up", size) for c in received.clients),
        "peak_memory": peak_memory(fed.pool.device),
        **summary(accuracies([*folder.rows, row])),
        "best_acc": (best_row([*folder.rows, row]) or row)["test_acc"],
        **by_client,
        **{k: v.item() if torch.is_tensor(v) else v for k, v in report.items()},
    }


def accuracies(rows):
    """Return the test accuracies (%) of the rows that were evaluated."""
    return [row["test_acc"] for row in rows if row["test_acc"] is not None]


def best_row(rows):
    """Return the first row of the best accuracy; None before an evaluation.

    It is that on the samples of --validation or, without, on the test set."""
    evaluated = [row for row in rows if row["test_acc"] is not None]
    return max(evaluated, key=lambda row: row.get("val_acc", row["test_acc"]), default=None)


def keep_round(fed, row):
    """Write down the round: the best model so far, the row and, where it is due, a checkpoint."""
    args, folder, t = fed.args, fed.folder, row["round"]
    if best_row([*folder.rows, row]) is row:
        folder.save(fed.net.state_dict(), f"best-{t}.pt", folder.stamp(t))
    folder.settle(fed)
    folder.append(row)
    if t == args.rounds or t % args.checkpoint_every == 0:
        folder.checkpoint(fed)


def opening_line(fed):
    """Return what a run says of itself at its start."""
    args, sizes = fed.args, [len(part) for part in fed.parts]
    parameters = sum(p.numel() for p in fed.net.parameters())
    moved = f" ({args.moved:,} of them moved for --min-size)" if args.moved else ""
    return (
        f"{args.out}: {len(sizes)} clients of {min(sizes)} to {max(sizes)} samples{moved}, "
        f"{sampled_clients(args)} a round; {parameters:,} parameters; {args.workers} worker(s) on "
        f"{args.device}"
    )


def row_line(row, args):
    """Return what a run says of a round."""
    evaluated = ""
    if row["test_acc"] is not None:
        evaluated = "  acc {test_acc:5.2f}%  test loss {test_loss:.4f}".format(**row)
    trained = "  train loss {train_loss:.4f}  {samples_per_s:,.0f} samples/s".format(**row)
    return f"round {row['round']:3d}/{args.rounds}{evaluated}{trained}"


# --------------------------------------------------------------------------------------------------
# Aggregation and evaluation
# --------------------------------------------------------------------------------------------------


class Received:
    """What the server has of a round's clients, added up as it comes: never clients x model.

    mean: a state_dict, sum_k alpha_k w_k over parameters and batch-norm statistics, summed in fp32
    in the order of the clients; integer counters, which no computation reads, and word vectors,
    which nobody trains, are those of the last client. sums: {name: what clients sent by
    client.sum(), summed over them}. records: {name: {client id: what it sent by client.record()}}.
    clients: in order."""

    def __init__(self):
        self.mean, self.sums, self.records = {}, {}, {}
        self.uploads = []  # without their weights

    @property
    def clients(self):
        return [upload.client for upload in self.uploads]

    @torch.no_grad()
    def add(self, upload):
        """Add an Upload, and let go of its weights."""
        client, weights = upload.client, upload.weights
        averaged = [k for k in weights if is_averaged(k, weights[k])]
        if not self.mean:
            self.mean = {k: torch.zeros_like(weights[k]) for k in averaged}
        self.mean = {**weights, **{k: self.mean[k] for k in averaged}}
        sums = [self.mean[k] for k in averaged]
        torch._foreach_add_(sums, [weights[k] for k in averaged], alpha=client.weight)
        for name, tree in client.sums.items():
            if name in self.sums:
                torch._foreach_add_(tensors_in(self.sums[name]), tensors_in(tree))
            else:
                self.sums[name] = tree
        for name, tree in client.records.items():
            self.records.setdefault(name, {})[client.id] = tree
        client.sums, client.records, upload.weights = {}, {}, None
        self.uploads.append(upload)


def is_averaged(name, tensor):
    """Return whether an entry of a state_dict is averaged over clients."""
    return tensor.is_floating_point() and not name.endswith(".vectors")


@torch.no_grad()
def average(net, received, server, args):
    """FedAvg's server: set net to received.mean, or step towards it as --server says."""
    weights = received.mean
    if args.server != "avg" or args.server_lr != 1:
        step = extra("servers", f"--server {args.server}").step
        weights = weights | step(dict(net.named_parameters()), weights, server, args)
    load_weights(net, weights)


@torch.no_grad()
def keep_row(table, client, row):
    """Keep row, (d,), for a client in a table. Return its last one, or zeros.

    table: {} at first; then, for any number of clients one tensor in a checkpoint, {"rows":
    {client id: its row}, "values": (rows and some room for more, d)}."""
    rows, values = table.setdefault("rows", {}), table.get("values", torch.zeros_like(row[None]))
    i = rows.setdefault(client, len(rows))
    if i == len(values):
        values = torch.cat([values, torch.zeros_like(values)])
    old = values[i].clone()
    values[i] = row
    table["values"] = values
    return old


def rows_of(table, clients, d):
    """Return the rows, (rows, d), of those of the clients that have one in a table of keep_row().

    They come in the order in which the clients first had one."""
    rows = table.get("rows", {})
    index = sorted(rows[k] for k in clients if k in rows)
    return table["values"][index] if rows else torch.zeros(0, d)


def add_proximal(net, w, mu):
    """Return mu/2 ||v - w||^2 of net's parameters v, and add its gradient mu (v - w) to theirs.

    w: a list like net.parameters(). In a few kernels, where a term of the loss takes ten a
    parameter."""
    params = list(net.parameters())
    difference = torch._foreach_sub(params, w)
    torch._foreach_add_([v.grad for v in params], difference, alpha=mu)
    return mu / 2 * torch.stack(torch._foreach_norm(difference)).square().sum()


def evaluation_batch(data):
    """Return how many test samples are evaluated at once: 2,000 images of 32x32 on a GPU."""
    if not data.y.is_cuda:
        return 250
    pixels = math.prod(data.x_test.shape[2:]) if data.x_test.dtype == torch.uint8 else 1024
    return max(50, min(2000, 2000 * 1024 // pixels))


@torch.no_grad()
def evaluate(net, data, args, pool_map=map, hits=None):
    """Return accuracy (%) and mean cross-entropy of net, in eval mode, on the whole test set.

    pool_map: what runs the batches; hits: a tensor (test samples,) to be filled with which are
    right."""
    net.eval()

    def batch(xy):
        x = channels_last(data.normalise(xy[0]))
        with torch.no_grad(), autocast(args, x.device):
            out = net(x).float()
        correct = out.argmax(1) == xy[1]
        loss = F.cross_entropy(out, xy[1], reduction="sum").double()
        return correct, torch.stack([correct.sum().double(), loss])

    size = evaluation_batch(data)
    batches = zip(data.x_test.split(size), data.y_test.split(size))
    correct, sums = zip(*pool_map(batch, batches))
    count, loss = torch.stack(sums).sum(0).tolist()
    if hits is not None:
        hits.copy_(torch.cat(correct))
    return 100 * count / len(data.y_test), loss / len(data.y_test)


def summary(values):
    """Return readings of the test accuracies so far (%), None before the first.

    EMA with factor 0.9, bias-corrected; mean and population standard deviation of the last five;
    best."""
    if not values:
        return dict.fromkeys(("acc_ema", "acc_last5_mean", "acc_last5_std", "best_acc"))
    ema = sum(0.1 * 0.9**i * value for i, value in enumerate(reversed(values)))
    return {
        "acc_ema": ema / (1 - 0.9 ** len(values)),
        "acc_last5_mean": float(np.mean(values[-5:])),
        "acc_last5_std": float(np.std(values[-5:])),
        "best_acc": max(values),
    }


# --------------------------------------------------------------------------------------------------
# The engine: a worker trains one client after the other, a pool runs several workers at once
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Client:
    """What a method sees of a client in one round; len(client) is its number of samples."""

    id: int
    index: np.ndarray  # of its training samples
    # tensors, or lists and dicts of them, that it keeps between rounds; None after local_update
    state: dict | None = dataclasses.field(default_factory=dict)
    weight: float = 0.0  # alpha_k in the average
    bytes_down: int = 0  # received and sent beside the model
    bytes_up: int = 0
    model: dict = dataclasses.field(default_factory=dict)  # bytes in place of the model's
    sums: dict = dataclasses.field(default_factory=dict)
    records: dict = dataclasses.field(default_factory=dict)

    def __len__(self):
        return len(self.index)

    def download(self, tree):
        """Count tree (tensors, or lists and dicts of them) as received, and return it."""
        self.bytes_down += nbytes(tree)
        return tree

    def upload(self, tree):
        """Count tree as sent in a second synchronisation, and return it."""
        self.bytes_up += nbytes(tree)
        return tree

    def receives(self, part):
        """Count part (tensors, or a number of bytes) as all that it receives of the model."""
        self.model["down"] = part_bytes(part)

    def sends(self, part):
        """Count part (tensors, or a number of bytes) as all that it sends of the model."""
        self.model["up"] = part_bytes(part)

    def sum(self, name, tree, sent=True):
        """Send tree to received.sums[name], which adds it up over the round's clients.

        sent: whether its bytes count; not, if the server could work it out from the weights.
        UserError for anything but tensors."""
        check_leaves(tree, f"client.sum({name!r})")
        self.sums[name] = tree_map(lambda t: t.detach().clone(), tree)
        self.bytes_up += nbytes(tree) if sent else 0

    def record(self, name, tree, sent=True):
        """Send tree to received.records[name][client.id]; small, since all of them are kept."""
        self.records[name] = tree_map(lambda t: t.detach().clone(), tree)
        self.bytes_up += nbytes(tree) if sent else 0


@dataclasses.dataclass
class Upload:
    """What comes back from a client's round."""

    client: Client
    weights: dict | None  # the state_dict w_k, until it has been added up
    loss: torch.Tensor | None = None  # mean over the samples it saw
    finite: torch.Tensor | bool = True  # whether all weights and the loss are
    samples: int = 0  # seen in training, repeats counted
    version: tuple | None = None  # of the state that it left, see States


def tensors_in(tree):
    """Return all tensors in nested dicts, lists and tuples."""
    if torch.is_tensor(tree):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [t for child in tree for t in tensors_in(child)]


def tree_map(f, tree):
    """Return the same nest of dicts, lists and tuples with f applied to each tensor."""
    if isinstance(tree, dict):
        return {k: tree_map(f, v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [tree_map(f, v) for v in tree]
    return f(tree) if torch.is_tensor(tree) else tree


PLAIN = (int, float, bool, str, type(None))  # what may be kept beside tensors


def check_leaves(tree, what, kinds=()):
    """Raise UserError where a nest of dicts, lists and tuples holds more than tensors and kinds."""
    if isinstance(tree, (dict, list, tuple)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            check_leaves(child, f"{what}[{key!r}]", kinds)
    elif not torch.is_tensor(tree) and type(tree) not in kinds:
        raise UserError(f"{what}: a {type(tree).__name__} where a tensor should be")


def nbytes(tree):
    """Return the bytes of all tensors in a nest of dicts, lists and tuples."""
    return sum(t.numel() * t.element_size() for t in tensors_in(tree))


def part_bytes(part):
    """Return the bytes of part, tensors or how many they are; UserError for anything else."""
    if torch.is_tensor(part) or isinstance(part, (dict, list, tuple)):
        return nbytes(part)
    if type(part) is bool or not isinstance(part, (int, np.integer)) or part < 0:
        raise UserError(f"client.sends, receives: {part!r} is no tensors and no number of bytes")
    return int(part)


def channels_last(x):
    """Return x in that memory format if it is of images."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def copy_net(net):
    """Return a copy of net; LSTM weights lie in one piece again, as cuDNN wants them."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.LSTM):
            module.flatten_parameters()
    return net


def load_weights(net, weights):
    """Copy weights (a state_dict) into net, in place."""
    with torch.no_grad():
        names = net.state_dict()
        torch._foreach_copy_(list(names.values()), [weights[k] for k in names])


def set_up_device(args):
    """Set precision and determinism of the process. Return the device."""
    device = torch.device(args.device)
    if device.type == "cuda" and under_torchrun():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    # Gram matrices and power iterations need exact products, also in the backward pass
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for layers in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        layers.fp32_precision = "ieee" if args.precision == "fp32" else "tf32"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.use_deterministic_algorithms(args.deterministic)
    return device


def autocast(args, device):
    """Return --precision bf16's context; a weight cache would go stale in a CUDA graph."""
    bf16 = args.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False)


def cast_blocks(net, args, device):
    """Run each block of net under autocast, in place, and pass on fp32. Return net.

    So losses and whatever else a method computes outside of blocks, Gram matrices and power
    iterations say, are in fp32, forward and backward. Not to be copied afterwards."""

    def wrapped(forward):
        def cast(*inputs):
            with autocast(args, device):
                out = forward(*inputs)
            return out.float()

        return cast

    if args.precision == "bf16":
        for block in net.children():
            block.forward = wrapped(block.forward)
    return net


def epoch_sizes(n, args, batch_norm):
    """Return the sizes of the batches in which a client of n samples visits each of them once.

    A last batch of a single sample is skipped where there is batch norm, which needs two; so is
    every short batch with --drop-last."""
    full, rest = divmod(n, args.batch_size)
    if args.drop_last or batch_norm and rest == 1:
        rest = 0
    return [args.batch_size] * full + [rest] * (rest > 0)


def batch_sizes(n, args, batch_norm):
    """Return the sizes of the batches on which a client of n samples trains in one round."""
    epoch = epoch_sizes(n, args, batch_norm)
    if args.local_steps and epoch:
        return (epoch * math.ceil(args.local_steps / len(epoch)))[: args.local_steps]
    return epoch * args.epochs


def batch_tables(index, steps, args, net, data, rng):
    """Draw a client's batches of one round: {name: array (steps, batch size, ...)}.

    index: the client's samples, of which each epoch is a new order, cut into batches; a short batch
    uses a part of its row. The other names are the draws of the augmentation."""
    rows = max(1, len(epoch_sizes(len(index), args, has_batch_norm(net))))  # of one epoch
    epochs, width = math.ceil(steps / rows), rows * args.batch_size
    orders = rng.permuted(np.tile(index, (epochs, 1)), axis=1)[:, :width]
    orders = np.pad(orders, ((0, 0), (0, width - orders.shape[1])))
    batches = orders.reshape(epochs * rows, args.batch_size)[:steps]
    augment = draw_augment(resolve_augment(args), rng, batches.shape, data.x.shape[-1])
    return {"index": batches, **augment}


def learning_rate(args, t):
    """Return the learning rate of round t, which counts from 1."""
    return args.lr * args.lr_decay ** (t - 1)


def optimizer(net, args):
    """Return SGD or RMSprop, with all of its state there from the start.

    With --clip a step clips the norm of the gradient first."""
    params = list(net.parameters())
    device = params[0].device
    cuda = device.type == "cuda"
    options = {"momentum": args.momentum, "weight_decay": args.weight_decay}
    # a float would be baked into a CUDA graph
    options["lr"] = torch.tensor(args.lr, device=device) if cuda else args.lr
    if args.optimizer == "rmsprop":
        opt = torch.optim.RMSprop(params, capturable=cuda, **options)
        for p in params:
            step, square = torch.zeros((), device=device), torch.zeros_like(p)
            opt.state[p].update(step=step, square_avg=square)
    else:
        nesterov = args.nesterov and args.momentum > 0
        opt = torch.optim.SGD(params, nesterov=nesterov, fused=True, **options)
    if args.momentum:
        for p in params:
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
    if args.clip:

        def clip(*_):
            nn.utils.clip_grad_norm_(params, args.clip, error_if_nonfinite=False)

        opt.register_step_pre_hook(clip)
    return opt


def optimizer_state(opt):
    """Return the optimizer's tensors: momentum buffers; of RMSprop steps and mean squares too."""
    return [v for state in opt.state.values() for v in state.values() if torch.is_tensor(v)]


class Worker:
    """Trains one client at a time, with all that a step reads at fixed addresses.

    Two generators meet here: local_update yields its step once, and train() yields after each
    batch, so that a Pool can run several workers in turn. The top of this file lists what methods
    may use."""

    keep_first_step = False  # tests: on the CPU too, run the first client's step for all clients

    def __init__(self, net, data, args, steps):
        """Copy net, the global network; steps: the most that any client trains in a round."""
        self.data, self.args, self.template = data, args, net
        self.device = data.y.device
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        self.batch_norm = has_batch_norm(net)
        self.search = self.cuda and not args.deterministic  # for the fastest convolutions
        self.net = cast_blocks(copy_net(net), args, self.device)
        self.opt = optimizer(self.net, args)
        self.steps, self.sizes, self.shapes, self.shape = steps, [], None, None
        self.t = torch.zeros(1, dtype=torch.long, device=self.device)  # step within the round
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # summed over samples
        self.pins, self.nets, self.draws = {}, {}, {}  # what pin(), frozen() and draw() have made
        self.graphs, self.in_parts, self.step = {}, False, None
        self.tables = {}  # of batch_tables(), on the device, read through t
        # where images are decoded ahead, those of the current batch
        self.images = None
        if data.paths:
            self.images = data.x.new_zeros(args.batch_size, *data.x.shape[1:])

    # --- what a method may use

    def pin(self, name, value):
        """Return value, copied into storage of this name that stays where it is.

        value: a tensor, a number, or a list of tensors."""
        if isinstance(value, (list, tuple)):
            return [self.pin(f"{name}.{i}", v) for i, v in enumerate(value)]
        value = torch.as_tensor(value, device=self.device).detach()
        if name not in self.pins:
            self.pins[name] = value.clone()
        return self.pins[name].copy_(value)

    def frozen(self, name, weights=None):
        """Return a copy of the network, in eval mode and without gradients.

        weights: the state_dict that it holds, by default what worker.net holds now."""
        if name not in self.nets:
            frozen = copy_net(self.template).eval().requires_grad_(False)
            self.nets[name] = cast_blocks(frozen, self.args, self.device)
        load_weights(self.nets[name], self.net.state_dict() if weights is None else weights)
        return self.nets[name]

    def rng(self, name):
        """Return a numpy Generator of the client's round; each name has a stream of its own."""
        return keyed(name, *self.key)

    def draw(self, name, f):
        """Draw random numbers of the client's round, which step reads by row(name).

        f(rng, steps): returns an array with one row a step."""
        rows = torch.from_numpy(np.ascontiguousarray(f(self.rng(name), max(1, len(self.sizes)))))
        self._fill(self.draws, name, rows)

    def row(self, name):
        """Return the current step's row of what was drawn, inside step."""
        return self.draws[name].index_select(0, self.t)[0]

    def part(self, f, *inputs):
        """Return f(*inputs), detached: a part of a step that differs from others by worker.shape.

        On a GPU each part is a CUDA graph; f's name and the inputs that are no tensors tell them
        apart. Tensors among the inputs: x, y and what other parts have returned. A part that adds
        to gradients needs them in place: opt.zero_grad(set_to_none=False)."""
        if not self.in_parts:
            return tree_map(torch.Tensor.detach, f(*inputs))
        constants = [v for v in inputs if not torch.is_tensor(v)]
        return self._graphed((f.__name__, *constants), f, inputs)

    @torch.no_grad()
    def batches(self, client):
        """Yield (x, y) over all samples of the client in order, not augmented, outside training."""
        # even parts, of which none is a single sample, on which batch norm in training mode fails
        indices = torch.from_numpy(client.index).tensor_split(math.ceil(len(client) / 500))
        for index, x in zip(indices, self.data.images(indices)):
            x = channels_last(self.data.normalise(x.to(self.device)))
            yield x, self.data.y[index.to(self.device)]

    def map(self, f, clients):
        """Return [f(worker, client) for each client], where a Pool's workers share the work.

        For after_round. f returns tensors, or lists and dicts of them, and changes nothing else."""
        return [f(self, client) for client in clients]

    # --- one client's round

    def train(self, client, server, weights, local_update):
        """Train a client from weights (a state_dict): yield after each batch, return the Upload.

        Only the batches run on the worker's own stream, so workers overlap there; all else is in
        order on the current stream."""
        images = self._begin(client, server, weights)
        method = local_update(self, client, server, self.args)
        step = next(method)
        if self.keep_first_step:
            step = self.step = self.step or step
        if self.cuda:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for i, size in enumerate(self.sizes):
            self.shape = self.shapes[i] if self.shapes else None
            with torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext():
                if images:
                    self._copy(self.images, next(images))
                self._train_batch(step, size)
            yield
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if next(method, method) is not method:
            raise RuntimeError("local_update yields once, its step")
        return self._end(client)

    def _begin(self, client, server, weights):
        """Set all that a step reads to the client's; return its images if they are on disk."""
        load_weights(self.net, weights)
        self.net.train()
        momentum = client.state.get("momentum")  # of --persist-opt
        for i, buffer in enumerate(optimizer_state(self.opt)):
            buffer.zero_() if momentum is None else buffer.copy_(momentum[i])
        self.lr = learning_rate(self.args, server["round"])
        for group in self.opt.param_groups:
            if self.cuda:
                group["lr"].fill_(self.lr)
            else:
                group["lr"] = self.lr
        self.t.zero_()
        self.loss.zero_()
        self.key = (self.args.seed, server["round"], client.id)
        self.sizes = batch_sizes(len(client), self.args, self.batch_norm)
        self.shapes = None
        steps, rng = len(self.sizes), self.rng("batches")
        tables = batch_tables(client.index, steps, self.args, self.template, self.data, rng)
        for name, rows in tables.items():
            self._fill(self.tables, name, torch.from_numpy(rows))
        if not self.data.paths:
            return None
        rows = [tables[name] for name in ("index", "seed") if name in tables]
        return self.data.images(
            *([row[:size] for row, size in zip(table, self.sizes)] for table in rows)
        )

    def _end(self, client):
        """Return the Upload of a client whose method has ended."""
        if self.args.persist_opt:
            client.state["momentum"] = optimizer_state(self.opt)
        client.state = tree_map(lambda t: t.detach().to("cpu", copy=True), client.state)
        weights = {k: v.detach().clone() for k, v in self.net.state_dict().items()}
        samples = sum(self.sizes)
        loss = self.loss / max(1, samples)
        norms = torch._foreach_norm([v for v in weights.values() if v.is_floating_point()])
        finite = torch.stack([*norms, loss.float()]).isfinite().all()
        return Upload(client, weights, loss, finite, samples)

    def _fill(self, tables, name, rows):
        """Copy rows, one a step, into the table of this name, which stays where it is."""
        if name not in tables:
            tables[name] = rows.new_zeros(self.steps, *rows.shape[1:], device=self.device)
        self._copy(tables[name], rows)

    def _copy(self, table, rows):
        rows = rows.pin_memory() if self.cuda else rows
        table[: len(rows)].copy_(rows, non_blocking=True)

    def _train_batch(self, step, size):
        """Run one step, on a full batch as a CUDA graph or, where steps differ, as one a part.

        A short batch that comes often has a graph too: a capture runs its step four times."""
        often = size == self.args.batch_size
        often = often or self.shapes is None and self.sizes.count(size) >= 8
        graphed = self.cuda and self.args.capture and often
        self.in_parts = graphed and self.shapes is not None
        if graphed and not self.in_parts:
            self._graphed(size, self._step, (step, size))
        else:
            self._step(step, size)

    def _step(self, step, size):
        """Run one step on the first size samples of the batch of step t."""
        # a search takes seconds for each new shape: worth it for full batches, which come again
        torch.backends.cudnn.benchmark = self.search and size == self.args.batch_size
        x, y = self.part(self._batch, size)
        loss = step(x, y)
        self.loss.add_(loss.detach(), alpha=size)
        self.t.add_(1)
        torch.backends.cudnn.benchmark = False

    def _batch(self, size):
        """Return (x, y), the first size samples of the batch of step t."""
        rows = {name: v.index_select(0, self.t)[0, :size] for name, v in self.tables.items()}
        index = rows.pop("index")
        if self.images is None:
            x = apply_augment(self.data.x.index_select(0, index), rows)
        else:
            x = self.images[:size]
        return channels_last(self.data.normalise(x)), self.data.y.index_select(0, index)

    def _graphed(self, key, f, inputs):
        """Return f(*inputs) by replaying its CUDA graph, which is captured when there is none."""
        if key not in self.graphs and self.args.capture and len(self.graphs) < MOST_GRAPHS:
            self._capture(key, f, inputs)
        if key not in self.graphs:
            return tree_map(torch.Tensor.detach, f(*inputs))
        graph, value = self.graphs[key]
        graph.replay()
        return value

    def _capture(self, key, f, inputs):
        """Record f(*inputs) as a CUDA graph; where that fails, go on without.

        Three runs of warm-up let libraries choose their algorithms and allocate, as PyTorch's notes
        on CUDA graphs advise. They move weights, statistics, momentum and gradients, so these are
        put back, and copies of the network in training mode; a step writes to nothing else that is
        read."""
        state = [*self.net.state_dict().values(), *optimizer_state(self.opt), self.t, self.loss]
        state += [p.grad for p in self.net.parameters() if p.grad is not None]
        state += [v for n in self.nets.values() if n.training for v in n.state_dict().values()]
        before = [v.clone() for v in state]
        for _ in range(3):
            f(*inputs)
            for tensor, value in zip(state, before):
                tensor.copy_(value)
        # graphs of a worker run one at a time, so they share their memory; what a part returns is
        # held, so that no other graph writes there
        memory = next((graph.pool() for graph, _ in self.graphs.values()), None)
        try:
            with garbage_collection_paused():  # a graph that is freed meanwhile would break it
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, memory, stream=self.stream):
                    value = tree_map(torch.Tensor.detach, f(*inputs))
            self.graphs[key] = graph, value
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            self.args.capture = False
            script, why = self.args.script, str(e).splitlines()[0]
            warning = f"{script}.py: its step cannot be a CUDA graph, so it runs without: {why}"
            print(warning, file=sys.stderr)


@contextlib.contextmanager
def garbage_collection_paused():
    """Collect no garbage inside the with block."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Pool:
    """Workers side by side: threads on the CPU; on a GPU one thread feeds their streams in turn."""

    def __init__(self, build, device, count, threads):
        """Build the workers by build().

        count: of workers, 0 for as many as the GPU's memory allows; threads: of each on the CPU."""
        self.build, self.device, self.grow = build, device, count == 0
        self.stopping, self.interrupt = False, Interrupt()
        self.workers = [build() for _ in range(max(1, count))]
        torch.set_num_threads(threads)
        self.threads, self.free = None, queue.SimpleQueue()  # workers that no thread has
        if device.type == "cpu":
            keep_freed_memory()
        if device.type == "cpu" and count > 1:
            start = {"initializer": torch.set_num_threads, "initargs": (threads,)}
            self.threads = ThreadPoolExecutor(count, **start)
            for worker in self.workers:
                self.free.put(worker)

    @staticmethod
    def plan(args):
        """Return (workers, threads of each).

        With --workers auto on the CPU one worker a core, at most 8, where Python's lock gets in the
        way; cores left over go to the operators of each. On a GPU 0: settled when the first has
        run."""
        if args.workers == "auto" and args.device != "cpu":
            return 0, CORES
        count = min(CORES, 8) if args.workers == "auto" else args.workers
        count = min(count, sampled_clients(args))
        if args.dataset == "imagenet-200" and args.device == "cpu":
            count = 1  # processes that decode images cannot be forked safely from several threads
        return count, max(1, CORES // count) if args.device == "cpu" else CORES

    def close(self):
        """End the threads."""
        self.stopping = True
        if self.threads:
            self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(CORES)

    def synchronise(self):
        """Wait for the GPU, so that what follows can be timed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def map(self, f, items):
        """Return f over items, in order, on the worker threads where there are several."""
        return (self.threads.map if self.threads else map)(f, items)

    def map_workers(self, f, clients):
        """Return [f(worker, client)] as Worker.map() does, on the threads where there are some."""
        if not self.threads:
            return [f(self.workers[0], client) for client in clients]

        def call(client):
            self.interrupt.check()
            with self.borrowed() as worker:
                return f(worker, client)

        return list(self.threads.map(call, clients))

    @contextlib.contextmanager
    def borrowed(self):
        """Lend a thread a worker that no other thread has."""
        worker = self.free.get()
        try:
            yield worker
        finally:
            self.free.put(worker)

    def train(self, clients, start):
        """Yield the Uploads of the clients, in order, each when it and those before it are done.

        start(worker, client): a generator as Worker.train() is. No client starts before all but
        a few a worker of those before it are yielded: what waits for a slow one is in memory."""
        return (upload for upload in self.sweeps(clients, start) if upload is not None)

    def sweeps(self, clients, start):
        """Yield as train() does, and None after each batch where the workers are no threads."""
        rounds = [functools.partial(start, client=client) for client in clients]
        return self._threaded(rounds) if self.threads else self._interleaved(rounds)

    @property
    def window(self):
        """How many clients may be trained at once, or have been and wait for one before them."""
        return 4 * len(self.workers)

    def _threaded(self, rounds):
        self.stopping = False

        def drain(start):
            with self.borrowed() as worker:
                batches = start(worker)
                try:
                    while not self.stopping:
                        self.interrupt.check()
                        next(batches)
                except StopIteration as stop:
                    return stop.value

        waiting, started = iter(rounds), deque()
        try:
            while True:
                room = self.window - len(started)
                started += [self.threads.submit(drain, r) for r in itertools.islice(waiting, room)]
                if not started:
                    return
                started[0].result()
                yield started.popleft().result()
        finally:  # an interrupt or an error: the others need not finish their clients
            self.stopping = True

    def _interleaved(self, rounds):
        waiting, running = deque(enumerate(rounds)), []
        uploads, due = {}, 0  # those that came before an earlier one wait for it
        free, added = list(self.workers), []  # by _grow(), just now: this is their first batch
        while waiting or running:
            while free and waiting and waiting[0][0] < due + self.window:
                (i, start), worker = waiting.popleft(), free.pop(0)
                running.append((i, worker, start(worker)))
            self.interrupt.check()
            for item in list(running):
                i, worker, batches = item
                try:
                    next(batches)
                except StopIteration as stop:
                    uploads[i] = stop.value
                    running.remove(item)
                    free.append(worker)
                except torch.OutOfMemoryError:
                    if worker not in added:
                        raise
                    self.synchronise()  # its step may still write to what is free then
                    torch.backends.cudnn.benchmark = False  # as at the end of a step
                    self.workers.remove(worker)
                    running.remove(item)
                    waiting = deque(sorted([*waiting, (i, rounds[i])]))  # it begins anew
            added = self._grow(len(waiting)) if self.grow else []
            free += added
            while due in uploads:
                yield uploads.pop(due)
                due += 1
            yield

    def _grow(self, waiting):
        """Add workers, now that the first has shown what one takes of the GPU's memory.

        At most 8, in 80% of what is free. Returns the new ones."""
        self.grow = False
        torch.cuda.synchronize(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        one = torch.cuda.max_memory_reserved(self.device)
        new = []
        with contextlib.suppress(torch.OutOfMemoryError):  # fewer will do
            for _ in range(min(waiting, 7, int(0.8 * free / one))):
                new.append(self.build())
        self.workers += new
        return new


def keep_freed_memory():
    """Let glibc keep what is freed for the next batch; other C libraries are left alone.

    As it comes, it gives back the end of the heap when more of it is free than a limit, 64 MB at
    most, and page faults of the next step may take a quarter of the time (docs/speed.md). Holds
    for the whole process, from then on."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: bytes that stay free at the end of the heap
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: larger blocks are taken and given back singly


def peak_memory(device):
    """Return the most bytes held so far: of the GPU by tensors, or of the host by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(
            device
        )  # a captured step's memory is not counted else
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


# --------------------------------------------------------------------------------------------------
# Partition: functions of the labels; each returns one int64 index array a client
# --------------------------------------------------------------------------------------------------


def indices_by_owner(owner, clients, order=None):
    """Return each client's samples, a list of index arrays.

    owner: (n,) the client of each sample; owner == clients means "assigned to no client".
    order: a permutation of the samples that every array follows; None: ascending."""
    order = np.arange(len(owner)) if order is None else order
    order = order[np.argsort(owner[order], kind="stable")]
    ends = np.cumsum(np.bincount(owner, minlength=clients + 1))
    return np.split(order, ends[:-1])[:-1]


def dirichlet_partition(labels, clients, alpha, seed, min_size=10):
    """Return a partition with label skew and unequal sizes (FedAlign sec. 3.2, MOON, FedMLB).

    Each class is cut among the clients in proportions p ~ Dir(alpha), where clients that have
    n / clients samples get nothing more (this rule is in the papers' code); drawn anew until every
    client has min_size samples. Where that does not come about, the fewest samples are moved that
    give every client min_size. labels: (n,) integers from 0 on. UserError for too few samples."""
    return deal_dirichlet(labels, clients, alpha, seed, min_size)[0]


def deal_dirichlet(labels, clients, alpha, seed, min_size):
    """Return the parts of dirichlet_partition, and how many of their samples were moved."""
    labels = np.asarray(labels)
    n = len(labels)
    if clients * min_size > n:
        smaller = " or a smaller --min-size" if min_size > 1 else ""
        raise UserError(
            f"argument --min-size: {n} samples cannot give {clients} clients {min_size} each; "
            f"use fewer --clients{smaller}"
        )
    rng = keyed("dirichlet", seed)
    counts, moved = _draw_dirichlet(np.bincount(labels), clients, alpha, min_size, rng), 0
    owner = np.empty(n, np.int64)
    for label, row in enumerate(counts):
        index = rng.permutation(np.flatnonzero(labels == label))
        owner[index] = np.repeat(np.arange(clients), row)
    order = rng.permutation(n)
    if counts.sum(0).min() < min_size:
        partitions = extra("partitions", f"--partition dirichlet for {clients} --clients")
        owner, moved = partitions.fill_up(owner, clients, min_size, order)
    return indices_by_owner(owner, clients, order), moved


def _draw_dirichlet(totals, clients, alpha, min_size, rng):
    """Draw counts as _dirichlet_counts() until no client is short of min_size samples.

    At the latest the 1000th draw counts; earlier that after which more than 20 clients a draw and
    100 besides were short. Of m on average none is short with probability e^-m, as of a Poisson
    distribution; not for clients * alpha < 1, where rounding can give a class to one client."""
    short = 0
    for draw in range(1, 1001):
        counts = _dirichlet_counts(totals, clients, alpha, rng)
        now = np.count_nonzero(counts.sum(0) < min_size)
        short += now
        if now == 0 or (short > 100 + 20 * draw and clients * alpha >= 1):
            break
    return counts


def _dirichlet_counts(totals, clients, alpha, rng):
    """Draw how many samples of each class go to each client, (classes, clients).

    totals: (classes,) samples of each class."""
    sizes = np.zeros(clients, np.int64)
    counts = np.zeros((len(totals), clients), np.int32)
    for row, total in zip(counts, totals):
        below_mean = sizes < totals.sum() / clients
        p = rng.dirichlet(np.full(clients, alpha)) * below_mean
        if not p.sum() > 0:  # all of the mass fell on full clients: share among the others
            p = below_mean.astype(float)
        ends = np.floor(np.cumsum(p / p.sum()) * total).astype(np.int64)
        ends[-1] = total
        row[:] = np.diff(ends, prepend=0)
        sizes += row
    return counts


def iid_partition(labels, clients, seed):
    """Return a random partition into parts of equal size, give or take one."""
    return np.array_split(keyed("iid", seed).permutation(len(labels)), clients)


def partition(data, args):
    """Return the clients' training indices as args.partition says: a list of int64 arrays.

    UserError when a client would get no sample, or data cannot be divided so."""
    parts = _split(data, args)
    for k, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(
                f"--partition {args.partition}: client {k} of {args.clients} gets no sample; "
                "use fewer --clients"
            )
    return parts


def client_tests(data, parts, args):
    """Return the test indices of each client with --client-test, else None."""
    if not args.client_test:
        return None
    return extra("partitions", "--client-test").client_test_indices(data, parts, args)


def no_writers(args):
    """Return the message for data whose samples have no writers."""
    return (
        f"--partition {args.partition}: --dataset {args.dataset} does not say who made each "
        f"sample; {', '.join(WRITERS[:-1])} and a folder of train/CLIENT/CLASS/* do"
    )


def _split(data, args):
    """Return the parts of the partition that args.partition names."""
    labels, clients, seed = data.y.numpy(), args.clients, args.data_seed
    if args.partition == "dirichlet":
        parts, args.moved = deal_dirichlet(labels, clients, args.alpha, seed, args.min_size)
        return parts
    if args.partition == "iid":
        return iid_partition(labels, clients, seed)
    return extra("partitions", f"--partition {args.partition}").split(data, args)


# --------------------------------------------------------------------------------------------------
# Networks: each an nn.Sequential of its blocks; net[:-1](x) are the features, net[-1](z) the logits
# --------------------------------------------------------------------------------------------------


class Classifier(nn.Linear):
    """The last layer: keeps all its outputs in every sub-network."""


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch, shortcut):
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x):
        return F.relu(self.branch(x) + self.shortcut(x))


class Concat(nn.ModuleList):
    """The channels of all modules' outputs."""

    def forward(self, x):
        return torch.cat([module(x) for module in self], 1)


class Head(nn.Sequential):
    """A block behind which FedMLB's authors do not branch, though it has parameters.

    It stands between the last branch point and the classifier."""


def _conv(inputs, outputs, size, stride=1):
    """Return a convolution without bias that keeps the size of the map at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _normed(norm, inputs, outputs, size, stride=1):
    """Return such a convolution and the normalisation behind it, a list."""
    return [_conv(inputs, outputs, size, stride), norm(outputs)]


def _bottleneck(inputs, planes, stride, norm):
    """Return the branch of a bottleneck block (1x1, 3x3, 1x1 convolutions) and its channels."""
    first = _normed(norm, inputs, planes, 1)
    second = _normed(norm, planes, planes, 3, stride)
    third = _normed(norm, planes, 4 * planes, 1)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *third), 4 * planes


def _basic(inputs, planes, stride, norm):
    """Return the branch of a basic block (two 3x3 convolutions) and its channels."""
    first = _normed(norm, inputs, planes, 3, stride)
    return nn.Sequential(*first, nn.ReLU(), *_normed(norm, planes, planes, 3)), planes


def global_pool():
    """Return the block of global average pooling, (name, module)."""
    return "pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _resnet(stem, block, depths, planes, norm=nn.BatchNorm2d):
    """Return the blocks of a residual network, [(name, module), ...], and its features' width.

    They are the stem, a stage of each of depths and global average pooling. planes: of the first
    stage; each later one has twice as many."""
    blocks = [("stem", stem)]
    width = stem[0].out_channels
    for i, depth in enumerate(depths):
        stage = []
        for j in range(depth):
            stride = 2 if i > 0 and j == 0 else 1
            branch, outputs = block(width, planes * 2**i, stride, norm)
            shortcut = nn.Identity()
            if stride != 1 or width != outputs:
                shortcut = nn.Sequential(*_normed(norm, width, outputs, 1, stride))
            stage.append(Residual(branch, shortcut))
            width = outputs
        blocks.append((f"stage{i + 1}", nn.Sequential(*stage)))
    return [*blocks, global_pool()], width


def he_init(blocks, width):
    """Draw the convolutions of blocks anew as He et al. (ICCV 2015) do; return blocks and width."""
    for module in nn.Sequential(OrderedDict(blocks)).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return blocks, width


def _stem(channels, width, norm=nn.BatchNorm2d):
    """Return the 3x3 stem of a residual network for small images."""
    return nn.Sequential(*_normed(norm, channels, width, 3), nn.ReLU())


def resnet56(channels, size):
    """FedML's bottleneck ResNet56, FedAlign's network for CIFAR; not the ResNet-56 of He et al."""
    return he_init(*_resnet(_stem(channels, 16), _bottleneck, (6, 6, 6), 16))


def resnet8(channels, size):
    """He et al.'s 6n+2 layers (CVPR 2016, Sec. 4.2) for n = 1, with stride 2 in front for speed."""
    conv = _conv(channels, 16, 3, 2)
    stem = nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU())
    return he_init(*_resnet(stem, _basic, (1, 1, 1), 16))


def resnet18(channels, size):
    """ResNet-18 with the ImageNet stem (FedAlign, ImageNet-200)."""
    conv = _conv(channels, 64, 7, 2)
    stem = nn.Sequential(conv, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return he_init(*_resnet(stem, _basic, (2, 2, 2, 2), 64))


def resnet18_gn(channels, size):
    """ResNet-18 with a 3x3 stem and GroupNorm of two groups (FedMLB)."""
    norm = functools.partial(nn.GroupNorm, 2)
    return _resnet(_stem(channels, 64, norm), _basic, (2, 2, 2, 2), 64, norm)


def resnet50(channels, size):
    """ResNet-50 with a 3x3 stem (MOON, FedCKA)."""
    return he_init(*_resnet(_stem(channels, 64), _bottleneck, (3, 4, 6, 3), 64))


def _plain(channels, size, widths, kernel, padding, hidden):
    """Return the blocks of a plain CNN, [(name, module), ...], and the width of its features.

    A convolution for each of widths, after the pooling of the one before, so that a block's output
    is post-ReLU and pre-pooling; then a fully connected layer for each of hidden, the last of them
    without ReLU when there are several. UserError when images of size pixels are too small."""
    blocks = []
    for i, width in enumerate(widths):
        conv = nn.Conv2d(channels, width, kernel, padding=padding)
        layers = [conv, nn.ReLU()]
        if i > 0:
            layers.insert(0, nn.MaxPool2d(2))
            size = size // 2
        blocks.append((f"conv{i + 1}", nn.Sequential(*layers)))
        channels = width
        size = size + 2 * padding - kernel + 1
        if size < 2:
            raise UserError("--image-size: too small for this --model")
    features = channels * (size // 2) ** 2
    for i, width in enumerate(hidden):
        layers = [nn.Linear(features, width)]
        if i == 0:
            layers = [nn.MaxPool2d(2), nn.Flatten(), *layers]
        if i == 0 or i < len(hidden) - 1:
            layers.append(nn.ReLU())
        blocks.append((f"fc{i + 1}", nn.Sequential(*layers)))
        features = width
    return blocks, features


def cnn(channels, size):
    """FedCKA's seven-layer CNN; its last hidden layers are a projection head."""
    return _plain(channels, size, (16, 32), 5, 0, (120, 84, 84, 256))


def cnn_moon(channels, size):
    """MOON's simple CNN; its last hidden layers are a projection head."""
    return _plain(channels, size, (6, 16), 5, 0, (120, 84, 84, 256))


def cnn_mcmahan(channels, size):
    """The CNN of McMahan et al. (AISTATS 2017), rFedAvg's for images."""
    return _plain(channels, size, (32, 64), 5, 2, (512,))


NETS = {  # name: a function of (channels, size) that returns blocks and the width of the features
    "resnet56": resnet56,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
    "resnet50": resnet50,
    "cnn": cnn,
    "cnn-moon": cnn_moon,
    "cnn-mcmahan": cnn_mcmahan,
}
# of extras/backbones.py and extras/text.py
EXTRA_NETS = {name: "backbones" for name in ("vgg9", "mobilenet", "shufflenet", "squeezenet")}
EXTRA_NETS["lstm"] = "text"
WITHOUT_WIDTHS = {  # networks of which at_width() makes no narrow one: why
    "mobilenet": "grouped convolutions",
    "shufflenet": "grouped convolutions",
    "squeezenet": "concatenated maps",
    "lstm": "an LSTM, which reads text,",
}


def build_net(name, classes, channels=3, size=32, projection=0):
    """Return the network of that name as an nn.Sequential of its blocks, the last the classifier.

    channels, size: of images; of text the number of words and the width of their vectors, which are
    zero. projection: width of the output of a two-layer head before the classifier (MOON), 0: none.
    UserError when the network's file is missing or the images are too small for it."""
    if name in EXTRA_NETS:
        make = getattr(extra(EXTRA_NETS[name], f"--model {name}"), name)
    else:
        make = NETS[name]
    blocks, features = make(channels, size)
    if projection:
        hidden = nn.Linear(features, features)
        head = nn.Sequential(hidden, nn.ReLU(), nn.Linear(features, projection))
        blocks.append(("projection", head))
        features = projection
    return nn.Sequential(OrderedDict([*blocks, ("classifier", Classifier(features, classes))]))


def blocks(module, names):
    """Return a module as an nn.Sequential that shares its parameters and computes the same.

    Its blocks begin where the parts of those names do; the last is its last linear layer alone."""
    return extra("networks", "common.blocks").blocks(module, names)


def net_for(data, args):
    """Return the network that args name for data, with the vectors of its words if it is text."""
    if data.words is None:
        if data.x.ndim != 4:
            raise UserError("argument --model: all but lstm are for images; pass net= to run()")
        channels, _, size = data.x.shape[1:]
        return build_net(args.model, data.classes, channels, size, args.projection)
    text = extra("text", "--model lstm")
    vectors = text.word_vectors(args.vectors, data.words, args.data_seed)
    net = build_net("lstm", data.classes, *vectors.shape, args.projection)
    net[0][0].vectors.copy_(vectors)
    return net


def has_batch_norm(net):
    """Return whether a layer of net is batch norm."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())


def make_divisible(channels, width):
    """Return the channels of a layer at a fraction width of its channels.

    A multiple of 8, not under 90% of the exact value, at most all (MobileNetV2's rule)."""
    if width >= 1:
        return channels
    exact = channels * width
    new = max(8, int(exact + 4) // 8 * 8)
    return min(channels, new + 8 if new < 0.9 * exact else new)


def at_width(module, x, width):
    """Return module(x) by its narrow sub-network, which uses the leading channels of every layer.

    width, in (0, 1]: a layer of c channels keeps the first make_divisible(c, width); x has as many
    as the sub-network takes. At width 0.25 a convolution with weight (64, 32, 3, 3) computes with
    weight[:16, :8], and a linear layer behind 64 flattened maps of 5x5, with weight (120, 1600),
    with weight[:32, :400], 25 inputs of each of 16 channels. Gradients reach those slices.

    Batch norm uses the batch's statistics and leaves the running ones alone. At width 1 and in
    training mode the result equals module(x) bit for bit. UserError for layers that cannot be
    sliced."""
    tensors = {}
    previous = None  # outputs, at full width, of the convolution or linear layer before
    for name, layer in module.named_modules():
        prefix = name + "." if name else ""
        for key, tensor in _narrow(layer, width, previous).items():
            tensors[prefix + key] = tensor
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            previous = layer.weight.shape[0]
    return torch.func.functional_call(module, tensors, (x,))


def _narrow(layer, width, previous):
    """Return the tensors of a layer's sub-network, {name: leading slice, or None for a buffer}.

    previous: outputs of the convolution or linear layer before, None if there is none."""
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        return _narrow_weights(layer, width, previous)
    if isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm)):
        channels = make_divisible(layer.weight.shape[0], width)
        tensors = {"weight": layer.weight[:channels], "bias": layer.bias[:channels]}
        # batch norm without its buffers computes with the statistics of the batch
        return tensors | dict.fromkeys(name for name, _ in layer.named_buffers(recurse=False))
    has_parameters = next(layer.parameters(recurse=False), None) is not None
    if width < 1 and (has_parameters or isinstance(layer, Concat)):
        raise UserError(
            f"a sub-network of {type(layer).__name__} is not defined; use another --model"
        )
    return {}


def _narrow_weights(layer, width, previous):
    """Return the leading slices of a convolution's or linear layer's weight and bias."""
    if getattr(layer, "groups", 1) != 1 and width < 1:
        raise UserError("a sub-network of grouped convolutions is not defined; use another --model")
    outputs, inputs = layer.weight.shape[:2]
    positions = 1  # inputs of each channel: several in a linear layer behind flattened maps
    if isinstance(layer, nn.Linear) and previous:
        positions = inputs // previous
    inputs = make_divisible(inputs // positions, width) * positions
    if not isinstance(layer, Classifier):
        outputs = make_divisible(outputs, width)
    tensors = {"weight": layer.weight[:outputs, :inputs]}
    if layer.bias is not None:
        tensors["bias"] = layer.bias[:outputs]
    return tensors


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


STATISTICS = {  # mean and standard deviation per channel, pixels in [0, 1]
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "mnist": ((0.1307,), (0.3081,)),
    "emnist": ((0.5,), (0.5,)),
    "femnist": ((0.5,), (0.5,)),  # of rFedAvg's code for EMNIST
    "imagenet-200": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
SHAPES = {  # classes, channels and pixels of a side of the images of data sets
    "cifar100": (100, 3, 32),
    "cifar10": (10, 3, 32),
    "mnist": (10, 1, 28),
    "emnist": (62, 1, 28),
    "femnist": (62, 1, 28),
    "glyphs": (62, 3, 32),
    "tiny-imagenet": (200, 3, 64),
    "imagenet-200": (200, 3, 224),
}
WRITERS = ("femnist", "sent140", "glyphs", "folder")  # data sets that may say who made what
EXTRA_DATASETS = {  # data sets read by extras/FILE.py
    "folder": "images",
    "femnist": "readers",
    "tiny-imagenet": "readers",
    "imagenet-200": "readers",
    "sent140": "text",
}


def extra(name, flag):
    """Import extras/NAME.py, a file that only some runs need, and return the module.

    flag: what asks for it, such as "--dataset femnist". UserError when the file is not there."""
    return side_module(f"extras.{name}", flag)


def side_module(name, flag):
    """Import a module that lies beside this file, because of a flag; UserError if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name not in (name, "extras"):  # a package that the file itself imports
            raise
        file = name.replace(".", "/") + ".py"
        raise UserError(f"{file}: needed by {flag}; copy it beside common.py") from None


@dataclasses.dataclass
class Data:
    """A data set in memory.

    Images x are (n, channels, height, width) uint8; other tensors are of any shape, and are not
    normalised: floats, which become float32, and integers. Labels y are (n,) integers. Of text x is
    (n, steps) int16: numbers of words, 0 after the last. With paths the training images stay on
    disk, and x is (0, channels, height, width)."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    mean: torch.Tensor = None  # (channels, 1, 1), of uint8 in [0, 1]; computed when not given
    std: torch.Tensor = None
    writers: np.ndarray = None  # (n,) a number for who made each training sample
    writers_test: np.ndarray = None
    paths: list = None  # (n,) of files
    words: list = None  # of text, those with numbers 2, 3, ...; 1 stands for all others
    names: list = None  # of the classes
    x_val: torch.Tensor = None  # samples by which best.pt is chosen, of --validation
    y_val: torch.Tensor = None

    def __post_init__(self):
        x, x_test, y, y_test = map(torch.as_tensor, (self.x, self.x_test, self.y, self.y_test))
        if x.is_floating_point() and x_test.is_floating_point():
            x, x_test = x.float(), x_test.float()
        self.x, self.x_test, self.y, self.y_test = x, x_test, y, y_test
        self._check()
        self.y, self.y_test = y.long(), y_test.long()
        if self.words is not None or x.dtype != torch.uint8:
            return
        if self.mean is None:
            self.mean, self.std = pixel_statistics(x)
        channels = [-1] + [1] * (x.ndim - 2)
        self.mean = torch.as_tensor(self.mean, dtype=torch.float32).view(channels)
        self.std = torch.as_tensor(self.std, dtype=torch.float32).view(channels)

    @staticmethod
    def of(train, test):
        """Return the Data of two map-style data sets, as torch.utils.data's, that give (x, y).

        UserError names the sample that is of another shape, or has no integer for a label."""
        return extra("own", "Data.of").of(train, test)

    def _check(self):
        """Raise UserError where samples and labels do not go together."""
        for x in (self.x, self.x_test):
            if (x.shape[1:], x.dtype) != (self.x.shape[1:], self.x.dtype):
                raise UserError("data: x_test must be of the shape and type of x, but for length")
            if x.dtype == torch.bool or (x.is_floating_point() and not x.isfinite().all()):
                raise UserError("data: samples must be finite numbers, not bool, NaN or infinity")
            if x.ndim < 1 + (x.dtype == torch.uint8):
                raise UserError("data: uint8 samples have channels, (samples, channels, ...)")
        train = len(self.paths) if self.paths else len(self.x)
        if (train, len(self.x_test)) != (len(self.y), len(self.y_test)):
            raise UserError("data: there must be as many labels as samples")
        for y in (self.y, self.y_test):
            integers = y.ndim == 1 and not y.is_floating_point() and y.dtype != torch.bool
            if not (integers and len(y) and 0 <= y.min() <= y.max() < self.classes):
                labels = f"integers from 0 to {self.classes - 1}, (samples,)"
                raise UserError(f"data: labels must be {labels}, one at least")

    def images(self, batches, seeds=None):
        """Yield the training samples x[index] for each index of batches.

        batches: integer tensors or arrays. seeds: arrays like them, by which images on disk are
        cropped, recoloured and flipped; without seeds they are cut to their centre. Images on disk
        come on the CPU, decoded ahead by processes; all others on the device of x."""
        if self.paths:
            readers = extra("readers", "--dataset imagenet-200")
            yield from readers.stream(self.paths, self.image_size, batches, seeds)
            return
        for index in batches:
            yield self.x[torch.as_tensor(index).to(self.x.device)]

    @property
    def image_size(self):
        """Pixels of a side. UserError for text and other data."""
        if self.words is not None or self.x.ndim != 4:
            kind = "text" if self.words is not None else "not of images"
            raise UserError(f"the data set is {kind}, and this method needs images")
        return self.x.shape[-1]

    def to(self, device):
        """Return the data set with its tensors on device."""
        tensors = {k: v.to(device) for k, v in vars(self).items() if torch.is_tensor(v)}
        return dataclasses.replace(self, **tensors)

    def normalise(self, x):
        """Return images x, (batch, channels, height, width) uint8, as float32 of mean 0 and std 1.

        Other numbers stay as they are; so does text, but for the padding that no text of the batch
        needs: it is cut off, except on a GPU, which would have to wait for the length."""
        if x.dtype == torch.uint8:
            return (x.float() / 255 - self.mean) / self.std
        if self.words is None or x.is_cuda:
            return x
        return x[:, : max(1, int((x != 0).sum(1).max()))]


def pixel_statistics(x):
    """Return mean and standard deviation, (channels,) float64 each, of uint8 images in [0, 1].

    From histograms, since x as floats would need four times its memory."""
    histograms = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in x.unbind(1)])
    shares = histograms.double()
    shares = shares / shares.sum(1, keepdim=True)
    values = torch.arange(256.0, dtype=torch.float64) / 255
    mean = shares @ values
    variance = shares @ values.square() - mean.square()
    return mean, variance.clamp(min=1e-6).sqrt()


def data_digests(data, parts):
    """Return the checksums by which a resumed run knows its data, {what: eight digits}.

    data: a Data; parts: the clients' indices. Of images on disk names and sizes count."""
    files = [
        (pathlib.PurePath(path).parts[-3:], os.path.getsize(path)) for path in data.paths or []
    ]
    more = [data.words, files]
    if data.mean is not None:  # rounded, as another machine may multiply floats otherwise
        more += torch.cat([data.mean, data.std]).flatten().double().round(decimals=4).tolist()
    lengths = torch.tensor([len(part) for part in parts])
    held = [[data.x_val], [data.y_val]] if data.y_val is not None else [[], []]
    return {
        "labels": checksum([data.y, data.y_test, *held[1]], data.classes),
        "samples": checksum([data.x, data.x_test, *held[0]], more),
        "partition": checksum([lengths, torch.from_numpy(np.concatenate(parts))]),
    }


def checksum(tensors, more=None):
    """Return a CRC-32 of tensors and of more, a plain value, as eight hexadecimal digits."""
    crc = zlib.crc32(repr(more).encode())
    for tensor in tensors:
        crc = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"


def load_data(args):
    """Return the data set that args.dataset names, on the CPU.

    With --partition natural and natural-iid the test samples are those of the writers that take
    part, if the data set names its writers. UserError when the data set cannot be had."""
    data = _read_data(args)
    if args.normalise != "dataset":
        images = extra("images", f"--normalise {args.normalise}")
        data = images.with_statistics(data, args.normalise)
    data = hold_out(data, args)
    if args.partition in NATURAL and data.writers_test is not None:
        partitions = extra("partitions", f"--partition {args.partition}")
        data = partitions.with_test_writers(data, args)
    if args.image_size:
        data = extra("images", "--image-size").resized(data, args.image_size)
    if data.words is None and data.x.shape[-1] != data.x.shape[-2]:
        raise UserError(
            f"the images are {data.x.shape[-1]}x{data.x.shape[-2]} pixels; "
            "--image-size makes them square"
        )
    return data


def hold_out(data, args):
    """Return data with what --validation asks for, a share of the training samples, in x_val."""
    if args.validation:
        data = extra("partitions", "--validation").hold_out(data, args)
    return data


def _read_data(args):
    """Return the data set as its files hold it."""
    root = pathlib.Path(args.data_dir)
    if args.dataset == "glyphs":
        return glyphs(seed=args.data_seed)
    if args.dataset in EXTRA_DATASETS:
        module = extra(EXTRA_DATASETS[args.dataset], f"--dataset {args.dataset}")
        return module.load(args)
    return _torchvision(args.dataset, root)


def file_status(path):
    """Return a file's os.stat(); UserError for a pipe or a device, of which no read may end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path}: not a regular file")
    return status


def _torchvision(name, root):
    """Return CIFAR or (E)MNIST as torchvision reads it, downloaded into root where missing."""
    from torchvision import datasets

    folders = {"cifar100": "cifar-100-python", "cifar10": "cifar-10-batches-py"}
    for path in (root / folders.get(name, name.upper())).rglob("*"):
        file_status(path)
    kind = {
        "cifar100": datasets.CIFAR100,
        "cifar10": datasets.CIFAR10,
        "mnist": datasets.MNIST,
        "emnist": functools.partial(datasets.EMNIST, split="byclass"),
    }[name]
    try:
        train = kind(root, train=True, download=True)
        test = kind(root, train=False, download=True)
    except Exception as e:  # no network, a damaged archive, files that are not what their names say
        raise UserError(
            f"--dataset {name} could not be loaded from or downloaded into {root} ({e}); "
            "put torchvision's files there, or use --dataset folder or glyphs"
        ) from None
    images = [torch.as_tensor(part.data) for part in (train, test)]
    images = [x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous() for x in images]
    if name == "emnist":  # whose files hold columns first
        images = [x.transpose(2, 3).contiguous() for x in images]
    labels = [torch.as_tensor(part.targets) for part in (train, test)]
    data = Data(images[0], labels[0], images[1], labels[1], len(train.classes), *STATISTICS[name])
    return dataclasses.replace(data, names=list(train.classes))


CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
GLYPHS = (20_000, 4_000)  # training and test images


def glyphs(train=None, test=None, seed=0):
    """Return the 62 characters 0-9 A-Z a-z as 32x32 RGB images, drawn with Pillow's own font.

    train, test: how many images, GLYPHS by default. Each is drawn by a writer with a slant, size,
    stroke and colours of his own, about 100 training images a writer. Deterministic by seed."""
    return _glyphs((train or GLYPHS[0], test or GLYPHS[1]), seed)


@functools.lru_cache(1)
def _glyphs(sizes, seed):
    """Return the data set of glyphs; sizes: (training images, test images)."""
    n = sum(sizes)
    writers = max(2, n // 120)
    rng = keyed("glyphs", seed)
    y = rng.integers(62, size=n)
    writer = rng.integers(writers, size=n)

    def style(spread_writers, spread_images):
        """Draw a writer's habit, and how closely each of his images follows it: (n,) float32."""
        habit = rng.normal(0, spread_writers, writers)
        return (habit[writer] + rng.normal(0, spread_images, n)).astype(np.float32)

    slant = style(0.25, 0.08)
    turn = style(0.12, 0.08)  # radians
    weight = style(0.4, 0.1) + 0.5  # of the stroke: 0 thin, 1 bold
    size = 1.1 + style(0.12, 0.06)
    stretch = 1 + style(0.10, 0.05)  # of the height alone
    right = style(0.03, 0.06)  # shifts, in half image sides
    down = style(0.03, 0.06)
    ink = rng.uniform(0, 0.35, (writers, 3))  # RGB
    paper = rng.uniform(0.6, 1, (writers, 3))
    ink = (ink[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32)
    paper = (paper[writer] + rng.normal(0, 0.05, (n, 3))).astype(np.float32)

    y = torch.from_numpy(y)
    weight = torch.from_numpy(weight).clamp(0, 1).view(n, 1, 1, 1)
    ink = torch.from_numpy(ink).view(n, 3, 1, 1)
    paper = torch.from_numpy(paper).view(n, 3, 1, 1)
    theta = _affine_maps(turn, slant, size, stretch, right, down)
    thin = _stencils(64)
    bold = F.max_pool2d(thin, 3, 1, 1)
    images = []
    for i in torch.arange(n).split(2000):
        stroke = torch.lerp(thin[y[i]], bold[y[i]], weight[i])
        grid = F.affine_grid(theta[i], (len(i), 1, 32, 32), align_corners=False)
        mask = F.grid_sample(stroke, grid, align_corners=False)
        image = torch.lerp(paper[i], ink[i], mask)
        image += torch.from_numpy(rng.standard_normal(image.shape, np.float32)) * 0.08
        images.append((image.clamp(0, 1) * 255).round().byte())
    x, x_test = torch.cat(images).split(sizes)
    y, y_test = y.split(sizes)
    writers, writers_test = np.split(writer, sizes[:1])
    fields = {"writers": writers, "writers_test": writers_test, "names": [*CHARACTERS]}
    return Data(x.clone(), y, x_test.clone(), y_test, 62, **fields)


def _stencils(side):
    """Return the characters, white on black: (62, 1, side, side) float32 in [0, 1]."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=44)
    stencils = np.zeros((62, 1, side, side), np.float32)
    for i, character in enumerate(CHARACTERS):
        image = Image.new("L", (side, side))
        ImageDraw.Draw(image).text((side / 2, side / 2), character, 255, font, anchor="mm")
        stencils[i, 0] = np.asarray(image) / 255
    return torch.from_numpy(stencils)


def _affine_maps(turn, slant, size, stretch, right, down):
    """Return the maps (n, 2, 3) from a pixel's place in the image to its place in the stencil.

    A rotation by turn, times a shear by slant, times scales 1 / size and stretch, and a shift; all
    arguments (n,)."""
    cos = np.cos(turn) / size
    sin = np.sin(turn) / size
    entries = [
        cos,  # the stencil's x from the image's x
        sin + slant * cos,  # x from y
        right,
        -sin * stretch,  # y from x
        (cos - slant * sin) * stretch,  # y from y
        down,
    ]
    return torch.from_numpy(np.stack(entries, 1)).view(-1, 2, 3)


PAD = 4  # of crop, at 32x32 pixels and at Tiny-ImageNet's 64x64 alike (FedMLB's code)
CHARACTER_DATASETS = ("mnist", "emnist", "femnist", "glyphs")


def resolve_augment(args):
    """Return the augmentations in force, {name: setting}.

    crop, flip -> True; rotate -> degrees; seed -> True where files are augmented as they are
    decoded (imagenet-200). auto is nothing for text, and for characters, since a mirrored one is
    another one."""
    if args.dataset == "imagenet-200":
        return {"seed": True} if args.augment == "auto" else {}
    names = args.augment.split(",")
    if args.augment == "auto":
        plain = args.dataset.startswith((*CHARACTER_DATASETS, "sent140", "own-"))
        names = [] if plain else ["crop", "flip"]
    augment = {}
    for name in names:
        if name.startswith("rotate"):
            augment["rotate"] = int(name.removeprefix("rotate"))
        elif name != "none":
            augment[name] = True
    return augment


def draw_augment(augment, rng, shape, size):
    """Return the random numbers of an augmentation, {name: array}, one entry an image.

    augment: as resolve_augment returns it. rng: a numpy Generator. shape: of each array; crop has
    a last axis of two more, its row and column. size: pixels of a side."""
    draws = {}
    if "seed" in augment:
        draws["seed"] = rng.integers(2**62, size=shape)
    if "rotate" in augment:
        degrees = augment["rotate"]
        draws["rotate"] = rng.uniform(-degrees, degrees, shape).astype(np.float32)
    if "crop" in augment:
        draws["crop"] = rng.integers(2 * PAD + 1, size=(*shape, 2))
    if "flip" in augment:
        draws["flip"] = rng.random(shape) < 0.5
    return draws


def apply_augment(x, draws):
    """Return x, (batch, channels, size, size) uint8, rotated, cropped and flipped in that order.

    draws: tensors as draw_augment's arrays, one entry an image; each image is changed by its own,
    as torchvision's RandomRotation, RandomCrop(padding=4) and RandomHorizontalFlip would."""
    if not draws:
        return x
    b, c, size, _ = x.shape
    if "rotate" in draws:
        turn = draws["rotate"] * (math.pi / 180)
        cos, sin, zero = turn.cos(), turn.sin(), torch.zeros_like(turn)
        theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(b, 2, 3)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        x = F.grid_sample(x.float(), grid, "nearest", align_corners=False).byte()
    if "crop" in draws:
        steps = torch.arange(size, device=x.device)
        rows = draws["crop"][:, 0, None] + steps  # (batch, size)
        columns = draws["crop"][:, 1, None] + steps
        pixels = (rows[:, :, None] * (size + 2 * PAD) + columns[:, None, :]).view(b, 1, -1)
        x = F.pad(x, (PAD,) * 4).flatten(2)
        x = x.gather(2, pixels.expand(b, c, -1)).view(b, c, size, size)
    if "flip" in draws:
        x = torch.where(draws["flip"].view(b, 1, 1, 1), x.flip(3), x)
    return x


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


SPELLINGS = {  # of the papers' repositories; _ and - are interchangeable in every flag
    "clients": "client-number n-parties num-of-clients",
    "sample": "client-sample sample-fraction participation-rate",
    "rounds": "comm-round",
    "alpha": "partition-alpha beta dirichlet-alpha",
    "weight-decay": "wd",
    "epochs": "local-epochs",
}
ALIASES = {word: flag for flag, words in SPELLINGS.items() for word in words.split()}
DATASETS = "cifar100 cifar10 mnist emnist femnist tiny-imagenet imagenet-200 sent140".split()
AUGMENT_HELP = "none, or a list of crop, flip, rotateDEGREES; auto: crop,flip but for characters"
NATURAL = ("natural", "natural-iid")  # partitions that ask who made each sample
# Flags that may change when a run is resumed; all others decide the result
FREE_ON_RESUME = {*"rounds out resume quiet data_dir checkpoint_every save_clients workers".split()}


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog):
        super().__init__(prog, max_help_position=30, width=100)

    def _get_help_string(self, action):
        plain = action.default is None or action.default is False
        text = action.help if plain else super()._get_help_string(action)
        return f"{', '.join(action.choices)}: {text}" if action.choices else text

    def _metavar_formatter(self, action, default):
        if action.option_strings:
            default = "N" if action.type else "NAME"
        name = action.metavar or default
        return lambda count: (name,) * count


class PlainParser(argparse.ArgumentParser):
    """argparse with one-line errors, whose --help opens with the description."""

    def __init__(self, doc, **options):
        options = {"usage": argparse.SUPPRESS, "formatter_class": _Help, **options}
        super().__init__(description=doc, allow_abbrev=False, **options)

    def error(self, message):
        end(f"{self.prog}: error: {' '.join(self.hinted(message).split())}", 2)

    def hinted(self, message):
        """Return a message with the flag that is near to one that is unknown."""
        unknown = re.match(r"unrecognized arguments: --([^ =]+)", message)
        if unknown:
            with contextlib.suppress(ModuleNotFoundError):  # where extras/ was not copied
                suggestion = importlib.import_module("extras.spellings").suggestion
                message += suggestion(unknown[1], self._option_string_actions)
        return message


class Parser(PlainParser):
    """The parser of a method script, with the aliases above.

    args.script is the script's name, args.argv the words of the command line without --out and
    --resume, args.shell whether they came from there. With --resume the words of the run's own
    command come first. A mistake in words given from Python is a UserError."""

    def __init__(self, doc, script, **options):
        self.script, self.shell = pathlib.Path(script).stem, True
        super().__init__(doc, prog=f"{self.script}.py", **options)
        self._optionals.title = "flags of this script"

    def error(self, message):
        if self.shell:
            super().error(message)
        raise UserError(self.hinted(message)) from None

    def parse_args(self, argv=None):
        self.shell = argv is None
        if isinstance(argv, argparse.Namespace):  # of args_for()
            if argv.script != self.script:
                self.error(f"these are flags of {argv.script}.py")
            return argv
        if isinstance(argv, dict):  # flags by name, of args_for()
            argv = extra("own", "args_for").words(self, argv)
        words = [canonical(word) for word in (sys.argv[1:] if self.shell else argv)]
        try:
            if "--resume" in words:  # first, for the record may have flags that are required
                words = [*recorded_words(self._place(words), self.script), *words]
            args = super().parse_args(words)
            args.script, args.argv, args.shell = self.script, without_place(words), self.shell
            args.capture = args.graph  # until a capture fails
            args.moved = 0  # samples, until a partition needs it
            if args.server_lr is None:
                args.server_lr = 0.01 if args.server == "adam" else 1.0
            if args.server_momentum is None:
                args.server_momentum = 0.9 if args.server == "adam" else 0.4
            if args.precision is None:
                args.precision = "fp32" if args.device == "cpu" else "tf32"
            check_flags(args)
        except UserError as e:
            self.error(str(e))
        return args

    def _place(self, words):
        """Return what words say for --out."""
        parser = PlainParser(None, prog=self.prog, add_help=False)
        parser.add_argument("--out")
        parser.error = self.error
        return parser.parse_known_args(words)[0].out


def check_flags(args):
    """Raise UserError where flags do not go together."""

    def refuse(mistaken, message):
        if mistaken:
            raise UserError(f"argument --{message}")

    growth = (args.rounds - 1) * math.log(args.lr_decay)
    overflows = growth > 0 and math.log(args.lr) + growth > 709
    refuse(overflows, "lr-decay: in the last of the --rounds the learning rate overflows")
    text, lstm, split = args.dataset == "sent140", args.model == "lstm", args.partition == "file"
    plain = args.augment in ("auto", "none")
    refuse(split and not args.split_file, "split-file: needed by --partition file")
    refuse(args.validation and split, "validation: not with --partition file, which deals all")
    refuse(args.split_file and not split, "split-file: only read by --partition file")
    refuse(args.partial_split and not split, "partial-split: only for --partition file")
    leaky = text and args.partition == "natural"
    refuse(args.leak and not leaky, "leak: only for --dataset sent140 with --partition natural")
    refuse(text and args.image_size, "image-size: of images, and sent140 is text")
    refuse(text and not plain, "augment: of images, and sent140 is text")
    refuse(text and args.normalise != "dataset", "normalise: of images, and sent140 is text")
    stream = args.dataset == "imagenet-200"
    refuse(stream and not plain, "augment: takes auto or none for imagenet-200")
    by_writer = args.partition in NATURAL
    refuse(args.users and not by_writer, "users: only read by --partition natural and natural-iid")
    few = args.users and args.users < args.clients
    refuse(few, f"users: {args.users} is less than the {args.clients} --clients")
    refuse(text and not lstm, "model: --dataset sent140 is text; use lstm")
    refuse(lstm and not text, f"model: lstm is for text (sent140), not for {args.dataset}")
    refuse(args.vectors and not lstm, "vectors: only read by --model lstm")
    glove = "glove.6B.300d.txt of https://nlp.stanford.edu/data/glove.6B.zip, or random"
    refuse(lstm and not args.vectors, f"vectors: needed by --model lstm: {glove}")


def recorded_words(out, script):
    """Return the words of the command that began the run in the folder out, a run of script."""
    if not out:
        raise UserError("argument --resume: name the run to continue with --out")
    config = read_config(pathlib.Path(out))
    if config["script"] != script:
        raise UserError(f"--out {out}: a run of {config['script']}.py, not of {script}.py")
    return config["argv"]


def flag_values(args):
    """Return the flags of args as {name: value}, without what else the parser noted there."""
    noted = ("script", "argv", "shell", "capture", "moved")
    return {k: v for k, v in vars(args).items() if k not in noted}


def without_place(words):
    """Return words without --out, its value and --resume."""
    others, skip = [], False
    for word in words:
        if not skip and word != "--resume" and word.partition("=")[0] != "--out":
            others.append(word)
        skip = word == "--out"
    return others


def canonical(word):
    """Return a flag as this project spells it; other words stay as they are."""
    if not word.startswith("--"):
        return word
    name, eq, value = word[2:].partition("=")
    name = name.replace("_", "-")
    return "--" + ALIASES.get(name, name) + eq + value


def number(kind, low, high=None, open_low=False):
    """Return an argparse type: an int or a finite float in [low, high], or (low, high]."""
    top = high or (2**31 - 1 if kind is int else torch.finfo(torch.float32).max)

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if low <= value <= top and not (open_low and value == low):
            return value
        what = "an integer" if kind is int else "a number"
        lower = f"above {low}" if open_low else f"of at least {low}"
        upper = f" and at most {top}" if high or value > top else ""
        raise argparse.ArgumentTypeError(f"must be {what} {lower}{upper}, not {text[:40]!r}")

    return parse


def integers(low, high=None):
    """Return an argparse type: integers in [low, high], separated by commas."""
    return lambda text: [number(int, low, high)(word) for word in text.split(",")]


def augmentation(text):
    """An argparse type: what --augment takes."""
    for name in [] if text in ("none", "auto") else text.split(","):
        if not re.fullmatch(r"crop|flip|rotate([1-9]\d?|1[0-7]\d|180)", name):
            raise argparse.ArgumentTypeError(
                "takes auto, none, or a list of crop, flip and rotateDEGREES, such as "
                f"rotate10,crop,flip, not {text!r}"
            )
    return text


def worker_count(text):
    """An argparse type: auto or a number of workers."""
    return text if text == "auto" else number(int, 1)(text)


def device_name(text):
    """An argparse type: cpu or cuda:N, of auto, cpu, cuda or cuda:N."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if text == "cpu":
        return text
    cuda = re.fullmatch(r"cuda(?::(\d+))?", text)
    if not cuda:
        raise argparse.ArgumentTypeError(f"takes auto, cpu, cuda or cuda:N, not {text!r}")
    index, count = int(cuda[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise argparse.ArgumentTypeError(f"{text} asked for, but torch finds {count or 'no'} GPU")
    return f"cuda:{index}"


def flags(doc, script):
    """Return the parser of the shared flags, whose defaults are FedAlign's main setting.

    doc: the script's docstring, which opens --help; script: its __file__, or a name for the run."""
    spellings = [f"  --{f}: --{w.replace(' ', ', --')}\n" for f, w in SPELLINGS.items()]
    note = f"other spellings, where _ and - are the same:\n{''.join(spellings)}"
    parser = Parser(doc, script, epilog=note)
    parser._optionals.title = "flags of this script"
    add_data_flags(parser.add_argument_group("data and partition").add_argument)
    add_federation_flags(parser.add_argument_group("model and federation").add_argument)
    add_training_flags(parser.add_argument_group("local training").add_argument)
    add_machine_flags(parser.add_argument_group("machine and run folder").add_argument)
    return parser


def args_for(script, **values):
    """Return a script's parsed flags, which its main() takes in place of words.

    script: its module. values: of flags, by their names, with underscores; None is the default.
    UserError for what the script would refuse."""
    return extra("own", "args_for").args_for(script, values)


COUNT = number(int, 1)
SEED = number(int, 0)
WEIGHT = number(float, 0)
POSITIVE = number(float, 0, open_low=True)
ON_OFF = argparse.BooleanOptionalAction


def add_data_flags(add):
    """Add the flags of data and partition."""
    splits = ["dirichlet", "dirichlet-balanced", "iid", "similarity", *NATURAL, "file"]
    scales = ["dataset", "half", "cifar10"]
    add(
        "--dataset",
        default="cifar100",
        choices=[*DATASETS, "folder", "glyphs"],
        help="glyphs are drawn",
    )
    add("--data-dir", default="data", metavar="DIR", help="where data sets are, or that of folder")
    add(
        "--image-size", type=number(int, 8, 4096), metavar="PIXELS", help="resize images to squares"
    )
    add("--normalise", default="dataset", choices=scales, help="scale of pixels")
    add("--augment", type=augmentation, default="auto", metavar="LIST", help=AUGMENT_HELP)
    add("--partition", default="dirichlet", choices=splits, help="of training samples to clients")
    add("--alpha", type=POSITIVE, default=0.5, help="of Dirichlet; smaller is more non-IID")
    add("--min-size", type=COUNT, default=10, help="samples that dirichlet gives a client at least")
    add("--similarity", type=number(float, 0, 100), default=0.0, help="%% IID, of that partition")
    add("--users", type=COUNT, help="writers of the natural partitions; default: --clients")
    add("--split-file", metavar="FILE", help="JSON {client: [index, ...]} of --partition file")
    add("--partial-split", action="store_true", help="--split-file may leave samples out")
    add("--leak", action="store_true", help="sent140: train on test tweets too, as rFedAvg's code")
    add(
        "--client-test", action="store_true", help="test on each client's share of the test set too"
    )
    add(
        "--validation",
        type=number(float, 0, 1),
        default=0.0,
        metavar="SHARE",
        help="of the training samples, held out to choose best.pt; 0: by the test set",
    )
    add("--data-seed", type=SEED, default=0, help="seed of the partition, and of glyphs")


def add_federation_flags(add):
    """Add the flags of the network and of the server."""
    servers = ["avg", "avgm", "adam"]
    add("--model", default="resnet56", choices=[*NETS, *EXTRA_NETS], help="network")
    add("--init", metavar="FILE", help="weights to start from: a state_dict, such as a model.pt")
    add("--vectors", metavar="FILE", help="lstm's word vectors, a text file as GloVe's; or random")
    add("--projection", type=SEED, default=0, help="width of a projection head; 0: none")
    add("--clients", type=COUNT, default=16, help="number of clients")
    add(
        "--sample", type=number(float, 0, 1, open_low=True), default=1.0, help="their share a round"
    )
    add("--rounds", type=COUNT, default=25, help="communication rounds")
    add("--weighting", default="samples", choices=["samples", "uniform"], help="of the average")
    add("--server", default="avg", choices=servers, help="optimizer: none, FedAvgM, FedADAM")
    add("--server-lr", type=POSITIVE, help="its learning rate (default: 1, of adam 0.01)")
    add("--server-momentum", type=number(float, 0, 1), help="its momentum, or beta1 (0.4, 0.9)")
    add("--server-beta2", type=number(float, 0, 1), default=0.99, help="beta2 of adam")
    add(
        "--server-tau",
        type=number(float, 0, 1e18, open_low=True),
        default=1e-3,
        help="tau of adam, added to the root of v",
    )


def add_training_flags(add):
    """Add the flags of local training."""
    add("--epochs", type=COUNT, default=20, help="local epochs a round")
    add("--local-steps", type=COUNT, metavar="STEPS", help="steps a round, instead of --epochs")
    add("--batch-size", type=COUNT, default=64, help="samples a step")
    add(
        "--drop-last",
        action="store_true",
        help="leave an epoch's short batch out (FedAlign's code)",
    )
    add("--lr", type=POSITIVE, default=0.01, help="learning rate")
    add("--lr-decay", type=POSITIVE, default=1.0, help="factor on --lr after each round")
    add("--optimizer", default="sgd", choices=["sgd", "rmsprop"], help="of clients")
    add("--momentum", type=number(float, 0, 0.9999), default=0.9, help="of the optimizer")
    add("--nesterov", action=ON_OFF, default=True, help="Nesterov momentum, of sgd")
    add("--weight-decay", type=WEIGHT, default=1e-4, help="weight of the L2 penalty")
    add("--clip", type=WEIGHT, default=0.0, metavar="NORM", help="clip the gradient; 0 is off")
    add("--persist-opt", action=ON_OFF, default=False, help="keep a client's optimizer state")


def add_machine_flags(add):
    """Add the flags of the machine and of the run folder, most of which decide no result."""
    precisions = ["fp32", "tf32", "bf16"]
    add("--seed", type=SEED, default=0, help="of weights, client sampling, batches, augmentation")
    add(
        "--device",
        type=device_name,
        default="auto",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N",
    )
    add("--workers", type=worker_count, default="auto", help="clients trained at once")
    add("--precision", choices=precisions, help="of networks (tf32 on a GPU); losses are in fp32")
    add("--graph", action=ON_OFF, default=True, help="on a GPU, replay steps as CUDA graphs")
    add("--deterministic", action="store_true", help="repeat bit for bit on a GPU too, more slowly")
    add("--out", metavar="RUN", help="the run's folder; by default a new one under runs/")
    add("--resume", action="store_true", help="continue the run in --out; --rounds may grow")
    add("--eval-every", type=COUNT, default=1, metavar="ROUNDS", help="the last is always tested")
    add("--checkpoint-every", type=COUNT, default=1, metavar="ROUNDS", help="lost at most")
    add("--save-clients", action="store_true", help="keep the client models of the last round")
    add("--quiet", action="store_true", help="print nothing but errors")


def check_files(args):
    """Raise UserError where a flag names a file that is not there; note the digest of --init."""
    for flag in ("vectors", "split_file"):
        path = getattr(args, flag)
        if path and (flag, path) != ("vectors", "random") and not pathlib.Path(path).is_file():
            raise UserError(f"--{flag.replace('_', '-')} {path}: no such file")
    if args.init:
        extra("networks", "--init").note_init(args)


# --------------------------------------------------------------------------------------------------
# The run folder: config.json, metrics.jsonl, checkpoint.pt, model.pt, best.pt, states/ and clients/
# --------------------------------------------------------------------------------------------------


def write_atomically(path, content, sync=True):
    """Write bytes so that a kill or a full disk leaves the old file or the new one, whole.

    sync: whether to wait until the file would outlive a power failure too."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        os.replace(temporary, path)
        if sync:
            sync_path(path.parent)  # the new name
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_path(path):
    """Wait until a file or a folder, which may be gone, would outlive a power failure."""
    if os.name != "posix":
        return
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def packed(tree, stamp=None):
    """Return what save() writes, a BytesIO."""
    tree = tree_map(lambda t: t.detach().cpu(), tree)
    if stamp:
        tree = OrderedDict(tree)
        tree.stamp = {**stamp, "layout": layout(tree)}
    buffer = io.BytesIO()  # written by ourselves, since torch hides that a disk is full
    torch.save(tree, buffer)
    return buffer


def layout(tree):
    """Return a checksum of the shapes and dtypes of the tensors in a nest."""
    return zlib.crc32(repr([(t.dtype, t.shape) for t in tensors_in(tree)]).encode())


def save(tree, path, stamp=None):
    """Write a dict of tensors, plain values and nests of both as torch.save does, atomically.

    Strides are kept, since sums depend on them. stamp: a dict of what the tree is of, such as its
    round, which the loaded one has as its attribute stamp."""
    buffer = packed(tree, stamp)
    # released at once: where an error's traceback keeps it, some Pythons crash at the exit
    with buffer.getbuffer() as content:
        write_atomically(path, content)


def load(path, what="checkpoint"):
    """Return what save() wrote to path. UserError, which calls the file what, for anything else.

    The checksums (CRC-32) of all that lies in the file are verified, and with a stamp the shapes
    and dtypes."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise UserError(f"{path}: not a file, where a {what} should be")
        with open(path, "rb") as f:
            if f.read(2) == b"\x80\x02":
                raise ValueError("written as before torch 1.6; save it again with torch.save")
            archive = zipfile.ZipFile(f)
            damaged = archive.testzip()  # torch looks at no checksum
            if damaged:
                raise ValueError(f"the checksum of {damaged} is not that of what it holds")
            if any(record.external_attr for record in archive.infolist()):
                raise ValueError("a record is marked as a folder, which torch would not read")
            f.seek(0)
            tree = torch.load(f, map_location="cpu", weights_only=True)
        if hasattr(tree, "stamp") and tree.stamp["layout"] != layout(tree):
            raise ValueError("not the shapes and types that were saved")
        return tree
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except Exception as e:  # torch raises many kinds for a damaged file
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a readable {what} ({why})") from None


def check_stamp(tree, path, stamp):
    """Raise UserError where the tree that was loaded from path is not of what stamp says."""
    if stamp and not hasattr(tree, "stamp"):
        raise UserError(f"{path}: not of this run")
    for key, value in stamp.items():
        found = tree.stamp.get(key)
        if found != value:
            raise UserError(f"{path}: its {key} is {found}, and should be {value}")


def sealed(fields, before=0):
    """Return a dict with its checksum, "crc32", which goes on from the one before."""
    fields = {k: v for k, v in fields.items() if k != "crc32"}
    return {**fields, "crc32": zlib.crc32(json.dumps(fields).encode(), before)}


def parse_json(text):
    """Return what JSON holds; ValueError also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_config(text):
    """Return what the text of config.json holds; ValueError if its checksum says otherwise."""
    config = parse_json(text)
    if "crc32" in config and config != sealed(config):
        raise ValueError("changed since it was written")
    return config


def is_number(value, low=-sys.float_info.max, high=sys.float_info.max):
    """Whether a value of JSON is a finite number from low to high."""
    return type(value) in (int, float) and low <= value <= high


# in %, beside test_acc and acc_ema
SHARES = "val_acc best_acc acc_last5_mean client_acc_worst client_acc_best client_acc_p10".split()


def before_rows(config):
    """Return what read_row() takes for the row before the first of a run; config: its config.json.

    With the checksum that the first row's goes on from, so that rows of another run are found.
    Older runs began with 0, and still older ones' rows have none."""
    if not config.get("run"):
        return {"round": 0}
    return {"round": 0, "crc32": config.get("rows_crc32", 0)}


def read_rows(lines, config):
    """Yield the rows in lines of metrics.jsonl, as read_row(); config: config.json of the run."""
    row = before_rows(config)
    for line in lines:
        row = read_row(line, row)
        yield row


def read_row(line, before):
    """Return the row in a line of metrics.jsonl. ValueError if it is damaged, or not the next.

    before: the row before. A row's checksum goes on from its, and is there if it has one."""
    try:
        row = parse_json(line)
        counts = [row["bytes_down"], row["bytes_up"], row.get("bytes_delta", 0)]
        evaluation = [row["test_acc"], row["test_loss"], row["acc_ema"], row.get("val_acc", 0)]
        has_checksum = "crc32" in before or "crc32" in row
        shares = [row["test_acc"], row["acc_ema"], *(row.get(key) for key in SHARES)]
        valid = (
            row["round"] == before["round"] + 1
            and all(type(client) is int for client in row["clients"])
            and all(is_number(n, 0) for n in [*counts, *row["seconds"].values()])
            and is_number(row["train_loss"])
            and (row["test_acc"] is None or None not in evaluation)
            and type(row["test_loss"]) in (float, int, type(None))  # which may have overflowed
            and all(share is None or is_number(share, -1e-6, 100 + 1e-6) for share in shares)
            and (not has_checksum or row["crc32"] == sealed(row, before.get("crc32", 0))["crc32"])
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not a row ({type(e).__name__})") from None
    if not valid or not row["clients"]:
        raise ValueError("not the row of this round")
    return row


def read_config(out, flag="--out "):
    """Return config.json of the run in the folder out. UserError if out is no run."""
    path = out / "config.json"
    try:
        if not path.is_file():
            resumed = " to --resume" if flag else ""
            raise UserError(f"{flag}{out}: no run{resumed} there, since it has no config.json")
        config = parse_config(path.read_text())
        flags = config["flags"]
        numbers = [flags["rounds"], config["workers"], config["threads"] - 1]
        numbers += [flags.get("checkpoint_every", 1), config.get("stopped", 0)]
        before = config.get("rows_crc32", 0)
        dicts = [config.get("versions", {}), config.get("code") or {}]
        if "argv" not in config:
            raise UserError(
                f"{flag}{out}: config.json keeps no command, as of an older version of this code; "
                "the run can be compared, but neither resumed nor opened"
            )
        words = [config["script"], flags["dataset"], flags["model"], *config["argv"]]
        bounded = all(type(n) is int and 0 <= n < 2**31 for n in numbers) and numbers[2] < 4096
        plain = type(before) is int and all(type(d) is dict for d in dicts)
        if bounded and plain and all(type(word) is str for word in words):
            return config
    except UserError:
        raise
    except OSError as e:
        raise UserError(f"{flag}{out}: config.json cannot be read ({e.strerror})") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{flag}{out}: config.json is damaged, or not of a run of this project")


def default_out(args):
    """Return the name of a new run folder."""
    now = time.strftime("%Y%m%d-%H%M%S")
    name = f"runs/{args.script}-{args.dataset}-{args.model}-{now}-{os.getpid()}"
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(name for name in names if not os.path.exists(name))


def check_resumed(args, flags):
    """Raise UserError where args would not continue the run that was begun with flags."""
    for k, v in flag_values(args).items():
        if k not in FREE_ON_RESUME and k in flags and v != flags[k]:
            flag = k.removesuffix("_sha256").replace("_", "-")
            raise UserError(
                f"argument --{flag}: {v} differs from the {flags[k]} of the run in "
                f"{args.out}; leave it out, or start a new run with another --out"
            )
    if args.rounds < flags["rounds"]:
        raise UserError(
            f"argument --rounds: {args.rounds} is less than the run's {flags['rounds']}"
        )


VERSIONS = {"torch": torch.__version__, "numpy": np.__version__}  # which decide the last bits
LOCKS = set()  # of run folders that this process has taken


def check_data(config, out, digests):
    """Raise UserError where data_digests() are not those that the run in out began with.

    config: its config.json, which has none in older runs."""
    began = config.get("data", digests)
    for what, digest in digests.items():
        if not isinstance(began, dict) or began.get(what) != digest:
            if what == "partition":
                what = f"clients' shares (--partition {config['flags']['partition']})"
            raise UserError(
                f"{out}: the {what} of the data are not those that the run began with; put them "
                "back, or say where they are by --data-dir"
            )


def forget_locks():
    """Close a forked process' copies: one that decodes images may outlive a run that is killed."""
    for lock in LOCKS - {None}:
        os.close(lock)
    LOCKS.clear()


if hasattr(os, "register_at_fork"):  # not where there are no forks
    os.register_at_fork(after_in_child=forget_locks)

# names of what a kill may leave; others are not ours to delete
OWN_LEFTOVERS = re.compile(
    r"best-\d+\.pt|clients\.\d+\.tmp/\d+\.pt|clients(\.\d+\.tmp)?/\d+\.pt\.\d+\.tmp|"
    r"(config\.json|metrics\.jsonl|(best(-\d+)?|checkpoint|model)\.pt)\.\d+\.tmp"
)


class States:
    """What clients keep between rounds: a file for each client and round that it trained in.

    A worker reads a client's file when it begins to train it, and writes the next one when it
    ends; a bounded cache has the recent ones. versions, which a checkpoint keeps, says which files
    count: {client: (round, CRC-32 of the file)}. So a run may be killed at any moment: files of
    rounds behind the checkpoint are written anew, and what they replace goes only once a later
    checkpoint is there."""

    CACHE = 2**30  # bytes of recent states in memory

    def __init__(self, folder):
        self.folder, self.versions = folder, {}
        self.committed = 0  # round of the checkpoint
        self.written, self.replaced = [], []  # files: not synced yet; named by the checkpoint alone
        self.cache, self.cached = OrderedDict(), 0  # {client: (version, state)}, its bytes
        self.lock = threading.Lock()

    def path(self, k, version):
        return self.folder / f"{k}-{version[0]}.pt"

    def read(self, k):
        """Return the state of client k, {} before it has one. UserError for a wrong file."""
        version = self.versions.get(k)
        if version is None:
            return {}
        with self.lock:
            cached, state = self.cache.pop(k, (None, {}))
            self.cached -= nbytes(state)
        return state if cached == version else self._load(self.path(k, version), version[1])

    def _load(self, path, checksum):
        """Return the state in the file of this CRC-32; -1 of older runs, which knew none."""
        state = load(path, "client state")
        if checksum not in (-1, zlib.crc32(path.read_bytes())):
            raise UserError(
                f"{path}: not the client state that checkpoint.pt names; damaged, or of another run"
            )
        return state

    def write(self, k, state, t):
        """Write the state that client k leaves in round t. Return its version, None without one."""
        if not state and k not in self.versions:
            return None
        check_leaves(state, "client.state", PLAIN)
        with packed(state).getbuffer() as content:
            version = t, zlib.crc32(content)
            write_atomically(self.path(k, version), content, sync=False)
        with self.lock:
            self.written.append(self.path(k, version))
            self.cache[k] = version, state
            self.cached += nbytes(state)
            while self.cached > self.CACHE:
                _, (_, oldest) = self.cache.popitem(last=False)
                self.cached -= nbytes(oldest)
        return version

    def note(self, k, version):
        """Take note of the version of its state that client k left, if it left one."""
        before = self.versions.get(k)
        if version is None:
            return
        self.versions[k] = version
        if before and before[0] > self.committed:
            self.remove(self.path(k, before))
        elif before:
            self.replaced.append(self.path(k, before))

    def sync(self):
        """Wait until all that was written would outlive a power failure."""
        if self.written:
            with ThreadPoolExecutor(16) as threads:  # which the disk serves together
                list(threads.map(sync_path, self.written))
            sync_path(self.folder)
        self.written.clear()

    def commit(self, t):
        """Remove what the checkpoint of round t, which is written, has no more use for."""
        for path in self.replaced:
            self.remove(path)
        self.replaced.clear()
        self.committed = t

    def table(self):
        """Return versions as a tensor (clients, 3) of id, round and CRC-32."""
        rows = [(k, *version) for k, version in self.versions.items()]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    def read_table(self, table):
        """Set versions to those of table(), which older runs kept as {id: round}."""
        if isinstance(table, dict):
            self.versions = {k: (t, -1) for k, t in table.items()}
        else:
            self.versions = {k: (t, checksum) for k, t, checksum in table.tolist()}

    def restore(self, t):
        """Go back to the files that count in the checkpoint of round t, and remove all others.

        They have to be there; each is read when its client trains."""
        self.committed = t
        self.folder.mkdir(exist_ok=True)
        named = {self.path(k, version).name for k, version in self.versions.items()}
        found = {entry.name for entry in os.scandir(self.folder)}
        for name in sorted(named - found)[:1]:
            raise UserError(f"{self.folder / name}: no such client state")
        for name in found - named:
            if re.fullmatch(r"\d+-\d+\.pt(\.\d+\.tmp)?", name):  # others are not ours to delete
                self.remove(self.folder / name)

    def remove(self, path):
        path.unlink(missing_ok=True)


class RunFolder:
    """The folder of a run, from which it resumes exactly."""

    def __init__(self, args, code=None):
        self.args, self.out, self.script = args, pathlib.Path(args.out), args.script
        self.code = code  # of code_of()
        self.config, self.workers = None, None  # workers: (count, threads of each) of a resumed run
        self.digests = None  # of the data
        self.rows, self.size = [], 0  # of metrics.jsonl, and its bytes
        self.states = States(self.out / "states")
        self.clock = None  # when the last round was evaluated, or the first one began
        self.taken, self.lock = False, None
        self.made = []  # folders

    def take(self):
        """Lock the folder and look into it; UserError, before any long work, if it is not free."""
        if self.args.resume:
            read_config(self.out)  # a folder that is none has nothing to lock
            self._lock()
            self.config = read_config(self.out)
            check_resumed(self.args, self.config["flags"])
            clients = self.out / "clients"
            if self.args.save_clients and os.path.lexists(clients) and not clients.is_dir():
                raise UserError(f"argument --save-clients: {clients} is not a folder")
            self.compare_versions()
            if self.config.get("code") and self.code:
                extra("identity", "--resume").check_same(self.out, self.config["code"], self.code)
            # 0 workers: a GPU's number was never settled
            workers = self.config["workers"]
            if self.args.workers != self.config["flags"]["workers"]:
                workers = Pool.plan(self.args)[0]
            self.workers = workers, self.config["threads"]  # which decide the result
            self.args.capture = self.args.graph and self.config.get("graph", True)
            return
        taken = (
            f"--out {self.out}: exists already; continue that run with --resume, or name another"
        )
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{taken} folder")
        self.made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock()
        # what a kill before the first complete file leaves is no run
        if any(not re.fullmatch(r"config\.json\.\d+\.tmp", p.name) for p in self.out.iterdir()):
            raise UserError(f"{taken} folder")
        self.tidy()

    def compare_versions(self):
        """Say where the run began with other libraries, which may change the last bits."""
        began = self.config.get("versions", {})
        changed = [f"{k} {began[k]} (now {v})" for k, v in VERSIONS.items() if began.get(k, v) != v]
        if changed:
            print(f"{self.out}: began with {' and '.join(changed)}", file=sys.stderr)

    def _lock(self):
        """Keep the folder from other processes until close(), or until this one ends.

        Where the system or the file system has no locks, say so and go on."""
        lock = None
        try:
            import fcntl

            lock = os.open(self.out, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), os.stat(self.out)):
                raise FileNotFoundError  # its owner has removed it, and another has made one anew
        except (BlockingIOError, FileNotFoundError):
            if lock is not None:
                os.close(lock)
            raise UserError(f"--out {self.out}: another process is writing to this run") from None
        except (ImportError, OSError) as e:
            if lock is None and isinstance(e, OSError):
                raise
            advice = "see that no second process writes to this run"
            print(f"{self.out}: cannot be locked here ({e}); {advice}", file=sys.stderr)
        self.taken, self.lock = True, lock  # only now: close() removes an empty folder of ours
        LOCKS.add(lock)

    def close(self):
        """Unlock the folder, and remove it if nothing was written, with those made for it."""
        if not self.taken:
            return
        for path in [self.out, *self.made[1:]]:
            with contextlib.suppress(OSError):
                path.rmdir()
        LOCKS.discard(self.lock)
        if self.lock is not None:
            os.close(self.lock)

    def know_data(self, digests):
        """Keep the digests of the run's data. UserError where a resumed run began with others."""
        self.digests = digests
        if self.config:
            check_data(self.config, self.out, digests)

    def create(self, workers, threads):
        """Write down all that a new run depends on."""
        code = self.code and self.code.parts
        words = json.dumps([self.script, self.decisive(), self.digests, code], sort_keys=True)
        run = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        self.config = {
            "run": run,
            "rows_crc32": zlib.crc32(run.encode()),  # that the first row's goes on from
            "script": self.script,
            "argv": self.args.argv,
            "flags": flag_values(self.args),
            "workers": workers,
            "threads": threads,
            "moved": self.args.moved,
            "device": hardware(self.args.device),
            "versions": {"python": platform.python_version(), **VERSIONS},
            "code": code,
            "commit": commit(self.code.files if self.code else ()),
            "data": self.digests,
        }
        self.write_config()
        self.states.folder.mkdir()

    def write_config(self):
        self.config = sealed(self.config)
        text = json.dumps(self.config, indent=1) + "\n"
        write_atomically(self.out / "config.json", text.encode())

    def settle(self, fed):
        """Prepare the folder for the row of the round that has been trained.

        Note what a GPU has allowed: the number of workers, and steps as CUDA graphs. Only now does
        a finished run that is to have more rounds become one that is not, and what is of its last
        round goes: a resume that is refused or ends before has changed nothing."""
        allowed = {"workers": len(fed.pool.workers), "graph": fed.args.capture}
        lost = self.config.get("graph") and not fed.args.capture
        if lost and self.args.resume and self.args.deterministic:
            why = f"a step cannot be a CUDA graph now, as --deterministic has it in {self.out}"
            raise UserError(f"--resume: {why}; start a new run with --no-graph and another --out")
        self.config |= allowed
        if sealed(self.config) != self.config:
            self.write_config()
        self.exchange_clients(self.out / f"clients.{fed.server['round']}.tmp")
        (self.out / "model.pt").unlink(missing_ok=True)

    def exchange_clients(self, latest):
        """Let clients/ hold the models in the folder latest, if there is one, and no earlier."""

        def models(folder):  # other files are a user's
            return [path for path in folder.glob("*.pt") if path.stem.isdecimal()]

        clients = self.out / "clients"
        for path in models(clients):
            if not path.is_dir():
                path.unlink()
        if latest.exists():
            clients.mkdir(exist_ok=True)
            for path in models(latest):
                os.replace(path, clients / path.name)
            sync_path(clients)
            sync_path(self.out)
        for folder in (latest, clients):
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty

    def stamp(self, t, **more):
        """Return the stamp of a file of round t; empty in runs that were begun without."""
        run = self.config.get("run")
        return {"run": run, "round": t, **more} if run else {}

    def stamp_with_rows(self):
        """Return the stamp of a file of the last row, which tells all rows up to it."""
        return self.stamp(self.rows[-1]["round"], rows_checksum=self.rows[-1].get("crc32"))

    def decisive(self):
        """Return the flags that decide the result."""
        flags = flag_values(self.args)
        return {k: v for k, v in flags.items() if k not in FREE_ON_RESUME}

    def save(self, tree, name, stamp):
        """Write weights to a file of the folder."""
        (self.out / name).parent.mkdir(exist_ok=True)
        save(tree, self.out / name, stamp)

    def append(self, row):
        """Add a round's row to metrics.jsonl, which is written anew if it is not as we left it."""
        before = self.rows[-1] if self.rows else before_rows(self.config)
        self.rows.append(sealed(row, before.get("crc32", 0)))
        with open(self.out / "metrics.jsonl", "ab") as f:
            as_left = f.tell() == self.size
            if as_left:
                self.size += f.write(json.dumps(self.rows[-1]).encode() + b"\n")
                f.flush()
                os.fsync(f.fileno())
        if not as_left:
            self.write_rows()

    def write_rows(self):
        """Write metrics.jsonl."""
        content = "".join(json.dumps(row) + "\n" for row in self.rows).encode()
        write_atomically(self.out / "metrics.jsonl", content)
        self.size = len(content)

    def checkpoint(self, fed):
        """Commit the state of fed after the last appended row.

        The checkpoint names the files of client states that count, which are there by then."""
        check_leaves(fed.server, "server", PLAIN)
        self.states.sync()
        state = {
            "script": self.script,
            "flags": self.decisive(),
            "net": fed.net.state_dict(),
            "server": fed.server,
            "clients": self.states.table(),
        }
        save(state, self.out / "checkpoint.pt", self.stamp_with_rows())
        self.states.commit(fed.server["round"])
        self.tidy()
        if not (self.out / "config.json").exists():  # somebody has deleted it
            self.write_config()

    def tidy(self):
        """Let best.pt be of the rounds up to the checkpoint; delete what is not, and cut writes.

        Until the checkpoint is there a better model waits in best-ROUND.pt, for a resumed run may
        have to forget its round."""
        best = self.out / f"best-{(best_row(self.rows) or {}).get('round')}.pt"
        if best.exists():
            os.replace(best, self.out / "best.pt")
        for path in [*self.out.iterdir(), *self.out.glob("clients*/*")]:
            ours = OWN_LEFTOVERS.fullmatch(path.relative_to(self.out).as_posix())
            if ours and not path.is_dir():
                path.unlink()
        for folder in self.out.glob("clients.*.tmp"):
            with contextlib.suppress(OSError):  # where a user's own files are in it
                folder.rmdir()

    def restore(self, fed):
        """Fill fed from the checkpoint, if there is one, and forget the rounds after it."""
        path, metrics = self.out / "checkpoint.pt", self.out / "metrics.jsonl"
        if metrics.exists() and not metrics.is_file():
            raise UserError(f"{metrics}: not a file")
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        flags = self.config["flags"]
        state = None
        if path.exists():
            state = self._load_checkpoint(path, fed)
        elif len(lines) > flags.get("checkpoint_every", 1) or (self.out / "model.pt").exists():
            raise UserError(f"{path}: missing, though metrics.jsonl has {len(lines)} rounds")
        self._load_rows(metrics, lines, fed.server["round"])
        if state:
            check_stamp(state, path, self.stamp_with_rows())
        self._check_best()
        self.states.restore(fed.server["round"])
        self.write_rows()
        self.tidy()
        finished = fed.server["round"] in (flags["rounds"], self.config.get("stopped"))
        for flag in ("rounds", "checkpoint_every"):  # which the next resume goes by
            value = getattr(self.args, flag)
            if value != flags.get(flag):
                flags[flag] = value
                self.config["argv"] += [f"--{flag.replace('_', '-')}", str(value)]
        self.config.pop("stopped", None)  # by on_round
        if not finished:  # else it stays so until settle()
            self.write_config()

    def _check_best(self):
        """Raise UserError where the best model so far is damaged, or of another run or round.

        Where it is missing, say so."""
        t = (best_row(self.rows) or {}).get("round")
        if t is None:
            return
        for path in (self.out / f"best-{t}.pt", self.out / "best.pt"):
            if os.path.lexists(path):
                return check_stamp(load(path, "model"), path, self.stamp(t))
        print(f"{path}: missing, and with it the model of round {t}, the best", file=sys.stderr)

    def _load_checkpoint(self, path, fed):
        state = load(path)
        try:
            if state["script"] != self.script:
                raise UserError(f"{path}: made by {state['script']}.py, not by {self.script}.py")
            for k, v in self.decisive().items():
                if state["flags"].get(k, v) != v:  # a flag that came later is at its default
                    flag = f"--{k.replace('_', '-')}"
                    raise UserError(f"{path}: of another run, with {state['flags'][k]} for {flag}")
            fed.net.load_state_dict(state["net"])
            fed.server.update(tree_map(lambda t: t.to(fed.pool.device), state["server"]))
            if type(fed.server["round"]) is not int or fed.server["round"] < 1:
                raise ValueError("no round")
            check_stamp(state, path, self.stamp(fed.server["round"]))
            self.states.read_table(state["clients"])
        except UserError:
            raise
        except Exception as e:  # any shape that a foreign file may have
            raise UserError(f"{path}: not a checkpoint of this run ({e})") from None
        return state

    def _load_rows(self, metrics, lines, t):
        """Keep the first t lines of metrics.jsonl, which must be those of rounds 1 to t."""
        with contextlib.suppress(ValueError):
            self.rows = list(read_rows(lines[:t], self.config))
        if len(self.rows) != t:
            raise UserError(
                f"{metrics}: damaged, or of another run; it should hold rounds 1 to {t} of the "
                "checkpoint"
            )


def hardware(device):
    """Return what a device is called: the GPU, or the processor and how many cores are used."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo, name = pathlib.Path("/proc/cpuinfo"), platform.machine()
    if cpuinfo.exists():
        model = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.M)
        name = model[1] if model else name
    return f"{name}, {CORES} cores"


def code_of(method):
    """Return what tells a Method's functions from others; None in a copy without extras/."""
    try:
        return extra("identity", "config.json").Code(method)
    except UserError:
        return None
    except Exception as e:  # any object that a function may name
        print(f"config.json keeps no digest of the code ({type(e).__name__}: {e})", file=sys.stderr)
        return None


def commit(files=()):
    """Return the commit of the code; None outside a repository.

    "+changes" follows where that is not all: the repository's files were changed since, or one of
    files, those of the code that ran, is not among them."""

    def git(*words):
        where = {"cwd": pathlib.Path(__file__).parent, "capture_output": True, "text": True}
        return subprocess.run(["git", *words], check=True, **where).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    try:
        git("ls-files", "--error-unmatch", "--", *sorted(files))
    except subprocess.CalledProcessError:
        changed = True
    return head + "+changes" * bool(changed)


# --------------------------------------------------------------------------------------------------
# Errors and interrupts. A mistake of the user's is a UserError, shown as one line. Ctrl-C takes a
# note that is read between batches: training ends behind those under way, and can be resumed.
# --------------------------------------------------------------------------------------------------


class UserError(ValueError):
    """A mistake in flags, files or data: shown as one line, exit code 2."""


@contextlib.contextmanager
def one_line_errors(script, args=None, advice="use a smaller --batch-size or --device cpu"):
    """Turn a mistake, a full memory and an interrupt into one line on stderr and an exit code.

    args: those of a run that could be resumed; advice: what to do about a full memory. Where the
    words of args came from Python the line is an exception's: UserError or KeyboardInterrupt, and
    an OSError or a FloatingPointError as it is."""
    shell = args is None or args.shell
    try:
        yield
        return
    except (UserError, OSError) as e:
        error, code = e, 2
    except FloatingPointError as e:
        error, code = e, 1
    except (MemoryError, RuntimeError) as e:
        full = isinstance(e, (MemoryError, torch.OutOfMemoryError))
        if not full and "allocate memory" not in str(e):
            raise
        error, code = UserError(f"the memory is full; {advice}"), 2
    except KeyboardInterrupt:
        if shell:
            ignore_interrupts()
        message, code = "interrupted", 130
        if args and args.out and pathlib.Path(args.out, "config.json").exists():
            message += f"; continue with --out {args.out} --resume"
        error = KeyboardInterrupt(message)
    if not shell:
        raise error
    kind = "" if code == 130 else "error: "  # Ctrl-C, or a limit of time, is none
    end(f"{script}.py: {kind}{' '.join(str(error).split())}", code)


def end(line, code):
    """Print a line on stderr and end with an exit code; under torchrun one for all processes."""
    if under_torchrun():
        with contextlib.suppress(UserError):  # the file is not there
            extra("ranks", "torchrun").fail(line, code)
    with contextlib.suppress(OSError):  # where stderr is a full disk or a closed pipe
        print(line, file=sys.stderr)
    raise SystemExit(code)


def ignore_interrupts():
    """Let no second Ctrl-C interrupt the exit; a notebook goes on, and keeps its Ctrl-C."""
    if not hasattr(sys, "ps1"):
        with contextlib.suppress(ValueError):  # in a thread, which gets no signals
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class Interrupt:
    """A note that Ctrl-C came.

    An exception anywhere in training could leave a lock taken that a thread waits for, and threads
    running at the exit, which then aborts. After five seconds it is raised anywhere."""

    def __init__(self):
        self.since = None  # when Ctrl-C came

    @contextlib.contextmanager
    def handled(self):
        """Take the note for SIGINT inside the with block."""
        if threading.current_thread() is not threading.main_thread():  # others get no signals
            yield
            return
        before = signal.signal(signal.SIGINT, self.note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def note(self, *_):
        """Handle the signal."""
        if self.since and time.perf_counter() - self.since > 5:
            raise KeyboardInterrupt
        self.since = self.since or time.perf_counter()

    def check(self):
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self.since:
            raise KeyboardInterrupt
