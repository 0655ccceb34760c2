"""How records are read from files: lines, compressed files, rows of Parquet, and how much at once."""

from __future__ import annotations

import datetime
import gzip
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megalite.data import records
from megalite.data.documents import parse_document
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import Part, find_inputs
from megalite.data.records import line_number, read_records
from megalite.data.zstd_stream import ZstdStream
from tests.data.corpora import lines, run


@pytest.mark.parametrize(
    ("name", "kind", "content", "start", "what"),
    [
        ("a.jsonl", "json", b"x" * 150, 0, "line"),
        ("a.jsonl", "json", b"x" * 150, 20, "line"),
        ("a.jsonl.gz", "json", gzip.compress(bytes(10_000_000)), 0, "line"),
        ("a.txt", "text", b"x\n" * 75, 0, "text"),
        ("a.txt", "paragraphs", b"x\n" * 75, 0, "paragraph"),
    ],
)
def test_a_record_without_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    content: bytes,
    start: int,
    what: str,
) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 100)
    (tmp_path / name).write_bytes(content)
    message = f"{name}: after record 0: cannot be read: the {what} that follows has more than 100 bytes"
    with pytest.raises(DataError, match=message):
        list(read_records(Part(str(tmp_path / name), kind, start), ["text"]))


def test_the_lines_before_a_part_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(lines(tmp_path / "in.jsonl", [str(i) for i in range(100)]), "json", start=400)
    first = line_number(part, 1)
    monkeypatch.setattr(records, "_first_line_start", None)  # reading again would call it
    assert line_number(part, 5) == first + 4


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_of_no_bytes_is_not_an_empty_one(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl.{suffix}").touch()
    with pytest.raises(DataError, match=r"an empty file, which is no compressed one"):
        list(read_records(Part(str(tmp_path / f"a.jsonl.{suffix}"), "json"), ["text"]))


def test_a_frame_that_unpacks_to_much_is_read_in_pieces(tmp_path: Path) -> None:
    size = 256 << 20
    compressor = zstandard.ZstdCompressor().compressobj()
    pieces = [compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    (tmp_path / "a.zst").write_bytes(b"".join([*pieces, compressor.flush()]))
    stream = ZstdStream((tmp_path / "a.zst").open("rb"))
    buffer, found = bytearray(1 << 20), 0
    tracemalloc.start()
    while count := stream.readinto(buffer):
        found += count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stream.close()
    assert found == size
    assert peak < size  # in pieces of 32 KiB, all of it at once


def test_large_rows_of_parquet_come_a_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": str(i) * 200_000, "n": i} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    at_once = []
    convert = records._rows

    def counted(batch: pyarrow.RecordBatch) -> list[object]:
        at_once.append(batch.num_rows)
        return convert(batch)

    monkeypatch.setattr(records, "_rows", counted)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == [row["text"] for row in rows]
    assert at_once == [5, 5]  # of 200 KB each to 1 MiB
    mixed = pyarrow.table({"text": ["a"] * 300 + ["b" * 400_000] * 4})
    pyarrow.parquet.write_table(mixed, tmp_path / "a.parquet", use_dictionary=False)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == mixed["text"].to_pylist()
    assert max(group.size for group in found) < 2_000_000


def test_a_column_whose_name_is_no_utf8(tmp_path: Path) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "name": [1]}), tmp_path / "in.parquet")
    content = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(content.replace(b"name", b"n\xe4me"))
    with pytest.raises(DataError, match=r"in\.parquet: after row 0: cannot be read: 'utf-8' codec"):
        list(read_records(Part(str(tmp_path / "in.parquet"), "parquet"), ["text"]))


def test_a_row_that_python_has_no_value_for(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    when = pyarrow.array([0, 1 << 62], pyarrow.timestamp("us"))  # the second is behind the year 9999
    assert when[0].as_py() == datetime.datetime(1970, 1, 1)
    meta = pyarrow.StructArray.from_arrays([pyarrow.array(["a", "b"]), when], ["note", "when"])
    pyarrow.parquet.write_table(pyarrow.table({"meta": meta}), tmp_path / "a.parquet")
    (found,) = read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["meta"])
    first, second = found.contents
    assert first["meta"]["note"] == "a"
    assert str(second).startswith("cannot be read: ")


def test_text_of_a_column_that_is_none(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    offsets, values = np.array([0, 1, 3, 4], dtype=np.int32), b"a\xff\xfeb"
    buffers = [None, pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(values)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in.parquet")
    inputs = find_inputs([str(tmp_path / "in.parquet")])
    with pytest.raises(DataError, match=r"in\.parquet:2: not valid UTF-8"):
        run(inputs, tmp_path / "stop")
    run(inputs, tmp_path / "skip", skip_errors=True)
    dataset = open_dataset(str(tmp_path / "skip_text_document"))
    assert dataset.stream().tolist() == list(b"ab")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"x"]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="found a value of type bytes"):
        run(inputs, tmp_path / "bytes")
    assert [record.number for record in read_records(inputs[0], ["text"])] == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["body", "id"], r"in\.parquet:1: no key 'text'; the keys are 'body', 'id'"),
        (["text", "text"], r"in\.parquet: has several columns 'text', of which one only would be read"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, columns: Sequence[str], message: str) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=columns)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(DataError, match=message):
        run(find_inputs([str(tmp_path / "in.parquet")]), tmp_path / "out")


def test_messages_are_short_and_printable() -> None:
    long_key = b'{"' + b"k" * 100_000 + b'": 1}'
    for line in (long_key, b"x" * 100_000, b'{"text": "a"}\r{"text": "\x1b[2J"}'):
        with pytest.raises(DataError) as error:
            parse_document(line, "json", ["text"])
        assert len(str(error.value)) < 250
        assert str(error.value).isprintable()
