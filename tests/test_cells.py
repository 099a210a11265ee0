"""The cells of the papers' tables: their command lines against published.csv and the papers."""

import ast
import re

import pytest
from makers import CELLS, OF_PAPERS, ROOT, cells_by_method

from reproduce.cells import homes, matched, parsed_flags, read_published, texts
from reproduce.jobs import slug
from reproduce.runs import decisive_flags

ALL = [cell for cells in CELLS.values() for cell in cells]
FLAGS = {cell: parsed_flags(cell.command) for cell in ALL}


def test_published_numbers_and_cells_are_the_same():
    """But for the benchmark's cells of methods that NIID-Bench does not have."""
    published = read_published()
    assert sum(map(len, published.values())) == 968 and len(ALL) == 906 + 29
    in_tables = {cell.key for cell in ALL if not cell.table.startswith("fig")}
    more = in_tables - published.keys()
    assert len(more) == 21 and {key[0] for key in more} == {"NIID-Bench"}
    bound = cells_by_method("FedCKA", "fig5")["centralised"].key  # 70%, in Sec. 4.3
    assert {key[:2] for key in published.keys() - in_tables - {bound}} == {("FedAlign", "7")}


NAMES = "C=clients N=clients frac=sample part=sample SR=sample E=epochs R=rounds B=batch_size "
NAMES += "M=layers sim=similarity lambda=lam sigma=noise"
NAMES = dict(pair.split("=") for pair in NAMES.split())
MODELS = "CNN7=cnn ResNet50+proj=resnet50 CNN512=cnn-mcmahan LSTM2=lstm VGG-9=vgg9 "
MODELS += "ResNet18-GN2=resnet18-gn ResNet-18=resnet18-gn"
MODELS = dict(pair.split("=") for pair in MODELS.split())


def test_a_command_does_what_its_cell_says():
    """Each NAME=VALUE of a setting is a flag; so are data set, network and the split of data."""
    compared = set()
    for cell, flags in FLAGS.items():
        dataset = cell.dataset.lower().replace("cifar-", "cifar")
        dataset = "folder" if cell.paper == "NIID-Bench" else dataset
        assert cell.dataset == "-" or flags["dataset"] == dataset
        assert flags["model"] == MODELS.get(cell.model, cell.model.lower())
        for part in f"{cell.setting};{cell.detail}".split(";"):
            name, _, value = part.partition("=")
            if cell.paper == "rFedAvg" and name == "C":
                name = "R"  # rounds of communication, in Fig. 9c
            flag = NAMES.get(name, name)
            if flag == "pathways" and value != "12345":
                assert flags[flag] == [int(c) for c in value]
            elif flag in flags and value and flag != "pathways":
                compared.add(flag)
                share = 100 if name == "part" else 1
                assert share * float(flags[flag]) == float(value.rstrip("%")), cell
    assert compared > {*NAMES.values(), "alpha", "lambda1", "lambda2", "tau"} - {"layers"}


PROTOCOLS = [  # cells by patterns of paper and words, and flags that no docstring's command shows
    (["FedAlign", "homog"], {"partition": "iid"}),
    (["FedAlign", "table=1"], {"save_clients": True}),
    (["FedAlign", "table=5"], {"save_clients": False, "clients": 16, "rounds": 25, "epochs": 20}),
    (["FedAlign", "GradAug(n=4)"], {"subnets": 4, "mu": 1.25}),
    (["FedCKA", "CIFAR-100"], {"rounds": 40, "projection": 256}),
    (["FedCKA", "alpha=0.1", "MOON"], {"mu": 0.1}),
    (["FedCKA", "alpha=0.5", "FedProx"], {"mu": 0.1}),
    (["FedCKA", "Tiny-ImageNet", "FedCKA"], {"mu": 3, "layers": 2, "rounds": 20}),
    (["FedCKA", "KernelCKA"], {"similarity_metric": "kernel-cka", "layers": 2}),
    (["FedCKA", "centralised"], {"clients": 1, "persist_opt": True, "partition": "iid"}),
    (["FedMLB", "IID"], {"partition": "iid"}),
    (["FedMLB", "Dir(0.6)"], {"partition": "dirichlet-balanced", "alpha": 0.6}),
    (["FedMLB", "N=500", "Tiny-ImageNet"], {"batch_size": 20, "normalise": "dataset"}),
    (["FedMLB", "K=200"], {"epochs": 20}),
    (["FedMLB", "FedADAM*"], {"server": "adam", "server_lr": 0.01, "lr": 0.01}),
    (["FedMLB", "FedAvgM*"], {"server": "avgm", "server_momentum": 0.4, "lr": 0.1}),
    (["FedMLB", "FedDyn*"], {"dyn_alpha": 0.1}),
    (["FedMLB", "FedProx"], {"mu": 0.002}),  # 0.001 without the 1/2, as their later code
    (["FedMLB", "FedMLB_G->L"], {"direction": "global-local"}),
    (["FedMLB", "*+FedMLB"], {"lambda1": 1, "lambda2": 1, "tau": 1}),
    (["rFedAvg", "cross-silo", "MNIST"], {"batch_size": 100, "clients": 20, "rounds": 60}),
    (["rFedAvg", "table=II", "CIFAR-10"], {"batch_size": 32, "image_size": 28, "rounds": 200}),
    (["rFedAvg", "Sent140"], {"optimizer": "rmsprop", "lr": 0.01, "users": 500, "rounds": 30}),
    (["rFedAvg", "sim=*"], {"partition": "similarity", "augment": "none"}),
    (["rFedAvg", "nonIID"], {"partition": "natural", "batch_size": 10}),
    (["rFedAvg", "table=II", "MNIST", "FedProx"], {"lr": 0.01, "mu": 1}),
    (["rFedAvg", "Sent140", "q-FedAvg"], {"q": 1e-4}),
    (["rFedAvg", "CIFAR-10", "rFedAvg", "!lambda=1e-7"], {"variant": "rfedavg"}),
    (["rFedAvg", "Scaffold"], {"option": 2, "server_lr": 1}),
    (["rFedAvg", "FEMNIST"], {"partition": "natural", "rounds": 80}),
    (["NIID-Bench"], {"clients": 10, "rounds": 50, "epochs": 10, "batch_size": 64, "lr": 0.01}),
    (["NIID-Bench"], {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-5, "seed": 0}),
    (["NIID-Bench"], {"normalise": "none", "augment": "reflect-crop,flip", "client_test": True}),
    (["NIID-Bench", "alpha=0.5"], {"partition": "dirichlet", "min_size": 10, "sample": 1}),
    (["NIID-Bench", "labels=2"], {"partition": "labels", "persist_opt": False}),
    (["NIID-Bench", "alpha=0.5", "FedProx"], {"mu": 0.001}),
    (["NIID-Bench", "labels=2", "FedProx"], {"mu": 0.01}),
    (["NIID-Bench", "SCAFFOLD"], {"option": 2, "server_lr": 1, "correction": "step"}),
    (["NIID-Bench", "FedADAM"], {"server": "adam"}),
]


