"""How a split's documents become samples: how many epochs, how many samples, in which order.

The order is Megatron-LM's, array by array. Its float32 rounding of a kept partial last sample is not
reproduced: a sample that would be shorter than the sequence length is always dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite import _C
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import IndexedDataset

INDEX_LIMIT_BYTES = 1 << 38


@dataclass(frozen=True)
class SamplePlan:
    """What the index arrays of one split depend on, beside the lengths of its documents."""

    first: int
    last: int
    """Documents [first, last) of the dataset."""
    seq_length: int
    seed: int
    tokens: int
    """Tokens in one epoch."""
    epochs: int
    separate_final_epoch: bool

    @property
    def samples(self) -> int:
        """Whole samples of seq_length tokens, each with one more token for its last label."""
        return max(0, self.epochs * self.tokens - 1) // self.seq_length

    @property
    def shuffle_boundary(self) -> int:
        """Samples before the separately shuffled final epoch; all of them without one."""
        if not self.separate_final_epoch:
            return self.samples
        return ((self.epochs - 1) * self.tokens - 1) // self.seq_length

    @property
    def document_count(self) -> int:
        return self.epochs * (self.last - self.first)


class SampleIndex(NamedTuple):
    """The arrays that Megatron-LM calls by these names."""

    document_index: np.ndarray
    """int32 (epochs * documents,): the documents in the order of the stream."""
    sample_index: np.ndarray
    """int32 or int64 (samples + 1, 2): position in document_index and token in that document where a sample
    starts.
    """
    shuffle_index: np.ndarray
    """uint32 or int64 (samples,): sample k of the dataset is cut k' = shuffle_index[k] of the stream."""


def plan_samples(
    dataset: IndexedDataset, documents: tuple[int, int], seq_length: int, seed: int, requested: int | None
) -> SamplePlan:
    """The smallest number of epochs that holds `requested` samples; one epoch for None.

    Raises DataError when samples are requested but the documents hold no token at all.
    """
    first, last = documents
    tokens = dataset.tokens_between(first, last)
    if tokens == 0 and requested:
        raise DataError(
            f"{dataset.prefix}: sequences [{first}, {last}) of its {dataset.sequences} hold no tokens, but "
            f"{requested} samples of {seq_length} tokens are wanted from them: bring more data, give their "
            "split a larger share (--split), or want nothing of validation and test (--eval-iters 0)"
        )
    if last > np.iinfo(np.int32).max:
        raise DataError(
            f"{dataset.prefix}: {last} sequences; the index numbers them with 31 bits, so split the dataset"
        )
    if not 0 <= seed < 1 << 32:
        raise DataError(f"--seed {seed}: expected 0 to {(1 << 32) - 1}, the range of the shuffle's generator")
    epochs, separate = 1, False
    if requested:
        epochs = -(-(requested * seq_length + 1) // tokens)
        before = ((epochs - 1) * tokens - 1) // seq_length
        separate = epochs > 1 and requested - before < int(0.80 * ((tokens - 1) // seq_length))
    plan = SamplePlan(first, last, seq_length, seed, tokens, epochs, separate)
    needed = 4 * plan.document_count + 12 * plan.samples
    if needed > INDEX_LIMIT_BYTES:
        raise DataError(
            f"{dataset.prefix}: {requested} samples of {seq_length} tokens from {tokens} tokens would take "
            f"{epochs} epochs "
            f"and an index of {needed / 1e9:.0f} GB; use more data or fewer samples"
        )
    return plan


def sample_index_dtype(plan: SamplePlan) -> type[np.signedinteger]:
    return np.int32 if plan.document_count <= np.iinfo(np.int32).max else np.int64


def shuffle_index_dtype(plan: SamplePlan) -> type[np.integer]:
    return np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64


def fill_sample_index(dataset: IndexedDataset, plan: SamplePlan, arrays: SampleIndex) -> None:
    """Build `plan` into arrays made by the caller."""
    shuffler = _C.LegacyShuffler(plan.seed)
    _C.fill_document_index(
        arrays.document_index, plan.first, plan.last, plan.epochs, plan.separate_final_epoch, shuffler
    )
    _C.fill_sample_index(arrays.sample_index, dataset, arrays.document_index, plan.seq_length)
    _C.fill_shuffle_index(arrays.shuffle_index, plan.shuffle_boundary, shuffler)


def build_sample_index(dataset: IndexedDataset, plan: SamplePlan) -> SampleIndex:
    """The arrays of `plan` in memory."""
    arrays = SampleIndex(
        np.empty(plan.document_count, dtype=np.int32),
        np.empty((plan.samples + 1, 2), dtype=sample_index_dtype(plan)),
        np.empty(plan.samples, dtype=shuffle_index_dtype(plan)),
    )
    fill_sample_index(dataset, plan, arrays)
    return arrays
