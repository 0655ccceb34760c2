"""Which elements dropout keeps, by definition: SplitMix64 of a counter, in NumPy's unsigned integers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def scaled_mask(counters: np.ndarray, seed: int, site: int, rate: float) -> Tensor:
    """1 / (1 - rate) where an element stays, else 0; fp64, shaped as `counters`."""
    start = (seed * 0x9E3779B97F4A7C15 + site * 0xD1B54A32D192ED03 + 1) % 2**64
    key = mix(np.array([start], dtype=np.uint64))
    bits = mix(counters.astype(np.uint64) * GOLDEN + key) >> np.uint64(40)
    return torch.from_numpy((bits >= round(rate * 2**24)) / (1 - rate))


def channel_mask(samples: int, seq: int, channels: int, seed: int, site: int, rate: float) -> Tensor:
    """For hidden states (samples, seq, channels)."""
    return scaled_mask(np.arange(samples * seq * channels).reshape(samples, seq, channels), seed, site, rate)


def weight_mask(samples: int, heads: int, seq: int, seed: int, site: int, rate: float) -> Tensor:
    """For attention weights (samples, heads, seq, seq)."""
    return scaled_mask(
        np.arange(samples * heads * seq * seq).reshape(samples, heads, seq, seq), seed, site, rate
    )
