"""The cells of the papers' tables: their command lines against the papers' settings."""

import ast
import re

import pytest
from makers import CELLS, ROOT, SCRIPTS, cells_by_method, words_of

from reproduce.cells import bare, home, homes, parsed_flags, view_of
from reproduce.jobs import slug
from reproduce.published import key_of, read_published
from reproduce.runs import decisive_flags


def tables_of(paper):
    return [table for p, table in CELLS if p == paper]


def has_words(cell, **expected):
    """Whether the flags of a cell's command have these values; None: the flag is not there."""
    words = words_of(cell)
    return {name.replace("_", "-"): words.get(name.replace("_", "-")) for name in expected} == {
        name.replace("_", "-"): value for name, value in expected.items()
    }


@pytest.mark.parametrize("paper, table", CELLS)
def test_every_line_parses(paper, table):
    for cell in CELLS[paper, table]:
        assert parsed_flags(f"{cell.command} --seed 1")["seed"] == 1


def test_published_cells_and_lines_are_the_same():
    """Every accuracy in published.csv has its line, and every line of a table its number.

    960 numbers in all.
    """
    published = read_published()
    assert sum(map(len, published.values())) == 960
    lines = {key_of(cell) for cells in CELLS.values() for cell in cells}
    in_tables = {key for key in lines if not key.table.startswith("fig")}
    cost_metrics = {"mflops_fwd", "gflops_fwd", "params_M"}
    costs = {key for key, metrics in published.items() if set(metrics) <= cost_metrics}
    bound = key_of(cells_by_method("FedCKA", "fig5")["centralised"])  # 70%, in Sec. 4.3
    assert set(published) - costs == in_tables | {bound}
    assert {key[:2] for key in costs} == {("FedAlign", "7")}
    setting = "CIFAR-100", "ResNet56", "C=16;E=20;R=25;alpha=0.5"
    assert published["FedAlign", "5", *setting, "FedAlign"]["acc"] == ("56.9", "0.5")


NAMES = {
    "C": "clients",
    "N": "clients",
    "frac": "sample",
    "SR": "sample",
    "E": "epochs",
    "R": "rounds",
    "B": "batch-size",
    "M": "layers",
    "sim": "similarity",
    "lambda": "lam",
    "sigma": "noise",
    "pathways": "pathways",
    "alpha": "alpha",
    "lambda1": "lambda1",
    "lambda2": "lambda2",
    "tau": "tau",
}
DATASETS = {
    "CIFAR-100": "cifar100",
    "CIFAR-10": "cifar10",
    "MNIST": "mnist",
    "FEMNIST": "femnist",
    "Sent140": "sent140",
    "Tiny-ImageNet": "tiny-imagenet",
    "ImageNet-200": "imagenet-200",
}
MODELS = {
    "ResNet56": "resnet56",
    "ResNet18": "resnet18",
    "CNN7": "cnn",
    "ResNet50+proj": "resnet50",
    "CNN512": "cnn-mcmahan",
    "LSTM2": "lstm",
    "ResNet18-GN2": "resnet18-gn",
    "ResNet-18": "resnet18-gn",
    "VGG-9": "vgg9",
    "MobileNet": "mobilenet",
    "ShuffleNet": "shufflenet",
    "SqueezeNet": "squeezenet",
}


def names_no_flag(cell, name, value):
    """Whether a part of a setting is not a flag of the cell's own line."""
    if name == "M":  # layers of FedCKA, and fedavg.py has none
        return cell.script == "fedavg"
    if name == "sigma":
        return value == "0"
    return name not in NAMES


@pytest.mark.parametrize("paper, table", CELLS)
def test_a_line_does_what_its_cell_says(paper, table):
    """Each NAME=VALUE of a setting is a flag of the line; so are data set, network, direction."""
    for cell in CELLS[paper, table]:
        words = words_of(cell)
        assert words["dataset"] == DATASETS.get(cell.dataset) or cell.dataset == "-"
        assert (cell.dataset == "-") == (table == "III")
        assert words["model"] == MODELS[cell.model]
        for part in cell.setting.split(";"):
            name, _, value = part.partition("=")
            if paper == "rFedAvg" and name == "C":
                name = "R"  # rounds of communication, in Fig. 9c
            if names_no_flag(cell, name, value):
                continue
            default = {"frac": "1", "pathways": "1,2,3,4,5"}.get(name, "missing")
            word = words.get(NAMES[name], default).replace(",", "")
            assert float(word) == float(value.rstrip("%")), (cell.setting, cell.command)
        assert words.get("direction") == ("global-local" if cell.method == "FedMLB_G->L" else None)


