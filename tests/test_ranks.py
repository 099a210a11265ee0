"""Several processes of torchrun end with the run of one, bit for bit, and fail as one.

The whole matrix of methods, ranks and workers is in tests/ranks.py, which is
run by hand."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import TINY
from ranks import assert_equal, run_ranks, start
from runs import config_of, rounds_in, write_config

import common
import fedavg
import scaffold
from extras import ranks as torchrun
from methods import ROOT

STEPS = ["--rounds", "3", "--local-steps", "3", "--workers"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A worker has one thread, as under torchrun."""
    monkeypatch.setattr(common, "CORES", 1)


RUNS = {  # each way that something travels: sums, records, states, a second synchronisation
    "momentum": "fedavg --persist-opt --client-test --server adam --save-clients",
    "sums": "scaffold --sample 0.5 --checkpoint-every 2",
    "integers": "fedavg --model resnet8 --save-clients --clients 3",  # batch norm counts batches
    "doubles": "qfedavg --drop-last --batch-size 60 --clients 6",
    "records": "rfedavg --variant rfedavg --sample 0.5",
    "second": "rfedavg --sample 0.5 --clients 6",
    # bytes of a part of the model, clients' own networks; evaluation of held-out samples
    "personal": "fedper --sample 0.5 --clients 6 --client-test --validation 0.2 --metric all",
}


def on_path(folder):
    """Return code that lets ranks import from a folder."""
    return f"import sys; sys.path.append({str(folder)!r})\n"


def test_two_ranks_give_the_run_of_one_process(tmp_path):
    """Also a run that one process began and two went on with, and the other way round."""
    lines = []
    for key, words in RUNS.items():
        name, *words = words.split()
        words = [*TINY, *words, *STEPS]
        importlib.import_module(name).main([*words, "2", "--out", str(tmp_path / "one" / key)])
        lines.append(" ".join([name, *words, "1", "--out", str(tmp_path / "two" / key)]))
    cut, back = tmp_path / "cut", tmp_path / "back"
    argv = [*TINY, *RUNS["sums"].split()[1:], *STEPS, "1"]
    scaffold.main([*argv, "--rounds", "2", "--out", str(cut)])
    lines.append(f"scaffold --out {cut} --resume --rounds 3 --workers 2 --quiet")
    lines.append(" ".join(["scaffold", *argv, "--rounds", "1", "--out", str(back)]))
    code, err = run_ranks(lines, 2, tmp_path)
    assert code == 0, err
    scaffold.main(["--out", str(back), "--resume", "--rounds", "3", "--workers", "2"])
    for key in RUNS:
        assert_equal(tmp_path / "one" / key, tmp_path / "two" / key)
    for out in (cut, back):
        assert_equal(tmp_path / "one" / "sums", out)
    names = {path.name for path in (tmp_path / "two" / "momentum" / "clients").iterdir()}
    assert names == {f"{k}-3.pt" for k in range(4)}


def check_exit_codes(err):
    """Check that the first rank to leave did so with 2, the others too unless torchrun was faster.

    It ends those that are left when it sees that one has gone."""
    found = [int(code) for code in re.findall(r"exitcode +: (-?[0-9]+)", err)]
    assert len(found) == 2, err
    assert found[-1] == 2, err  # its last paragraph is of the first to leave
    assert found[0] in (2, -signal.SIGTERM), err


FAULTY = """
import os, common, fedavg
def local_update(worker, client, server, args):
    if server["round"] == 2 and os.environ["RANK"] == "1":
        raise common.UserError("rank 1 has no more")
    yield from original(worker, client, server, args)
original, fedavg.local_update = fedavg.local_update, local_update
"""


def test_an_error_of_one_rank_is_one_line(tmp_path):
    """From rank 0, and all end with exit code 2."""
    out = tmp_path / "run"
    line = " ".join(["fedavg", *TINY, *STEPS, "1", "--out", str(out)])
    code, err = run_ranks([line], 2, tmp_path, before=FAULTY)
    assert code == 1  # torchrun's own
    [found] = [text for text in err.splitlines() if ".py: error:" in text]
    assert found == "fedavg.py: error: rank 1 has no more"
    check_exit_codes(err)
    assert rounds_in(out) == 1


STOPPING = """
import functools, json, os, sys
import common, fedavg

def main():
    out, *words = sys.argv[1:]
    rank = os.environ["RANK"]
    for name, others in (("sooner", lambda row, net: True), ("none", None)):
        on_round = others if rank == "1" else lambda row, net: row["round"] == 2
        run = functools.partial(common.run, on_round=on_round)
        _, rows = fedavg.main([*words, "--out", f"{out}/{name}"], run=run)
        with open(f"{out}/{name}-{rank}", "w") as f:
            json.dump(rows, f)
"""


