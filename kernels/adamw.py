"""AdamW on flat buffers: one pass over the memory of a bucket.

Loshchilov and Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2 with a constant schedule
multiplier: m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t))
+ eps) + decay w). What changes from step to step is read from one small tensor on the device: no host
synchronisation, no recompilation, and a captured CUDA graph stays valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megalite import _C
from megalite.kernels.flat import Range, check_ranges, flat_backend, flat_memory

SCALARS = ("lr", "grad_scale", "inverse_bias1", "inverse_bias2", "skip")
"""Entries of the scalars tensor: gradients are multiplied by `grad_scale` (unscaling times clipping);
`inverse_bias1` is 1 / (1 - beta1^t), likewise for beta2; where `skip` is not zero nothing changes."""

_MASTER_DTYPES = (torch.float32, torch.float64)
_CAST_DTYPES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 24  # elements: bounds the temporaries of the torch backend to 64 MiB each


def adamw(
    weights: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    *,
    master: Tensor | None = None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_ranges: Sequence[Range],
    backend: str | None = None,
) -> None:
    """One AdamW step in place on a flat bucket of n elements.

    `grads`, `exp_avg`, `exp_avg_sq` and `master`: (n,) fp32 or fp64, all the same; `scalars`: (5,) of that
    dtype, see SCALARS. `weights`: (n,); with `master` None they are the master and share its dtype, else bf16
    or fp16 and receive the rounded master (nearest, ties to even). Elements within `decay_ranges`, ordered
    and disjoint [start, stop), are decayed. Raises ValueError for a shape, dtype, layout or range that does
    not fit.
    """
    target = weights if master is None else master
    named = {"grads": grads, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _check(weights, master, named, scalars, decay_ranges)
    chosen = flat_backend(weights, backend)
    if chosen == "triton":
        from megalite.kernels import flat_triton

        copy = None if master is None else weights
        hyper = (beta1, beta2, eps, weight_decay, decay_ranges)
        flat_triton.adamw(target, copy, grads, exp_avg, exp_avg_sq, scalars, *hyper)
        return
    if chosen == "cpu":
        _C.adamw(
            flat_memory(target),
            None if master is None else flat_memory(weights),
            *(flat_memory(tensor) for tensor in named.values()),
            flat_memory(scalars),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decay_ranges=list(decay_ranges),
            threads=torch.get_num_threads(),
        )
        return
    for start, stop, decayed in _pieces(target.numel(), decay_ranges):
        piece = slice(start, stop)
        state = (target[piece], exp_avg[piece], exp_avg_sq[piece])
        updated = adamw_reference(
            *state, grads[piece], scalars, beta1, beta2, eps, weight_decay if decayed else 0.0
        )
        for old, new in zip(state, updated, strict=True):
            old.copy_(new)
        if master is not None:
            weights[piece].copy_(updated[0])


def adamw_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Tensor,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new master, first and second moment of one range that has one weight decay, in plain torch."""
    lr, grad_scale, inverse_bias1, inverse_bias2, skip = scalars.unbind()
    grad = grads * grad_scale
    m = exp_avg * beta1 + grad * (1.0 - beta1)
    v = exp_avg_sq * beta2 + grad * grad * (1.0 - beta2)
    direction = m * inverse_bias1 / ((v * inverse_bias2).sqrt() + eps)
    w = master - (direction + master * weight_decay) * lr
    skipped = skip != 0
    return (
        torch.where(skipped, master, w),
        torch.where(skipped, exp_avg, m),
        torch.where(skipped, exp_avg_sq, v),
    )


def _pieces(length: int, decay_ranges: Sequence[Range]) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, decayed) that cover [0, length), cut at the ranges' borders and at most _PIECE long."""
    borders = [0, *(place for pair in decay_ranges for place in pair), length]
    for index, (start, stop) in enumerate(pairwise(borders)):
        for begin in range(start, stop, _PIECE):
            yield begin, min(begin + _PIECE, stop), index % 2 == 1


def _check(
    weights: Tensor,
    master: Tensor | None,
    named: dict[str, Tensor],
    scalars: Tensor,
    decay_ranges: Sequence[Range],
) -> None:
    target = weights if master is None else master
    if target.dtype not in _MASTER_DTYPES:
        what = "weights without a master" if master is None else "master"
        raise ValueError(f"adamw: {what} must be float32 or float64, got {target.dtype}")
    if master is not None and (weights.dtype not in _CAST_DTYPES or master.dtype != torch.float32):
        raise ValueError(
            f"adamw: {weights.dtype} weights with a {master.dtype} master; "
            "a float32 master goes with bfloat16 or float16 weights"
        )
    for name, tensor in {**named, "scalars": scalars}.items():
        if tensor.dtype != target.dtype:
            raise ValueError(f"adamw: {name} is {tensor.dtype}, must be {target.dtype} as the master")
    if scalars.shape != (len(SCALARS),):
        raise ValueError(f"adamw: scalars has shape {tuple(scalars.shape)}, must hold {', '.join(SCALARS)}")
    every = {"weights": weights, "master": target, **named}
    for name, tensor in every.items():
        if tensor.shape != (weights.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"adamw: {name} of shape {tuple(tensor.shape)} must be flat, contiguous and "
                f"{weights.numel()} long"
            )
    for name, tensor in {**every, "scalars": scalars}.items():
        if tensor.device != weights.device:
            raise ValueError(f"adamw: {name} is on {tensor.device}, the weights are on {weights.device}")
    check_ranges("adamw: decay_ranges", decay_ranges, weights.numel())
