"""Compare two ways to add up a round's uploads over the ranks of torchrun.

    torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py
    torchrun --standalone --nproc-per-node 8 benchmarks/exchange.py --model resnet18 --uploads 500

Floating-point sums depend on their order, so each way has one that is the same for any number of
ranks:

    in order   every upload goes to all ranks, which add it in the order of the clients; what
               extras/ranks.py does
    blocks     each rank adds up its own blocks of consecutive clients; the blocks' sums go to all
               ranks, which add them in order. The number of blocks is fixed, and a block's clients
               have to be trained by one rank

Nobody trains: uploads are there at once, so these are the seconds that training does not hide.
Both take turns. Rank 0 prints the median seconds of a round and the bytes that a rank receives, the
ratio of the seconds, and the same as JSON. Over NCCL with a GPU for each rank, else over gloo.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common  # noqa: E402


def spread(items, ranks):
    """Return the rank of each item: as many consecutive ones each as can be."""
    return [i * ranks // items for i in range(items)]


def in_order(mine, uploads, blocks):
    """Return the sum of the uploads, all of which equal mine, and the bytes received."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, received = torch.zeros_like(mine), 0
    for owner in [i % ranks for i in range(uploads)]:
        upload = mine if owner == rank else torch.empty_like(mine)
        dist.broadcast(upload, owner)
        received += (owner != rank) * common.nbytes(mine)
        total.add_(upload, alpha=1 / uploads)
    return total, received


def by_blocks(mine, uploads, blocks):
    """As in_order()."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    members = spread(uploads, blocks)
    total, received = torch.zeros_like(mine), 0
    for block, owner in enumerate(spread(blocks, ranks)):
        part = torch.zeros_like(mine)
        for _ in range(members.count(block) if owner == rank else 0):
            part.add_(mine, alpha=1 / uploads)
        dist.broadcast(part, owner)
        received += (owner != rank) * common.nbytes(mine)
        total.add_(part)
    return total, received


def seconds_of(way, *arguments):
    """Return how long a way takes, what it adds up to and the bytes that this rank receives."""
    dist.barrier()
    start = time.perf_counter()
    total, received = way(*arguments)
    float(total[0])  # wait for a GPU
    dist.barrier()
    return time.perf_counter() - start, total, received


def main(argv=None):
    """Measure both ways in turns; rank 0 prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=[*common.NETS], default="cnn-mcmahan")
    parser.add_argument("--uploads", type=int, default=50, help="clients of a round")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if min(args.uploads, args.blocks, args.repeats) < 1 or args.blocks > args.uploads:
        parser.error("argument --uploads, --blocks, --repeats: from 1, no more blocks than uploads")
    if "RANK" not in os.environ:
        parser.error("wants to be started by torchrun: see --help")
    cuda = torch.cuda.device_count() > int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    size = sum(p.numel() for p in common.build_net(args.model, 100).parameters())
    mine = torch.ones(size, device=device)
    ways = {"in order": in_order, "blocks": by_blocks}
    seconds, received = {name: [] for name in ways}, {}
    for _ in range(args.repeats + 1):
        for name, way in ways.items():
            took, total, received[name] = seconds_of(way, mine, args.uploads, args.blocks)
            torch.testing.assert_close(total, mine)
            seconds[name].append(took)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"{name:9} {median:8.3f} s  {received[name] / 1e6:10,.1f} MB received")
        ratio = medians["in order"] / medians["blocks"]
        print(f"in order over blocks: {ratio:.2f}")
        print(json.dumps({"seconds": medians, "received": received, "ratio": ratio}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