DIFFERING = """
import contextlib, functools, os, sys
from unittest.mock import patch
import extras.glyphs
import torch
import common, fedavg, scaffold

RANK = int(os.environ["RANK"])
FOLDER, *WORDS = sys.argv[1:]

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

def main():
    a, b = f"{FOLDER}/a", f"{FOLDER}/b"
    attempt(a, "--workers", "12"[RANK], "--data-dir", "xy"[RANK])
    attempt(a)  # rank 0 alone looks into the folder
    attempt(b, "--lr", ["0.05", "0.5"][RANK])
    attempt(b, script=[fedavg, scaffold][RANK])
    attempt(f"{FOLDER}/{RANK}")
    attempt(a, *["--resume"] * RANK)
    attempt(b, changed=(torch, "__version__", "67"[RANK]))
    attempt(b, changed=(common, "CORES", RANK + 1))
    update = [fedavg.local_update, scaffold.local_update][RANK]
    attempt(b, changed=(fedavg, "local_update", update))
    attempt(b, changed=(extras.glyphs, "GLYPHS", [(600, 200), (500, 200)][RANK]))
    torch.manual_seed(RANK)
    x, y = torch.randn(60, 12), torch.randint(0, 3, (60,))
    net = torch.nn.Sequential(torch.nn.Flatten(), common.Classifier(12, 3))
    attempt(b, data=common.Data(x, y, x, y, classes=3), net=net)
    x, y = torch.ones(60, 12), torch.arange(60) % 3
    attempt(b, data=common.Data(x, y, x, y, classes=3), net=net)
    os.chdir(f"{FOLDER}/node{RANK}")
    attempt("c")
    sys.argv = ["fedavg.py", *WORDS, "--out", b, "--lr", ["0.05", "0.5"][RANK]]
    with common.one_line_errors():
        fedavg.main()
"""


@pytest.fixture(scope="module")
def from_python(tmp_path_factory):
    """Return folder, exit code and stderr of two ranks that run STOPPING, then DIFFERING."""
    folder = tmp_path_factory.mktemp("from-python")
    lines = []
    for name, text in (("stopping", STOPPING), ("differing", DIFFERING)):
        (folder / f"{name}.py").write_text(text)
        lines.append(" ".join([name, str(folder), *TINY, *STEPS, "1"]))
    for rank in range(2):
        (folder / f"node{rank}").mkdir()
    return folder, *run_ranks(lines, 2, folder, before=on_path(folder))


def test_rank_0_says_when_to_stop(from_python):
    """Whatever on_round returns on the others, which may have none; all return the same rows."""
    folder, _, _ = from_python
    for name in ("sooner", "none"):
        out = folder / name
        assert config_of(out)["stopped"] == rounds_in(out) == 2
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert "crc32" in rows[1]
        for rank in range(2):
            assert json.loads((folder / f"{name}-{rank}").read_text()) == rows


def test_ranks_that_differ_are_refused(from_python):
    """On all of them, before anything is written; free flags may differ."""
    folder, code, err = from_python
    assert code == 1  # torchrun's own
    alike = "; all need the same flags, code, data and initial network"
    [found] = [text for text in err.splitlines() if ".py: error:" in text]
    assert found == f"fedavg.py: error: --lr: 0.5 on rank 1, and 0.05 on rank 0{alike}"
    check_exit_codes(err)
    lines, others = ((folder / f"lines-{rank}").read_text().splitlines() for rank in range(2))
    assert lines == others
    beginnings = [
        "trained",
        f"--out {folder}/a: exists already",
        "--lr: 0.5 on rank 1, and 0.05 on rank 0",
        "script: scaffold on rank 1, and fedavg on rank 0",
        f"--out: {folder}/1 on rank 1",
        "--resume: True on rank 1, and False on rank 0",
        "torch: 7 on rank 1, and 6 on rank 0",
        "threads of a worker: 2 on rank 1, and 1 on rank 0",
        "code of local_update: local_update ",
        "labels of the data: ",
        "--dataset: own-",
        "weights of the initial network: ",
        "config.json in --out c: none on rank 1",
    ]
    assert len(lines) == len(beginnings)
    for text, beginning in zip(lines, beginnings):
        assert text.startswith(beginning)
        assert text.endswith(alike) or text in lines[:2]
    for name in ("b", "node0/c"):
        assert not (folder / name).exists()


