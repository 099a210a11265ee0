"""Several processes of torchrun end with the run of one, bit for bit, and fail as one."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, refusal
from methods import ROOT, SHORT, VARIANTS, needed
from makers import make_run, read_rows
import runs
from runs import assert_equal_runs, config_of, rounds_in, write_config

import common
from extras import ranks as torchrun

DRIVER = """
import importlib, sys
import common
import extras.glyphs
extras.glyphs.GLYPHS = (600, 200)
for line in open(sys.argv[1]).read().splitlines():
    name, *_ = sys.argv = line.split()
    with common.one_line_errors():
        importlib.import_module(name).main()
"""


def start(lines, ranks, folder, before="", options=(), **more):
    """Start torchrun, whose ranks run before and the lines, SCRIPT FLAGS; folder: for a file."""
    path = folder / f"lines-{time.monotonic_ns()}"
    path.write_text("\n".join(lines))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    torchrun += [f"--nproc-per-node={ranks}", "--no-python", sys.executable]
    command = [*torchrun, "-c", before + DRIVER, str(path)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"  # where a process dies of a signal
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def run_ranks(lines, ranks, folder, **options):
    """Run lines as start() does; return exit code and stderr."""
    process = start(lines, ranks, folder, **options)
    _, err = process.communicate(timeout=900)
    return process.returncode, err


def run_here(lines):
    for name, *argv in map(str.split, lines):
        importlib.import_module(name).main(argv)


STEPS = ["--rounds", "3", "--local-steps", "3", "--workers"]
pytestmark = pytest.mark.usefixtures("one_thread")
RUNS = {  # each way that something travels: sums, records, states, a second synchronisation
    "killed": "scaffold",
    "momentum": "fedavg --persist-opt --client-test --server adam --save-clients",
    "sums": "scaffold --sample 0.5 --checkpoint-every 2",
    "integers": "fedavg --model resnet8 --save-clients --clients 3",  # batch norm counts batches
    "doubles": "qfedavg --drop-last --batch-size 60 --clients 6",
    "records": "rfedavg --variant rfedavg --sample 0.5",
    "second": "rfedavg --sample 0.5 --clients 6",
    # bytes of a part of the model, clients' own networks; evaluation of held-out samples
    "personal": "fedper --sample 0.5 --clients 6 --client-test --validation 0.2 --metric all",
}


DYING = """
import atexit, contextlib, os, pathlib, signal, sys, time
from extras.ranks import Folder
def gloo():
    # Yield the names of gloo's threads in this process.
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if "gloo" in (name := path.read_text().strip()):
                yield name

keep = Folder.keep
def dying(folder, fed, row):
    keep(folder, fed, row)
    assert [*gloo()] or sys.platform != "linux"
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and row["round"] == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
Folder.keep = dying

@atexit.register
def alone():
    # Registered before Ranks.leave(), so called after it.
    end = time.monotonic() + 10
    while [*gloo()] and time.monotonic() < end:
        time.sleep(0.05)  # the kernel may list a thread a little after its end
    if names := [*gloo()]:
        print("threads left at the exit:", *names, file=sys.stderr, flush=True)
        os._exit(3)
"""


def test_two_ranks_give_the_run_of_one_process(tmp_path):
    """Also a run that one process began, and one that torchrun restarts after a kill.

    No thread of gloo is left at the exit."""

    def lines(place, workers):
        for key, words in RUNS.items():
            yield " ".join([words, *TINY, *STEPS, workers, "--out", str(tmp_path / place / key)])

    cut, back = tmp_path / "cut", tmp_path / "back"
    argv = " ".join([RUNS["sums"], *TINY, *STEPS, "1"])
    run_here([*lines("one", "2"), f"{argv} --rounds 2 --out {cut}"])
    on = f"scaffold --out {cut} --resume --rounds 3 --workers 2 --quiet"
    more = [on, f"{argv} --rounds 1 --out {back}"]
    options = ["--max-restarts", "1"]
    code, err = run_ranks([*lines("two", "1"), *more], 2, tmp_path, before=DYING, options=options)
    assert code == 0, err
    run_here([on.replace(str(cut), str(back))])
    for key in RUNS:
        assert_equal_runs(tmp_path / "one" / key, tmp_path / "two" / key)
    for out in (cut, back):
        assert_equal_runs(tmp_path / "one" / "sums", out)


FROM_PYTHON = """
import contextlib, functools, json, os, sys
from unittest.mock import patch
import extras.glyphs
import torch
import common, fedavg, scaffold

RANK = int(os.environ["RANK"])
FOLDER, *WORDS = sys.argv[1:]
a, b = f"{FOLDER}/a", f"{FOLDER}/b"

def stopped(name, others):
    on_round = others if RANK else lambda row, net: row["round"] == 2
    run = functools.partial(common.run, on_round=on_round)
    _, rows = fedavg.main([*WORDS, "--out", f"{FOLDER}/{name}"], run=run)
    with open(f"{FOLDER}/{name}-{RANK}", "w") as f:
        json.dump(rows, f)

