"""Flags: each changes weights or rows, or is among those that cannot; defaults, spellings."""

import functools
import json

import pytest
import torch
from conftest import TINY, args_of, from_shell, make_folder, plainly
from conftest import refusal, refused, same
from methods import SCRIPTS
from runs import VARIES

import common
import extras.glyphs
import fedalign
import fedavg
from analysis import partition

BASE = """--dataset glyphs --image-size 8 --model resnet8 --clients 3 --sample 0.67 --rounds 2
    --epochs 1 --batch-size 8 --lr 0.05 --quiet --device cpu --workers 1""".split()
NEEDED = {"rfedavg_dp": "--noise-clip 1 ", "gradaug": "--mu 1 ", "fedcka": "--batch-size 6 "}
# a flag of a script, its default, values that it takes, values that it refuses; and what two runs
# have beside BASE, and what the second has in addition; - is nothing
TABLE = """
fedprox --mu | 1e-4 | 0 1 | -1 | --mu 0.5 | --mu 0.6
moon --mu | 1 | 0 1 | -1 | --mu 0.5 | --mu 0.6
moon --temperature | 0.5 | 1e-9 2 | 0 | - | --temperature 0.7
moon --frozen-mode | eval | - | nonsense | - | --frozen-mode train
mixup --gamma | 0.1 | 0 1 | -1 | --gamma 0.5 | --gamma 0.6
stochdepth --keep | 0.9 | 0 1 | -1 2 | --keep 0.5 | --keep 0.3
stochdepth --rule | paper | - | nonsense | --keep 0.5 | --rule code
gradaug --subnets | 2 | 1 2 | 0 | - | --subnets 3
gradaug --mu | 1.75 | 0 1 | -1 | - | --mu 1.5
gradaug --min-width | 0.8 | 0.1 1 | 0 2 | - | --min-width 0.4
gradaug --widths | code | - | nonsense | --min-width 0.4 | --widths paper
gradaug --resolutions | None | 8 4096 | 7 4097 9,x | - | --resolutions 8,12
fedalign --mu | 0.45 | 0 1 | -1 | - | --mu 0.6
fedalign --width | 0.25 | 0.1 1 | 0 2 | - | --width 0.5
fedalign --lip-scale | ce | - | nonsense | - | --lip-scale none
fedalign --lip-input | slim | - | nonsense | - | --lip-input full
fedcka --mu | 3 | 0 1 | -1 | - | --mu 2
fedcka --layers | 2 | 1 2 | 0 | - | --layers 1
fedcka --similarity-metric | linear-cka | - | nonsense | - | --similarity-metric cosine
scaffold --option | 2 | 1 | 0 3 | - | --option 1
scaffold --correction | step | - | nonsense | - | --correction gradient
fedmlb --lambda1 | 1 | 0 1 | -1 | - | --lambda1 0.5
fedmlb --lambda2 | 1 | 0 1 | -1 | - | --lambda2 0.5
fedmlb --tau | 1 | 1e-9 2 | 0 | - | --tau 2
fedmlb --pathways | None | 1 1,2 | 0 1,x | - | --pathways 1,2
fedmlb --direction | local-global | - | nonsense | - | --direction global-local
fedmlb --divisor | selected | - | nonsense | --pathways 1 | --divisor all
fedmlb --dyn-alpha | 0 | 0 1 | -1 | --dyn-alpha 0.1 | --dyn-alpha 0.2
fedkd --gamma | 0.2 | 0 1 | -1 2 | - | --gamma 0.3
fitnet --gamma | 1 | 0 1 | -1 | - | --gamma 2
fedntd --weighting-rule | convex | - | nonsense | --ntd-beta 0.5 | --weighting-rule sum
fedntd --ntd-beta | 0.3 | 0 1 | -1 3 | - | --ntd-beta 0.4
fedntd --tau | 1 | 1e-9 2 | 0 | - | --tau 2
fedgkd --gamma | 0.2 | 0 1 | -1 | - | --gamma 0.4
fedgkd --buffer | 5 | 1 2 | 0 | --rounds 3 | --buffer 1
feddyn --dyn-alpha | 0.1 | 0 1 | -1 | - | --dyn-alpha 0.2
rfedavg --variant | rfedavg+ | - | nonsense | --lam 0.1 | --variant rfedavg
rfedavg --lam | 1e-4 | 0 1 | -1 | --lam 0.1 | --lam 0.2
rfedavg_dp --lam | 1e-4 | 0 1 | -1 | --lam 0.1 | --lam 0.2
rfedavg_dp --noise | 1 | 0 1 | -1 | --lam 0.1 | --noise 2
rfedavg_dp --noise-clip | 1 | 1e-9 2 | 0 | --lam 0.1 | --noise-clip 0.1
rfedavg_code --variant | rfedavg+ | - | nonsense | --lam 0.1 | --variant rfedavg
rfedavg_code --lam | 1e-4 | 0 1 | -1 | --lam 0.1 | --lam 0.2
qfedavg --q | 1 | 0 1 | -1 | - | --q 2
qfedavg --h | paper | - | nonsense | - | --h rfedavg
qfedavg --lipschitz | 1 | 1e-9 2 | 0 | --h rfedavg | --lipschitz 2
ditto --lam | 1 | 0 1 | -1 | --client-test | --lam 30
"""
OWN = {}
for line in TABLE.strip().splitlines():
    flag, *cells = ("" if cell == "-" else cell for cell in line.split(" | "))
    OWN[flag] = cells
