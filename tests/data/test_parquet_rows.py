"""How rows are read from Parquet files: how much at once, columns, damage, encryption, names."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.data import parquet_rows
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import Part, find_inputs
from megalite.data.records import read_records
from tests.data.corpora import run


def test_large_rows_of_parquet_come_a_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": str(i) * 200_000, "n": i} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    at_once = []
    convert = parquet_rows._rows

    def counted(batch: pyarrow.RecordBatch) -> list[object]:
        at_once.append(batch.num_rows)
        return convert(batch)

    monkeypatch.setattr(parquet_rows, "_rows", counted)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == [row["text"] for row in rows]
    assert at_once == [5, 5]  # of 200 KB each to 1 MiB
    mixed = pyarrow.table({"text": ["a"] * 300 + ["b" * 400_000] * 4})
    pyarrow.parquet.write_table(mixed, tmp_path / "a.parquet", use_dictionary=False)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == mixed["text"].to_pylist()
    assert max(group.size for group in found) < 2_000_000


def test_texts_that_rows_repeat_count_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of categories, as pandas has, holds each of them once."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.array(["x" * 100_000] * 300 + ["y"]).dictionary_encode()
    table = pyarrow.table({"text": text, "kind": pyarrow.array([1, 2, 3] * 100 + [4]).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    made: list[int] = []
    rows = parquet_rows._rows

    def counted(batch: pyarrow.RecordBatch) -> list[object]:
        made.append(batch.num_rows)
        return rows(batch)

    monkeypatch.setattr(parquet_rows, "_rows", counted)
    found = list(parquet_rows.read_rows(str(tmp_path / "a.parquet"), ["text"]))
    assert [len(row["text"]) for row, _ in found] == [100_000] * 300 + [1]
    assert sum(size for _, size in found) > 300 * 100_000
    assert max(made) <= 10


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
    with pytest.raises(DataError, match="found bytes, which may be no text: cast the column to strings"):
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


@pytest.mark.parametrize(
    ("intact", "damaged", "message"),
    [
        (b"\x16x\x19", b"\x16z\x19", "it holds 60 rows, but its metadata say 61"),
        (b"\x16(&", b"\x16\x08&", "it holds 44 rows, but its metadata say 60"),  # a group of 4 instead of 20
        (b"&\x00\x1c", b"&\x00\x14", "it holds 0 rows in group 0, but its metadata say 20"),
    ],
)
def test_a_damaged_footer_loses_no_rows(tmp_path: Path, intact: bytes, damaged: bytes, message: str) -> None:
    import pyarrow.parquet

    path = tmp_path / "in.parquet"
    table = pyarrow.table({"text": [f"row {i}" for i in range(60)], "n": list(range(60))})
    pyarrow.parquet.write_table(table, path, row_group_size=20)
    content = path.read_bytes()
    assert intact in content
    path.write_bytes(content.replace(intact, damaged, 1))
    with pytest.raises(DataError, match=rf"in\.parquet: after row \d+: cannot be read: {message}"):
        list(read_records(Part(str(path), "parquet"), ["text"]))


def test_a_column_beside_an_encrypted_one(tmp_path: Path) -> None:
    import pyarrow.parquet
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    configuration = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=True
    )
    properties = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(), configuration
    )
    table = pyarrow.table({"text": ["a", "b"], "other": ["x", "y"]})
    path = str(tmp_path / "in.parquet")
    pyarrow.parquet.write_table(table, path, encryption_properties=properties)
    (found,) = read_records(Part(path, "parquet"), ["other"])
    assert found.contents == [{"other": "x"}, {"other": "y"}]
    with pytest.raises(DataError, match=r"in\.parquet: after row 0: cannot be read: Cannot decrypt"):
        list(read_records(Part(path, "parquet"), ["text"]))


@pytest.mark.parametrize("name", ["~/in.parquet", "\udcff.parquet", "~nobody.parquet"])
def test_a_name_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("~").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["another"]}), "in.parquet")
    with open(name, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    (found,) = read_records(Part(name, "parquet"), ["text"])
    assert found.contents == [{"text": "a"}]
    Path(name).unlink()
    with pytest.raises(DataError, match=r"parquet: cannot be opened: No such file or directory"):
        list(read_records(Part(name, "parquet"), ["text"]))
