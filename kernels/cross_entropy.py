"""Cross-entropy over a vocabulary split across a tensor-parallel group.

Each rank reduces its columns to a few numbers a row; one all-gather of them gives every rank the whole row's
normaliser. Saved for backward: the logits as they came, the targets, and two fp32 numbers a row (the maximum
and the logarithm of the sum of exp(x - maximum): their sum, the log-sum-exp, would lose the digits that
matter where p nears 1). Statistics are combined as in Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867, eq. 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalite.kernels.collectives import all_gather_into
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
    picked = wide.gather(-1, target.long().masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * wide.mean(-1) + z_loss * lse.square()
    return loss.masked_fill(ignored, 0.0)


def local_columns(logits: Tensor, vocab_start: int, vocab_size: int) -> int:
    """How many of the local columns are vocabulary; the rest is padding."""
    return max(0, min(logits.shape[-1], vocab_size - vocab_start))


def _owned(target: Tensor, vocab_start: int, columns: int) -> tuple[Tensor, Tensor]:
    local = target.long() - vocab_start
    owned = (local >= 0) & (local < columns)
    return owned, local.masked_fill(~owned, 0)


def _statistics(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    with_sum: bool,
    backend: str,
) -> Tensor:
    columns = local_columns(logits, vocab_start, vocab_size)
    if backend == "triton":
        from megalite.kernels import cross_entropy_triton

        return cross_entropy_triton.statistics(logits, target, vocab_start, columns, ignore_index, with_sum)
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        return fused_cpu.cross_entropy_statistics(logits, target, vocab_start, columns, ignore_index)
    wide = statistics_dtype(logits.dtype)
    stats = torch.zeros(4, *target.shape, dtype=wide, device=logits.device)
    if columns == 0:
        stats[0] = float("-inf")
        return stats
    valid = logits[..., :columns].to(wide)
    owned, local = _owned(target, vocab_start, columns)
    stats[0] = valid.amax(-1)
    stats[1] = (valid - stats[0].unsqueeze(-1)).exp().sum(-1)
    stats[2] = valid.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0.0)
    if with_sum:
        stats[3] = valid.sum(-1)
    return stats


def _statistics_fake(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    with_sum: bool,
    backend: str,
) -> Tensor:
    return logits.new_empty((4, *target.shape), dtype=statistics_dtype(logits.dtype))


def _backward_into(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str, out: Tensor,
) -> None:  # fmt: skip
    columns = local_columns(logits, vocab_start, vocab_size)
    constants = (vocab_start, vocab_size, columns, ignore_index, label_smoothing, z_loss, out)
    if backend == "triton":
        from megalite.kernels import cross_entropy_triton

        cross_entropy_triton.backward(grad, logits, target, normaliser, *constants)
        return
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        fused_cpu.cross_entropy_backward(grad, logits, target, normaliser, *constants)
        return
    wide = statistics_dtype(logits.dtype)
    ignored = target == ignore_index
    owned, local = _owned(target, vocab_start, columns)
    largest, log_sum = normaliser.unsqueeze(-1).unbind(0)
    inner = (logits[..., :columns].to(wide) - largest - log_sum).exp()
    inner = inner * (1 + 2 * z_loss * (largest + log_sum)) - label_smoothing / vocab_size
    if columns:
        inner.scatter_add_(-1, local.unsqueeze(-1), -(1 - label_smoothing) * owned.to(wide).unsqueeze(-1))
    inner = (inner * grad.to(wide).unsqueeze(-1)).masked_fill(ignored.unsqueeze(-1), 0.0)
    out[..., :columns] = inner
    out[..., columns:] = 0.0


def _backward(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> Tensor:  # fmt: skip
    out = logits.new_empty(logits.shape)
    _backward_into(
        grad,
        logits,
        target,
        normaliser,
        vocab_start,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        backend,
        out,
    )
    return out


def _backward_fake(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


def _backward_in_place(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> None:  # fmt: skip
    _backward_into(
        grad,
        logits,
        target,
        normaliser,
        vocab_start,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
        backend,
        logits,
    )


def _backward_in_place_fake(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    ignore_index: int, label_smoothing: float, z_loss: float, backend: str,
) -> None:  # fmt: skip
    return None


cross_entropy_statistics = register(
    "cross_entropy_statistics(Tensor logits, Tensor target, int vocab_start, int vocab_size,"
    " int ignore_index, bool with_sum, str backend) -> Tensor",
    _statistics,
    _statistics_fake,
)
cross_entropy_backward = register(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor normaliser,"
    " int vocab_start, int vocab_size, int ignore_index,"
    " float label_smoothing, float z_loss, str backend) -> Tensor",
    _backward,
    _backward_fake,
)
cross_entropy_backward_ = register(
    "cross_entropy_backward_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor normaliser,"
    " int vocab_start, int vocab_size, int ignore_index,"
    " float label_smoothing, float z_loss, str backend) -> ()",
    _backward_in_place,
    _backward_in_place_fake,
)


def all_gather(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ranks' parts one after another on dim 0."""
    if group is None or group.size() == 1:
        return part
    gathered = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    all_gather_into(gathered, part.contiguous(), group=group)
    return gathered


