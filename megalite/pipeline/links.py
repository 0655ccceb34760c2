"""The directed links between stages: who passes hidden states and gradients to whom."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megalite.parallel.topology import Axis, Edge
from megalite.pipeline.schedule import Kind, Schedule


@dataclass(frozen=True)
class LocalLink:
    """A link between two chunks of the same rank: tensors are handed over without a copy."""

    queue: deque[torch.Tensor] = field(default_factory=deque)


Link = Edge | LocalLink


class Links(Protocol):
    """The links of one chunk, None at the ends of the chain; `parallel.topology.PipelineEdges` is one."""

    @property
    def forward_in(self) -> Link | None: ...
    @property
    def forward_out(self) -> Link | None: ...
    @property
    def backward_in(self) -> Link | None: ...
    @property
    def backward_out(self) -> Link | None: ...


@dataclass(frozen=True)
class ChunkLinks:
    """Links of one chunk out of several on this rank."""

    forward_in: Link | None = None
    forward_out: Link | None = None
    backward_in: Link | None = None
    backward_out: Link | None = None


def build_links(schedule: Schedule, pp: Axis, device: torch.device, timeout: timedelta) -> list[ChunkLinks]:
    """The links of each chunk of this rank, for a schedule with any placement of stages on the pp axis.

    Chunks share the links between the same two ranks: one for activations and one for gradients each way.
    Every group is created and used once here, in the order of the chain, so that no ranks wait in a circle.
    """
    made: dict[tuple[int, int, Kind], Link] = {}
    places = {
        stage: (rank, chunk)
        for rank, chunks in enumerate(schedule.stages)
        for chunk, stage in enumerate(chunks)
    }
    ends: list[dict[str, Link]] = [{} for _ in schedule.stages[pp.rank]]
    for stage in range(schedule.num_stages - 1):
        (rank, chunk), (next_rank, next_chunk) = places[stage], places[stage + 1]
        for kind, source, target in ((Kind.F, rank, next_rank), (Kind.B, next_rank, rank)):
            if pp.rank not in (source, target):
                continue
            if source == target:
                link: Link = LocalLink()
            elif (source, target, kind) in made:
                link = made[source, target, kind]
            else:
                link = made[source, target, kind] = _connect(pp, source, target, device, timeout)
            if pp.rank == rank:
                ends[chunk]["forward_out" if kind is Kind.F else "backward_in"] = link
            if pp.rank == next_rank:
                ends[next_chunk]["forward_in" if kind is Kind.F else "backward_out"] = link
    return [ChunkLinks(**end) for end in ends]


def _connect(pp: Axis, source: int, target: int, device: torch.device, timeout: timedelta) -> Edge:
    pair = [pp.ranks[source], pp.ranks[target]]
    group = dist.new_group(pair, timeout=timeout, use_local_synchronization=True)
    peer = pair[1] if pp.rank == source else pair[0]
    token = torch.zeros(1, device=device)
    if pp.rank == source:
        dist.send(token, peer, group=group)
    else:
        dist.recv(token, peer, group=group)
    return Edge(group, peer)
