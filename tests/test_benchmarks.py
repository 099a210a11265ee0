"""The benchmarks run, and what they compare with trains the same model."""

import gc
import json
import os
import sys

import pytest
import torch
import torch._dynamo
from conftest import TINY, make_folder, refused
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
    """Where a batch is all of a client the order of samples does not matter: the same steps."""
    flags = "--rounds 1 --epochs 3 --batch-size 1000 --lr 0.3"
    argv = [*TINY, *flags.split(), "--out", str(tmp_path / "run")]
    net, _ = fedavg.main(argv)
    args = common.flags("", "test").parse_args(argv)
    data = common.load_data(args)
    plain = loops.new_net(args, data)
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    images, parts = loops.Images(data, False), common.partition(data, args)
    assert loops.conventional_round(plain, images, parts, args, 0) == 3 * 600
    for k, v in net.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[k], v, rtol=1e-4, atol=1e-6)
        assert (v - before[k]).abs().max() > 1e-3  # far more than the tolerance


@pytest.mark.parametrize("loop", ["bare", "conventional"])
def test_loops_run(loop, capsys):
    loops.main([loop, *"--samples 200 --clients 4 --repeats 1 --batch-size 20".split()])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["ratio"] == pytest.approx(figures["fedavg"] / figures[loop])


def test_a_plain_loop_without_momentum():
    args = loops.parse_flags(["bare", "--momentum", "0"])
    assert not loops.plain_sgd(torch.nn.Linear(1, 1), args).defaults["nesterov"]


def test_commands_run(tmp_path, capsys):
    """Two ranks of a script; test_a_command_is_measured() has one process."""
    data = make_folder(tmp_path, (32, 32))
    flags = f"--dataset folder --data-dir {data} --clients 2 --rounds 2 --repeats 1 --device cpu"
    assert commands.main(["2x fedprox --mu 0.1", *flags.split()]) == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    (row,) = json.loads(last)["table"]
    assert line.startswith("2x fedprox --mu 0.1 ") and row["time"] == 1
    assert row["samples/s"] > 0 and row["host GiB"] > 2**26
    assert row["MB up"] == 2 * common.nbytes(common.build_net("cnn", 2).state_dict())


STUB = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
for slow in (100, 1):
    parts = {"train": 3, "aggregate": 1, "synchronise": 1, "evaluate": 2, "other": 0}
    seconds = {name: slow * s for name, s in parts.items()}
    with open(out / "metrics.jsonl", "a") as f:
        print(json.dumps({"samples": 10, "bytes_up": 7, "seconds": seconds}), file=f)
(out / "config.json").write_text(json.dumps({"flags": {"device": "cpu"}, "argv": sys.argv[1:3]}))
"""


def test_a_command_is_measured(tmp_path, monkeypatch):
    """Medians over the rounds but the first, whose exchange is part of training."""
    (tmp_path / "fedavg.py").write_text(STUB)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    figures, config = commands.measure(1, "fedavg", ["--lr", "1"])
    assert figures.pop("host GiB") > 2**20 and config["argv"] == ["--lr", "1"]
    times = {"train": 3, "aggregate": 2, "evaluate": 2, "other": 0}
    assert figures == {"samples/s": 2, **times, "MB up": 7}


def test_commands_take_turns(monkeypatch, capsys):
    """Time is the median of the turns' ratios."""
    calls, rates = [], iter([10, 20, 10, 5, 10, 40])
    config = {"workers": 1, "device": "x", "versions": {"torch": "2"}, "commit": "c"}

    def measure(*call):
        calls.append(call)
        return {"samples/s": next(rates)}, config

    monkeypatch.setattr(commands, "measure", measure)
    assert commands.main(["fedavg --workers 2", "2x moon", "--lr", "0.1"]) == 0
    flags = [*commands.DEFAULTS, "--rounds", "3", "--lr", "0.1"]
    assert calls == 3 * [(1, "fedavg", [*flags, "--workers", "2"], 1), (2, "moon", flags, 1)]
    table = json.loads(capsys.readouterr().out.splitlines()[-1])["table"]
    assert [(row["samples/s"], row["time"]) for row in table] == [(10, 1), (20, 0.5)]


