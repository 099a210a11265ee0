"""Processes of torchrun: several train a round's clients, and end with the run of one, bit for bit.

docs/scale.md says how to start them and what it costs. Every rank, as torchrun calls a process,
computes the same round, but for what is shared out: one rank trains a client, and its upload goes
to all in the order of the clients, as do batches of the evaluation and what a method gives
worker.map(). So each rank adds up what one process would, in its order. Rank 0 writes the run
folder and prints; who trained a client writes its state. An error on any rank ends all: the first
is noted in the store that torchrun keeps, rank 0 prints it, and all leave with its exit code."""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys
import threading
import time
import traceback
import zlib
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its defaults would keep the group
from tqdm import tqdm

import common
import run_folder

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
# of this torchrun: its name, if it has one, and its process
STARTER = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}"
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
PATIENCE = datetime.timedelta(days=30)  # a client may take long; who has died is found otherwise
ENDING = threading.Lock()  # of the thread that ends the process
ALIGN = 64  # bytes; products of matrices may depend on where they begin
END = object()
OURS = "common.py", "engine.py", "run_folder.py"
FREE = {"workers", "quiet", "data_dir"}  # flags in which ranks may differ, and a GPU's index


# --- starting


def join(args):
    """Return the Ranks of this process, connected to the others.

    Changes args: all but rank 0 are quiet, and a run that torchrun starts again is resumed.
    UserError where a flag cannot be of several processes, or differs among them."""
    if not args.out:
        raise common.UserError("argument --out: needed under torchrun, the folder that all share")
    device = torch.device(args.device)
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if device.index or LOCAL_RANK >= gpus:  # cuda is cuda:0 by now
            raise common.UserError(
                f"argument --device: under torchrun cuda, one GPU a process; there are {gpus}"
            )
        device = torch.device("cuda", LOCAL_RANK)
    if Ranks.joined is None:
        Ranks.joined = Ranks(device, args.script)
    Ranks.joined.watch.script = args.script
    values = {k: v for k, v in common.flag_values(args).items() if k not in FREE}
    values["device"] = device.type
    names = {k: f"--{k.removesuffix('_crc32').replace('_', '-')}" for k in values}
    check_alike({"script": args.script} | {names[k]: v for k, v in values.items()})
    if RANK:
        args.quiet = True
    if RESTARTS and not args.resume:
        args.resume = broadcast(began_here(args.out), 0)
    return Ranks.joined


def versions():
    """Return what a rank runs beside the method's own functions, {what: version}."""
    root = pathlib.Path(common.__file__).parent
    paths = [*map(root.joinpath, OURS), *sorted(root.glob("extras/[!.]*.py"))]
    crc = zlib.crc32(b"".join(path.read_bytes() for path in paths))
    return {"torch": torch.__version__, "numpy": np.__version__, "common.py and extras/": crc}


def check_alike(own):
    """Raise UserError, on every rank, where a rank's own {what: value} is not that of rank 0."""
    own = {what: str(value) for what, value in own.items()}
    first, *others = (broadcast(own, rank) for rank in range(SIZE))
    for rank, other in enumerate(others, 1):
        for what in {**first, **other}:
            here, there = (values.get(what, "none") for values in (first, other))
            if here != there:
                raise common.UserError(
                    f"{what}: {there} on rank {rank}, and {here} on rank 0; all need the same "
                    "flags, code, data and initial network"
                )


def began_here(out):
    """Return whether an earlier attempt of this torchrun began the run in the folder out."""
    try:
        return run_folder.read_config(pathlib.Path(out)).get("torchrun") == STARTER
    except common.UserError:
        return False


@functools.cache
def store():
    """Return the store that all ranks of this attempt share."""
    shared, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=5)))
    return dist.PrefixStore(f"federation-{RESTARTS}", shared)


# --- errors


def fail(line, code):
    """End this rank and all others with an exit code; rank 0 prints the line of the first error.

    line: for stderr, None if it has been printed. Does not return."""
    if not ENDING.acquire(blocking=False):
        threading.Event().wait()  # the other thread ends the process
    with contextlib.suppress(Exception):  # torchrun itself may have ended
        note = store().compare_set("failed", "", json.dumps([line, code]))
        line, code = json.loads(note)
    with contextlib.suppress(OSError):  # where stderr is a full disk or a closed pipe
        if RANK == 0 and line:
            tqdm.write(line, file=sys.stderr)
    with contextlib.suppress(Exception):  # torchrun kills the others once one has left
        gather("ended", SIZE)
        gather("left", SIZE if RANK == 0 else 0)  # without torchrun rank 0 has the store
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def gather(name, ranks):
    """Return when so many ranks are here, or after 20 s."""
    end = time.monotonic() + 20
    here = store().add(name, 1)
    while here < ranks and time.monotonic() < end:
        time.sleep(0.05)
        here = store().add(name, 0)


