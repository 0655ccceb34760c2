"""Who writes which block: every element of every tensor once, the work shared between the replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megalite.checkpoint.block import Block, checksums
from megalite.checkpoint.coverage import coverage_problem
from megalite.checkpoint.errors import CheckpointError
from megalite.listing import listing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contribution:
    """What a rank tells the coordinator beside its items."""

    iteration: int
    checksums: list[int]  # one an item


@dataclass
class Copies:
    """One rectangle and the ranks that hold equal copies of it."""

    item: WriteItem
    checksum: int
    ranks: list[int]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return _tensor_data(self.item).chunk

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk.sizes) * _tensor_data(self.item).properties.dtype.itemsize


class BlockSavePlanner(SavePlanner):
    """Plans the writing of `blocks`, the same or different ones on every rank.

    After the save the coordinator's `checksums[name]` has one checksum a chunk, in the metadata's order.
    """

    def __init__(self, blocks: Sequence[Block], iteration: int) -> None:
        self.blocks = blocks
        self.iteration = iteration
        self.tensors: dict[MetadataIndex, torch.Tensor] = {}
        self.checksums: dict[str, list[int]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the blocks take the place of the state dict."""

    def create_local_plan(self) -> SavePlan:
        """This rank's blocks as write items, with their checksums."""
        problems = [problem for block in self.blocks if (problem := block.problem()) is not None]
        if problems:
            raise CheckpointError(f"blocks that cannot be saved: {listing(problems)}")
        blocks = [block for block in self.blocks if block.tensor.numel() > 0]
        items = [_write_item(block) for block in blocks]
        self.tensors = {item.index: block.tensor for item, block in zip(items, blocks, strict=True)}
        sums = checksums([block.tensor for block in blocks])
        return SavePlan(items, planner_data=Contribution(self.iteration, sums))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that the ranks' blocks make whole tensors and give each block to one of its holders."""
        iterations = [plan.planner_data.iteration for plan in all_plans]
        if len(set(iterations)) > 1:
            raise CheckpointError(f"ranks save different iterations: {iterations}")
        tensors, problems, drifted = _collect(all_plans)
        for name, copies in tensors.items():
            problem = coverage_problem(_tensor_data(copies[0].item).size, [copy.chunk for copy in copies])
            if problem is not None:
                problems.append(f"{name}: {problem}")
        if problems:
            raise CheckpointError(f"the ranks' blocks do not make whole tensors: {listing(problems)}")

        if drifted:
            # Refusing would cost the user the whole run for what is often one rank's last bit.
            logger.warning("replicas differ, the lowest rank's are saved: %s", listing(drifted))

        metadata = Metadata({}, planner_data={name: (name,) for name in tensors})
        indexed: list[Copies] = []
        for name, copies in tensors.items():
            data = _tensor_data(copies[0].item)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                data.properties, data.size, [copy.chunk for copy in copies]
            )
            self.checksums[name] = [copy.checksum for copy in copies]
            for position, copy in enumerate(copies):
                index = replace(copy.item.index, index=position)
                indexed.append(replace(copy, item=replace(copy.item, index=index)))
        written = assign(indexed, len(all_plans))
        plans = [SavePlan([copy.item for copy in copies]) for copies in written]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator's word is final."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor of a block."""
        return self.tensors[write_item.index].detach()


def assign(blocks: list[Copies], world_size: int) -> list[list[Copies]]:
    """For each rank the blocks it writes: largest first, each to the holder with the fewest bytes so far."""
    written: list[list[Copies]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    # A block with one holder leaves no choice, so those go first.
    for block in sorted(blocks, key=lambda b: (len(b.ranks) > 1, -b.nbytes)):
        rank = min(block.ranks, key=lambda r: load[r])
        written[rank].append(block)
        load[rank] += block.nbytes
    return written


def _collect(plans: list[SavePlan]) -> tuple[dict[str, list[Copies]], list[str], list[str]]:
    """The distinct rectangles of each tensor by name, what cannot be saved, and which replicas differ."""
    tensors: dict[str, dict[tuple[torch.Size, torch.Size], Copies]] = {}
    problems: list[str] = []
    drifted: list[str] = []
    for rank, plan in enumerate(plans):
        for item, checksum in zip(plan.items, plan.planner_data.checksums, strict=True):
            name, data = item.index.fqn, _tensor_data(item)
            boxes = tensors.setdefault(name, {})
            first = next(iter(boxes.values()), None)
            if first is not None and (described := _described(item)) != _described(first.item):
                problems.append(
                    f"{name}: {_described(first.item)} on rank {first.ranks[0]}, {described} on rank {rank}"
                )
                continue
            copies = boxes.setdefault((data.chunk.offsets, data.chunk.sizes), Copies(item, checksum, []))
            if copies.checksum != checksum:
                drifted.append(f"{name} on rank {rank} from rank {copies.ranks[0]}")
            elif rank not in copies.ranks[-1:]:
                copies.ranks.append(rank)
    return {name: list(tensors[name].values()) for name in sorted(tensors)}, problems, drifted


def _described(item: WriteItem) -> str:
    data = _tensor_data(item)
    return f"shape {tuple(data.size)} {data.properties.dtype}"


def _tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data


def _write_item(block: Block) -> WriteItem:
    # Plain properties, so that equal blocks are equal whatever tensor they are views of.
    properties = TensorProperties(dtype=block.tensor.dtype)
    data = TensorWriteData(block.chunk, properties, torch.Size(block.global_shape))
    return WriteItem(MetadataIndex(block.name, block.offsets), WriteItemType.SHARD, tensor_data=data)
