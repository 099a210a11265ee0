"""reproduce.py: a published table or figure as one command

    python reproduce.py PAPER TABLE            PAPER: fedalign, fedcka, fedmlb, rfedavg; TABLE: 1, 5, 1a, I, fig5, ...
    python reproduce.py SCRIPT.py FLAGS --sweep FLAG=a,b,...

runs what is missing of the table's cells (tables.py), goes on with what was cut, skips what is finished, and ends with
compare.py's table. A cell's run lies in runs/PAPER-TABLE/, named after the cell and its seed; a command that stands in
several tables is run once, under the first; a run with other flags in its place is an error. Ctrl-C and --limit stop at any
moment; the same command goes on from the last finished round. A run that fails, for want of its data for example, is listed at
the end, after the table of what there is; the exit code is then that of the mistake (2), or 1.

--sweep takes values separated by commas, or by / where a value has commas; flags that change together are joined by a comma:
    --sweep layers=1,2,3    --sweep pathways=1/1,2/1,2,3    --sweep epochs,rounds=1,200/2,100
Several --sweep make a grid. --clients 1 is the centralised bound.

--scale small is a version of the same table for two CPU cores: the plain cnn on drawn characters (or on --dataset folder),
one or two optimizer steps for an epoch, clients and rounds divided as SMALL says. It shows that a table runs; it is no
estimate of the published numbers, which are left out.
"""

import argparse
import itertools
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import common
import compare
import tables

OURS = {
    "--seed": "--seeds",
    "--out": "--runs",
    "--resume": "--runs",
}  # flags of a sweep's script that are not the user's
ROOT = pathlib.Path(__file__).parent
SMALL = {  # paper: what clients and rounds are divided by, and local steps that stand for an epoch
    "FedAlign": (2, 2.5, 1),
    "FedCKA": (1, 10, 1),
    "FedMLB": (1, 25, 2),
    "rFedAvg": (2, 12.5, 1),
}
PATIENCE = 5  # seconds for a run to end by itself: Ctrl-C went to it as well, a kill did not
DATA = {
    "tiny-imagenet": "tiny-imagenet-200",
    "imagenet-200": "imagenet",
    "femnist": "femnist",
    "sent140": "sent140",
    "folder": "",
}  # what is not downloaded, and its folder in --data-dir
WITHOUT_BLOCKS = ("stochdepth",)  # needs residual blocks, and a ResNet is no network for two cores


def cells_of(paper, table):
    """The cells of a table, parts (1a, 1b) together if only the number is given. UserError naming what there is."""
    papers = {p.lower(): p for p, _ in tables.all_cells()}
    if paper.lower() not in papers:
        raise common.UserError(
            f"argument PAPER: must be one of {', '.join(papers)} or a method script, not {paper!r}"
        )
    name, there = (
        papers[paper.lower()],
        [t for p, t in tables.all_cells() if p == papers[paper.lower()]],
    )
    chosen = [
        t
        for t in there
        if t.lower() == table.lower() or re.fullmatch(re.escape(table.lower()) + "[a-d]", t.lower())
    ]
    if not chosen:
        raise common.UserError(f"argument TABLE: {name} has {', '.join(there)}, not {table!r}")
    return [cell for t in chosen for cell in tables.all_cells()[name, t]]


def only(cells, text):
    """The cells of these methods, by the table's name for them or by script, and these data sets; all where none is named."""
    methods, datasets = [], []
    for word in text.lower().split(","):
        named = [cell for cell in cells if cell.method.lower() == word] or [
            cell for cell in cells if cell.script == word
        ]
        data = [
            cell
            for cell in cells
            if word in (cell.dataset.lower(), tables.parsed(cell.command)["dataset"])
        ]
        if not named and not data:
            accepted = [
                ", ".join(dict.fromkeys(getattr(cell, what) for cell in cells))
                for what in ("method", "dataset")
            ]
            raise common.UserError(
                f"argument --only: no method or data set {word!r} in this table; "
                f"it has {accepted[0]}; {accepted[1]}"
            )
        methods, datasets = methods + named, datasets + ([] if named else data)
    chosen = [
        cell
        for cell in cells
        if (not methods or cell in methods) and (not datasets or cell in datasets)
    ]
    if not chosen:
        raise common.UserError(f"argument --only: no cell of this table has both, {text!r}")
    return chosen


def slug(text):
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text.replace("=", "")).strip("-")


