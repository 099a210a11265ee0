"""The cells of the four papers' tables and figures, each the command line that reproduces it.

A cell's table, dataset, model, setting and method are those of its row in published.csv. Values that a paper leaves open are
marked "open" in a comment here, with what was picked. Read by reproduce.py, which runs them, and by compare.py, which knows a
run by its flags.

Everywhere: --seed is added by reproduce.py, the partition is that of --data-seed 0, and the test set is used whole (the
FedAlign code drops its last short batch).
"""

import dataclasses
import functools
import importlib
import itertools
import shlex

import common


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell: what stands in published.csv, and the command that measures it."""

    paper: str
    table: str
    dataset: str
    model: str
    setting: str
    method: str
    command: str  # SCRIPT.py and its flags
    detail: str = ""  # what tells cells of one published row apart

    @property
    def label(self):
        """Data set, network and setting, as one line."""
        return " ".join(filter(None, (self.dataset, self.model, self.setting, self.detail)))

    @property
    def script(self):
        return self.command.split()[0].removesuffix(".py")

    @property
    def words(self):
        return shlex.split(self.command)[1:]


def parsed(command):
    """The flags of a command line, a dict, as its script's own parser gives them. One line and exit code 2 if it refuses."""
    script, *words = shlex.split(command)
    main = importlib.import_module(script.removesuffix(".py")).main
    return common.flag_values(main(words, run=lambda args, *_, **__: args))


# ----------------------------------------------------------------------------------------------------------------------
# FedAlign (CVPR 2022): Secs. 3.2 and 4, and the authors' code for Nesterov, weight decay, batch size and --drop-last.
# Momentum starts afresh each round, by our choice: their code keeps it in each worker thread, which with 16 processes for 16
# clients is per client (--persist-opt repeats that), and with fewer passes it from one client to another.
# ----------------------------------------------------------------------------------------------------------------------

FEDALIGN = "--batch-size 64 --drop-last --lr 0.01 --momentum 0.9 --nesterov --weight-decay 1e-4"
FEDALIGN_DATA = {  # dataset, model: flags; open: ImageNet-200's epochs (20), and the rounds of its 16 clients (25)
    ("CIFAR-100", "ResNet56"): "--dataset cifar100 --model resnet56 --augment crop,flip",
    ("CIFAR-10", "ResNet56"): "--dataset cifar10 --model resnet56 --augment crop,flip",
    (
        "ImageNet-200",
        "ResNet18",
    ): "--dataset imagenet-200 --model resnet18",  # its own crops, colour jitter and flips
}
FEDALIGN_METHODS = {
    "FedAvg": "fedavg.py",
    "FedProx": "fedprox.py --mu 1e-4",
    "MOON": "moon.py --mu 1 --temperature 0.5 --projection 256",
    "Mixup": "mixup.py --gamma 0.1",
    "StochDepth": "stochdepth.py --keep 0.9",
    "GradAug(n=1)": "gradaug.py --subnets 1 --mu 2 --min-width 0.8",
    "GradAug(n=2)": "gradaug.py --subnets 2 --mu 1.75 --min-width 0.8",
    "GradAug(n=3)": "gradaug.py --subnets 3 --mu 1.5 --min-width 0.8",
    "GradAug(n=4)": "gradaug.py --subnets 4 --mu 1.25 --min-width 0.8",
    "FedAlign": "fedalign.py --mu 0.45 --width 0.25 --clip 10",
    "GradAug": "gradaug.py --subnets 2 --mu 1.75 --min-width 0.8",  # as Tables 2 to 4 name it
}
FIRST_FIVE = ["FedAvg", "FedProx", "MOON", "Mixup", "StochDepth"]


def fedalign_cell(
    table,
    method,
    clients=16,
    sample=None,
    epochs=20,
    rounds=25,
    alpha=0.5,
    data=("CIFAR-100", "ResNet56"),
    setting=None,
    more="",
):
    split = "--partition iid" if alpha is None else f"--partition dirichlet --alpha {alpha}"
    federation = f"--clients {clients}" + (f" --sample {sample}" if sample else "")
    setting = setting or (
        f"C={clients}"
        + (f";frac={sample}" if sample else "")
        + f";E={epochs};R={rounds};"
        + ("homog" if alpha is None else f"alpha={alpha}")
    )
    return Cell(
        "FedAlign",
        table,
        *data,
        setting,
        method,
        f"{FEDALIGN_METHODS[method]} {FEDALIGN_DATA[data]} {split} {federation} --rounds {rounds} --epochs {epochs} "
        f"{FEDALIGN}{more}",
    )


