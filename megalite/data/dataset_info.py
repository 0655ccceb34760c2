"""The small JSON beside an `.idx` that says where its ids come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from megalite import __version__
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter
from megalite.data.inputs import Part
from megalite.data.tokenizer import Tokenizer

FORMAT = 1


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
    key: str
    sources: tuple[str, ...]
    partition: tuple[int, int] | None = None
    """(index, partitions) when this is one share of several, to be merged."""

    @staticmethod
    def of(
        writer: DatasetWriter,
        dtype: str,
        tokenizer: Tokenizer,
        eod: int | None,
        inputs: Sequence[Part],
        key: str,
        partition: tuple[int, int] | None,
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
            sources=tuple(part.path for part in inputs),
            partition=partition,
        )


def write_info(prefix: str, info: DatasetInfo) -> None:
    path = Path(f"{prefix}.json")
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(orjson.dumps(asdict(info), option=orjson.OPT_INDENT_2))
    temporary.rename(path)


def read_info(prefix: str) -> DatasetInfo | None:
    """What the JSON beside `prefix.idx` says; None when there is none. Raises DataError for a damaged
    one.
    """
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        content = orjson.loads(path.read_bytes())
        partition = content["partition"] and tuple(content["partition"])
        return DatasetInfo(**{**content, "sources": tuple(content["sources"]), "partition": partition})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path}: cannot be read as a dataset's description: {error}; move it away to go on without"
        ) from None
