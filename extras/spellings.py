"""What an unknown flag may be meant to be."""

import difflib

from common import ALIASES

MEANT = {  # by flags of other names elsewhere, which are not taken but suggested
    "learning-rate": "lr",
    "local-lr": "lr",
    "num-clients": "clients",
    "num-users": "clients",
    "num-rounds": "rounds",
    "global-rounds": "rounds",
    "local-ep": "epochs",
    "bs": "batch-size",
    "local-bs": "batch-size",
    "frac": "sample",
    "join-ratio": "sample",
    "clients-per-round": "sample",
    "gpu": "device",
    "cuda": "device",
    "arch": "model",
    "network": "model",
    "mu-prox": "mu",
    "output-dir": "out",
}


def suggestion(word, flags):
    """Return what an error about the unknown flag --word adds: which of flags is near, if any."""
    known = {flag.removeprefix("--") for flag in flags if flag.startswith("--")}
    names = {**{name: name for name in known}, **ALIASES, **MEANT}
    names = {name: flag for name, flag in names.items() if flag in known}
    near = difflib.get_close_matches(word.lower().replace("_", "-"), sorted(names), 1, 0.7)
    return f"; did you mean --{names[near[0]]}?" if near else ""
