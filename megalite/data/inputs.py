"""Input files of the preprocessing as numbered records: lines of JSON, plain or compressed."""

from __future__ import annotations

import glob
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .errors import DataError
from .zstd_stream import ZstdStream

READ_BYTES = 1 << 20


class Record(NamedTuple):
    """One line of an input."""

    line: int
    """Counted from 1."""
    content: bytes
    end: int
    """Bytes of the (uncompressed) input up to and including this line."""


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that ``patterns`` name: files, folders (all files in them) and globs, sorted inside each;
    ``-`` is standard input.
    """
    found: list[str] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern == "-" or path.is_file() or path.is_fifo():
            found.append(pattern)
        elif path.is_dir():
            inside = sorted(str(file) for file in path.rglob("*") if file.is_file())
            if not inside:
                raise DataError(f"--input {pattern}: the folder holds no file")
            found.extend(inside)
        else:
            matches = sorted(match for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
            if not matches:
                raise DataError(f"--input {pattern}: no such file, folder or match")
            found.extend(matches)
    return found


def read_records(path: str, skip: int = 0) -> Iterator[Record]:
    """The lines of ``path`` after the first ``skip``, without their line ends.

    Raises DataError naming the file and the last good line when it cannot be opened, read or decompressed.
    """
    line, end = 0, 0
    opened, failures = _open(path)
    try:
        with opened as stream:
            for content in stream:
                line += 1
                end += len(content)
                if line > skip:
                    yield Record(line, content, end)
    except failures as error:
        raise DataError(f"{path}: after line {line}: cannot be read: {error}") from None


def _open(path: str) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """The uncompressed bytes of ``path``, and the exceptions that reading them may raise."""
    try:
        if path == "-":
            return sys.stdin.buffer, (OSError,)
        if path.endswith(".gz"):
            return io.BufferedReader(gzip.GzipFile(path, "rb"), READ_BYTES), (OSError, EOFError, zlib.error)
        file = open(path, "rb", buffering=READ_BYTES)  # noqa: SIM115 - closed by the reader
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None
    if not path.endswith((".zst", ".zstd")):
        return file, (OSError,)
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: reading .zst needs the package zstandard: pip install zstandard") from None
    return io.BufferedReader(ZstdStream(file), READ_BYTES), (OSError, EOFError, zstandard.ZstdError)
