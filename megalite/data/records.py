"""Reads inputs as records: JSON lines, text files, paragraphs of text files, rows of Parquet; plain or
compressed.
"""

from __future__ import annotations

import functools
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from megalite.data.documents import missing_key
from megalite.data.errors import DataError
from megalite.data.inputs import COMPRESSED, STDIN, Part
from megalite.data.zstd_stream import ZstdStream

READ_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # in front of files of Windows
LONGEST_RECORD = 1 << 30  # bytes; a decompression bomb, or a file that is no text, is one endless line
PARQUET_ROWS = 256  # at once, or fewer of large ones; of 1 MiB each where a dictionary repeats them


class Records(NamedTuple):
    """What consecutive documents of one part are made from."""

    number: int
    """Line, document or row of the last, counted from 1 in the part."""
    offset: int
    """Bytes of the uncompressed input up to and including it; rows for Parquet."""
    size: int
    """Bytes of all."""
    contents: list[Any]
    """Of each a line or text as bytes, a row as dict, or the DataError that reading the row raised."""


class _Record(NamedTuple):
    offset: int
    size: int
    content: Any


def read_records(
    part: Part,
    keys: Sequence[str],
    most_bytes: int = READ_BYTES,
    most_records: int = 1024,
    skip: int = 0,
    offset: int = 0,
) -> Iterator[Records]:
    """The records of `part` behind the first `skip`, which end at `offset`; so many at a time that they reach
    `most_bytes` or `most_records`.

    Raises DataError naming the file and the last good record when it cannot be opened, read or decompressed,
    and for a record of more than LONGEST_RECORD.
    """
    if part.format == "parquet":
        yield from _grouped(_read_rows(part.path, keys, skip), most_bytes, most_records, skip)
        return
    opened, failures = _open(part.path)
    told: tuple[type[Exception], ...] = (*failures, _TooLong)
    number = skip
    try:
        with opened as stream:
            if part.format == "json":
                groups = _lines(stream, part, most_bytes, most_records, skip, offset)
            else:
                texts = _whole(stream) if part.format == "text" else _paragraphs(stream)
                groups = _grouped(islice(texts, skip, None), most_bytes, most_records, skip)
            for group in groups:
                if number == part.start == 0 and part.format != "paragraphs":
                    group.contents[0] = group.contents[0].removeprefix(BYTE_ORDER_MARK)
                    if group.contents == [b""] and part.format == "json":
                        return  # nothing but the mark: an empty file
                number = group.number
                yield group
    except told as error:
        raise DataError(f"{part.path}: after record {number}: cannot be read: {error}") from None


def _grouped(
    records: Iterator[_Record], most_bytes: int, most_records: int, number: int
) -> Iterator[Records]:
    """`records`, which follow record `number`, in groups; those before an error come before it."""
    contents: list[Any] = []
    size = offset = 0
    try:
        for record in records:
            contents.append(record.content)
            size, offset = size + record.size, record.offset
            if size >= most_bytes or len(contents) >= most_records:
                number += len(contents)
                yield Records(number, offset, size, contents)
                contents, size = [], 0
    except Exception:  # whatever a reader raises: what came before it is handed on first
        if contents:
            yield Records(number + len(contents), offset, size, contents)
        raise
    if contents:
        yield Records(number + len(contents), offset, size, contents)


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


def _lines(
    stream: BinaryIO, part: Part, most_bytes: int, most_records: int, skip: int, offset: int
) -> Iterator[Records]:
    number, position = 0, 0
    if part.start > 0:
        position = _first_line_start(stream, part.start)
    if skip > 0 and not part.path.endswith(COMPRESSED):  # go on where the skipped lines end
        number, position = skip, offset
        stream.seek(offset)
    for content in islice(_all_lines(stream), skip - number):
        number += 1
        position += len(content)
    until = part.end if part.end >= 0 else sys.maxsize
    if position >= until:
        return
    yield from _grouped_lines(stream, most_bytes, most_records, number, position, until)


def _grouped_lines(
    stream: BinaryIO, most_bytes: int, most_records: int, number: int, position: int, until: int
) -> Iterator[Records]:
    """The lines of `stream`, which stands at byte `position` behind line `number`, that begin before `until`;
    as `_grouped` with little work a line.
    """
    contents: list[bytes] = []
    size, enough = 0, min(most_bytes, until - position)
    try:
        for content in _all_lines(stream):
            contents.append(content)
            size += len(content)
            if size >= enough or len(contents) >= most_records:
                number, position = number + len(contents), position + size
                yield Records(number, position, size, contents)
                if position >= until:
                    return
                contents, size, enough = [], 0, min(most_bytes, until - position)
    except Exception:  # as above
        if contents:
            yield Records(number + len(contents), position + size, size, contents)
        raise
    if contents:
        yield Records(number + len(contents), position + size, size, contents)


