"""The files of a dataset read from front to back.

They are read, not mapped: no page of a large file stays in memory, and one that something cuts meanwhile is
an error that says where it ends now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megalite.data.errors import DataError
from megalite.data.indexed_dataset import HEADER_BYTES, IndexedDataset, open_dataset

CHUNK_BYTES = 8 << 20


class DatasetFiles:
    """Gives arrays in pieces, each valid until the next is asked for.

    Raises DataError as `open_dataset` does, when a file ends early, and, leaving the `with` block, when a
    file is no longer what it was.
    """

    def __init__(self, prefix: str) -> None:
        self._paths = [f"{prefix}.bin", f"{prefix}.idx"]
        self._before = [_stamp(path) for path in self._paths]
        self.dataset: IndexedDataset = open_dataset(prefix)
        self._bin, self._idx = (open(path, "rb", buffering=0) for path in self._paths)  # noqa: SIM115 - closed by `__exit__`

    def tokens(self) -> Iterator[np.ndarray]:
        """Of the dataset's dtype."""
        return _pieces(self._bin, 0, np.dtype(self.dataset.dtype), self.dataset.tokens)

    def lengths(self) -> Iterator[np.ndarray]:
        """int32."""
        return _pieces(self._idx, HEADER_BYTES, np.dtype(np.int32), self.dataset.sequences)

    def sequences_of_documents(self) -> Iterator[np.ndarray]:
        """int64."""
        start, last = HEADER_BYTES + 12 * self.dataset.sequences + 8, 0
        for ends in _pieces(self._idx, start, np.dtype(np.int64), self.dataset.documents):
            yield np.diff(ends, prepend=last)
            last = int(ends[-1])

    def __enter__(self) -> DatasetFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        self._idx.close()
        if kind is not None:
            return
        for path, before in zip(self._paths, self._before, strict=True):
            if _stamp(path) != before:
                raise DataError(f"{path}: changed while it was read")


def _pieces(file: BinaryIO, start: int, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """`count` numbers from byte `start` on."""
    file.seek(start)
    at_once = CHUNK_BYTES // dtype.itemsize
    buffer = np.empty(min(at_once, count), dtype=dtype)
    for first in range(0, count, at_once):
        piece = buffer[: min(at_once, count - first)]
        left = piece.view(np.uint8).data
        while left:
            got = file.readinto(left)  # type: ignore[attr-defined]  # an unbuffered file has it
            if not got:
                end = start + count * dtype.itemsize
                raise DataError(
                    f"{file.name}: expected at least {end} bytes, found {file.tell()}: something cut it"
                )
            left = left[got:]
        yield piece


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