AVGM, ADAM = "--server avgm", "--server adam"
SHARED = {  # of fedavg.py: all that common.flags() has
    "--dataset": ("--data-dir IMAGES --partition iid", "--dataset folder"),
    "--data-dir": ("--dataset folder --partition iid --data-dir IMAGES", "--data-dir OTHERS"),
    "--augment": ("--augment flip", "--augment crop"),
    "--min-size": ("--alpha 0.01 --min-size 1", "--min-size 20"),
    "--similarity": ("--partition similarity", "--similarity 50"),
    "--labels": ("--partition labels --labels 62", "--labels 60"),
    "--shards": ("--partition shards", "--shards 3"),
    "--users": ("--partition natural --clients 1", "--users 2"),
    "--split-file": ("--partition file --partial-split --split-file A", "--split-file B"),
    "--init": ("--seed 3", "--init WEIGHTS"),
    "--server": (AVGM, ADAM),
    "--server-lr": ("--server-lr 0.5", "--server-lr 0.6"),
    "--server-momentum": (f"{AVGM} --server-momentum 0.5", "--server-momentum 0.6"),
    "--server-beta2": (ADAM, "--server-beta2 0.9"),
    "--server-tau": (ADAM, "--server-tau 0.01"),
    "--local-steps": ("--local-steps 2", "--local-steps 3"),
    "--momentum": ("--momentum 0.5", "--momentum 0.6"),
    "--nesterov": ("", "--no-nesterov"),
    "--clip": ("--clip 0.1", "--clip 0.2"),
}
ALONE = """--image-size 12, --normalise half, --partition iid, --alpha 5, --client-test,
    --validation 0.1, --data-seed 1, --metric all, --model cnn-mcmahan, --projection 8,
    --clients 4, --sample 1, --rounds 1, --weighting uniform, --epochs 2, --batch-size 7,
    --drop-last, --lr 0.06, --lr-decay 0.9, --optimizer rmsprop, --weight-decay 0.01,
    --persist-opt, --seed 1, --precision bf16, --eval-every 2"""  # the first run has none
