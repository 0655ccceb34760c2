"""Root-mean-square normalisation, alone or after a residual is added.

y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset): Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467, eq. 4. Saved for backward: what was normalised, the weight and one fp32
number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import choose, register, statistics_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0) -> Tensor:
    """The equation in plain differentiable torch; rounded to x's dtype once, at the end."""
    wide = statistics_dtype(x.dtype)
    x_wide = x.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * rstd * (weight.to(wide) + weight_offset)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual in x's dtype, and that sum in the residual's, in differentiable torch."""
    total = (x.to(statistics_dtype(x.dtype)) + residual).to(residual.dtype)
    return rms_norm_reference(total, weight, eps, weight_offset).to(x.dtype), total


def _normalise(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    wide = statistics_dtype(x.dtype)
    x_wide = x.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1) + eps)
    y = (x_wide * rstd.unsqueeze(-1) * (weight.to(wide) + weight_offset)).to(dtype)
    return y.contiguous(), rstd.contiguous()


def _forward(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from megalite.kernels import rms_norm_triton

        y, _, rstd = rms_norm_triton.forward(x, None, weight, eps, weight_offset)
        return y, rstd
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        y, _, rstd = fused_cpu.rms_norm_forward(x, None, weight, eps, weight_offset)
        return y, rstd
    return _normalise(x, weight, eps, weight_offset, x.dtype)


def _forward_fake(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x.dtype))


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if backend in ("triton", "cpu"):
        if backend == "triton":
            from megalite.kernels import rms_norm_triton

            y, added, rstd = rms_norm_triton.forward(x, residual, weight, eps, weight_offset)
        else:
            from megalite.kernels import fused_cpu

            y, added, rstd = fused_cpu.rms_norm_forward(x, residual, weight, eps, weight_offset)
        assert added is not None  # a residual was given
        return y, added, rstd
    total = (x.to(statistics_dtype(x.dtype)) + residual).to(residual.dtype).contiguous()
    y, rstd = _normalise(total, weight, eps, weight_offset, x.dtype)
    return y, total, rstd


def _add_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=statistics_dtype(x.dtype))
    return x.new_empty(x.shape), residual.new_empty(x.shape), rstd


def _backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from megalite.kernels import rms_norm_triton

        return rms_norm_triton.backward(grad, grad_total, x, weight, rstd, weight_offset)
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        return fused_cpu.rms_norm_backward(grad, grad_total, x, weight, rstd, weight_offset)
    wide = statistics_dtype(x.dtype)
    normalised = x.to(wide) * rstd.unsqueeze(-1)
    grad_wide = grad.to(wide)
    scaled = grad_wide * (weight.to(wide) + weight_offset)
    mean = (scaled * normalised).mean(-1, keepdim=True)
    grad_x = (scaled - normalised * mean) * rstd.unsqueeze(-1)
    if grad_total is not None:
        grad_x += grad_total
    grad_weight = (grad_wide * normalised).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype).contiguous(), grad_weight


def _backward_fake(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    weight_offset: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_rms_norm_forward = register(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, float weight_offset, str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_add_rms_norm_forward = register(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    _add_forward,
    _add_forward_fake,
)
_rms_norm_backward = register(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor x, Tensor weight, Tensor rstd,"
    " float weight_offset, str backend) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
    ) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight, eps, weight_offset, backend)
        ctx.save_for_backward(x, weight, rstd)
        ctx.weight_offset, ctx.backend = weight_offset, backend
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad_x, grad_weight = _rms_norm_backward(grad, None, x, weight, rstd, ctx.weight_offset, ctx.backend)
        return grad_x, grad_weight, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        y, total, rstd = _add_rms_norm_forward(x, residual, weight, eps, weight_offset, backend)
        ctx.save_for_backward(total, weight, rstd)
        ctx.weight_offset, ctx.backend, ctx.dtype = weight_offset, backend, x.dtype
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        grad_residual, grad_weight = _rms_norm_backward(
            grad, grad_total, total, weight, rstd, ctx.weight_offset, ctx.backend
        )
        return grad_residual.to(ctx.dtype), grad_residual, grad_weight, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, backend: str | None = None
) -> Tensor:
    """Normalise the last dim of x (..., hidden) and scale by weight (hidden,), in the dtype of x.

    Statistics and the weight gradient are summed in fp32 (fp64 for fp64). `weight_offset=1.0` gives Gemma's
    (1 + weight). Raises ValueError if weight is not one vector as long as x's last dim.
    """
    _check_weight(x, weight)
    return _RMSNorm.apply(x, weight, eps, weight_offset, choose(x, backend))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual in the dtype of x, and x + residual itself in the dtype of the residual.

    What is normalised is the sum as rounded to the residual's dtype (fp32 under a bf16 branch keeps it
    exact), so the pair equals an addition followed by `rms_norm`. x and residual: (..., hidden); weight:
    (hidden,).
    """
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}; they must agree")
    chosen = choose(x, backend)
    if chosen == "cpu" and residual.dtype not in (x.dtype, torch.float32):
        chosen = "torch"  # the fused form takes a residual as wide as the branch, or fp32
    return _AddRMSNorm.apply(x, residual, weight, eps, weight_offset, chosen)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but x {tuple(x.shape)} needs ({x.shape[-1]},)"
        )
