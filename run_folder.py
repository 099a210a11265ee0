"""The folder of a run: config.json, metrics.jsonl, *.pt, states/ and clients/."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pathlib
import platform
import re
import stat
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import common
from common import (
    FREE_ON_RESUME,
    UserError,
    check_leaves,
    checksum,
    extra,
    flag_values,
    plan,
    nbytes,
    tensors_in,
    tree_map,
)

PLAIN = (int, float, bool, str, type(None))  # what may be kept beside tensors


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


def accuracies(rows):
    """Return the test accuracies (%) of the rows that were evaluated."""
    return [row["test_acc"] for row in rows if row["test_acc"] is not None]


def best_row(rows):
    """Return the first row of the best accuracy; None before an evaluation.

    It is that on the samples of --validation or, without, on the test set."""
    evaluated = [row for row in rows if row["test_acc"] is not None]
    return max(evaluated, key=lambda row: row.get("val_acc", row["test_acc"]), default=None)


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

    def get(self, k, default):
        return self.read(k) or default

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
                workers = plan(self.args)[0]
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

    def know_data(self, data, parts):
        """Keep the digests of the run's data. UserError where a resumed run began with others."""
        self.digests = data_digests(data, parts)
        if self.config:
            check_data(self.config, self.out, self.digests)

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

    def keep_client(self, fed, client, weights):
        t = fed.server["round"]
        self.states.note(client.id, client.version)
        if self.args.save_clients and t == self.args.rounds:
            stamp = self.stamp(t, client=client.id)
            self.save(weights, f"clients.{t}.tmp/{client.id}.pt", stamp)

    def keep(self, fed, row):
        t = row["round"]
        if best_row([*self.rows, row]) is row:
            self.save(fed.net.state_dict(), f"best-{t}.pt", self.stamp(t))
        self.settle(fed)
        self.append(row)
        if t == self.args.rounds or t % self.args.checkpoint_every == 0:
            self.checkpoint(fed)

    def stop(self, fed):
        self.checkpoint(fed)
        self.config["stopped"] = fed.server["round"]
        self.write_config()

    def finish(self, net):
        self.save(net.state_dict(), "model.pt", self.stamp_with_rows())

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
    return f"{name}, {common.CORES} cores"


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