def fedalign():
    for method in [*FIRST_FIVE, "GradAug(n=2)"]:  # the client models are for hessian_eval.py
        yield fedalign_cell("1", method, more=" --save-clients")
    six = [*FIRST_FIVE, "GradAug"]
    heterogeneity = [dict(alpha=0.1), dict(alpha=0.5), dict(alpha=2.5), dict(alpha=None)]
    epochs = [dict(epochs=10), dict(epochs=20), dict(epochs=30)]
    clients = [
        dict(clients=16),
        dict(clients=32),
        dict(clients=64),
        dict(clients=64, sample=0.25),
        dict(clients=64, sample=0.25, rounds=100),
    ]
    for table, column in [("2", heterogeneity), ("3", epochs), ("4", clients)]:
        for change, method in itertools.product(column, six):
            yield fedalign_cell(table, method, **change)
    for method in list(FEDALIGN_METHODS)[:-1]:
        yield fedalign_cell("5", method)
    for change in [heterogeneity[0], *heterogeneity[2:], epochs[0], epochs[2], *clients[1:]]:
        yield fedalign_cell("6", "FedAlign", **change)
    seven = [*FIRST_FIVE, "GradAug(n=2)", "GradAug(n=1)", "FedAlign"]
    for method in seven:
        cifar, imagenet = ("CIFAR-10", "ResNet56"), ("ImageNet-200", "ResNet18")
        yield fedalign_cell("7", method, data=cifar, setting="C=16")
        yield fedalign_cell(
            "7",
            method,
            data=cifar,
            clients=64,
            sample=0.25,
            rounds=100,
            setting="C=64;frac=0.25;R=100",
        )
        yield fedalign_cell("7", method, data=imagenet, setting="C=16")
        yield fedalign_cell(
            "7",
            method,
            data=imagenet,
            clients=32,
            sample=0.125,
            rounds=50,
            setting="C=32;frac=0.125;R=50",
        )


# ----------------------------------------------------------------------------------------------------------------------
# FedCKA (2021): Sec. 4.1. Open: 10 clients that all take part (MOON's); a last short batch is trained on; pixels are
# normalised by the data set's statistics. Learning rate: 0.1 as in the text, which says that it is MOON's; MOON's documented
# command has 0.01.
# ----------------------------------------------------------------------------------------------------------------------

FEDCKA = "--clients 10 --epochs 10 --batch-size 128 --lr 0.1 --momentum 0.9 --no-nesterov --weight-decay 1e-5 --augment none"
FEDCKA_DATA = {  # dataset: model in published.csv, rounds, flags
    "CIFAR-10": ("CNN7", 100, "--dataset cifar10 --model cnn"),
    "CIFAR-100": ("ResNet50+proj", 40, "--dataset cifar100 --model resnet50 --projection 256"),
    "Tiny-ImageNet": (
        "ResNet50+proj",
        20,
        "--dataset tiny-imagenet --model resnet50 --projection 256",
    ),
}
FEDCKA_MU = {  # best mu of FedProx, MOON, FedCKA; Table 2's lists read in the order 0.1, 0.5, 5, which agrees with Table 1
    ("CIFAR-10", 5.0): (0.001, 10, 3),
    ("CIFAR-100", 5.0): (0.1, 5, 10),
    ("Tiny-ImageNet", 5.0): (0.1, 0.1, 3),
    ("CIFAR-10", 0.5): (0.1, 10, 3),
    ("CIFAR-10", 0.1): (0.001, 0.1, 5),
}
METRICS = {
    "None(FedAvg)": "fedavg.py",
    "FrobeniusNorm": "fedcka.py --similarity-metric frobenius",
    "VectorizedCosine": "fedcka.py --similarity-metric cosine",
    "KernelCKA": "fedcka.py --similarity-metric kernel-cka",
    "LinearCKA": "fedcka.py --similarity-metric linear-cka",
}


def fedcka_cell(table, method, command, dataset="CIFAR-10", alpha=5.0, note=""):
    model, rounds, flags = FEDCKA_DATA[dataset]
    return Cell(
        "FedCKA",
        table,
        dataset,
        model,
        f"alpha={alpha};E=10;B=128;R={rounds}{note}",
        method,
        f"{command} {flags} --partition dirichlet --alpha {alpha} --rounds {rounds} {FEDCKA}",
    )


