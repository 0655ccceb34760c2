"""The exceptions of this room; the C++ readers and writers raise the same classes.

A WriteError is the DataError of output that could not be written, as on a full disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from megalite._C import DataError, WriteError

__all__ = ["DataError", "WriteError", "check_prefix", "check_replaceable", "writing"]


def check_prefix(prefix: str) -> None:
    """Raises DataError for a path that names a folder, whose files would be hidden ones, and for one that is
    no UTF-8: the C++ side takes no other.
    """
    if not os.path.basename(prefix):
        raise DataError(f"{prefix or 'an empty path'}: a dataset's path must end in its name")
    try:
        prefix.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(prefix).decode("utf-8", errors="backslashreplace")
        raise DataError(
            f"{shown}: a dataset's path must be UTF-8 (LC_ALL=C.UTF-8 where the system's locale is not)"
        ) from None


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises DataError where something else than a file has the name of one that will be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: is no file that could be replaced; give another name")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes the file `path`: an error names it, which Python's own of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from None
