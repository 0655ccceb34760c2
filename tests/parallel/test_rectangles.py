"""Runs of elements as rectangles: every element once, in order, in few pieces."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from megalite.parallel.params import ParameterFactory
from megalite.parallel.rectangles import Rectangle, global_rectangles, rectangles
from megalite.parallel.topology import Axis, Topology


def factory(tp_size: int, tp_rank: int) -> ParameterFactory:
    axes = {name: Axis(name) for name in ("dp", "pp", "model", "embedding")}
    tp = Axis("tp", tp_size, tp_rank, None, tuple(range(tp_size)))
    topology = Topology(tp_rank, tp_size, tp=tp, **axes, device=torch.device("cpu"))
    return ParameterFactory(topology, torch.float32, seed=1)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4), (2, 2, 3, 2)], ids=str)
def test_every_run_of_every_shape(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    numbers = torch.arange(count).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(count + 1), 2):
        found = rectangles(shape, start, stop)
        assert len(found) <= 2 * len(shape) - 1
        inside = [
            numbers[tuple(slice(o, o + n) for o, n in zip(one.offsets, one.sizes, strict=True))]
            for one in found
        ]
        assert all(part.shape == one.sizes for part, one in zip(inside, found, strict=True))
        flat = torch.cat([numbers.new_empty(0), *(part.flatten() for part in inside)])
        assert flat.tolist() == list(range(start, stop))


def test_a_run_over_rows() -> None:
    assert rectangles((4, 10), 5, 33) == [
        Rectangle((0, 5), (1, 5)),
        Rectangle((1, 0), (2, 10)),
        Rectangle((3, 0), (1, 3)),
    ]


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_parts_of_a_split_and_padded_parameter_fill_the_global_tensor(pieces: int) -> None:
    """(5, 3) over two ranks as 2 x 4 rows: the last three are padding and lie nowhere."""
    expected = torch.arange(15.0).view(5, 3)
    whole = torch.full((5, 3), torch.nan)
    for rank in range(2):
        parameter = factory(2, rank).sharded("w", (5, 3), 0, padded=8)
        flat = torch.full((12,), -1.0)
        rows = expected[4 * rank : 4 * rank + 4].flatten()
        flat[: rows.numel()] = rows
        for first in range(0, 12, -(-12 // pieces)):
            run = flat[first : first + -(-12 // pieces)]
            for offsets, values in global_rectangles(parameter, run, first):
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                assert whole[place].isnan().all()
                whole[place] = values
    assert torch.equal(whole, expected)


def test_rectangles_are_views_that_can_be_filled() -> None:
    parameter = factory(1, 0).replicated("w", (3, 4))
    flat = torch.zeros(7)
    for _, values in global_rectangles(parameter, flat, 3):
        values.fill_(1)
    assert flat.all()
