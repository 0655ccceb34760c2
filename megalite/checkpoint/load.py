"""Loads a checkpoint onto any layout, and says which ones there are."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megalite.checkpoint.block import Block
from megalite.checkpoint.branch import newest_first
from megalite.checkpoint.collective import gathered_errors, is_first_rank, listed_on_every_rank, on_first_rank
from megalite.checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from megalite.checkpoint.folder import folder_of, published_iterations, read_tracker, restore_replaced
from megalite.checkpoint.load_planner import BlockLoadPlanner
from megalite.checkpoint.manifest import STATE, check_tensors, read_manifest
from megalite.checkpoint.metadata import read_metadata
from megalite.checkpoint.storage import BlockReader
from megalite.listing import listing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is complete, with everything about it but the tensors."""

    folder: Path
    metadata: Metadata
    checksums: dict[str, list[int]]
    state: dict[str, Any]


def load(
    directory: str | os.PathLike[str],
    blocks: Iterable[Block],
    iteration: int | None = None,
    *,
    ignored_prefixes: tuple[str, ...] = (),
    convert_dtype: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the blocks' tensors in place and return the saved state, the same on every rank.

    Every rank of the group calls this with the blocks it wants, whatever layout they were saved from. All
    names of the checkpoint must be asked for by some rank, unless they start with one of `ignored_prefixes`.
    Dtypes must be equal, and the bits then are; with `convert_dtype` floating-point ones are converted.
    `group` as for `save`.

    With `iteration` None the recorded latest checkpoint is loaded, or, with a warning, the newest
    complete and undamaged one of those that it comes after, not what a rollback by the tracker left.

    Raises, on every rank: CheckpointNotFoundError when there is none at all, CheckpointCorruptError when the
    one asked for is damaged, CheckpointError when it does not fit the blocks (all mismatches at once). After
    an error the blocks' contents are undefined.
    """
    root = Path(directory)
    wanted = listed_on_every_rank(blocks, group)
    candidates = on_first_rank(lambda: _candidates(root, iteration), group)
    damaged: list[str] = []
    for candidate in candidates:
        try:
            return _load_one(folder_of(root, candidate), wanted, ignored_prefixes, convert_dtype, group)
        except CheckpointCorruptError as error:
            if iteration is not None:
                raise
            damaged.append(str(error))
            if is_first_rank(group):
                logger.warning("checkpoint of iteration %d is passed over: %s", candidate, error)
    raise CheckpointError(f"no checkpoint in {root} can be loaded: {listing(damaged)}")


def latest_iteration(directory: str | os.PathLike[str]) -> int | None:
    """The iteration that `load` would try first among the complete ones; None if there is none."""
    return next(complete_iterations(directory), None)


def complete_iterations(directory: str | os.PathLike[str]) -> Iterator[int]:
    """Those of the complete checkpoints that belong to the run, the newest first."""
    root = Path(directory)
    return (n for n in newest_first(root) if _is_complete(folder_of(root, n)))


def read_state(directory: str | os.PathLike[str], iteration: int) -> dict[str, Any]:
    """The state saved with a checkpoint. Raises CheckpointCorruptError when it is missing or incomplete."""
    folder = folder_of(Path(directory), iteration)
    read_manifest(folder)
    return _state(folder)


def _load_one(
    folder: Path,
    blocks: list[Block],
    ignored_prefixes: tuple[str, ...],
    convert_dtype: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    opened = on_first_rank(lambda: _open(folder), group)
    with gathered_errors():
        dcp.load(
            {},
            storage_reader=BlockReader(opened.folder, opened.metadata, opened.checksums),
            planner=BlockLoadPlanner(blocks, ignored_prefixes, convert_dtype),
            process_group=group,
        )
    return opened.state


def _candidates(directory: Path, iteration: int | None) -> list[int]:
    """The iterations to try, the preferred one first."""
    if directory.is_dir():
        restore_replaced(directory)
    published = published_iterations(directory)
    if iteration is not None:
        if iteration not in published:
            there = (
                f"it has {listing([str(number) for number in reversed(published)])}"
                if published
                else "it has none"
            )
            raise CheckpointNotFoundError(f"{directory} has no checkpoint of iteration {iteration}; {there}")
        return [iteration]
    candidates = newest_first(directory)
    if not candidates:
        raise CheckpointNotFoundError(f"{directory} has no checkpoint")
    if read_tracker(directory) is None:
        logger.warning("%s does not record a latest iteration; trying the newest", directory)
    return candidates


def _open(folder: Path) -> Opened:
    manifest = read_manifest(folder)
    metadata = read_metadata(folder, manifest.files)
    check_tensors(manifest, metadata, folder)
    sums = {name: entry.checksums for name, entry in manifest.tensors.items()}
    return Opened(folder, metadata, sums, _state(folder))


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return state


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointCorruptError:
        return False
    return True