def test_population_runs(monkeypatch, capsys):
    """Two populations, in this process for speed."""
    assert population.in_process(os.getpid) != os.getpid()
    for owner, name in ((engine, "begin"), (run_folder.RunFolder, "checkpoint")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    monkeypatch.setattr(population, "in_process", lambda f, *words: f(*words))
    population.main("--scripts scaffold --populations 30,60 --rounds 3".split())
    *lines, last = capsys.readouterr().out.splitlines()
    table = json.loads(last)["table"]
    assert [row["clients"] for row in table] == [30, 60] and len(lines) == 1 + 2
    assert all(row[name] > 0 for row in table for name in ("start", "resume", "checkpoint"))
    state = common.nbytes(population.small_net().state_dict())
    assert 1e6 * table[1]["MB"] > 50 * state  # of each client that was sampled


@pytest.mark.parametrize(
    "script, argv, words",
    [
        (loops, "conventional --clip 1", ["--clip: not in the conventional loop"]),
        (commands, "nothing", ["COMMAND", "nothing.py"]),
        (population, "--scripts fedavg,nothing", ["--scripts", "nothing.py"]),
        (gpu, "nothing", ["PART"]),
        (gpu, "steps --limit 0", ["--limit"]),
        (gpu, "steps --only nothing --device cpu", ["--only", "nothing"]),
        (commands, "2x", ["COMMAND", "2x"]),
        (loops, "bare --optimizer rmsprop --no-nesterov", ["--optimizer: not in the bare loop"]),
    ],
)
def test_benchmarks_refuse(capsys, script, argv, words):
    refused(capsys, script, argv.split(), *words)


@pytest.fixture
def gpu_rows(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "IMAGES", gpu.IMAGES)  # main changes it

    def rows(*argv, code=0):
        assert gpu.main([*argv, "--small"]) == code
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    gc.freeze()  # memory() collects garbage after each round, but not among what is there already
    yield rows
    gc.unfreeze()


def test_gpu_runs_small(monkeypatch, gpu_rows):
    """And steps and kernels with compiled blocks."""
    limit = torch._dynamo.config.recompile_limit
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", limit)  # which they change
    table = gpu_rows(*gpu.PARTS, "--device", "cpu", "--no-processes", "--compile")
    assert all(row["ok"] and row["torch"] == torch.__version__ for row in table)
    rows = {row["part"]: row for row in table if "compiled" not in row["case"]}
    assert list(rows) == list(gpu.PARTS) and len(table) == len(rows) + 2
    for part, figure, least in ("steps", "x1", 0), ("kernels", "kernels", 10):
        [row] = [row for row in table if row["case"] == f"compiled {rows[part]['case']}"]
        assert row["part"] == part and row[figure] > least
    ways = ("eager", "three", "auto", "plain", "cpu", "resumed")
    assert {rows["correct"][way] for way in ways} == {rows["nccl"]["ranks"]} == {0}
    assert rows["correct"]["loss"] > 0.1 and rows["correct"]["native"] < 0.01
    assert len(rows["memory"]["host MiB"]) == 5 and min(rows["memory"]["host MiB"]) > 50
    assert min(rows["steps"][k] for k in ("x1", "x2", "eager", "short")) > 0
    assert rows["rounds"]["20 epochs"] == pytest.approx(rows["rounds"]["second"] * 5, rel=1e-3)
    assert rows["rounds"]["paper"] == 137.2
    assert rows["command"]["samples/s"] > 0
    assert rows["kernels"]["kernels"] > 10
    assert any("convolution_backward" in name for name in rows["kernels"]["most"])


def test_gpu_runs_on_a_virtual_gpu(monkeypatch, gpu_rows):
    """What is compared there, and a command."""
    parts = {name: gpu.PARTS[name] for name in ("correct", "command", "memory")}
    small = "fedprox --model cnn --clients 3 --local-steps 3 --batch-size 8 --partition iid"
    monkeypatch.setattr(gpu, "PARTS", parts | {"correct": parts["correct"]._replace(small=small)})
    with machine() as virtual:
        table = gpu_rows(*parts, "--device", "cuda", "--no-processes")
    assert [row["ok"] for row in table] == [True] * 3, table
    assert table[0]["graphs"] and table[0]["cpu"] < 1e-3 and 0 < table[0]["native"] < 1e-3
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


@pytest.mark.parametrize("way, figure", [("--workers 3", "three"), ("--lr 1e-3", "cpu")])
def test_gpu_tells_failures_and_goes_on(monkeypatch, gpu_rows, way, figure):
    """An exception and weights that differ each fail their own case alone."""
    trained = gpu.train

    def train(script, words, *out, **own):
        weights, *rest = trained(script, words, *out, **own)
        return weights + 1e-7 * (words[-2:] == way.split()), *rest

    monkeypatch.setattr(gpu, "train", train)
    steps = gpu.PARTS["steps"]._replace(small="nothing")
    monkeypatch.setattr(gpu, "PARTS", gpu.PARTS | {"steps": steps})
    argv = ["correct", "steps", "command", "--device", "cpu", "--no-processes"]
    table = gpu_rows(*argv, code=1)
    assert [row["ok"] for row in table] == [False, False, True]
    assert 0 < table[0][figure] < 1 and "nothing" in table[1]["error"]


@pytest.mark.parametrize(
    "cpu, native, ok",
    [(9e-4, 0, True), (0.02, 0.001, False), (0.02, 0.003, True), (0.6, 0.1, False)],
)
def test_gpu_judges_the_cpu_by_its_own_rounding(monkeypatch, gpu_rows, cpu, native, ok):
    run = torch.zeros(1), [{"train_loss": 1.0}], {"graph": True}
    monkeypatch.setattr(gpu, "train", lambda *_, **__: run)
    monkeypatch.setattr(gpu, "beside_the_cpu", lambda *_: {"cpu": cpu, "native": native})
    [row] = gpu_rows("correct", "--device", "cpu", "--no-processes", code=not ok)
    assert (row["cpu"], row["ok"]) == (cpu, ok)


@pytest.mark.parametrize("accuracy", [50.0, 85.0])
def test_gpu_checks_the_readme_s_accuracy(monkeypatch, accuracy):
    def train(script, flags):
        common.flags("", script).parse_args(flags)
        return None, [{"test_acc": accuracy}], {"workers": 1}

    monkeypatch.setattr(gpu, "train", train)
    assert gpu.command(["readme"], "cpu")["ok"] == (accuracy > 80)


def test_gpu_runs_a_case_in_a_process(gpu_rows):
    [row] = gpu_rows("steps", "--device", "cpu")
    assert row["ok"] and row["x1"] > 0


def test_gpu_checks_every_variant():
    """All of the tests' table, but for its network; and the README's command."""
    readme = (ROOT / "README.md").read_text().replace("\\\n    ", "")
    assert f"fedavg.py {gpu.README}" in readme
    wanted = set()
    for name, more in VARIANTS:
        more = more.replace("--model resnet8", "")
        wanted.add(" ".join([name, *needed(name, ["--model"]), *more.split()]))
    assert wanted <= set(gpu.listed(gpu.CORRECT))
    assert set(gpu.papers_seconds()) >= set(gpu.TABLE_5)
