"""The pool: its order, and how many uploads wait for a slow client before them."""

import ctypes
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from methods import final
from runs import assert_equal_runs
from virtual_gpu import machine

import common
import engine


def pool_of(count):
    """Return a Pool of so many workers that are threads, and close it afterwards."""
    return engine.Pool(SimpleNamespace, torch.device("cpu"), count, 1)


def test_threads_wait_for_a_slow_first_client():
    """Of 40 clients at most four a worker begin while the first is not done."""
    pool, begun, go = pool_of(2), [], threading.Event()

    def start(worker, client):
        begun.append(client)
        yield
        if client == 0:
            go.wait(30)
        return client

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: list(pool.train(range(40), start)))
        end = time.monotonic() + 20
        while len(begun) < 8 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
        assert sorted(begun) == list(range(8))
        go.set()
        assert found.result(30) == list(range(40))
    pool.close()


def test_threads_train_before_an_upload_is_asked_for():
    """A rank's clients train while it waits for another rank's."""
    pool, begun = pool_of(2), threading.Event()

    def start(worker, client):
        begun.set()
        yield

    uploads = pool.train(range(2), start)
    assert begun.wait(20)
    assert list(uploads) == [None, None]
    pool.close()


@pytest.mark.parametrize("slow", [0, 17])
def test_streams_wait_for_a_slow_client(slow):
    """The same where one thread feeds all workers in turn."""
    pool, begun, found, most = pool_of(1), [], [], 0
    pool.workers = [object(), object()]

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


@pytest.mark.parametrize(
    "free, built, fit, when",
    [(100, 7, 0, 0), (100, 7, 2, 0), (100, 7, 3, 1), (100, 7, 7, 0), (100, 2, 7, 0), (50, 7, 7, 0)],
)
def test_workers_that_do_not_fit_are_dropped(free, built, fit, when):
    """A worker takes 10: 7 more are tried, in 80% of what is free, of which so many can be built.

    Where the memory is full at a batch, clients begin anew with other workers, in order."""
    pool, begun, rest = pool_of(1), [], [full, *[object] * built]
    pool.build, pool.grow = lambda: rest.pop()(), True

    def start(worker, client):
        begun.append((worker, client))
        for batch in range(3):
            if pool.workers.index(worker) > fit and batch == when:
                torch.backends.cudnn.benchmark = True
                raise torch.OutOfMemoryError
            yield
        return client

    with machine(memory=(free, 100), reserved=10):
        found = [client for client in pool.train(range(40), start) if client is not None]
    assert found == list(range(40))
    tried = min(built, 7, 0.8 * free // 10)
    assert len(pool.workers) == 1 + min(fit, tried)
    clients = [client for worker, client in begun if worker in pool.workers]
    assert sorted(clients) == list(range(40))
    assert len(begun) == 40 + max(0, tried - fit)
    assert not torch.backends.cudnn.benchmark


def full(*_):
    raise torch.OutOfMemoryError


def test_the_last_worker_needs_room():
    with pytest.raises(torch.OutOfMemoryError):
        list(pool_of(1).train(range(9), lambda *_: (full() for _ in "a")))


def test_a_client_begins_anew_after_a_full_memory(tmp_path, monkeypatch):
    """Rows and weights are those of one worker, with what clients and methods keep and draw."""
    argv = "--clients 6 --rounds 2 --local-steps 3 --persist-opt".split()
    final("scaffold", tmp_path / "one", *argv, "--workers", "1")
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
    final("scaffold", tmp_path / "four", *argv)
    assert len(full) == 2
    assert_equal_runs(tmp_path / "one", tmp_path / "four")


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

    with pytest.raises(common.UserError, match="client 1"):
        list(pool.train([1, 0, 2, 3], start))
    pool.close()
    assert not ended


def test_a_map_over_workers_is_in_order():
    """No two threads have one worker at a time, and each call's client is its own."""
    pool, busy = pool_of(3), set()

    def f(worker, client):
        assert id(worker) not in busy and worker.key == (0, 1, client.id)
        busy.add(id(worker))
        time.sleep(0.01 * (client.id % 3))
        busy.remove(id(worker))
        return client.id

    for worker in pool.workers:
        worker.key = (0, 1, None)
    clients = [common.Client(k, None) for k in range(20)]
    assert pool.map_workers(f, clients) == list(range(20))
    assert all(worker.key == (0, 1, None) for worker in pool.workers)
    pool.close()


def test_freed_memory_is_kept(monkeypatch):
    """By what glibc offers, which takes both values; where there is none, nothing is done."""
    mallopt, taken = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1), []
    monkeypatch.setattr(sys, "platform", "linux")
    noted = SimpleNamespace(mallopt=lambda *values: taken.append((*values, mallopt(*values))))
    for library in (noted, SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=library: library)
        engine.keep_freed_memory()
    assert taken == [(-1, 2**31 - 1, 1), (-3, 2**25, 1)]
