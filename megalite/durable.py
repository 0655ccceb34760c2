"""Files that outlive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system does that for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
