"""Which token comes next: a function of its logits and of three numbers, with no generator state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    `temperature` divides the logits; 0 takes the likeliest token. `top_k`: of how many of the likeliest is
    drawn, 0 for all. `top_p`: of the fewest likeliest that have this probability together (nucleus sampling,
    Holtzman et al. 2020), 1 for all. Raises ValueError for values outside.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} must be >= 0")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be > 0 and at most 1")


def draw(logits: torch.Tensor, sampling: Sampling, prompt: int, position: int) -> int:
    """The id that follows in text `prompt` at `position`, from the logits (vocab,) of the true vocabulary.

    Among equal logits the smaller id counts as the likelier.
    """
    ordered, ids = logits.double().cpu().sort(descending=True, stable=True)
    if sampling.temperature == 0:
        return int(ids[0])
    kept = ordered[: sampling.top_k or None] / sampling.temperature
    cumulative = torch.softmax(kept, -1).cumsum(-1)
    nucleus = 1 + int(torch.searchsorted(cumulative, sampling.top_p))
    cumulative = cumulative[:nucleus]
    place = torch.searchsorted(
        cumulative, uniform(sampling.seed, prompt, position) * cumulative[-1], right=True
    )
    return int(ids[min(int(place), len(cumulative) - 1)])


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: a hash of its arguments."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
