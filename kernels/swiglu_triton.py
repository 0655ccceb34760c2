"""Triton kernels of SwiGLU: tiles of one row x 2048 columns, so no width wastes lanes and none is too long.

bf16 bytes an output element: forward 6, backward 10, each operand once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.launch import as_rows, warn_unaligned

BLOCK = 2048  # 16 bytes of bf16 a thread at once, on AMD's 64-wide warps too
WARPS = 4


@triton.jit
def forward_kernel(GATE, UP, Y, gate_stride, up_stride, columns, tiles, BLOCK: tl.constexpr):
    """y = gate * sigmoid(gate) * up."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(GATE + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    DY,
    GATE,
    UP,
    DGATE,
    DUP,
    dy_stride,
    gate_stride,
    up_stride,
    out_stride,
    columns,
    tiles,
    BLOCK: tl.constexpr,
):
    """dup = dy silu(gate); dgate = dy up (sigmoid + silu (1 - sigmoid))."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    dy = tl.load(DY + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(GATE + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(DGATE + row * out_stride + column, dgate.to(DGATE.dtype.element_ty), mask=mask)
    tl.store(DUP + row * out_stride + column, (dy * silu).to(DUP.dtype.element_ty), mask=mask)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """(..., ffn) twice, any leading strides, to (..., ffn) contiguous."""
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    rows, columns = gate_rows.shape
    warn_unaligned("the ffn dim of swiglu", columns, gate.element_size())
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tiles = -(-columns // BLOCK)
    arguments = {
        "GATE": gate_rows, "UP": up_rows, "Y": y, "gate_stride": gate_rows.stride(0),
        "up_stride": up_rows.stride(0), "columns": columns, "tiles": tiles, "BLOCK": BLOCK,
    }  # fmt: skip
    launch.run(forward_kernel, (rows * tiles,), arguments, gate.device, num_warps=WARPS)
    return y


def backward(grad: Tensor, gate: Tensor, up: Tensor, stacked: Tensor) -> None:
    """Write the gradients of gate and up into stacked (..., 2, ffn), contiguous."""
    dy_rows, gate_rows, up_rows = as_rows(grad), as_rows(gate), as_rows(up)
    rows, columns = gate_rows.shape
    grads = stacked.view(rows, 2, columns)
    tiles = -(-columns // BLOCK)
    arguments = {
        "DY": dy_rows, "GATE": gate_rows, "UP": up_rows, "DGATE": grads[:, 0], "DUP": grads[:, 1],
        "dy_stride": dy_rows.stride(0), "gate_stride": gate_rows.stride(0), "up_stride": up_rows.stride(0),
        "out_stride": grads.stride(0), "columns": columns, "tiles": tiles, "BLOCK": BLOCK,
    }  # fmt: skip
    launch.run(backward_kernel, (rows * tiles,), arguments, grad.device, num_warps=WARPS)
