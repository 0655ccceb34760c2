"""Token embedding with the vocabulary cut over the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch

from megalite.parallel.mappings import sum_partials
from megalite.parallel.params import sink_of
from megalite.parallel.topology import Axis


class _LookUp(torch.autograd.Function):
    """Rows of a local shard of the vocabulary; zero for tokens that another rank holds."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
        elsewhere = (tokens < start) | (tokens >= start + weight.shape[0])
        local = (tokens - start).masked_fill_(elsewhere, 0)
        ctx.save_for_backward(local, elsewhere, weight)
        return weight[local].masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local, elsewhere, weight = ctx.saved_tensors
        sink = sink_of(weight)
        total = torch.zeros_like(weight) if sink is None else sink.main_grad
        rows = grad.masked_fill(elsewhere.unsqueeze(-1), 0).reshape(-1, weight.shape[-1])
        total.index_add_(0, local.reshape(-1), rows.to(total.dtype))
        if sink is None:
            return None, total, None
        sink.ready()
        return None, None, None


def vocab_parallel_embedding(
    tokens: torch.Tensor, weight: torch.Tensor, start: int, axis: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """Rows of a table for `tokens`, int64 (seq, batch).

    `weight`: (padded vocab / tp, hidden), its first row that of token `start`. Returns (seq, batch,
    hidden) in its dtype, or with `sequence_parallel` the shard (seq / tp, batch, hidden).
    """
    return sum_partials(_LookUp.apply(tokens, weight, start), axis, sequence_parallel)
