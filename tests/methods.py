"""What the tests of the method scripts share: tables of scripts and variants, and small runs."""

import importlib
import pathlib

from conftest import TINY

import common

ROOT = pathlib.Path(common.__file__).parent
# script, most code lines that it may change against fedavg.py, and the flags that switch it off;
# - has none, or rounds differently; the global network of ditto is FedAvg's
TABLE = """
fedavg | 0 |
fedprox | 3 | --mu 0
moon | 26 | --mu 0
mixup | 13 | --gamma 0
stochdepth | 46 | --keep 1
gradaug | 50 | --mu 0
fedalign | 46 | --mu 0 --clip 0
fedcka | 49 | --mu 0
scaffold | 50 | -
fednova | 22 | -
fedmlb | 50 | --lambda1 0 --lambda2 0
fedkd | 6 | --gamma 0
fitnet | 15 | --gamma 0
fedntd | 23 | --ntd-beta 0
fedgkd | 22 | --gamma 0
feddyn | 33 | --dyn-alpha 0 --weighting samples
rfedavg | 50 | --lam 0
rfedavg_dp | 42 | --lam 0
rfedavg_code | 46 | --lam 0
qfedavg | 34 | -
ditto | 11 |
fedper | 13 | -
fedbn | 18 | -
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
METHODS = {name: int(most) for name, most, _ in ROWS}
OFF = {name: off.split() for name, _, off in ROWS if off != "-"}
RESNET = "--model resnet8 --local-steps 2 --clients 2 --batch-size 16 --rounds 1".split()
SCRIPTS = {name: importlib.import_module(name) for name in METHODS}
VARIANTS = [  # each script, and its variants with a code path of their own
    *((name, "") for name in METHODS),
    ("moon", "--frozen-mode train --model resnet8"),
    ("fedcka", "--similarity-metric kernel-cka"),
    ("scaffold", "--option 1"),
    ("scaffold", "--correction gradient"),
    ("fedmlb", "--dyn-alpha 0.1"),
    ("fedmlb", "--direction global-local"),
    ("rfedavg", "--variant rfedavg"),
    ("rfedavg_code", "--variant rfedavg"),
    ("fedntd", "--weighting-rule sum"),
    ("qfedavg", "--h rfedavg"),
    ("stochdepth", "--rule code"),
    ("gradaug", "--widths paper --subnets 1"),
    ("fedalign", "--lip-scale none --lip-input full"),
]


def needed(name, argv=()):
    """Return the flags without which a script does not run: some blocks, a norm to clip to."""
    if name in ("stochdepth", "fedbn") and "--model" not in argv:
        return ["--model", "resnet8"]
    if name == "rfedavg_dp" and "--noise-clip" not in argv:
        return ["--noise-clip", "1"]
    return []


def final(name, out, *argv):
    """Return the weights and the rows of metrics of a small run of a script."""
    argv = [*TINY, *needed(name, argv), "--out", str(out), *argv]
    net, rows = SCRIPTS[name].main(argv)
    return net.state_dict(), rows


FOUND = {}


def plain_final(out, *argv):
    """Return the weights of fedavg.py, run once for each set of flags."""
    if argv not in FOUND:
        FOUND[argv] = final("fedavg", out, *argv)[0]
    return FOUND[argv]


# Flags of a run that shows what each variant does: three rounds, as a client's last model and the
# server's memory act from the second on; steps on full batches and on short ones; few of them.
SHORT = "--rounds 3 --local-steps 4 --sample 0.5 --lr-decay 0.9 --eval-every 2 --workers 1".split()
