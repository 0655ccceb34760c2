"""A rank's micro-batches of one step, read into host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megalite import _C
from megalite.accelerator import pin
from megalite.data.build import Dataset, SampleSource
from megalite.data.errors import DataError

CACHED_TOKENS = 1 << 16  # read before they are looked through, 512 KiB: a core's cache still holds them then


@dataclass(frozen=True)
class HostBatches:
    """A rank's part of one global batch in host memory; leading dim: micro-batch."""

    samples: torch.Tensor
    tokens: torch.Tensor
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    """Those of the micro-batches end to end: one tensor, since each that a process hands over takes a
    descriptor.
    """
    boundaries: list[int] | None
    """How many of `cu_seqlens` each micro-batch has."""
    longest: list[int] | None
    """The longest document of each micro-batch, with `cu_seqlens`."""


def check_ids(source: SampleSource, samples: np.ndarray, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError when one of `tokens`, int64 (n, seq + 1), of `samples` (n,) is no id of the model.

    An embedding split over ranks takes such an id for one of another rank, and would give zeros.
    """
    ids = tokens.view(np.uint64)  # where negative ids are huge: one pass over the batch finds both
    if ids.max(initial=0) < vocab_size:
        return
    row, place = np.argwhere(ids >= vocab_size)[0]
    before = int(place)
    for piece in source.pieces(int(samples[row])):
        if before < piece.tokens:
            break
        before -= piece.tokens
    raise DataError(
        f"{piece.prefix}: document {piece.document} holds id {tokens[row, place]} at token "
        f"{piece.offset + before}, but the model's vocabulary is the {vocab_size} ids from 0; was the data "
        "made with another tokenizer?"
    )


def read_batches(
    dataset: Dataset,
    samples: np.ndarray,
    vocab_size: int | None,
    place: Callable[[torch.Tensor], torch.Tensor],
) -> HostBatches:
    """Read `samples`, int64 (micro_batches, micro_batch_size), into memory that is `pin`ned or `share`d.

    With `vocab_size`, an id beyond it raises DataError.
    """
    rules, seq = dataset.rules, dataset.samples.seq_length
    tokens = place(torch.empty(*samples.shape, seq + 1, dtype=torch.int64))
    shape = (*samples.shape, seq)
    loss_mask = place(torch.empty(shape, dtype=torch.float32)) if rules.eod_mask_loss else None
    position_ids = place(torch.empty(shape, dtype=torch.int64)) if rules.reset_position_ids else None
    starts = read_documents(
        dataset,
        samples,
        tokens.numpy(),
        vocab_size,
        None if position_ids is None else position_ids.numpy(),
        None if loss_mask is None else loss_mask.numpy(),
    )
    numbers = place(torch.from_numpy(samples))
    if not rules.reset_attention_mask:
        return HostBatches(numbers, tokens, loss_mask, position_ids, None, None, None)
    cu_seqlens = place(torch.from_numpy(np.concatenate(starts)))
    boundaries = [len(each) for each in starts]
    longest = [int(np.diff(each).max()) for each in starts]
    return HostBatches(numbers, tokens, loss_mask, position_ids, cu_seqlens, boundaries, longest)


def read_documents(
    dataset: Dataset,
    samples: np.ndarray,
    tokens: np.ndarray,
    vocab_size: int | None = None,
    position_ids: np.ndarray | None = None,
    loss_mask: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Fill `tokens`, int64 (micro_batches, micro_batch_size, seq + 1), with `samples`; by the rules of
    `dataset` also `position_ids`, int64, and `loss_mask`, float32, of seq each.

    Returns where documents begin in each micro-batch, int32, if any rule asks for it.
    """
    source, rules = dataset.samples, dataset.rules
    count, micro, width = tokens.shape
    at_once = max(1, CACHED_TOKENS // (micro * width))
    starts = []
    for first in range(0, count, at_once):
        numbers, part = samples[first : first + at_once].reshape(-1), tokens[first : first + at_once]
        rows = part.reshape(-1, width)
        source.read(numbers, rows)
        if vocab_size is not None:
            check_ids(source, numbers, rows, vocab_size)
        if not (rules.eod_mask_loss or rules.reset_position_ids or rules.reset_attention_mask):
            continue
        for i, each in enumerate(part, first):
            positions = None if position_ids is None else position_ids[i]
            mask = None if loss_mask is None else loss_mask[i]
            starts.append(_C.mask_documents(each, width - 1, rules.eod, positions, mask))
    return starts


def pin_batches(host: HostBatches) -> HostBatches:
    """The same in page-locked memory, where that helps."""
    return HostBatches(
        host.samples,
        pin(host.tokens),
        None if host.loss_mask is None else pin(host.loss_mask),
        None if host.position_ids is None else pin(host.position_ids),
        None if host.cu_seqlens is None else pin(host.cu_seqlens),
        host.boundaries,
        host.longest,
    )


def share(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory that another process can map: in the thread that hands it over later an error would
    be lost, and the other process would wait for ever. Raises DataError when there is no room for it.
    """
    try:
        return tensor.share_memory_()
    except RuntimeError as error:
        raise DataError(
            f"--num-workers: no shared memory for what was read ({error}); make /dev/shm larger, or read "
            "without --num-workers"
        ) from None
