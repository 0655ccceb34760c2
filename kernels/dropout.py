"""Dropout whose mask is a function of what is dropped, with no generator state.

Element c of a tensor is kept by a hash of (key, counter): the same element has the same fate on every layout,
on every backend, in every micro-batch size, and when a forward pass is done again. The hash is SplitMix64's
(Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195); 24 of its bits are compared with the
rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dispatch import choose, register, statistics_dtype


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


def threshold(rate: float) -> int:
    """An element is kept where the upper 24 bits of its hash are at least this."""
    return round(rate * 2**24)


def keep(counters: Tensor, key: int, rate: float) -> Tensor:
    """Which elements stay: bool, shaped as `counters` (int64, a number of its own for each element)."""
    return _shifted(hashed(counters * GOLDEN + key), 40) >= threshold(rate)


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


def _apply(
    x: Tensor,
    residual: Tensor | None,
    samples: Tensor,
    key: int,
    rate: float,
    first_position: int,
    total_positions: int,
    backend: str,
) -> Tensor:
    if backend == "triton":
        from megalite.kernels import dropout_triton

        return dropout_triton.apply(x, residual, samples, key, rate, first_position, total_positions)
    counters = counters_of(samples, first_position, x.shape[0], total_positions, x.shape[-1])
    kept = torch.where(keep(counters, key, rate), x.to(statistics_dtype(x.dtype)) * (1 / (1 - rate)), 0)
    return (kept if residual is None else residual + kept).to(x.dtype).contiguous()


def _apply_fake(
    x: Tensor,
    residual: Tensor | None,
    samples: Tensor,
    key: int,
    rate: float,
    first_position: int,
    total_positions: int,
    backend: str,
) -> Tensor:
    return x.new_empty(x.shape)


_dropout = register(
    "dropout(Tensor x, Tensor? residual, Tensor samples, int key, float rate, int first_position,"
    " int total_positions, str backend) -> Tensor",
    _apply,
    _apply_fake,
)


class _Dropout(torch.autograd.Function):
    """Saves the samples' numbers, not the mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        samples: Tensor,
        key: int,
        rate: float,
        first_position: int,
        total_positions: int,
        backend: str,
    ) -> Tensor:
        ctx.save_for_backward(samples)
        ctx.settings = key, rate, first_position, total_positions, backend
        ctx.has_residual = residual is not None
        return _dropout(x, residual, samples, *ctx.settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (samples,) = ctx.saved_tensors
        dropped = _dropout(grad, None, samples, *ctx.settings)
        return dropped, grad if ctx.has_residual else None, *(None,) * 6


def dropout(
    x: Tensor,
    samples: Tensor,
    key: int,
    rate: float,
    first_position: int,
    total_positions: int,
    *,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Zero elements of `x` (seq, batch, hidden) with probability `rate` and divide the rest by 1 - rate.

    `samples`: int64 (batch,), the global number of each sample; `first_position`: of the sequence's
    `total_positions`, where a sequence shard begins. `residual`, of x's shape and dtype, is added in the same
    pass over memory. Raises ValueError for a rate outside [0, 1) and shapes that do not fit.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate {rate} is not in [0, 1)")
    if x.dim() != 3 or samples.shape != x.shape[1:2]:
        raise ValueError(
            f"x {tuple(x.shape)} must be (seq, batch, hidden), with one of samples {tuple(samples.shape)} "
            "for each of the batch"
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"residual {tuple(residual.shape)} {residual.dtype} and x {tuple(x.shape)} {x.dtype} must agree"
        )
    if rate == 0:
        return x if residual is None else x + residual
    chosen = choose(x, backend)
    result: Tensor = _Dropout.apply(x, residual, samples, key, rate, first_position, total_positions, chosen)
    return result
