"""Steps read before they are asked for, by a thread of this process: memory-mapped tokens are gathered
without the interpreter's lock, and nothing is handed over between processes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from megalite.accelerator import pin
from megalite.data.build import Dataset
from megalite.data.host_batches import HostBatches, read_batches
from megalite.data.shortage import starting_threads

STEPS_AHEAD = 2
LOOK_SECONDS = 1.0  # after which one that waits asks whether anybody reads


class Steps(Sequence[np.ndarray]):
    """For each step the samples of this rank, int64 (micro_batches, micro_batch_size)."""

    def __init__(self, batches: Sequence[tuple[range, np.ndarray]]) -> None:
        """`batches`: for each size of the global batch the first sample of each, and this rank's samples in
        one that starts at 0.
        """
        self._batches = batches
        self._ends = list(accumulate(len(firsts) for firsts, _ in batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, step: int) -> np.ndarray:  # type: ignore[override]  # slices are not needed
        place = bisect_right(self._ends, step)
        firsts, offsets = self._batches[place]
        return firsts[step - self._ends[place]] + offsets  # counted from the end of this size's steps


class Reader(Protocol):
    """Gives the steps one after another; StopIteration at their end, DataError for what cannot be read."""

    def __next__(self) -> HostBatches: ...
    def close(self) -> None: ...


class ThreadReader:
    """Reads in a thread of this process; any thread of it may ask."""

    def __init__(self, dataset: Dataset, steps: Steps, vocab_size: int | None) -> None:
        self._queue: queue.Queue[HostBatches | BaseException | None] = queue.Queue(STEPS_AHEAD)
        self._stop = threading.Event()
        self._process = os.getpid()
        # The thread holds no reference to the reader, so that a forgotten one is collected and its thread
        # ends.
        self._thread = threading.Thread(
            target=_read_all,
            args=(dataset, steps, vocab_size, self._queue, self._stop),
            name="megalite-data",
            # A thread that takes the interpreter's lock again in its finalisation, behind a call into C++,
            # aborts the process: the interpreter waits for this one before.
            daemon=False,
        )
        weakref.finalize(self, self._stop.set)
        with starting_threads():
            self._thread.start()

    def __next__(self) -> HostBatches:
        check_process(self._process)
        item = self._wait()
        if isinstance(item, HostBatches):
            return item
        self._queue.put_nowait(item)  # the last there is, for every other thread that asks
        raise StopIteration if item is None else item

    def _wait(self) -> HostBatches | BaseException | None:
        """The next of the queue. Raises RuntimeError when nothing will be put in any more."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=LOOK_SECONDS)
            if not self._thread.is_alive() and self._queue.empty():
                if self._stop.is_set():
                    return None
                raise RuntimeError("the main thread has ended, and reading ahead with it: end it last")

    def close(self) -> None:
        """Stop reading ahead."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # a thread may wait


def check_process(maker: int) -> None:
    """Raises RuntimeError in a process that was forked from `maker`."""
    if os.getpid() != maker:
        raise RuntimeError("a loader is read in the process that made it: make one in each")


def _read_all(
    dataset: Dataset,
    steps: Steps,
    vocab_size: int | None,
    results: queue.Queue[HostBatches | BaseException | None],
    stop: threading.Event,
) -> None:
    """Read every step; then None, or the exception that ended it."""
    last: BaseException | None = None
    try:
        for step in range(len(steps)):
            if not _put(results, read_batches(dataset, steps[step], vocab_size, pin), stop):
                return
    except BaseException as error:
        last = error
    _put(results, last, stop)


def _put(
    results: queue.Queue[HostBatches | BaseException | None],
    item: HostBatches | BaseException | None,
    stop: threading.Event,
) -> bool:
    """Hand `item` over; False when nobody wants it any more, or the interpreter is about to end."""
    while not stop.is_set() and threading.main_thread().is_alive():
        try:
            results.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False
