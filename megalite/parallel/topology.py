"""From ranks to groups: which processes share a tensor-, data- or pipeline-parallel axis.

The ranks are one range reshaped to `(pp, dp, tp)`: tensor-parallel neighbours are closest, pipeline stages
furthest apart. Each axis is a slice of that block. An axis of one rank has no group, and every collective
over it is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from megalite.parallel.traffic import Traffic


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as seen by this process.

    `ranks` are the global ranks on it in order, `rank` is this process's place among them; `group` is
    None when `size` is 1. Collectives are waited for through `traffic`.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic, compare=False)


@dataclass(frozen=True)
class Topology:
    """All that a process knows about its place.

    `model` is tp x pp at one dp coordinate: the ranks that together hold one copy of the model. `world` is
    all ranks. `embedding` joins the first and the last stage, which share tied embeddings. `kv` joins the tp
    ranks that share a key/value head, where there are fewer of these than ranks. `planned`: the other ranks
    are not there, see `planned_topology`.
    """

    rank: int
    world_size: int
    tp: Axis
    dp: Axis
    pp: Axis
    model: Axis
    embedding: Axis
    device: torch.device
    kv: Axis = Axis("kv")
    world: Axis = Axis("world")
    planned: ClassVar[bool] = False

    @property
    def traffic(self) -> Traffic:
        """How collectives are started and waited for, on all axes."""
        return self.dp.traffic

    def axis(self, name: str) -> Axis:
        """The axis called `name`: tp, dp, pp, model, embedding, kv or world."""
        axis = getattr(self, name)
        if not isinstance(axis, Axis):
            raise KeyError(f"no axis {name!r}")
        return axis


class PlannedTopology(Topology):
    """A place among ranks that are not there."""

    planned = True


def axis_ranks(
    world_size: int, tensor: int, pipeline: int, kv_replicas: int = 1
) -> dict[str, list[tuple[int, ...]]]:
    """For each axis the list of its rank tuples, in the one order in which every process creates the groups.

    `kv_replicas`: tp ranks, neighbours, that share a key/value head. Raises ValueError when
    `tensor * pipeline` does not divide `world_size`, or `kv_replicas` does not divide `tensor`.
    """
    if world_size % (tensor * pipeline):
        raise ValueError(f"world size {world_size} is not divisible by tensor {tensor} x pipeline {pipeline}")
    if tensor % kv_replicas:
        raise ValueError(f"tensor {tensor} is not divisible by {kv_replicas} replicas of each key/value head")
    block = np.arange(world_size).reshape(pipeline, -1, tensor)  # (pp, dp, tp)

    def rows(order: tuple[int, int, int], length: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in block.transpose(order).reshape(-1, length).tolist()]

    pipelines = rows((1, 2, 0), pipeline)
    return {
        "tp": rows((0, 1, 2), tensor),
        "dp": rows((0, 2, 1), world_size // (tensor * pipeline)),
        "pp": pipelines,
        "model": rows((1, 0, 2), tensor * pipeline),
        "embedding": [(row[0], row[-1]) if pipeline > 1 else row for row in pipelines],
        "kv": rows((0, 1, 2), kv_replicas),
        "world": [tuple(range(world_size))],
    }


def build_topology(
    tensor: int,
    pipeline: int,
    device: torch.device,
    timeout: timedelta = timedelta(minutes=10),
    kv_replicas: int = 1,
) -> Topology:
    """Create every group this job needs, eagerly and in the same order on all ranks.

    Needs an initialised process group when there is more than one process. `timeout` bounds each later
    collective: subgroups do not inherit the default group's. `kv_replicas`: see `axis_ranks`, which also
    says when ValueError is raised.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    axes: dict[str, Axis] = {}
    for name, rows in axis_ranks(world_size, tensor, pipeline, kv_replicas).items():
        shared = tuple(row for row in rows if len(row) > 1)
        if shared and shared not in made:  # e.g. model equals tp when there is one stage
            made[shared], _ = dist.new_subgroups_by_enumeration(
                [list(row) for row in shared], timeout=timeout
            )
        mine = next((row for row in rows if rank in row), (rank,))
        axes[name] = Axis(name, len(mine), mine.index(rank), made[shared] if len(mine) > 1 else None, mine)
    return Topology(rank, world_size, **axes, device=device)


def planned_topology(
    world_size: int, rank: int, tensor: int, pipeline: int, device: torch.device, kv_replicas: int = 1
) -> Topology:
    """The place of `rank` in a job that is not there: collectives over its axes give shapes, no values.

    Needs no processes and no default process group. Raises ValueError as `axis_ranks` does.
    """
    axes: dict[str, Axis] = {}
    for name, rows in axis_ranks(world_size, tensor, pipeline, kv_replicas).items():
        mine = next((row for row in rows if rank in row), (rank,))
        axes[name] = _absent_axis(name, mine, rank)
    return PlannedTopology(rank, world_size, **axes, device=device)


def _absent_axis(name: str, ranks: tuple[int, ...], rank: int) -> Axis:
    """With a group of torch's `fake` backend, which answers every collective at once."""
    from torch._C._distributed_c10d import FakeProcessGroup

    place, size = ranks.index(rank), len(ranks)
    if size == 1:
        return Axis(name, ranks=ranks)
    group = dist.ProcessGroup(dist.HashStore(), place, size)
    backend = FakeProcessGroup._create_internal(place, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return Axis(name, size, place, group, ranks)


def join_ends(
    topology: Topology, pipelines: Sequence[tuple[int, ...]], ends: tuple[int, int], timeout: timedelta
) -> Topology:
    """`topology` with an `embedding` axis for a pipeline whose first and last stage are on the ranks `ends`.

    `pipelines`: every row of the pp axis, the same on all ranks. A collective when the ends are not those
    that `build_topology` joins.
    """
    first, last = ends
    if first == last or (first, last) == (0, topology.pp.size - 1):
        return topology
    rows = [(row[first], row[last]) for row in pipelines]
    mine = next((row for row in rows if topology.rank in row), (topology.rank,))
    if topology.planned:
        return replace(topology, embedding=_absent_axis("embedding", mine, topology.rank))
    group, _ = dist.new_subgroups_by_enumeration([list(row) for row in rows], timeout=timeout)
    shared = group if len(mine) > 1 else None
    axis = Axis("embedding", len(mine), mine.index(topology.rank), shared, mine, topology.traffic)
    return replace(topology, embedding=axis)


def with_traffic(topology: Topology, traffic: Traffic) -> Topology:
    """`topology` whose collectives all go through `traffic`."""
    axes: dict[str, Any] = {
        name: replace(axis, traffic=traffic)
        for name, axis in vars(topology).items()
        if isinstance(axis, Axis)
    }
    return replace(topology, **axes)
