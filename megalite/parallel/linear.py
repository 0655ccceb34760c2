"""Column- and row-parallel linear layers that own their backward.

The input gradient comes first and its communication is started; while it runs, the weight gradient is added
straight into the main gradient. That one place gives the overlap and the fused accumulation, and is where a
schedule can put weight gradients off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megalite.parallel.mappings import (
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_partials,
)
from megalite.parallel.params import sink_of
from megalite.parallel.topology import Axis


def add_weight_gradient(
    weight: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    """Gradient of `weight` (n, k) seen as a matrix, from `grad_output` (tokens, n) and `x` (tokens, k).

    Added to the parameter's main gradient when it has one, at once or when the schedule asks for it (then
    None is returned), else returned in the weight's shape for autograd.
    """
    sink = sink_of(weight)
    if sink is None:
        return (grad_output.t() @ x).view_as(weight)
    matrix = sink.main_grad.view(grad_output.shape[-1], x.shape[-1])

    @torch.no_grad()
    def accumulate() -> None:
        if matrix.dtype == x.dtype:
            matrix.addmm_(grad_output.t(), x)
        else:
            matrix.add_(grad_output.t() @ x)
        sink.ready()

    sink.weight_gradients.compute(accumulate)
    return None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(seq, batch, n) as a matrix (seq * batch, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


class _ColumnLinear(torch.autograd.Function):
    """f fused into the product: identity forward, all-reduce of dx backward.

    With sequence parallelism: all-gather of sequence shards forward, reduce-scatter of dx backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)  # the shard, not the gathered input
        ctx.axis, ctx.sequence_parallel, ctx.has_bias = axis, sequence_parallel, bias is not None
        whole = finish(start_all_gather(x, axis)) if sequence_parallel else x
        matrix = weight.view(-1, weight.shape[-1])
        return nn.functional.linear(whole, matrix, None if bias is None else bias.view(-1))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathering = start_all_gather(x, ctx.axis) if ctx.sequence_parallel else (x, None)
        grad_x = grad_output @ weight.view(-1, weight.shape[-1])
        start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
        reducing = start(grad_x, ctx.axis)
        rows = _rows(grad_output)
        grad_weight = add_weight_gradient(weight, rows, _rows(finish(gathering)))
        grad_bias = rows.sum(0) if ctx.has_bias else None
        return finish(reducing), grad_weight, grad_bias, None, None


class _PartialLinear(torch.autograd.Function):
    """The product of a row-parallel layer before its sum: nothing to communicate in either direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_output @ weight
        return grad_x, add_weight_gradient(weight, _rows(grad_output), _rows(x))


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """`y = x W^T + b` with the rows of W cut over `axis`.

    x: (seq, batch, k), or its shard (seq / tp, batch, k) with `sequence_parallel`; weight: (..., k), seen
    as (n / tp, k); returns (seq, batch, n / tp).
    """
    flat_bias = None if bias is None else bias.reshape(-1)
    return _ColumnLinear.apply(x, weight, flat_bias, axis, sequence_parallel)


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """`y = sum over axis of x W^T, + b` with the columns of W cut over `axis`.

    x: (seq, batch, k / tp); weight: (n, k / tp); returns (seq, batch, n), or its shard (seq / tp, batch, n)
    with `sequence_parallel`. The bias is added once, after the sum.
    """
    y = sum_partials(_PartialLinear.apply(x, weight), axis, sequence_parallel)
    return y if bias is None else y + bias
