"""Small datasets and configurations for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.config.schema import DataConfig
from megalite.data.indexed_dataset import DatasetWriter

GOLDENS = Path(__file__).parent / "goldens"


def write_dataset(
    prefix: Path, lengths: Sequence[int], vocab_size: int = 1000, seed: int = 0, dtype: str = "uint16"
) -> str:
    """Documents of random tokens with the given lengths; returns the prefix."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths))
    with DatasetWriter(str(prefix), dtype, sync=False) as writer:
        writer.add(tokens, np.array(lengths, dtype=np.int32))
    return str(prefix)


def numbered_dataset(prefix: Path, documents: int, length: int, first: int = 0) -> str:
    """Token t of document d is first + d * length + t: each token occurs once."""
    with DatasetWriter(str(prefix), "int32", sync=False) as writer:
        writer.add(first + np.arange(documents * length), np.full(documents, length, dtype=np.int32))
    return str(prefix)


def data_config(cache: Path, *data_path: str, split: str = "1,0,0", **fields: object) -> DataConfig:
    return DataConfig(data_path=data_path, split=split, data_cache_path=str(cache), **fields)  # type: ignore[arg-type]


class Words:
    """The vocabulary of a dataset without text."""

    def __init__(self, vocab_size: int, eod: int, identity: str | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.identity = identity