def small(cell, dataset):
    """The command of a cell at small scale."""
    script, *words = shlex.split(cell.command.replace(" --save-clients", ""))
    clients_by, rounds_by, steps = SMALL[cell.paper]

    def put(flag, value=None):  # value None: without the flag
        at = words.index(flag) if flag in words else len(words)
        words[at : at + 2] = [flag, str(value)] if value is not None else []

    def number(flag):
        return int(words[words.index(flag) + 1])

    writers = 100 if "--partition natural" in cell.command else number("--clients")  # there are 200
    put("--clients", max(1, min(writers, round(number("--clients") / clients_by))))
    put("--rounds", max(1, round(number("--rounds") / rounds_by)))
    put("--local-steps", steps * number("--epochs"))
    for flag in ("--vectors", "--users", "--image-size", "--epochs", "--augment", "--projection"):
        put(flag)  # of other data and networks
    put("--dataset", dataset)
    put("--model", "cnn")
    return shlex.join([script, *words])


def sweeps(texts):
    """Every combination of --sweep's values: [{flag: value}, ...]."""
    axes = []
    for text in texts:
        flags, eq, values = text.partition("=")
        flags = [flag.lstrip("-").replace("_", "-") for flag in flags.split(",")]
        several = len(flags) > 1
        points = values.split("/" if several or "/" in values else ",")
        points = [point.split(",") if several else [point] for point in points]
        if not eq or not all(flags) or not all(len(p) == len(flags) and all(p) for p in points):
            raise common.UserError(
                f"argument --sweep: takes FLAG=a,b,... or FLAG,FLAG=a,b/c,d/..., not {text!r}"
            )
        axes.append([dict(zip(flags, point)) for point in points])
    swept = [flag for axis in axes for flag in axis[0]]
    for flag in swept:
        if swept.count(flag) > 1:
            raise common.UserError(f"argument --sweep: {flag} is swept twice")
        if flag.replace("-", "_") in compare.MACHINE - {"data_dir"}:
            raise common.UserError(f"argument --sweep: {flag} decides no result")
    return [{k: v for part in point for k, v in part.items()} for point in itertools.product(*axes)]


def with_seeds(args, todo):
    """{run folder: command} of [(folder without the seed, command)], all cells of a seed before those of the next."""
    data, jobs = shlex.quote(args.data_dir or "data"), {}
    for seed in range(args.seeds):
        for folder, command in todo:
            command = (
                command.replace(" data/", f" {data}/") + f" --seed {seed}"
            )  # word vectors lie beside the data
            jobs[pathlib.Path(f"{folder}-seed{seed}")] = command + f" --data-dir {data}" * bool(
                args.data_dir
            )
    return jobs


def table_jobs(args, cells):
    """({run folder: command} in the order of running, {run folder: [(setting, method) in this table, ...]})."""
    todo, labels, folders, left = (
        {},
        {},
        {},
        [],
    )  # cells whose command is the same at small scale share a folder
    for cell in cells:
        if args.scale == "small" and cell.script in WITHOUT_BLOCKS:
            left.append(cell.method)
            continue
        own = tables.home(cell)
        prefix = f"small-{args.dataset}-" if args.scale == "small" else ""
        place = f"{prefix}{own.paper.lower()}-{own.table.lower()}"
        command = small(own, args.dataset) if args.scale == "small" else own.command
        folder = folders.setdefault(
            command, pathlib.Path(args.runs, place, slug(f"{prefix}{own.label} {own.method}"))
        )
        todo[folder] = command
        # at small scale the setting is another one than the cell's: the flags tell it
        label = (
            (None, f"{cell.method} (small)") if args.scale == "small" else (cell.label, cell.method)
        )
        if label not in labels.setdefault(folder, []):
            labels[folder].append(label)
    if left:
        print(
            f"left out at small scale, for want of residual blocks in cnn: {', '.join(dict.fromkeys(left))}"
        )
    names = {
        f"{folder}-seed{seed}": label
        for folder, label in labels.items()
        for seed in range(args.seeds)
    }
    return with_seeds(args, todo.items()), names


def sweep_jobs(args, extra):
    """{run folder: command} of a script and --sweep."""
    source = ROOT / args.paper
    if (
        source.name != args.paper
        or not source.is_file()
        or "\ndef local_update(" not in source.read_text()
    ):
        raise common.UserError(f"argument PAPER: {args.paper} is no method script here")
    if not args.sweep:
        raise common.UserError("argument --sweep: needed after a script")
    points = sweeps(args.sweep)
    for word in [*extra, *(f"--{name}" for name in points[0])]:
        flag = word.split("=")[0].replace("_", "-")
        if flag in OURS:
            raise common.UserError(f"argument {flag}: set by reproduce.py; see {OURS[flag]}")
    if args.data_dir and "data-dir" in points[0]:
        raise common.UserError("argument --data-dir: is swept already")
    folder, todo = pathlib.Path(args.runs, slug(f"sweep {source.stem} {' '.join(points[0])}")), {}
    for point in points:
        place = folder / slug(" ".join(f"{k}={v}" for k, v in point.items()))
        if place in todo:
            raise common.UserError(f"argument --sweep: two points would share the folder {place}")
        todo[place] = shlex.join([args.paper, *extra, *(f"--{k}={v}" for k, v in point.items())])
    return with_seeds(args, todo.items())


