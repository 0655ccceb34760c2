"""Reading ahead, in threads and processes: nothing waits for ever, is left behind or ends without a cause."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import multiprocessing.reduction
import multiprocessing.util
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.data.batch import Batch
from megalite.data.build import Dataset, DocumentRules, build_datasets
from megalite.data.errors import DataError
from megalite.data.loader import StepLoader
from megalite.data.mock_dataset import MockDataset
from megalite.data.reading_processes import SHARED_MEMORY, _Queue
from tests.data.corpora import Words, data_config, numbered_dataset
from tests.data.test_loader import CPU, mock


def test_no_thread_is_left_behind() -> None:
    def readers() -> int:
        return sum(thread.name == "megalite-data" for thread in threading.enumerate())

    before = readers()
    with StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU) as loader:
        next(loader)
    assert readers() == before
    forgotten = StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "megalite-data"]
    del forgotten
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_the_end_reaches_every_thread_that_asks() -> None:
    with StepLoader(mock(20), 1, 1, 0, 1, 0, CPU) as loader, ThreadPoolExecutor(3) as pool:
        read = [pool.submit(lambda: len(list(loader))) for _ in range(3)]
        assert sum(each.result(timeout=60) for each in read) == 20


def test_a_closed_reader_ends_behind_what_it_has_read() -> None:
    reader = StepLoader(mock(20), 1, 1, 0, 1, 0, CPU)._reader
    next(reader)
    reader.close()
    assert len(list(iter(partial(next, reader, None), None))) <= 2


def test_closing_ends_a_thread_that_waits() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Waiting(MockDataset):
        def read(self, samples: np.ndarray, out: np.ndarray) -> None:
            entered.set()
            leave.wait(60)
            super().read(samples, out)

    loader = StepLoader(Dataset(Waiting(9, 6, 0, 4), DocumentRules(0)), 1, 1, 0, 1, 0, CPU)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(lambda: len(list(loader)))
        assert entered.wait(60)
        closing = pool.submit(loader.close)
        leave.set()
        closing.result(timeout=60)
        assert waiting.result(timeout=60) <= 4


READS_ELSEWHERE = """
import os, threading, time, torch
from tests.data.test_read_ahead import *

loader = StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers={workers})
next(loader)

def read_on(when):
    try:
        when()
        len(list(loader))
    except RuntimeError as error:
        print(error, flush=True)

if {fork}:
    if (child := os.fork()) == 0:
        read_on(lambda: None)
        if {workers}:
            loader.close()  # of the copy
        os._exit(0)
    os.waitpid(child, 0)
    next(loader)
    loader.close()
else:
    threading.Thread(target=read_on, args=(threading.main_thread().join,)).start()
"""


@pytest.mark.parametrize(
    ("fork", "workers", "message"),
    [(True, 0, "make one in each"), (True, 1, "make one in each"), (False, 0, "end it last")],
)
def test_a_loader_whose_reader_is_not_there_is_an_error(fork: bool, workers: int, message: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", READS_ELSEWHERE.format(fork=fork, workers=workers)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert message in found.stdout


READS_AT_THE_END = """
import time, numpy as np, torch
from megalite import _C
from megalite.data.build import Dataset, DocumentRules
from megalite.data.loader import StepLoader
from megalite.data.mock_dataset import MockDataset

class Slow(MockDataset):
    def read(self, samples, out):
        until, content = time.monotonic() + 0.5, np.zeros(1 << 20)
        while time.monotonic() < until:
            _C.content_hash(content)

