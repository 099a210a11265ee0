"""The pool: its order, and how many uploads wait for a slow client before them."""

import ctypes
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import same
from methods import final, needed
from runs import equal, rows_of
from virtual_gpu import machine

import common
import engine
import run_folder


def pool_of(count):
    """Return a Pool of so many workers that are threads, and close it afterwards."""
    return engine.Pool(object, torch.device("cpu"), count, 1)


def test_threads_wait_for_a_slow_first_client():
    """Of 40 clients at most four a worker begin while the first is not done."""
    pool, begun, go = pool_of(2), [], threading.Event()

    def start(worker, client):
        begun.append(client)
        yield
        if client == 0:
            go.wait(30)
        return client

    found = []
    thread = threading.Thread(target=lambda: found.extend(pool.train(range(40), start)))
    thread.start()
    end = time.monotonic() + 20
    while len(begun) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)
    assert sorted(begun) == list(range(8))
    go.set()
    thread.join(30)
    pool.close()
    assert found == list(range(40))


@pytest.mark.parametrize("slow", [0, 17])
def test_streams_wait_for_a_slow_client(slow):
    """The same where one thread feeds all workers in turn."""
    pool, begun, found = pool_of(1), [], []
    pool.workers = [object(), object()]
    most = 0

    def start(worker, client):
        begun.append(client)
        for _ in range(100 if client == slow else 1):
            yield
        return client

    for client in pool.train(range(40), start):
        most = max(most, len(begun) - len(found))
        found += [client] if client is not None else []
    assert found == list(range(40))
    assert most == 8


class Full:
    """A GPU's pool whose added workers, all but the first few, find the memory full."""

    def __init__(self, fit, when=0):
        self.pool, self.begun, self.fit, self.when = pool_of(1), [], fit, when
        self.pool.build, self.pool.grow = object, True

    def train(self, clients):
        with machine(memory=(100, 100), reserved=10):
            return [client for client in self.pool.train(clients, self.start) if client is not None]

    def start(self, worker, client):
        self.begun.append((worker, client))
        for batch in range(3):
            added = self.pool.workers.index(worker)
            if added > self.fit and batch == self.when:
                torch.backends.cudnn.benchmark = True
                raise torch.OutOfMemoryError
            yield
        return client


@pytest.mark.parametrize("fit", [0, 2, 7])
def test_workers_that_do_not_fit_are_dropped(fit):
    """Their clients begin anew with others; what comes out is in order and whole."""
    full = Full(fit)
    assert full.train(range(40)) == list(range(40))
    workers = full.pool.workers
    assert len(workers) == 1 + fit
    clients = [client for worker, client in full.begun if worker in workers]
    assert sorted(clients) == list(range(40))
    assert len(full.begun) == 40 + 7 - fit
    assert not torch.backends.cudnn.benchmark


def test_a_full_memory_later_means_fewer_workers_too():
    """A graph may be captured at any batch; the run ends where the last worker finds no room."""
    full = Full(3, when=1)
    assert full.train(range(40)) == list(range(40))
    assert len(full.pool.workers) == 4
    full = Full(-1, when=2)
    with pytest.raises(torch.OutOfMemoryError):
        full.train(range(40))
    torch.backends.cudnn.benchmark = False


def test_a_client_begins_anew_after_a_full_memory(tmp_path, monkeypatch):
    """Rows and weights are those of one worker, with what clients and methods keep and draw."""
    argv = "--clients 6 --rounds 2 --local-steps 3 --persist-opt --workers 1".split()
    expected = final("scaffold", tmp_path / "one", *argv)
    train_batch, full = engine.Worker._step, []

    def filling(worker, step, size):
        train_batch(worker, step, size)
        if worker.full:
            full.append(worker)
            raise torch.OutOfMemoryError

    def grow(pool, waiting):
        pool.grow = False
        new = [pool.build() for _ in range(3)]
        new[0].full = new[2].full = True
        pool.workers += new
        return new

    monkeypatch.setattr(engine.Worker, "full", False, raising=False)
    monkeypatch.setattr(engine.Worker, "_step", filling)
    monkeypatch.setattr(engine.Pool, "_grow", grow)
    monkeypatch.setattr(common, "workers_and_threads", lambda args: (0, common.CORES))
    found = final("scaffold", tmp_path / "four", *argv)
    assert len(full) == 2
    assert same(expected[0], found[0])
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "four")
    a, b = (run_folder.load(tmp_path / out / "checkpoint.pt")["server"] for out in ("one", "four"))
    assert equal(a, b)


def test_an_error_ends_the_others():
    pool, ended = pool_of(2), []

    def start(worker, client):
        yield
        if client == 1:
            raise common.UserError("client 1")
        for _ in range(1000):
            time.sleep(0.01)
            yield
        ended.append(client)
        return client

    with pytest.raises(common.UserError, match="client 1"):
        for _ in pool.train([1, 0, 2, 3], start):
            pass
    pool.close()
    assert not ended


def test_a_map_over_workers_is_in_order():
    """No two threads have one worker at a time, and each call's client is its own."""
    pool, busy = pool_of(3), set()

    def f(worker, client):
        assert worker not in busy
        busy.add(worker)
        time.sleep(0.01 * (client % 3))
        busy.remove(worker)
        return client

    assert pool.map_workers(f, range(20)) == list(range(20))
    pool.close()


@pytest.mark.parametrize("name", ["rfedavg", "rfedavg_dp", "rfedavg_code"])
def test_the_second_synchronisation_is_shared(tmp_path, monkeypatch, name):
    """By the three workers, each with the new global weights; the result is one worker's."""
    seen, begin = {}, engine.Pool.map_workers

    def map_workers(pool, f, clients):
        def call(worker, client):
            seen[client.id] = [v.clone() for v in worker.net.state_dict().values()]
            assert not worker.net.training
            barrier.wait(30)  # which three threads pass, and no fewer
            return f(worker, client)

        barrier = threading.Barrier(3)
        return begin(pool, call, clients)

    monkeypatch.setattr(common, "CORES", 1)
    argv = [*"--clients 3 --local-steps 2 --model cnn".split(), *needed(name)]
    one = final(name, tmp_path / "one", *argv, "--workers", "1")
    monkeypatch.setattr(engine.Pool, "map_workers", map_workers)
    three = final(name, tmp_path / "three", *argv, "--workers", "3")
    assert same(one[0], three[0])
    a, b = (run_folder.load(tmp_path / out / "checkpoint.pt")["server"] for out in ("one", "three"))
    assert equal(a, b)
    assert len(seen) == 3
    assert all(same(dict(enumerate(seen[0])), dict(enumerate(net))) for net in seen.values())
    assert same(dict(enumerate(seen[0])), dict(enumerate(three[0].values())))


def test_freed_memory_is_kept(monkeypatch):
    """By what glibc offers for it, which takes both values; where there is none, nothing is done.

    How many pages of a step are new cannot be told here: it depends on where the heap lies."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1)
    taken = []

    def noted(*values):
        taken.append((*values, mallopt(*values)))

    monkeypatch.setattr(sys, "platform", "linux")
    for library in (SimpleNamespace(mallopt=noted), SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=library: library)
        engine.keep_freed_memory()
    assert taken == [(-1, 2**31 - 1, 1), (-3, 2**25, 1)]
