"""What the system may not give: threads, memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megalite.data.errors import DataError

WORKER = "worker"  # what the names of threads begin with that nobody waits for behind an error
TOO_MANY = (
    "too many run already for the limit of the user or the container (ulimit -u, pids.max), or for the "
    "memory that it may have (ulimit -v)"
)


@contextlib.contextmanager
def starting_threads() -> Iterator[None]:
    """Around what starts threads and does nothing else: raises DataError where the system gives no more."""
    try:
        yield
    except RuntimeError as error:
        raise DataError(f"{error}: {TOO_MANY}") from None


def started_pool(count: int) -> ThreadPoolExecutor:
    """A pool of `count` threads that all run: nothing that is submitted later fails for lack of them.

    Raises DataError where the system gives no more.
    """
    pool, all_run = ThreadPoolExecutor(count, WORKER), threading.Event()
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


class Room:
    """The memory that threads may need at the same time. A library in C++ or Rust that finds out by itself
    that there is none ends the process.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._change = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int, what: str, instead: str) -> Iterator[None]:
        """Around what may need `size` bytes more, not to be nested: waits until the process can have them
        beside what other threads may need. Raises MemoryError, beginning with `what`, if it cannot at all.
        """
        with self._change:
            while not _fits(self._taken + size):
                if not self._taken:
                    raise MemoryError(
                        f"{what}: out of memory: {size >> 20:,} MiB more may be needed than the process may "
                        f"have (ulimit -v); {instead}"
                    )
                self._change.wait()
            self._taken += size
        try:
            yield
        except MemoryError:
            raise MemoryError(f"{what}: out of memory") from None
        finally:
            with self._change:
                self._taken -= size
                self._change.notify_all()


def _fits(size: int) -> bool:
    """Whether the process can have `size` bytes more."""
    try:
        mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True
