"""Partitions of other papers than FedAlign's, by writer, from a file; clients' test sets."""

import ast
import copy
import bisect
import dataclasses
import json
import pathlib
import sys

import numpy as np
import torch

import common
from common import UserError, indices_by_owner, seeded_rng


def split(data, args):
    """Return the parts of the partition that args.partition names: a list of int64 arrays."""
    labels, clients, seed = data.y.numpy(), args.clients, args.data_seed
    if args.partition == "dirichlet-balanced":
        return balanced_dirichlet_partition(labels, clients, args.alpha, seed)
    if args.partition == "similarity":
        return similarity_partition(labels, clients, args.similarity, seed)
    if args.partition == "labels":
        return labels_partition(labels, data.classes, clients, args.labels, seed)
    if args.partition == "shards":
        return shards_partition(labels, clients, args.shards, seed)
    if args.partition == "file":
        return file_partition(args.split_file, len(labels), clients, args.partial_split)
    if data.writers is None:
        do = "femnist, sent140, glyphs, a folder of train/CLIENT/CLASS/* and writers= do"
        raise UserError(
            f"--partition {args.partition}: no writers in --dataset {args.dataset}; {do}"
        )
    deal = natural_partition if args.partition == "natural" else natural_iid_partition
    return deal(data.writers, clients, seed, args.users)


def fill_up(owner, clients, min_size, order):
    """Move the fewest samples that give every client min_size. Return the owners and how many.

    A move makes up for one missing sample, so that as many are needed as are missing. They are
    taken from the largest clients, down to a common size, in the order of order; a client that is
    short gets what one donor has to give before it gets of the next, so that labels stay skewed.
    owner: (n,) the client of each sample; order: a permutation of the samples."""
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(min_size - sizes, 0)
    moved = missing.sum()
    level = bisect.bisect_right(
        range(sizes.max()), -moved, key=lambda size: -np.maximum(sizes - size, 0).sum()
    )
    given = np.maximum(sizes - level + 1, 0)  # to the largest size that frees enough
    given[np.flatnonzero(given)[: given.sum() - moved]] -= 1
    order = order[np.argsort(owner[order], kind="stable")]  # client by client
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    owner = owner.copy()
    owner[order[rank < np.repeat(given, sizes)]] = np.repeat(np.arange(clients), missing)
    return owner, int(moved)


def balanced_dirichlet_partition(labels, clients, alpha, seed):
    """Return a partition with label skew and equal sizes (FedMLB); n mod clients get one more.

    Each client in turn draws p ~ Dir(alpha) over the classes, then its samples from those that are
    left, without replacement, sample i with weight p[labels[i]]. Such a draw keeps the samples with
    the smallest of independent keys Exp(1) / weight (Efraimidis and Spirakis, 2006)."""
    labels, n, rng = np.asarray(labels), len(labels), seeded_rng("dirichlet-balanced", seed)
    if clients > n:
        raise UserError(f"{n} samples cannot go to {clients} clients; use fewer --clients")
    available, parts = np.arange(n), []
    for client in range(clients):
        size = n // clients + (client < n % clients)
        p = rng.dirichlet(np.full(labels.max() + 1, alpha)).clip(1e-30)
        keys = rng.standard_exponential(len(available)) / p[labels[available]]
        smallest = np.sort(np.argpartition(keys, size - 1)[:size])  # else in the processor's order
        parts.append(available[smallest])
        available = np.delete(available, smallest)
    return parts


def similarity_partition(labels, clients, similarity, seed):
    """Return rFedAvg's partition (ICDE 2023, sec. VI-A).

    similarity percent of the samples are dealt at random, the rest sorted by label and cut into
    consecutive chunks, one a client. Remainders are spread, not dropped."""
    labels, rng = np.asarray(labels), seeded_rng("similarity", seed)
    order = rng.permutation(len(labels))
    at_random, by_label = np.split(order, [round(similarity / 100 * len(labels))])
    by_label = by_label[np.argsort(labels[by_label], kind="stable")]
    # array_split's larger chunks come first; those of by_label go to the last clients
    chunks = np.array_split(by_label[::-1], clients)[::-1]
    pairs = zip(np.array_split(at_random, clients), chunks)
    return [rng.permutation(np.concatenate(pair)) for pair in pairs]


def labels_partition(labels, classes, clients, each, seed):
    """Return NIID-Bench's partition by number of labels (#label2: each 2).

    Client i has label i mod classes and each - 1 others, drawn at random without repetition. The
    samples of a label are dealt at random and equally to the clients that have it. UserError where
    there are fewer labels than each, or one that no client has."""
    if each > classes:
        raise UserError(f"--labels {each}: the data set has {classes} labels")
    labels = np.asarray(labels)
    rng = seeded_rng("labels", seed)
    has = np.zeros((clients, classes), bool)
    for i, row in enumerate(has):
        first = i % classes
        others = rng.choice(np.delete(np.arange(classes), first), each - 1, replace=False)
        row[[first, *others]] = True
    owner = np.empty(len(labels), np.int64)
    for label, takers in enumerate(map(np.flatnonzero, has.T)):
        if len(takers) == 0:
            raise UserError(f"--labels {each}: no client has label {label}; use more --clients")
        index = rng.permutation(np.flatnonzero(labels == label))
        for taker, part in zip(takers, np.array_split(index, len(takers))):
            owner[part] = taker
    return indices_by_owner(owner, clients, rng.permutation(len(labels)))


