"""The one exception of this room; the C++ readers and writers raise the same class."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from megalite._C import DataError

__all__ = ["DataError", "writing"]


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes the file `path`: an error names it, which Python's own of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
