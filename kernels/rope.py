"""Rotary position embedding: each pair of channels of q and k is rotated by position x frequency.

Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34. A rotation's gradient is the inverse rotation, so
backward needs the table alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import choose, register, statistics_dtype


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = statistics_dtype(x.dtype)
    half = cos.shape[-1]
    # The table has no head dims, and no batch dim unless positions differ by sample.
    for _ in range(x.dim() - cos.dim()):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    cos, sin = cos.to(wide), sin.to(wide)
    rotary = x[..., : 2 * half].to(wide)
    if interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary[..., :half], rotary[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), -1)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The rotation in plain differentiable torch; see `rope`."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from megalite.kernels import rope_triton

        return rope_triton.apply(q, k, cos, sin, interleaved, inverse)
    if backend == "cpu" and q.dtype == k.dtype:
        from megalite.kernels import fused_cpu

        return (
            fused_cpu.rope(q, cos, sin, interleaved, inverse),
            fused_cpu.rope(k, cos, sin, interleaved, inverse),
        )
    rotated = rope_reference(q, k, cos, -sin if inverse else sin, interleaved)
    return rotated[0].contiguous(), rotated[1].contiguous()


def _apply_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_rope = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse, str backend)"
    " -> (Tensor, Tensor)",
    _apply,
    _apply_fake,
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend = interleaved, backend
        return _rope(q, k, cos, sin, interleaved, False, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned_q, turned_k = _rope(grad_q, grad_k, cos, sin, ctx.interleaved, True, ctx.backend)
        return turned_q, turned_k, None, None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the angles of `rotary.rotary_table`; new tensors, the inputs are left as they are.

    q and k: (seq, batch, heads, head_dim) or (seq, batch, groups, heads_per_group, head_dim), any strides.
    cos and sin: (seq, rotary_dim / 2), or (seq, batch, rotary_dim / 2) where positions differ between
    samples; channels beyond rotary_dim pass unchanged. `interleaved` pairs channels (2i, 2i + 1), otherwise
    (i, i + rotary_dim / 2).
    """
    for name, x in (("q", q), ("k", k)):
        if x.dim() not in (4, 5):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; rope needs (seq, batch, heads, head_dim)")
        if cos.shape[:-1] not in (x.shape[:1], x.shape[:2]) or cos.shape != sin.shape:
            raise ValueError(
                f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be (seq, rotary_dim / 2) or "
                f"(seq, batch, rotary_dim / 2) for {name} {tuple(x.shape)}"
            )
        if 2 * cos.shape[-1] > x.shape[-1]:
            raise ValueError(f"rotary_dim {2 * cos.shape[-1]} exceeds the head_dim {x.shape[-1]} of {name}")
    return _Rope.apply(q, k, cos, sin, interleaved, choose(q, backend))
