"""Runs as a user sees them: folders, resuming after a kill, errors."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import TINY, same
from PIL import Image
from test_common import make_folder
from test_methods import RESNET, ROOT, SCRIPTS

import common
import fedavg

VARIES = ("seconds", "samples_per_s", "peak_memory")


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in VARIES} for row in rows]


def assert_equal_runs(a, b):
    assert rows_of(a) == rows_of(b)
    for name in ("model.pt", "best.pt"):
        assert same(common.load(a / name), common.load(b / name)), name


def start(name, *argv):
    """A script in a process of its own, on the small glyphs."""
    code = (
        f"import common, sys; common.GLYPHS = (600, 200); import {name}; {name}.main(sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )


def rounds_in(out):
    return (
        len((out / "metrics.jsonl").read_bytes().splitlines())
        if (out / "metrics.jsonl").exists()
        else 0
    )


def test_one_process_a_run(tmp_path, capsys):
    """A second process on a run's folder is refused, and changes nothing; after a kill in the first moments a run starts anew."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json.123.tmp").write_text("{")
    argv = [*TINY, "--out", str(out), "--rounds", "1"]
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused(capsys, argv, "another process", str(out))
    os.close(held)
    fedavg.main(argv)
    before, held = rows_of(out), os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused(capsys, [*argv[:-1], "2", "--resume"], "another process", str(out))
    os.close(held)
    assert rows_of(out) == before
    fedavg.main([*argv[:-1], "2", "--resume"])
    assert len(rows_of(out)) == 2


