"""Rectangles tile a tensor or it is said why not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megalite.checkpoint.coverage import coverage_problem


def box(*ends: tuple[int, int]) -> ChunkStorageMetadata:
    """A rectangle by its start and stop in each dim."""
    return ChunkStorageMetadata(
        torch.Size([start for start, _ in ends]), torch.Size([stop - start for start, stop in ends])
    )


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [box()]),
        ((3,), [box((0, 3))]),
        ((4, 4), [box((i, i + 2), (j, j + 2)) for i in (0, 2) for j in (0, 2)]),
        # A pinwheel: no straight cut separates its parts.
        (
            (3, 3),
            [
                box((0, 1), (0, 2)),
                box((0, 2), (2, 3)),
                box((2, 3), (1, 3)),
                box((1, 3), (0, 1)),
                box((1, 2), (1, 2)),
            ],
        ),
    ],
)
def test_whole_tensors(shape: tuple[int, ...], boxes: list[ChunkStorageMetadata]) -> None:
    assert coverage_problem(shape, boxes) is None


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [], "only 0 of 1 elements"),
        ((), [box(), box()], "overlap"),
        ((4,), [box((0, 2))], "only 2 of 4 elements of shape (4,) are held"),
        ((4,), [box((2, 5))], "block [2:5] exceeds shape (4,)"),
        ((4,), [box((0, 2)), box((0, 2))], "blocks [0:2] and [0:2] overlap"),
        # The right number of elements, but one twice and one not at all.
        ((4, 4), [box((0, 2), (0, 4)), box((1, 3), (0, 4))], "blocks [0:2, 0:4] and [1:3, 0:4] overlap"),
        ((4, 4), [box((0, 4))], "does not have 2 dims"),
    ],
)
def test_what_is_wrong(shape: tuple[int, ...], boxes: list[ChunkStorageMetadata], problem: str) -> None:
    assert problem in str(coverage_problem(shape, boxes))