def fedcka_row(table, dataset="CIFAR-10", alpha=5.0):
    prox, moon, cka = FEDCKA_MU[dataset, alpha]
    commands = {
        "FedAvg": "fedavg.py",
        "FedProx": f"fedprox.py --mu {prox}",
        "SCAFFOLD": "scaffold.py --server-lr 1",
        "MOON": f"moon.py --mu {moon} --temperature 0.5",
        "FedCKA": f"fedcka.py --similarity-metric linear-cka --mu {cka} --layers 2",
    }
    for method, command in commands.items():
        yield fedcka_cell(table, method, command, dataset, alpha)


def fedcka():
    for dataset in FEDCKA_DATA:
        yield from fedcka_row("1", dataset)
    for alpha in (5.0, 0.5, 0.1):
        yield from fedcka_row("2", alpha=alpha)
    for method, command in METRICS.items():
        contrast = (
            " --mu 3 --layers 2" if command.startswith("fedcka") else ""
        )  # open: mu of all but linear CKA, here its 3
        yield fedcka_cell("3", method, command + contrast, note=";M=2")
    for dataset in ("CIFAR-10", "Tiny-ImageNet"):
        yield from fedcka_row("4", dataset)
    for layers in range(
        1, 8
    ):  # conv1, conv2, the four layers of the head, the output; open: mu stays 3
        command = f"fedcka.py --similarity-metric linear-cka --mu 3 --layers {layers}"
        yield fedcka_cell("fig5", "FedCKA", command, note=f";M={layers}")
    # the bound, 70% in Sec. 4.3; open: how long its training is, here the same 1000 epochs, with momentum kept
    yield Cell(
        "FedCKA",
        "fig5",
        "CIFAR-10",
        "CNN7",
        "centralised",
        "centralised",
        "fedavg.py --dataset cifar10 --model cnn --partition iid --rounds 100 --persist-opt "
        + FEDCKA.replace("--clients 10", "--clients 1"),
    )


# ----------------------------------------------------------------------------------------------------------------------
# FedMLB (ICML 2022): Sec. 5.1 and App. A. As in the code CIFAR-100 gets CIFAR-10's statistics.
# ----------------------------------------------------------------------------------------------------------------------

FEDMLB = "--rounds 1000 --lr-decay 0.998 --momentum 0 --weight-decay 1e-3 --clip 10 --augment rotate10,crop,flip"
ADAM = "--server adam --server-lr 0.01 --server-momentum 0.9 --server-beta2 0.99 --server-tau 0.001"  # open: both betas
AVGM = "--server avgm --server-lr 1 --server-momentum 0.4"  # open: chosen from 0.4, 0.6, 0.8
ALL_BRANCHES = "fedmlb.py --lambda1 1 --lambda2 1 --tau 1"
FEDMLB_SERVER = {  # Tables 1, 10 and 11
    "FedAvg": "fedavg.py --lr 0.1",
    "FedMLB": f"{ALL_BRANCHES} --lr 0.1",
    "FedAvgM": f"fedavg.py --lr 0.1 {AVGM}",
    "FedAvgM+FedMLB": f"{ALL_BRANCHES} --lr 0.1 {AVGM}",
    "FedADAM": f"fedavg.py --lr 0.01 {ADAM}",
    "FedADAM+FedMLB": f"{ALL_BRANCHES} --lr 0.01 {ADAM}",
    "FedDyn": "feddyn.py --lr 0.1 --dyn-alpha 0.1",
    "FedDyn+FedMLB": f"{ALL_BRANCHES} --lr 0.1 --dyn-alpha 0.1",
}
FEDMLB_LOCAL = {  # Tables 2, 3 and 9; open: FedProx's mu (of 0.1, 0.01, 0.001), all weights of KD, FitNet and NTD, GKD's buffer
    "FedAvg": "fedavg.py --lr 0.1",
    "FedAvg+KD": "fedkd.py --hint logits --gamma 0.2 --lr 0.1",
    "FedAvg+FitNet": "fedkd.py --hint features --gamma 1 --lr 0.1",
    "FedProx": "fedprox.py --mu 0.001 --lr 0.1",
    "FedLS-NTD": "fedntd.py --weighting-rule convex --ntd-beta 0.3 --tau 1 --lr 0.1",
    "FedGKD": "fedgkd.py --gamma 0.2 --buffer 5 --lr 0.1",
    "FedMLB": f"{ALL_BRANCHES} --lr 0.1",
}
BACKBONES = {
    "VGG-9": "vgg9",
    "MobileNet": "mobilenet",
    "ShuffleNet": "shufflenet",
    "SqueezeNet": "squeezenet",
    "ResNet-18": "resnet18-gn",
}
PATHWAYS = [[*subset] for n in range(1, 6) for subset in itertools.combinations(range(1, 6), n)]
TABLE5 = [
    "12345",
    "1234",
    "123",
    "12",
    "1",
    "5",
    "45",
    "345",
    "2345",
]  # open: the check marks of rows 2 to 9 are a guess


