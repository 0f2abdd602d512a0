"""Runs the body of a test on several ranks: a pool of gloo workers that lives as long as the pytest session.

    @ranks(1, 2, 4)
    def test_sum(world: int) -> None:
        assert run(world, _sum, 3) == [3 * world] * world      # `_sum(mesh, 3)` runs on every rank

The body is a top-level function `fn(mesh, *args)`; workers import it by name, so arguments and results must pickle.
Starting a worker costs seconds (torch), so the workers of a world size are kept; each body gets a process group of its
own on a fresh port, and random state from the same seed. A body that raises, dies or hangs on any rank fails the test
with that rank's traceback or stacks, and its workers are replaced: what they have in flight is unknown.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 150.0
# Ranks that are told of a lost peer mostly fail too, a moment later; what they say is worth the wait.
GRACE_S = 3.0
# Workers alive at once. Each holds torch in memory; the least recently used world size goes first.
MAX_WORKERS = 8


class RankFailed(AssertionError):
    """A body raised, died or hung. `failures` maps rank to what it said; the message shows all of it."""

    def __init__(self, world: int, failures: dict[int, str]) -> None:
        self.failures = failures
        shown = "\n".join(f"--- rank {rank} of {world} ---\n{text.rstrip()}" for rank, text in sorted(failures.items()))
        super().__init__(f"{len(failures)} of {world} ranks failed\n{shown}")


def ranks(*worlds: int) -> pytest.MarkDecorator:
    """Parametrises a test over world sizes, as its argument `world`."""
    return pytest.mark.parametrize("world", worlds, ids=[f"w{world}" for world in worlds])


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, **kwargs: Any) -> list[Any]:
    """`fn(mesh, *args, **kwargs)` on each of `world` ranks; their results in rank order. Raises RankFailed."""
    pool = _POOLS.of(world)
    try:
        return pool.run(fn, args, kwargs, timeout)
    except BaseException:
        _POOLS.drop(world)
        raise


def close_pools() -> None:
    """Ends all workers. They also end by themselves when this process does: their pipe closes."""
    _POOLS.close()


class Worker:
    """One rank: a process, our end of its pipe, and the file that gets its stdout and stderr."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        self.output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed in kill)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
        }
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def said(self, lines: int = 60) -> str:
        self.output.seek(0)
        return "\n".join(self.output.read().decode(errors="replace").splitlines()[-lines:])

    def stacks(self) -> str:
        """Where a hung worker is: its faulthandler writes the stacks of all threads on SIGUSR1."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.said()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.output.close()


class Pool:
    """The workers of one world size."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.workers = [Worker(rank, world) for rank in range(world)]

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        task = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs))
        head = {"path": sys.path, "port": free_port()}
        failures: dict[int, str] = {}
        for worker in self.workers:
            try:
                worker.pipe.send(head)
                worker.pipe.send_bytes(task)
            except OSError:
                failures[worker.rank] = f"died between tests (exit {worker.process.wait()})\n{worker.said()}"
        results: dict[int, Any] = {}
        deadline = time.monotonic() + (GRACE_S if failures else timeout)
        while len(results) + len(failures) < self.world:
            waiting = {w.pipe: w for w in self.workers if w.rank not in results and w.rank not in failures}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._take(waiting[pipe], results, failures)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._hung(results, failures, timeout)
        if failures:
            raise RankFailed(self.world, failures)
        return [results[rank] for rank in range(self.world)]

    def _take(self, worker: Worker, results: dict[int, Any], failures: dict[int, str]) -> None:
        try:
            good, value = worker.pipe.recv()
        except (EOFError, ConnectionError):
            failures[worker.rank] = f"died (exit {worker.process.wait()})\n{worker.said()}"
            return
        if good:
            results[worker.rank] = value
        else:
            failures[worker.rank] = value

    def _hung(self, results: dict[int, Any], failures: dict[int, str], timeout: float) -> None:
        missing = [w for w in self.workers if w.rank not in results and w.rank not in failures]
        why = "was still busy when another rank had failed" if failures else f"hung: no answer in {timeout:.0f} s"
        for worker in missing:
            failures[worker.rank] = f"{why}\n{worker.stacks()}"

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


class Pools:
    """World size to pool, least recently used first."""

    def __init__(self) -> None:
        self._by_world: OrderedDict[int, Pool] = OrderedDict()

    def of(self, world: int) -> Pool:
        if world not in self._by_world:
            while self._by_world and sum(self._by_world) + world > MAX_WORKERS:
                self._by_world.popitem(last=False)[1].close()
            self._by_world[world] = Pool(world)
        self._by_world.move_to_end(world)
        return self._by_world[world]

    def drop(self, world: int) -> None:
        pool = self._by_world.pop(world, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for world in list(self._by_world):
            self.drop(world)


_POOLS = Pools()
atexit.register(close_pools)


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# What follows runs in the workers.


def _strict_warnings() -> None:
    """As in pyproject.toml: a warning is an error, but for those of other people's deprecations."""
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="(?!paceline).*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.*")


def _body(task: bytes) -> Any:
    import numpy
    import torch

    import paceline

    module, name, args, kwargs = pickle.loads(task)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = paceline.init()
    with warnings.catch_warnings():
        _strict_warnings()
        result = getattr(importlib.import_module(module), name)(mesh, *args, **kwargs)
    mesh.close()
    gc.collect()
    return result


def _work(pipe: Connection) -> None:
    while True:
        try:
            head = pipe.recv()
            task = pipe.recv_bytes()
        except EOFError:
            return
        sys.path.extend(entry for entry in head["path"] if entry not in sys.path)
        os.environ["MASTER_PORT"] = str(head["port"])
        try:
            answer = pickle.dumps((True, _body(task)))
        except BaseException:  # noqa: BLE001
            # All of it is the parent's to show; a body may even call sys.exit.
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _work(Connection(int(sys.argv[1])))
    # Not through interpreter shutdown: after a failed body gloo's threads may abort there, and nobody asks any more.
    os._exit(0)
