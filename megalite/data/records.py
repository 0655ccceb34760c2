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
from typing import Any, NamedTuple

import numpy as np

from megalite import _C
from megalite.data.documents import Lines
from megalite.data.errors import DataError, lacks_package
from megalite.data.inputs import STDIN, Part, is_compressed
from megalite.data.parquet_rows import closing, read_rows
from megalite.data.zstd_stream import ZstdStream
from megalite.standard_streams import WaitingInput

READ_BYTES = 1 << 20
BUFFER_BYTES = 1 << 17  # fewer, or lines are read into a buffer first
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # in front of files of Windows
LONGEST_RECORD = 1 << 30  # bytes; a decompression bomb, or a file that is no text, is one endless line
COUNTED_BYTES = 1 << 30  # before a part, whose lines are counted to tell which line of the file is bad


class Records(NamedTuple):
    """What consecutive documents of one part are made from."""

    number: int
    """Line, document or row of the last, counted from 1 in the part."""
    offset: int
    """Bytes of the uncompressed input up to and including it; rows for Parquet."""
    size: int
    """Bytes of all."""
    contents: Sequence[Any]
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
    """The records of `part` behind the first `skip`, which end at `offset` as in `Records`; so many at a time
    that they reach `most_bytes` or `most_records`.

    Raises DataError naming the file and the last good record when it cannot be opened, read or decompressed,
    and for a record of more than LONGEST_RECORD.
    """
    if part.format == "parquet":
        yield from _grouped(_rows(part.path, keys, skip), most_bytes, most_records, skip)
        return
    opened, failures = _open(part.path)
    told: tuple[type[Exception], ...] = (*failures, _TooLong)
    number = skip
    try:
        with closing(opened) as stream:
            if part.format == "json":
                groups = _lines(stream, part, most_bytes, most_records, skip, offset)
            else:
                texts = _whole(stream) if part.format == "text" else _paragraphs(stream)
                groups = _grouped(islice(texts, skip, None), most_bytes, most_records, skip)
            for group in groups:
                number = group.number
                yield group
    except told as error:
        raise DataError(f"{part.path}: after record {number}: cannot be read: {error}") from None


def _grouped(
    records: Iterator[_Record], most_bytes: int, most_records: int, number: int
) -> Iterator[Records]:
    """`records`, which follow record `number`, in groups; those before an error are handed on before it."""
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


def line_number(part: Part, number: int) -> tuple[int, int]:
    """Line of the record `number` of `part`, and behind which byte of the file it is counted: 0, or where
    `part` begins when more than COUNTED_BYTES stand before it; fewer are read, once.
    """
    if part.start == 0:
        return number, 0
    before, behind = _lines_before(part.path, part.start)
    return before + number, behind


@functools.lru_cache(maxsize=16)
def _lines_before(path: str, start: int) -> tuple[int, int]:
    """How many lines begin before byte `start`, and behind which byte they are counted."""
    before = 0
    with open(path, "rb") as file:
        first = _first_line_start(file, start)
        if first > COUNTED_BYTES:
            return 0, first
        file.seek(0)
        left = first
        while left > 0:
            chunk = file.read(min(left, READ_BYTES))
            before += chunk.count(b"\n")
            left -= len(chunk)
    return before, 0


def _lines(
    stream: io.BufferedReader, part: Part, most_bytes: int, most_records: int, skip: int, offset: int
) -> Iterator[Records]:
    number, position = 0, 0
    if part.start > 0:
        position = _first_line_start(stream, part.start)
    if skip > 0 and not is_compressed(part.path):  # go on where the skipped lines end
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
    stream: io.BufferedReader, most_bytes: int, most_records: int, number: int, position: int, until: int
) -> Iterator[Records]:
    """The lines of `stream`, which stands at byte `position` behind line `number`, that begin before
    `until`.
    """
    for block in _blocks(stream, most_bytes):
        first, start = position, 0
        while start < len(block):
            end, count = _C.lines_within(block, start, most_records, until - first)
            if count == 0:
                return
            mark = len(BYTE_ORDER_MARK) if first + start == 0 and block[:3] == BYTE_ORDER_MARK else 0
            number, position = number + count, first + end
            if end > start + mark:  # or it is nothing but the mark: an empty file
                yield Records(number, position, end - start, Lines(block[start + mark : end], count))
            start = end
        if position >= until:  # what stands behind is not read: it may be a long line, or damaged
            return


