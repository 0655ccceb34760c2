"""Cross-entropy over a vocabulary split across a tensor-parallel group.

Each rank reduces its columns to a few numbers a row; one all-gather of them gives every rank the whole row's
log-sum-exp. Saved for backward: the logits as they came, the targets and the log-sum-exp. The exchange holds
(max, sum of exp(x - max), target logit, sum of x), combined as in Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalite.kernels.dispatch import choose, register, statistics_dtype


def cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The per-token loss over unsplit logits (..., padded vocabulary) in plain differentiable torch."""
    wide = logits[..., :vocab_size].to(statistics_dtype(logits.dtype))
    ignored = target == ignore_index
    lse = torch.logsumexp(wide, -1)
    picked = wide.gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * wide.mean(-1) + z_loss * lse.square()
    return loss.masked_fill(ignored, 0.0)


def _columns(logits: Tensor, vocab_start: int, vocab_size: int) -> int:
    """How many of the local columns are vocabulary; the rest is padding."""
    return max(0, min(logits.shape[-1], vocab_size - vocab_start))


def _owned(target: Tensor, vocab_start: int, columns: int) -> tuple[Tensor, Tensor]:
    local = target - vocab_start
    owned = (local >= 0) & (local < columns)
    return owned, local.masked_fill(~owned, 0)


def _statistics(logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int, backend: str) -> Tensor:
    columns = _columns(logits, vocab_start, vocab_size)
    wide = statistics_dtype(logits.dtype)
    if columns == 0:
        stats = torch.zeros(4, *target.shape, dtype=wide, device=logits.device)
        stats[0] = float("-inf")
        return stats
    valid = logits[..., :columns].to(wide)
    owned, local = _owned(target, vocab_start, columns)
    largest = valid.amax(-1)
    exp_sum = (valid - largest.unsqueeze(-1)).exp().sum(-1)
    picked = valid.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0.0)
    return torch.stack((largest, exp_sum, picked, valid.sum(-1)))


def _statistics_fake(
    logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int, backend: str
) -> Tensor:
    return logits.new_empty((4, *target.shape), dtype=statistics_dtype(logits.dtype))


def _backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> Tensor:  # fmt: skip
    columns = _columns(logits, vocab_start, vocab_size)
    wide = statistics_dtype(logits.dtype)
    grad = grad.masked_fill(target == ignore_index, 0.0).to(wide)
    owned, local = _owned(target, vocab_start, columns)
    result = logits.new_zeros(logits.shape)
    if columns == 0:
        return result
    probability = (logits[..., :columns].to(wide) - lse.unsqueeze(-1)).exp()
    inner = probability * (1 + 2 * z_loss * lse).unsqueeze(-1) - label_smoothing / vocab_size
    inner.scatter_add_(-1, local.unsqueeze(-1), -(1 - label_smoothing) * owned.to(wide).unsqueeze(-1))
    result[..., :columns] = inner * grad.unsqueeze(-1)
    return result


def _backward_fake(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


_cross_entropy_statistics = register(
    "cross_entropy_statistics(Tensor logits, Tensor target, int vocab_start, int vocab_size, str backend)"
    " -> Tensor",
    _statistics,
    _statistics_fake,
)
_cross_entropy_backward = register(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int vocab_start, "
    "int vocab_size, int ignore_index, float label_smoothing, float z_loss, str backend) -> Tensor",
    _backward,
    _backward_fake,
)


def _exchange(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """Statistics of all shards, (ranks, 4, *target): the one message of the operation."""
    if group is None or group.size() == 1:
        return stats.unsqueeze(0)
    gathered = stats.new_empty((group.size(), *stats.shape))
    torch.distributed.all_gather_into_tensor(gathered, stats, group=group)
    return gathered


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int,
        group: ProcessGroup | None, ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
    ) -> Tensor:  # fmt: skip
        stats = _exchange(_cross_entropy_statistics(logits, target, vocab_start, vocab_size, backend), group)
        largest = stats[:, 0].amax(0)
        lse = (stats[:, 1] * (stats[:, 0] - largest).exp()).sum(0).log() + largest
        # A target that is no vocabulary entry has no owner: the loss is NaN rather than silently log-sum-exp.
        lse = torch.where((target >= 0) & (target < vocab_size), lse, torch.nan)
        ignored = target == ignore_index
        lse = lse.masked_fill(ignored, 0.0)
        loss = lse - (1 - label_smoothing) * stats[:, 2].sum(0) + z_loss * lse.square()
        if label_smoothing > 0:
            loss = loss - label_smoothing / vocab_size * stats[:, 3].sum(0)
        ctx.save_for_backward(logits, target, lse)
        ctx.constants = (vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, backend)
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        return _cross_entropy_backward(grad, logits, target, lse, *ctx.constants), *(None,) * 8


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Loss of each token, fp32 (fp64 for fp64 logits), in target's shape; the same on every rank of `group`.

    logits: (..., local columns), this rank's columns of the vocabulary from `vocab_start` on; columns at or
    beyond `vocab_size` (the true, unpadded size) are padding: no part of the loss, gradient exactly zero.
    Shards may differ in size.
    target: global token ids; `ignore_index` gives loss 0 and gradient 0, other ids outside [0, vocab_size) NaN.
    `label_smoothing` spreads that share evenly over the vocabulary; `z_loss` adds z_loss x log-sum-exp^2.
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but logits {tuple(logits.shape)} need one id a row"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must lie in [0, 1)")
    return _CrossEntropy.apply(
        logits,
        target,
        vocab_start,
        vocab_size,
        group,
        ignore_index,
        label_smoothing,
        z_loss,
        choose(logits, backend),
    )
