"""Causal attention with dropout on its weights, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from megalite.kernels.dropout import keep

BLOCK = 128  # queries whose attention weights exist at one time


class _DroppedAttention(torch.autograd.Function):
    """Causal attention in blocks of queries; backward computes weights and masks again, none is stored."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: torch.Tensor,
        key: int,
        rate: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, heads)
        ctx.key, ctx.rate = key, rate
        out = [
            (weights * mask).to(q.dtype) @ v[..., :end, :]
            for _, end, weights, mask in _blocks(q, k, heads, key, rate)
        ]
        return torch.cat(out, dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, heads = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, end, weights, mask in _blocks(q, k, heads, ctx.key, ctx.rate):
            rows = grad[..., start:end, :]
            grad_v[..., :end, :] += (weights * mask).to(q.dtype).transpose(-1, -2) @ rows
            grad_weights = (rows @ v[..., :end, :].transpose(-1, -2)) * mask
            grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
            grad_q[..., start:end, :] = grad_scores.to(q.dtype) @ k[..., :end, :]
            grad_k[..., :end, :] += grad_scores.to(q.dtype).transpose(-1, -2) @ q[..., start:end, :]
        return grad_q, grad_k, grad_v, None, None, None


def _blocks(
    q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor, key: int, rate: float
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """For each block of queries: its bounds, softmax over the keys so far, scaled mask of what stays."""
    seq, wide = q.shape[-2], torch.promote_types(q.dtype, torch.float32)
    places = torch.arange(seq, device=q.device)
    for start in range(0, seq, BLOCK):
        end = min(start + BLOCK, seq)
        scores = (q[..., start:end, :] @ k[..., :end, :].transpose(-1, -2)).to(wide) / math.sqrt(q.shape[-1])
        later = places[:end] > places[start:end].unsqueeze(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        rows = heads[..., None, None] * seq + places[start:end].unsqueeze(1)  # (batch, heads, block, 1)
        mask = keep(rows * seq + places[:end], key, rate).to(wide) / (1 - rate)
        yield start, end, weights, mask


def attention_with_dropout(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: torch.Tensor, key: int, rate: float
) -> torch.Tensor:
    """`dropout(softmax(q k^T / sqrt(d))) v` over earlier positions.

    q: (seq, batch, heads, d), k and v: (seq, batch, groups, d); heads: int64 (batch, heads), a number for
    each head of each sample in the whole run. Returns (seq, batch, heads, d). Holds the weights of BLOCK
    queries at a time.
    """
    queries_per_group = q.shape[2] // k.shape[2]
    q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # (batch, heads, seq, d)
    k, v = (part.repeat_interleave(queries_per_group, dim=1) for part in (k, v))
    out: torch.Tensor = _DroppedAttention.apply(q, k, v, heads, key, rate)
    return out.permute(2, 0, 1, 3)
