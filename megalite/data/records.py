"""Reads inputs as records: JSON lines, text files, paragraphs of text files, rows of Parquet; plain or
compressed.
"""

from __future__ import annotations

import functools
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from megalite.data.errors import DataError
from megalite.data.inputs import COMPRESSED, STDIN, Part
from megalite.data.zstd_stream import ZstdStream

READ_BYTES = 1 << 20
PARQUET_ROWS = 1024


class Record(NamedTuple):
    """What one document is made from."""

    number: int
    """Line, document or row, counted from 1 in the part."""
    offset: int
    """Bytes of the uncompressed input up to and including it; rows for Parquet."""
    size: int
    """Bytes of it."""
    content: Any
    """A line or text as bytes, a row as dict, or the DataError that it raised."""


def read_records(part: Part, keys: Sequence[str], skip: int = 0, offset: int = 0) -> Iterator[Record]:
    """The records of `part` behind the first `skip`, which end at `offset`.

    Raises DataError naming the file and the last good record when it cannot be opened, read or decompressed.
    """
    if part.format == "parquet":
        yield from _read_rows(part.path, keys, skip)
        return
    opened, failures = _open(part.path)
    number = 0
    try:
        with opened as stream:
            if part.format == "json":
                records = _lines(stream, part, skip, offset)
            elif part.format == "text":
                records = _whole(stream)
            else:
                records = _paragraphs(stream)
            for record in records:
                number = record.number
                if number > skip:
                    yield record
    except failures as error:
        raise DataError(f"{part.path}: after record {number}: cannot be read: {error}") from None


def line_number(part: Part, number: int) -> int:
    """Line in the file of the record `number` of `part`; reads what stands before the part, once."""
    return number if part.start == 0 else number + _lines_before(part.path, part.start)


@functools.lru_cache(maxsize=16)
def _lines_before(path: str, start: int) -> int:
    before = 0
    with open(path, "rb") as file:
        first = _first_line_start(file, start)
        file.seek(0)
        left = first
        while left > 0:
            chunk = file.read(min(left, READ_BYTES))
            before += chunk.count(b"\n")
            left -= len(chunk)
    return before


def _lines(stream: BinaryIO, part: Part, skip: int, offset: int) -> Iterator[Record]:
    number, position = 0, 0
    if part.start > 0:
        position = _first_line_start(stream, part.start)
    if skip > 0 and not part.path.endswith(COMPRESSED):  # go on where the skipped lines end
        number, position = skip, offset
        stream.seek(offset)
    if part.end >= 0 and position >= part.end:
        return
    for content in stream:
        number += 1
        position += len(content)
        yield Record(number, position, len(content), content)
        if 0 <= part.end <= position:
            return


def _first_line_start(file: BinaryIO, start: int) -> int:
    """Where the first line begins that begins at byte `start` or behind; the file stands there."""
    file.seek(start - 1)
    return start - 1 + len(file.readline())


def _whole(stream: BinaryIO) -> Iterator[Record]:
    content = stream.read()
    yield Record(1, len(content), len(content), content)


def _paragraphs(stream: BinaryIO) -> Iterator[Record]:
    """Runs of lines that are not blank, each with the line ends inside it."""
    number, position = 0, 0
    lines: list[bytes] = []
    for line in stream:
        position += len(line)
        if line.strip():
            lines.append(line)
        elif lines:
            number += 1
            yield _paragraph(number, position, lines)
            lines = []
    if lines:
        yield _paragraph(number + 1, position, lines)


def _paragraph(number: int, position: int, lines: list[bytes]) -> Record:
    content = b"".join(lines).rstrip(b"\r\n")
    return Record(number, position, len(content), content)


def _read_rows(path: str, keys: Sequence[str], skip: int) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading .parquet needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = set(file.schema_arrow.names)
            columns = sorted({key if key in known else key.split(".")[0] for key in keys} & known)
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                size = batch.nbytes // max(batch.num_rows, 1)
                if number + batch.num_rows <= skip:
                    number += batch.num_rows
                    continue
                for row in _rows(batch):
                    number += 1
                    if number > skip:
                        yield Record(number, number, size, row)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: after row {number}: cannot be read: {error}") from None


def _rows(batch: Any) -> list[Any]:
    """The rows of a RecordBatch as dicts; a DataError where one holds text that is none."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [DataError(f"not valid UTF-8: {error.reason} at byte {error.start}")]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]


def _open(path: str) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """The uncompressed bytes of `path`, and the exceptions that reading them may raise."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise DataError("--input -: standard input is closed")
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