def fedmlb_cell(
    table, method, command, dataset="CIFAR-100", alpha=0.3, clients=100, k=50, note="", model=None
):
    batch = {100: 50, 500: 10}[clients] * (2 if dataset == "Tiny-ImageNet" else 1)
    epochs = (
        k // 10
    )  # open: how K = 100 and 200 are made; here of 10 and 20 epochs, the batch as it is
    share, part = (0.05, "5%") if clients == 100 else (0.02, "2%")
    split = (
        "--partition iid" if alpha is None else f"--partition dirichlet-balanced --alpha {alpha}"
    )
    name = "IID" if alpha is None else f"Dir({alpha})"
    dataset_flag = {"CIFAR-100": "cifar100 --normalise cifar10", "Tiny-ImageNet": "tiny-imagenet"}[
        dataset
    ]
    return Cell(
        "FedMLB",
        table,
        dataset,
        model or "ResNet18-GN2",
        f"{name};N={clients};part={part};K={k}{note}",
        method,
        f"{command} --dataset {dataset_flag} --model {BACKBONES.get(model, 'resnet18-gn')} {split} "
        f"--clients {clients} --sample {share} --epochs {epochs} --batch-size {batch} {FEDMLB}",
    )


def fedmlb():
    for number, alpha in [("1", 0.3), ("10", 0.6), ("11", None)]:
        for part, clients in [("a", 100), ("b", 500)]:
            for dataset in ("CIFAR-100", "Tiny-ImageNet"):
                for method, command in FEDMLB_SERVER.items():
                    yield fedmlb_cell(number + part, method, command, dataset, alpha, clients)
    for clients in (100, 500):
        for method, command in FEDMLB_LOCAL.items():
            yield fedmlb_cell("2", method, command, clients=clients)
    for k in (100, 200):
        for method, command in FEDMLB_LOCAL.items():
            yield fedmlb_cell("3", method, command, k=k)
    for clients in (100, 500):
        yield fedmlb_cell("4", "FedAvg", "fedavg.py --lr 0.1", clients=clients)
        yield fedmlb_cell(
            "4", "FedMLB_G->L", f"{ALL_BRANCHES} --direction global-local --lr 0.1", clients=clients
        )
        yield fedmlb_cell("4", "FedMLB_L->G", f"{ALL_BRANCHES} --lr 0.1", clients=clients)
    for table, subsets in [("5", [[*map(int, row)] for row in TABLE5]), ("6", PATHWAYS)]:
        for (
            subset
        ) in subsets:  # open: what the sums are divided by; here the number of pathways in use
            chosen = "" if len(subset) == 5 else " --pathways " + ",".join(map(str, subset))
            note = (
                ";pathways=" + "".join(map(str, subset))
                if table == "5"
                else f";num_pathways={len(subset)}"
            )
            cell = fedmlb_cell(table, "FedMLB", f"{ALL_BRANCHES}{chosen} --lr 0.1", note=note)
            yield dataclasses.replace(
                cell, detail="pathways=" + "".join(map(str, subset)) if table == "6" else ""
            )
    for first, second in itertools.product(range(4), repeat=2):
        yield fedmlb_cell(
            "7",
            "FedMLB",
            f"fedmlb.py --lambda1 {first} --lambda2 {second} --tau 1 --lr 0.1",
            note=f";lambda1={first};lambda2={second}",
        )
    for alpha, tau in itertools.product((0.3, 0.6), (0.75, 1, 1.5, 2, 3, 5)):
        yield fedmlb_cell(
            "8",
            "FedMLB",
            f"fedmlb.py --lambda1 1 --lambda2 1 --tau {tau} --lr 0.1",
            alpha=alpha,
            note=f";tau={tau}",
        )
    for model in BACKBONES:
        for method in ("FedAvg", "FedLS-NTD", "FedGKD", "FedMLB"):
            yield fedmlb_cell("9", method, FEDMLB_LOCAL[method], model=model)


