"""Megatron's indexed dataset: tokens in `PREFIX.bin`, where each document lies in `PREFIX.idx`.

Every header field, length, offset and boundary is checked against the file sizes when a dataset is opened;
arrays handed out are views of the mapped files and keep them open.
"""

from __future__ import annotations

import contextlib
import glob
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from megalite._C import IndexedDataset, IndexedWriter
from megalite.data.errors import DataError, check_prefix, is_file, writing
from megalite.data.take_over import take_over
from megalite.durable import sync_folder
from megalite.listing import listing

# Megatron writes uint16 only below this vocabulary size, though ids up to 65,535 fit.
MEGATRON_UINT16_VOCABULARY = 65500
HEADER_BYTES = 34  # of the .idx; then int32 lengths, int64 offsets, int64 boundaries
READ_BYTES = 1 << 20
COUNTED_IDS = 1 << 26  # each takes 8 bytes of memory while they are counted


def open_dataset(prefix: str) -> IndexedDataset:
    """The dataset `prefix` names, fully checked.

    Raises DataError naming the file, what was expected and what was found.
    """
    check_prefix(prefix)
    missing = [suffix for suffix in (".idx", ".bin") if not is_file(prefix + suffix)]
    if prefix.endswith((".bin", ".idx")) and ".idx" in missing:
        raise DataError(
            f"{prefix}: a dataset is named without its extension; give {prefix[:-4]} for {prefix[:-4]}.bin "
            f"and .idx"
        )
    if missing:
        raise DataError(
            f"{prefix}: {prefix}{missing[0]} does not exist; a dataset is a pair of files .bin and .idx"
            + _meant(prefix)
        )
    return IndexedDataset(prefix)


def _meant(prefix: str) -> str:
    """What else a path of no dataset may be, with what would be right."""
    with contextlib.suppress(ValueError):
        float(prefix)
        return "; a weight stands before its dataset, and every dataset has one or none has"
    if os.path.isdir(prefix):
        return f"; {prefix} is a folder, which holds {_datasets(f'{prefix}/') or 'no dataset'}"
    near = _datasets(prefix)
    return f"; there is {near}" if near else ""


def _datasets(begin: str) -> str:
    """Those whose paths begin so."""
    return listing(sorted(path[: -len(".idx")] for path in glob.glob(f"{glob.escape(begin)}*.idx")))


def check_token_ids(dataset: IndexedDataset) -> None:
    """Raises DataError for a dataset of other numbers."""
    if np.dtype(dataset.dtype).kind == "f":
        raise DataError(f"{dataset.prefix}: holds {dataset.dtype}, which are no token ids")


def token_dtype(vocab_size: int) -> str:
    """NumPy name of the type in which Megatron-LM stores ids below `vocab_size`: uint16 or int32."""
    return "uint16" if vocab_size < MEGATRON_UINT16_VOCABULARY else "int32"


class WriterState(NamedTuple):
    """What has been written so far."""

    tokens: int
    sequences: int
    documents: int
    checksum: int
    """CRC-32 of the tokens' bytes, as of the last flush."""