def state_of(folder, command):
    """finished, begun or missing. UserError for a damaged folder, and for a run with other flags than command's."""
    if not (folder / "config.json").exists():
        return "missing"
    run, flags = compare.read_run(folder), tables.parsed(command)
    script = command.split()[0].removesuffix(".py")
    if run.script != script:
        raise common.UserError(
            f"{folder}: holds a run of {run.script}.py, not {script}.py; move it away, or name other --runs"
        )
    there, asked = compare.decisive(run.flags), compare.decisive(flags)
    other = [
        k
        for k, v in asked.items()
        if k in there and there[k] != v and (k != "rounds" or there[k] > v)
    ]
    # of a record there are config.json and metrics.jsonl alone
    finished = len(run.rows) >= flags["rounds"] and (
        (folder / "model.pt").exists() or not (folder / "checkpoint.pt").exists()
    )
    # what is measured or kept beside the result has to be there as well
    other += [
        k
        for k in ("client_test", *["save_clients"] * finished)
        if flags[k] and not run.flags.get(k)
    ]
    if (
        not finished
        and len(run.rows) > run.flags.get("checkpoint_every", 1)
        and not (folder / "checkpoint.pt").exists()
    ):
        raise common.UserError(
            f"{folder}: {len(run.rows)} of {flags['rounds']} rounds without a checkpoint cannot go on; move "
            "it away, or name other --runs"
        )
    if other:
        name, had, want = (
            other[0].replace("_", "-"),
            *(compare.words(f.get(other[0])) for f in (run.flags, flags)),
        )
        raise common.UserError(
            f"{folder}: holds a run with --{name} {had}, not {want}; move it away, or name other --runs"
        )
    return "finished" if finished else "begun"


def lacking(command):
    """Why a command cannot run here, as far as can be seen without reading data; None if nothing is wrong."""
    args = argparse.Namespace(**tables.parsed(command))
    place = pathlib.Path(args.data_dir, DATA.get(args.dataset, ""))
    if args.dataset in DATA and not place.is_dir():
        return f"--dataset {args.dataset}: there is no folder {place}"
    for flag in ("vectors", "split_file"):
        path = getattr(args, flag)
        if path and path != "random" and not pathlib.Path(path).is_file():
            return f"--{flag.replace('_', '-')} {path}: no such file"


