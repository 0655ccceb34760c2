"""Local tensors out to the test, and together again to global ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megalite.parallel.params import global_block, narrow_to_block, record_of


@dataclass(frozen=True)
class LocalBlock:
    """One rank's rectangle of a global tensor. `padding_is_zero` speaks of what lies beyond the rectangle."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray
    counted: bool
    padding_is_zero: bool


def local_block(parameter: nn.Parameter, tensor: Tensor) -> LocalBlock:
    """`tensor`, shaped as `parameter`, as the rectangle that the parameter's record names."""
    record = record_of(parameter)
    inside = narrow_to_block(tensor.detach(), parameter)
    padding_is_zero = bool(tensor.detach().abs().sum() == inside.abs().sum())
    values = inside.to(torch.float64).numpy().copy()
    offsets = global_block(parameter)[0]
    return LocalBlock(record.name, record.global_shape, offsets, values, record.counted, padding_is_zero)


def assemble(ranks: Sequence[Sequence[LocalBlock]]) -> dict[str, Tensor]:
    """The global tensors. A rank must hold each element, and all ranks that hold it must agree to the bit."""
    whole: dict[str, np.ndarray] = {}
    for rank, blocks in enumerate(ranks):
        for block in blocks:
            if not block.padding_is_zero:
                raise AssertionError(f"rank {rank}: the padding of {block.name} is not zero")
            target = whole.setdefault(block.name, np.full(block.global_shape, np.nan))
            place = tuple(
                slice(start, start + size)
                for start, size in zip(block.offsets, block.values.shape, strict=True)
            )
            known = target[place]
            differing = ~(np.isnan(known) | (known == block.values))
            if differing.any():
                worst = np.abs(known - block.values)[differing].max()
                raise AssertionError(
                    f"rank {rank}: {block.name} differs from another replica by up to {worst}"
                )
            target[place] = block.values
    holes = [name for name, values in whole.items() if np.isnan(values).any()]
    if holes:
        raise AssertionError(f"no rank holds all of {holes}, or a value is not a number")
    return {name: torch.from_numpy(values) for name, values in whole.items()}


def counted_once(ranks: Sequence[Sequence[LocalBlock]]) -> dict[str, bool]:
    """Whether the ranks of one copy of the model that count a tensor cover each element exactly once."""
    times: dict[str, np.ndarray] = {}
    for blocks in ranks:
        for block in blocks:
            counts = times.setdefault(block.name, np.zeros(block.global_shape, dtype=int))
            place = tuple(
                slice(start, start + size)
                for start, size in zip(block.offsets, block.values.shape, strict=True)
            )
            counts[place] += block.counted
    return {name: bool((counts == 1).all()) for name, counts in times.items()}
