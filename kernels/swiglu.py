"""SwiGLU: silu(gate) * up, with gate and up stacked in one tensor (..., 2, ffn).

Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6.
Saved for backward: the input alone; the activation is recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import choose, register, statistics_dtype


def swiglu_reference(x: Tensor) -> Tensor:
    """The equation in plain differentiable torch; rounded to x's dtype once, at the end."""
    gate, up = x.to(statistics_dtype(x.dtype)).unbind(-2)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _forward(x: Tensor, backend: str) -> Tensor:
    return swiglu_reference(x).contiguous()


def _forward_fake(x: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[:-2] + x.shape[-1:])


def _backward(grad: Tensor, x: Tensor, backend: str) -> Tensor:
    wide = statistics_dtype(x.dtype)
    gate, up = x.to(wide).unbind(-2)
    grad_wide = grad.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_x = x.new_empty(x.shape)
    grad_x[..., 0, :] = grad_wide * up * (sigmoid + silu * (1 - sigmoid))
    grad_x[..., 1, :] = grad_wide * silu
    return grad_x


def _backward_fake(grad: Tensor, x: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape)


_swiglu_forward = register("swiglu_forward(Tensor x, str backend) -> Tensor", _forward, _forward_fake)
_swiglu_backward = register(
    "swiglu_backward(Tensor grad, Tensor x, str backend) -> Tensor", _backward, _backward_fake
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backend = backend
        return _swiglu_forward(x, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return _swiglu_backward(grad, x, ctx.backend), None


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(x[..., 0, :]) * x[..., 1, :], gate first: (..., 2, ffn) to (..., ffn). Raises ValueError otherwise."""
    if x.dim() < 2 or x.shape[-2] != 2:
        raise ValueError(f"swiglu needs a tensor of shape (..., 2, ffn), gate first; got {tuple(x.shape)}")
    return _SwiGLU.apply(x, choose(x, backend))
