"""Opening what a flag names: files that can be read again, by every process, to an end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """The file `path`, to be read. Raises OSError, also for what is no file: opening a pipe waits until
    something writes to it, and what is read from it is gone for the next process; a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "is a folder" if stat.S_ISDIR(mode) else "is a pipe or a device, not a file"
        raise OSError(0, what, str(path))
    return open(descriptor, "rb")
