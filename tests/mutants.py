"""Change an operator, a number or a branch at a time, as cosmic-ray does; see which tests notice.

    pip install cosmic-ray
    python tests/mutants.py [FILE...] [--count 20] [--seed 0]

FILE: those of TESTS; by default all. Of each file so many mutants are drawn, planted in a copy of
the tree, and tried by the tests that TESTS names. Prints those that no test notices."""

import argparse
import difflib
import pathlib
import random
import tempfile

from mutations import ROOT, copy_tree, run_tests

SECONDS = 200  # that the tests of a mutant may take
SCRIPTS = {  # tests, and the scripts that they are of
    "engine": "fedavg",
    "hand_losses": "fedprox moon mixup fedkd fitnet fedntd fedgkd",
    "hand_networks": "fedalign stochdepth gradaug fedcka fedmlb",
    "hand_servers": "scaffold feddyn qfedavg fednova",
    "hand_rfedavg": "rfedavg rfedavg_dp rfedavg_code",
}
SCRIPTS = {name: tests for tests, names in SCRIPTS.items() for name in names.split()}
TESTS = {  # file: (its tests, which of its functions; "": all)
    **{f"{name}.py": (f"{tests} off_switch flags_matter", "") for name, tests in SCRIPTS.items()},
    "extras/servers.py": ("hand_servers", ""),
    "extras/similarities.py": ("hand_networks", ""),
    "extras/partitions.py": ("partition hand_servers", ""),
    "analysis/hessian.py": ("hessian", ""),
    "common.py": (
        "loop images partition sub_networks engine hand_losses plain",
        "run_plainly train_client PlainWorker Client Received sample_clients clients_per_round "
        "set_weights average add_proximal keep_row rows_of evaluate measure_round best_row summary "
        "check_finite epoch_sizes batch_sizes most_steps batch_tables resolve_augment draw_augment "
        "apply_augment learning_rate optimizer optimizer_state indices_by_owner "
        "dirichlet_partition _dirichlet_counts iid_partition pixel_statistics hold_out "
        "make_divisible at_width _narrow",
    ),
}


def mutants_of(source, functions):
    """Return (operator, occurrence, line) of the mutants inside of these functions, or of all."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree, found = get_ast(source), []
    for name in sorted(operator_names()):
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = ((n, p) for n in ast_nodes(tree) for p in operator.mutation_positions(n))
        for occurrence, (node, (start, _)) in enumerate(places):
            command = "__name__" in source.splitlines()[start[0] - 1]  # run by no import
            if not command and (not functions or enclosing(node) & functions):
                found.append((operator, occurrence, start[0]))
    return found


def enclosing(node):
    names = set()
    while node is not None:
        if node.type in ("funcdef", "classdef"):
            names.add(node.name.value)
        node = node.parent
    return names


def check(tree, file, args):
    """Run the tests of a file's mutants; return how many were tried, and how many noticed."""
    from cosmic_ray.mutating import mutate_code

    names, functions = TESTS[file]
    tests = [f"tests/test_{name}.py" for name in names.split()]
    of_all = "not (test_off_switch or test_flags_matter)"  # scripts; of these the script's own
    options = ["-x", "-k", f"{pathlib.Path(file).stem} or defaults or shared or {of_all}"]
    source = (ROOT / file).read_text()
    ends, log = run_tests(tree, tests, *options, seconds=900)
    assert not ends, log[-3000:]
    found = mutants_of(source, {*functions.split()})
    drawn = random.Random(f"{args.seed} {file}").sample(found, min(args.count, len(found)))
    noticed = 0
    for operator, occurrence, line in drawn:
        text = mutate_code(source, operator, occurrence)
        (tree / file).write_text(text)
        ends, _ = run_tests(tree, tests, *options, seconds=SECONDS)
        noticed += bool(ends)
        if not ends:
            changes = difflib.ndiff(source.splitlines(), text.splitlines())
            changes = [change for change in changes if change[0] in "+-"]
            print(f"{file}:{line} {type(operator).__name__}", *changes, sep="\n    ")
    (tree / file).write_text(source)
    print(f"{file}: {noticed} of {len(drawn)} noticed, of {len(found)} in all")
    return len(drawn), noticed


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all of them")
    parser.add_argument("--count", type=int, default=20, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants that are drawn")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        counts = [check(tree, file, args) for file in args.files or TESTS]
    print("{1} of {0} noticed".format(*map(sum, zip(*counts))))


if __name__ == "__main__":
    main()
