"""The small JSON beside an `.idx` that says where its ids come from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import orjson

from megalite import __version__
from megalite.data.errors import DataError, is_file, reading, writing
from megalite.data.indexed_dataset import DatasetWriter, IndexedDataset
from megalite.data.inputs import Part, printable
from megalite.data.tokenizer import Tokenizer

FORMAT = 1
WHAT = {  # the types of the fields, in words
    "int": "an integer",
    "int | None": "an integer or null",
    "str": "a string",
    "str | None": "a string or null",
    "tuple[str, ...]": "a list of strings",
    "tuple[int, int] | None": "two integers or null",
}
MOST_BYTES = 256 << 20  # of a description
LISTED_BYTES = 16 << 20  # of the names of sources; JSON has up to six bytes for one
LEFT_OUT = re.compile(r"\.\.\. and ([\d,]+) more")


@dataclass(frozen=True)
class DatasetInfo:
    """Megatron-LM's own datasets have none; everything works without it."""

    format: int
    megalite: str
    """Version that wrote it."""
    tokenizer: str | None
    """Hash of its vocabulary; None for NullTokenizer."""
    vocab_size: int
    eod: int | None
    """Id behind each document, or None when none was appended."""
    dtype: str
    tokens: int
    sequences: int
    documents: int
    crc32: int
    """Checksum of the .bin."""
    key: str | None
    """None where datasets of several were merged."""
    sources: tuple[str, ...]
    """Of very many the first, and how many more there are."""
    partition: tuple[int, int] | None = None
    """(index, partitions) when this is one share of several, to be merged."""
    corpus: str | None = None
    """Hash of the names, sizes and formats of all inputs, of which this is a share."""
    options: str | None = None
    """What beside the tokenizer's vocabulary decided how text became ids; None where that differs inside."""
    library: str | None = None
    """Version of what encoded, or what encoded was compared with; None where it is not known or differs."""
    begins_in: str | None = None
    """Of a share, as `cut_hashes`: hash of parts of the file inside which it begins, or None."""
    ends_in: str | None = None
    """The same of its end."""
    work: str | None = None
    """Of a share, hash of all that decides it, as `RunState.work`: whether the same command would make it."""

    @staticmethod
    def of(
        writer: DatasetWriter,
        dtype: str,
        tokenizer: Tokenizer,
        eod: int | None,
        inputs: Sequence[Part],
        key: str,
        partition: tuple[int, int] | None,
        corpus: str | None,
        cuts: tuple[str | None, str | None],
        work: str | None,
    ) -> DatasetInfo:
        state = writer.state
        return DatasetInfo(
            format=FORMAT,
            megalite=__version__,
            tokenizer=tokenizer.identity,
            vocab_size=tokenizer.vocab_size,
            eod=eod,
            dtype=dtype,
            tokens=state.tokens,
            sequences=state.sequences,
            documents=state.documents,
            crc32=state.checksum,
            key=key,
            sources=listed_sources(printable(part.path) for part in inputs),
            partition=partition,
            corpus=corpus,
            options=tokenizer.options,
            library=", ".join(tokenizer.versions) or None,
            begins_in=cuts[0],
            ends_in=cuts[1],
            work=work,
        )


def listed_sources(sources: Iterable[str]) -> tuple[str, ...]:
    """The first LISTED_BYTES of `sources`, which may be such lists one behind another, each once, and the
    number of the others.
    """
    listed: dict[str, None] = {}
    size = others = 0
    for source in sources:
        if (more := LEFT_OUT.fullmatch(source)) is not None:
            others += int(more[1].replace(",", ""))
        elif source not in listed:
            size += len(source.encode()) + 8  # quotes, comma, line
            if size > LISTED_BYTES:
                others += 1
            else:
                listed[source] = None
    return (*listed, f"... and {others:,} more") if others else tuple(listed)


def write_info(prefix: str, info: DatasetInfo) -> None:
    """Put it beside the partial files of a dataset, for `DatasetWriter.publish`; it is on the disk then."""
    temporary = Path(f"{prefix}.json.partial")
    with writing(temporary), temporary.open("wb") as file:
        file.write(orjson.dumps(asdict(info), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())


def read_info(prefix: str) -> DatasetInfo | None:
    """What the JSON beside `prefix.idx` says; None when there is none. Raises DataError for a damaged
    one, one that is something else, and where the file system fails.
    """
    path = Path(f"{prefix}.json")
    with reading(path):
        return _read(path) if is_file(path) else None


def info_of(dataset: IndexedDataset) -> DatasetInfo | None:
    """`read_info` of a dataset that is open, which is held against it. Raises DataError."""
    info = read_info(dataset.prefix)
    if info is not None:
        check_described(dataset, info)
    return info


def check_described(dataset: IndexedDataset, info: DatasetInfo, checksum: int | None = None) -> None:
    """Raises DataError where `dataset` is not what its description says, `checksum` being the CRC-32 of its
    tokens: another one may have been copied onto it.
    """
    counts = ("documents", "sequences", "tokens", "dtype")
    found = {name: getattr(dataset, name) for name in counts}
    if checksum is not None:
        found["crc32"] = checksum
    for name, value in found.items():
        expected = getattr(info, name)
        if value != expected:
            prefix = dataset.prefix
            raise DataError(
                f"{prefix}: {name}: {prefix}.json says {expected}, found {value}: the two do not belong "
                f"together; bring back the .bin and .idx that it describes, or remove {prefix}.json where "
                "these are the right ones"
            )


def _read(path: Path) -> DatasetInfo:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        content = orjson.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise TypeError("expected an object")
        if isinstance(found := content.get("format"), int) and found != FORMAT:
            raise ValueError(f"its format is {found}, and this version knows {FORMAT}")
        lists = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        info = DatasetInfo(**{**content, **lists})
        _check_types(info)
        return info
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as a dataset's description: {error}; move it away to go on without"
        ) from None


def _check_types(info: DatasetInfo) -> None:
    """Raises TypeError naming the first field that holds what it cannot."""
    for field in fields(info):
        value, declared = getattr(info, field.name), str(field.type)
        kind = str if "str" in declared else int
        if declared.startswith("tuple"):
            right = isinstance(value, tuple) and all(isinstance(item, kind) for item in value)
            right = right and (kind is str or len(value) == 2)
        else:
            right = isinstance(value, kind)
        if not right and not (value is None and "None" in declared):
            found = list(value) if isinstance(value, tuple) else value
            raise TypeError(f"{field.name}: expected {WHAT[declared]}, found {found!r:.80}")
