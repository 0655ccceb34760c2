"""The language-model head with its cross-entropy, a chunk of tokens at a time: never are all logits held.

Forward keeps the losses, two fp32 numbers a token and the last chunk's logits; backward makes each other
chunk's logits again (a third more products in the head), turns them into their gradient in place, and adds to
the weight's gradient in fp32. The statistics of all chunks travel over the tensor-parallel group in one
message.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalite.kernels.cross_entropy import (
    combine,
    cross_entropy_backward_,
    cross_entropy_reference,
    cross_entropy_statistics,
    exchange,
)
from megalite.kernels.dispatch import choose, statistics_dtype

DEFAULT_BUDGET = 512 * 2**20  # bytes of logits at once: large enough that the products run at full speed


class GradientSink(Protocol):
    """Where a weight's gradient is collected: added to `main_grad`, then `ready` is called."""

    main_grad: Tensor

    def ready(self) -> None:
        """Tell the owner that the gradient is complete."""


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """The per-token loss with an unsplit weight, in plain differentiable torch."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return cross_entropy_reference(logits, target, vocab_size, ignore_index, label_smoothing, z_loss)


def chunk_rows(tokens: int, columns: int, itemsize: int, budget: int) -> int:
    """Tokens a chunk: as few chunks as the budget in bytes allows, all but the last of one size."""
    most = max(1, budget // (columns * itemsize))
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, vocab_start: int,
        vocab_size: int, group: ProcessGroup | None, ignore_index: int, label_smoothing: float, z_loss: float,
        rows: int, sink: GradientSink | None, backend: str,
    ) -> Tensor:  # fmt: skip
        statistics = []
        logits = None
        for part, ids in zip(hidden.split(rows), target.split(rows), strict=True):
            logits = torch.nn.functional.linear(part, weight, bias)
            statistics.append(
                cross_entropy_statistics(
                    logits, ids, vocab_start, vocab_size, ignore_index, label_smoothing > 0, backend
                )
            )
        shards = exchange(torch.cat(statistics, -1), group)
        loss, normaliser = combine(shards, target, vocab_size, ignore_index, label_smoothing, z_loss)
        ctx.save_for_backward(hidden, weight, bias, target, normaliser)
        ctx.constants = (vocab_start, vocab_size, ignore_index, label_smoothing, z_loss, backend)
        ctx.rows, ctx.sink = rows, sink
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, normaliser = ctx.saved_tensors
        wide = statistics_dtype(weight.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        grad_weight = None
        if ctx.sink is not None:
            grad_weight = ctx.sink.main_grad.view(weight.shape)
        elif ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        for start in reversed(range(0, hidden.shape[0], ctx.rows)):
            chunk = slice(start, start + ctx.rows)
            # The last chunk's logits are still there at the first backward.
            logits, ctx.last_logits = ctx.last_logits, None
            if logits is None:
                logits = torch.nn.functional.linear(hidden[chunk], weight, bias)
            cross_entropy_backward_(
                grad[chunk], logits, target[chunk], normaliser[:, chunk].contiguous(), *ctx.constants
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _accumulate(grad_weight, logits.t(), hidden[chunk])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
        returned = None if grad_weight is None or ctx.sink is not None else grad_weight.to(weight.dtype)
        if ctx.sink is not None:
            ctx.sink.ready()
        return grad_hidden, returned, None if grad_bias is None else grad_bias.to(weight.dtype), *(None,) * 10


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a rounding of the product where the device's library can do that."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    budget: int = DEFAULT_BUDGET,
    sink: GradientSink | None = None,
    backend: str | None = None,
) -> Tensor:
    """`vocab_parallel_cross_entropy(hidden @ weight.T + bias, ...)`, `budget` bytes of logits at once.

    hidden: (..., hidden_size), the same on every rank of `group`; weight: (local columns, hidden_size), this
    rank's rows of the head; target: (...). The loss of each token, fp32 (fp64 for fp64), is the same on every
    rank; the gradient of hidden is this rank's part of a sum over the group, as that of any column-parallel
    layer. The weight's gradient is summed in fp32 over the chunks: into `sink.main_grad` if given, else for
    autograd. Raises ValueError where shapes do not fit.
    """
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)} must be (local columns, {hidden.shape[-1]})")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but hidden {tuple(hidden.shape)} needs one id a row"
        )
    if budget <= 0:
        raise ValueError(f"budget is {budget} bytes; it must be positive")
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = chunk_rows(flat.shape[0], weight.shape[0], weight.element_size(), budget)
    loss: Tensor = _LinearCrossEntropy.apply(
        flat, weight, bias, target.reshape(-1), vocab_start, vocab_size, group, ignore_index, label_smoothing,
        z_loss, rows, sink, choose(hidden, backend),
    )  # fmt: skip
    return loss.view(target.shape)
