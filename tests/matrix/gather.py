"""Local tensors out to the test, and together again to global ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalite.parallel.flat import Slot
from megalite.parallel.params import record_of
from megalite.parallel.rectangles import global_rectangles


@dataclass(frozen=True)
class LocalBlock:
    """One rank's rectangle of a global tensor."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: np.ndarray
    counted: bool


def local_blocks(flat: Tensor, slots: Sequence[Slot]) -> list[LocalBlock]:
    """What a bucket's flat tensor holds of its parameters; all else in it must be zero."""
    blocks, inside = [], 0
    for slot in slots:
        record = record_of(slot.param)
        for offsets, values in global_rectangles(slot.param, flat[slot.start : slot.stop], slot.first):
            array = values.to(torch.float64).numpy().copy()
            blocks.append(LocalBlock(record.name, record.global_shape, offsets, array, record.counted))
            inside += int(np.count_nonzero(array))
    if inside != int(torch.count_nonzero(flat)):
        raise AssertionError(f"padding of {[record_of(slot.param).name for slot in slots]} is not zero")
    return blocks


def assemble(ranks: Sequence[Sequence[LocalBlock]]) -> dict[str, Tensor]:
    """The global tensors. A rank must hold each element, and all ranks that hold it must agree to the bit."""
    whole: dict[str, np.ndarray] = {}
    for rank, blocks in enumerate(ranks):
        for block in blocks:
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


def times_counted(ranks: Sequence[Sequence[LocalBlock]]) -> set[int]:
    """How many of the ranks count an element in the gradient norm: all values that occur."""
    times: dict[str, np.ndarray] = {}
    for blocks in ranks:
        for block in blocks:
            counts = times.setdefault(block.name, np.zeros(block.global_shape, dtype=int))
            place = tuple(
                slice(start, start + size)
                for start, size in zip(block.offsets, block.values.shape, strict=True)
            )
            counts[place] += block.counted
    return {int(value) for counts in times.values() for value in np.unique(counts)}