def fail_by(*error):
    """End all ranks by an error that is not the user's: its traceback, exit code 1."""
    traceback.print_exception(*error)
    fail(None, 1)


class Watch(threading.Thread):
    """Ends this process when another one has failed, whatever it waits for."""

    def __init__(self, script):
        super().__init__(daemon=True)
        self.store, self.over = store().clone(), threading.Event()
        self.script, self.interrupt = script, None  # of the run

    def run(self):
        while not self.over.wait(0.3):
            try:
                failed = self.store.check(["failed"])
            except Exception:  # the store is torchrun's: it has ended, and ended nobody
                fail(f"{self.script}.py: error: torchrun has ended; continue with --resume", 1)
            if failed:
                line, code = json.loads(self.store.get("failed"))
                if code == 130 and self.interrupt:  # Ctrl-C: this rank too ends between batches
                    self.interrupt.since = self.interrupt.since or time.perf_counter()
                    time.sleep(5)
                fail(line, code)


@contextlib.contextmanager
def connected():
    """Turn the end of another process, while it is waited for, into an error of one line."""
    try:
        yield
    except RuntimeError as e:
        why = str(e).splitlines()[0][:200]
        raise ConnectionError(
            f"a process of this run has ended ({why}); continue with --resume"
        ) from None


# --- the ranks


class Ranks:
    """What engine.OneProcess is for one process."""

    joined = None

    def __init__(self, device, script):
        self.device = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with connected():
            self.watch = Watch(script)
            self.watch.start()  # a rank may fail before it comes here
            own = store().clone()  # locked while it waits, and fail() needs one
            dist.init_process_group(
                backend, store=own, timeout=PATIENCE, rank=RANK, world_size=SIZE
            )
        atexit.register(self.leave)
        sys.excepthook = fail_by

    def leave(self):
        """Go apart at the end of this process."""
        self.watch.over.set()
        self.watch.join()  # a thread that is amid a call at the exit would abort it
        dist.destroy_process_group()  # and its threads

    def folder(self, args, code):
        """Return the RunFolder of this rank."""
        return Folder(args, code)

    def in_turn(self, f):
        """Return f(), called by rank 0 first, then by one rank of each node, then by the others."""
        for mine in (RANK == 0, RANK and LOCAL_RANK == 0, RANK and LOCAL_RANK):
            if mine:
                result = f()
            wait()
        return result

    def agree(self, answer):
        """Return rank 0's answer, yes or no, on every rank."""
        return broadcast(bool(answer), 0)

    def shared(self, pool):
        """Return what trains clients as pool.train(clients, start) does, on every rank."""
        self.watch.interrupt, worker = pool.interrupt, pool.workers[0]

        def train(clients, start):
            sizes = [common.batch_sizes(len(c), worker.args, worker.batch_norm) for c in clients]
            owners = share([len(steps) for steps in sizes], SIZE)
            own = Own(pool, [c for c, owner in zip(clients, owners) if owner == RANK], start)
            for client, owner in zip(clients, owners):
                trained = own.next() if owner == RANK else (client, None)
                yield exchange(*trained, owner, worker, own.wait)

        return train

    def map(self, pool_map):
        """Return a map like pool_map, (f, items), to whose work every rank contributes."""

        def shared(f, items):
            items = list(items)
            mine = common.tree_map(torch.Tensor.cpu, list(pool_map(f, items[RANK::SIZE])))
            results = [None] * len(items)
            for rank in range(SIZE):
                found = broadcast(mine, rank)
                results[rank::SIZE] = common.tree_map(lambda t: t.to(self.device), found)
            return results

        return shared


def share(costs, ranks):
    """Return the rank that trains each client: the costliest first, each to the least loaded.

    costs: steps of each client; one without a step costs something too."""
    owners, load = [0] * len(costs), [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i] + 1
    return owners


class Own:
    """The uploads of this rank's clients, in order; training goes on while others are waited for.

    Threads train by themselves; else a sweep over the workers at a time, while there is room."""

    def __init__(self, pool, clients, start):
        self.sweeps, self.ready = pool.train(clients, start), deque()
        self.room = 0 if pool.threads else pool.window

    def next(self):
        """Return the next upload."""
        while not self.ready:
            self.sweep()
        return self.ready.popleft()

    def sweep(self):
        """Train on, where anything is left."""
        trained = next(self.sweeps, END)
        if trained is END:
            self.room = 0
        elif trained is not None:
            self.ready.append(trained)

    def wait(self, work):
        """Train on until work, which is of another rank, is there."""
        while len(self.ready) < self.room and not work.is_completed():
            self.sweep()
        with connected():
            work.wait()


# --- messages


def wait():
    """Return when all ranks are here."""
    with connected():
        dist.all_reduce(torch.zeros(1))


def send(tensor, owner, wait):
    """Copy the owner's tensor into those of all ranks; wait(work): waits until it is there."""
    with connected():
        work = dist.broadcast(tensor, owner, async_op=True)
    wait(work)