def shards_partition(labels, clients, each, seed):
    """Return McMahan et al.'s "pathological" partition (AISTATS 2017, sec. 3).

    The samples, sorted by label, are cut into clients x each shards of equal size, give or take
    one, and each client gets as many of them at random."""
    if clients * each > len(labels):
        raise UserError(f"--shards {each}: {clients * each} shards of {len(labels)} samples")
    rng = seeded_rng("shards", seed)
    order = rng.permutation(len(labels))
    order = order[np.argsort(np.asarray(labels)[order], kind="stable")]
    shards = np.array_split(order, clients * each)
    dealt = rng.permutation(len(shards)).reshape(clients, each)
    return [np.concatenate([shards[i] for i in row]) for row in dealt]


def natural_groups(writers, clients, seed, users=None):
    """Return the writers of each client, a list of arrays.

    users writers (None: as many as clients) are chosen at random and dealt out in random order, as
    evenly as can be. writers: (n,) who made each sample. UserError when there are fewer writers."""
    names = np.unique(writers)
    users = users or clients
    if users < clients:
        raise UserError(f"argument --users: {users} is less than the {clients} --clients")
    if users > len(names):
        flag = "users" if users > clients else "clients"
        raise UserError(f"--{flag} {users}: the data set has {len(names)} writers")
    return np.array_split(seeded_rng("natural", seed).choice(names, users, replace=False), clients)


def natural_partition(writers, clients, seed, users=None):
    """Return the samples of each client, which are those of its natural_groups."""
    return _indices_by_writer(natural_groups(writers, clients, seed, users), writers)


def natural_iid_partition(writers, clients, seed, users=None):
    """Return the samples of natural_partition dealt at random: rFedAvg's IID rows."""
    samples = np.sort(np.concatenate(natural_partition(writers, clients, seed, users)))
    return [samples[part] for part in common.iid_partition(samples, clients, seed)]


def _indices_by_writer(groups, writers):
    """Return the samples of each group of writers, a list of ascending index arrays.

    groups: a list of arrays of writers; writers: (n,) who made each sample, any integers."""
    names, sizes = np.concatenate(groups), [len(group) for group in groups]
    order = np.argsort(names)
    names, owner = names[order], np.repeat(np.arange(len(groups)), sizes)[order]
    place = np.searchsorted(names, writers).clip(max=len(names) - 1)
    owners = np.where(names[place] == writers, owner[place], len(groups))
    return indices_by_owner(owners, len(groups))


def file_partition(path, samples, clients, partial=False):
    """Return a partition read from a file.

    It holds {client: [index, ...], ...} or [[index, ...], ...] as JSON or as a Python literal
    (FedMLB's client_data), each sample for one client or, where the split is partial, at most."""
    try:
        parts = [np.array([*part] or np.zeros(0, np.int64)) for part in _read_split(path)]
        if len(parts) != clients:
            raise ValueError(f"its clients are {len(parts)}; pass --clients {len(parts)}")
        index = np.concatenate(parts)
        kinds = {part.dtype.kind for part in parts}
        if kinds != {"i"} or ((index < 0) | (index >= samples)).any():
            raise ValueError(f"an index is not an integer from 0 to {samples - 1}")
        times = np.bincount(index, minlength=samples)
        if times.max() > 1:
            raise ValueError(f"gives sample {times.argmax()} more than once")
        if times.min() == 0 and not partial:
            found = f"leaves out {(times == 0).sum()} of {samples} samples, as {times.argmin()}"
            raise ValueError(f"{found}; --partial-split allows that")
    except ValueError as e:
        raise UserError(f"--split-file {path}: {e}") from None
    return [part.astype(np.int64) for part in parts]


def _read_split(path):
    """Return the lists of a split file, in order of their clients; ValueError if it has none."""
    if not pathlib.Path(path).is_file():
        raise ValueError("no such file")
    text = pathlib.Path(path).read_text()
    try:
        split = json.loads(text)
    except (ValueError, RecursionError):
        try:
            split = ast.literal_eval(text)
        except Exception:  # of many kinds
            raise ValueError("neither JSON nor a Python literal") from None
    if isinstance(split, dict):
        if not all(str(k).isdecimal() for k in split):
            raise ValueError("must name its clients by numbers")
        split = [split[k] for k in sorted(split, key=int)]
    ordered = isinstance(split, (list, tuple))
    if not ordered or not all(isinstance(part, (list, tuple, set)) for part in split):
        raise ValueError("must map each client to a list of indices")
    return split