ADAM = {
    "server": "adam",
    "server-momentum": "0.9",
    "server-beta2": "0.99",
    "server-tau": "0.001",
}
AVGM = {"server": "avgm", "server-lr": "1", "server-momentum": "0.4"}
METHOD_FLAGS = {
    ("FedCKA", "SCAFFOLD"): {"server-lr": "1"},
    ("FedCKA", "MOON"): {"temperature": "0.5"},
    ("FedMLB", "FedAvg+KD"): {"gamma": "0.2"},
    ("FedMLB", "FedAvg+FitNet"): {"gamma": "1"},
    ("FedMLB", "FedProx"): {"mu": "0.002"},  # 0.001 without the 1/2, as their later code
    ("FedMLB", "FedGKD"): {"gamma": "0.2", "buffer": "5"},
    ("FedMLB", "FedLS-NTD"): {"weighting-rule": "convex", "ntd-beta": "0.3", "tau": "1"},
    ("FedMLB", "FedADAM"): ADAM,
    ("FedMLB", "FedADAM+FedMLB"): ADAM,
    ("FedMLB", "FedAvgM"): AVGM,
    ("FedMLB", "FedAvgM+FedMLB"): AVGM,
    ("rFedAvg", "Scaffold"): {"option": "2", "server-lr": "1"},
    ("rFedAvg", "rFedAvg"): {"variant": "rfedavg"},
}


def test_lines_of_the_methods():
    """What a method's lines share in every table of a paper: betas, weights, rules, options."""
    seen = set()
    for cell in sum(CELLS.values(), []):
        key = cell.paper, cell.method
        if key in METHOD_FLAGS:
            seen.add(key)
            assert METHOD_FLAGS[key].items() <= words_of(cell).items(), cell.command
    assert seen == set(METHOD_FLAGS)
    for table in ("2", "3"):
        cells = cells_by_method("FedMLB", table)
        assert cells["FedAvg+KD"].script == "fedkd"
        assert cells["FedAvg+FitNet"].script == "fitnet"
    for cell in sum((CELLS["FedCKA", table] for table in "124"), []):
        if cell.method == "FedCKA":
            assert has_words(cell, layers="2", similarity_metric="linear-cka")
    for cell in CELLS["rFedAvg", "fig8"]:
        cost = cell.setting.split(";")[-1]
        share, epochs = {"low cost": ("0.1", "10"), "high cost": ("0.2", "20")}[cost]
        assert has_words(cell, sample=share, epochs=epochs, rounds="80", partition="natural")
    assert {cell.method for cell in CELLS["rFedAvg", "fig10"]} == {"FedAvg", "rFedAvg", "rFedAvg+"}
    for cell in CELLS["rFedAvg", "fig11"]:
        assert "client-test" in words_of(home(cell)) and home(cell).table == "I"


def test_caveats():
    """On Tiny-ImageNet's cells of FedMLB, and on four methods of rFedAvg's Tables I and II."""
    marked = [cell for (_, table), cells in CELLS.items() for cell in cells if cell.caveat]
    tables = [cell for cell in marked if not cell.table.startswith("fig")]
    tiny = [cell for cell in tables if cell.paper == "FedMLB"]
    assert {cell.table[:-1] for cell in tiny} == {"1", "10", "11"} and len(tiny) == 48
    assert {cell.dataset for cell in tiny} == {"Tiny-ImageNet"}
    assert all("Tiny-ImageNet" in cell.caveat and "rotated" in cell.caveat for cell in tiny)
    others = [cell for cell in tables if cell.paper != "FedMLB"]
    assert {(cell.paper, cell.table) for cell in others} == {("rFedAvg", "I"), ("rFedAvg", "II")}
    words = {"Scaffold": "FedAvg", "q-FedAvg": "--h rfedavg", "rFedAvg": "open", "rFedAvg+": "open"}
    assert {cell.method for cell in others} == set(words)
    assert len(others) == 2 * 4 * 8
    for cell in others:
        assert words[cell.method] in cell.caveat
    assert not any("h" in words_of(cell) for cell in others)  # q-FedAvg's: the paper's