def attempt(name, *words, script=fedavg, changed=None, **own):
    # Note what comes of a run in the folder of this name, with changed as in patch.object().
    run = functools.partial(common.run, **own)
    line = "trained"
    with patch.object(*changed) if changed else contextlib.nullcontext():
        try:
            script.main([*WORDS, "--out", name, *words], run=run)
        except common.UserError as e:
            line = str(e)
    with open(f"{FOLDER}/lines-{RANK}", "a") as f:
        print(line, file=f)

def own(data_seed, net_seed):
    torch.manual_seed(data_seed)
    x, y = torch.randn(60, 12), torch.arange(60) % 3
    torch.manual_seed(net_seed)
    net = torch.nn.Sequential(torch.nn.Flatten(), common.Classifier(12, 3))
    return {"data": common.Data(x, y, x, y, classes=3), "net": net}

def faulty(worker, client, server, args, original=fedavg.local_update):
    if server["round"] == 2 and RANK == 1:
        raise common.UserError("rank 1 has no more")
    yield from original(worker, client, server, args)

def main():
    stopped("sooner", lambda row, net: True)
    stopped("none", None)
    ATTEMPTS
    sys.argv = ["fedavg.py", *WORDS, "--out", f"{FOLDER}/run"]
    with common.one_line_errors(), patch.object(fedavg, "local_update", faulty):
        fedavg.main()
