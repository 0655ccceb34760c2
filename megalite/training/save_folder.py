"""The folder that a run saves to belongs to it alone while it lasts."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megalite.checkpoint import CheckpointError, foreign_checkpoints
from megalite.listing import listing
from megalite.parallel.everywhere import gather_objects, on_every_rank
from megalite.training.errors import TrainingError

LOCK = ".lock"
PATIENCE_SECONDS = 90.0  # with NFS, which may hold a name for missing for a minute


@contextmanager
def only_writer(directory: str | None, first_rank: bool) -> Iterator[Callable[[], None]]:
    """Hold `directory`, made if need be, against other runs; None holds nothing. A collective.

    By the lock of a file in it, which the kernel frees when this process dies. Two writers would remove each
    other's unfinished checkpoints and mix the finished ones. Raises TrainingError on every rank. Another
    program's checkpoints are refused: saving would take the place of some, and their record; and so is a
    folder that other ranks do not see.

    Where the file system has no locks, or they are those of one node, the later run has the folder: what this
    gives is to be called before each change of it, and raises CheckpointError in a run that has lost it.
    """
    with ExitStack() as held:

        def hold() -> str | None:
            return _hold(directory, held) if first_rank and directory is not None else None

        token = next(filter(None, gather_objects(on_every_rank(hold, TrainingError, TrainingError))), None)
        if directory is not None and token is not None:
            on_every_rank(lambda: _see(directory, token), TrainingError, TrainingError)
        yield lambda: _check_still_held(directory, token)


def _check_still_held(directory: str | None, token: str | None) -> None:
    """Raises CheckpointError where another run has written its token in the place of `token`."""
    if directory is None or token is None:
        return
    with suppress(OSError, UnicodeDecodeError):  # what else is wrong is told by who writes there
        if (Path(directory) / LOCK).read_text() not in (token, ""):  # "": the other is about to
            raise CheckpointError(
                f"--save {directory}: another run has begun to save there; this one saves nothing more"
            )


def _see(directory: str, token: str) -> None:
    """Raises TrainingError where `directory` is not the one in which the first rank has written `token`."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(OSError):
            if (Path(directory) / LOCK).read_text() == token:
                return
        if time.monotonic() > end:
            raise TrainingError(
                f"--save {directory}: what the first rank wrote there is not seen on {socket.gethostname()}; "
                "it must be a folder that all nodes share"
            )
        time.sleep(0.5)


def _hold(directory: str, held: ExitStack) -> str | None:
    """Returns what it has written into the lock's file; None where it may only be read."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        descriptors = [_opened(Path(directory) / LOCK)]
    except OSError as error:
        raise TrainingError(f"--save {directory}: {error.strerror}") from error

    def close() -> None:
        while descriptors:
            os.close(descriptors.pop())

    held.callback(close)
    os.register_at_fork(after_in_child=close)  # a child that outlives this process would hold the folder
    try:
        fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainingError(
            f"--save {directory}: another run is saving there; wait for its end, or give another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        foreign = [folder.name for folder in foreign_checkpoints(Path(directory))]
    except OSError as error:
        raise TrainingError(f"--save {directory}: {error}") from error
    if foreign:
        raise TrainingError(
            f"--save {directory}: holds {listing(foreign)}, no whole checkpoint of this program, which "
            "saving may replace; give another folder, or move it away"
        )
    token = uuid.uuid4().hex
    try:
        os.ftruncate(descriptors[0], 0)
        os.pwrite(descriptors[0], token.encode(), 0)
        os.fsync(descriptors[0])
    except OSError:  # another user's, or a full disk, of which the first save tells
        return None
    return token


def _opened(lock: Path) -> int:
    """A descriptor for writing: other nodes see no lock of a folder, and NFS gives none to those who read."""
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's; local file systems lock it nevertheless
        if not lock.exists():
            raise
        return os.open(lock, os.O_RDONLY)
