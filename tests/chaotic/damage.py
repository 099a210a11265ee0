"""Files of a run or of its data that are damaged, exchanged or gone when the run goes on."""

import contextlib
import os
import random
import shutil

import common
import run_folder
from chaotic.world import METHODS, files_of, train
from runs import difference

FOLDERS = {"resume": "new", "extend": "2-{}", "begin": "4-{}"}  # of the World
KINDS = "flip flip flip cut zeros deleted folder pipe link exchange exchange".split()


def damage(path, world, rng):
    """Damage a file, or put another one of its sort or something else in its place.

    Returns what was done. An exchanged file may have the old one's times."""
    others = [p for p in world.root.glob("[24]-*/**/*") if p.suffix == path.suffix and p.is_file()]
    content, stat, kind = path.read_bytes(), path.stat(), rng.choice(KINDS)
    at = rng.choice([0, rng.randrange(len(content))])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(rng.choice([path, "nothing"]))
    elif kind == "exchange":
        shutil.copyfile(rng.choice([p for p in sorted(others) if p.read_bytes() != content]), path)
        if rng.random() < 0.5:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif kind != "deleted":
        rest = {
            "cut": b"",
            "flip": bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        }
        rest["zeros"] = bytes(len(content[at : at + 512])) + content[at + 512 :]
        path.write_bytes(content[:at] + rest[kind])
    return f"{kind}, at {at}"


def case(world, n):
    """Damage a file and read the run; return what was done, and what is wrong, "" if nothing."""
    rng = random.Random(f"{world.seed} damage {n}")
    i, command = rng.randrange(len(METHODS)), rng.choice([*FOLDERS])
    with world.copy(FOLDERS[command].format(i)) as folder:
        if command == "resume":  # of a run that was killed after a checkpoint
            count = len(world.operations[i])
            train(folder, METHODS[i], "--rounds", 4, how="kill", at=rng.randint(count // 2, count))
        if command == "begin":  # anew, on data that have a cache
            shutil.rmtree(folder / "run")
        part = folder / ("data" if command == "begin" or rng.random() < 0.2 else "run")
        paths = sorted(p for p, content in files_of(part).items() if content)
        path = rng.choice(paths)
        what, whole = f"{METHODS[i]}, {command}, {path.relative_to(folder)}: ", path.read_bytes()
        what += damage(path, world, rng)
        damaged = mark(path)
        fault = read_again(folder, i)
        if fault is None and command == "begin" and path.suffix == ".png":
            fault = ""  # trained, on another image
        if fault is None:
            whole_run = world.root / f"4-{i}" / "run"
            if path.is_dir() and not (whole_run / path.relative_to(part)).exists():
                path.rmdir()  # somebody's, which no run removes
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


def read_again(folder, i):
    """Return what is wrong with a resume of a run that was damaged, "" if nothing.

    None where it was trained to its end, and is to be compared with an uncut one."""
    before, begun = files_of(folder), committed(folder)
    outcome = train(folder, METHODS[i], "--rounds", 4, how="none")
    fault = outcome.fault(0, 2)
    if fault:
        return fault
    if outcome.code == 2:
        if committed(folder) > begun:
            return ""  # it has trained some before it read the file
        changed = [path.relative_to(folder) for path in lost(folder, before)]
        return changed and f"refused, but changed {changed[0]}" or ""
    return None
