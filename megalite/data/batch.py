"""One micro-batch as the model sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one micro-batch. `tokens` and `labels` are views of one buffer
    (micro_batch, seq + 1).
    """

    tokens: torch.Tensor
    """int64 (micro_batch, seq)."""
    labels: torch.Tensor
    """int64 (micro_batch, seq): the token after each of `tokens`."""
    loss_mask: torch.Tensor
    """float32 (micro_batch, seq): 1 where the loss counts; read-only, it may be one number expanded."""
    position_ids: torch.Tensor
    """int64 (micro_batch, seq); read-only, it may be one row expanded."""
    sample_index: torch.Tensor
    """int64 (micro_batch,), on the host: the number of each sample in its dataset."""
    cu_seqlens: torch.Tensor | None = None
    """int32 (documents + 1,) with reset_attention_mask: where documents begin in the flattened micro-batch,
    0 to micro_batch * seq.
    """
    max_document_length: int | None = None
    """The longest distance in `cu_seqlens`."""
