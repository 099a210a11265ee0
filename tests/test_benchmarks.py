"""The benchmarks run, and what they compare with trains the same model."""

import json
import os
import sys

import pytest
import torch
from conftest import TINY, refused
from methods import ROOT, VARIANTS, needed

import common
import engine
import run_folder
import fedavg

sys.path.insert(0, str(ROOT / "benchmarks"))
import commands  # noqa: E402
import gpu  # noqa: E402
import loops  # noqa: E402
import population  # noqa: E402


def test_conventional_loop_is_fedavg(tmp_path):
    """With whole clients as batches the order of samples does not matter, so both loops take the
    same steps."""
    flags = "--rounds 1 --epochs 3 --batch-size 1000 --lr 0.3"
    argv = [*TINY, *flags.split(), "--out", str(tmp_path / "run")]
    net, _ = fedavg.main(argv)
    args = common.flags("", "test").parse_args(argv)
    torch.manual_seed(args.seed)
    data = common.load_data(args)
    plain = common.build_net(args.model, data.classes)
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    images, parts = loops.Images(data, False), common.partition(data, args)
    assert loops.conventional_round(plain, images, parts, args, 0) == 3 * 600
    for k, v in net.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[k], v, rtol=1e-4, atol=1e-6)
        assert (v - before[k]).abs().max() > 1e-3  # far more than the tolerance


@pytest.mark.parametrize("loop", ["bare", "conventional"])
def test_loops_run(loop, capsys):
    loops.main([loop, *"--samples 400 --clients 4 --repeats 1 --batch-size 20".split()])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["fedavg"] > 0
    assert figures["ratio"] == pytest.approx(figures["fedavg"] / figures[loop])


def test_the_conventional_loop_refuses_what_it_lacks(capsys):
    refused(capsys, loops, ["conventional", "--clip", "1"], "--clip: not in the conventional loop")


def test_commands_run(capsys):
    flags = "--clients 400 --sample 0.005 --local-steps 1 --rounds 2 --repeats 1 --device cpu"
    assert commands.main(["fedavg", "2x fedprox --mu 0.1", *flags.split()]) == 0
    *_, first, second, last = capsys.readouterr().out.splitlines()
    table = json.loads(last)["table"]
    assert first.startswith("fedavg ") and second.startswith("2x fedprox --mu 0.1 ")
    assert table[0]["time"] == 1
    assert all(row["samples/s"] > 0 and row["host GiB"] > 2**26 for row in table)
    model = common.nbytes(common.build_net("cnn", 62).state_dict())
    assert [row["MB up"] for row in table] == [2 * model] * 2


def test_commands_take_turns(monkeypatch, capsys):
    """Time is the median of the turns' ratios."""
    calls, rates = [], iter([10, 20, 10, 5, 10, 40])
    config = {"workers": 1, "device": "x", "versions": {"torch": "2"}, "commit": "c"}

    def measure(*call):
        calls.append(call)
        return dict.fromkeys(commands.COLUMNS, 0) | {"samples/s": next(rates)}, config

    monkeypatch.setattr(commands, "measure", measure)
    words = ["fedavg --workers 2", "2x moon", "--lr", "0.1"]
    assert commands.main(words) == 0
    flags = [*commands.DEFAULTS, "--rounds", "3", "--lr", "0.1"]
    pair = [(1, "fedavg", [*flags, "--workers", "2"], 1), (2, "moon", flags, 1)]
    assert calls == pair * 3
    table = json.loads(capsys.readouterr().out.splitlines()[-1])["table"]
    assert [(row["samples/s"], row["time"]) for row in table] == [(10, 1), (20, 0.5)]
    refused(capsys, commands, ["nothing"], "nothing.py")


