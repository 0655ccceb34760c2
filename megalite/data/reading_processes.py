"""Steps read ahead by processes of their own, for storage so slow that one reader cannot keep up."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.reduction
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from megalite import _C
from megalite.data.build import Dataset
from megalite.data.errors import DataError
from megalite.data.host_batches import HostBatches, pin_batches, read_batches, share
from megalite.data.read_ahead import STEPS_AHEAD, Steps, check_process
from megalite.data.shortage import TOO_MANY

SHARED_MEMORY = Path("/dev/shm")
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
NO_THREAD = errno.EAGAIN  # the exit code of a worker that gets none
NO_DESCRIPTOR = errno.EMFILE


class ProcessReader:
    """Reads in `workers` processes, forked from this one: they share what is mapped and have no device.

    To be used in the main thread, the only one to which the death of a process is told. A handler of SIGCHLD
    that a C library had set is lost: torch takes its place, and Python cannot put it back.
    """

    def __init__(self, dataset: Dataset, steps: Steps, vocab_size: int | None, workers: int) -> None:
        """Raises RuntimeError outside the main thread, DataError when the processes cannot be started."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("processes that read data are made and asked in the main thread only")
        forks = _Forks()
        loader = DataLoader(
            _StepDataset(dataset, steps, vocab_size),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_handle_bus_errors,
            prefetch_factor=STEPS_AHEAD,
            multiprocessing_context=forks,
            generator=torch.Generator(),  # or it would draw from the global one
        )
        self._process = os.getpid()
        self._items: Iterator[HostBatches | DataError] | None = None
        self._workers = forks.workers
        # Before there is any, and also when nobody closes this: at its exit Python waits for processes that
        # SIGTERM does not end.
        self._kill = multiprocessing.util.Finalize(self, _kill, (self._workers,), exitpriority=0)
        on_child = signal.getsignal(signal.SIGCHLD)
        # A signal to the whole group asks the run to stop, and it ends its workers itself.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            try:
                _check_sockets(workers)
                self._items = _Items(loader)
            finally:
                # torch would raise the death of a worker wherever this thread is just then; here it is told
                # when the next step is asked for.
                signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except (OSError, RuntimeError) as error:
            self.close()
            raise DataError(f"--num-workers {workers}: cannot be started: {_why(error)}") from None

    def __next__(self) -> HostBatches:
        check_process(self._process)
        if self._items is None:
            raise StopIteration
        try:
            with self._interrupted_by_deaths():
                item = next(self._items)
        # What torch raises when a worker died, or when the tensors that it has announced are gone with it.
        except (RuntimeError, OSError, EOFError) as error:
            raise DataError(f"--num-workers: a process that reads data {self._end() or error}") from None
        if isinstance(item, DataError):
            raise item
        return pin_batches(item)

    @contextlib.contextmanager
    def _interrupted_by_deaths(self) -> Iterator[None]:
        """Inside, the death of a worker raises RuntimeError: where it was about to hand over, half a message
        may be there, and the rest would be waited for for ever.
        """
        before = signal.signal(signal.SIGCHLD, lambda *_: self._check_workers())
        try:
            self._check_workers()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)

    def _check_workers(self) -> None:
        if self._codes():
            raise RuntimeError("has ended")

    def _codes(self) -> list[int]:
        """Exit codes of workers that did not end by themselves."""
        return [worker.exitcode for worker in self._workers if worker.exitcode]

    def _end(self) -> str | None:
        """How a worker ended, as far as can be told within a second."""
        ended = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], timeout=1)
        for worker in self._workers:
            if worker.sentinel in ended:  # its files are closed, which comes a little before its exit code
                worker.join()
        codes = self._codes()
        if not codes:
            return None
        if codes[0] == NO_THREAD:
            return f"got no thread: {TOO_MANY}"
        if codes[0] == NO_DESCRIPTOR:
            return "got no file descriptor: allow more (ulimit -n)"
        return f"was killed: {signal.strsignal(-codes[0])}" if codes[0] < 0 else f"ended with code {codes[0]}"

    def close(self) -> None:
        """End the processes, unless this is a copy of them in a process that was forked."""
        if os.getpid() == self._process:
            self._kill()
        self._items = None


