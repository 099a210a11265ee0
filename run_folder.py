"""The folder of a run, from which one that was cut goes on as if nothing had been.

checkpoint.pt decides. It is replaced as a whole, holds the weights, the best ones and what the
server keeps, and names by round and checksum what goes with them: the rows of metrics.jsonl, what
clients keep (states/CLIENT-ROUND.pt) and, with --save-clients, their models of the last round
(clients/CLIENT-ROUND.pt). Those are written before it, under names that it does not name yet, and
removed after it, once it names others. So a kill leaves a checkpoint with all that it names, and
files that count for nothing. config.json says what the run is, and holds a resumed one to it.
best.pt and model.pt are copies for people."""

import ast
import contextlib
import functools
import inspect
import io
import itertools
import json
import linecache
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import common
from common import FREE_ON_RESUME, UserError, check_leaves, flag_values, tree_map

PLAIN = (int, float, bool, str, type(None))  # what may be kept beside tensors
SIMD = torch.backends.cpu.get_cpu_capability()  # AVX2 or AVX512; these three decide the last bits
VERSIONS = {"torch": torch.__version__, "numpy": np.__version__, "instructions": SIMD}


def checksum(tensors, more=None):
    """Return a CRC-32 of tensors and of more, a plain value, as eight hexadecimal digits."""
    crc = zlib.crc32(repr(more).encode())
    for tensor in tensors:
        crc = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"


def write_atomically(path, content):
    """Write bytes so that a kill, a full disk or a power failure leaves the old file or the new."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
        sync_path(temporary)
        os.replace(temporary, path)
        sync_path(path.parent)  # the new name
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_path(path):
    """Wait until a file or a folder, which may be gone, would outlive a power failure."""
    with contextlib.suppress(FileNotFoundError if os.name == "posix" else OSError):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def packed(tree):
    """Return what save() writes, a BytesIO."""
    buffer = io.BytesIO()  # written by ourselves, since torch hides that a disk is full
    torch.save(tree_map(lambda t: t.detach().cpu(), tree), buffer)
    return buffer


def save(tree, path):
    """Write nests of tensors and plain values as torch.save does, atomically, with strides."""
    # released at once: where an error's traceback keeps it, some Pythons crash at the exit
    with packed(tree).getbuffer() as content:
        write_atomically(path, content)


def load(path, what="checkpoint", crc=None):
    """Return what save() wrote to path. UserError, which calls the file what, for anything else.

    crc: the CRC-32 of the file, where it is known; else those of what lies in it are verified."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path}: not a file, where a {what} should be")
    try:
        with open(path, "rb") as f:
            if crc is None:
                check_archive(f)
            elif zlib.crc32(f.read()) != crc:
                raise ValueError("not the one that checkpoint.pt names: damaged, or of another run")
            f.seek(0)
            return torch.load(f, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}") from None
    except Exception as e:  # torch raises many kinds for a damaged file
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a readable {what} ({why})") from None


def check_archive(f):
    """Raise ValueError where a file of torch.save is damaged: torch looks at no checksum."""
    archive = zipfile.ZipFile(f)
    # torch reads nothing of a record that is marked as a folder
    if archive.testzip() or any(record.external_attr for record in archive.infolist()):
        raise ValueError("its checksums are not those of what it holds")


def sealed(fields, before=0):
    """Return a dict with its checksum, "crc32", which goes on from the one before."""
    fields = {k: v for k, v in fields.items() if k != "crc32"}
    return {**fields, "crc32": zlib.crc32(json.dumps(fields).encode(), before)}


def unsealed(text, before=0):
    """Return the sealed() dict in a text of JSON; ValueError if it is none, or was changed."""
    try:
        fields = json.loads(text)
        if fields["crc32"] == sealed(fields, before)["crc32"]:
            return fields
    except (AttributeError, LookupError, TypeError, RecursionError):  # JSON of another shape
        pass
    raise ValueError("damaged, or not what should follow here")


def read_config(out):
    """Return config.json of the run in the folder out. UserError if out is no run."""
    path = out / "config.json"
    try:
        if path.is_file():
            return unsealed(path.read_text())
    except ValueError:
        raise UserError(f"{out}: config.json is damaged, of a plain run or of none") from None
    hint = f"; did you mean {out}/*?" if any(out.glob("*/config.json")) else ""
    raise UserError(f"{out}: no run, since it has no config.json{hint}")


