"""Files that are written by one run, also where nothing can be locked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from megalite.data.temporary_names import left_behind, temporary_name


def take_over(path: Path, keep: bool) -> None:
    """On a file system without locks another run may be writing `path`: this one takes its name away from it,
    so that the other notices before it publishes anything, and writes nothing into this one's. `keep`: what
    it holds; else it is removed.
    """
    try:
        file = path.open("r+b")
    except OSError:  # nothing to take; what else is wrong is told by whoever opens it
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            return
        except OSError:  # no locks
            pass
    with contextlib.suppress(OSError):
        for left in left_behind(path):  # by a kill while it was copied
            left.unlink()
    if not keep:
        path.unlink(missing_ok=True)
        return
    own = temporary_name(path)
    try:
        shutil.copyfile(path, own)
        os.replace(own, path)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
