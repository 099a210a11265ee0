"""Every method in one setting, NIID-Bench's CIFAR-10, where all but the method is equal

    python -m reproduce benchmark                     run what is missing, then show what there is
    python -m reproduce benchmark --only fedavg,moon  run these alone, by their names or scripts
    python -m reproduce benchmark --quick             a smoke test: one partition, 5 rounds
    python -m reproduce benchmark --publish           runs of ten rounds into results/ and the docs

reproduce/cells.txt has the commands ([NIID-Bench]). Run METHOD-dsK has --data-seed K and lies in
runs/benchmark/, or with other flags, which go to all scripts, in runs/benchmark-FLAGS/. A setting
has two tables: of finished runs, and of all runs after round 10, which tells more while few are
finished (the learning rate is constant, so a run of ten rounds would give the same):
    accuracy       of the global model on the whole test set, in %
    over FedAvg    the same less that of FedAvg's run on the same partition
    worst client   accuracy of the worst client
    s              seconds of the fastest round over FedAvg's; -: not known to be of the same
                   hardware and --workers
    MB             bytes of a round over those of FedAvg's run
    rounds to      the first round with FedAvg's accuracy in the table's round; 50+: none of the 50
    published      the mean in NIID-Bench's paper
a +- b (n): mean and sample standard deviation over n partitions.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import shlex
import statistics

import common
import run_folder
from analysis import pictures
from analysis.runs import table
from reproduce import compare, jobs
from reproduce.cells import all_cells, parsed_flags, read_published
from reproduce.figures import Mean, curve, figures, seconds, show_censored
from reproduce.runs import Group, decisive_flags, read_run, read_runs

MAIN = "alpha=0.5"  # the setting whose runs are named after the method alone
TITLES = {MAIN: "Dirichlet(0.5)", "labels=2": "Two labels a client"}
EARLY = 10
TABLES = {f"round {EARLY}": EARLY, "the last round": None}
MARKS = "<!-- benchmark -->\n", "<!-- end of benchmark -->\n"
README, PAGE = jobs.ROOT / "README.md", jobs.ROOT / "docs" / "benchmark.md"
PICTURE = jobs.ROOT / "docs" / "benchmark.svg"
KEPT = jobs.ROOT / "results" / "benchmark"


def benchmark(args, extra):
    """Run the benchmark and show it; extra: flags of all scripts. Returns the exit code."""
    jobs.check_words(extra, ["data-seed", "out", "resume"])
    extra = "--rounds 5 --epochs 1".split() * args.quick + extra
    root = pathlib.Path(args.runs, jobs.slug(f"benchmark {jobs.setting_of(extra)}"))
    cells = all_cells()["NIID-Bench", "CIFAR-10"]
    seeds = range(args.data_seeds or (1 if args.quick else 3))
    names = [f"{c.setting * (c.setting != MAIN)} {c.method} ds".lower() for c in cells]
    runs_of = {cell: [f"{jobs.slug(name)}{k}" for k in seeds] for cell, name in zip(cells, names)}
    commands = {
        root / runs_of[cell][k]: f"{cell.command} --data-seed {k} {shlex.join(extra)}".strip()
        for k in seeds
        for cell in jobs.select_cells(cells, args.only)
    }
    if args.publish and extra:
        raise common.UserError("argument --publish: takes the benchmark alone, without other flags")
    if args.publish and not args.dry_run:
        return publish(runs_of, commands)

    def show(_):
        settings = read_settings(runs_of, root)
        print_tables(settings, published={} if extra else read_published())
        draw(root / "picture.png", settings)

    return jobs.run_plan(jobs.Plan(commands, root), args, show)


def read_settings(runs_of, root):
    """Return {(title, key of TABLES): {cell: (Runs up to that round, their pairs)}}.

    runs_of: {cell: names of folders in root}. pairs: of compare_pairs()."""
    settings = {}
    for cell, names in runs_of.items():
        folders = [root / name for name in names if (root / name / "config.json").exists()]
        runs = read_runs(folders, compare.warn)[0]
        for when, rounds in TABLES.items():
            enough = [r for r in runs if (len(r.rows) >= rounds if rounds else r.finished)]
            own = [dataclasses.replace(run, rows=run.rows[:rounds]) for run in enough]
            cells = settings.setdefault((TITLES[cell.setting], when), {})
            plain = next(iter(cells.values()))[0] if cells else own  # FedAvg's cell is the first
            cells[cell] = own, compare_pairs(own, plain)
    return settings


def compare_pairs(runs, plain):
    """Return the columns of runs beside FedAvg's on the same partitions, [{column: number}, ...].

    plain: FedAvg's runs. None: in no round, or of seconds that do not compare."""
    bases, pairs = {run.seeds: run for run in plain}, []
    for run in (run for run in runs if run.seeds in bases):
        base = bases[run.seeds]
        own, its = (figures(r, len(r.rows)) for r in (run, base))
        reached = (r["round"] for r in run.rows if (r["test_acc"] or 0) >= its["last"])
        pair = {"over FedAvg": own["last"] - its["last"], "rounds to": next(reached, None)}
        fastest, its_fastest = (min(map(seconds, r.rows)) for r in (run, base))
        pair["s"] = fastest / its_fastest if run.speed == base.speed else None
        pairs.append({**pair, "MB": own["MB/round"] / its["MB/round"]})
    return pairs


