"""How records are read: lines, compressed files, standard input, and how much at once."""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from megalite.data import parquet_rows, records
from megalite.data.documents import parse_document
from megalite.data.errors import DataError
from megalite.data.inputs import Part
from megalite.data.records import line_number, read_records
from megalite.data.zstd_stream import ZstdStream
from tests.data.corpora import lines


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
    first, _ = line_number(part, 1)
    monkeypatch.setattr(records, "_first_line_start", None)  # reading again would call it
    assert line_number(part, 5) == (first + 4, 0)


@pytest.mark.parametrize("kind", ["json", "text", "paragraphs"])
def test_a_moment_without_data_is_not_the_end_of_standard_input(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where who shares it made it non-blocking."""
    end, other = os.pipe()
    os.set_blocking(end, False)
    with open(end) as stream, open(other, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stream)

        def write_the_rest() -> None:
            with writer:
                writer.write(b"b\n")

        writer.write(b"a\n")
        later = threading.Timer(0.1, write_the_rest)
        later.start()
        found = [content for each in read_records(Part("-", kind), []) for content in each.contents]
        later.join()
    assert b"".join(found).split() == [b"a", b"b"]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.zst", "in.parquet"])
def test_an_input_that_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a file system that has gone: a second error, behind that which ends the run."""
    import pyarrow.parquet

    class Gone(io.FileIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EIO, "gone")

    def opened(path: str, *_: object, **__: object) -> io.BufferedReader:
        return io.BufferedReader(Gone(path))

    content = b"{}\n{}\n"
    (tmp_path / name).write_bytes(zstandard.compress(content) if name.endswith("zst") else content)
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / name)
    for module in (records, parquet_rows):
        monkeypatch.setattr(module, "open", opened, raising=False)
    kind = "parquet" if name.endswith("parquet") else "json"
    reader = read_records(Part(str(tmp_path / name), kind), ["text"], most_records=1)
    assert next(reader).number == 1
    reader.close()  # type: ignore[attr-defined]  # it is a generator


def test_a_text_takes_the_memory_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    tracemalloc.start()
    (found,) = read_records(Part(str(tmp_path / "a.txt"), "text"), ["text"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.contents == [b"text"]
    assert peak < 8 * records.READ_BYTES


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


def test_messages_are_short_and_printable() -> None:
    long_key = b'{"' + b"k" * 100_000 + b'": 1}'
    for line in (long_key, b"x" * 100_000, b'{"text": "a"}\r{"text": "\x1b[2J"}'):
        with pytest.raises(DataError) as error:
            parse_document(line, "json", ["text"])
        assert len(str(error.value)) < 250
        assert str(error.value).isprintable()