def _blocks(stream: io.BufferedReader, size: int) -> Iterator[memoryview]:
    """Whole lines, half of `size` or more bytes at a time, and one that is longer by itself; those before an
    error are handed on before it. Raises _TooLong.
    """
    buffer = _room(2 * size)
    whole = filled = 0  # bytes of it in whole lines; with the beginning of the next
    failure: Exception | None = None
    ended = False
    while not ended:
        if filled + size > len(buffer):
            buffer = _room(3 * len(buffer) // 2, buffer[:filled])
        got, begun = 0, filled - whole
        try:
            got = stream.readinto1(buffer[filled : filled + size])
        except Exception as error:  # whatever a reader raises
            failure = error
        ended = got == 0
        first, last = _C.line_ends(buffer[filled : filled + got])
        if begun + (first or got) > LONGEST_RECORD:
            failure, ended, got, last = _TooLong("line"), True, 0, 0
        elif first > 0 and begun >= size:  # then no whole line is before it
            yield buffer[: filled + first]
            rest = buffer[filled + first : filled + got]
            buffer, filled, got, last = _room(2 * size, rest), 0, len(rest), last - first
        if last > 0:
            whole = filled + last
        filled += got
        if whole > 0 and (2 * max(whole, filled - whole) >= size or ended):
            yield buffer[:whole]
            buffer, filled, whole = _room(2 * size, buffer[whole:filled]), filled - whole, 0
    if failure is not None:
        raise failure
    if filled > 0:
        yield buffer[:filled]


def _room(size: int, begin: memoryview | bytes = b"") -> memoryview:
    """`size` bytes of memory, of which the first are `begin`."""
    room = np.empty(size, dtype=np.uint8).data
    room[: len(begin)] = begin
    return room


def _first_line_start(file: io.BufferedReader, start: int) -> int:
    """Where the first line begins that begins at byte `start` or behind; the file stands there."""
    file.seek(start - 1)
    return start - 1 + len(next(_all_lines(file), b""))


def _all_lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """Those of `stream`. Raises _TooLong."""
    for content in iter(functools.partial(stream.readline, LONGEST_RECORD + 1), b""):
        if len(content) > LONGEST_RECORD:
            raise _TooLong("line")
        yield content


class _TooLong(DataError):
    def __init__(self, what: str) -> None:
        super().__init__(f"the {what} that follows has more than {LONGEST_RECORD:,} bytes")


def _whole(stream: io.BufferedReader) -> Iterator[_Record]:
    whole = io.BytesIO()
    while piece := stream.read(READ_BYTES):
        whole.write(piece)
        if whole.tell() > LONGEST_RECORD:
            raise _TooLong("text")
    content = whole.getvalue()
    yield _Record(len(content), len(content), content.removeprefix(BYTE_ORDER_MARK))


def _paragraphs(stream: io.BufferedReader) -> Iterator[_Record]:
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


def _rows(path: str, keys: Sequence[str], skip: int) -> Iterator[_Record]:
    for number, (row, size) in enumerate(read_rows(path, keys, skip), skip + 1):
        yield _Record(number, size, row)


def _open(path: str) -> tuple[io.BufferedReader, tuple[type[Exception], ...]]:
    """The uncompressed bytes of `path`, and the exceptions that reading them may raise."""
    if is_compressed(path) and os.path.isfile(path) and os.path.getsize(path) == 0:
        raise DataError(f"{path}: an empty file, which is no compressed one: was it copied whole?")
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise DataError("--input -: standard input is closed")
            return io.BufferedReader(WaitingInput(sys.stdin.fileno()), BUFFER_BYTES), (OSError,)
        if path.lower().endswith(".gz"):
            return io.BufferedReader(gzip.GzipFile(path, "rb"), BUFFER_BYTES), (OSError, EOFError, zlib.error)
        raw = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the reader
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None
    file: io.BufferedReader = io.BufferedReader(raw, BUFFER_BYTES)
    if not path.lower().endswith((".zst", ".zstd")):
        return file, (OSError,)
    try:
        import zstandard
    except ImportError as error:
        raise lacks_package(f"{path}: reading .zst", "zstandard", error) from None
    return io.BufferedReader(ZstdStream(file), BUFFER_BYTES), (OSError, EOFError, zstandard.ZstdError)