def line_of(cell, runs, pairs, published):
    """Return the line of a cell, with its runs and pairs of read_settings()."""
    line = dict.fromkeys("method,accuracy,over FedAvg,worst client,s,MB,rounds to".split(","), "-")
    line["method"] = cell.method
    line["published"] = published.get(cell.key, {}).get("acc", ["-"])[0]
    each = [figures(run, len(run.rows)) for run in runs]
    line["accuracy"] = with_n(Mean.of([own["last"] for own in each]))
    line["worst client"] = with_n(Mean.of([own.get("worst client") for own in each]))
    if pairs:
        mean = {name: Mean.of([pair[name] for pair in pairs]) for name in pairs[0]}
        line |= {name: f"{mean[name].mean:.2f}x" for name in ("s", "MB") if mean[name].n}
        line["rounds to"] = show_censored(mean["rounds to"], len(runs[0].rows))
        line["over FedAvg"] = with_n(mean["over FedAvg"], "+.2f") * (cell.method != "FedAvg") or "-"
    return line


def with_n(mean, form=".2f"):
    """Return a Mean as "a +- b (n)"."""
    return f"{mean.show(form, '.2f')} ({mean.n})" if mean.n else "-"


def print_tables(settings, published, markdown=False):
    """Print a table of each of read_settings(); published: of read_published()."""
    for (title, when), own in settings.items():
        beside = {} if TABLES[when] else published
        lines = [line_of(cell, *found, beside) for cell, found in own.items() if found[0]]
        missing = [cell.method for cell, (runs, _) in own.items() if not runs]
        print(f"\n{title}, after {when}:")
        if lines:
            print(f"\n{table(lines, markdown)}")
        if missing:
            print(f"\nNo finished run: {', '.join(missing)}.")


def draw(path, settings):
    """Write the picture of read_settings() in which FedAvg and another have run."""
    found = {t: {c.method: f for c, f in own.items() if f[1]} for t, own in settings.items()}
    if drawn := {f"{t}, after {w}": own for (t, w), own in found.items() if len(own) > 1}:
        pictures.write(path, draw_settings, drawn)