def exchange(stats: Tensor, group: ProcessGroup | None) -> Tensor:
    """Statistics of all shards, (ranks, 4, *target): the one message of the operation."""
    return all_gather(stats, group).unflatten(0, (-1, stats.shape[0]))


def combine(
    shards: Tensor, target: Tensor, vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The loss (*target) and the normaliser (2, *target) from the shards' statistics (ranks, 4, *target)."""
    largest = shards[:, 0].amax(0)
    log_sum = (shards[:, 1] * (shards[:, 0] - largest).exp()).sum(0).log()
    # A target that is no vocabulary entry has no owner: NaN rather than silently the log-sum-exp as the loss.
    log_sum = torch.where((target >= 0) & (target < vocab_size), log_sum, torch.nan)
    loss = (largest - shards[:, 2].sum(0)) + log_sum
    if label_smoothing > 0:
        evenly = (largest - shards[:, 3].sum(0) / vocab_size) + log_sum
        loss = (1 - label_smoothing) * loss + label_smoothing * evenly
    if z_loss > 0:
        loss = loss + z_loss * (largest + log_sum).square()
    return loss.masked_fill(target == ignore_index, 0.0), torch.stack((largest, log_sum))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int,
        group: ProcessGroup | None, ignore_index: int, label_smoothing: float, z_loss: float, inplace: bool,
        backend: str,
    ) -> Tensor:  # fmt: skip
        with_sum = label_smoothing > 0
        stats = cross_entropy_statistics(
            logits, target, vocab_start, vocab_size, ignore_index, with_sum, backend
        )
        loss, normaliser = combine(
            exchange(stats, group), target, vocab_size, ignore_index, label_smoothing, z_loss
        )
        ctx.save_for_backward(logits, target, normaliser)
        ctx.constants = (vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, backend)
        ctx.inplace = inplace
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, normaliser = ctx.saved_tensors
        if ctx.inplace:
            cross_entropy_backward_(grad, logits, target, normaliser, *ctx.constants)
            # Whoever else saved the logits, this loss's second backward included, now gets autograd's error.
            torch.autograd.graph.increment_version(logits)
            grad_logits = logits.detach()
        else:
            grad_logits = cross_entropy_backward(grad, logits, target, normaliser, *ctx.constants)
        return grad_logits, *(None,) * 9


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
    reduction: str = "none",
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Loss of each token, fp32 (fp64 for fp64 logits), in target's shape; the same on every rank of `group`.

    logits: (..., local columns), this rank's columns of the vocabulary from `vocab_start` on; columns at or
    beyond `vocab_size` (the true, unpadded size) are padding: no part of the loss, gradient exactly zero.
    Shards may differ in size.
    target: global token ids; `ignore_index` gives loss 0 and gradient 0, another id outside [0, vocab_size)
    NaN. `label_smoothing` spreads that share evenly over the vocabulary; `z_loss` adds z_loss x
    log-sum-exp^2. `reduction`: "none", "sum", or "mean" over the tokens not ignored (0 if all are). `inplace`
    writes the gradient over contiguous logits in backward; whatever needs them later then raises.
    """
    _check(logits, target, vocab_start, vocab_size, label_smoothing, reduction, inplace)
    loss: Tensor = _CrossEntropy.apply(
        logits, target, vocab_start, vocab_size, group, ignore_index, label_smoothing, z_loss, inplace,
        choose(logits, backend),
    )  # fmt: skip
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore_index).sum().clamp(min=1)


def _check(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    label_smoothing: float,
    reduction: str,
    inplace: bool,
) -> None:
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but logits {tuple(logits.shape)} need one id a row"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target is {target.dtype}; token ids must be int64 or int32")
    if vocab_start < 0 or vocab_size <= 0:
        raise ValueError(
            f"vocab_start {vocab_start} must not be negative, vocab_size {vocab_size} must be positive"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must lie in [0, 1)")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction {reduction!r} is unknown; choose none, sum or mean")
    if inplace and not logits.is_contiguous():
        raise ValueError("inplace=True writes the gradient over the logits, which must be contiguous")