class _Worker(multiprocessing.context.ForkProcess):
    """Ends at once when the process that made it has died, and with NO_THREAD or NO_DESCRIPTOR where it gets
    none.
    """

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        try:
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            # Starts the thread that hands over shared memory: later an error would be lost, as in `share`.
            multiprocessing.reduction.DupFd(parent.sentinel)
            super().run()
        except RuntimeError as error:
            if "start new thread" not in str(error):
                raise
            os._exit(NO_THREAD)
        except OSError as error:
            os._exit(error.errno or 1)


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


class _Forks(multiprocessing.context.ForkContext):
    """Keeps the processes that it makes in `workers`, before they are started."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def Queue(self, maxsize: int = 0) -> _Queue:
        return _Queue(maxsize, ctx=self.get_context())

    # A class in other contexts, which is called in the same way.
    def Process(self, *args: Any, **kwargs: Any) -> _Worker:  # type: ignore[override]  # is no class
        self.workers.append(_Worker(*args, **kwargs))
        return self.workers[-1]


class _Queue(multiprocessing.queues.Queue):
    """Ends a worker that cannot hand over what it has read, which would be waited for for ever."""

    @staticmethod
    def _on_queue_feeder_error(error: Exception, item: object) -> None:
        if isinstance(multiprocessing.current_process(), _Worker):  # not the rank, which asks by such a queue
            code = error.errno if isinstance(error, OSError) else None
            os._exit(code or 1)
        multiprocessing.queues.Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]  # private


class _Items(_MultiProcessingDataLoaderIter):
    """torch's own asks its workers to end, which waits for ever for a lock that one held when it was killed;
    and where not all could be started it raises a second error.
    """

    def __del__(self) -> None:
        with contextlib.suppress(ValueError):  # they were never told to torch, or have read all
            _remove_worker_pids(id(self))


def _check_sockets(workers: int) -> None:
    """Each worker hands over shared memory by one. Raises DataError where the folder of temporary files can
    have none, OSError where the system lacks something.
    """
    try:
        multiprocessing.connection.Listener().close()
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        raise DataError(
            f"--num-workers {workers}: cannot be started: no socket can be made in the folder of temporary "
            f"files ({error}); set TMPDIR to one with a short path and room"
        ) from None


def _why(error: OSError | RuntimeError) -> str:
    """Why processes cannot be started, and what they need."""
    if not isinstance(error, OSError):
        return f"{error}: {TOO_MANY}"
    if error.errno == errno.EAGAIN:
        return f"{error.strerror}: {TOO_MANY}"
    if error.errno in SHORTAGES:
        return str(error.strerror)
    return f"{error.strerror}: they need {SHARED_MEMORY}, with room, and the right to write there"


def _kill(workers: Sequence[_Worker]) -> None:
    """End processes that hold nothing but what they have read."""
    started = [worker for worker in workers if worker.pid is not None]
    for worker in started:
        worker.kill()
    for worker in started:
        worker.join()
        # Of one that was just making shared memory: torch takes its name away as soon as it is mapped.
        with contextlib.suppress(OSError):
            for left in SHARED_MEMORY.glob(f"torch_{worker.pid}_*"):
                left.unlink(missing_ok=True)


class _StepDataset(TorchDataset[object]):
    def __init__(self, dataset: Dataset, steps: Steps, vocab_size: int | None) -> None:
        self._dataset = dataset
        self._steps = steps
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> HostBatches | DataError:
        try:
            return read_batches(self._dataset, self._steps[step], self._vocab_size, share)
        except DataError as error:  # raised where it is read: torch would wrap it in a traceback
            return error


def _handle_bus_errors(worker: int) -> None:
    """A part of a file that cannot be read is an error that names it: torch has its own handler by now, which
    ends the process.
    """
    _C.handle_bus_errors()


def _as_it_is(item: HostBatches | DataError) -> HostBatches | DataError:
    return item
