"""The directed links between stages: who passes hidden states and gradients to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.pipeline.schedule import Kind, Schedule
from megalite.pipeline.simulation import LinkKey


@dataclass(frozen=True)
class RemoteLink:
    """One directed link to another rank; `peer` is its global rank.

    Each direction has a group of its own (in which NCCL gives every pair of ranks a communicator and stream
    of its own), so the k-th send always meets the k-th receive: no tags, and a receive may be posted any time
    ahead without blocking a send.
    """

    group: dist.ProcessGroup
    peer: int


@dataclass(frozen=True)
class LocalLink:
    """A link between two chunks of the same rank: tensors are handed over without a copy.

    `waiting` holds them by micro-batch: they may be taken in another order than they were made in.
    """

    waiting: dict[int, torch.Tensor] = field(default_factory=dict)


Link = RemoteLink | LocalLink


@dataclass(frozen=True)
class ChunkLinks:
    """The links of one chunk, None at the ends of the chain."""

    forward_in: Link | None = None
    forward_out: Link | None = None
    backward_in: Link | None = None
    backward_out: Link | None = None


def build_links(
    schedule: Schedule, pipelines: Sequence[Sequence[int]], device: torch.device, timeout: timedelta
) -> list[ChunkLinks]:
    """The links of each chunk of this process, for a schedule with any placement of stages on ranks.

    `pipelines` lists the global ranks of every pipeline of the job, in the same order on all processes.
    Chunks share the links between the same two ranks. Activations and gradients, up and down the ranks, have
    a group each, so that no two flows between two ranks can be mistaken for each other. All groups are
    created and all links used once here, in one order on all processes.
    """
    me = dist.get_rank() if dist.is_initialized() else 0
    ranks = next(pipeline for pipeline in pipelines if me in pipeline)
    groups: dict[tuple[Kind, bool], dist.ProcessGroup] = {}
    links: dict[LinkKey, Link] = {}
    chunks: dict[int, dict[str, Link]] = {stage: {} for stage in schedule.stages[ranks.index(me)]}
    for stage in range(schedule.num_stages - 1):
        here, there = _place(schedule, stage), _place(schedule, stage + 1)
        for kind, source, target in ((Kind.F, here, there), (Kind.B, there, here)):
            way = kind, source < target
            if source != target and way not in groups:
                groups[way], _ = dist.new_subgroups_by_enumeration(
                    [list(p) for p in pipelines], timeout=timeout
                )
            if me not in (ranks[source], ranks[target]):
                continue
            if source == target:
                link: Link = LocalLink()
            elif (source, target, kind) in links:
                link = links[source, target, kind]
            else:
                link = _connect(groups[way], ranks[source], ranks[target], me, device)
                links[source, target, kind] = link
            if stage in chunks:
                chunks[stage]["forward_out" if kind is Kind.F else "backward_in"] = link
            if stage + 1 in chunks:
                chunks[stage + 1]["forward_in" if kind is Kind.F else "backward_out"] = link
    return [ChunkLinks(**ends) for ends in chunks.values()]


def _place(schedule: Schedule, stage: int) -> int:
    rank = schedule.rank_of(stage)
    if rank is None:
        raise ValueError(f"{schedule.name}: no rank holds stage {stage}")
    return rank


def _connect(group: dist.ProcessGroup, source: int, target: int, me: int, device: torch.device) -> RemoteLink:
    """Pass one element over the link: backends that connect at first use do it here, in a known order."""
    token = torch.zeros(1, device=device)
    if me == source:
        dist.send(token, target, group=group)
        return RemoteLink(group, target)
    dist.recv(token, source, group=group)
    return RemoteLink(group, source)