def test_lines_with_noise():
    """Fig. 12 is of rFedAvg+, by rfedavg_dp.py where there is noise; deltas are clipped to 1."""
    plain, *noisy = CELLS["rFedAvg", "fig12"]
    assert plain.script == "rfedavg" and has_words(plain, variant="rfedavg+", noise=None)
    assert [words_of(cell)["noise"] for cell in noisy] == ["1", "5", "10", "50"]
    for cell in noisy:
        assert cell.script == "rfedavg_dp" and has_words(cell, noise_clip="1", variant=None)
        assert words_of(cell)["lam"] == words_of(plain)["lam"]
    for cell in sum(CELLS.values(), []):
        if cell.method == "rFedAvg+" and cell.script != "rfedavg_dp":
            assert has_words(cell, variant="rfedavg+")


def test_every_script_is_of_a_cell():
    """All but rfedavg_code.py, another reading of rfedavg.py."""
    scripts = {cell.script for cells in CELLS.values() for cell in cells}
    assert set(SCRIPTS) - {"rfedavg_code"} <= scripts


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "rfedavg_code"])
def test_the_command_of_a_docstring_is_a_cell(name):
    """With every flag that decides the result, --augment auto included."""
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text())).replace("\\\n", " ")
    command = text[text.rindex("    python ") + 11 :]
    flags = decisive_flags(parsed_flags(command))
    paper, kind, number = re.findall(r"(\w+) paper, (Table|Fig\.) (\w+)", text)[-1]
    tables = [number, f"{number}a"] if kind == "Table" else [f"fig{number}"]
    cells = sum((CELLS.get((paper, table), []) for table in tables), [])
    of_script = [cell for cell in cells if cell.script == name]
    assert flags in [decisive_flags(parsed_flags(cell.command)) for cell in of_script]


def test_a_command_of_several_tables_has_one_home():
    cells = cells_by_method("FedAlign", "5")
    assert home(cells["FedAvg"]).table == "1"
    assert "--save-clients" in home(cells["FedAvg"]).command
    assert home(cells["FedAlign"]).table == "5"
    folders = {}
    for command, cell in homes().items():
        folder = cell.paper, cell.table, slug(f"{cell.label} {cell.method}")
        assert folders.setdefault(folder, command) == command
    assert bare(home(cells["FedAvg"]).command) == cells["FedAvg"].command


def test_views():
    """What is drawn of a figure, and FedMLB's EMA at rounds 500 and 1000 everywhere."""
    assert view_of("rFedAvg", "fig9c") == {"x": "epochs"}
    assert view_of("FedMLB", "fig4") == {"at": [500, 1000], "y": ["ema"], "x": "s/round"}
    assert view_of("FedMLB", "6") == {"at": [500, 1000], "over": "pathways"}
    assert view_of("FedAlign", "5") == {}


# --------------------------------------------------------------------------------------------------
# Paper by paper
# --------------------------------------------------------------------------------------------------

FEDALIGN_FLAGS = {
    "fedprox": {"mu": "1e-4"},
    "moon": {"mu": "1", "temperature": "0.5", "projection": "256", "frozen-mode": "train"},
    "mixup": {"gamma": "0.1"},
    "stochdepth": {"keep": "0.9", "rule": "code"},
    "fedavg": {},
    "fedalign": {"mu": "0.45", "width": "0.25", "clip": "10"},
}
GRADAUG_MU = {"1": "2", "2": "1.75", "3": "1.5", "4": "1.25"}  # by n


@pytest.mark.parametrize("table", tables_of("FedAlign"))
def test_lines_of_fedalign(table):
    """Sec. 3.2; of the code Nesterov, weight decay, batch 64, drop-last, and two readings.

    They are MOON's frozen networks in train mode and StochDepth's rule.
    """
    for cell in CELLS["FedAlign", table]:
        check_fedalign_line(cell)
        assert ("save-clients" in words_of(cell)) == (table == "1")


