"""Each flag of each script changes a run's weights or rows, or a line says why it cannot."""

import functools
import json

import pytest
import torch
from conftest import args_of, make_folder, plainly, refusal
from methods import SCRIPTS

import common
import extras.glyphs

BASE = """--dataset glyphs --image-size 8 --model resnet8 --clients 3 --sample 0.67 --rounds 2
    --epochs 1 --batch-size 8 --lr 0.05 --quiet --device cpu --workers 1""".split()
NEEDED = {"rfedavg_dp": "--noise-clip 1 ", "gradaug": "--mu 1 ", "fedcka": "--batch-size 6 "}
# a flag of a script: what both runs have beside BASE, and what the second has in addition
OWN = {
    "fedprox --mu": ("--mu 0.5", "--mu 0.6"),
    "moon --mu": ("--mu 0.5", "--mu 0.6"),
    "moon --temperature": ("", "--temperature 0.7"),
    "moon --frozen-mode": ("", "--frozen-mode train"),
    "mixup --gamma": ("--gamma 0.5", "--gamma 0.6"),
    "stochdepth --keep": ("--keep 0.5", "--keep 0.3"),
    "stochdepth --rule": ("--keep 0.5", "--rule code"),
    "gradaug --subnets": ("", "--subnets 3"),
    "gradaug --mu": ("", "--mu 1.5"),
    "gradaug --min-width": ("", "--min-width 0.4"),
    "gradaug --widths": ("--min-width 0.4", "--widths paper"),
    "gradaug --resolutions": ("", "--resolutions 8,12"),
    "fedalign --mu": ("", "--mu 0.6"),
    "fedalign --width": ("", "--width 0.5"),
    "fedalign --lip-scale": ("", "--lip-scale none"),
    "fedalign --lip-input": ("", "--lip-input full"),
    "fedcka --mu": ("", "--mu 2"),
    "fedcka --layers": ("", "--layers 1"),
    "fedcka --similarity-metric": ("", "--similarity-metric cosine"),
    "scaffold --option": ("", "--option 1"),
    "scaffold --correction": ("", "--correction gradient"),
    "fedmlb --lambda1": ("", "--lambda1 0.5"),
    "fedmlb --lambda2": ("", "--lambda2 0.5"),
    "fedmlb --tau": ("", "--tau 2"),
    "fedmlb --pathways": ("", "--pathways 1,2"),
    "fedmlb --direction": ("", "--direction global-local"),
    "fedmlb --divisor": ("--pathways 1", "--divisor all"),
    "fedmlb --dyn-alpha": ("--dyn-alpha 0.1", "--dyn-alpha 0.2"),
    "fedkd --gamma": ("", "--gamma 0.3"),
    "fitnet --gamma": ("", "--gamma 2"),
    "fedntd --weighting-rule": ("--ntd-beta 0.5", "--weighting-rule sum"),
    "fedntd --ntd-beta": ("", "--ntd-beta 0.4"),
    "fedntd --tau": ("", "--tau 2"),
    "fedgkd --gamma": ("", "--gamma 0.4"),
    "fedgkd --buffer": ("--rounds 3", "--buffer 1"),
    "feddyn --dyn-alpha": ("", "--dyn-alpha 0.2"),
    "rfedavg --variant": ("--lam 0.1", "--variant rfedavg"),
    "rfedavg --lam": ("--lam 0.1", "--lam 0.2"),
    "rfedavg_dp --lam": ("--lam 0.1", "--lam 0.2"),
    "rfedavg_dp --noise": ("--lam 0.1", "--noise 2"),
    "rfedavg_dp --noise-clip": ("--lam 0.1", "--noise-clip 0.1"),
    "rfedavg_code --variant": ("--lam 0.1", "--variant rfedavg"),
    "rfedavg_code --lam": ("--lam 0.1", "--lam 0.2"),
    "qfedavg --q": ("", "--q 2"),
    "qfedavg --h": ("", "--h rfedavg"),
    "qfedavg --lipschitz": ("--h rfedavg", "--lipschitz 2"),
    "ditto --lam": ("--client-test", "--lam 30"),
}
WEIGHT, POSITIVE, COUNT = ("0 1", "-1"), ("1e-9 2", "0"), ("1 2", "0")
SHARE, PART, CHOICE = ("0 1", "-1 2"), ("0.1 1", "0 2"), ("", "nonsense")
TAKES = {  # the default of a script's own flags, values that it takes, and values that it refuses
    "fedprox --mu": (1e-4, *WEIGHT),
    "moon --mu": (1, *WEIGHT),
    "moon --temperature": (0.5, *POSITIVE),
    "moon --frozen-mode": ("eval", *CHOICE),
    "mixup --gamma": (0.1, *WEIGHT),
    "stochdepth --keep": (0.9, *SHARE),
    "stochdepth --rule": ("paper", *CHOICE),
    "gradaug --subnets": (2, *COUNT),
    "gradaug --mu": (1.75, *WEIGHT),
    "gradaug --min-width": (0.8, *PART),
    "gradaug --widths": ("code", *CHOICE),
    "gradaug --resolutions": (None, "8 4096", "7 4097 9,x"),
    "fedalign --mu": (0.45, *WEIGHT),
    "fedalign --width": (0.25, *PART),
    "fedalign --lip-scale": ("ce", *CHOICE),
    "fedalign --lip-input": ("slim", *CHOICE),
    "fedcka --mu": (3, *WEIGHT),
    "fedcka --layers": (2, *COUNT),
    "fedcka --similarity-metric": ("linear-cka", *CHOICE),
    "scaffold --option": (2, "1", "0 3"),
    "scaffold --correction": ("step", *CHOICE),
    "fedmlb --lambda1": (1, *WEIGHT),
    "fedmlb --lambda2": (1, *WEIGHT),
    "fedmlb --tau": (1, *POSITIVE),
    "fedmlb --pathways": (None, "1 1,2", "0 1,x"),
    "fedmlb --direction": ("local-global", *CHOICE),
    "fedmlb --divisor": ("selected", *CHOICE),
    "fedmlb --dyn-alpha": (0, *WEIGHT),
    "fedkd --gamma": (0.2, *SHARE),
    "fitnet --gamma": (1, *WEIGHT),
    "fedntd --weighting-rule": ("convex", *CHOICE),
    "fedntd --ntd-beta": (0.3, "0 1", "-1 3"),
    "fedntd --tau": (1, *POSITIVE),
    "fedgkd --gamma": (0.2, *WEIGHT),
    "fedgkd --buffer": (5, *COUNT),
    "feddyn --dyn-alpha": (0.1, *WEIGHT),
    "rfedavg --variant": ("rfedavg+", *CHOICE),
    "rfedavg --lam": (1e-4, *WEIGHT),
    "rfedavg_dp --lam": (1e-4, *WEIGHT),
    "rfedavg_dp --noise": (1, *WEIGHT),
    "rfedavg_dp --noise-clip": (1, *POSITIVE),
    "rfedavg_code --variant": ("rfedavg+", *CHOICE),
    "rfedavg_code --lam": (1e-4, *WEIGHT),
    "qfedavg --q": (1, *WEIGHT),
    "qfedavg --h": ("paper", *CHOICE),
    "qfedavg --lipschitz": (1, *POSITIVE),
    "ditto --lam": (1, *WEIGHT),
}
AVGM, ADAM = "--server avgm", "--server adam"
SHARED = {  # of fedavg.py: all that common.flags() has
    "--dataset": ("--data-dir IMAGES --partition iid", "--dataset folder"),
    "--data-dir": ("--dataset folder --partition iid --data-dir IMAGES", "--data-dir OTHERS"),
    "--image-size": ("", "--image-size 12"),
    "--normalise": ("", "--normalise half"),
    "--augment": ("--augment flip", "--augment crop"),
    "--partition": ("", "--partition iid"),
    "--alpha": ("", "--alpha 5"),
    "--min-size": ("--alpha 0.01 --min-size 1", "--min-size 20"),
    "--similarity": ("--partition similarity", "--similarity 50"),
    "--labels": ("--partition labels --labels 62", "--labels 60"),
    "--shards": ("--partition shards", "--shards 3"),
    "--users": ("--partition natural --clients 1", "--users 2"),
    "--split-file": ("--partition file --partial-split --split-file A", "--split-file B"),
    "--client-test": ("", "--client-test"),
    "--validation": ("", "--validation 0.1"),
    "--data-seed": ("", "--data-seed 1"),
    "--metric": ("", "--metric all"),
    "--model": ("", "--model cnn-mcmahan"),
    "--init": ("--seed 3", "--init WEIGHTS"),
    "--projection": ("", "--projection 8"),
    "--clients": ("", "--clients 4"),
    "--sample": ("", "--sample 1"),
    "--rounds": ("", "--rounds 1"),
    "--weighting": ("", "--weighting uniform"),
    "--server": (AVGM, ADAM),
    "--server-lr": ("--server-lr 0.5", "--server-lr 0.6"),
    "--server-momentum": (f"{AVGM} --server-momentum 0.5", "--server-momentum 0.6"),
    "--server-beta2": (ADAM, "--server-beta2 0.9"),
    "--server-tau": (ADAM, "--server-tau 0.01"),
    "--epochs": ("", "--epochs 2"),
    "--local-steps": ("--local-steps 2", "--local-steps 3"),
    "--batch-size": ("", "--batch-size 7"),
    "--drop-last": ("", "--drop-last"),
    "--lr": ("", "--lr 0.06"),
    "--lr-decay": ("", "--lr-decay 0.9"),
    "--optimizer": ("", "--optimizer rmsprop"),
    "--momentum": ("--momentum 0.5", "--momentum 0.6"),
    "--nesterov": ("", "--no-nesterov"),
    "--weight-decay": ("", "--weight-decay 0.01"),
    "--clip": ("--clip 0.1", "--clip 0.2"),
    "--persist-opt": ("", "--persist-opt"),
    "--seed": ("", "--seed 1"),
    "--precision": ("", "--precision bf16"),
    "--eval-every": ("", "--eval-every 2"),
}
CANNOT = {  # neither weights nor rows: what it does instead, or where it is tested
    "--help": "prints",
    "--quiet": "prints nothing: test_plain.test_on_round_ends_a_plain_run",
    "--partial-split": "a refusal goes: test_own_data.test_partial_split",
    "--leak": "of tweets: test_text.test_sent140_leak",
    "--vectors": "of tweets: test_text.test_word_vectors",
    "--device": "of a GPU: test_cuda",
    "--graph": "of a GPU, where it changes the time alone: test_cuda",
    "--deterministic": "of a GPU: test_cuda.test_runs_repeat",
    "--workers": "the time alone: test_steps.test_workers_give_the_same_model",
    "--plain": "the time alone: test_plain",
    "--out": "the place of a run: test_run_folder",
    "--resume": "goes on: test_run_folder.test_every_method_resumes",
    "--checkpoint-every": "what a kill costs: test_run_folder",
    "--save-clients": "files: test_run_folder.test_clients_files",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return {NAME: path} of the files that commands above name."""
    root = tmp_path_factory.mktemp("files")
    for name, classes in (("IMAGES", ("ape", "bee")), ("OTHERS", ("ape", "bee", "cow"))):
        make_folder(root / name, (16, 16), classes=classes)
        for other in (root / name).glob("train/*/0.png"):
            for i in range(3, 20):
                other.with_name(f"{i}.png").write_bytes(other.read_bytes())
    (root / "A").write_text(json.dumps([list(range(k, 48, 3)) for k in range(3)]))
    (root / "B").write_text(json.dumps([list(range(k, k + 16)) for k in (0, 16, 32)]))
    torch.manual_seed(9)
    torch.save(common.build_net("resnet8", 62).state_dict(), root / "WEIGHTS")
    return {name: root / name for name in ("IMAGES", "OTHERS", "A", "B", "WEIGHTS")}


@functools.cache
def outcome(name, words):
    """Return the weights and the rows of a run, without its times."""
    extras.glyphs.GLYPHS = (60, 20)  # which conftest puts back
    net, rows = SCRIPTS[name].main([*BASE, *words.split()], run=plainly)
    varies = ("seconds", "samples_per_s", "peak_memory")
    rows = [{k: v for k, v in row.items() if k not in varies} for row in rows]
    assert all(v.isfinite().all() for v in net.parameters())
    return {k: v.clone() for k, v in net.state_dict().items()}, rows


def differs(a, b):
    """Return whether two outcomes differ in weights, and whether in rows."""
    same = a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    return not same, a[1] != b[1]


@pytest.mark.parametrize("flag", [*OWN, *(f"fedavg {flag}" for flag in SHARED)])
def test_the_flag_matters(monkeypatch, files, flag):
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (60, 20))
    name, word = flag.split()
    both, changed = OWN[flag] if flag in OWN else SHARED[word]
    both = NEEDED.get(name, "") + both
    for key, path in files.items():
        both, changed = (f"{text} ".replace(f" {key} ", f" {path} ") for text in (both, changed))
    weights, rows = differs(outcome(name, both), outcome(name, f"{both} {changed}"))
    of_rows_alone = ("--client-test", "--eval-every", "--metric")
    assert (
        rows if word in of_rows_alone or name == "ditto" else weights
    )  # of whom all else is FedAvg's


@pytest.mark.parametrize("flag", TAKES)
def test_defaults_and_what_a_flag_takes(flag):
    """The defaults are the papers'."""
    default, taken, refused = TAKES[flag]
    name, word = flag.split()

    def value(*argv):
        words = [] if name == "gradaug" else NEEDED.get(name, "").split()
        args = args_of(SCRIPTS[name], *words, *argv)
        return getattr(args, word[2:].replace("-", "_"))

    assert value() == default
    for text in taken.split():
        found = value(word, text)
        found = found if isinstance(found, list) else [found]
        assert found == [float(number) for number in text.split(",")]
    for text in refused.split():
        assert word in refusal(value, word, text), text


class Seen(Exception):
    """Carries a parser out of a script."""


def flags_of(name):
    """Return the flags of a script, each by its first spelling."""

    def parse_args(parser, *_):
        raise Seen(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Seen) as seen:
        patch.setattr(common.Parser, "parse_args", parse_args)
        SCRIPTS[name].main([])
    return [action.option_strings[-1] for action in seen.value.args[0]._actions]


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_flag_is_left_out(name):
    shared, own = flags_of("fedavg"), flags_of(name)
    negated = {flag.replace("--no-", "--") for flag in shared}
    assert negated == SHARED.keys() | CANNOT.keys() and not SHARED.keys() & CANNOT.keys()
    listed = [flag.split()[1] for flag in OWN if flag.split()[0] == name]
    assert sorted(flag for flag in own if flag not in shared) == sorted(listed)
    assert OWN.keys() == TAKES.keys()
