"""The list of input that was skipped under `--on-error skip`, one JSON line each."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import orjson

from megalite.data.errors import DataError, writing
from megalite.data.take_over import take_over


class Skip(NamedTuple):
    """One document that could not be used."""

    file: str
    line: int
    error: str
    behind_byte: int = 0
    """Of the file, behind which `line` is counted; listed where it is not 0."""


class SkippedList:
    """Written under a temporary name; it gets its own only if anything was skipped.

    Its lock, held until then, keeps a second run from writing the same output.
    """

    def __init__(self, output_prefix: str) -> None:
        """Takes the lock; what an interrupted run has listed stays until `go_on`. Raises DataError."""
        self.path = Path(f"{output_prefix}.skipped.jsonl")
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self.count = 0
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        take_over(self._partial, keep=True, locked_too=True)
        self._file = self._partial.open("ab")
        while not self._locked(output_prefix):
            self._file.close()
            self._file = self._partial.open("ab")

    def _locked(self, output_prefix: str) -> bool:
        """Lock the file; whether it has the temporary name still, which a run that ends may have taken away
        between the two calls.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{output_prefix}: another run is writing this output") from None
        except OSError:  # a file system without locks
            return True
        return self._has_its_name()

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._partial.stat())
        except FileNotFoundError:
            return False

    def holds(self, size: int) -> bool:
        """Whether an interrupted run has left `size` bytes or more."""
        return os.fstat(self._file.fileno()).st_size >= size

    def go_on(self, resume: tuple[int, int]) -> None:
        """Keep of an interrupted run's list `resume`: (count, bytes)."""
        self.count, size = resume
        self._file.truncate(size)
        self._file.seek(size)

    def add(self, skips: Iterable[Skip]) -> None:
        with writing(self._partial):
            for skip in skips:
                listed = {"file": skip.file, "line": skip.line, "error": skip.error}
                if skip.behind_byte:
                    listed["behind_byte"] = skip.behind_byte
                self._file.write(orjson.dumps(listed) + b"\n")
                self.count += 1

    def flush(self) -> tuple[int, int]:
        """Everything so far reaches the disk; returns what to resume from. Raises DataError when the file was
        taken away, and with it the lock.
        """
        with writing(self._partial):
            self._file.flush()
            os.fsync(self._file.fileno())
        if not self._has_its_name():
            raise DataError(
                f"{self._partial}: was removed or replaced during the run; give the same command again"
            )
        return self.count, self._file.tell()

    def publish(self) -> None:
        """Give the list its name, or remove it when it is empty, with the list of an earlier run; after
        `flush`, with nothing between that takes time.
        """
        if self.count:
            self._partial.rename(self.path)
        else:
            self._partial.unlink()
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> SkippedList:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk was told by what came before
            self._file.close()
