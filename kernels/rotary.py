"""Angles of the rotary position embedding, with the scalings that stretch the context."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a linear blend between.

    Llama 3.1, arXiv 2407.21783, section 3.4.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def frequencies(self, inverse: Tensor, base: float) -> Tensor:
        """The scaled radians a position, from the plain ones."""
        # Turns of a channel pair over the original context.
        turns = self.original_max_position * inverse / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return inverse * (blend + (1.0 - blend) / self.factor)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation with an attention temperature.

    Peng et al. 2023, arXiv 2309.00071, eq. 17 to 22.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self, inverse: Tensor, base: float) -> Tensor:
        """The scaled radians a position, from the plain ones."""
        half = inverse.shape[-1]

        def channel(turns: float) -> float:
            """The channel pair that turns so often over the original context."""
            return half * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(base)

        low = max(math.floor(channel(self.beta_fast)), 0)
        high = min(math.ceil(channel(self.beta_slow)), 2 * half - 1)
        place = torch.arange(half, dtype=inverse.dtype, device=inverse.device)
        ramp = ((place - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
        return inverse * (1.0 - ramp + ramp / self.factor)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: the square root of the attention temperature's inverse."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rotary_table(
    positions: Tensor,
    rotary_dim: int,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    scaling: Llama3Scaling | YarnScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, frequency i = base^(-2i / rotary_dim) before scaling.

    positions (seq,) or (seq, batch), any offsets, to (seq, rotary_dim / 2) or (seq, batch, rotary_dim / 2) in
    `dtype`. Angles are computed in fp64: at position 100,000 an fp32 angle is already wrong in its third
    decimal.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim {rotary_dim} must be even: channels are rotated in pairs")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
    inverse = base**-exponents
    magnitude = 1.0
    if scaling is not None:
        inverse, magnitude = scaling.frequencies(inverse, base), scaling.magnitude
    angles = positions.to(torch.float64).unsqueeze(-1) * inverse
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)
