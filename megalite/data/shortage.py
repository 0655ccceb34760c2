"""What the system may not give: threads, memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megalite.data.errors import DataError


@contextlib.contextmanager
def starting_threads() -> Iterator[None]:
    """Around what starts threads and does nothing else: raises DataError where the system gives no more."""
    try:
        yield
    except RuntimeError as error:
        raise DataError(
            f"{error}: too many run already for the limit of the user or the container (ulimit -u, "
            "pids.max), or for the memory that it may have (ulimit -v)"
        ) from None


def started_pool(count: int) -> ThreadPoolExecutor:
    """A pool of `count` threads that all run: nothing that is submitted later fails for lack of them.

    Raises DataError where the system gives no more.
    """
    pool, all_run = ThreadPoolExecutor(count), threading.Event()
    try:
        with starting_threads():
            for _ in range(count):  # an idle thread would be used again
                pool.submit(all_run.wait)
    except DataError:
        pool.shutdown(wait=False)
        raise
    finally:
        all_run.set()
    return pool


def check_room(size: int) -> None:
    """Raises MemoryError if the process cannot have `size` bytes more. A library in C++ or Rust that finds
    out by itself ends the process.
    """
    try:
        mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        raise MemoryError(f"out of memory: {size >> 20:,} MiB more may be needed") from None
