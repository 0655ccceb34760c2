"""Records to documents: for each key the texts of one document."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import orjson

from megalite import _C
from megalite.data.errors import DataError

ONE_A_LINE = "one object a line is read: jq -c '.[]' writes so what an array holds, jq -c . what objects do"
GIT_LFS = b"version https://git-lfs.github.com/"
LARGEST_POINTER = 1024  # bytes, by the specification of Git LFS
OTHER_FORMATS = {  # by their first bytes
    b"\x1f\x8b": "it is gzip: let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "it is zstd: let its name end in .zst",
    b"PAR1": "it is Parquet: let its name end in .parquet, or give --input-format parquet",
    b"ARROW1": "it is Arrow: datasets.Dataset.to_parquet writes what is read",
    b"\xff\xff\xff\xff": "it is Arrow: datasets.Dataset.to_parquet writes what is read",
    GIT_LFS: "it is a pointer of Git LFS, without the data: git lfs pull",
    b"\xff\xfe": "it is UTF-16: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "it is UTF-16: iconv -f UTF-16 -t UTF-8",
}


class OtherFormatError(DataError):
    """What was read is of another format than was expected, so that no document is to be left out for it."""


class Lines(Sequence[bytes]):
    """Consecutive lines, as they stand in a file."""

    def __init__(self, block: bytes | memoryview, count: int) -> None:
        """`count`: how many lines `block` has."""
        self.block = block
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(io.BytesIO(self.block))

    def __getitem__(self, line: int) -> bytes:  # type: ignore[override]  # slices are not needed
        return [*self][line]


def parse_document(
    content: bytes | dict[str, object] | DataError, kind: str, keys: Sequence[str], first: bool = False
) -> list[list[str]]:
    """The texts under each of `keys` in one record; a key may be `outer.inner`.

    `kind`: "json" for a JSON line, "text" for UTF-8 text (its key is `text`), "parquet" for a row. A
    string is a document of one sequence, a list of strings one of several. `first`: of its file, which is
    where a pointer of Git LFS is no text that shows one. Raises DataError.
    """
    if isinstance(content, DataError):
        raise content
    if isinstance(content, dict):
        record: object = content
    elif kind == "json":
        record = _parse_json(content)
    else:
        try:
            if first and content.startswith(GIT_LFS) and len(content) < LARGEST_POINTER:
                raise _refusal("no text", content)
            record = {"text": content.decode("utf-8")}
        except UnicodeDecodeError as error:
            what = f"not valid UTF-8: {error.reason} at byte {error.start}"
            raise _refusal(what, content) from None
    if not isinstance(record, dict):
        what = f'expected a JSON object such as {{"text": ...}}, found {_kind(record)}'
        raise OtherFormatError(f"{what}; {ONE_A_LINE}") if isinstance(record, list) else DataError(what)
    return [_texts(_lookup(record, key), key) for key in keys]


def parse_strings(lines: Lines, keys: Sequence[str]) -> list[list[str]] | None:
    """For each of `keys` the texts of JSON lines, one a line, as `parse_document` has them. None unless every
    line has a string under each key, as most do, and nothing unusual beside it.
    """
    texts: list[list[str]] | None = _C.texts_of_lines(lines.block, keys)
    return texts


def _parse_json(content: bytes) -> object:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if not content.strip():
            raise DataError("expected a JSON object, found a blank line") from None
        try:  # as in Megatron-LM: Python's JSON has NaN, numbers beyond float64, halves of surrogate pairs
            return json.loads(content.decode())
        except (ValueError, RecursionError):
            what = f"not valid JSON: {error}: {_excerpt(content)}"
            raise _refusal(what, content) from None


def _refusal(what: str, content: bytes) -> DataError:
    """Of `content`, with what to do where it begins another format than JSON lines or UTF-8."""
    for mark, advice in OTHER_FORMATS.items():
        if content.startswith(mark):
            return OtherFormatError(f"{what}; {advice}")
    if content.strip() in (b"{", b"["):
        return OtherFormatError(f"{what}; {ONE_A_LINE}")
    return DataError(what)


def _lookup(record: dict[str, object], key: str) -> object:
    if key in record:
        return record[key]
    value: object = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise missing_key(key, record)
        value = value[part]
    return value


def missing_key(key: str, known: Iterable[str]) -> DataError:
    """What to raise for a record that has the keys `known` only."""
    keys = ", ".join(repr(key[:40]) for key in islice(map(str, known), 10))
    return DataError(f"no key {key!r}; the keys are {keys or 'none'}")


def _texts(value: object, key: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"key {key!r}: expected a string or a list of strings, found {_kind(value)}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"key {key!r}: holds {half}, half of a surrogate pair, which is no text") from None
    return texts


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    names |= {bytes: "bytes, which may be no text: cast the column to strings where they are UTF-8"}
    return names.get(type(value), f"a value of type {type(value).__name__}")  # columns have more than JSON


def _excerpt(content: bytes) -> str:
    """The beginning, in quotes, with what cannot be printed as escapes."""
    text = content[:400].strip().decode("utf-8", errors="backslashreplace")
    return repr(text if len(text) <= 80 else text[:77] + "...")