def draw_settings(plt, settings):
    """Return a figure of {title: {method: (runs, pairs)}}: curves, and differences from FedAvg."""
    heights = [max(3.6, 0.2 * len(found)) for found in settings.values()]
    size = {"figsize": (9, sum(heights)), "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(settings), 2, height_ratios=heights, **size)
    colours = {}  # {method: its colour in all panels}
    for (left, right), (title, found) in zip(axes, settings.items()):
        gains = {k: [pair["over FedAvg"] for pair in pairs] for k, (_, pairs) in found.items()}
        gains = dict(sorted(gains.items(), key=lambda item: Mean.of(item[1]).mean))  # best last
        best = [method for method in reversed(gains) if method != "FedAvg"]
        most = max(len(gains[method]) for method in best)  # curves over fewer would be noisier
        best = [method for method in best if len(gains[method]) == most][:5]
        draw_accuracies(left, {k: found[k][0] for k in ["FedAvg", *best]}, colours)
        draw_differences(right, gains)
        left.set_title(title)
        for ax in (left, right):
            ax.grid(color="0.92")
    return figure


def draw_accuracies(ax, runs, colours):
    """Draw mean curves of {method: runs}, from a fifth of the rounds.

    They are of the partitions that all have, or of the one that most have, without the others."""
    most = statistics.mode(run.seeds for own in runs.values() for run in own)
    seeds = {method: {run.seeds for run in own} for method, own in runs.items()}
    runs = {method: own for method, own in runs.items() if most in seeds[method]}
    shared = set.intersection(*(seeds[method] for method in runs))
    for method, own in runs.items():
        points = curve(Group([r for r in own if r.seeds in shared], []), "rounds", "test_acc")
        means = [(x, mean.mean) for x, mean in points[len(points) // 5 :]]
        colour = colours.setdefault(method, pictures.COLOURS[len(colours) % 8])
        ax.plot(*zip(*means), label=method, color=colour)
    ax.set(xlabel=f"communication rounds (n = {len(shared)})", ylabel="test accuracy (%)")
    ax.legend(fontsize="small")


def draw_differences(ax, gains):
    """Draw each method's differences, {method: [number]}, their mean, and two deviations of it."""
    for i, own in enumerate(gains.values()):
        mean = Mean.of(own)
        ax.plot(own, [i] * mean.n, ".", color="0.6", zorder=3)  # above the mean
        ax.errorbar(mean.mean, i, xerr=mean.std and 2 * mean.std, fmt="ok", capsize=2)
    ax.set_yticks(range(len(gains)), [f"{method} ({len(own)})" for method, own in gains.items()])
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=5)
    ax.set_xticks(ticks := [-50, -20, -10, -5, 0, 5, 10], ticks)
    ax.set_xlabel("points over FedAvg (n):\neach, mean, two deviations; linear from -5 to 5")


def publish(runs_of, commands):
    """Keep the runs of commands that have EARLY rounds, and write those kept into PAGE and README.

    Raises UserError for a run whose flags are not those of its command."""
    folders = [path for path in commands if (path / "config.json").exists()]
    runs = [run for run in read_runs(folders, compare.warn)[0] if len(run.rows) >= EARLY]
    for run in runs:
        config = run.config | {"flags": decisive_flags(run.flags)}
        asked = decisive_flags(parsed_flags(commands[run.path]))
        run_folder.check_same(run.path, config, "flags", asked)
    for run in runs:
        keep(run)
    settings = read_settings(runs_of, KEPT)
    early = TITLES[MAIN], f"round {EARLY}"  # README has these
    draw(PICTURE, settings)
    draw(PICTURE.with_stem("benchmark-early"), {early: settings[early]})
    compare.replace_section(
        PAGE, lambda: print_tables(settings, read_published(), markdown=True), MARKS
    )
    text = README.read_text()
    for cell, found in reversed(settings[early].items()):  # a script's first cell last
        row = rf"^(\| \[`{cell.command.split()[0]}`\].* \| )[^|]*( \|[^|]*\|[^|]*\|)$"
        line = line_of(cell, *found, {})
        shown = line["accuracy" if cell.method == "FedAvg" else "over FedAvg"]
        text = re.sub(row, rf"\g<1>{shown}\2", text, flags=re.M)
    run_folder.write_atomically(README, text.encode())
    return 0


def keep(run):
    """Write to KEPT what tables need of a run: config.json, without its place, and the rows.

    A run that is kept with more rounds stays."""
    folder = KEPT / run.path.name
    with contextlib.suppress(common.UserError):  # none yet, or one that a kill has cut
        if len(read_run(folder).rows) > len(run.rows):
            return
    folder.mkdir(parents=True, exist_ok=True)
    flags = run.config["flags"] | {"out": f"results/benchmark/{folder.name}"}
    text = json.dumps(run_folder.sealed(run.config | {"flags": flags}), indent=1)
    run_folder.write_atomically(folder / "config.json", f"{text}\n".encode())
    whole = (run.path / "metrics.jsonl").read_bytes().splitlines(True)[: len(run.rows)]
    run_folder.write_atomically(folder / "metrics.jsonl", b"".join(whole))
