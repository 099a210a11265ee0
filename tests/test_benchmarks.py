"""The benchmarks run, and what they compare with trains the same model."""

import json
import os
import sys

import pytest
import torch
from conftest import TINY, refused
from methods import ROOT, VARIANTS, needed
from virtual_gpu import machine

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


@pytest.fixture
def gpu_rows(monkeypatch, capsys):
    """Return a function that runs benchmarks/gpu.py and returns its rows."""
    monkeypatch.setattr(gpu, "IMAGES", gpu.IMAGES)  # main changes it

    def rows(*argv, code=0):
        assert gpu.main([*argv, "--small"]) == code
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    return rows


def test_gpu_runs_small(gpu_rows):
    """Every part, on the CPU: ways to run agree, and each has figures."""
    table = gpu_rows(*gpu.PARTS, "--device", "cpu", "--no-processes")
    assert [row["part"] for row in table] == list(gpu.PARTS)
    assert all(row["ok"] and row["torch"] == torch.__version__ for row in table)
    rows = {row["part"]: row for row in table}
    ways = ("eager", "three", "auto", "plain", "cpu", "resumed", "of the move")
    assert {rows["correct"][way] for way in ways} == {rows["nccl"]["ranks"]} == {0}
    assert rows["correct"]["loss"] > 0.1
    assert len(rows["memory"]["host MiB"]) == 5 and min(rows["memory"]["host MiB"]) > 50
    assert min(rows["steps"][k] for k in ("x1", "x2", "eager", "short")) > 0
    assert rows["steps"]["host"] <= rows["steps"]["x1"]
    assert rows["rounds"]["20 epochs"] == pytest.approx(rows["rounds"]["second"] * 5, rel=1e-3)
    assert rows["rounds"]["paper"] == 137.2
    assert rows["command"]["samples/s"] > 0
    assert any("convolution_backward" in name for name in rows["kernels"]["most"])


def test_gpu_runs_on_a_virtual_gpu(monkeypatch, gpu_rows):
    """What is compared there, and a command."""
    parts = {name: gpu.PARTS[name] for name in ("correct", "command", "memory")}
    small = "fedprox --model cnn --clients 3 --epochs 1 --batch-size 100"
    monkeypatch.setattr(gpu, "PARTS", parts | {"correct": parts["correct"]._replace(small=small)})
    with machine() as virtual:
        table = gpu_rows(*parts, "--device", "cuda", "--no-processes")
    assert [row["ok"] for row in table] == [True] * 3, table
    assert table[0]["graphs"] and table[0]["of the move"] < 1e-3
    assert all(row["off / move"] == 0 for row in table)
    assert table[1]["device"].startswith("virtual")
    assert virtual.replays > 20 and virtual.faults == []
    assert len(set(table[2]["MiB"][1:])) == 1 and table[2]["MiB"][0] > 0


@pytest.mark.parametrize("leak", [True, False])
def test_gpu_sees_leaks_and_lost_graphs(monkeypatch, gpu_rows, leak):
    """4 MB a client; a step that waits for the GPU."""

    def local_update(worker, *rest):
        def waiting(x, y):
            loss = step(x, y)
            float(loss.detach())
            return loss

        kept.append(torch.zeros(10**6 * leak, device=worker.device))
        step = next(trained(worker, *rest))
        yield step if leak else waiting

    trained, kept = fedavg.local_update, []
    monkeypatch.setattr(fedavg, "local_update", local_update)
    with machine():
        [row] = gpu_rows("memory", "--device", "cuda", "--no-processes", code=1)
    assert row["ok"] is False
    assert (row["MiB"][-1] - row["MiB"][0] > 60) is leak
    assert row.get("error") == (None if leak else "it has lost its graphs")


def test_gpu_tells_failures_and_goes_on(monkeypatch, gpu_rows):
    """An exception, an exit and weights that differ each fail their own case alone."""
    trained = gpu.train

    def train(script, words, out, *more, **own):
        weights, *rest = trained(script, words, out, *more, **own)
        if "3" in words:  # workers
            weights = {k: v + 1e-7 for k, v in weights.items()}
        return weights, *rest

    monkeypatch.setattr(gpu, "train", train)
    small = {
        "steps": "nothing",
        "kernels": "fedavg --model -",
        "command": gpu.PARTS["command"].small,
    }
    parts = {name: gpu.PARTS[name]._replace(small=case) for name, case in small.items()}
    monkeypatch.setattr(gpu, "PARTS", gpu.PARTS | parts)
    argv = ["correct", "steps", "kernels", "command", "--device", "cpu", "--no-processes"]
    table = gpu_rows(*argv, code=1)
    assert [row["ok"] for row in table] == [False, False, False, True]
    assert 0 < table[0]["three"] < 1e-6
    assert "nothing" in table[1]["error"]
    assert "--model" in table[2]["error"]


def test_gpu_runs_cases_in_processes(gpu_rows):
    """With compiled blocks too."""
    plain, compiled = gpu_rows("kernels", "--device", "cpu", "--compile")
    assert plain["kernels"] > 10 and compiled["kernels"] > 10
    assert compiled["case"] == f"compiled {plain['case']}"
    assert gpu_rows("steps", "--only", "no such case", "--device", "cpu", code=1) == []


def test_gpu_checks_every_variant():
    """All of the tests' table; in other words where these are about the size of the run.

    And the README's command."""
    readme = (ROOT / "README.md").read_text().replace("\\\n    ", "")
    assert f"fedavg.py {gpu.README}" in readme
    sizes = ("--model resnet56", "--batch-size 16", "--local-steps 2")
    wanted = set()
    for name, more in VARIANTS:
        for size in sizes:
            more = more.replace(size, "")
        wanted.add(" ".join([name, *needed(name, ["--model"]), *more.split()]))
    assert wanted <= set(gpu.listed(gpu.CORRECT))
    assert set(gpu.papers_seconds()) >= set(gpu.TABLE_5)


@pytest.mark.parametrize(
    "argv, word",
    [
        (["nothing"], "PART"),
        (["steps", "--limit", "0"], "--limit"),
        (SMALL, "PART"),
    ],
)
def test_gpu_refuses(capsys, argv, word):
    with pytest.raises(SystemExit) as stop:
        gpu.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert word in err and len(err.splitlines()) == 1