def check_fedalign_line(cell):
    words = words_of(cell)
    assert has_words(cell, batch_size="64", lr="0.01", momentum="0.9", weight_decay="1e-4")
    assert {"nesterov", "drop-last"} <= set(words)
    assert not {"weighting", "lr-decay"} & set(words)
    assert words["dataset"] == cell.dataset.lower().replace("cifar-", "cifar")
    assert words["model"] == cell.model.lower()
    assert words.get("augment") == (None if cell.dataset == "ImageNet-200" else "crop,flip")
    parts = f"E=20;alpha=0.5;{cell.setting}".replace("homog", "alpha=none").split(";")
    setting = dict(part.split("=") for part in parts)
    assert has_words(cell, clients=setting["C"], epochs=setting["E"], sample=setting.get("frac"))
    assert words["rounds"] == setting.get("R", "25")
    assert words.get("alpha", "none") == setting["alpha"]
    assert words["partition"] == ("dirichlet" if "alpha" in words else "iid")
    if cell.script == "gradaug":
        n = cell.method[10:-1] or "2"
        assert has_words(cell, subnets=n, mu=GRADAUG_MU[n], min_width="0.8")
    else:
        assert FEDALIGN_FLAGS[cell.script].items() <= words.items()
    assert ("clip" in words) == (cell.script == "fedalign")
    assert ("projection" in words) == (cell.script == "moon")


FEDCKA_MU = {  # best mu of FedProx, MOON, FedCKA by alpha and data set
    ("5.0", "CIFAR-10"): ("0.001", "10", "3"),
    ("5.0", "CIFAR-100"): ("0.1", "5", "10"),
    ("5.0", "Tiny-ImageNet"): ("0.1", "0.1", "3"),
    ("0.5", "CIFAR-10"): ("0.1", "10", "3"),
    ("0.1", "CIFAR-10"): ("0.001", "0.1", "5"),
}


@pytest.mark.parametrize("table", ["1", "2", "3", "4"])
def test_lines_of_fedcka(table):
    """Sec. 4.1: SGD, lr 0.1, momentum, decay, batch, E, no augmentation; best mu as printed."""
    for cell in CELLS["FedCKA", table]:
        check_fedcka_line(cell)


def check_fedcka_line(cell):
    words = words_of(cell)
    assert has_words(cell, lr="0.1", momentum="0.9", weight_decay="1e-5", batch_size="128")
    assert "no-nesterov" in words
    assert has_words(cell, augment="none", epochs="10", clients="10", partition="dirichlet")
    rounds = {"CIFAR-10": "100", "CIFAR-100": "40", "Tiny-ImageNet": "20"}[cell.dataset]
    assert words["rounds"] == rounds
    small = cell.dataset == "CIFAR-10"
    assert words["model"] == ("cnn" if small else "resnet50")
    assert words.get("projection") == (None if small else "256")
    assert f"alpha={words['alpha']};" in cell.setting
    prox, moon, cka = FEDCKA_MU[words["alpha"], cell.dataset]
    assert words.get("mu") == {"fedprox": prox, "moon": moon, "fedcka": cka}.get(cell.script)


def test_lines_of_fedcka_s_measures_and_layers():
    layers = [words_of(cell).get("layers") for cell in CELLS["FedCKA", "fig5"]]
    assert layers == [*"1234567", None]
    metrics = [words_of(cell).get("similarity-metric") for cell in CELLS["FedCKA", "3"]]
    assert metrics == [None, "frobenius", "cosine", "kernel-cka", "linear-cka"]
    assert words_of(CELLS["FedCKA", "fig5"][-1])["clients"] == "1"