loader = StepLoader(Dataset(Slow(9, 6, 0, 4), DocumentRules(0)), 1, 1, 0, 1, 0, torch.device("cpu"))
time.sleep(0.1)
raise ValueError("of the run")
"""


def test_a_process_that_ends_while_its_thread_reads_is_not_aborted() -> None:
    found = subprocess.run(
        [sys.executable, "-c", READS_AT_THE_END], capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stderr.splitlines()[-1]) == (1, "ValueError: of the run")


def batches_of(dataset: Dataset, workers: int, consumed: int = 0) -> list[Batch]:
    with StepLoader(dataset, 2, 8, 1, 2, consumed, CPU, workers=workers) as loader:
        return [batch for step in loader for batch in step]


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_read_the_same_samples_in_the_same_order(tmp_path: Path, workers: int) -> None:
    prefix = numbered_dataset(tmp_path / "d", documents=50, length=9)
    config = data_config(
        tmp_path / "c", prefix, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    dataset = build_datasets(config, Words(450, 44), 6, 3, (70, 0, 0)).train
    assert dataset is not None
    state = torch.get_rng_state()
    thread, processes = batches_of(dataset, 0, 16), batches_of(dataset, workers, 16)
    assert len(thread) == len(processes) > 10
    for ours, theirs in zip(thread, processes, strict=True):
        for field in fields(Batch):
            x, y = getattr(ours, field.name), getattr(theirs, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, field.name
    assert torch.equal(torch.get_rng_state(), state)


class Obstacle(MockDataset):
    """Something happens to whoever reads sample 4."""

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        if samples[0] == 4:
            self.meet()
        super().read(samples, out)

    def meet(self) -> None:
        raise DataError("sample 4 is broken")


class Deadly(Obstacle):
    def meet(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Obstacle, "^sample 4 is broken$"),
        (Deadly, "^--num-workers: a process that reads data was killed: Killed$"),
    ],
)
def test_what_ends_a_worker_process_ends_the_loader_with_its_cause(
    source: type[Obstacle], message: str
) -> None:
    dataset = Dataset(source(9, 6, 0, 40), DocumentRules(0))
    with StepLoader(dataset, 1, 1, 0, 1, 0, CPU, workers=2) as loader:
        with pytest.raises(DataError, match=message):
            list(loader)
        with pytest.raises(StopIteration):
            next(loader)


def readers() -> list[multiprocessing.context.ForkProcess]:
    """The loader's processes, not those of the tests' pool."""
    children = multiprocessing.active_children()
    return [child for child in children if isinstance(child, multiprocessing.context.ForkProcess)]


class Roomless(Obstacle):
    def meet(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # shared memory is files


def test_a_worker_without_shared_memory_ends_the_loader_with_its_cause() -> None:
    """What the worker cannot hand over would be waited for for ever."""
    dataset = Dataset(Roomless(9, 6, 0, 40), DocumentRules(0, eod_mask_loss=True))
    with StepLoader(dataset, 1, 1, 0, 1, 0, CPU, workers=1) as loader:
        children = readers()
        timer = threading.Timer(60, children[0].kill)
        timer.start()
        try:
            with pytest.raises(DataError, match=r"^--num-workers: no shared memory for what was .*/dev/shm"):
                list(loader)
        finally:
            timer.cancel()


def test_a_step_of_many_micro_batches_takes_few_descriptors() -> None:
    """A tensor that is handed over between processes holds one until it is taken."""
    rules = DocumentRules(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    dataset = Dataset(MockDataset(9, 6, 0, 600), rules)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        with StepLoader(dataset, 1, 200, 0, 1, 0, CPU, workers=1) as loader:
            assert [len(step) for step in loader] == [200] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def patience(seconds: int = 60) -> Iterator[None]:
    """What waits for ever inside is interrupted."""
    alarm = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)


def test_a_worker_that_dies_while_it_hands_over_is_not_waited_for() -> None:
    """Half a message is there, and this process holds the pipe open itself."""
    dataset = Dataset(MockDataset(9, 1, 0, 80_000), DocumentRules(0, reset_attention_mask=True))
    with StepLoader(dataset, 1, 40_000, 0, 1, 0, CPU, workers=1) as loader:
        time.sleep(1)  # by then it writes a message that the pipe has no room for
        (child,) = readers()
        child.kill()
        child.join()
        with patience(), pytest.raises(DataError, match="a process that reads data was killed: Killed"):
            next(loader)


def fails_here(call: Callable[..., object], number: int, error: Exception) -> Callable[..., object]:
    """`call`, which raises `error` instead when it is called for the `number`th time in this process."""
    here, calls = os.getpid(), itertools.count(1)

    def limited(*args: object) -> object:
        if os.getpid() == here and next(calls) == number:
            raise error
        return call(*args)

    return limited


@pytest.mark.parametrize(
    ("what", "number", "error", "message"),
    [
        ("os.fork", 2, BlockingIOError(errno.EAGAIN, "Try again"), "Try again: too many run .*pids.max"),
        ("threading.Thread.start", 1, RuntimeError("can't start"), "can't start: too many run already"),
        (
            "megalite.data.reading_processes._Forks.Queue",
            3,
            OSError(errno.ENOSPC, "No space left"),
            "No space left: they need /dev/shm, with room",
        ),
        ("os.pipe", 5, OSError(errno.EMFILE, "Too many open files"), "Too many open files$"),
        (
            "multiprocessing.connection.Listener",
            1,
            OSError(errno.EMFILE, "Too many open files"),
            "Too many open files$",
        ),
    ],
)
def test_processes_of_which_only_some_can_be_started(
    monkeypatch: pytest.MonkeyPatch, what: str, number: int, error: Exception, message: str
) -> None:
    """Those that were would be waited for for ever at the end of the process."""
    where, name = what.rsplit(".", 1)
    monkeypatch.setattr(what, fails_here(getattr(pkgutil.resolve_name(where), name), number, error))
    failures: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    with pytest.raises(DataError, match=f"^--num-workers 2: cannot be started: {message}"):
        StepLoader(mock(100), 1, 1, 0, 1, 0, CPU, workers=2)
    monkeypatch.undo()
    gc.collect()
    assert not readers()
    assert not failures
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.parametrize("number", [1, 2])  # at the start of a worker, and of a step that it hands over
def test_a_step_that_cannot_be_handed_over_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here, calls, dup = os.getpid(), itertools.count(1), multiprocessing.reduction.DupFd

    def limited(descriptor: int) -> object:
        if os.getpid() != here and next(calls) == number:
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(descriptor)

    monkeypatch.setattr(multiprocessing.reduction, "DupFd", limited)
    loader = StepLoader(mock(100), 1, 1, 0, 1, 0, CPU, workers=1)
    monkeypatch.undo()
    with pytest.raises(DataError, match="a process that reads data got no file descriptor: allow more"):
        next(loader)


def test_a_rank_that_cannot_ask_for_a_step_is_not_ended() -> None:
    """Only a worker is; torch makes the queues of both of one class."""
    _Queue._on_queue_feeder_error(OSError(errno.EPIPE, "Broken pipe"), None)


def test_a_folder_of_temporary_files_in_which_no_socket_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: str(long))
    message = (
        r"^--num-workers 1: cannot be started: no socket .* \(.* path too long\); set TMPDIR to one with"
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(DataError, match=message):
        StepLoader(mock(100), 1, 1, 0, 1, 0, CPU, workers=1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


def test_a_worker_that_gets_too_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second it could hand nothing over."""
    here, calls, start = os.getpid(), itertools.count(1), threading.Thread.start

    def only_one(thread: threading.Thread) -> None:
        if os.getpid() != here and next(calls) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with StepLoader(mock(100), 1, 1, 0, 1, 0, CPU, workers=1) as loader:
        told = "a process that reads data got no thread: too many run already"
        with patience(), pytest.raises(DataError, match=told):
            next(loader)