def run_all(jobs, deadline):
    """Run what is not finished. Returns (how many are finished, {folder: (exit code, why)} of the failed, whether the time was
    up)."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell's background jobs ignore the first, and would pass that on
        signal.signal(number, signal.default_int_handler)
    states = {folder: state_of(folder, command) for folder, command in jobs.items()}
    finished, failed = sum(state == "finished" for state in states.values()), {}
    for folder, command in jobs.items():
        why = states[folder] != "finished" and lacking(command)
        if why:
            failed[folder] = 2, why
    for number, (folder, command) in enumerate(jobs.items(), 1):
        if states[folder] == "finished" or folder in failed:
            continue
        if deadline and time.monotonic() >= deadline:
            return finished, failed, True
        line = [
            *shlex.split(command),
            "--out",
            str(folder),
            *["--resume"] * (states[folder] == "begun"),
        ]
        print(f"\n[{number}/{len(jobs)}] python {shlex.join(line)}", flush=True)
        code, said = call(line, deadline)
        if code is None:
            return finished + (state_of(folder, command) == "finished"), failed, True
        if code:
            failed[folder] = code, said or f"exit code {code}"
        finished += code == 0
    return finished, failed, False


def call(line, deadline=None):
    """Run a command line to its end: (exit code, the last line on stderr), or (None, "") when the time was up. On a terminal
    its stderr, where a bar moves, is left to it."""
    child = subprocess.Popen(
        [sys.executable, str(ROOT / line[0]), *line[1:]],
        stderr=None if sys.stderr.isatty() else subprocess.PIPE,
    )
    said = [""]

    def listen():
        for text in child.stderr:
            text = text.decode(errors="replace")
            sys.stderr.write(text)
            said[0] = text.strip() or said[0]

    ear = threading.Thread(target=listen, daemon=True)
    if child.stderr:
        ear.start()
    try:
        code = child.wait(None if deadline is None else max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(child)
        return None, ""
    except KeyboardInterrupt:
        stop(child, PATIENCE)
        raise
    finally:
        if child.stderr:
            ear.join()
    if code == 130:
        raise KeyboardInterrupt
    return code, said[0]


def stop(child, patience=0):
    """Interrupt a run, which keeps its last finished round."""
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        child.wait()


def after(jobs, cells):
    """Command lines of the analyses that a table needs beside its runs."""
    for paper, table in dict.fromkeys((cell.paper, cell.table) for cell in cells):
        template = tables.AFTER.get((paper, table), "")
        if "{command}" in template:
            methods = {
                (cell.dataset, cell.method): cell.command for cell in reversed(cells)
            }  # one setting a method is enough
            yield from (template.format(command=command) for command in reversed(methods.values()))
        elif template:
            left = [
                shlex.quote(str(folder))
                for folder in jobs
                if not (folder / "hessian.json").exists()
                and ((folder / "model.pt").exists() or not (folder / "config.json").exists())
            ]  # no mere record
            yield from [template.format(runs=" ".join(left))] if left else []


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    script = next((word for word in argv if re.fullmatch(r"\w+\.py", word)), None)
    if script:  # whose own flags may stand anywhere
        at = argv.index(script)
        argv = [script, *argv[:at], *argv[at + 1 :]]
    parser = common.PlainParser(__doc__)
    add = parser.add_argument
    add(
        "paper",
        metavar="PAPER",
        help="fedalign, fedcka, fedmlb or rfedavg; or a method script, with --sweep",
    )
    if not script:
        add("table", metavar="TABLE", help="its number, or figN")
        add(
            "--only",
            metavar="NAME,...",
            help="these methods alone, by the table's name or by script, and these data sets: FedAvg,fedprox,MNIST",
        )
        add("--scale", default="paper", choices=["paper", "small"], help="small: for two CPU cores")
        add(
            "--dataset",
            choices=["glyphs", "folder"],
            help="data of --scale small, glyphs if not said",
        )
    add(
        "--sweep",
        action="append",
        metavar="FLAG=VALUES",
        help="values of a flag of a script, see above",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the commands of what is not finished, and stop",
    )
    add("--seeds", type=common.number(int, 1), default=1, help="seeds 0, 1, ... of each cell")
    add(
        "--limit",
        type=common.number(float, 0, open_low=True),
        metavar="MINUTES",
        help="stop cleanly after so long; what is kept is up to the last finished round",
    )
    add("--data-dir", metavar="DIR", help="passed on to the scripts")
    add("--runs", metavar="DIR", default="runs", help="where the tables' folders of runs are made")
    compare.add_flags(parser)
    args, extra = parser.parse_known_args(argv)
    try:
        raise SystemExit(reproduce(args, extra))
    except (common.UserError, OSError) as e:
        parser.error(" ".join(str(e).split()))
    except KeyboardInterrupt:
        print("\nreproduce.py: interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def as_published(args, cells):
    """args with what these cells' table or figure shows, unless asked otherwise, and drawn: the file of its own picture."""
    args, small_ = argparse.Namespace(**vars(args)), args.scale == "small"
    paper, table = cells[0].paper, cells[0].table
    shown = tables.DRAWN.get((paper, table), tables.FIGURES.get((paper, table), ("",) * 4)[3])
    shown = shown.replace("--x epochs", "--x local_steps" if small_ else "--x epochs").split()
    known = set().union(compare.AXES, *(tables.parsed(cell.command) for cell in cells))
    if (
        "--x" in shown and shown[shown.index("--x") + 1] not in known
    ):  # --only may leave none that has the flag
        shown = []
    for flag, value in zip(shown[::2], shown[1::2]):
        name = flag.lstrip("-")
        if getattr(args, name) is None:
            words = value.split(",")
            setattr(
                args,
                name,
                words
                if name == "y"
                else [float(word) for word in words]
                if name == "target"
                else value,
            )
    args.drawn = None
    if table.startswith("fig") and not args.plot:  # our own picture, drawn anew each time
        prefix = f"small-{args.dataset}-" if small_ else ""
        args.drawn = f"{args.runs}/{prefix}{paper.lower()}-{table.lower()}.png"
    if paper == "FedMLB":
        args.at = args.at or [round(r / (SMALL[paper][1] if small_ else 1)) for r in (500, 1000)]
    if (paper, table) == ("FedMLB", "6"):
        args.over = args.over or "pathways"
    return args


