"""Ranks to groups: pure arithmetic, and groups of real processes."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.topology import axis_ranks, build_topology, coordinates
from tests.pool import WorkerPool

LAYOUTS = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 3)]


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


def test_a_world_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="world size 6 is not divisible by tensor 2 x pipeline 2"):
        axis_ranks(6, 2, 2)


def test_one_process_has_no_groups() -> None:
    topology = build_topology(1, 1, torch.device("cpu"))
    for name in ("tp", "dp", "pp", "model", "embedding"):
        assert topology.axis(name).group is None
    assert topology.edges.forward_in is None
    assert topology.edges.backward_in is None


def _sums_and_neighbours(tensor: int, pipeline: int) -> dict[str, int]:
    """What a rank's neighbours send it, each its own number; sums over every axis are checked here."""
    topology = build_topology(tensor, pipeline, torch.device("cpu"))
    seen = {}
    for name in ("tp", "dp", "pp", "model", "embedding"):
        axis = topology.axis(name)
        total = torch.tensor([topology.rank])
        if axis.group is not None:
            dist.all_reduce(total, group=axis.group)
        assert int(total) == sum(axis.ranks)
        assert axis.ranks[axis.rank] == topology.rank
    edges = topology.edges
    works = []
    for edge in (edges.forward_out, edges.backward_out):
        if edge is not None:
            works.append(dist.isend(torch.tensor([topology.rank]), edge.peer, group=edge.group))
    for label, edge in (("before", edges.forward_in), ("after", edges.backward_in)):
        if edge is not None:
            box = torch.zeros(1, dtype=torch.int64)
            dist.recv(box, edge.peer, group=edge.group)
            seen[label] = int(box)
    for work in works:
        assert work is not None
        work.wait()
    return seen


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4), (2, 1), (1, 8)])
def test_groups_and_links_reach_the_right_ranks(pool: WorkerPool, tp: int, pp: int) -> None:
    world = 8
    stage = world // pp
    for rank, seen in enumerate(pool.run(world, _sums_and_neighbours, tp, pp)):
        assert seen.get("before") == (rank - stage if rank >= stage else None)
        assert seen.get("after") == (rank + stage if rank + stage < world else None)
