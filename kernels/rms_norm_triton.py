"""Triton kernels of RMSNorm, with and without a residual added first.

bf16 bytes an element: forward 4 (8 with residual), backward 6 (8), each operand once. A row's second pass
over its operands hits the first-level cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.launch import as_rows, power_of_two, processors, warn_unaligned


@triton.jit
def _wide(pointers, mask, POLICY: tl.constexpr):
    """Loaded as fp32, zero where masked."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _source(X, R, S, x_at, r_at, mask):
    """x, or x + r as rounded to S's dtype: what backward will see is what is normalised."""
    s = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
    if R is not None:
        s += tl.load(R + r_at, mask=mask, other=0.0).to(tl.float32)
        s = s.to(S.dtype.element_ty).to(tl.float32)
    return s


@triton.jit
def forward_kernel(
    X, R, W, Y, S, RSTD, x_stride, r_stride, rows, columns, eps, weight_offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: y = s * rstd * (w + offset) where s is x, or x + r (then stored to S)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    place = tl.arange(0, BLOCK)[None, :]
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    s = squares
    for chunk in range(CHUNKS):
        column = chunk * BLOCK + place
        mask = inside & (column < columns)
        s = _source(X, R, S, row * x_stride + column, row * r_stride + column, mask)
        if R is not None:
            tl.store(S + row * columns + column, s.to(S.dtype.element_ty), mask=mask)
        squares += s * s
    rstd = tl.rsqrt(tl.sum(squares, 1)[:, None] / columns + tl.cast(eps, tl.float32))
    tl.store(RSTD + row, rstd, mask=inside)
    for chunk in range(CHUNKS):
        column = chunk * BLOCK + place
        mask = inside & (column < columns)
        if CHUNKS > 1:  # made again from cache: reading S back would race with other threads' stores
            s = _source(X, R, S, row * x_stride + column, row * r_stride + column, mask)
        w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)
        y = s * rstd * (w + tl.cast(weight_offset, tl.float32))
        tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    DY, DS, X, W, RSTD, DX, PARTIAL, dy_stride, ds_stride, x_stride, rows, columns, weight_offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (dy (w + offset) - x_hat mean(dy (w + offset) x_hat)) + ds, and partial sums of dy x_hat.

    Program (p, c) takes every num_programs-th group of ROWS rows and writes columns c BLOCK to (c + 1) BLOCK.
    The operands are read a second time, from cache, rather than held in registers across the reduction: at
    8192 columns 64 registers a thread instead of 128, so twice the warps to hide the memory's latency.
    """
    offset = tl.cast(weight_offset, tl.float32)
    place = tl.arange(0, BLOCK)[None, :]
    column = tl.program_id(1) * BLOCK + place
    within = column < columns
    accumulated = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = row < rows
        if ROWS == 1:  # noqa: SIM108  (only the branch taken is compiled)
            rstd = tl.load(RSTD + first)  # one load; Triton 3.6 makes eight of a tile of one
        else:
            rstd = tl.load(RSTD + row, mask=inside, other=0.0)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        for chunk in range(CHUNKS):
            every = chunk * BLOCK + place
            mask = inside & (every < columns)
            # The eviction hints keep the two reads apart: merged, they would be held in registers.
            x = _wide(X + row * x_stride + every, mask, "evict_last")
            dy = _wide(DY + row * dy_stride + every, mask, "evict_last")
            w = _wide(W + every, every < columns, "evict_last")
            w += offset
            products += x * dy * w
        mean = tl.sum(products, 1)[:, None] * rstd / columns
        mask = inside & within
        x = _wide(X + row * x_stride + column, mask, "evict_first")
        dy = _wide(DY + row * dy_stride + column, mask, "evict_first")
        w = tl.load(W + column, mask=within, other=0.0).to(tl.float32) + offset
        x_hat = x * rstd
        dx = (dy * w - x_hat * mean) * rstd
        accumulated += dy * x_hat
        if DS is not None:
            dx += tl.load(DS + row * ds_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(DX + row * columns + column, dx.to(DX.dtype.element_ty), mask=mask)
    partial = tl.sum(accumulated, 0)[None, :]
    tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * columns + column, partial, mask=within)


@dataclass(frozen=True)
class Plan:
    """Tile of one program (rows x block columns, `chunks` of them a row) and its warps."""

    rows: int
    block: int
    chunks: int
    warps: int
    programs_per_processor: int = 0  # backward only


def forward_plan(columns: int) -> Plan:
    """16 elements a thread; a row longer than 16,384 is read in chunks, twice (then from cache)."""
    block = power_of_two(columns)
    if block > 16384:
        return Plan(1, 8192, -(-columns // 8192), 16)
    rows = max(1, 2048 // block)
    return Plan(rows, block, 1, max(4, min(16, rows * block // 512)))


def backward_plan(columns: int) -> Plan:
    """As forward, but one tile of at most 16,384 columns: longer rows are split over programs."""
    block = min(16384, power_of_two(columns))
    rows = max(1, 2048 // block)
    warps = max(4, min(16, rows * block // 512))
    return Plan(rows, block, -(-columns // block), warps, 4 if block <= 4096 else 2)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, x + residual (None without one) and rstd; x and residual (..., columns) of any leading strides."""
    x_rows, r_rows = as_rows(x), None if residual is None else as_rows(residual)
    rows, columns = x_rows.shape
    warn_unaligned("the hidden dim of rms_norm", columns, x.element_size())
    plan = forward_plan(columns)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    arguments = {
        "X": x_rows, "R": r_rows, "W": weight.contiguous(), "Y": y, "S": total, "RSTD": rstd,
        "x_stride": x_rows.stride(0), "r_stride": 0 if r_rows is None else r_rows.stride(0), "rows": rows,
        "columns": columns, "eps": eps, "weight_offset": weight_offset,
        "ROWS": plan.rows, "BLOCK": plan.block, "CHUNKS": plan.chunks,
    }  # fmt: skip
    launch.run(forward_kernel, (-(-rows // plan.rows),), arguments, x.device, num_warps=plan.warps)
    return y, total, rstd


def backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the normalised x (grad_total added) and of weight, summed in fp32 in a fixed order."""
    x_rows, dy_rows = as_rows(x), as_rows(grad)
    ds_rows = None if grad_total is None else as_rows(grad_total)
    rows, columns = x_rows.shape
    plan = backward_plan(columns)
    programs = max(1, min(-(-rows // plan.rows), plan.programs_per_processor * processors(x.device)))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    arguments = {
        "DY": dy_rows, "DS": ds_rows, "X": x_rows, "W": weight.contiguous(), "RSTD": rstd, "DX": grad_x,
        "PARTIAL": partial, "dy_stride": dy_rows.stride(0),
        "ds_stride": 0 if ds_rows is None else ds_rows.stride(0), "x_stride": x_rows.stride(0), "rows": rows,
        "columns": columns, "weight_offset": weight_offset,
        "ROWS": plan.rows, "BLOCK": plan.block, "CHUNKS": plan.chunks,
    }  # fmt: skip
    launch.run(backward_kernel, (programs, plan.chunks), arguments, x.device, num_warps=plan.warps)
    return grad_x, partial.sum(0).to(weight.dtype)