def _first_line_start(file: BinaryIO, start: int) -> int:
    """Where the first line begins that begins at byte `start` or behind; the file stands there."""
    file.seek(start - 1)
    return start - 1 + len(next(_all_lines(file), b""))


def _all_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Those of `stream`. Raises _TooLong."""
    for content in iter(functools.partial(stream.readline, LONGEST_RECORD + 1), b""):
        if len(content) > LONGEST_RECORD:
            raise _TooLong("line")
        yield content


class _TooLong(DataError):
    def __init__(self, what: str) -> None:
        super().__init__(f"the {what} that follows has more than {LONGEST_RECORD:,} bytes")


def _whole(stream: BinaryIO) -> Iterator[_Record]:
    content = stream.read(LONGEST_RECORD + 1)
    if len(content) > LONGEST_RECORD:
        raise _TooLong("text")
    yield _Record(len(content), len(content), content)


def _paragraphs(stream: BinaryIO) -> Iterator[_Record]:
    """Runs of lines that are not blank, each with the line ends inside it."""
    position = size = 0
    lines: list[bytes] = []
    for line in _all_lines(stream):
        text = line.removeprefix(BYTE_ORDER_MARK) if position == 0 else line
        position += len(line)
        if text.strip():
            lines.append(text)
            size += len(text)
            if size > LONGEST_RECORD:
                raise _TooLong("paragraph")
        elif lines:
            yield _paragraph(position, lines)
            lines, size = [], 0
    if lines:
        yield _paragraph(position, lines)


def _paragraph(position: int, lines: list[bytes]) -> _Record:
    content = b"".join(lines).rstrip(b"\r\n")
    return _Record(position, len(content), content)


def _read_rows(path: str, keys: Sequence[str], skip: int) -> Iterator[_Record]:
    """The rows behind the first `skip`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading .parquet needs the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=READ_BYTES, page_checksum_verification=True
        ) as file:
            known = file.schema_arrow.names
            paths = [file.schema.column(i).path for i in range(len(file.schema))]
            absent = [missing_key(key, known) for key in keys if not {key, _outer(key)}.intersection(known)]
            columns = sorted({key if _leads_to(key, paths) else _outer(key) for key in keys})
            if double := [key for key in columns if known.count(key if key in known else _outer(key)) > 1]:
                raise DataError(f"{path}: has several columns {double[0]!r}, of which one only would be read")
            for group in range(file.num_row_groups):
                rows = _rows_at_once(file.metadata.row_group(group), columns)
                for batch in file.iter_batches(rows, [group], columns):
                    if number + batch.num_rows <= skip:
                        number += batch.num_rows
                        continue
                    for row, size in _sized_rows(batch):
                        number += 1
                        if number > skip:
                            yield _Record(number, size, absent[0] if absent else row)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:  # also of a column's name
        raise DataError(f"{path}: after row {number}: cannot be read: {error}") from None


def _outer(key: str) -> str:
    return key.split(".")[0]


def _leads_to(key: str, paths: Sequence[str]) -> bool:
    """Whether one of these columns is `key` or a part of it."""
    return any(f"{path}.".startswith(f"{key}.") for path in paths)


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    """How many rows of a row group with this metadata have some READ_BYTES in `columns`."""
    chunks = [group.column(i) for i in range(group.num_columns)]
    size = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if any(_leads_to(name, [chunk.path_in_schema]) for name in columns)
    )
    return max(1, min(PARQUET_ROWS, READ_BYTES * group.num_rows // max(size, 1)))


def _sized_rows(batch: Any) -> Iterator[tuple[Any, int]]:
    """The rows of a RecordBatch with the size of each; READ_BYTES are made at once, or one row."""
    step = max(1, READ_BYTES * batch.num_rows // max(batch.nbytes, 1))
    for first in range(0, batch.num_rows, step):
        part = batch.slice(first, step)
        size = part.nbytes // part.num_rows
        yield from ((row, size) for row in _rows(part))


def _rows(batch: Any) -> list[Any]:
    """The rows of a RecordBatch as dicts; a DataError where one holds what Python has no value for, as text
    that is none.
    """
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1 and isinstance(error, UnicodeDecodeError):
            return [DataError(f"not valid UTF-8: {error.reason} at byte {error.start}")]
        if batch.num_rows == 1:
            return [DataError(f"cannot be read: {error}")]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]


def _open(path: str) -> tuple[BinaryIO, tuple[type[Exception], ...]]:
    """The uncompressed bytes of `path`, and the exceptions that reading them may raise."""
    if path.endswith(COMPRESSED) and os.path.isfile(path) and os.path.getsize(path) == 0:
        raise DataError(f"{path}: an empty file, which is no compressed one: was it copied whole?")
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
