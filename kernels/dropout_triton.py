"""Triton kernel of dropout by counter, alone or with a residual added: tiles of one row x 2048 channels.

bf16 bytes an element: 4, with residual 6. The three 64-bit products of the hash are some 30 integer
instructions an element.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.dropout import threshold
from megalite.kernels.launch import as_rows, warn_unaligned

BLOCK = 2048
WARPS = 4


@triton.jit
def _hashed(x):
    """SplitMix64's finaliser of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def dropout_kernel(
    X, RESIDUAL, SAMPLES, Y, x_stride, residual_stride, batch, columns, tiles, first_position,
    total_positions, key, least, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x * scale where the hash of the element's number says so, else 0; plus the residual."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    sample = tl.load(SAMPLES + row % batch)
    number = (sample * total_positions + first_position + row // batch) * columns + column
    bits = _hashed(number.to(tl.uint64) * 0x9E3779B97F4A7C15 + tl.cast(key, tl.int64).to(tl.uint64))
    x = tl.load(X + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = tl.where((bits >> 40).to(tl.int32) >= least, x * tl.cast(scale, tl.float32), 0.0)
    if RESIDUAL is not None:
        y += tl.load(RESIDUAL + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=mask)


def apply(
    x: Tensor,
    residual: Tensor | None,
    samples: Tensor,
    key: int,
    rate: float,
    first_position: int,
    total_positions: int,
) -> Tensor:
    """See `megalite.kernels.dropout.dropout`; (seq, batch, hidden) with any leading strides to contiguous."""
    x_rows, residual_rows = as_rows(x), None if residual is None else as_rows(residual)
    rows, columns = x_rows.shape
    warn_unaligned("the hidden dim of dropout", columns, x.element_size())
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = -(-columns // BLOCK)
    arguments = {
        "X": x_rows, "RESIDUAL": residual_rows, "SAMPLES": samples.contiguous(), "Y": y,
        "x_stride": x_rows.stride(0),
        "residual_stride": 0 if residual_rows is None else residual_rows.stride(0),
        "batch": x.shape[1], "columns": columns, "tiles": tiles, "first_position": first_position,
        "total_positions": total_positions, "key": key, "least": threshold(rate), "scale": 1 / (1 - rate),
        "BLOCK": BLOCK,
    }  # fmt: skip
    launch.run(dropout_kernel, (rows * tiles,), arguments, x.device, num_warps=WARPS)
    return y