def broadcast(value, owner):
    """Return the owner's value, small and on the CPU, on every rank."""
    box = [value]
    with connected():
        dist.broadcast_object_list(box, owner)
    return box[0]


def by_rank_0(f):
    """Call f() on rank 0 alone. Raise its UserError, which a caller may catch, on every rank."""
    error = None
    if RANK == 0:
        try:
            f()
        except common.UserError as e:
            error = e
    error = broadcast(error, 0)
    if error:
        raise error


NOTES = ("samples", "version", "bytes_down", "bytes_up", "model")  # of a Client


def exchange(client, weights, owner, worker, wait):
    """Return (client, weights), which only its owner has, on every rank; its state stays there.

    Strides are kept, since sums depend on them. wait(work): waits until the owner has it."""
    send(torch.zeros(1), owner, wait)
    notes = tree = None
    if owner == RANK:
        counts = {name: getattr(client, name) for name in NOTES}
        tree = [client.sums, client.records, client.loss]
        notes = counts, common.tree_map(lambda t: t.to("meta"), tree)  # dtypes, shapes, strides
    counts, like = broadcast(notes, owner)
    names = worker.global_net.state_dict()  # whose layout all share, and nobody trains
    buffer, parts = views([*names.values(), *common.tensors_in(like)], worker.device)
    if owner == RANK:
        torch._foreach_copy_(parts, [*weights.values(), *common.tensors_in(tree)])
    send(buffer, owner, wait)
    if owner == RANK:  # what it sends goes to the device on which the other ranks have it
        sent = client.sums, client.records
        client.sums, client.records = common.tree_map(lambda t: t.to(worker.device), sent)
        return client, weights
    rest = iter(parts[len(names) :])  # which are copied, as the buffer would stay with them
    sums, records, loss = common.tree_map(lambda _: next(rest).clone(), like)
    more = {"sums": sums, "records": records, "loss": loss, "state": None}
    return dataclasses.replace(client, **counts, **more), dict(zip(names, parts))


def views(like, device):
    """Return one buffer of bytes and, in it, tensors of the layouts of like's, which are dense."""
    sizes = [common.nbytes(t) for t in like]
    padded = [-(-size // ALIGN) * ALIGN for size in sizes]
    buffer = torch.empty(sum(padded), dtype=torch.uint8, device=device)
    parts = [part[:size].view(t.dtype) for part, size, t in zip(buffer.split(padded), sizes, like)]
    return buffer, [part.as_strided(t.shape, t.stride()) for part, t in zip(parts, like)]


# --- the run folder


class Folder(run_folder.RunFolder):
    """The folder of a run, which rank 0 writes and all read; states are written by all."""

    # what other ranks leave to rank 0
    WRITES = "_lock _compare_versions write_config write_rows finish".split()

    def __init__(self, args, code):
        super().__init__(args, code)
        write = self.models.write
        # of copies: torch.save takes no views of one buffer, as another rank's weights are
        self.models.write = lambda k, tree, t: write(k, common.tree_map(torch.clone, tree), t)
        if RANK:
            self.models.write = self.states.remove = lambda *_: None
            for name in self.WRITES:
                setattr(self, name, lambda *_: None)

    def take(self):
        check_alike(versions() | {f"code of {part}": text for part, text in self.code.items()})
        by_rank_0(super().take)
        if self.args.resume:
            self._check_shared()
            if RANK:
                super().take()

    def _check_shared(self):
        """Raise UserError where --out is not the same folder on all ranks."""
        path = self.out / "config.json"
        found = f"{zlib.crc32(path.read_bytes()):08x}" if path.is_file() else "none"
        check_alike({f"config.json in --out {self.out}": found})

    def know_data(self, fed):
        super().know_data(fed)
        own = {f"{what} of the data": digest for what, digest in self.digests.items()}
        own["weights of the initial network"] = run_folder.checksum(fed.net.state_dict().values())
        check_alike(own)

    def create(self, workers, threads):
        check_alike({"threads of a worker": threads})
        by_rank_0(lambda: super(Folder, self).create(workers, threads))
        try:
            self._check_shared()
        except common.UserError:
            if RANK == 0:  # the run has not begun
                (self.out / "config.json").unlink()
            raise
        self.config = run_folder.read_config(self.out)

    def write_config(self):
        self.config["torchrun"] = STARTER
        super().write_config()

    def restore(self, fed):
        by_rank_0(lambda: super(Folder, self).restore(fed))
        if RANK:
            super().restore(fed)

    def keep(self, fed, row):
        [line] = broadcast([json.dumps(row)], 0)  # each has other seconds
        super().keep(fed, json.loads(line) if RANK else row)

    def checkpoint(self, fed):
        self.states.sync()
        wait()
        if RANK == 0:
            super().checkpoint(fed)
        else:
            self.states.commit(fed.server["round"])
        wait()
