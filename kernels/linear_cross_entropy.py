"""The language-model head with its cross-entropy, a chunk of tokens at a time: never are all logits held.

A chunk's logits become, in place, their own gradient as soon as its statistics are known, and that gives the
gradients of the hidden states and of the weight at once: three products, as without fusion, all in the
forward pass. What waits for backward is the hidden states' gradient alone, as large as the hidden states. The
loss is a sum over tokens, so its gradient is one number. Where that number is known beforehand (in training
the loss scale over the global batch's tokens) the weight's gradient goes straight into the main gradient;
otherwise an fp32 copy of it is held until backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalite.kernels.collectives import reduce_scatter_into
from megalite.kernels.cross_entropy import (
    all_gather,
    combine,
    cross_entropy_backward_,
    cross_entropy_reference,
    cross_entropy_statistics,
    exchange,
)
from megalite.kernels.dispatch import choose, statistics_dtype
from megalite.kernels.weight_gradient import Accumulate, GradientSink, accumulate_fused

DEFAULT_BUDGET = 512 * 2**20  # bytes of logits at once: large enough that the products run at full speed


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The summed loss with an unsplit weight, in plain differentiable torch."""
    logits = torch.nn.functional.linear(hidden, weight)
    return cross_entropy_reference(logits, target, vocab_size, ignore_index, label_smoothing, z_loss).sum()


def chunk_rows(tokens: int, columns: int, itemsize: int, budget: int) -> int:
    """Tokens a chunk: as few chunks as the budget in bytes allows, all but the last of one size."""
    most = max(1, budget // (columns * itemsize))
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


class _LinearCrossEntropy(torch.autograd.Function):
    """With a group: f (all-reduce of the hidden states' gradient), or with sequence shards all-gather of the
    hidden states and reduce-scatter of their gradient, a chunk at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, loss_grad: Tensor | None,
        vocab_start: int, vocab_size: int, group: ProcessGroup | None, shards: int, ignore_index: int,
        label_smoothing: float, z_loss: float, rows: int, sink: GradientSink | None, training: bool,
        backend: str,
    ) -> Tensor:  # fmt: skip
        wide = statistics_dtype(weight.dtype)
        upstream = torch.ones((), dtype=wide, device=hidden.device)
        if loss_grad is not None:
            upstream = loss_grad.to(wide).reshape(())
        wants_hidden, wants_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        accumulate: Accumulate = accumulate_fused
        if wants_weight and sink is not None:
            grad_weight, accumulate = sink.main_grad.view(weight.shape), sink.weight_gradients.accumulate
        elif wants_weight:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        ids_of_shards = target.view(shards, -1)
        reduction: tuple[dist.Work, Tensor] | None = None
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            ids = ids_of_shards[:, start : start + rows].reshape(-1)
            if shards > 1:
                part = all_gather(part, group)
            logits = torch.nn.functional.linear(part, weight)
            stats = cross_entropy_statistics(
                logits, ids, vocab_start, vocab_size, ignore_index, label_smoothing > 0, backend
            )
            loss, normaliser = combine(
                exchange(stats, group), ids, vocab_size, ignore_index, label_smoothing, z_loss
            )
            total = total + loss.sum()
            if grad_hidden is None and grad_weight is None:
                continue
            cross_entropy_backward_(
                upstream.expand(ids.shape), logits, ids, normaliser, vocab_start, vocab_size, ignore_index,
                label_smoothing, z_loss, backend,
            )  # fmt: skip
            if grad_hidden is not None:
                _finish(reduction)
                reduction = _start_product(logits, weight, grad_hidden[start : start + rows], group, shards)
            if grad_weight is not None:
                accumulate(grad_weight, logits.t(), part)
        _finish(reduction)
        held = None if sink is not None else grad_weight
        ctx.save_for_backward(grad_hidden, held, upstream)
        ctx.sink = sink if wants_weight else None
        ctx.known, ctx.dtype, ctx.spent = loss_grad is not None, weight.dtype, False
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, upstream = ctx.saved_tensors
        if ctx.sink is not None:
            if ctx.spent:
                raise RuntimeError("the weight's gradient was counted already; run the forward again")
            ctx.spent = True
            ctx.sink.weight_gradients.compute(ctx.sink.ready)
        factor = grad
        if ctx.known:
            # The weight's gradient was added with what was promised; another would make it silently wrong.
            kept = (grad - upstream).abs() <= 1e-6 * upstream.abs()
            factor = torch.where(kept, torch.ones_like(grad), torch.nan)
        return (
            None if grad_hidden is None else grad_hidden * factor.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * factor).to(ctx.dtype),
            *(None,) * 13,
        )


def _start_product(
    logits: Tensor, weight: Tensor, out: Tensor, group: ProcessGroup | None, shards: int
) -> tuple[dist.Work, Tensor] | None:
    """Begin to write `logits @ weight`, summed over the group, or this rank's shard of that, to `out`."""
    if shards > 1:
        partial = logits @ weight
        return reduce_scatter_into(out, partial, group=group, async_op=True), partial
    torch.mm(logits, weight, out=out)
    if group is None or group.size() == 1:
        return None
    return dist.all_reduce(out, group=group, async_op=True), out


def _finish(reduction: tuple[dist.Work, Tensor] | None) -> None:
    if reduction is not None:
        reduction[0].wait()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    *,
    sequence_parallel: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    budget: int = DEFAULT_BUDGET,
    loss_grad: Tensor | None = None,
    sink: GradientSink | None = None,
    backend: str | None = None,
) -> Tensor:
    """The summed `vocab_parallel_cross_entropy(hidden @ weight.T, ...)`, `budget` bytes of logits at once.

    hidden: (seq, ..., hidden_size), the same on every rank of `group`, or with `sequence_parallel` this
    rank's shard (seq / ranks, ...); weight: (local columns, hidden_size), this rank's rows of the head;
    target: (seq, ...). Returns a scalar, fp32 (fp64 for fp64), the same on every rank; the gradient of hidden
    is that of the whole group.

    The weight's gradient is summed in fp32 over the chunks, for autograd or into `sink.main_grad`. The latter
    happens in the forward pass, so the gradient of the result must be promised by `loss_grad`, a scalar; when
    backward brings another, the gradient of hidden is NaN. Raises ValueError where arguments do not fit.
    """
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)} must be (local columns, {hidden.shape[-1]})")
    shards = group.size() if sequence_parallel and group is not None else 1
    if target.shape != (hidden.shape[0] * shards, *hidden.shape[1:-1]):
        raise ValueError(
            f"target has shape {tuple(target.shape)}, but hidden {tuple(hidden.shape)} "
            f"{f'on each of {shards} ranks ' if shards > 1 else ''}needs one id a row"
        )
    if budget <= 0:
        raise ValueError(f"budget is {budget} bytes; it must be positive")
    if (sink is None) != (loss_grad is None):
        raise ValueError("sink and loss_grad go together: what is added to a main gradient must be final")
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = -(-chunk_rows(target.numel(), weight.shape[0], weight.element_size(), budget) // shards)
    training = torch.is_grad_enabled()
    loss: Tensor = _LinearCrossEntropy.apply(
        flat, weight, target.reshape(-1), loss_grad, vocab_start, vocab_size, group, shards, ignore_index,
        label_smoothing, z_loss, rows, sink, training, choose(hidden, backend),
    )  # fmt: skip
    return loss