def read_rows(out, config):
    """Return the rows in metrics.jsonl, up to one that is damaged or does not follow.

    config: config.json of the run, from whose name the checksum of the first row goes on."""
    path, rows, crc = out / "metrics.jsonl", [], int(config["run"], 16)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path}: not a file")
    with contextlib.suppress(ValueError):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            rows.append(unsealed(line, crc))
            crc = rows[-1]["crc32"]
    return rows


def read_checkpoint(out, config):
    """Return what checkpoint.pt of a run holds, and the rows up to it; UserError if damaged."""
    state = load(out / "checkpoint.pt")
    if type(state) is not dict or state.get("run") != config["run"]:
        raise UserError(f"{out / 'checkpoint.pt'}: not a checkpoint of this run")
    t = state["server"]["round"]
    rows = read_rows(out, config)[:t]
    if len(rows) != t or rows[-1]["crc32"] != state["rows_crc32"]:
        should = f"it should hold rounds 1 to {t} of the checkpoint"
        raise UserError(f"{out / 'metrics.jsonl'}: damaged, or of another run; {should}")
    return state, rows


def data_digests(data, parts):
    """Return the checksums by which a resumed run knows its data, {what: eight digits}.

    data: a Data; parts: the clients' indices. Of images on disk names and sizes count."""
    paths = [pathlib.PurePath(path) for path in data.paths or []]
    more = [data.words, [(path.parts[-3:], os.path.getsize(path)) for path in paths]]
    if data.mean is not None:  # rounded, as another machine may multiply floats otherwise
        more += torch.cat([data.mean, data.std]).flatten().double().round(decimals=4).tolist()
    lengths = torch.tensor([len(part) for part in parts])
    held = [[data.x_val], [data.y_val]] if data.y_val is not None else [[], []]
    return {
        "labels": checksum([data.y, data.y_test, *held[1]], data.classes),
        "samples": checksum([data.x, data.x_test, *held[0]], more),
        "partition": checksum([lengths, torch.from_numpy(np.concatenate(parts))]),
    }


def code_of(method):
    """Return {part: "NAME DIGEST"} of a Method, by which its code is told from other code.

    The digest is of the syntax of the function's file or, in a notebook, of its cell.
    There is none for common.py and extras/, whose commit is recorded, and where is no source."""
    code = {}
    for part, f in method._asdict().items():
        while isinstance(f, functools.partial):
            f = f.func
        if f is not None:
            f = inspect.unwrap(f) if hasattr(f, "__name__") else type(f)
            code[part] = f"{f.__name__} {source_digest(f)}".strip()
    return code


def source_digest(f):
    """Return a checksum of the source of code_of(), without comments and docstrings; or ""."""
    if f.__module__.partition(".")[0] in ("common", "extras"):
        return ""
    try:
        path = pathlib.Path(inspect.getfile(f))
        cell = "".join(linecache.getlines(str(path)))
        tree = ast.parse(path.read_bytes() if path.is_file() else cell)
    except (OSError, SyntaxError, TypeError):
        return ""
    if not tree.body:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return checksum([], ast.unparse(tree))


SHARED = {  # of a run and its resume: what a difference is called, and what to do
    "flags": ("--{}", "leave it out"),
    "code": ("{} of the script", "bring that code back"),
    "data": ("{} of the data", "put them back, or say where they are by --data-dir"),
}


def check_same(out, config, part, now):
    """Raise UserError where a part of config.json, {name: value}, is another one now."""
    began, (what, advice) = config[part] or {}, SHARED[part]
    for name in {**began, **now}:
        a, b = began.get(name, "none"), now.get(name, "none")
        if a != b:
            name = name.replace("_", "-") if part == "flags" else name
            other = f"began with another {what.format(name)} ({a}, now {b})"
            how = f"{advice}, or start a new run with another --out"
            raise UserError(f"{out}: {config['script']}.py {other}; {how}")