# ----------------------------------------------------------------------------------------------------------------------
# rFedAvg (ICDE 2023): Sec. VI-A. Open: E counts epochs (the code), not steps (the text): of FedAvg on MNIST, 500 clients, the
# mean accuracies of the last five rounds at similarity 0 and 100% are 94.16 and 98.34 by epochs, 94.02 and 98.18 by steps
# (n = 1, results/); published 94.38 and 98.42. Plain averages and --drop-last are the code's. The SCAFFOLD of their code never
# corrects a step, so their rows for it are FedAvg's; ours does. FedProx's mu is the text's, with the 1/2 that their code lacks.
# RMSProp's state stays with the client, as in the code; Sent140's leak of the test tweets is closed (--leak is the code's).
# ----------------------------------------------------------------------------------------------------------------------

RFEDAVG = "--weighting uniform --drop-last --weight-decay 0 --augment none"
SGD, RMSPROP = "--momentum 0 --lr 0.1", "--optimizer rmsprop --persist-opt --momentum 0 --lr 0.01"
RFEDAVG_DATA = {  # dataset: model in published.csv, rounds, flags, lambda, mu of FedProx, q
    "MNIST": ("CNN512", 60, f"--dataset mnist --model cnn-mcmahan {SGD}", "1e-4", "1", "1"),
    "CIFAR-10": (
        "CNN512",
        200,
        f"--dataset cifar10 --image-size 28 --normalise half --model cnn-mcmahan {SGD}",
        "1e-5",
        "1",
        "1",
    ),
    "Sent140": (
        "LSTM2",
        30,
        f"--dataset sent140 --model lstm --vectors data/glove.6B.300d.txt {RMSPROP}",
        "0.1",
        "0.01",
        "1e-4",
    ),
    # open: batch size, learning rate, lambda, mu and q of FEMNIST; here MNIST's
    "FEMNIST": ("CNN512", 80, f"--dataset femnist --model cnn-mcmahan {SGD}", "1e-4", "1", "1"),
}
SILO, DEVICE = "cross-silo;N=20;E=5;SR=1.0", "cross-device;N=500;E=10;SR=0.2"
SIX = ["FedAvg", "FedProx", "Scaffold", "q-FedAvg", "rFedAvg", "rFedAvg+"]
FAIRNESS = ["FedAvg", "rFedAvg+"]


def rfedavg_cell(
    table,
    method,
    dataset,
    setting,
    split,
    clients=None,
    epochs=None,
    sample=None,
    rounds=None,
    lam=None,
    more="",
):
    """setting starts with cross-silo or cross-device, which also sets what is not given."""
    device = setting.startswith("cross-device")
    model, usual_rounds, flags, usual_lam, mu, q = RFEDAVG_DATA[dataset]
    lam = lam or usual_lam
    if device and method == "FedProx":
        flags = flags.replace("--lr 0.1", "--lr 0.01")  # else it does not converge
    batch = 10 if dataset == "Sent140" else 32 if device else 100
    command = {
        "FedAvg": "fedavg.py",
        "FedProx": f"fedprox.py --mu {mu}",
        "Scaffold": "scaffold.py --option 2 --server-lr 1",
        "q-FedAvg": f"qfedavg.py --q {q}",
        "rFedAvg": f"rfedavg.py --variant rfedavg --lam {lam}",
        "rFedAvg+": f"rfedavg.py --variant rfedavg+ --lam {lam}",
    }[method]
    clients, epochs = clients or (500 if device else 20), epochs or (10 if device else 5)
    return Cell(
        "rFedAvg",
        table,
        dataset,
        model,
        setting,
        method,
        f"{command} {flags} {split} --clients {clients} --sample {sample or (0.2 if device else 1)} "
        f"--rounds {rounds or usual_rounds} --epochs {epochs} --batch-size {batch} {RFEDAVG}{more}",
    )


def similarity(percent):
    return f"--partition similarity --similarity {percent}"


