"""Mutated datasets are refused or read inside their files: never a crash, never a byte from elsewhere.

MEGALITE_FUZZ_CASES sets how many mutations are tried.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np

from megalite import _C
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import IndexedDataset
from tests.data.corpora import write_dataset

CASES = int(os.environ.get("MEGALITE_FUZZ_CASES", "100000"))
INTERESTING = [0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF]
INTERESTING += [2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
FIELDS = [(9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q")]


def mutate(content: bytes, sequences: int, documents: int, rng: random.Random) -> bytes:
    """One to three changes, of which some may undo what the checks look for."""
    data = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        kind, value = rng.randrange(7), rng.choice(INTERESTING)
        if kind == 0 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:
            _write(data, *rng.choice(FIELDS), value)
        elif kind == 2:
            _write(data, 34 + 4 * rng.randrange(sequences), "<I", value)
        elif kind == 3:
            _write(data, 34 + 4 * sequences + 8 * rng.randrange(sequences), "<Q", value)
        elif kind == 4:
            _write(data, 34 + 12 * sequences + 8 * rng.randrange(documents + 1), "<Q", value)
        elif kind == 5:
            del data[rng.randrange(len(data) + 1) :]
        else:
            data += rng.randbytes(rng.randrange(1, 40))
    return bytes(data)


def _write(data: bytearray, offset: int, form: str, value: int) -> None:
    size = struct.calcsize(form)
    if offset + size <= len(data):
        struct.pack_into(form, data, offset, value % 256**size)


def read_everything(dataset: IndexedDataset) -> None:
    """Any read outside the files would be a segmentation fault or bytes that are not in them."""
    stream = dataset.stream()
    total = 0
    for i in range(dataset.sequences):
        sequence = dataset.sequence(i)
        total += len(sequence)
        assert len(sequence) == dataset.lengths[i]
    assert total == len(stream) == dataset.tokens
    assert dataset.boundaries[0] == 0
    assert dataset.boundaries[-1] == dataset.sequences
    if total > 9 and stream.dtype.kind in "iu":
        documents = np.arange(dataset.sequences, dtype=np.int32)
        index = np.zeros(((total - 1) // 8 + 1, 2), dtype=np.int32)
        _C.fill_sample_index(index, dataset, documents, 8)
        reader = _C.SampleReader(dataset, documents, index, np.arange(len(index) - 1, dtype=np.uint32), 8)
        samples = np.arange(len(index) - 1)
        _C.read_samples(
            [reader], np.zeros_like(samples), samples, np.empty((len(samples), 9), dtype=np.int64)
        )


def test_mutated_datasets(tmp_path: Path) -> None:
    rng = random.Random(20261129)
    prefix = Path(write_dataset(tmp_path / "d", [3, 0, 7, 1, 5, 12], seed=1))
    index = prefix.with_suffix(".idx").read_bytes()
    outcomes: Counter[str] = Counter()
    for _ in range(CASES):
        with prefix.with_suffix(".idx").open("r+b") as file:  # in place: ten times faster than anew
            file.write(mutate(index, 6, 6, rng))
            file.truncate()
        try:
            dataset = IndexedDataset(str(prefix))
        except DataError as error:
            outcomes["refused" if str(prefix) in str(error) else "refused without the file's name"] += 1
            continue
        read_everything(dataset)
        outcomes["read"] += 1
    assert set(outcomes) == {"refused", "read"}
    assert outcomes["refused"] > 0.8 * CASES
