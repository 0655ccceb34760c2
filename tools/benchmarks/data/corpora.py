"""Made-up datasets and text to measure with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import orjson

from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter

SEQ = 4096
SEED = 1234
EOD = 1


def write_lengths(prefix: Path, documents: int, mean: int) -> str:
    """A dataset with lengths drawn around `mean`; each document is zeros and then EOD."""
    lengths = np.random.default_rng(0).integers(1, 2 * mean, documents).astype(np.int32)
    with DatasetWriter(str(prefix), "uint16", sync=False) as writer:
        writer.add_sequences(lengths)
        writer.add_documents(np.ones(documents, dtype=np.int64))
        for part in np.array_split(lengths, max(1, documents * mean >> 22)):
            ends = np.cumsum(part, dtype=np.int64)
            tokens = np.zeros(ends[-1], dtype=np.uint16)
            tokens[ends - 1] = EOD
            writer.add_tokens(tokens)
    return str(prefix)


def check_texts(corpus: Path) -> None:
    """Raises DataError where a line is none that every engine is measured on, an object with one text, and
    where there is none.
    """
    if not corpus.stat().st_size:
        raise DataError(f"{corpus}: holds no text")
    with corpus.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = orjson.loads(line)["text"]
            except (orjson.JSONDecodeError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{corpus}:{number}: expected a JSON object, without NaN, with a text under the key text"
                )


def write_shuffled(source: Path, path: Path, size: int) -> int:
    """The lines of `source` again and again, each time in another order, until `path` has `size` bytes;
    returns its bytes.
    """
    lines = source.read_bytes().splitlines(keepends=True)
    shuffle, written = random.Random(0), 0
    with path.open("wb") as file:
        while written < size:
            shuffle.shuffle(lines)
            written += sum(map(len, lines))
            file.writelines(lines)
    return written
