"""Which parts of the saved blocks fill the blocks that are asked for, however either was cut."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megalite.checkpoint.block import Block
from megalite.checkpoint.coverage import coverage_problem
from megalite.checkpoint.errors import CheckpointCorruptError, CheckpointError
from megalite.listing import listing


@dataclass(frozen=True)
class Request:
    """What a rank tells the coordinator beside its items."""

    names: list[str]
    missing: list[str]
    problems: list[str]


class BlockLoadPlanner(LoadPlanner):
    """Fills the tensors of `blocks` in place.

    The coordinator refuses, in one error for all ranks: names that the checkpoint lacks, names that no rank
    asks for (unless they start with one of `ignored_prefixes`), shapes that differ, and dtypes that differ;
    with `convert_dtype` one floating-point dtype may be read into another.
    """

    def __init__(
        self, blocks: Sequence[Block], ignored_prefixes: tuple[str, ...] = (), convert_dtype: bool = False
    ) -> None:
        self.blocks: dict[str, list[Block]] = {}
        for block in blocks:
            self.blocks.setdefault(block.name, []).append(block)
        self.ignored_prefixes = ignored_prefixes
        self.convert_dtype = convert_dtype
        self.saved: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the metadata; the blocks take the place of the state dict."""
        if metadata is None:
            raise CheckpointError("no metadata was given to the load planner")
        for name, saved in metadata.state_dict_metadata.items():
            if not isinstance(saved, TensorStorageMetadata):
                raise CheckpointCorruptError(f"{name} is not a tensor")
            self.saved[name] = saved

    def create_local_plan(self) -> LoadPlan:
        """The reads that fill this rank's blocks; mismatches are reported, for the coordinator to raise."""
        missing = [name for name in self.blocks if name not in self.saved]
        problems: list[str] = []
        items: list[ReadItem] = []
        for name, blocks in self.blocks.items():
            if name not in self.saved:
                continue
            found = [problem for block in blocks if (problem := self._problem(block)) is not None]
            problems.extend(dict.fromkeys(found))
            if not found:
                chunks = [block.chunk for block in blocks]
                items.extend(
                    item
                    for item in create_read_items_for_chunk_list(name, self.saved[name], chunks)
                    if math.prod(item.lengths) > 0
                )
        return LoadPlan(items, planner_data=Request(list(self.blocks), missing, problems))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise everything that does not fit at once; otherwise each rank reads what it planned."""
        requests: list[Request] = [plan.planner_data for plan in global_plan]
        names = {name for request in requests for name in request.names}
        missing = list(dict.fromkeys(name for request in requests for name in request.missing))
        unexpected = [
            name for name in self.saved if name not in names and not name.startswith(self.ignored_prefixes)
        ]
        problems = list(dict.fromkeys(problem for request in requests for problem in request.problems))
        parts = []
        if missing:
            parts.append(f"missing from it ({len(missing)}): {listing(missing)}")
        if unexpected:
            parts.append(f"in it but not asked for ({len(unexpected)}): {listing(unexpected)}")
        if problems:
            parts.append(f"different ({len(problems)}): {listing(problems)}")
        if parts:
            raise CheckpointError("the checkpoint does not fit: " + "; ".join(parts))
        holes = [
            f"{name}: {problem}"
            for name in sorted(names)
            if (problem := coverage_problem(self.saved[name].size, self.saved[name].chunks)) is not None
        ]
        if holes:
            raise CheckpointCorruptError(f"the checkpoint's tensors are not whole: {listing(holes)}")
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The coordinator changes nothing."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refused: a checkpoint holds tensors and JSON, nothing that would have to be unpickled."""
        raise CheckpointCorruptError(f"{read_item.storage_index.fqn} is an opaque byte item")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the destination block that a read fills, as a view."""
        blocks = self.blocks[read_item.dest_index.fqn]
        tensor = blocks[read_item.dest_index.index or 0].tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the view that was resolved is the destination."""

    def _problem(self, block: Block) -> str | None:
        """Why a block cannot be filled from the checkpoint's tensor of its name, or None."""
        saved = self.saved[block.name]
        if tuple(block.global_shape) != tuple(saved.size):
            return f"{block.name}: shape {tuple(saved.size)} saved, {tuple(block.global_shape)} expected"
        theirs, ours = saved.properties.dtype, block.tensor.dtype
        floating = theirs.is_floating_point and ours.is_floating_point
        if theirs != ours and not (self.convert_dtype and floating):
            hint = "; conversion was not asked for" if floating else ""
            return f"{block.name}: {theirs} saved, {ours} expected{hint}"
        return block.problem()