def test_population_runs(monkeypatch, capsys):
    """Two populations, in this process for speed."""
    for owner, name in ((engine, "begin"), (run_folder.RunFolder, "checkpoint")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    monkeypatch.setattr(population, "in_process", lambda f, *words: f(*words))
    flags = "--scripts rfedavg --populations 30,60 --rounds 3 --variant rfedavg"
    population.main(flags.split())
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [row["clients"] for row in result["table"]] == [30, 60]
    assert all(row[column] > 0 for row in result["table"] for column in ("start", "resume"))
    assert all(row["checkpoint"] > 0 for row in result["table"])
    assert 1e6 * result["table"][1]["MB"] > 60 * 4 * population.FEATURES  # a row a client
    assert len(lines) == 1 + 2


def test_a_population_is_measured_in_a_process_of_its_own():
    assert population.in_process(os.getpid) != os.getpid()


def test_population_refuses_a_script_that_is_not_there(capsys):
    refused(capsys, population, ["--scripts", "fedavg,nothing"], "--scripts", "nothing.py")


SMALL = ["--small", "--device", "cpu"]


def test_gpu_runs_small(monkeypatch, capsys):
    """Every part, on the CPU: ways to run agree, and each has figures."""
    monkeypatch.setattr(gpu, "IMAGES", gpu.IMAGES)  # main changes it
    assert gpu.main([*gpu.PARTS, *SMALL, "--no-processes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = json.loads(lines[-1])["table"]
    assert [row["part"] for row in table] == list(gpu.PARTS)
    assert [line.split()[1] for line in lines if line[:4] == "ok  "] == list(gpu.PARTS)
    rows = {row["part"]: row for row in table}
    for part in ("correct", "conduct"):
        assert {rows[part][way] for way in ("eager", "three", "auto")} == {0}
        assert rows[part]["loss"] > 0.1
    for part in ("steps", "layouts"):
        assert min(rows[part][k] for k in ("x1", "x2", "eager", "short", "short eager")) > 0
        assert rows[part]["host"] <= rows[part]["x1"]
    assert rows["rounds"]["20 epochs"] == rows["rounds"]["second"] * 5
    assert rows["rounds"]["paper"] == 137.2
    assert rows["command"]["samples/s"] > 0
    assert any("convolution_backward" in name for name in rows["kernels"]["most"])


def test_gpu_tells_failures_and_goes_on(monkeypatch, capsys):
    """An exception, an exit and weights that differ each fail their own case alone."""
    trained = gpu.train

    def train(script, words, out, **own):
        weights, *more = trained(script, words, out, **own)
        if "3" in words:  # workers
            weights = {k: v + 1e-7 for k, v in weights.items()}
        return weights, *more

    monkeypatch.setattr(gpu, "IMAGES", gpu.IMAGES)
    monkeypatch.setattr(gpu, "train", train)
    parts = gpu.PARTS | {"memory": gpu.PARTS["memory"]._replace(small="nothing 32 2")}
    monkeypatch.setattr(gpu, "PARTS", parts | {"loops": parts["loops"]._replace(small="bare -")})
    argv = ["correct", "memory", "loops", "machine", *SMALL, "--no-processes"]
    assert gpu.main(argv) == 1
    out = capsys.readouterr().out
    table = json.loads(out.splitlines()[-1])["table"]
    assert [row["ok"] for row in table] == [False, False, False, True]
    assert 0 < table[0]["three"] < 1e-6
    assert table[1]["error"].startswith("KeyError")
    assert "unrecognized arguments" in table[2]["error"]
    assert out.count("FAIL") == 3


def test_gpu_runs_cases_in_processes(capsys):
    assert gpu.main(["machine", *SMALL]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["table"][0]
    assert row["torch"] == torch.__version__
    assert row["copy TB/s"] > 0
    assert gpu.main(["steps", "--only", "no such case", "--device", "cpu"]) == 1


def test_gpu_checks_every_variant():
    """All of the tests' table; in other words where these are about the size of the run."""
    sizes = ("--model resnet56", "--batch-size 16", "--local-steps 2")
    wanted = set()
    for name, more in VARIANTS:
        for size in sizes:
            more = more.replace(size, "")
        wanted.add(" ".join([name, *needed(name, ["--model"]), *more.split()]))
    assert wanted <= set(gpu.listed(gpu.VARIANTS))
    assert set(gpu.papers_seconds()) >= set(gpu.TABLE_5)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["nothing"], "PART"),
        (["machine", "--limit", "0"], "--limit"),
        (SMALL, "PART"),
    ],
)
def test_gpu_refuses(capsys, argv, word):
    with pytest.raises(SystemExit) as stop:
        gpu.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert word in err and len(err.splitlines()) == 1
