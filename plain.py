"""The whole federation without the speed: one client after the other, one batch after the other.

Read this first. It runs any method script, and ends with the weights of common.run() bit for bit
(on a CPU; a test holds every method to that), which adds workers side by side, CUDA graphs, run
folders and metrics without changing a number. Flags of these do nothing here.

    python plain.py fedprox --mu 0.1 --dataset glyphs --model cnn --clients 10 --rounds 5 \\
        --epochs 1 --lr 0.03
"""

import copy
import importlib
import pathlib
import sys

import common
from common import PlainWorker as Worker, train_plainly as train  # noqa: F401


def run(args, *method, data=None, net=None, **more):
    """Train a federation as common.run() does. Return the global network and (round, %, loss)s."""
    args = copy.copy(args)
    args.resume = False  # it begins anew
    common.note_own(args, data, net)
    return common.run_plainly(args, *method, data=data, net=net, **more)


def main(argv):
    """Run the script that the first word names, on the flags that follow it."""
    with common.one_line_errors("plain"):
        name, script = (argv[0] if argv else "").removesuffix(".py"), None
        if pathlib.Path(__file__).with_name(f"{name}.py").is_file():
            script = importlib.import_module(name)
        if not hasattr(script, "local_update"):
            raise common.UserError("name a method's script first: plain.py fedprox --mu 0.1 ...")
        script.main([*argv[1:], "--device", "cpu"], run=run)


if __name__ == "__main__":
    main(sys.argv[1:])
