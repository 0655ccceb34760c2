"""Sum of squares over ranges of a flat buffer: the gradient norm, and whether it is finite, in one read.

In fp64 the square of an fp32 number neither overflows nor rounds, so the sum is finite exactly when every
element is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite import _C
from megalite.kernels.flat import Range, check_ranges, flat_backend, flat_memory

_PIECE = 1 << 24  # elements: bounds the fp64 temporary of the torch backend to 128 MiB


def squared_norm(values: Tensor, ranges: Sequence[Range], backend: str | None = None) -> Tensor:
    """Sum of the squares of `values` (n,), fp32 or fp64, within `ranges`: an fp64 scalar tensor.

    `ranges` are ordered, disjoint [start, stop). The result does not depend on the number of threads. No host
    synchronisation. Raises ValueError for what does not fit.
    """
    if values.dim() != 1 or not values.is_contiguous() or values.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"squared_norm: {values.dtype} values of shape {tuple(values.shape)} must be flat, contiguous, "
            "float32 or float64"
        )
    check_ranges("squared_norm: ranges", ranges, values.numel())
    chosen = flat_backend(values, backend)
    if chosen == "triton":
        from megalite.kernels import flat_triton

        return flat_triton.squared_norm(values, ranges)
    if chosen == "cpu":
        total = _C.squared_norm(flat_memory(values), list(ranges), threads=torch.get_num_threads())
        return torch.tensor(total, dtype=torch.float64)
    return squared_norm_reference(values, ranges)


def squared_norm_reference(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The same in plain torch, in pieces of fixed length."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for start, stop in ranges:
        for piece in values[start:stop].split(_PIECE):
            total += piece.to(torch.float64, copy=True).square_().sum()
    return total
