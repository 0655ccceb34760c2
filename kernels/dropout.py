"""Dropout whose mask is a function of what is dropped, with no generator state.

Element c of a tensor is kept by a hash of (key, counter): the same element has the same fate on every layout,
in every micro-batch size, and when a forward pass is done again. The hash is SplitMix64's (Steele, Lea and
Flood 2014, https://doi.org/10.1145/2660193.2660195); 24 of its bits are compared with the rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch computes with; products wrap."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of each int64."""
    x = (x ^ _shifted(x, 30)) * MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * MULTIPLIERS[1]
    return x ^ _shifted(x, 31)


def site_key(seed: int, site: int) -> int:
    """Key of one place in the model where something is dropped."""
    return int(hashed(torch.tensor(_signed(seed * 0x9E3779B97F4A7C15 + site * 0xD1B54A32D192ED03 + 1))))


def keep(counters: Tensor, key: int, rate: float) -> Tensor:
    """Which elements stay: bool, shaped as `counters` (int64, a number of its own for each element)."""
    return _shifted(hashed(counters * GOLDEN + key), 40) >= round(rate * 2**24)


def counters_of(
    samples: Tensor, first_position: int, positions: int, total_positions: int, channels: int
) -> Tensor:
    """A number for each element of a tensor (positions, batch, channels): int64, of that shape.

    Its first position is `first_position` of `total_positions`; `samples`: int64 (batch,), the samples'
    global numbers.
    """
    place = torch.arange(first_position, first_position + positions, device=samples.device).unsqueeze(1)
    rows = samples.unsqueeze(0) * total_positions + place  # (positions, batch)
    return rows.unsqueeze(-1) * channels + torch.arange(channels, device=samples.device)


class _Dropout(torch.autograd.Function):
    """Saves the samples' numbers, not the mask."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, samples: Tensor, key: int, rate: float, first_position: int, total_positions: int
    ) -> Tensor:
        ctx.save_for_backward(samples)
        ctx.settings = key, rate, first_position, total_positions
        return _scaled(x, samples, *ctx.settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (samples,) = ctx.saved_tensors
        return _scaled(grad, samples, *ctx.settings), None, None, None, None, None


def _scaled(
    x: Tensor, samples: Tensor, key: int, rate: float, first_position: int, total_positions: int
) -> Tensor:
    counters = counters_of(samples, first_position, x.shape[0], total_positions, x.shape[-1])
    return torch.where(keep(counters, key, rate), x / (1 - rate), 0)


def dropout(
    x: Tensor, samples: Tensor, key: int, rate: float, first_position: int, total_positions: int
) -> Tensor:
    """Zero elements of `x` (seq, batch, hidden) with probability `rate` and divide the rest by 1 - rate.

    `samples`: int64 (batch,), the global number of each sample; `first_position`: of the sequence's
    `total_positions`, where a sequence shard begins. Raises ValueError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate {rate} is not in [0, 1)")
    if rate == 0:
        return x
    result: Tensor = _Dropout.apply(x, samples, key, rate, first_position, total_positions)
    return result
