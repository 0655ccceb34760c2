"""AdamW on flat buffers: one pass over the memory of a bucket.

Loshchilov and Hutter 2019 (https://arxiv.org/abs/1711.05101), algorithm 2 with a constant schedule
multiplier: m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t))
+ eps) + decay w). What changes from step to step is read from one small tensor on the device: no host
synchronisation, no recompilation, and a captured CUDA graph stays valid.

Bytes read and written for a parameter; the squared norm before it reads the gradient once more:

    weights   gradient   master              m, v          bytes
    fp32      fp32 4     the weights 8       fp32 8 + 8    28
    bf16 2    fp32 4     fp32 8              fp32 8 + 8    30
    bf16 4    fp32 4     16-bit remainder 4  fp32 8 + 8    28
    bf16 4    fp32 4     16-bit remainder 4  bf16 4 + 4    20
    bf16 4    bf16 2     16-bit remainder 4  bf16 4 + 4    18
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megalite import _C
from megalite.kernels.dispatch import register
from megalite.kernels.flat import Range, check_ranges, flat_backend, flat_memory
from megalite.kernels.remainder import join, round_to, split

SCALARS = ("lr", "grad_scale", "inverse_bias1", "inverse_bias2", "skip")
"""Entries of the scalars tensor: gradients are multiplied by `grad_scale` (unscaling times clipping);
`inverse_bias1` is 1 / (1 - beta1^t), likewise for beta2; where `skip` is not zero nothing changes."""

_MASTER_DTYPES = (torch.float32, torch.float64)
_CAST_DTYPES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 24  # elements: bounds the temporaries of the torch backend to 64 MiB each


@dataclass(frozen=True)
class FlatAdamW:
    """The memory of one bucket of n elements, all (n,) and contiguous on one device.

    `weights`: fp32 or fp64 and themselves the master; or bf16 or fp16 beside an fp32 `master`; or bf16 with
    int16 `remainder`, see kernels.remainder. `grads`, `exp_avg`, `exp_avg_sq`: each in the master's dtype or,
    beside an fp32 master, in bf16. A moment is used before it is rounded (nearest, ties to even).
    """

    weights: Tensor
    grads: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None = None
    remainder: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The master's, in which everything is computed."""
        if self.remainder is not None:
            return torch.float32
        return self.weights.dtype if self.master is None else self.master.dtype

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def narrow(self, piece: slice) -> FlatAdamW:
        """The same memory, of the elements in `piece` alone."""
        return FlatAdamW(**{name: tensor[piece] for name, tensor in self.tensors().items()})


def adamw(
    flat: FlatAdamW,
    scalars: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decay_ranges: Sequence[Range],
    backend: str | None = None,
) -> None:
    """One AdamW step in place.

    `scalars`: (5,) of the master's dtype, see SCALARS. Elements within `decay_ranges`, ordered and disjoint
    [start, stop), are decayed. bf16 weights are the master rounded to nearest, ties away from zero; fp16 ones
    ties to even. Raises ValueError for a shape, dtype, layout or range that does not fit.
    """
    _check(flat, scalars, decay_ranges)
    _adamw(
        flat.weights,
        flat.master,
        flat.remainder,
        flat.grads,
        flat.exp_avg,
        flat.exp_avg_sq,
        scalars,
        beta1,
        beta2,
        eps,
        weight_decay,
        [place for pair in decay_ranges for place in pair],
        flat_backend(flat.weights, backend),
    )


def _step(
    weights: Tensor,
    master: Tensor | None,
    remainder: Tensor | None,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    borders: Sequence[int],
    backend: str,
) -> None:
    flat = FlatAdamW(weights, grads, exp_avg, exp_avg_sq, master, remainder)
    decay_ranges = list(zip(borders[0::2], borders[1::2], strict=True))
    if backend == "triton":
        from megalite.kernels import flat_triton

        flat_triton.adamw(flat, scalars, beta1, beta2, eps, weight_decay, decay_ranges)
        return
    if backend == "cpu":
        _C.adamw(
            flat_memory(weights),
            None if master is None else flat_memory(master),
            None if remainder is None else flat_memory(remainder),
            *(flat_memory(tensor) for tensor in (grads, exp_avg, exp_avg_sq, scalars)),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decay_ranges=decay_ranges,
            threads=torch.get_num_threads(),
        )
        return
    for start, stop, decayed in _pieces(weights.numel(), borders):
        piece = flat.narrow(slice(start, stop))
        _step_in_torch(piece, scalars, beta1, beta2, eps, weight_decay if decayed else 0.0)