"""
ATTEMPTS = [  # what a rank does, and how the line begins that it gets
    ('a, "--workers", "12"[RANK], "--data-dir", "xy"[RANK]', "trained"),
    ("a", "--out FOLDER/a: exists already"),  # rank 0 alone looks into the folder
    ('b, "--lr", ["0.05", "0.5"][RANK]', "--lr: 0.5 on rank 1, and 0.05 on rank 0"),
    ("b, script=[fedavg, scaffold][RANK]", "script: scaffold on rank 1, and fedavg on rank 0"),
    ('f"{FOLDER}/{RANK}"', "--out: FOLDER/1 on rank 1"),
    ('b, changed=(torch, "__version__", "67"[RANK])', "torch: 7 on rank 1, and 6 on rank 0"),
    ('b, changed=(common, "CORES", RANK + 1)', "threads of a worker: 2 on rank 1, and 1 on"),
    (
        'b, changed=(fedavg, "local_update", [faulty, scaffold.local_update][RANK])',
        "code of local_",
    ),
    ('b, changed=(extras.glyphs, "GLYPHS", (600 - 100 * RANK, 200))', "labels of the data: "),
    ("b, **own(RANK, 0)", "--dataset: own-"),
    ("b, **own(0, RANK)", "weights of the initial network: "),
    ('os.chdir(f"{FOLDER}/node{RANK}") or "c"', "config.json in --out c: none on rank 1"),
]


def test_ranks_from_python(tmp_path):
    """Rank 0 says when to stop, all refuse what differs, and an error of one rank is one line.

    The first rank leaves with 2, and torchrun may be faster to end the others."""
    attempts = "\n    ".join(f"attempt({words})" for words, _ in ATTEMPTS)
    (tmp_path / "script.py").write_text(FROM_PYTHON.replace("ATTEMPTS", attempts))
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
    line = " ".join(["script", str(tmp_path), *TINY, *STEPS, "1"])
    on_path = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    code, err = run_ranks([line], 2, tmp_path, before=on_path)
    for name in ("sooner", "none"):
        out = tmp_path / name
        assert config_of(out)["stopped"] == rounds_in(out) == 2
        for rank in range(2):
            assert json.loads((tmp_path / f"{name}-{rank}").read_text()) == read_rows(out)

    alike = "; all need the same flags, code, data and initial network"
    lines, others = ((tmp_path / f"lines-{rank}").read_text().splitlines() for rank in range(2))
    assert lines == others
    for text, (_, beginning) in zip(lines, ATTEMPTS, strict=True):
        assert text.startswith(beginning.replace("FOLDER", str(tmp_path)))
        assert text.endswith(alike) or text in lines[:2]
    assert not (tmp_path / "b").exists() and not (tmp_path / "node0" / "c").exists()

    assert code == 1  # torchrun's own
    [found] = [text for text in err.splitlines() if ".py: error:" in text]
    assert found == "fedavg.py: error: rank 1 has no more"
    other, first = (int(code) for code in re.findall(r"exitcode +: (-?[0-9]+)", err))
    assert first == 2 and other in (2, -signal.SIGTERM), err
    assert rounds_in(tmp_path / "run") == 1


def test_an_error_before_ranks_are_joined_is_one_line(tmp_path, monkeypatch):
    """In the flags of rank 1; here started without torchrun, as other launchers do."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": s.getsockname()[1]}
    ranks = []
    for rank in range(2):
        for name, value in {**place, "RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        argv = [*TINY, "--out", str(tmp_path / "run"), *["--lr", "x"] * rank]
        ranks.append(runs.start("fedavg", *argv, stderr=subprocess.PIPE))
    lines = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert lines[0].startswith("fedavg.py: error: argument --lr: must be a number")
    assert (lines[0].count("\n"), lines[1]) == (1, "")


@pytest.mark.parametrize("end, words", [(signal.SIGINT, "interrupted"), (signal.SIGKILL, "ended")])
def test_all_ranks_end(tmp_path, end, words):
    """At Ctrl-C, which a terminal sends to all, and where torchrun is killed; in one line."""
    out = tmp_path / "run"
    line = " ".join(["fedavg", *TINY, "--rounds", "5000", "--local-steps", "2", "--out", str(out)])
    process = start([line], 2, tmp_path, start_new_session=True)
    while not rounds_in(out) and process.poll() is None:
        time.sleep(0.05)
    (os.killpg if end == signal.SIGINT else os.kill)(process.pid, end)
    _, err = process.communicate(timeout=60)  # the pipe is open until all have ended
    [line] = [text for text in err.splitlines() if "fedavg.py: " in text]
    assert words in line and "--resume" in line


@pytest.mark.parametrize(
    "costs, ranks, owners",
    [([5, 9, 2, 4], 2, [1, 0, 0, 1]), ([3, 3, 3], 4, [0, 1, 2]), ([0, 0, 0], 2, [0, 1, 0])],
)
def test_the_longest_go_first(costs, ranks, owners):
    assert torchrun.share(costs, ranks) == owners


def test_views_keep_layout_and_alignment():
    images = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    tensors = [torch.tensor(True), images, torch.arange(5), torch.zeros(0), torch.tensor(2.5)]
    _, parts = torchrun.views([t.to("meta") for t in tensors], "cpu")
    for t, part in zip(tensors, parts):
        part.copy_(t)
        assert (part.dtype, part.shape, part.stride()) == (t.dtype, t.shape, t.stride())
        assert part.data_ptr() % 64 == 0 or t.numel() == 0
    assert all(torch.equal(t, part) for t, part in zip(tensors, parts))


def test_what_a_rank_sends_is_where_the_others_have_it(monkeypatch):
    """On the device, also a number that a client has made on the CPU."""
    monkeypatch.setattr(torchrun, "RANK", 0)
    monkeypatch.setattr(torchrun, "send", lambda *_: None)
    monkeypatch.setattr(torchrun, "broadcast", lambda value, owner: value)
    net, client = torch.nn.Linear(2, 1, device="meta"), common.Client(0, np.arange(1))
    client.sum("a", torch.tensor(1.0))
    client.record("b", [torch.ones(2)])
    worker = SimpleNamespace(global_net=net, device=torch.device("meta"))
    client, _ = torchrun.exchange(client, net.state_dict(), 0, worker, None)
    assert client.sums["a"].is_meta and client.records["b"][0].is_meta


@pytest.mark.parametrize(
    "argv, words",
    [("", "--out: needed"), ("--out x --device cuda", "--device: under torchrun cuda, one GPU a ")],
)
def test_flags_under_torchrun(monkeypatch, argv, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torchrun, "LOCAL_RANK", 2)
    args = common.flags("", "fedavg").parse_args(argv.split())
    assert refusal(torchrun.join, args).startswith(f"argument {words}")


def test_only_an_attempt_of_the_same_torchrun_is_resumed(tmp_path, monkeypatch):
    """A folder that was there before is refused, restarted or not."""
    out = make_run(tmp_path / "run")
    monkeypatch.setattr(torchrun, "STARTER", "abc")
    assert not torchrun.began_here(out) and not torchrun.began_here(tmp_path)
    assert torchrun.began_here(write_config(out, torchrun="abc"))


@pytest.mark.parametrize("rank, size, found", [("", 4, False), ("0", 4, True), ("0", 1, False)])
def test_one_process_is_no_torchrun(monkeypatch, rank, size, found):
    """Nor is what other launchers start, whose variables are not read."""
    monkeypatch.setenv("WORLD_SIZE", str(size))
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert common.under_torchrun() == found


@pytest.mark.skipif("EVERY_METHOD" not in os.environ, reason="takes many minutes: EVERY_METHOD=1")
@pytest.mark.parametrize("ranks, workers", [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_every_method(tmp_path, ranks, workers):
    def lines(place, workers):
        for i, (name, more) in enumerate(VARIANTS):
            words = [*TINY, *needed(name, more.split()), *SHORT[:-1], str(workers), *more.split()]
            yield " ".join([name, *words, "--out", str(tmp_path / place / str(i))])

    run_here(lines("one", 1))
    code, err = run_ranks(lines("several", workers), ranks, tmp_path)
    assert code == 0, err
    for i in range(len(VARIANTS)):
        assert_equal_runs(tmp_path / "one" / str(i), tmp_path / "several" / str(i))
