"""softmax(q k^T / sqrt(d)) v over earlier positions, through the framework's fused attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a micro-batch; a position attends only to its own document.

    `starts`: int32 (documents + 1,), beginnings in the micro-batch flattened sample by sample, from 0 to
    batch * seq; every sample begins a document. `longest`: tokens of the longest one.
    """

    starts: torch.Tensor
    longest: int


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None
) -> torch.Tensor:
    """q: (seq, batch, heads, d); k and v: (seq, batch, groups, d), a group for heads / groups queries.

    Returns (seq, batch, heads, d). The (seq, seq) matrix is never stored.
    """
    if documents is None:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # (batch, heads, seq, d)
        return _attend(q, k, v).permute(2, 0, 1, 3)
    if q.device.type == "cpu":
        return _document_by_document(q, k, v, documents)
    return _packed(q, k, v, documents)  # device only


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seq, d) each."""
    return nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def _document_by_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents
) -> torch.Tensor:
    seq, batch = q.shape[:2]
    # (1, heads, batch * seq, d)
    flat = [part.permute(2, 1, 0, 3).flatten(1, 2).unsqueeze(0) for part in (q, k, v)]
    lengths = documents.starts.diff().tolist()
    attended = [_attend(*parts) for parts in zip(*(part.split(lengths, dim=2) for part in flat), strict=True)]
    return torch.cat(attended, dim=2)[0].unflatten(1, (batch, seq)).permute(2, 1, 0, 3)


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """All documents in one call of the variable-length kernel: (batch * seq, heads, d)."""
    from torch.nn.attention.varlen import varlen_attn  # device only

    seq, batch = q.shape[:2]
    query, key, value = (part.transpose(0, 1).flatten(0, 1) for part in (q, k, v))
    starts, longest = documents.starts, documents.longest
    grouped = q.shape[2] != k.shape[2]
    attended = varlen_attn(
        query, key, value, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=grouped
    )
    assert isinstance(attended, torch.Tensor)  # no auxiliary outputs were asked for
    return attended.unflatten(0, (batch, seq)).transpose(0, 1)