SHARED |= {words.split()[0]: ("", words.strip()) for words in ALONE.split(",")}
CANNOT = {  # of the machine, of a GPU, of text or of what is printed, and tested there
    *"--help --quiet --partial-split --leak --vectors --device --graph --deterministic".split(),
    *"--workers --plain --out --resume --checkpoint-every --save-clients".split(),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    for name, classes in (("IMAGES", ("ape", "bee")), ("OTHERS", ("ape", "bee", "cow"))):
        make_folder(root / name, (16, 16), classes=classes, counts=(20, 2))
    (root / "A").write_text(json.dumps([list(range(k, 48, 3)) for k in range(3)]))
    (root / "B").write_text(json.dumps([list(range(k, k + 16)) for k in (0, 16, 32)]))
    torch.manual_seed(9)
    torch.save(common.build_net("resnet8", 62).state_dict(), root / "WEIGHTS")
    return {name: root / name for name in ("IMAGES", "OTHERS", "A", "B", "WEIGHTS")}


@functools.cache
def outcome(name, words):
    extras.glyphs.GLYPHS = (60, 20)  # which conftest puts back
    net, rows = SCRIPTS[name].main([*BASE, *words.split()], run=plainly)
    rows = [{k: v for k, v in row.items() if k not in VARIES} for row in rows]
    return {k: v.clone() for k, v in net.state_dict().items()}, rows


@pytest.mark.parametrize("flag", [*OWN, *(f"fedavg {flag}" for flag in SHARED)])
def test_the_flag_matters(monkeypatch, files, flag):
    monkeypatch.setattr(extras.glyphs, "GLYPHS", (60, 20))
    name, word = flag.split()
    *_, both, changed = OWN[flag] if flag in OWN else SHARED[word]
    both = NEEDED.get(name, "") + both
    for key, path in files.items():
        both, changed = (f"{text} ".replace(f" {key} ", f" {path} ") for text in (both, changed))
    (weights, rows), (others, other_rows) = (
        outcome(name, words) for words in (both, f"{both} {changed}")
    )
    of_rows_alone = name == "ditto" or word in ("--client-test", "--eval-every", "--metric")
    assert rows != other_rows if of_rows_alone else not same(weights, others)


@pytest.mark.parametrize("flag", OWN)
def test_defaults_and_what_a_flag_takes(flag):
    """The defaults are the papers'."""
    default, taken, bad, *_ = OWN[flag]
    name, word = flag.split()

    def value(*argv):
        words = [] if name == "gradaug" else NEEDED.get(name, "").split()
        args = args_of(SCRIPTS[name], *words, *argv)
        return getattr(args, word[2:].replace("-", "_"))

    found = value()
    assert str(found) == default or found == float(default)
    for text in taken.split():
        found = value(word, text)
        found = found if isinstance(found, list) else [found]
        assert found == [float(number) for number in text.split(",")]
    for text in bad.split():
        assert word in refusal(value, word, text), text


def names_of(name):
    """Return the flags of a script, without what is noted beside them."""
    args = args_of(SCRIPTS[name], *BASE, *NEEDED.get(name, "").split())
    return {"--" + k.replace("_", "-") for k in common.flag_values(args)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_flag_is_left_out(name):
    shared, own = names_of("fedavg"), names_of(name)
    assert shared | {"--help", "--plain"} == SHARED.keys() | CANNOT
    listed = [flag.split()[1] for flag in OWN if flag.split()[0] == name]
    assert sorted(own - shared) == sorted(listed)


def parsed(words):
    return common.flags("x", "x").parse_args(words.split())


def test_aliases():
    words = """--client_number 5 --n_parties 5 --num_of_clients 5 --client_sample .5
        --sample_fraction .5 --participation_rate .5 --partition_alpha 2 --beta 2
        --dirichlet_alpha 2 --local_epochs 20 --comm_round=7 --wd 0 --image_size 16"""
    same_flags = "--clients 5 --sample 0.5 --alpha 2 --rounds 7 --weight-decay 0 --image-size 16"
    assert parsed(words) == parsed(same_flags)
    parser = common.flags("x", "x")
    parser.add_argument("--beta", type=float)  # a method's own is not --alpha
    for words in "--beta=0.3 --n_parties 5".split(), {"beta": 0.3, "n_parties": 5}:
        args = parser.parse_args(words)
        assert (args.beta, args.alpha, args.clients) == (0.3, 0.5, 5)


def test_defaults_are_fedaligns_main_setting():
    words = """--dataset cifar100 --model resnet56 --partition dirichlet --alpha 0.5 --clients 16
        --sample 1 --rounds 25 --epochs 20 --batch-size 64 --lr 0.01 --momentum 0.9 --nesterov
        --weight-decay 1e-4 --clip 0 --weighting samples"""
    assert vars(parsed("")) == vars(parsed(words))
    assert not parsed("").persist_opt and not parsed("").drop_last


def test_device_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [parsed(f"--device {word}").device for word in ("auto", "cuda", "cuda:1", "cpu")]
    assert [parsed("").device, *found] == ["cuda:0", "cuda:0", "cuda:0", "cuda:1", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert parsed("").device == "cpu"


def test_failed_download_is_one_line(tmp_path, capsys, monkeypatch):
    from torchvision import datasets

    def offline(root, **kwargs):
        (root / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("Error downloading\ntrain-images-idx3-ubyte.gz")

    monkeypatch.setattr(datasets, "MNIST", offline)
    argv = [*TINY, "--dataset", "mnist", "--out", tmp_path / "run", "--data-dir", tmp_path / "new"]
    refused(capsys, fedavg, argv, "mnist", "downloaded", "glyphs")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()  # the user's own
    refused(capsys, fedavg, argv)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


def test_odd_files_beside_the_scripts(monkeypatch, tmp_path):
    """An editor's lock is a link to nowhere; a file of somebody's own may be no UTF-8."""
    (tmp_path / ".#fedavg.py").symlink_to("me@host.1")
    (tmp_path / "old.py").write_bytes(b"# caf\xe9")
    monkeypatch.setattr(common, "__file__", str(tmp_path / "common.py"))
    message = "unrecognized arguments: --xyzzy 5"
    assert common.PlainParser("").hinted(message) == message


@pytest.mark.parametrize("script, more", [(fedavg, ""), (partition, "; did you mean --clients?")])
def test_what_is_suggested(capsys, script, more):
    """By other commands too, and nothing where nothing is near."""
    word = "--client" if more else "--xyzzy"
    with pytest.raises(SystemExit):
        from_shell(script, [word, "5"])
    assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: {word} 5{more}\n")


def test_help_is_short(capsys):
    """The paper, the script's own flags, then the shared ones, a line or two each."""
    with pytest.raises(SystemExit):
        fedalign.main(["--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) - len(fedalign.__doc__.splitlines()) < 90
    places = [out.index(f"\n  --{flag} ") for flag in ("mu", "dataset", "clients", "lr", "out")]
    assert places == sorted(places)
    flags = common.flags("x", "x")._actions
    assert all(choice in out for flag in flags for choice in flag.choices or [])
