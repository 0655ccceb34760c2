"""SwiGLU: silu(gate) * up, with gate and up stacked in one tensor (..., 2, ffn) or given apart.

Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6. Saved for backward: the inputs alone; the activation is
recomputed.
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


def _forward(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    if backend == "triton":
        from megalite.kernels import swiglu_triton

        return swiglu_triton.forward(gate, up)
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        return fused_cpu.swiglu_forward(gate, up)
    wide = statistics_dtype(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype).contiguous()


def _forward_fake(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _backward(grad: Tensor, gate: Tensor, up: Tensor, backend: str) -> Tensor:
    stacked = gate.new_empty((*gate.shape[:-1], 2, gate.shape[-1]))
    if backend == "triton":
        from megalite.kernels import swiglu_triton

        swiglu_triton.backward(grad, gate, up, stacked)
        return stacked
    if backend == "cpu":
        from megalite.kernels import fused_cpu

        fused_cpu.swiglu_backward(grad, gate, up, stacked)
        return stacked
    wide = statistics_dtype(gate.dtype)
    gate_wide, grad_wide = gate.to(wide), grad.to(wide)
    sigmoid = torch.sigmoid(gate_wide)
    silu = gate_wide * sigmoid
    stacked[..., 0, :] = grad_wide * up * (sigmoid + silu * (1 - sigmoid))
    stacked[..., 1, :] = grad_wide * silu
    return stacked


def _backward_fake(grad: Tensor, gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return gate.new_empty((*gate.shape[:-1], 2, gate.shape[-1]))


_swiglu_forward = register(
    "swiglu_forward(Tensor gate, Tensor up, str backend) -> Tensor", _forward, _forward_fake
)
_swiglu_backward = register(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, str backend) -> Tensor", _backward, _backward_fake
)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backend = backend
        return _swiglu_forward(x[..., 0, :], x[..., 1, :], backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        return _swiglu_backward(grad, x[..., 0, :], x[..., 1, :], ctx.backend), None


class _SwiGLUPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return _swiglu_forward(gate, up, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        stacked = _swiglu_backward(grad, *ctx.saved_tensors, ctx.backend)
        return stacked[..., 0, :], stacked[..., 1, :], None


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(x[..., 0, :]) * x[..., 1, :]: (..., 2, ffn) to (..., ffn). Raises ValueError for another shape."""
    if x.dim() < 2 or x.shape[-2] != 2:
        raise ValueError(f"swiglu needs a tensor of shape (..., 2, ffn), gate first; got {tuple(x.shape)}")
    return _SwiGLU.apply(x, choose(x, backend))


def swiglu_pair(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up of two tensors (..., ffn) of one shape and dtype; raises ValueError otherwise."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} must agree"
        )
    return _SwiGLUPair.apply(gate, up, choose(gate, backend))