@pytest.mark.parametrize("patterns, expected", PROTOCOLS, ids=lambda v: str(v)[:40])
def test_protocols(patterns, expected):
    """Sec. 3.2 of FedAlign, 4.1 of FedCKA, App. A of FedMLB, VI-A of rFedAvg."""
    paper, *patterns = patterns
    cells = [c for c in ALL if c.paper == paper and matched(patterns, c.words) is not None]
    assert cells
    for cell in cells:
        assert {name: FLAGS[cell][name] for name in expected} == expected, cell.command


def test_caveats():
    """On Tiny-ImageNet's cells of FedMLB, and on four methods of rFedAvg's Tables I and II."""
    tables = [cell for cell in ALL if cell.caveat and not cell.table.startswith("fig")]
    tiny = [cell for cell in tables if cell.paper == "FedMLB"]
    assert {cell.table[:-1] for cell in tiny} == {"1", "10", "11"} and len(tiny) == 48
    assert all("rotated, cropped and flipped" in cell.caveat for cell in tiny)
    others = [cell for cell in tables if cell.paper != "FedMLB"]
    assert {cell[:2] for cell in others} == {("rFedAvg", "I"), ("rFedAvg", "II")}
    words = {"Scaffold": "FedAvg", "q-FedAvg": "--h rfedavg", "rFedAvg": "open", "rFedAvg+": "open"}
    assert {cell.method for cell in others} == set(words) and len(others) == 2 * 4 * 8
    assert all(words[cell.method] in cell.caveat for cell in others)


@pytest.mark.parametrize("name", [name for name in OF_PAPERS if name != "rfedavg_code"])
def test_the_command_of_a_docstring_is_a_cell(name):
    """With every flag that decides the result, --augment auto included."""
    text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text())).replace("\\\n", " ")
    command = text[text.rindex("    python ") + 11 :]
    flags = decisive_flags(parsed_flags(command))
    paper, kind, number = re.findall(r"(\w+) paper, (Table|Fig\.) (\w+)", text)[-1]
    tables = [number, f"{number}a"] if kind == "Table" else [f"fig{number}"]
    cells = sum((CELLS.get((paper, table), []) for table in tables), [])
    of_script = [cell for cell in cells if cell.script == name]
    assert flags in [decisive_flags(FLAGS[cell]) for cell in of_script]


def test_a_command_of_several_tables_has_one_home():
    cells, home = cells_by_method("FedAlign", "5"), homes()
    first = home[cells["FedAvg"].command]
    assert (first.table, home[cells["FedAlign"].command].table) == ("1", "5")
    assert FLAGS[first]["save_clients"]
    cells = set(home.values())
    folders = {(c.paper, c.table, slug(f"{c.label} {c.method}")) for c in cells}
    assert len(folders) == len(cells) == 501 + 29
    for cell in CELLS["rFedAvg", "fig11"]:
        assert home[cell.command].table == "I" and FLAGS[home[cell.command]]["client_test"]


def test_figures_and_views():
    """What is drawn of a figure, and FedMLB's EMA at rounds 500 and 1000 everywhere."""
    methods = {cell.method for cell in CELLS["rFedAvg", "fig10"]}
    assert methods == {"FedAvg", "rFedAvg", "rFedAvg+"} and len(CELLS["rFedAvg", "fig10"]) == 12
    assert len(CELLS["FedMLB", "fig4"]) == 12 and len(CELLS["FedMLB", "fig5"]) == 6
    assert texts("views", ["rFedAvg", "fig9c"]) == "--x epochs"
    assert texts("views", ["FedMLB", "fig4"]) == "--at 500,1000 --y ema --x s/round"
    assert texts("views", ["FedMLB", "6"]) == "--at 500,1000"
    assert texts("views", ["FedAlign", "5"]) == ""
