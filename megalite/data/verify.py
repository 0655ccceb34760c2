"""Everything about a dataset that can be checked without its source."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megalite.data.dataset_files import DatasetFiles
from megalite.data.dataset_info import check_described, read_info
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import check_token_ids


class Summary(NamedTuple):
    """What was read."""

    documents: int
    sequences: int
    tokens: int
    largest_id: int
    crc32: int


def verify(
    prefix: str, vocab_size: int | None = None, read: Callable[[int, int], None] = lambda *_: None
) -> Summary:
    """Read all of a dataset: offsets, lengths and boundaries, every id, the checksum and counts of its
    description.

    `vocab_size`: by default the description's. `read` is called with the bytes of each piece of the tokens,
    and of all. Raises DataError at the first fault.
    """
    info = read_info(prefix)
    if vocab_size is None and info is not None:
        vocab_size = info.vocab_size
    with DatasetFiles(prefix) as files:  # checks every offset, length and boundary
        summary = _read(prefix, files, vocab_size, read)
    if info is not None:
        check_described(files.dataset, info, summary.crc32)
    return summary


def _read(
    prefix: str, files: DatasetFiles, vocab_size: int | None, read: Callable[[int, int], None]
) -> Summary:
    dataset = files.dataset
    total = dataset.tokens * np.dtype(dataset.dtype).itemsize
    check_token_ids(dataset)
    checksum, largest, start = 0, -1, 0
    for chunk in files.tokens():
        checksum = zlib.crc32(chunk.view(np.uint8).data, checksum)
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = start + int(np.argmax((chunk < 0) | (chunk >= (vocab_size or high + 1))))
            sequence = bisect_right(dataset.offsets, wrong * chunk.itemsize) - 1
            limit = "" if vocab_size is None else f" to {vocab_size - 1}"
            raise DataError(
                f"{prefix}.bin: token {wrong} (sequence {sequence}): expected an id from 0{limit}, "
                f"found {int(chunk[wrong - start])}"
            )
        largest = max(largest, high)
        start += len(chunk)
        read(chunk.nbytes, total)
    return Summary(dataset.documents, dataset.sequences, dataset.tokens, largest, checksum)