@pytest.mark.parametrize(
    "name", ["fedalign", "scaffold", "fedgkd", "rfedavg"]
)  # each sort of client and server state
def test_resume_after_kill(tmp_path, name):
    """SIGKILL at a random moment of rounds 1 to 3 and again of 3 to 6, then --resume: equal to an uncut run bit for bit."""
    flags = [*TINY, "--rounds", "8", "--persist-opt", "--sample", "0.5", "--checkpoint-every", "2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    SCRIPTS[name].main([*flags, "--out", str(whole)])
    for attempt, rounds in enumerate((random.randint(1, 3), random.randint(3, 6))):
        delay = random.uniform(0, 0.15)
        print(f"killed {delay:.3f} s after round {rounds}")
        process = start(name, *flags, "--out", str(cut), *["--resume"] * attempt)
        while process.poll() is None and rounds_in(cut) < rounds:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (cut / "model.pt").exists()
    assert start(name, *flags, "--out", str(cut), "--resume").wait() == 0
    assert_equal_runs(whole, cut)
    assert not list(cut.glob("**/*.tmp"))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_resume_after_a_kill_inside_a_round(tmp_path, monkeypatch, rounds):
    """Cut in the evaluation of a round, so after its training; checkpoints are written every second round."""
    flags = [*TINY, "--rounds", "4", "--persist-opt", "--checkpoint-every", "2"]
    fedavg.main([*flags, "--out", str(tmp_path / "whole")])
    evaluate, calls = common.evaluate, []

    class Killed(BaseException):
        pass

    def die(*args):
        calls.append(1)
        if len(calls) == rounds:
            raise Killed
        return evaluate(*args)

    monkeypatch.setattr(common, "evaluate", die)
    with pytest.raises(Killed):
        fedavg.main([*flags, "--out", str(tmp_path / "cut")])
    monkeypatch.setattr(common, "evaluate", evaluate)
    (tmp_path / "cut" / "metrics.jsonl").open("a").write(
        '{"round": 9, "te'
    )  # a row that was being written
    fedavg.main(["--out", str(tmp_path / "cut"), "--resume"])  # its own flags are the defaults
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_method_resumes(tmp_path, name):
    """Two rounds, then two more, are four, bit for bit."""
    flags = [*TINY, "--sample", "0.5", *(RESNET if name == "stochdepth" else [])]
    SCRIPTS[name].main([*flags, "--rounds", "4", "--out", str(tmp_path / "whole")])
    SCRIPTS[name].main([*flags, "--rounds", "2", "--out", str(tmp_path / "cut")])
    SCRIPTS[name].main(["--out", str(tmp_path / "cut"), "--resume", "--rounds", "4"])
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_rounds_on_resume(tmp_path):
    fedavg.main([*TINY, "--rounds", "4", "--out", str(tmp_path / "whole")])
    fedavg.main([*TINY, "--rounds", "2", "--out", str(tmp_path / "cut")])
    fedavg.main(["--out", str(tmp_path / "cut"), "--resume", "--rounds", "4", "--quiet"])
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["flags"]["rounds"] == 4
    before = (tmp_path / "cut" / "metrics.jsonl").read_text()
    fedavg.main(["--out", str(tmp_path / "cut"), "--resume", "--quiet"])  # nothing left to do
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == before


def test_config_records_the_run(tmp_path):
    fedavg.main([*TINY, "--out", str(tmp_path / "run"), "--workers", "2"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (
        config["script"] == "fedavg"
        and config["workers"] == 2
        and config["threads"] >= 1
        and config["flags"]["lr"] == 0.01
    )
    assert config["versions"]["torch"] == torch.__version__ and "commit" in config
    assert re.fullmatch(r"\S.*, \d+ cores", config["device"])
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {
        "config.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "model.pt",
        "best.pt",
        "states",
    }


def refused(capsys, argv, *words, script=fedavg, code=2):
    """main(argv) exits with code, prints one line with all words and nothing else."""
    with pytest.raises(SystemExit) as stop:
        script.main(argv)
    out, err = capsys.readouterr()
    assert (
        "Traceback" not in err
        and stop.value.code == code
        and len(err.splitlines()) == 1
        and "error:" in err
        and out == ""
    ), err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--clients", "0"], ["--clients", "at least 1"]),
        (["--sample", "0"], ["--sample", "above 0"]),
        (["--sample", "1.5"], ["--sample", "at most 1"]),
        (["--alpha", "0"], ["--alpha", "above 0"]),
        (["--alpha", "nan"], ["--alpha", "nan"]),
        (["--rounds", "-1"], ["--rounds", "-1"]),
        (["--rounds", "2.5"], ["--rounds", "integer"]),
        (["--dataset", "cifar11"], ["--dataset", "cifar11", "glyphs"]),
        (["--lr", "inf"], ["--lr"]),
        (["--augment", "crop,spin"], ["--augment", "rotateDEGREES"]),
        (["--workers", "many"], ["--workers"]),
        (["--nonsense"], ["--nonsense"]),
        (["--model", "vit"], ["--model", "resnet56"]),
        (["--device", "tpu"], ["--device", "cuda"]),
        (["--rounds", "9" * 400], ["--rounds", "at most"]),
        (["--model", "resnet18", "--batch-size", "1"], ["--batch-size", "batch norm"]),
        (["--seed", "-1"], ["--seed"]),
        (["--similarity", "101"], ["--similarity", "100"]),
        (["--split-file", "x"], ["--split-file", "--partition file"]),
        (["--partition", "file"], ["--split-file"]),
        (["--resume"], ["--resume", "--out"]),
        (["--clients", "61"], ["600", "61", "--clients"]),
        (["--alpha", "0.001", "--clients", "55"], ["1000 draws", "--alpha"]),
        (["--partition", "file", "--split-file", "/nonexistent"], ["--split-file /nonexistent"]),
        (["--partition", "natural"], ["writers"]),
        (["--partition", "iid", "--clients", "601"], ["no sample"]),
        (["--drop-last", "--batch-size", "599"], ["--drop-last"]),
        (["--dataset", "folder", "--data-dir", "/nonexistent"], ["/nonexistent", "train"]),
        (["--image-size", "10"], ["--image-size"]),
        (["--model", "resnet56", "--partition", "iid", "--clients", "600"], ["single sample"]),
    ],
)
def test_bad_flags(tmp_path, capsys, argv, words):
    out = tmp_path / "run"
    if "natural" in argv:
        argv = [*argv, "--clients", "300"]
    refused(capsys, [*TINY, "--out", str(out), *argv], *words)
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path, capsys):
    refused(
        capsys, [*TINY, "--device", "cuda", "--out", str(tmp_path / "run")], "--device", "no GPU"
    )
    assert not (tmp_path / "run").exists()