class DatasetWriter:
    """Writes a dataset front to back in bounded memory; the final names appear at `publish` only.

    Leaving the `with` block without an error publishes; with one, the `.partial` files stay for a
    resumed run.
    """

    def __init__(self, prefix: str, dtype: str, resume: WriterState | None = None, sync: bool = True) -> None:
        """`resume`: how much of an earlier run to keep; `sync`: reach the disk before publishing."""
        check_prefix(prefix)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self.prefix = prefix
        self.sync = sync
        for suffix in ("boundaries", "bin", "idx"):  # the first is locked till all have their final names
            if not take_over(Path(f"{prefix}.{suffix}.partial"), keep=resume is not None):
                break
        self._writer = IndexedWriter(prefix, dtype, resume)
        self._published = False

    @staticmethod
    def can_resume(
        prefix: str, dtype: str, state: WriterState, read: Callable[[int], None] = lambda _: None
    ) -> bool:
        """Whether an interrupted run's files hold at least `state`. All of that is read: another run that was
        killed may have left its own under the same names, or a disk may have lost some.

        `read` is called with the bytes of each piece.
        """
        sizes = {
            "bin": state.tokens * np.dtype(dtype).itemsize,
            "idx": HEADER_BYTES + 4 * state.sequences,
            "boundaries": 8 * state.documents,
        }
        files = [(Path(f"{prefix}.{suffix}.partial"), size) for suffix, size in sizes.items()]
        if not all(path.is_file() and path.stat().st_size >= size for path, size in files):
            return False
        (tokens, _), (idx, _), (boundaries, _) = files
        lengths = _pieces(idx, HEADER_BYTES, np.dtype(np.int32), state.sequences)
        if sum(int(piece.sum(dtype=np.int64)) for piece in lengths) != state.tokens:
            return False
        last = 0
        for ends in _pieces(boundaries, 0, np.dtype(np.int64), state.documents):
            if (np.diff(ends, prepend=last) < 0).any():
                return False
            last = int(ends[-1])
        return last == state.sequences and _checksum(tokens, sizes["bin"], read) == state.checksum

    @property
    def state(self) -> WriterState:
        return WriterState(*self._writer.state)

    def add(self, tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray | None = None) -> None:
        """Append sequences given as one flat integer array and their int32 lengths.

        `documents`: int64, the number of sequences of each document; by default each sequence is a
        document. Raises DataError for ids that the dtype cannot hold, and when the counts do not agree.
        """
        if documents is None:
            documents = np.ones(len(lengths), dtype=np.int64)
        self._writer.add(tokens, lengths, documents)

    def add_tokens(self, tokens: np.ndarray) -> None:
        """Append tokens whose sequences `add_sequences` and `add_documents` describe, before or after."""
        self._writer.add_tokens(tokens)

    def add_sequences(self, lengths: np.ndarray) -> None:
        """Append int32 lengths of sequences."""
        self._writer.add_sequences(lengths)

    def add_documents(self, sequences: np.ndarray) -> None:
        """Append int64 numbers of sequences of documents."""
        self._writer.add_documents(sequences)

    def flush(self) -> WriterState:
        """Everything so far reaches the files; returns the state to resume from."""
        self._writer.flush(self.sync)
        return self.state

    def complete(self) -> WriterState:
        """Write all that `publish` has to give a name to, the last thing that needs room; returns what was
        written, checksum included.
        """
        self._writer.complete(self.sync)
        return self.state

    def publish(self, described: bool = False) -> None:
        """Complete the index and give both files their final names, in place of earlier ones and their
        description; `described`: with PREFIX.json.partial as theirs.
        """
        self.complete()
        self._writer.publish(described)
        self._published = True
        if self.sync:
            with writing(self.prefix):
                sync_folder(Path(self.prefix).parent)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._published:
            self.publish()


def _pieces(path: Path, start: int, dtype: np.dtype, count: int) -> Iterator[np.ndarray]:
    """`count` numbers from byte `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        at_once = READ_BYTES // dtype.itemsize
        for first in range(0, count, at_once):
            yield np.fromfile(file, dtype, min(at_once, count - first))


def _checksum(path: Path, size: int, read: Callable[[int], None]) -> int:
    """CRC-32 of the first `size` bytes."""
    checksum = 0
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(size, READ_BYTES))):
            checksum = zlib.crc32(chunk, checksum)
            size -= len(chunk)
            read(len(chunk))
    return checksum


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Entropy of the token frequencies in nats a token: the loss of the best model that ignores context.

    Raises DataError for what holds no ids, or larger ones than COUNTED_IDS.
    """
    check_token_ids(dataset)
    stream = dataset.stream()
    if len(stream) == 0:
        raise DataError(f"{dataset.prefix}: holds no tokens, so it has no entropy")
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(stream), 1 << 22):
        ids = stream[start : start + (1 << 22)]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= COUNTED_IDS:
            wrong = low if low < 0 else high
            raise DataError(f"{dataset.prefix}: holds {wrong}: expected ids from 0 to {COUNTED_IDS - 1}")
        part = np.bincount(ids)
        if len(part) > len(counts):
            counts = np.pad(counts, (0, len(part) - len(counts)))
        counts[: len(part)] += part
    dataset.check_read()
    shares = counts[counts > 0] / len(stream)
    return float(-(shares * np.log(shares)).sum())
