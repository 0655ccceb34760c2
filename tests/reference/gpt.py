"""A decoder-only transformer as equations: one process, no kernel, no module, weights in a dictionary.

Weights are global tensors under the product's global names, so that the two can be compared without any
conversion; this file unpacks the fused blocks itself. Whatever can be read off the weights is read off them:
head and group counts and the head size from the fused query/key/value block, biases from the presence of
their names, a tied head from the absence of `head.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.dropout import channel_mask, weight_mask

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """What the weights do not show.

    `normalization`: LayerNorm or RMSNorm; `norm_offset` is added to its weights. `position_embedding_type`:
    learned_absolute, rope, yarn or none. `llama3_factor`: rope as in Llama 3.1, stretched from 8192 tokens.
    `yarn`: factor and original context.
    """

    num_layers: int
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0
    swiglu: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    llama3_factor: float | None = None
    yarn: tuple[float, int] = (1.0, 1)
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0


def logits(
    weights: Weights,
    architecture: Architecture,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """tokens, positions int64 (batch, seq) -> (batch, seq, vocab) in the dtype of the weights.

    `documents` (batch, seq): the number of each position's document; none sees another.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = weights["embedding.tokens.weight"][tokens]  # (batch, seq, hidden)
    if architecture.position_embedding_type == "learned_absolute":
        hidden = hidden + weights["embedding.positions.weight"][positions]
    hidden = dropped(hidden, architecture, 0)
    for layer in range(architecture.num_layers):
        own = part(weights, f"layers.{layer}.")
        normed = normalize(hidden, part(own, "attention_norm."), architecture)
        branch = attention(normed, part(own, "attention."), architecture, positions, documents, layer)
        hidden = hidden + dropped(branch, architecture, 3 * layer + 2)
        normed = normalize(hidden, part(own, "mlp_norm."), architecture)
        hidden = hidden + dropped(mlp(normed, part(own, "mlp."), architecture), architecture, 3 * layer + 3)
    hidden = normalize(hidden, part(weights, "final_norm."), architecture)
    head = weights["head.weight"] if "head.weight" in weights else weights["embedding.tokens.weight"]
    return hidden @ head.T


