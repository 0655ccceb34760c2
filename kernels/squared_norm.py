"""Sum of squares over ranges of a flat buffer: the gradient norm, and whether it is finite, in one read.

In fp64 the square of an fp32 or bf16 number neither overflows nor rounds, so the sum is finite exactly when
every element is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite import _C
from megalite.kernels.dispatch import register
from megalite.kernels.flat import Range, check_ranges, flat_backend, flat_memory

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_PIECE = 1 << 24  # elements: bounds the fp64 temporary of the torch backend to 128 MiB


def squared_norm(values: Tensor, ranges: Sequence[Range], backend: str | None = None) -> Tensor:
    """Sum of the squares of `values` (n,), fp32, bf16 or fp64, within `ranges`: an fp64 scalar tensor.

    `ranges` are ordered, disjoint [start, stop). The result does not depend on the number of threads. No host
    synchronisation. Raises ValueError for what does not fit.
    """
    if values.dim() != 1 or not values.is_contiguous() or values.dtype not in _DTYPES:
        raise ValueError(
            f"squared_norm: {values.dtype} values of shape {tuple(values.shape)} must be flat, contiguous, "
            "float32, bfloat16 or float64"
        )
    check_ranges("squared_norm: ranges", ranges, values.numel())
    borders = [place for pair in ranges for place in pair]
    norm: Tensor = _squared_norm(values, borders, flat_backend(values, backend))
    return norm


def _sum(values: Tensor, borders: Sequence[int], backend: str) -> Tensor:
    ranges = list(zip(borders[0::2], borders[1::2], strict=True))
    if backend == "triton":
        from megalite.kernels import flat_triton

        return flat_triton.squared_norm(values, ranges)
    if backend == "cpu":
        total = _C.squared_norm(flat_memory(values), ranges, threads=torch.get_num_threads())
        return torch.tensor(total, dtype=torch.float64)
    return squared_norm_reference(values, ranges)


_squared_norm = register(
    "squared_norm(Tensor values, int[] borders, str backend) -> Tensor",
    _sum,
    lambda values, borders, backend: values.new_empty((), dtype=torch.float64),
)


def squared_norm_reference(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The same in plain torch, in pieces of fixed length."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for start, stop in ranges:
        for piece in values[start:stop].split(_PIECE):
            total += piece.to(torch.float64, copy=True).square_().sum()
    return total
