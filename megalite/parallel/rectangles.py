"""A run of consecutive elements of a tensor, as the few rectangles that make it up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from megalite.parallel.params import global_block


@dataclass(frozen=True)
class Rectangle:
    """Elements `offsets ... offsets + sizes` of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    """Elements `start` to `stop` of a contiguous tensor of `shape`, in order: at most 2 dims - 1 rectangles.

    (4, 10), 5 to 33 -> the end of row 0, rows 1 and 2, the beginning of row 3.
    """
    if start >= stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    row, inner = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        return _within(first - 1, rectangles(inner, start - (first - 1) * row, stop - (first - 1) * row))
    found = _within(first - 1, rectangles(inner, start - (first - 1) * row, row)) if start % row else []
    if first < last:
        found.append(Rectangle((first, *(0 for _ in inner)), (last - first, *inner)))
    if stop % row:
        found += _within(last, rectangles(inner, 0, stop - last * row))
    return found


def _within(index: int, inner: list[Rectangle]) -> list[Rectangle]:
    return [Rectangle((index, *one.offsets), (1, *one.sizes)) for one in inner]


def global_rectangles(
    parameter: torch.Tensor, flat: torch.Tensor, first: int = 0
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """`flat` (n,) holds the elements of `parameter` from `first` on: each rectangle's place in the global
    tensor, and a view of `flat` of its shape. Padding is left out.
    """
    offsets, valid = global_block(parameter)
    position = 0
    for one in rectangles(tuple(parameter.shape), first, first + flat.numel()):
        size = prod(one.sizes)
        view = flat[position : position + size].view(one.sizes)
        position += size
        inside = [min(n, v - o) for n, v, o in zip(one.sizes, valid, one.offsets, strict=True)]
        if all(length > 0 for length in inside):
            place = tuple(a + b for a, b in zip(offsets, one.offsets, strict=True))
            yield place, view[tuple(slice(length) for length in inside)]
