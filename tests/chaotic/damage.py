"""Files of a run or of its data that are damaged, exchanged or gone when the run is read again.

What reproduce.compare reads, config.json and metrics.jsonl, is text that a user may edit: other
numbers there are no failure of its. A resume has the checkpoint to hold them against."""

import contextlib
import os
import random
import shutil

import common
import run_folder
from chaotic.world import METHODS, SIGHTS, difference, files_of, train

COMMANDS = {  # what reads the files, and in which folder of the World
    "resume": "new",
    "extend": "2-{}",
    "begin": "4-{}",
    **dict.fromkeys(SIGHTS, "4-{}"),
}


# --- damages to a path of a folder; rng: of random.Random. Each returns what it did.


def flip(path, world, rng):
    content = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def cut_short(path, world, rng):
    size = rng.choice([0, rng.randrange(path.stat().st_size)])
    os.truncate(path, size)
    return f"cut to {size} bytes"


def zero(path, world, rng):
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)
    return f"zeros from byte {start} on"


def delete(path, world, rng):
    path.unlink()
    return "deleted"


def become(path, world, rng):
    path.unlink()
    kind = rng.choice(["folder", "FIFO", "link to itself", "link to nothing"])
    make = {"folder": path.mkdir, "FIFO": lambda: os.mkfifo(path)}
    make.get(kind, lambda: path.symlink_to(path if kind == "link to itself" else "nothing"))()
    return f"now a {kind}"


def exchange(path, world, rng):
    """Put another file of the same sort in its place, with its own or with the old one's times."""
    others = [p for p in world.root.glob("[24]-*/**/*") if p.suffix == path.suffix and p.is_file()]
    other = rng.choice([p for p in sorted(others) if p.read_bytes() != path.read_bytes()])
    stat = path.stat()
    shutil.copyfile(other, path)
    if rng.random() < 0.5:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return f"now {other.relative_to(world.root)}"


def join(path, world, rng):
    """Put a file of the user's beside it."""
    name = rng.choice([f"{path.stem} (1){path.suffix}", "notes.tmp", "notes.txt"])
    shutil.copy(path, path.with_name(name))
    return f"joined by {name}"


DAMAGES = [flip, flip, flip, cut_short, zero, delete, become, exchange, exchange, join]


# --- a case


def case(world, n):
    """Damage a file and read the run; return what was done, and what is wrong, "" if nothing."""
    rng = random.Random(f"{world.seed} damage {n}")
    i, command = rng.randrange(len(METHODS)), rng.choice([*COMMANDS])
    damage = rng.choice(DAMAGES)
    with world.copy(COMMANDS[command].format(i)) as folder:
        if command == "resume":  # of a run that was killed after a checkpoint
            count = len(world.operations[i])
            train(folder, METHODS[i], "--rounds", 4, how="kill", at=rng.randint(count // 2, count))
        if command == "begin":  # anew, on data that have a cache
            shutil.rmtree(folder / "run")
        part = folder / ("data" if command == "begin" or rng.random() < 0.2 else "run")
        paths = sorted(p for p, content in files_of(part).items() if content)
        path = rng.choice([p for p in paths if command != "begin" or p.name.startswith(".cache")])
        if path.suffix in (".json", ".jsonl") and command == "compare":
            damage = rng.choice([delete, become])
        what = f"{METHODS[i]}, {command}, {path.relative_to(folder)}: "
        others, whole = {*path.parent.iterdir()}, path.read_bytes()
        what += damage(path, world, rng)
        joined, damaged = {*path.parent.iterdir()} - others, mark(path)
        fault = read_again(world, folder, i, command, joined)
        if fault is None:
            whole_run = world.root / f"4-{i}" / "run"
            unread = path.parent.name in ("states", "clients") or damaged is None
            if unread and mark(path) == damaged and (whole_run / path.relative_to(part)).exists():
                put_back(path, whole)  # the client has not trained again; no model was better
            fault = difference(whole_run, folder / "run")
            fault = fault and f"done without a word, but {fault}"
        return what, fault


def mark(path):
    """Return what tells whether a path is still the one that it was, None if it is not there."""
    return os.path.lexists(path) and (os.lstat(path).st_ino, os.lstat(path).st_mtime_ns) or None


def put_back(path, content):
    """Let a path hold a file's content again."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def committed(folder):
    """Return the round of a run's checkpoint, 0 where none can be read."""
    with contextlib.suppress(common.UserError, LookupError, TypeError):  # another file's
        return run_folder.load(folder / "run" / "checkpoint.pt")["server"]["round"]
    return 0


def lost(folder, before):
    """Return the files, {path: bytes}, that a resume may not change before it is refused, and has.

    It may make another cache; and what no checkpoint names may go, or be trained anew."""
    out, after = folder / "run", files_of(folder)
    free = {p for p in before if p.name.startswith(".")}
    with contextlib.suppress(common.UserError, LookupError, TypeError):  # another file's
        state = run_folder.load(out / "checkpoint.pt")
        for part, table in (("states", state["clients"]), ("clients", state["models"])):
            named = {f"{k}-{t}.pt" for k, t, _ in table.tolist()}
            free |= {p for p in before if p.parent == out / part and p.name not in named}
    return [path for path in before if path not in free and after.get(path) != before[path]]


def read_again(world, folder, i, command, joined):
    """Return what is wrong with a command on a run that was damaged, "" if nothing.

    None where a run was trained to its end, which is to be compared with an uncut one's. joined:
    files of the user's that must stay."""
    before, begun = files_of(folder), committed(folder)
    if command in SIGHTS:
        outcome, found = world.see(folder, command)
        same = found == world.seen(i, 4, command)
    else:
        outcome = train(folder, METHODS[i], "--rounds", 4, how="none")
    fault = outcome.fault(0, 2)
    if fault:
        return fault
    gone = [path.name for path in joined if not path.exists()]
    if gone:
        return f"{gone[0]}, which is the user's, was removed"
    if outcome.code == 2:
        if committed(folder) > begun:
            return ""  # it has trained some before it read the file
        changed = [path.relative_to(folder) for path in lost(folder, before)]
        return changed and f"refused, but changed {changed[0]}" or ""
    if command in SIGHTS:
        return "" if same else "other results, without a word"
    for path in joined:
        path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # which stayed for its sake
    return None