def users(iid):  # open: how 500 users become 20 silos; here 25 users each
    return f"--partition {'natural-iid' if iid else 'natural'} --users 500"


def rfedavg():
    for table, name in [("I", SILO), ("II", DEVICE)]:
        for method in SIX:
            for dataset, percent in itertools.product(("MNIST", "CIFAR-10"), (0, 10, 100)):
                worst = (
                    " --client-test" if table == "I" and percent == 0 and method in FAIRNESS else ""
                )  # for Fig. 11
                yield rfedavg_cell(
                    table,
                    method,
                    dataset,
                    f"{name};sim={percent}%",
                    similarity(percent),
                    more=worst,
                )
            for iid in (False, True):
                yield rfedavg_cell(
                    table, method, "Sent140", f"{name};{'IID' if iid else 'nonIID'}", users(iid)
                )
    # the size of delta depends on the network and the clients alone; the paper's cross-device column counts 100 clients, those
    # sampled of 500 (280800 = 100 x 2808), while rFedAvg as we run it sends every client's delta
    for name in (SILO, DEVICE):
        for method in ("rFedAvg", "rFedAvg+"):
            short = name.split(";")[0]
            cells = (
                rfedavg_cell("III", method, "CIFAR-10", name, similarity(0)),
                rfedavg_cell("III", method, "Sent140", name, users(False)),
            )
            yield from (dataclasses.replace(cell, dataset="-", setting=short) for cell in cells)
    for writers, (cost, share, epochs) in itertools.product(
        (100, 500), [("low", 0.1, 10), ("high", 0.2, 20)]
    ):
        for method in SIX:
            yield rfedavg_cell(
                "fig8",
                method,
                "FEMNIST",
                f"cross-device;N={writers};E={epochs};SR={share};{cost} cost",
                "--partition natural",
                writers,
                epochs,
                share,
            )
    # Fig. 9, CIFAR-10 at 0%; open: the values on its axes, and that it starts from the cross-device setting
    yield rfedavg_cell("fig9a", "FedAvg", "CIFAR-10", DEVICE, similarity(0))
    for lam in ("1e-7", "1e-6", "1e-5", "1e-4", "1e-3"):
        for method in ("rFedAvg", "rFedAvg+"):
            yield rfedavg_cell(
                "fig9a", method, "CIFAR-10", f"{DEVICE};lambda={lam}", similarity(0), lam=lam
            )
    for method in ("FedAvg", "rFedAvg", "rFedAvg+"):
        for n in (50, 100, 200, 500):
            yield rfedavg_cell(
                "fig9b",
                method,
                "CIFAR-10",
                f"cross-device;N={n};E=10;SR=0.2",
                similarity(0),
                clients=n,
            )
        for epochs in (1, 5, 10, 20):
            setting = f"cross-device;N=500;E={epochs};SR=0.2"
            yield rfedavg_cell(
                "fig9c", method, "CIFAR-10", f"{setting};C=200", similarity(0), epochs=epochs
            )
            if epochs > 1:
                yield rfedavg_cell(
                    "fig9c",
                    method,
                    "CIFAR-10",
                    f"{setting};C={200 // epochs}",
                    similarity(0),
                    epochs=epochs,
                    rounds=200 // epochs,
                )
        for share in (0.05, 0.1, 0.2, 0.5):
            yield rfedavg_cell(
                "fig9d",
                method,
                "CIFAR-10",
                f"cross-device;N=500;E=10;SR={share}",
                similarity(0),
                sample=share,
            )
    for method in FAIRNESS:  # open: which setting
        for dataset in ("MNIST", "CIFAR-10"):
            yield rfedavg_cell(
                "fig11", method, dataset, f"{SILO};sim=0%", similarity(0), more=" --client-test"
            )
    for sigma in (
        0,
        1,
        5,
        10,
        50,
    ):  # open: which setting, the norm that delta is clipped to, and the sigmas but 5
        noise = f" --noise {sigma} --noise-clip 1" if sigma else ""
        yield rfedavg_cell(
            "fig12",
            "rFedAvg+",
            "CIFAR-10",
            f"{SILO};sim=0%;sigma={sigma}",
            similarity(0),
            more=noise,
        )


# ----------------------------------------------------------------------------------------------------------------------

