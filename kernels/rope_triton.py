"""Triton kernel of the rotary embedding: q and k in one launch, 4 bytes a bf16 element."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.launch import power_of_two, warn_unaligned

# Heads x head_dim of one program: 16 bytes of bf16 a thread at once, on AMD's 64-wide warps too.
ELEMENTS = 4096
WARPS = 4


@triton.jit
def _rotate(
    IN, OUT, cos, sin, first, heads, inner, outer_stride, inner_stride, half, head_dim,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token; head h is h % inner of group h // inner. OUT is contiguous."""
    head = first + tl.arange(0, HEADS)[:, None]
    source = IN + (head // inner).to(tl.int64) * outer_stride + (head % inner).to(tl.int64) * inner_stride
    result = OUT + head.to(tl.int64) * head_dim
    real = head < heads
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF)[None, :]
        mask = real & (both < 2 * half)
        pairs = tl.load(source + both, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (HEADS, HALF, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * HALF))
        tl.store(result + both, turned.to(OUT.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, HALF)[None, :]
        mask = real & (column < half)
        a = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + half + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(result + column, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=mask)
        tl.store(result + half + column, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=mask)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        mask = real & (column < head_dim)
        tl.store(result + column, tl.load(source + column, mask=mask, other=0.0), mask=mask)


@triton.jit
def rope_kernel(
    Q, K, COS, SIN, Q_OUT, K_OUT, batch, q_heads, k_heads, q_inner, k_inner, q_blocks,
    q_seq_stride, q_batch_stride, q_outer_stride, q_inner_stride,
    k_seq_stride, k_batch_stride, k_outer_stride, k_inner_stride,
    table_seq_stride, table_batch_stride, half, q_dim, k_dim, blocks,
    HEADS: tl.constexpr, HALF: tl.constexpr, Q_REST: tl.constexpr, K_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Program = one token, HEADS heads of q or of k."""
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    place, sample = token // batch, token % batch
    angle = tl.arange(0, HALF)
    table = place * table_seq_stride + sample * table_batch_stride + angle
    cos = tl.load(COS + table, mask=angle < half, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + table, mask=angle < half, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    if block < q_blocks:
        _rotate(
            Q + place * q_seq_stride + sample * q_batch_stride, Q_OUT + token * q_heads * q_dim, cos, sin,
            block * HEADS, q_heads, q_inner, q_outer_stride, q_inner_stride, half, q_dim,
            HEADS, HALF, Q_REST, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate(
            K + place * k_seq_stride + sample * k_batch_stride, K_OUT + token * k_heads * k_dim, cos, sin,
            (block - q_blocks) * HEADS, k_heads, k_inner, k_outer_stride, k_inner_stride, half, k_dim,
            HEADS, HALF, K_REST, INTERLEAVED,
        )  # fmt: skip


def _five_dims(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x if x.dim() == 5 else x.unsqueeze(2)


def apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """See `megalite.kernels.rope.rope`; outputs are contiguous."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k = _five_dims(q), _five_dims(k)
    half = cos.shape[-1]
    warn_unaligned("half the rotary dim of rope", half, q.element_size())
    cos, sin = cos.contiguous(), sin.contiguous()
    heads = max(1, ELEMENTS // power_of_two(max(q.shape[-1], k.shape[-1])))
    q_heads, k_heads = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]
    heads = min(heads, power_of_two(max(q_heads, k_heads)))
    q_blocks, k_blocks = -(-q_heads // heads), -(-k_heads // heads)
    arguments = {
        "Q": q, "K": k, "COS": cos, "SIN": sin, "Q_OUT": q_out, "K_OUT": k_out, "batch": q.shape[1],
        "q_heads": q_heads, "k_heads": k_heads, "q_inner": q.shape[3], "k_inner": k.shape[3],
        "q_blocks": q_blocks, "q_seq_stride": q.stride(0), "q_batch_stride": q.stride(1),
        "q_outer_stride": q.stride(2), "q_inner_stride": q.stride(3), "k_seq_stride": k.stride(0),
        "k_batch_stride": k.stride(1), "k_outer_stride": k.stride(2), "k_inner_stride": k.stride(3),
        "table_seq_stride": cos.stride(0), "table_batch_stride": cos.stride(1) if cos.dim() == 3 else 0,
        "half": half, "q_dim": q.shape[-1], "k_dim": k.shape[-1], "blocks": q_blocks + k_blocks,
        "HEADS": heads, "HALF": power_of_two(half),
        "Q_REST": power_of_two(q.shape[-1] - 2 * half) if q.shape[-1] > 2 * half else 0,
        "K_REST": power_of_two(k.shape[-1] - 2 * half) if k.shape[-1] > 2 * half else 0,
        "INTERLEAVED": interleaved, "INVERSE": inverse,
    }  # fmt: skip
    programs = q.shape[0] * q.shape[1] * (q_blocks + k_blocks)
    launch.run(rope_kernel, (programs,), arguments, q.device, num_warps=WARPS)
    return q_out, k_out