STARTS = """
import os, signal
from tests.data.test_read_ahead import *

fork = os.fork

def interrupted():
    if (child := fork()):
        os.kill(os.getpid(), signal.SIGINT)
    return child

os.fork = interrupted
StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers=2)
"""
IS_KILLED = """
from tests.data.test_read_ahead import *

class Slow(MockDataset):
    def read(self, samples, out):
        if samples[0] == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

next(StepLoader(Dataset(Slow(9, 6, 0, 40), DocumentRules(0)), 1, 1, 0, 1, 0, CPU, workers=2))
"""


@pytest.mark.parametrize(("script", "ends"), [(STARTS, signal.SIGINT), (IS_KILLED, signal.SIGKILL)])
def test_no_worker_outlives_a_process_that_is_interrupted_or_killed(script: str, ends: int) -> None:
    """Its end is seen by that of its output, which they hold open."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -ends, done.stderr


def test_a_lock_that_a_killed_worker_held_is_not_waited_for() -> None:
    loader = StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers=1)
    next(loader)
    loader._reader._items._workers_done_event._cond.acquire()  # type: ignore[attr-defined]  # as by a worker
    with patience():
        loader.close()
        gc.collect()


def test_a_worker_that_is_ended_while_it_makes_shared_memory_leaves_none() -> None:
    with StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers=1) as loader:
        next(loader)
        (child,) = readers()
        left = SHARED_MEMORY / f"torch_{child.pid}_12345_6"
        left.touch()
    assert not left.exists()


def test_worker_processes_beside_a_handler_that_a_c_library_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says None for it, and does not take None back."""
    install = signal.signal

    def install_over_none(number: signal.Signals, handler: signal.Handlers) -> None:
        install(number, handler)

    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    monkeypatch.setattr(signal, "signal", install_over_none)
    with StepLoader(mock(3), 1, 1, 0, 1, 0, CPU, workers=1) as loader:
        assert len(list(loader)) == 3
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL  # none that would raise wherever the run is


def test_worker_processes_of_another_thread_are_refused() -> None:
    """There the death of one that hands over would be waited for for ever."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in the main thread"):
        pool.submit(StepLoader, mock(3), 1, 1, 0, 1, 0, CPU, workers=1).result()


def test_worker_processes_end_with_the_loader_and_leave_signals_to_the_run() -> None:
    with StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers=2) as loader:
        next(loader)
        children = readers()
        assert len(children) == 2
        for child in children:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGTERM)
        assert len([next(loader) for _ in range(20)]) == 20
    assert not any(child.is_alive() for child in children)


def test_a_process_ends_though_it_did_not_close_its_loader() -> None:
    """Its workers must not wait for each other's end."""
    text = (
        "import torch; from tests.data.test_read_ahead import *\n"
        "loader = StepLoader(mock(1000), 1, 1, 0, 1, 0, CPU, workers=2)\n"
        "print(len(next(loader)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "1\n"