def show(view, cells, jobs, names, all_there):
    """compare.py's tables and pictures of what there is of jobs; view: its flags."""
    begun = [folder for folder in jobs if (folder / "config.json").exists()]
    if not any(compare.read_run(folder).rows for folder in begun):
        return
    wanted = {(cell.paper, cell.table) for cell in cells if not cell.table.startswith("fig")}
    for flag in (
        () if all_there else ("csv", "plot")
    ):  # the same command writes them when all is there
        if getattr(view, flag):
            print(f"--{flag} {getattr(view, flag)} waits until all runs are finished\n")
            setattr(view, flag, None)
    view.plot = getattr(view, "drawn", None) or view.plot
    if (
        not any(view.x in run.flags for run in map(compare.read_run, begun))
        and view.x not in compare.AXES
    ):
        view.x = "rounds"  # its runs failed
    compare.report(begun, view, names, published=not cells or view.scale != "small", wanted=wanted)


def reproduce(args, extra):
    """All of it; returns the exit code."""
    if args.paper.endswith(".py"):
        cells, small_ = [], False
        jobs, names = sweep_jobs(args, extra), None
    else:
        if extra:
            raise common.UserError(f"unrecognized arguments: {' '.join(extra)}")
        if args.sweep:
            raise common.UserError("argument --sweep: takes a method script, not a paper's table")
        cells, small_ = cells_of(args.paper, args.table), args.scale == "small"
        if args.dataset and not small_:
            raise common.UserError("argument --dataset: of --scale small; a table has its own")
        args.dataset = args.dataset or "glyphs"
        cells = cells if args.only is None else only(cells, args.only)
        jobs, names = table_jobs(args, cells)
    # the parts of a figure, 9a to 9d, are shown each by itself
    apart = [
        list(part)
        for _, part in itertools.groupby(
            cells, lambda cell: cell.table.startswith("fig") and cell.table
        )
    ]
    for flag in ("plot", "csv") if len(apart) > 1 else ():
        if getattr(args, flag):
            raise common.UserError(
                f"argument --{flag}: {args.table} has {len(apart)} parts; name one of "
                f"{', '.join(part[0].table for part in apart)}"
            )
    views = [as_published(args, part) for part in apart] or [args]
    compare.check_outputs(args)
    flags = [
        tables.parsed(command) for command in dict.fromkeys(jobs.values())
    ]  # every line, before any long work
    for view in views:
        compare.check_x(view, flags)
    for command, own in zip(dict.fromkeys(jobs.values()), flags):
        if args.over and args.over.replace("-", "_") not in own:
            raise common.UserError(f"argument --over: {command.split()[0]} has no flag {args.over}")
    states = {folder: state_of(folder, command) for folder, command in jobs.items()}
    if small_:
        print(
            f"SMALL SCALE, not the setting of {cells[0].paper}'s {args.table}: cnn on {args.dataset}, fewer clients and "
            "rounds, optimizer steps for local epochs"
        )
    ends = [] if small_ else list(after(jobs, cells))
    if args.dry_run:
        for folder, command in jobs.items():
            if states[folder] != "finished":
                print(
                    f"python {command} --out {shlex.quote(str(folder))}"
                    + " --resume" * (states[folder] == "begun")
                )
        print("".join(f"python {line}\n" for line in ends), end="")
        return 0
    if any(getattr(view, "drawn", None) for view in views):
        compare.pyplot()
    deadline = args.limit and time.monotonic() + 60 * args.limit
    (finished, failed, stopped), total = run_all(jobs, deadline), len(jobs)
    for line in ends if finished == total else []:
        stopped = stopped or deadline and time.monotonic() >= deadline
        if not stopped:
            print(f"\npython {line}", flush=True)
            code, said = call(shlex.split(line), deadline)
            stopped = code is None
            if code:
                failed[line] = code, said or f"exit code {code}"
    print(
        f"\n{finished} of {total} runs finished"
        + f", {len(failed)} failed" * bool(failed)
        + "; the same command goes on" * bool(stopped)
        + "\n",
        flush=True,
    )
    for view, part in zip(views, apart or [cells]):
        if len(views) > 1:
            print(f"{part[0].paper} {part[0].table}\n")
            jobs, names = table_jobs(args, part)
        show(view, part, jobs, names, all_there=finished == total)
    if small_:
        print(f"SMALL SCALE: nothing here compares with {cells[0].paper}'s numbers.")
    for what, (code, why) in failed.items():
        print(f"reproduce.py: failed: {what}: {why}", file=sys.stderr)
    return 0 if not failed else 2 if 2 in [code for code, _ in failed.values()] else 1


if __name__ == "__main__":
    main()
