"""Ranks to groups: pure arithmetic, and groups of real processes."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.topology import axis_ranks, build_topology
from tests.pool import WorkerPool

NAMES = ("tp", "dp", "pp", "model", "embedding", "kv")
LAYOUTS = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 3)]


class Coordinates(NamedTuple):
    """Place of a rank in the mesh."""

    tp: int
    dp: int
    pp: int


def coordinates(rank: int, tp: int, dp: int) -> Coordinates:
    """tp runs fastest, pp slowest."""
    return Coordinates(tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp))


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
def test_each_axis_partitions_the_ranks_and_varies_one_coordinate(tp: int, pp: int, dp: int) -> None:
    world = tp * pp * dp
    rows = axis_ranks(world, tp, pp)
    for name, size in (("tp", tp), ("dp", dp), ("pp", pp)):
        assert sorted(rank for row in rows[name] for rank in row) == list(range(world))
        for row in rows[name]:
            places = [coordinates(rank, tp, dp) for rank in row]
            assert [getattr(place, name) for place in places] == list(range(size))
            others = {
                tuple(getattr(place, other) for other in ("tp", "dp", "pp") if other != name)
                for place in places
            }
            assert len(others) == 1


@pytest.mark.parametrize(("tp", "pp", "dp"), LAYOUTS)
def test_any_two_ranks_of_one_model_copy_share_the_model_axis(tp: int, pp: int, dp: int) -> None:
    world = tp * pp * dp
    rows = axis_ranks(world, tp, pp)["model"]
    together = {pair for row in rows for pair in combinations(sorted(row), 2)}
    for pair in combinations(range(world), 2):
        places = [coordinates(rank, tp, dp) for rank in pair]
        assert (pair in together) == (places[0].dp == places[1].dp)


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert axis_ranks(8, 2, 2)["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert axis_ranks(8, 2, 2)["embedding"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_ranks_that_share_a_key_value_head_are_neighbours_on_the_tensor_parallel_axis() -> None:
    assert axis_ranks(8, 4, 2, kv_replicas=2)["kv"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert axis_ranks(8, 4, 2, kv_replicas=4)["kv"] == axis_ranks(8, 4, 2)["tp"]
    assert axis_ranks(8, 4, 2)["kv"] == [(rank,) for rank in range(8)]


def test_a_world_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="world size 6 is not divisible by tensor 2 x pipeline 2"):
        axis_ranks(6, 2, 2)
    with pytest.raises(ValueError, match="tensor 4 is not divisible by 3 replicas of each key/value head"):
        axis_ranks(8, 4, 1, kv_replicas=3)


def test_one_process_has_no_groups() -> None:
    topology = build_topology(1, 1, torch.device("cpu"))
    for name in NAMES:
        assert topology.axis(name).group is None


def _sum_over_each_axis(tensor: int, pipeline: int) -> None:
    topology = build_topology(tensor, pipeline, torch.device("cpu"), kv_replicas=tensor // 2 or 1)
    for name in NAMES:
        axis = topology.axis(name)
        total = torch.tensor([topology.rank])
        if axis.group is not None:
            dist.all_reduce(total, group=axis.group)
        assert int(total) == sum(axis.ranks)
        assert axis.ranks[axis.rank] == topology.rank


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4), (2, 1), (1, 8), (4, 2), (8, 1)])
def test_groups_hold_the_ranks_of_their_axis(pool: WorkerPool, tp: int, pp: int) -> None:
    pool.run(8, _sum_over_each_axis, tp, pp)