def test_bad_images(tmp_path, capsys):
    def refuse(root, *words):
        refused(
            capsys,
            [*TINY, "--dataset", "folder", "--data-dir", str(root), "--out", str(tmp_path / "run")],
            *words,
        )
        assert not (tmp_path / "run").exists()

    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "empty", "train")
    (tmp_path / "hollow" / "train" / "ape").mkdir(parents=True)
    (tmp_path / "hollow" / "test").mkdir()
    refuse(tmp_path / "hollow", "hollow", "ape")
    root = make_folder(tmp_path / "odd", (32, 32))
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(root / "train/bee/2.png")
    refuse(root, "bee/2.png", "7x9", "--image-size")
    path = make_folder(tmp_path / "cut", (32, 32)) / "test/ape/1.png"
    path.write_bytes(path.read_bytes()[:1000])
    refuse(tmp_path / "cut", "ape/1.png", "not a readable image")
    make_folder(tmp_path / "classes", (32, 32))
    (tmp_path / "classes/test/bee").rename(tmp_path / "classes/test/cow")
    refuse(tmp_path / "classes", "bee", "classes")
    make_folder(tmp_path / "deep", (32, 32))
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(tmp_path / "deep/train/ape/0.png")
    refuse(tmp_path / "deep", "ape/0.png", "8 bits")
    refuse(make_folder(tmp_path / "wide", (32, 24)), "32x24", "--image-size")


def test_failed_download_is_one_line(tmp_path, capsys, monkeypatch):
    from torchvision import datasets

    def offline(*args, **kwargs):
        raise RuntimeError("Error downloading\ncifar-100-python.tar.gz")

    monkeypatch.setattr(datasets, "CIFAR100", offline)
    refused(
        capsys,
        [*TINY, "--dataset", "cifar100", "--out", str(tmp_path / "run")],
        "cifar100",
        "downloaded",
        "folder",
    )


def test_runs_are_not_overwritten(tmp_path, capsys):
    out = str(tmp_path / "run")
    fedavg.main([*TINY, "--out", out])
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    refused(capsys, [*TINY, "--out", out], out, "--resume")
    refused(capsys, [*TINY, "--out", out, "--resume", "--lr", "0.5"], "--lr", "0.5", "0.01")
    refused(capsys, [*TINY, "--out", out, "--resume", "--rounds", "1"], "--rounds", "1", "2")
    refused(
        capsys,
        [*TINY, "--out", out, "--resume"],
        "fedavg.py",
        "fedprox.py",
        script=SCRIPTS["fedprox"],
    )
    refused(capsys, [*TINY, "--out", str(tmp_path / "none"), "--resume"], "none", "no run")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}


