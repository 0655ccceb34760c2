"""Column- and row-parallel linear layers that own their backward.

The input gradient comes first and its communication is started; while it runs, the weight gradient is added
straight into the main gradient. That one place gives the overlap and the fused accumulation, and is where a
schedule can put weight gradients off.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    @torch.no_grad()
    def accumulate() -> None:
        matrix = sink.main_grad.view(grad_output.shape[-1], x.shape[-1])
        sink.weight_gradients.accumulate(matrix, grad_output.t(), x)
        sink.ready()

    sink.weight_gradients.compute(accumulate)
    return None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(seq, batch, n) as a matrix (seq * batch, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """(..., k) as a matrix (n, k)."""
    return weight.view(-1, weight.shape[-1])


class _ColumnLinear(torch.autograd.Function):
    """f fused into the product: identity forward, all-reduce of dx backward.

    With sequence parallelism: all-gather of sequence shards forward, reduce-scatter of dx backward. Several
    weights read the same input, which is then gathered once, and their parts of dx are summed before the
    reduction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        axis: Axis,
        sequence_parallel: bool,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x)  # the shard, not the gathered input
        ctx.weights = weights  # the parameters themselves: autograd may save an alias, which has no sink
        ctx.axis, ctx.sequence_parallel, ctx.has_bias = axis, sequence_parallel, bool(biases)
        whole = finish(start_all_gather(x, axis)) if sequence_parallel else x
        return tuple(
            nn.functional.linear(whole, _matrix(weight), None if bias is None else bias.view(-1))
            for weight, bias in zip(weights, biases or (None,) * count, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        gathering = start_all_gather(x, ctx.axis) if ctx.sequence_parallel else (x, None)
        grads = [_rows(grad) for grad in grad_outputs]
        grad_x = grads[0] @ _matrix(weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, _matrix(weight))
        start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
        reducing = start(grad_x.view(*grad_outputs[0].shape[:-1], -1), ctx.axis)
        rows = _rows(finish(gathering))
        grad_weights = [add_weight_gradient(*each, rows) for each in zip(weights, grads, strict=True)]
        grad_biases = [grad.sum(0) for grad in grads] if ctx.has_bias else []
        return finish(reducing), None, None, None, *grad_weights, *grad_biases


class _PartialLinear(torch.autograd.Function):
    """The product of a row-parallel layer before its sum: nothing to communicate in either direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # as in _ColumnLinear
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = grad_output @ weight
        return grad_x, add_weight_gradient(weight, _rows(grad_output), _rows(x))


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """`y = x W^T + b` with the rows of W cut over `axis`.

    x: (seq, batch, k), or its shard (seq / tp, batch, k) with `sequence_parallel`; weight: (..., k), seen
    as (n / tp, k); returns (seq, batch, n / tp).
    """
    biases = () if bias is None else (bias,)
    return column_linears(x, (weight,), biases, axis, sequence_parallel)[0]


def column_linears(
    x: torch.Tensor,
    weights: Iterable[torch.Tensor],
    biases: Iterable[torch.Tensor],
    axis: Axis,
    sequence_parallel: bool,
) -> tuple[torch.Tensor, ...]:
    """`column_linear` of several weights on one input, communicated once; `biases`: one each, or none."""
    weights, biases = tuple(weights), [bias.reshape(-1) for bias in biases]
    outputs: tuple[torch.Tensor, ...] = _ColumnLinear.apply(
        x, axis, sequence_parallel, len(weights), *weights, *biases
    )
    return outputs


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """`y = sum over axis of x W^T, + b` with the columns of W cut over `axis`.

    x: (seq, batch, k / tp); weight: (n, k / tp); returns (seq, batch, n), or its shard (seq / tp, batch, n)
    with `sequence_parallel`. The bias is added once, after the sum.
    """
    y = sum_partials(_PartialLinear.apply(x, weight), axis, sequence_parallel)
    return y if bias is None else y + bias