@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_an_error_before_ranks_are_joined_is_one_line(tmp_path, wrong):
    """In the flags of all or of one; here started without torchrun, as other launchers do."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": s.getsockname()[1]}
    ranks = []
    for rank in range(2):
        environment = os.environ | {k: str(v) for k, v in place.items()} | {"RANK": str(rank)}
        command = [sys.executable, "fedavg.py", *TINY, "--out", str(tmp_path / "run")]
        command += ["--lr", "x"] * (rank in wrong)
        pipe = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, **pipe))
    lines = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert lines[0].startswith("fedavg.py: error: argument --lr: must be a number")
    assert len(lines[0].splitlines()) == 1
    assert lines[1] == ""


DYING = """
import os, signal
from extras.ranks import Folder
keep = Folder.keep
def dying(folder, fed, row):
    keep(folder, fed, row)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and row["round"] == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
Folder.keep = dying
"""


def test_torchrun_goes_on_behind_a_killed_rank(tmp_path):
    """By itself, from the checkpoint, to the run that was never cut."""
    words = [*TINY, *STEPS]
    line = " ".join(["scaffold", *words, "1", "--out", str(tmp_path / "cut")])
    options = ["--max-restarts", "1"]
    code, err = run_ranks([line], 2, tmp_path, before=DYING, options=options)
    assert code == 0, err
    scaffold.main([*words, "1", "--out", str(tmp_path / "whole")])
    assert_equal(tmp_path / "whole", tmp_path / "cut")


def test_interrupt(tmp_path):
    """Ctrl-C, which a terminal sends to all processes, is one line."""
    out = tmp_path / "run"
    line = " ".join(["fedavg", *TINY, "--rounds", "5000", "--local-steps", "2", "--out", str(out)])
    process = start([line], 2, tmp_path, start_new_session=True)
    while not rounds_in(out) and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)  # the pipe is open until all have ended
    [line] = [text for text in err.splitlines() if ".py: interrupted" in text]
    assert f"--out {out} --resume" in line


@pytest.mark.parametrize(
    "costs, ranks, owners",
    [
        ([5, 9, 2, 4], 2, [1, 0, 0, 1]),
        ([3, 3, 3], 4, [0, 1, 2]),
        ([0, 0, 0], 2, [0, 1, 0]),
        ([1, 1, 1, 7], 2, [1, 1, 1, 0]),
    ],
)
def test_the_longest_go_first(costs, ranks, owners):
    assert torchrun.share(costs, ranks) == owners


def test_views_keep_layout_and_alignment():
    images = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    tensors = [
        torch.tensor(True),
        images,
        torch.arange(5),
        torch.zeros(0),
        torch.tensor(2.5).double(),
    ]
    buffer, parts = torchrun.views([t.to("meta") for t in tensors], "cpu")
    assert buffer.dtype == torch.uint8
    for t, part in zip(tensors, parts):
        part.copy_(t)
        assert (part.dtype, part.shape, part.stride()) == (t.dtype, t.shape, t.stride())
        assert part.data_ptr() % 64 == 0 or t.numel() == 0
    assert all(torch.equal(t, part) for t, part in zip(tensors, parts))


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--out: needed"),
        (["--out", "x", "--device", "cuda:1"], "--device: under torchrun cuda"),
        (
            ["--out", "x", "--device", "cuda"],
            "--device: under torchrun cuda, one GPU a process; there are 2",
        ),
    ],
)
def test_flags_under_torchrun(monkeypatch, argv, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torchrun, "LOCAL_RANK", 2)
    args = common.flags("", "fedavg").parse_args(argv)
    with pytest.raises(common.UserError, match=f"argument {words}"):
        torchrun.join(args)


def test_only_an_attempt_of_the_same_torchrun_is_resumed(tmp_path, monkeypatch):
    """A folder that was there before is refused, restarted or not."""
    out = tmp_path / "run"
    fedavg.main([*TINY, "--local-steps", "1", "--rounds", "1", "--out", str(out)])
    monkeypatch.setattr(torchrun, "STARTER", "abc")
    assert not torchrun.began_here(out)
    assert not torchrun.began_here(tmp_path)
    write_config(out, torchrun="abc")
    assert torchrun.began_here(out)


def test_one_process_loads_nothing_of_torchrun(monkeypatch):
    """torchrun with a single process is one process; other launchers' variables are not read."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not common.under_torchrun()
    monkeypatch.setenv("RANK", "0")
    assert common.under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not common.under_torchrun()
