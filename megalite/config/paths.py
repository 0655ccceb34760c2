"""What a flag names on the disk: whether it is there, and opening what can be read again, by every process,
to an end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NOT_THERE = "no such file"
NO_FILE = "is a pipe or a device, not a file"


def why_unseen(path: str | Path) -> str | None:
    """Why nothing can be known of `path`, such as "File name too long" or "Permission denied"; None where it
    can, also that nothing is there.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror
    except ValueError as error:
        return str(error)  # "embedded null byte"
    return None


def why_no_file(path: str | Path) -> str | None:
    """Why `path` is no file that can be read; None where it is one."""
    if unseen := why_unseen(path):
        return unseen
    if os.path.isfile(path):
        return None if os.access(path, os.R_OK) else os.strerror(errno.EACCES)
    if os.path.isdir(path):
        return "is a folder"
    return NO_FILE if os.path.exists(path) else NOT_THERE


def open_regular(path: str | Path) -> BinaryIO:
    """The file `path`, to be read. Raises OSError, also for what is no file: opening a pipe waits until
    something writes to it, and what is read from it is gone for the next process; a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(0, "is a folder" if stat.S_ISDIR(mode) else NO_FILE, str(path))
    return open(descriptor, "rb")
