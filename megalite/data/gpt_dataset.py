"""Samples of seq_length + 1 consecutive tokens from one split of one indexed dataset, in Megatron-LM's
order.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalite import _C
from megalite.data.index_cache import ArraySpec, Tell, cached_arrays, watched
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.sample_plan import (
    SampleIndex,
    SamplePlan,
    build_sample_index,
    fill_sample_index,
    sample_index_dtype,
    shuffle_index_dtype,
)
from megalite.data.stretches import DatasetPlace, Round

SAMPLED_TOKENS = 512  # of a dataset's identity, at three places: a page or two each


class Piece(NamedTuple):
    """Tokens [offset, offset + tokens) of document `document` of the dataset `prefix`."""

    prefix: str
    document: int
    offset: int
    tokens: int


class GPTDataset:
    """One split of one indexed dataset; sample k is a pure function of the plan and k."""

    def __init__(
        self, dataset: IndexedDataset, plan: SamplePlan, cache: Path | None, tell: Tell = lambda *_: None
    ) -> None:
        """`cache`: folder of the index arrays, None builds them in memory; `tell` as in `cached_arrays`."""
        self.dataset = dataset
        self.plan = plan
        self.seq_length = plan.seq_length
        self.index = (
            build_sample_index(dataset, plan) if cache is None else _cached_index(dataset, plan, cache, tell)
        )
        self.reader = _C.SampleReader(dataset, *self.index, plan.seq_length, watched(self.index))
        self.identity = identity_of(dataset, plan.first, plan.last)

    @property
    def prefix(self) -> str:
        return self.dataset.prefix

    def __len__(self) -> int:
        return self.plan.samples

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Row i of `out`, int64 (n, seq_length + 1), becomes sample `samples[i]`.

        Raises DataError for a sample that does not exist, and when the index does not fit the dataset.
        """
        _C.read_samples([self.reader], np.zeros(len(samples), dtype=np.int64), samples, out)

    def pieces(self, sample: int) -> list[Piece]:
        """Where the tokens of `sample` come from."""
        return [self._piece(*piece) for piece in self.reader.pieces(sample)]

    def _piece(self, sequence: int, offset: int, tokens: int) -> Piece:
        dataset = self.dataset
        # numpy.searchsorted would copy the boundaries, which are not aligned in the file.
        document = bisect_right(dataset.boundaries, sequence) - 1
        before = dataset.tokens_between(int(dataset.boundaries[document]), sequence)
        return Piece(self.prefix, document, before + offset, tokens)

    def consumed(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` came from each dataset."""
        return {self.prefix: samples}

    def places(self, samples: int) -> list[DatasetPlace]:
        """How far it is read after the first `samples`."""
        epochs = Round(self.plan.epochs, self.plan.separate_final_epoch)
        return [DatasetPlace(self.prefix, self.identity, (epochs,), samples)]


def default_cache(prefix: str) -> Path:
    """Where a dataset's index arrays are kept when no folder is named."""
    return Path(f"{prefix}.cache")


def identity_of(dataset: IndexedDataset, first: int, last: int) -> str:
    """A hash of the lengths of documents [first, last), and of the tokens at their beginning, middle and end:
    where all documents have one length, the lengths do not tell datasets apart. Raises DataError.
    """
    dataset.check_size()  # from now on another dataset that is copied onto its files is noticed
    tokens = dataset.tokens_between(first, last)
    start = int(dataset.offsets[first]) // np.dtype(dataset.dtype).itemsize if tokens else 0
    inside = dataset.stream()[start : start + tokens]
    middle = tokens // 2
    pieces = (inside[:SAMPLED_TOKENS], inside[middle : middle + SAMPLED_TOKENS], inside[-SAMPLED_TOKENS:])
    content = _C.content_hash(np.concatenate(pieces))
    dataset.check_read()
    return f"{dataset.lengths_hash(first, last):016x}{content:016x}"


def _cached_index(dataset: IndexedDataset, plan: SamplePlan, cache: Path, tell: Tell) -> SampleIndex:
    specs = [
        ArraySpec("document_index", np.dtype(np.int32), (plan.document_count,)),
        ArraySpec("sample_index", np.dtype(sample_index_dtype(plan)), (plan.samples + 1, 2)),
        ArraySpec("shuffle_index", np.dtype(shuffle_index_dtype(plan)), (plan.samples,)),
    ]
    description: dict[str, object] = {
        "kind": "samples",
        # Neither path nor tokens: documents of the same lengths have the same index, whatever they hold.
        "lengths_hash": f"{dataset.lengths_hash(plan.first, plan.last):016x}",
        "documents": [plan.first, plan.last],
        "tokens": plan.tokens,
        "seq_length": plan.seq_length,
        "seed": plan.seed,
        "epochs": plan.epochs,
        "separate_final_epoch": plan.separate_final_epoch,
    }
    arrays = cached_arrays(
        cache, description, specs, lambda made: fill_sample_index(dataset, plan, SampleIndex(*made)), tell
    )
    return SampleIndex(*arrays)