def commit():
    """Return the commit of the code, with "+changes" where its folder holds more; None without."""
    words, here = "git status --porcelain=v2 --branch".split(), pathlib.Path(__file__).parent
    with contextlib.suppress(OSError):  # no git
        status = subprocess.run(words, cwd=here, capture_output=True, text=True).stdout
        head = re.search(r"^# branch.oid (\w+)", status, re.M)
        return head and head[1] + "+changes" * bool(re.search(r"^[^#]", status, re.M))


def hardware(device):
    """Return what a device is called: the GPU, or the processor and how many cores are used."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpus = pathlib.Path("/proc/cpuinfo")
    name = cpus.exists() and re.search(r"^model name\s*: (.+)$", cpus.read_text(), re.M)
    return f"{name[1] if name else platform.machine()}, {common.CORES} cores"


class States:
    """A file for each client and round that it trained in: its state or, in clients/, its model.

    versions says which files count, {client: (round, CRC-32 of the file)}. One that checkpoint.pt
    does not name may be cut by a kill, and is then written anew; one that it names goes only after
    another checkpoint is there."""

    def __init__(self, folder, what="client state"):
        self.folder, self.what, self.versions = folder, what, {}
        self.committed = 0  # round of the checkpoint
        self.written, self.replaced = [], []  # files: not synced yet; named by the checkpoint alone

    def path(self, k, version):
        return self.folder / f"{k}-{version[0]}.pt"

    def get(self, k, default=None):
        """Return the state of client k, default before it has one. UserError for a wrong file."""
        version = self.versions.get(k)
        return load(self.path(k, version), self.what, version[1]) if version else default

    def write(self, k, state, t):
        """Write the state that client k leaves in round t. Return its version, None without one."""
        if not state and k not in self.versions:
            return None
        check_leaves(state, "client.state", PLAIN)
        self.folder.mkdir(exist_ok=True)
        with packed(state).getbuffer() as content:
            version = t, zlib.crc32(content)
            self.remove(self.path(k, version))  # what a kill has left
            with open(self.path(k, version), "wb") as f:
                f.write(content)
        self.written.append(self.path(k, version))
        return version

    def note(self, k, version):
        """Let the version of its state that client k left count, if it left one."""
        before = self.versions.get(k)
        if version:
            self.versions[k] = version
        if version and before and before[0] > self.committed:
            self.remove(self.path(k, before))
        elif version and before:
            self.replaced.append(self.path(k, before))

    def sync(self):
        """Wait until all that was written would outlive a power failure."""
        if self.written:
            with ThreadPoolExecutor(16) as threads:  # which the disk serves together
                list(threads.map(sync_path, self.written))
            sync_path(self.folder)
        self.written.clear()

    def commit(self, t):
        """Remove what the checkpoint of round t, which is written, names no more."""
        for path in self.replaced:
            self.remove(path)
        self.replaced.clear()
        self.committed = t

    def table(self):
        """Return versions as a tensor (clients, 3) of id, round and CRC-32."""
        rows = [(k, *version) for k, version in self.versions.items()]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3)

    def restore(self, table, t):
        """Go back to the table() of the checkpoint of round t."""
        self.versions = {k: (t, crc) for k, t, crc in table.tolist()}
        self.committed = t

    def check(self):
        """Raise UserError where a file that counts is missing, whether its client trains or not."""
        for path in itertools.starmap(self.path, self.versions.items()):
            if not path.exists():
                raise UserError(f"{path}: no such {self.what}")

    def sweep(self):
        """Remove what kills have left, and the folder if it is empty."""
        named = set(itertools.starmap(self.path, self.versions.items()))
        for path in set(self.folder.glob("*-*.pt")) - named:
            if re.fullmatch(r"\d+-\d+", path.stem):  # others are not ours to delete
                self.remove(path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def remove(self, path):
        with contextlib.suppress(OSError):  # not there, or somebody's folder
            path.unlink()


class RunFolder:
    """The folder of a run, from which it resumes exactly."""

    def __init__(self, args, code=None):
        """Take args of a run and code_of() its method. Nothing is read or written yet."""
        self.args, self.out, self.code = args, pathlib.Path(args.out), code or {}
        self.config, self.digests, self.workers = None, None, None  # of a resumed run
        self.rows, self.written = [], 0  # how many of them this process has in metrics.jsonl
        self.best, self.published = None, None  # weights: the best so far, and those in best.pt
        self.states = States(self.out / "states")
        self.models = States(self.out / "clients", "model")  # of the last round
        self.lock, self.taken = None, False

    def take(self):
        """Lock the folder and look into it; UserError, before any long work, if it is not free."""
        if not self.args.resume:
            self.out.mkdir(parents=True, exist_ok=True)
        self._lock()
        if self.args.resume:
            self.config = read_config(self.out)
            self._go_on()
        elif any(self.out.iterdir()):
            raise UserError(f"--out {self.out}: exists already; --resume it, or name another")

    def _lock(self):
        """Keep the folder from other processes until close(); without locks say so and go on."""
        try:
            import fcntl

            self.lock = os.open(self.out, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {self.out}: another process is writing to this run") from None
        except (ImportError, OSError) as e:
            advice = "see that no second process writes to this run"
            print(f"{self.out}: cannot be locked here ({e}); {advice}", file=sys.stderr)
        self.taken = True
        for path in self.out.glob("*.tmp"):  # what a kill has left; others are not ours to delete
            if re.fullmatch(r"(config|metrics|checkpoint|best|model)\.\w+\.\d+\.tmp", path.name):
                path.unlink()

    def _go_on(self):
        """Take on what the run began with. UserError where flags or code are others."""
        args, config, flags = self.args, self.config, self.config["flags"]
        decisive = {k: v for k, v in flag_values(args).items() if k not in FREE_ON_RESUME}
        known = {k: v for k, v in decisive.items() if k in flags}  # others came later
        check_same(self.out, config, "flags", flags | known)
        if args.rounds < flags["rounds"]:
            raise UserError(f"--rounds: {args.rounds} is less than the run's {flags['rounds']}")
        check_same(self.out, config, "code", self.code)
        self._compare_versions()
        # 0 workers: a GPU's number was never settled
        same = args.workers == flags["workers"]
        workers = config["workers"] if same else common.workers_and_threads(args)[0]
        self.workers = workers, config["threads"]  # which decide the result
        args.capture = args.graph and config.get("graph", True)

    def _compare_versions(self):
        """Say where the run began with other VERSIONS, which may change the last bits."""
        began = VERSIONS | self.config["versions"]
        changed = [f"{k} {began[k]} (now {v})" for k, v in VERSIONS.items() if began[k] != v]
        if changed:
            print(f"{self.out}: began with {' and '.join(changed)}", file=sys.stderr)

    def close(self):
        """Unlock the folder, and remove it if nothing was written."""
        if self.taken:
            with contextlib.suppress(OSError):
                self.out.rmdir()
        if self.lock is not None:
            os.close(self.lock)

    def know_data(self, fed):
        """Keep the digests of the run's data."""
        self.digests = data_digests(fed.data, fed.parts + (fed.tests or []))

    def create(self, workers, threads):
        """Write down all that a new run depends on."""
        args, flags = self.args, flag_values(self.args)
        decisive = {k: v for k, v in flags.items() if k not in FREE_ON_RESUME}
        self.config = {
            "run": checksum([], [args.script, decisive, self.digests, self.code]),
            "script": args.script,
            "flags": flags,
            "workers": workers,
            "threads": threads,
            "moved": args.moved,
            "augment": args.augmented,
            "device": hardware(args.device),
            "versions": {"python": platform.python_version(), **VERSIONS},
            "code": self.code,
            "commit": commit(),
            "data": self.digests,
        }
        self.write_config()

    def restore(self, fed):
        """Fill fed from the checkpoint, if there is one, and forget the rounds after it.

        Nothing is written, for the resume may yet be refused."""
        check_same(self.out, self.config, "data", self.digests)
        path, flags = self.out / "checkpoint.pt", self.config["flags"]
        if path.exists():
            state, self.rows = read_checkpoint(self.out, self.config)
            fed.net.load_state_dict(state["net"])
            fed.server.update(tree_map(lambda t: t.to(fed.pool.device), state["server"]))
            self.states.restore(state["clients"], fed.server["round"])
            self.models.restore(state["models"], fed.server["round"])
            self.best = state["best"]
            self.states.check()
        else:
            rounds = len(read_rows(self.out, self.config))
            if rounds > flags["checkpoint_every"] or (self.out / "model.pt").exists():
                raise UserError(f"{path}: missing, though metrics.jsonl has {rounds} rounds")
        for flag in ("rounds", "checkpoint_every", "save_clients"):  # by which the next resume goes
            flags[flag] = getattr(self.args, flag)
        self.config.pop("stopped", None)  # by on_round

    def keep_client(self, fed, client, weights):
        """Note what a client left and, with --save-clients, write its model of the last round."""
        k, t = client.id, fed.server["round"]
        self.states.note(k, client.version)
        if self.args.save_clients and t == self.args.rounds:
            self.models.note(k, self.models.write(k, weights, t))

    def keep(self, fed, row):
        """Keep a round: its row, the best weights and, where it is due, a checkpoint.

        A resumed run writes nothing before its first checkpoint: where it is refused until then,
        for the state of a client say, it has changed nothing."""
        self._note_allowed(fed)
        before = self.rows[-1]["crc32"] if self.rows else int(self.config["run"], 16)
        self.rows.append(sealed(row, before))
        if common.best_row(self.rows) is self.rows[-1]:
            weights = fed.net.state_dict()
            self.best = tree_map(lambda t: t.detach().to("cpu", copy=True), weights)
        if row["round"] == self.args.rounds or row["round"] % self.args.checkpoint_every == 0:
            self.checkpoint(fed)
        elif self.written or not self.args.resume:
            self.write_rows()

    def _note_allowed(self, fed):
        """Note what a GPU has allowed: the number of workers, and steps as CUDA graphs."""
        lost = self.config.get("graph") and not fed.args.capture
        if lost and self.args.resume and self.args.deterministic:
            why = f"a step cannot be a CUDA graph now, as --deterministic has it in {self.out}"
            raise UserError(f"--resume: {why}; start a new run with --no-graph and another --out")
        self.config |= {"workers": len(fed.pool.workers), "graph": fed.args.capture}

    def checkpoint(self, fed):
        """Commit the state of fed after the last row: first what it names, then what names it."""
        t = fed.server["round"]
        check_leaves(fed.server, "server", PLAIN)
        self.models.versions = {k: v for k, v in self.models.versions.items() if v[0] == t}
        self.states.sync()
        self.models.sync()
        (self.out / "model.pt").unlink(missing_ok=True)  # which would call the new rows finished
        self.write_rows()
        self.write_config()
        state = {
            "run": self.config["run"],
            "rows_crc32": self.rows[-1]["crc32"],
            "net": fed.net.state_dict(),
            "best": self.best,
            "server": fed.server,
            "clients": self.states.table(),
            "models": self.models.table(),
        }
        save(state, self.out / "checkpoint.pt")
        self.states.commit(t)
        self.models.sweep()
        self.publish()

    def write_rows(self):
        """Add the new rows to metrics.jsonl, which is written anew if it is not this process'."""
        path = self.out / "metrics.jsonl"
        more = self.written and path.exists()
        rows = self.rows[self.written :] if more else self.rows
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if more:
            with open(path, "ab") as f:
                f.write(content)
            sync_path(path)
        else:
            write_atomically(path, content)
        self.written = len(self.rows)

    def write_config(self):
        """Write config.json where it is another than before, or has been deleted."""
        before, self.config = self.config, sealed(self.config)
        path = self.out / "config.json"
        if before != self.config or not path.exists():
            write_atomically(path, (json.dumps(self.config, indent=1) + "\n").encode())

    def publish(self):
        """Write best.pt anew where there are better weights."""
        if self.best is not self.published:
            save(self.best, self.out / "best.pt")
            self.published = self.best

    def stop(self, fed):
        """Commit the round in which on_round has ended the run, and note that."""
        self.checkpoint(fed)
        self.config["stopped"] = fed.server["round"]
        self.write_config()

    def finish(self, net):
        """Write model.pt and best.pt, and remove what kills have left."""
        save(net.state_dict(), self.out / "model.pt")
        self.publish()
        self.states.sweep()
        self.models.sweep()