def test_bad_checkpoints(tmp_path, capsys):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--out", str(out)])
    good, resume = (
        (out / "checkpoint.pt").read_bytes(),
        ["--out", str(out), "--resume", "--rounds", "3", "--quiet"],
    )

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/pwned",)

    for write in (
        lambda p: p.write_bytes(good[: len(good) // 2]),
        lambda p: p.write_bytes(b""),
        lambda p: torch.save({"net": {}}, p),
        lambda p: torch.save([1, 2], p),
        lambda p: (
            torch.save({**torch.load(p), "script": "moon"}, p) if p.write_bytes(good) else None
        ),
        lambda p: torch.save(
            {
                "script": "fedavg",
                "net": {"x": torch.ones(1)},
                "server": {"round": 2},
                "clients": {},
            },
            p,
        ),
        lambda p: torch.save(Evil(), p),
    ):
        write(out / "checkpoint.pt")
        before = (out / "metrics.jsonl").read_bytes()
        refused(capsys, resume, "checkpoint.pt")
        assert (out / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "pwned").exists()
    rows, config = (out / "metrics.jsonl").read_bytes(), (out / "config.json").read_text()
    fedavg.main([*TINY, "--seed", "5", "--out", str(tmp_path / "other")])
    (out / "checkpoint.pt").write_bytes((tmp_path / "other" / "checkpoint.pt").read_bytes())
    refused(capsys, resume, "checkpoint.pt", "another run", "5 for --seed")
    (out / "checkpoint.pt").unlink()
    refused(capsys, resume, "checkpoint.pt", "missing")
    assert (out / "metrics.jsonl").read_bytes() == rows
    (out / "checkpoint.pt").write_bytes(good)
    for damaged in (
        b"",
        b"5\n5\n",
        b"\xff\xfe\n" + rows,
        rows.replace(b"test_acc", b"acc"),
        rows.replace(b'"round": 1', b'"round": 7'),
    ):
        (out / "metrics.jsonl").write_bytes(damaged)
        refused(capsys, resume, "metrics.jsonl", "damaged")
    (out / "metrics.jsonl").write_bytes(rows)
    for damaged, word in (
        ("{", "config.json"),
        ("[]", "config.json"),
        (config.replace('"threads"', '"thread"'), "config.json"),
        (config.replace('"cnn"', '"vit"'), "--model"),
        (config.replace('"clients": 4', '"clients": 0'), "--clients"),
        (config.replace('"clients": 4', '"clients": 5'), "--clients"),
    ):
        assert damaged != config
        (out / "config.json").write_text(damaged)
        refused(capsys, resume, word)
    (out / "config.json").write_text(config)
    fedavg.main(resume)


def test_divergence_names_round_and_client(tmp_path, capsys):
    out = tmp_path / "run"
    fedavg.main([*TINY, "--rounds", "1", "--out", str(out)])
    good = (out / "checkpoint.pt").read_bytes()

    def local_update(worker, client, server, args):
        if server["round"] == 2 and client.id == 2:
            with torch.no_grad():
                worker.net[0][0].weight[0, 0, 0, 0] = float("nan")
        yield from fedavg.local_update(worker, client, server, args)

    parser = common.flags("x", "fedavg")
    args = parser.parse_args(["--out", str(out), "--resume", "--rounds", "3", "--quiet"])
    with pytest.raises(SystemExit) as stop:
        common.run(args, local_update)
    err = capsys.readouterr().err
    assert stop.value.code == 1 and len(err.splitlines()) == 1 and "round 2, client 2" in err
    assert (out / "checkpoint.pt").read_bytes() == good and len(rows_of(out)) == 1
    assert "keeps the checkpoint" in err


def test_full_disk_is_one_line(tmp_path):
    """No file may grow beyond 300 kB here, which is how a full disk looks from inside; the first checkpoint has 600."""
    code = (
        "import common, resource, signal, sys; common.GLYPHS = (600, 200); import fedavg; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); fedavg.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TINY, "--out", str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "too large" in done.stderr
    ), done.stderr
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_script_help_and_interrupt(tmp_path):
    """From the shell: --help shows the paper and the defaults; Ctrl-C ends with one line that says how to go on."""
    shown = subprocess.run(
        [sys.executable, "fedprox.py", "--help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    shown = " ".join(shown.split())
    assert (
        "MLSys 2020" in shown
        and "(default: 0.0001)" in shown
        and "--client_number" not in shown
        and "--client-number is --clients" in shown
    )
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "fedavg.py", *TINY, "--rounds", "500", "--out", str(out)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130 and len(err.splitlines()) == 1 and f"--out {out} --resume" in err
    )


def test_a_second_interrupt_changes_nothing(tmp_path):
    """Ctrl-C twice, as timeout sends it to a process and its group: threads that still ran would abort the exit, and one that
    waits for a lock would never end."""
    for i in (1, 3):
        out = tmp_path / str(i)
        process = subprocess.Popen(
            [
                sys.executable,
                "fedavg.py",
                *TINY,
                "--rounds",
                "500",
                "--workers",
                "2",
                "--batch-size",
                "8",
                "--out",
                str(out),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not (out / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.02)
        for pause in (0.03 * i, 0.003 * i):
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (
            process.returncode == 130
            and len(err.splitlines()) == 1
            and f"--out {out} --resume" in err
        )
