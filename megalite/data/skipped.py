"""The list of input that was skipped under `--on-error skip`, one JSON line each."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import orjson

from megalite.data.errors import DataError


class Skip(NamedTuple):
    """One document that could not be used."""

    file: str
    line: int
    error: str


class SkippedList:
    """Written under a temporary name; it gets its own only if anything was skipped.

    Its lock keeps a second run from writing the same output.
    """

    def __init__(self, output_prefix: str, resume: tuple[int, int]) -> None:
        """`resume`: (count, bytes) of an interrupted run's list to keep."""
        self.path = Path(f"{output_prefix}.skipped.jsonl")
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self.count, size = resume
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{output_prefix}: another run is writing this output") from None
        except OSError:  # a file system without locks
            pass
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, skips: Iterable[Skip]) -> None:
        for skip in skips:
            self._file.write(orjson.dumps(skip._asdict()) + b"\n")
            self.count += 1

    def flush(self) -> tuple[int, int]:
        """Everything so far reaches the disk; returns what to resume from."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.count, self._file.tell()

    def publish(self) -> None:
        """Give the list its name, or remove it when it is empty, with the list of an earlier run."""
        self._file.close()
        if self.count:
            self._partial.rename(self.path)
        else:
            self._partial.unlink()
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> SkippedList:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