def with_test_writers(data, args):
    """Return data with the test samples of the writers that take part alone."""
    groups = natural_groups(data.writers, args.clients, args.data_seed, args.users)
    writers = np.concatenate(groups)
    index = np.flatnonzero(np.isin(data.writers_test, writers))
    if len(index) == 0:
        raise UserError(f"--users: the {len(writers)} chosen have no test sample; choose more")
    fields = {k: getattr(data, k)[index] for k in ("x_test", "y_test", "writers_test")}
    return dataclasses.replace(data, **fields)


def client_test_indices(data, parts, args):
    """Return the clients' test indices, a list of int64 arrays, for --client-test.

    With --partition natural those of their writers' test samples, where the data set names them;
    else the same share of each class as of the training samples, drawn at random."""
    if args.partition == "natural" and data.writers_test is not None:
        groups = natural_groups(data.writers, args.clients, args.data_seed, args.users)
        tests = _indices_by_writer(groups, data.writers_test)
    else:
        own_writers = data.writers is not None and args.dataset.startswith("own")
        if (own_writers or args.partition == "natural") and not args.quiet:
            line = "--client-test: not by writer; each client is tested on its share of each class"
            print(line, file=sys.stderr)
        labels = data.y_test.numpy()
        rng = seeded_rng("client-test", args.data_seed)
        owner = np.full(len(labels), len(parts))
        for label, counts in enumerate(label_counts(data, parts).T):
            if not counts.any():  # no client has the class
                continue
            index = rng.permutation(np.flatnonzero(labels == label))
            ends = np.round(counts.cumsum() / counts.sum() * len(index)).astype(np.int64)
            owner[index] = np.repeat(np.arange(len(parts)), np.diff(ends, prepend=0))
        tests = indices_by_owner(owner, len(parts))
    if not any(map(len, tests)):
        raise UserError("--client-test: no test sample is of a class that a client has")
    return tests


def label_counts(data, parts):
    """Return the training samples of each client and class, (clients, classes)."""
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    pairs = owner * data.classes + data.y.numpy()[np.concatenate(parts)]
    return np.bincount(pairs, minlength=len(parts) * data.classes).reshape(len(parts), -1)


def client_readings(fed, hits):
    """Return the readings of --client-test: of the global network, and of the clients' own.

    fed: a common.Federation; hits: (test samples,) which the global network has right."""
    found = client_summary(hits.numpy(), fed.tests)
    first = fed.server["clients"][0]  # each client keeps what this one does
    if "personal" in fed.states.get(first, {}):
        found |= client_summary(personal_hits(fed, hits).numpy(), fed.tests, "personal_acc")
    return found


def personal_hits(fed, hits):
    """Return which test samples are right, each by the network of the client whose it is.

    That is the global network with the weights in client.state["personal"], if it has some. Samples
    that are no client's are as in hits. UserError for weights that are not the network's."""
    weights, found = fed.net.state_dict(), hits.clone()

    def own_hits(client):
        """Return which of a client's test samples its own network has right; None without one."""
        personal, test = fed.states.get(client, {}).get("personal"), fed.tests[client]
        if personal is None or not len(test):
            return None
        odd = [k for k, v in personal.items() if k not in weights or v.shape != weights[k].shape]
        if odd:
            raise UserError(f"client.state['personal']: the network has no such {odd[0]!r}")
        if not all(v.isfinite().all() for v in personal.values()):
            personal_model = f"client {client}: its personal model"
            raise FloatingPointError(f"{personal_model} holds NaN or infinity; try a smaller --lr")
        net = common.copy_net(fed.net)
        common.load_weights(net, weights | personal)
        index, predicted = torch.from_numpy(test), torch.zeros(len(test), dtype=torch.long)
        data = copy.copy(fed.data)  # which is not looked over again for each client
        data.x_test, data.y_test = (t[index.to(t.device)] for t in (data.x_test, data.y_test))
        common.evaluate(net, data, fed.args, map, predicted)
        return predicted == data.y_test.cpu()

    for test, right in zip(fed.tests, fed.map(own_hits, range(len(fed.tests)))):
        if right is not None:
            found[torch.from_numpy(test)] = right.cpu()  # ranks return it on their device
    return found


def client_summary(hits, tests, name="client_acc"):
    """Return readings of the clients' accuracies (%), over those that have test samples.

    hits: (test samples,) right or wrong; tests: the test indices of each client. In the list by
    client there is None for one without. Deviation and variance are the population's."""
    sizes = np.array([len(test) for test in tests])
    some = sizes > 0
    starts = (sizes.cumsum() - sizes)[some]
    right = np.add.reduceat(hits[np.concatenate(tests)], starts, dtype=np.int64)
    values = 100 * (right / sizes[some])
    each = np.full(len(tests), None)
    each[some] = values
    return {
        name: each.tolist(),
        f"{name}_mean": float(np.mean(values)),
        f"{name}_std": float(np.std(values)),
        f"{name}_worst": float(values.min()),
        f"{name}_best": float(values.max()),
        f"{name}_p10": float(np.percentile(values, 10)),
        f"{name}_var": float(np.var(values)),
    }
