"""Every method in one setting, NIID-Bench's CIFAR-10, where all but the method is equal

    python -m reproduce benchmark                     run what is missing, then show what there is
    python -m reproduce benchmark --only fedavg,moon  run these alone, by their names or scripts
    python -m reproduce benchmark --quick             a smoke test: one partition, 5 epochs
    python -m reproduce benchmark --publish           keep finished runs in results/benchmark/, and
                                                      write table and picture into the docs

reproduce/cells.txt has the commands ([NIID-Bench]). Run METHOD-dsK has --data-seed K and lies in
runs/benchmark/, or with other flags, which go to all scripts, in runs/benchmark-FLAGS/. Ctrl-C and
--limit stop at any moment; the same command goes on. Finished runs alone are shown:
    accuracy       of the global model on the whole test set after the last round, in %
    over FedAvg    the same less that of FedAvg's run on the same partition
    worst client   accuracy of the worst client after the last round
    s, MB          seconds and bytes of a round over those of FedAvg's run on the same partition,
                   seconds where the machine and --workers are the same
    rounds to      the first round in which the accuracy is at least that of FedAvg's run on the
                   same partition after its last round; 50+: in none of the 50
    published      the mean in NIID-Bench's paper
a +- b (n): mean and sample standard deviation over n partitions.
"""

import json
import pathlib
import shlex

import common
import run_folder
from analysis import pictures
from analysis.runs import table
from reproduce import compare, jobs
from reproduce.cells import all_cells, parsed_flags, read_published
from reproduce.figures import Mean, curve, figures, show_censored
from reproduce.runs import Group, decisive_flags, read_runs

MAIN = "alpha=0.5"  # the setting whose runs are named after the method alone
TITLES = {MAIN: "Dirichlet(0.5)", "labels=2": "Two labels a client"}
QUICK = ["--rounds", "5", "--epochs", "1"]
MARKS = "<!-- benchmark -->\n", "<!-- end of benchmark -->\n"
PAGES = [jobs.ROOT / "README.md", jobs.ROOT / "docs" / "benchmark.md"]
PICTURE = jobs.ROOT / "docs" / "benchmark.svg"
KEPT = jobs.ROOT / "results" / "benchmark"
CURVES = 6  # of a panel, at most


def benchmark(args, extra):
    """Run the benchmark and show it; extra: flags of all scripts. Returns the exit code."""
    extra = [*QUICK * args.quick, *extra]
    root = pathlib.Path(args.runs, jobs.slug(f"benchmark {jobs.setting_of(extra)}"))
    cells = all_cells()["NIID-Bench", "CIFAR-10"]
    asked = jobs.select_cells(cells, args.only)
    runs_of = {cell: [] for cell in cells}  # {cell: [run folder, ...]}
    commands = {}
    for k in range(args.data_seeds or (1 if args.quick else 3)):
        for cell in cells:
            setting = cell.setting * (cell.setting != MAIN)
            runs_of[cell].append(f"{jobs.slug(f'{setting} {cell.method}'.lower())}-ds{k}")
            if cell in asked:
                command = f"{cell.command} --data-seed {k} {shlex.join(extra)}".strip()
                commands[root / runs_of[cell][-1]] = command
    if args.publish and extra:
        raise common.UserError("argument --publish: takes the benchmark alone, without other flags")
    if args.publish and not args.dry_run:
        return publish(runs_of, root, commands)

    def show(_):
        found = finished_runs(runs_of, root)
        print_tables(found, published={} if extra else read_published())
        draw(root / "picture.png", found)

    return jobs.run_plan(jobs.Plan(commands, root), args, show)


def finished_runs(runs_of, root):
    """Return {cell: its finished Runs} of {cell: names of folders in root}."""
    found = {}
    for cell, names in runs_of.items():
        folders = [root / name for name in names if (root / name / "config.json").exists()]
        found[cell] = [run for run in read_runs(folders, compare.warn)[0] if run.finished]
    return found


# --- Tables


def settings_of(found):
    """Return [(title, {cell: runs}, FedAvg's runs), ...] of {cell: runs}, a setting each."""
    settings = {}
    for cell, runs in found.items():
        settings.setdefault(TITLES[cell.setting], {})[cell] = runs
    # FedAvg's cell is the first one of a setting
    return [(title, own, next(iter(own.values()))) for title, own in settings.items()]


def compare_pairs(runs, plain):
    """Return the columns of runs beside FedAvg's on the same partitions, [{column: number}, ...].

    plain: FedAvg's runs. None: in no round, or of seconds that do not compare."""
    bases, pairs = {run.seeds: run for run in plain}, []
    for run in (run for run in runs if run.seeds in bases):
        base = bases[run.seeds]
        own, its = (figures(r, len(r.rows)) for r in (run, base))
        reached = (r["round"] for r in run.rows if (r["test_acc"] or 0) >= its["last"])
        seconds = own["s/round"] / its["s/round"] if run.speed == base.speed else None
        pairs.append({"over FedAvg": own["last"] - its["last"], "rounds to": next(reached, None)})
        pairs[-1] |= {"s": seconds, "MB": own["MB/round"] / its["MB/round"]}
    return pairs


