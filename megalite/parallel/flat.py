"""How parameters lie in flat memory: which bucket, which elements, and which part of a bucket a rank keeps.

Parameters are laid out in the reverse of the order in which forward uses them, which is roughly the order in
which backward fills their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

ALIGNMENT = 128  # elements: 128-bit accesses of any dtype, and whole cache lines


@dataclass(frozen=True)
class Slot:
    """Elements `start` to `stop` of a flat tensor hold a parameter's, from its element `first` on.

    In a whole bucket that is all of the parameter; borders between the parts of a bucket cut where they fall.
    """

    param: nn.Parameter
    start: int
    stop: int
    first: int = 0


@dataclass(frozen=True)
class FlatBucket:
    """What this rank updates of one bucket: all of it, or its part.

    `weights` (n,) in the parameters' dtype, `grads` (n,) in the main gradient's. Elements between slots are
    padding and stay zero.
    """

    weights: torch.Tensor
    grads: torch.Tensor
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class FlatWeights:
    """The weights that this rank keeps of one bucket, (n,): all of them, or its part."""

    weights: torch.Tensor
    slots: tuple[Slot, ...]


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """The gradients' and the optimizer's own dtype: fp64 for fp64 parameters, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_bucket_size(dp_size: int) -> int:
    """Elements in a bucket: enough to keep the ring busy on any number of ranks (Megatron-LM's rule)."""
    return max(40_000_000, 1_000_000 * dp_size)


def aligned(length: int, multiple: int = ALIGNMENT) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def bucket_length(sizes: Sequence[int], parts: int) -> int:
    """Elements of a bucket that holds parameters of `sizes` and is cut into `parts` equal, aligned parts."""
    return aligned(sum(aligned(size) for size in sizes), parts * ALIGNMENT)


@dataclass(frozen=True)
class HeldElements:
    """Elements that a rank holds between steps, padding included: of weights, of gradients, and of those that
    it updates.
    """

    weights: int
    grads: int
    updated: int


def held_elements(lengths: Sequence[int], ranks: int, zero_stage: int) -> HeldElements:
    """What each of `ranks` data-parallel ranks holds of buckets of these lengths."""
    whole = sum(lengths)
    part = whole // ranks
    return HeldElements(
        weights=part if zero_stage > 2 else whole,
        grads=part if zero_stage > 1 else whole,
        updated=part if zero_stage > 0 else whole,
    )


def plan_buckets(sizes: Sequence[int], alone: Sequence[bool], bucket_size: int) -> list[list[int]]:
    """Group parameters, given by size in buffer order, into buckets of at least `bucket_size` elements.

    The last may be smaller; a parameter with `alone` set gets a bucket of its own. Returns the indices in
    each bucket.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if alone[index]:
            buckets += [current] if current else []
            buckets.append([index])
            current, filled = [], 0
            continue
        current.append(index)
        filled += size
        if filled >= bucket_size:
            buckets.append(current)
            current, filled = [], 0
    return buckets + ([current] if current else [])


def place(params: Sequence[nn.Parameter]) -> tuple[Slot, ...]:
    """One after another, each from an aligned element on."""
    slots, start = [], 0
    for param in params:
        slots.append(Slot(param, start, start + param.numel()))
        start = aligned(start + param.numel())
    return tuple(slots)


def cut(slots: Sequence[Slot], start: int, stop: int) -> tuple[Slot, ...]:
    """The slots of elements `start` to `stop`, counted from `start`."""
    inside = []
    for slot in slots:
        first, last = max(slot.start, start), min(slot.stop, stop)
        if first < last:
            skipped = first - slot.start
            inside.append(replace(slot, start=first - start, stop=last - start, first=slot.first + skipped))
    return tuple(inside)