FIGURES = {  # curves of cells that stand in tables: paper, figure -> tables, data sets, end of the setting, what is drawn,
    #          and of which methods, if not all
    ("FedMLB", "fig2"): ("1a", "CIFAR-100", "", "--y ema"),
    ("FedMLB", "fig3"): ("2", "CIFAR-100", "N=100", "--y ema"),
    # open: the numbers of local iterations; here those of Tables 2 and 3
    ("FedMLB", "fig4"): (
        "2|3",
        "CIFAR-100",
        "N=100;part=5%;K=50|N=100;part=5%;K=100|N=100;part=5%;K=200",
        "--y ema --x s/round",
        "FedAvg|FedMLB|FedLS-NTD|FedGKD",
    ),
    ("FedMLB", "fig5"): ("6", "CIFAR-100", "num_pathways=1|num_pathways=5", "--y ema"),
    ("FedMLB", "fig6"): ("1a|1b|10a|10b|11a|11b", "CIFAR-100", "", "--y ema"),
    ("FedMLB", "fig7"): ("1a|1b|10a|10b|11a|11b", "Tiny-ImageNet", "", "--y ema"),
    ("FedMLB", "fig8"): ("2", "CIFAR-100", "", "--y ema"),
    ("FedMLB", "fig9"): ("3", "CIFAR-100", "", "--y ema"),
    ("rFedAvg", "fig2"): ("I|II", "MNIST", "sim=0%|sim=10%", "--y accuracy"),
    ("rFedAvg", "fig3"): ("I|II", "MNIST", "sim=0%|sim=10%", "--y train_loss"),
    ("rFedAvg", "fig4"): ("I|II", "CIFAR-10", "sim=0%|sim=10%", "--y accuracy"),
    ("rFedAvg", "fig5"): ("I|II", "CIFAR-10", "sim=0%|sim=10%", "--y train_loss"),
    ("rFedAvg", "fig6"): ("I|II", "Sent140", "", "--y accuracy"),
    ("rFedAvg", "fig7"): ("I|II", "Sent140", "", "--y train_loss"),
    # 10a and 10b are the columns "to T%" (open: the levels; ours are of the EMA), 10c and 10d the column s/round; drawn is
    # accuracy against seconds, which shows both at once
    ("rFedAvg", "fig10"): (
        "II",
        "MNIST|CIFAR-10",
        "sim=0%|sim=10%",
        "--y accuracy --x seconds --target 40,50,60,80,90,95",
        "FedAvg|rFedAvg|rFedAvg+",
    ),
}
DRAWN = {  # what is drawn of figures with cells of their own
    ("FedCKA", "fig5"): "--x layers",
    ("rFedAvg", "fig9a"): "--x lam",
    ("rFedAvg", "fig9b"): "--x clients",
    ("rFedAvg", "fig9c"): "--x epochs",
    ("rFedAvg", "fig9d"): "--x sample",
    ("rFedAvg", "fig11"): "--y accuracy,worst",
}
AFTER = {  # what a table needs beside its runs
    (
        "FedAlign",
        "1",
    ): "hessian_eval.py {runs} --diagonal tensor",  # the reading behind Table 1's magnitudes
    ("FedAlign", "5"): "cost.py {command}",
    ("FedAlign", "7"): "cost.py {command}",
}


@functools.cache
def all_cells():
    """Every cell, {(paper, table): [Cell, ...]}, papers and tables in their order."""
    tables = {}
    for cell in itertools.chain(fedalign(), fedcka(), fedmlb(), rfedavg()):
        tables.setdefault((cell.paper, cell.table), []).append(cell)
    for (paper, figure), (sources, datasets, settings, _, *methods) in FIGURES.items():
        ends = [end and end + ";" for end in settings.split("|")]
        tables[paper, figure] = [
            dataclasses.replace(cell, table=figure)
            for source in sources.split("|")
            for cell in tables[paper, source]
            if cell.dataset in datasets.split("|")
            and any(end in f"{cell.setting};" for end in ends)
            and (not methods or cell.method in methods[0].split("|"))
        ]
    return tables


def bare(command):
    """A command without the flags that only add to what is kept or measured."""
    return command.replace(" --save-clients", "").replace(" --client-test", "")


@functools.cache
def homes():
    """Where each command's runs go: {bare command: the first cell that has it}."""
    first = {}
    for cells in all_cells().values():
        for cell in cells:
            first.setdefault(bare(cell.command), cell)
    return first


def home(cell):
    """The first cell with the same command: a run that stands in several tables is made once."""
    return homes()[bare(cell.command)]
