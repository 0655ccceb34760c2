"""Column- and row-parallel linear layers that own their backward.

The input gradient comes first and its communication is started; while it runs, the weight gradient is added
straight into the main gradient. That one place gives the overlap and the fused accumulation, and is where a
schedule can put weight gradients off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megalite.parallel.mappings import finish, start_all_gather
from megalite.parallel.params import sink_of
from megalite.parallel.products import TensorParallel, gathered_products, rows, start_reduced_product


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
        ctx: Any, x: torch.Tensor, tp: TensorParallel, count: int, *weights_and_biases: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x)  # the shard, not the gathered input
        ctx.weights = weights  # the parameters themselves: autograd may save an alias, which has no sink
        ctx.tp, ctx.has_bias = tp, bool(biases)
        _, outputs = gathered_products(x, [_matrix(weight).t() for weight in weights], biases, tp)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weights, tp = ctx.saved_tensors, ctx.weights, ctx.tp
        gathering = start_all_gather(x, tp.axis) if tp.sequence_parallel else (x, None)
        reducing = start_reduced_product(grad_outputs, [_matrix(weight) for weight in weights], tp)
        whole, grads = rows(finish(gathering)), [rows(grad) for grad in grad_outputs]
        grad_weights = [add_weight_gradient(*each, whole) for each in zip(weights, grads, strict=True)]
        grad_biases = [grad.sum(0) for grad in grads] if ctx.has_bias else []
        return finish(reducing), None, None, *grad_weights, *grad_biases


class _RowLinear(torch.autograd.Function):
    """g fused into the product: all-reduce forward, identity backward.

    With sequence parallelism: reduce-scatter along the sequence forward, all-gather backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp  # as in _ColumnLinear
        return finish(start_reduced_product([x], [weight.t()], tp))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        whole, (grad_x,) = gathered_products(grad_output, [weight], (), ctx.tp)
        return grad_x, add_weight_gradient(weight, rows(whole), rows(x)), None


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    """`y = x W^T + b` with the rows of W cut over the axis.

    x: (seq, batch, k), or its shard (seq / tp, batch, k) with sequence parallelism; weight: (..., k), seen
    as (n / tp, k); returns (seq, batch, n / tp).
    """
    return column_linears(x, (weight,), () if bias is None else (bias,), tp)[0]


def column_linears(
    x: torch.Tensor, weights: Iterable[torch.Tensor], biases: Iterable[torch.Tensor], tp: TensorParallel
) -> tuple[torch.Tensor, ...]:
    """`column_linear` of several weights on one input, communicated once; `biases`: one each, or none."""
    weights, biases = tuple(weights), [bias.reshape(-1) for bias in biases]
    outputs: tuple[torch.Tensor, ...] = _ColumnLinear.apply(x, tp, len(weights), *weights, *biases)
    return outputs


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    """`y = sum over the axis of x W^T, + b` with the columns of W cut over it.

    x: (seq, batch, k / tp); weight: (n, k / tp); returns (seq, batch, n), or its shard (seq / tp, batch, n)
    with sequence parallelism. The bias is added once, after the sum.
    """
    y: torch.Tensor = _RowLinear.apply(x, weight, tp)
    return y if bias is None else y + bias
