"""Gloo worker processes, started once per test session and reused by every distributed test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# After one rank has failed the others get this long to notice the closed connections before they are killed.
GRACE_SECONDS = 5.0

T = TypeVar("T")


class JobFailed(Exception):
    """A rank raised, died or ran out of time. `failures` maps each failed rank to its traceback."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class Job:
    """What one worker needs to run its rank. The function travels by name, the search path along with it."""

    call: bytes  # pickle of (function, args)
    rank: int
    world_size: int
    name: str
    timeout: float
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """An exception in a worker; `when` tells the cause from its consequences on the other ranks."""

    when: float
    text: str


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection


class WorkerPool:
    """`size` processes; `run` gives the first `world_size` of them one job as ranks of a fresh process group.

    The processes are forked from a server that has imported torch once, so starting them takes a fraction of
    a second. They end with this process, however it ends.
    """

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self.workers: list[Worker] = []
        # A server: who waits for a file looks again every 10 ms, for each peer of each group.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.jobs = 0

    def run(self, world_size: int, function: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
        """Call `function(*args)` on ranks 0 .. world_size - 1 and return the results by rank.

        The function must be importable by its module's name, its arguments and result picklable. Inside it
        `torch.distributed` is initialised with Gloo. Raises JobFailed when a rank raises or dies, or when the
        job takes longer than `timeout` seconds; the first failing rank's traceback is in the message.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} is outside 1..{self.size}, the number of workers")
        if not self.workers:
            self._start()
        self.jobs += 1
        call = pickle.dumps((function, args))
        for rank in range(world_size):
            job = Job(call, rank, world_size, f"job {self.jobs}", timeout, tuple(sys.path))
            self.workers[rank].connection.send_bytes(pickle.dumps(job))
        try:
            results, failures = self._collect(world_size, timeout)
        except BaseException:
            self._kill()  # a worker may still be inside the job: none of them can be reused
            raise
        missing = sorted(set(range(world_size)) - set(results) - set(failures))
        if missing or any(not worker.process.is_alive() for worker in self.workers):
            self._kill()
        if missing or failures:
            self._raise(failures, missing, world_size, timeout)
        return [pickle.loads(results[rank]) for rank in range(world_size)]

    def shutdown(self) -> None:
        """End every worker."""
        for worker in self.workers:
            worker.connection.close()  # an idle worker leaves at end of file
        deadline = time.monotonic() + 2.0
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # What takes long to import; pytest is what a worker would import as its parent's main module.
        context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "pytest"])
        saved = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for index in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=serve, args=(theirs, self.store.port), name=f"pool-{index}", daemon=True
                )
                process.start()
                theirs.close()
                self.workers.append(Worker(process, ours))
        finally:
            if saved is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = saved

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, bytes], dict[int, Failure]]:
        """The pickled results and the failures by rank; ranks that did not finish in time are in neither."""
        waiting = {self.workers[rank].connection: rank for rank in range(world_size)}
        results: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in set(waiting).intersection(ready):
                rank = waiting.pop(connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self.workers[rank].process
                    process.join(1.0)
                    outcome = Failure(0.0, f"the process died with exit code {process.exitcode}")
                if isinstance(outcome, Failure):
                    failures[rank] = outcome
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                else:
                    results[rank] = outcome
        return results, failures

    def _raise(
        self, failures: dict[int, Failure], missing: list[int], world_size: int, timeout: float
    ) -> None:
        """Report the failure that came first in time; the others are mostly its consequences."""
        texts = dict.fromkeys(missing, "did not finish")
        texts.update({rank: failure.text for rank, failure in failures.items()})
        if failures:
            first = min(failures, key=lambda rank: failures[rank].when)
            others = sorted(set(texts) - {first})
            message = f"rank {first} of {world_size} failed (also affected: {others}):\n{texts[first]}"
        else:
            message = f"ranks {missing} of {world_size} did not finish within {timeout:g} s"
        raise JobFailed(message, texts)

    def _kill(self) -> None:
        """Forget all workers; the next job starts new ones."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()
        self.workers = []


def serve(connection: Connection, port: int) -> None:
    """A worker's life: jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session, which then closes the pipe
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # A job may have children, the processes that read its data: they end with it. Python knows no public way.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    gc.freeze()  # a collection after each job need not go through the imported libraries
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # Gloo would look up the host's name, which may not resolve
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run_job(pickle.loads(message), store)))


def _run_job(job: Job, store: dist.Store) -> bytes | Failure:
    sys.path[:] = job.search_path
    try:
        function, args = pickle.loads(job.call)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(job.name, store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
        )
        result = pickle.dumps(function(*args))
        dist.barrier()  # nobody closes connections that another rank's last operation still needs
    except BaseException:
        return Failure(time.time(), traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # what the job left in cycles holds groups, and those hold threads and sockets
    return result


def _die_with_parent() -> None:
    """End at once when the test session is gone, even in the middle of a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