def line_of(cell, runs, plain, published):
    """Return the line of a cell; plain: FedAvg's runs in the same setting."""
    columns = "accuracy,over FedAvg,worst client,s,MB,rounds to".split(",")
    line = {"method": cell.method, **dict.fromkeys(columns, "-")}
    line["published"] = published.get(cell.key, {}).get("acc", ["-"])[0]
    if not runs:
        return line | {"accuracy": "not run"}
    each = [figures(run, len(run.rows)) for run in runs]
    pairs = compare_pairs(runs, plain)
    mean = {name: Mean.of([pair[name] for pair in pairs]) for name in (pairs or [{}])[0]}
    line["accuracy"] = with_n(Mean.of([own["last"] for own in each]))
    line["worst client"] = with_n(Mean.of([own.get("worst client") for own in each]))
    if pairs and runs != plain:
        line["over FedAvg"] = with_n(mean["over FedAvg"], "+.2f")
    if pairs:
        line |= {name: f"{mean[name].mean:.2f}x" for name in ("s", "MB") if mean[name].n}
        line["rounds to"] = show_censored(mean["rounds to"], runs[0].flags["rounds"])
    return line


def with_n(mean, form=".2f"):
    """Return a Mean as "a +- b (n)"."""
    return f"{mean.show(form, '.2f')} ({mean.n})" if mean.n else "-"


def print_tables(found, published, markdown=False):
    """Print a table a setting of {cell: runs}; published: of read_published()."""
    for title, own, plain in settings_of(found):
        lines = [line_of(cell, runs, plain, published) for cell, runs in own.items()]
        print(f"\n{title}:\n\n{table(lines, markdown)}")


# --- The picture


def draw(path, found):
    """Write the picture of {cell: runs}, of settings in which FedAvg and another have run."""
    settings = []
    for title, own, plain in settings_of(found):
        shown = {}
        for cell, runs in own.items():
            if pairs := compare_pairs(runs, plain):
                shown[cell.method] = Group(runs, []), [pair["over FedAvg"] for pair in pairs]
        settings += [(title, shown)] * (len(shown) > 1)
    if settings:
        pictures.write(path, draw_settings, settings)


def draw_settings(plt, settings):
    """Return a figure with two panels a setting: curves, and differences from FedAvg.

    settings: [(title, {method: (Group, its differences)}), ...]"""
    size = 9, 3.6 * len(settings)
    figure, axes = plt.subplots(len(settings), 2, figsize=size, squeeze=False, layout="constrained")
    for (left, right), (title, shown) in zip(axes, settings):
        order = sorted(shown, key=lambda method: Mean.of(shown[method][1]).mean)  # best last
        draw_accuracies(left, order, shown)
        draw_differences(right, order, shown)
        left.set_title(title)
        for ax in (left, right):
            ax.grid(color="0.92")
    return figure


def draw_accuracies(ax, order, shown):
    """Draw the mean curves of FedAvg and the best others, from a fifth of the rounds on."""
    others = [method for method in reversed(order) if method != "FedAvg"]
    for i, method in enumerate(["FedAvg", *others[: CURVES - 1]]):
        points = curve(shown[method][0], "rounds", "test_acc")
        rounds, means = zip(*((x, mean.mean) for x, mean in points[len(points) // 5 :]))
        ax.plot(rounds, means, label=method, color=pictures.COLOURS[i])
    ax.set(xlabel="communication rounds", ylabel="test accuracy (%)")
    ax.legend(fontsize="small")


def draw_differences(ax, order, shown):
    """Draw each method's differences, their mean, and two deviations about it."""
    for i, method in enumerate(order):
        gains = shown[method][1]
        mean = Mean.of(gains)
        ax.plot(gains, [i] * mean.n, ".", color="0.6")
        bar = 2 * mean.std if mean.std is not None else None
        ax.errorbar(mean.mean, i, xerr=bar, fmt="o", color=pictures.COLOURS[0], capsize=2)
    ax.set_yticks(range(len(order)), [f"{m} ({len(shown[m][1])})" for m in order])
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_xlabel("accuracy over FedAvg's on the same partitions (n):\neach, mean, two deviations")


# --- --publish


def publish(runs_of, root, commands):
    """Keep the finished runs in root, and write those kept into the PAGES that have the MARKS.

    Raises UserError for a run whose flags are not those of its command."""
    for run in sum(finished_runs(runs_of, root).values(), []):
        config = run.config | {"flags": decisive_flags(run.flags)}
        asked = decisive_flags(parsed_flags(commands[run.path]))
        run_folder.check_same(run.path, config, "flags", asked)
        keep(run)
    found = finished_runs(runs_of, KEPT)
    draw(PICTURE, found)
    for page in PAGES:
        if MARKS[0] in page.read_text():
            place = PICTURE.relative_to(page.parent)
            compare.replace_section(page, lambda at=place: print_page(found, at), MARKS)
    return 0


def print_page(found, picture):
    """Print what a page shows of {cell: runs}, and the picture, if there is one."""
    print_tables(found, read_published(), markdown=True)
    if PICTURE.exists():
        print(f"\n![Curves, and accuracy over FedAvg's]({picture})")


def keep(run):
    """Write to KEPT what tables need of a run: config.json, without its place, and the rows."""
    folder = KEPT / run.path.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = (run.path / "metrics.jsonl").read_bytes()
    flags = run.config["flags"] | {"out": f"results/benchmark/{folder.name}"}
    text = json.dumps(run_folder.sealed(run.config | {"flags": flags}), indent=1)
    run_folder.write_atomically(folder / "config.json", f"{text}\n".encode())
    run_folder.write_atomically(folder / "metrics.jsonl", rows)