def token_losses(
    weights: Weights,
    architecture: Architecture,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of each position (batch, seq) with the target's distribution, plus z_loss log(Z)^2.

    That distribution is 1 at the label, or with label smoothing a mixture of that and the even one
    (arXiv 1512.00567, section 7); Z is the sum of the logits' exponentials (arXiv 2204.02311, section 5).
    """
    scores = logits(weights, architecture, tokens, positions, documents)
    probabilities = torch.softmax(scores, dim=-1)
    wanted = torch.nn.functional.one_hot(labels, scores.shape[-1]).to(scores.dtype)
    wanted = wanted * (1 - label_smoothing) + label_smoothing / scores.shape[-1]
    log_z = torch.logsumexp(scores, dim=-1)
    return -(wanted * probabilities.log()).sum(dim=-1) + z_loss * log_z**2


def part(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights under `prefix`, which is taken off their names."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def normalize(x: Tensor, weights: Weights, architecture: Architecture) -> Tensor:
    """LayerNorm (arXiv 1607.06450 eq. 4) or RMSNorm (arXiv 1910.07467 eq. 4) over the last dim."""
    weight = weights["weight"] + architecture.norm_offset
    if architecture.normalization == "RMSNorm":
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + architecture.norm_epsilon) * weight
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + architecture.norm_epsilon) * weight + weights["bias"]


def dropped(x: Tensor, architecture: Architecture, site: int) -> Tensor:
    """Dropout of hidden states (batch, seq, hidden); the batch is samples 0, 1, ... of the run."""
    if not architecture.hidden_dropout:
        return x
    samples, seq, channels = x.shape
    return x * channel_mask(samples, seq, channels, architecture.seed, site, architecture.hidden_dropout)


def attention(
    x: Tensor,
    weights: Weights,
    architecture: Architecture,
    positions: Tensor,
    documents: Tensor | None,
    layer: int,
) -> Tensor:
    """Causal softmax(q k^T / sqrt(head_dim)) v; all queries of a group share its key and value."""
    # (groups, queries per group + 2, head_dim, hidden): a group's queries, then its key, then its value
    fused = torch.einsum("bsh,grdh->bgrsd", x, weights["qkv.weight"])
    if "qkv.bias" in weights:
        fused = fused + weights["qkv.bias"].unsqueeze(2)
    # (batch, groups, queries per group, seq, head_dim), and twice the same with 1 instead of the queries
    query, key, value = fused[:, :, :-2], fused[:, :, -2:-1], fused[:, :, -1:]
    if architecture.position_embedding_type in ("rope", "yarn"):
        query = rotate(query, architecture, positions)
        key = rotate(key, architecture, positions)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (batch, groups, queries, seq, seq)
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(diagonal=1)
    if documents is not None:
        hidden = hidden | (documents.unsqueeze(1) != documents.unsqueeze(2))[:, None, None]
    shares = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    if architecture.attention_dropout:
        batch, groups, queries = shares.shape[:3]
        mask = weight_mask(
            batch, groups * queries, seq, architecture.seed, 3 * layer + 1, architecture.attention_dropout
        )
        shares = shares * mask.view_as(shares)
    mixed = shares @ value
    heads = mixed.flatten(1, 2).transpose(1, 2)  # (batch, seq, heads, head_dim), group by group
    return linear(heads.flatten(2), weights, "proj")


def rotate(x: Tensor, architecture: Architecture, positions: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864 eq. 34) of x (batch, group, heads, seq, head_dim).

    Over its first `rotary_percent` channels; pairs are (i, i + half), or (2i, 2i + 1) if interleaved.
    """
    size = int(x.shape[-1] * architecture.rotary_percent)
    turned, rest = x[..., :size], x[..., size:]
    frequency, length = frequencies(size, architecture)
    angle = positions.to(torch.float64)[:, None, None, :, None] * frequency  # (batch, 1, 1, seq, size / 2)
    cos, sin = (angle.cos() * length).to(x.dtype), (angle.sin() * length).to(x.dtype)
    if architecture.rotary_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    if architecture.rotary_interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def frequencies(size: int, architecture: Architecture) -> tuple[Tensor, float]:
    """Radians a position of each pair, and what cos and sin are multiplied by.

    Llama 3.1's by wavelength, as published with its weights; YaRN's by arXiv 2309.00071 eq. 17 to 22, its
    ramp between whole pairs as in its authors' code.
    """
    base = architecture.rotary_base
    plain = [base ** (-2 * pair / size) for pair in range(size // 2)]
    if architecture.position_embedding_type == "yarn":
        factor, original = architecture.yarn
        low, high = (
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        ramps = [min(max((pair - low) / (high - low or 0.001), 0), 1) for pair in range(size // 2)]
        scaled = [one * (1 - ramp) + one / factor * ramp for one, ramp in zip(plain, ramps, strict=True)]
        return torch.tensor(scaled, dtype=torch.float64), 0.1 * math.log(factor) + 1
    if architecture.llama3_factor is None:
        return torch.tensor(plain, dtype=torch.float64), 1.0
    scaled = []
    for one in plain:
        wavelength = 2 * math.pi / one
        smooth = (8192 / wavelength - 1) / (4 - 1)
        if wavelength < 8192 / 4:
            scaled.append(one)
        elif wavelength > 8192 / 1:
            scaled.append(one / architecture.llama3_factor)
        else:
            scaled.append((1 - smooth) * one / architecture.llama3_factor + smooth * one)
    return torch.tensor(scaled, dtype=torch.float64), 1.0


def mlp(x: Tensor, weights: Weights, architecture: Architecture) -> Tensor:
    """down(silu(gate x) * up x), arXiv 2002.05202 eq. 6; or down(gelu(up x)) with the tanh form of GPT-2."""
    if architecture.swiglu:
        fused = torch.einsum("bsh,kfh->kbsf", x, weights["gate_up.weight"])
        if "gate_up.bias" in weights:
            fused = fused + weights["gate_up.bias"][:, None, None, :]
        gate, up = fused[0], fused[1]
        return linear(gate * torch.sigmoid(gate) * up, weights, "down")
    up = linear(x, weights, "up")
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return linear(0.5 * up * (1 + torch.tanh(inner)), weights, "down")


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
