"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset).

Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4.
Saved for backward: x, weight and one fp32 number a row.
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


def _forward(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    wide = statistics_dtype(x.dtype)
    x_wide = x.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1) + eps)
    y = (x_wide * rstd.unsqueeze(-1) * (weight.to(wide) + weight_offset)).to(x.dtype)
    return y.contiguous(), rstd.contiguous()


def _forward_fake(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    return y, x.new_empty(x.shape[:-1], dtype=statistics_dtype(x.dtype))


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    wide = statistics_dtype(x.dtype)
    normalised = x.to(wide) * rstd.unsqueeze(-1)
    grad_wide = grad.to(wide)
    scaled = grad_wide * (weight.to(wide) + weight_offset)
    mean = (scaled * normalised).mean(-1, keepdim=True)
    grad_x = ((scaled - normalised * mean) * rstd.unsqueeze(-1)).to(x.dtype)
    grad_weight = (grad_wide * normalised).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return grad_x.contiguous(), grad_weight


def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, backend: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_rms_norm_forward = register(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, float weight_offset, str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
_rms_norm_backward = register(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, float weight_offset, str backend)"
    " -> (Tensor, Tensor)",
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
        grad_x, grad_weight = _rms_norm_backward(grad, x, weight, rstd, ctx.weight_offset, ctx.backend)
        return grad_x, grad_weight, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, backend: str | None = None
) -> Tensor:
    """Normalise the last dim of x (..., hidden) and scale by weight (hidden,), in the dtype of x.

    Statistics and the weight gradient are summed in fp32 (fp64 for fp64).
    `weight_offset=1.0` gives Gemma's (1 + weight). Raises ValueError if weight is not one vector as long as x's last dim.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but x {tuple(x.shape)} needs ({x.shape[-1]},)"
        )
    return _RMSNorm.apply(x, weight, eps, weight_offset, choose(x, backend))