@pytest.mark.parametrize("table", tables_of("FedMLB"))
def test_lines_of_fedmlb(table):
    """App. A: 1000 rounds, E 5, lr 0.1 x 0.998^t (FedADAM 0.01), batch 50 and 10; K steps.

    On Tiny-ImageNet the batch is 100 and 20.
    """
    for cell in CELLS["FedMLB", table]:
        words = words_of(cell)
        assert has_words(cell, rounds="1000", lr_decay="0.998", momentum="0", weight_decay="1e-3")
        assert has_words(cell, clip="10", augment="rotate10,crop,flip")
        assert "drop-last" not in words
        cifar = words["dataset"] == "cifar100"
        assert words.get("normalise") == ("cifar10" if cifar else None)
        name, n, part, k = cell.setting.split(";")[:4]
        if name == "IID":
            assert has_words(cell, partition="iid", alpha=None)
        else:
            assert has_words(cell, partition="dirichlet-balanced", alpha=name[4:-1])
        assert n == f"N={words['clients']}"
        assert part == f"part={100 * float(words['sample']):g}%"
        samples = (50_000 if cifar else 100_000) // int(words["clients"])
        assert k == f"K={int(words['epochs']) * samples // int(words['batch-size'])}"
        adam = "ADAM" in cell.method
        assert words["lr"] == ("0.01" if adam else "0.1")
        assert not adam or has_words(cell, server="adam", server_lr="0.01", server_tau="0.001")
        momentum = {"FedAvgM": "0.4", "FedADAM": "0.9"}.get(cell.method.split("+")[0])
        assert words.get("server-momentum") == momentum
        assert words.get("dyn-alpha") == ("0.1" if "FedDyn" in cell.method else None)
        assert ("FedMLB" in cell.method) == (cell.script == "fedmlb")
        if cell.script == "fedmlb" and table not in ("7", "8"):
            assert has_words(cell, lambda1="1", lambda2="1", tau="1")


def test_table_6_has_all_pathways():
    """Subsets of five but the empty one."""
    cells = CELLS["FedMLB", "6"]
    assert len(cells) == 31 == len({cell.command for cell in cells})
    for cell in cells:
        pathways = words_of(cell).get("pathways", "1,2,3,4,5").split(",")
        assert cell.setting.endswith(f"num_pathways={len(pathways)}")


RFEDAVG_FLAGS = {  # rounds, lambda, mu and q
    "MNIST": ("60", "1e-4", "1", "1"),
    "CIFAR-10": ("200", "1e-5", "1", "1"),
    "Sent140": ("30", "0.1", "0.01", "1e-4"),
}
RFEDAVG_SETTINGS = {  # N, E, SR, batch size of images
    "I": ("20", "5", "1", "100"),
    "II": ("500", "10", "0.2", "32"),
}


@pytest.mark.parametrize("table", RFEDAVG_SETTINGS)
def test_lines_of_rfedavg(table):
    """Sec. VI-A: N, E, SR, batch and rounds; lambda, mu and q by data set; plain averages."""
    clients, epochs, share, batch = RFEDAVG_SETTINGS[table]
    assert len(CELLS["rFedAvg", table]) == 48
    for cell in CELLS["rFedAvg", table]:
        words = words_of(cell)
        rounds, lam, mu, q = RFEDAVG_FLAGS[cell.dataset]
        assert has_words(cell, clients=clients, epochs=epochs, sample=share, rounds=rounds)
        assert has_words(cell, weighting="uniform", momentum="0", weight_decay="0", augment="none")
        assert "drop-last" in words
        if cell.dataset == "Sent140":
            check_text_line(cell)
        else:
            slow = table == "II" and cell.method == "FedProx"
            assert has_words(cell, batch_size=batch, lr="0.01" if slow else "0.1")
            check_image_line(cell)
        expected = {
            "FedProx": {"mu": mu},
            "q-FedAvg": {"q": q},
            "rFedAvg": {"lam": lam},
            "rFedAvg+": {"lam": lam},
        }
        assert has_words(cell, **expected.get(cell.method, {}))
        assert words.get("variant", cell.method.lower()) == cell.method.lower()


def check_text_line(cell):
    partition = "natural" if "nonIID" in cell.setting else "natural-iid"
    assert has_words(cell, batch_size="10", lr="0.01", optimizer="rmsprop", model="lstm")
    assert has_words(cell, partition=partition, users="500", image_size=None, normalise=None)
    assert "persist-opt" in words_of(cell)


def check_image_line(cell):
    words = words_of(cell)
    cifar = cell.dataset == "CIFAR-10"
    size, normalise = ("28", "half") if cifar else (None, None)
    assert has_words(cell, optimizer=None, model="cnn-mcmahan", partition="similarity")
    assert has_words(cell, image_size=size, normalise=normalise)
    assert "persist-opt" not in words
    assert cell.setting.endswith(f"sim={words['similarity']}%")


def test_lines_of_fig9c():
    """E C = 200 in the second of its two series."""
    equal = [cell for cell in CELLS["rFedAvg", "fig9c"] if ";C=200" not in cell.setting]
    assert len(equal) == 9
    for cell in equal:
        words = words_of(cell)
        assert int(words["epochs"]) * int(words["rounds"]) == 200
