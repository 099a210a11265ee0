"""What the tests of the method scripts share: tables of scripts and variants, and small runs."""

import importlib
import pathlib

from conftest import TINY

import common

ROOT = pathlib.Path(common.__file__).parent
# script, and the flags that switch it off; - has none, or rounds differently; ditto's w is FedAvg's
TABLE = """
fedavg |
fedprox | --mu 0
moon | --mu 0
mixup | --gamma 0
stochdepth | --keep 1
gradaug | --mu 0
fedalign | --mu 0 --clip 0
fedcka | --mu 0
scaffold | -
fednova | -
fedmlb | --lambda1 0 --lambda2 0
fedkd | --gamma 0
fitnet | --gamma 0
fedntd | --ntd-beta 0
fedgkd | --gamma 0
feddyn | --dyn-alpha 0 --weighting samples
rfedavg | --lam 0
rfedavg_dp | --lam 0
rfedavg_code | --lam 0
qfedavg | -
ditto |
fedper | -
fedbn | -
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
METHODS = [name for name, _ in ROWS]
OFF = {name: off.split() for name, off in ROWS if off != "-"}
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
SHORT = "--rounds 3 --local-steps 4 --batch-size 16 --clients 10 --sample 0.2 --lr-decay 0.9"
SHORT = [*SHORT.split(), "--eval-every", "2", "--workers", "1"]
