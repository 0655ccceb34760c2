"""Files that are written by one run, also where no lock holds for all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from megalite.data.errors import writing
from megalite.data.temporary_names import left_behind, temporary_name


def take_over(path: Path, keep: bool, locked_too: bool = False) -> bool:
    """Another run may be writing `path`, where there are no locks or they are those of one node, as on Lustre
    with `localflock`: this one takes its name away from it, so that the other notices before it publishes
    anything, and writes nothing into this one's. A run that has locked it for all to see keeps it.

    `keep`: what it holds, else it is removed. What is kept and could be locked has its name from then on only
    `locked_too`, as that takes a copy: by the name of one file that both have, the other notices in time.

    Returns False where another run has it, and what belongs to it is to be left alone, too.
    """
    try:
        file = path.open("r+b")
    except OSError:  # nothing to take; what else is wrong is told by whoever opens it
        return True
    with file:  # locked until its name is of another file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if keep and not locked_too:
                return True
        except BlockingIOError:
            return False
        except OSError:  # no locks
            pass
        with contextlib.suppress(OSError):
            for left in left_behind(path):  # by a kill while it was copied
                left.unlink()
        if not _is_at(file, path):  # it has got its final name meanwhile, in which it must stay
            return True
        if keep:
            _replace_by_copy(path)
        else:
            path.unlink(missing_ok=True)
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _replace_by_copy(path: Path) -> None:
    own = temporary_name(path)
    try:
        with writing(path), path.open("rb") as file, own.open("wb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(own, path)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
