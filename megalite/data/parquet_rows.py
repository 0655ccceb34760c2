"""Reads the rows of a Parquet file, a few at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.data.documents import missing_key
from megalite.data.errors import DataError, lacks_package

READ_BYTES = 1 << 20
ROWS_AT_ONCE = 256  # or fewer of large ones


def read_rows(path: str, keys: Sequence[str], skip: int = 0) -> Iterator[tuple[Any, int]]:
    """The rows of `path` behind the first `skip`, each with its size in bytes: a dict of the columns that
    hold `keys`, or the DataError that making it raised.

    Raises DataError naming the file and the last good row when it cannot be read whole.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise lacks_package(f"{path}: reading .parquet", "pyarrow", error) from None
    try:  # not by pyarrow, which has a meaning for `~` and none for names that are no UTF-8
        stream = open(path, "rb")  # noqa: SIM115 - closed by `closing`
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror or error}") from None
    number = 0
    try:
        how = {"buffer_size": READ_BYTES, "page_checksum_verification": True}
        with closing(stream), pyarrow.parquet.ParquetFile(stream, **how) as file:
            known = file.schema_arrow.names
            paths = [file.schema.column(i).path for i in range(len(file.schema))]
            absent = [missing_key(key, known) for key in keys if not {key, _outer(key)}.intersection(known)]
            columns = sorted({key if _leads_to(key, paths) else _outer(key) for key in keys})
            if double := [key for key in columns if known.count(key if key in known else _outer(key)) > 1]:
                raise DataError(f"{path}: has several columns {double[0]!r}, of which one only would be read")
            for batch in _batches(file, columns):
                if number + batch.num_rows <= skip:
                    number += batch.num_rows
                    continue
                for row, size in _sized_rows(batch):
                    number += 1
                    if number > skip:
                        yield absent[0] if absent else row, size
    # UnicodeDecodeError is of a column's name.
    except (OSError, UnicodeDecodeError, _Missing, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: after row {number}: cannot be read: {error}") from None


@contextlib.contextmanager
def closing(stream: Any) -> Iterator[Any]:
    """Closes `stream`, which was read: an error of closing it tells nothing that reading has not told."""
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):
            stream.close()


class _Missing(DataError):
    def __init__(self, found: int, expected: int, of: str) -> None:
        super().__init__(
            f"it holds {found:,} rows{of}, but its metadata say {expected:,}: the file is damaged"
        )


def _outer(key: str) -> str:
    return key.split(".")[0]


def _leads_to(key: str, paths: Sequence[str]) -> bool:
    """Whether one of these columns is `key` or a part of it."""
    return any(f"{path}.".startswith(f"{key}.") for path in paths)


def _batches(file: Any, columns: Sequence[str]) -> Iterator[Any]:
    """RecordBatches of all rows of a ParquetFile. Raises _Missing where a group, or the whole, has another
    number of rows than it should.
    """
    total = 0
    for i in range(file.num_row_groups):
        group, found = file.metadata.row_group(i), 0
        for batch in file.iter_batches(_rows_at_once(group), [i], columns):
            found += batch.num_rows
            yield batch
        if found != group.num_rows:
            raise _Missing(found, group.num_rows, f" in group {i}")
        total += found
    if total != file.metadata.num_rows:
        raise _Missing(total, file.metadata.num_rows, "")


def _rows_at_once(group: Any) -> int:
    """How many rows of a row group with this metadata have some READ_BYTES, with all of its columns: asking
    for the size of a single one that is damaged or encrypted aborts the process, as pyarrow 26 does not catch
    what is thrown there.
    """
    return max(1, min(ROWS_AT_ONCE, READ_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def _sized_rows(batch: Any) -> Iterator[tuple[Any, int]]:
    """The rows of a RecordBatch with the size of each; READ_BYTES are made at once, or one row."""
    step = max(1, READ_BYTES * batch.num_rows // max(batch.nbytes, 1))
    longest = max(map(_longest, batch.columns), default=0)
    if longest > 0:
        step = max(1, min(step, READ_BYTES // longest))
    for first in range(0, batch.num_rows, step):
        part = batch.slice(first, step)
        part = _decoded(part) if longest > 0 else part
        size = part.nbytes // part.num_rows
        yield from ((row, size) for row in _rows(part))


def _longest(column: Any) -> int:
    """Bytes of the longest text of a dictionary, as pandas writes categories, which each row may repeat; 0 of
    other columns.
    """
    import pyarrow.compute

    if not isinstance(column, pyarrow.DictionaryArray) or not len(column.dictionary):
        return 0
    try:
        return int(pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py() or 0)
    except pyarrow.ArrowNotImplementedError:  # of numbers
        return 0


def _decoded(batch: Any) -> Any:
    """`batch` with the texts of dictionaries in each row, so that its size is theirs."""
    import pyarrow

    columns = [
        column.dictionary_decode() if isinstance(column, pyarrow.DictionaryArray) else column
        for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


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
