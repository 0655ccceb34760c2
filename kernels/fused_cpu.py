"""The fused C++ kernels of megalite._C for bf16 and fp32 tensors on a CPU.

One pass over memory where torch makes many. Deterministic for any number of threads. Each function mirrors
the one of the same name in the Triton backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite import _C
from megalite.kernels.launch import as_rows


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _at(rows: Tensor | None) -> tuple[int, int]:
    """Address and row stride; zeros for no tensor."""
    return (0, 0) if rows is None else (rows.data_ptr(), rows.stride(0))


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, x + residual (None without one) and rstd; see `rms_norm_triton.forward`."""
    x_rows, r_rows = as_rows(x), None if residual is None else as_rows(residual)
    rows, columns = x_rows.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype)
    rstd = torch.empty(x.shape[:-1])
    scale = (weight.float() + weight_offset).contiguous()
    _C.rms_norm_forward(
        _name(x),
        _name(x if residual is None else residual),
        *_at(x_rows),
        *_at(r_rows),
        scale.data_ptr(),
        y.data_ptr(),
        0 if total is None else total.data_ptr(),
        rstd.data_ptr(),
        rows,
        columns,
        eps,
        torch.get_num_threads(),
    )
    return y, total, rstd


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x (grad_total added) and of weight; see `rms_norm_triton.backward`."""
    x_rows, dy_rows = as_rows(x), as_rows(grad)
    ds_rows = None if grad_total is None else as_rows(grad_total)
    rows, columns = x_rows.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype)
    grad_weight = torch.empty(columns)
    scale = (weight.float() + weight_offset).contiguous()
    _C.rms_norm_backward(
        _name(grad),
        _name(x),
        *_at(dy_rows),
        *_at(ds_rows),
        *_at(x_rows),
        scale.data_ptr(),
        rstd.data_ptr(),
        grad_x.data_ptr(),
        grad_weight.data_ptr(),
        rows,
        columns,
        torch.get_num_threads(),
    )
    return grad_x, grad_weight.to(weight.dtype)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """(..., ffn) twice, any leading strides, to (..., ffn) contiguous."""
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    _C.swiglu_forward(
        _name(gate),
        *_at(gate_rows),
        *_at(up_rows),
        y.data_ptr(),
        *gate_rows.shape,
        torch.get_num_threads(),
    )
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, stacked: Tensor) -> None:
    """Write the gradients of gate and up into stacked (..., 2, ffn), contiguous."""
    dy_rows, gate_rows, up_rows = as_rows(grad), as_rows(gate), as_rows(up)
    _C.swiglu_backward(
        _name(gate),
        *_at(dy_rows),
        *_at(gate_rows),
        *_at(up_rows),
        stacked.data_ptr(),
        *gate_rows.shape,
        torch.get_num_threads(),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate q or k; contiguous, see `megalite.kernels.rope.rope`."""
    y = torch.empty(x.shape, dtype=x.dtype)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    x = x if x.dim() == 5 else x.unsqueeze(2)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    _C.rope(
        _name(x),
        x.data_ptr(),
        list(x.shape),
        list(x.stride()),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        cos.dim() == 3,
        interleaved,
        inverse,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def cross_entropy_statistics(
    logits: Tensor, target: Tensor, vocab_start: int, columns: int, ignore_index: int
) -> Tensor:
    """(4, *target) fp32; see `cross_entropy_triton.statistics`."""
    rows = as_rows(logits)
    ids = target.long().contiguous()
    stats = torch.empty(4, *target.shape)
    _C.cross_entropy_statistics(
        _name(logits),
        *_at(rows),
        ids.data_ptr(),
        stats.data_ptr(),
        rows.shape[0],
        columns,
        vocab_start,
        ignore_index,
        torch.get_num_threads(),
    )
    return stats


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    columns: int, ignore_index: int, label_smoothing: float, z_loss: float, out: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the logits to `out`, contiguous, which may be the logits themselves."""
    rows = as_rows(logits)
    ids, grads, normaliser = target.long().contiguous(), grad.float().contiguous(), normaliser.contiguous()
    _C.cross_entropy_backward(
        _name(logits),
        grads.data_ptr(),
        *_at(rows),
        ids.data_ptr(),
        normaliser.data_ptr(),
        out.data_ptr(),
        *rows.shape,
        columns,
        vocab_start,
        ignore_index,
        label_smoothing,
        label_smoothing / vocab_size,
        z_loss,
        torch.get_num_threads(),
    )