_adamw = register(
    "adamw(Tensor(a!) weights, Tensor(b!)? master, Tensor(c!)? remainder, Tensor grads, Tensor(d!) exp_avg, "
    "Tensor(e!) exp_avg_sq, Tensor scalars, float beta1, float beta2, float eps, float weight_decay, "
    "int[] borders, str backend) -> ()",
    _step,
    lambda *arguments: None,
)


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
    """The new master, first and second moment of one range that has one weight decay, in plain torch.

    All in the master's dtype.
    """
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


def _step_in_torch(
    flat: FlatAdamW, scalars: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    if flat.remainder is not None:
        master = join(flat.weights, flat.remainder)
    else:
        master = flat.weights if flat.master is None else flat.master
    moments = (flat.exp_avg.to(flat.dtype), flat.exp_avg_sq.to(flat.dtype))
    grads = flat.grads.to(flat.dtype)
    new, m, v = adamw_reference(master, *moments, grads, scalars, beta1, beta2, eps, weight_decay)
    flat.exp_avg.copy_(m)
    flat.exp_avg_sq.copy_(v)
    if flat.remainder is not None:
        for old, part in zip((flat.weights, flat.remainder), split(new), strict=True):
            old.copy_(part)
        return
    master.copy_(new)
    if flat.master is not None:
        flat.weights.copy_(round_to(new, flat.weights.dtype))


def _pieces(length: int, borders: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, decayed) that cover [0, length), cut at the ranges' borders and at most _PIECE long."""
    for index, (start, stop) in enumerate(pairwise([0, *borders, length])):
        for begin in range(start, stop, _PIECE):
            yield begin, min(begin + _PIECE, stop), index % 2 == 1


def _check(flat: FlatAdamW, scalars: Tensor, decay_ranges: Sequence[Range]) -> None:
    _check_master(flat)
    for name in ("grads", "exp_avg", "exp_avg_sq"):
        tensor, allowed = getattr(flat, name), [flat.dtype]
        if flat.dtype == torch.float32:
            allowed.append(torch.bfloat16)
        if tensor.dtype not in allowed:
            options = " or ".join(map(str, allowed))
            raise ValueError(f"adamw: {name} is {tensor.dtype}, must be {options} with a {flat.dtype} master")
    if scalars.dtype != flat.dtype:
        raise ValueError(f"adamw: scalars is {scalars.dtype}, must be {flat.dtype} as the master")
    if scalars.shape != (len(SCALARS),):
        raise ValueError(f"adamw: scalars has shape {tuple(scalars.shape)}, must hold {', '.join(SCALARS)}")
    length = flat.weights.numel()
    for name, tensor in flat.tensors().items():
        if tensor.shape != (length,) or not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise ValueError(f"adamw: {name} of shape {shape} must be flat, contiguous and {length} long")
    for name, tensor in {**flat.tensors(), "scalars": scalars}.items():
        if tensor.device != flat.weights.device:
            raise ValueError(f"adamw: {name} is on {tensor.device}, the weights are on {flat.weights.device}")
    check_ranges("adamw: decay_ranges", decay_ranges, length)


def _check_master(flat: FlatAdamW) -> None:
    weights, master, remainder = flat.weights, flat.master, flat.remainder
    if remainder is not None:
        if master is not None or remainder.dtype != torch.int16 or weights.dtype != torch.bfloat16:
            raise ValueError(
                f"adamw: a remainder of {remainder.dtype} with {weights.dtype} weights; int16 goes with "
                "bfloat16 weights and no other master"
            )
        return
    target = weights if master is None else master
    if target.dtype not in _MASTER_DTYPES:
        what = "weights without a master" if master is None else "master"
        raise ValueError(f"adamw: {what} must be float32 or float64, got {target.dtype}")
    if master is not None and (weights.dtype not in _CAST_DTYPES or master.dtype != torch.float32):
        raise ValueError(
            f"adamw: {weights.dtype} weights with a {master.dtype} master; "
            "a float32 master goes with bfloat16 or float16 weights"
        )
