"""Saves a checkpoint: all of it or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megalite.checkpoint.block import Block
from megalite.checkpoint.branch import comes_after
from megalite.checkpoint.collective import gathered_errors, is_first_rank, listed_on_every_rank, on_first_rank
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.folder import create_temporary, publish
from megalite.checkpoint.manifest import STATE, encode_state, write_manifest
from megalite.checkpoint.save_planner import BlockSavePlanner
from megalite.checkpoint.storage import BlockWriter
from megalite.durable import write_durably


def save(
    directory: str | os.PathLike[str],
    iteration: int,
    blocks: Iterable[Block],
    state: Mapping[str, Any],
    *,
    first: bool = False,
    check: Callable[[], None] = lambda: None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `directory/iter_<iteration>` and record it as the latest; returns its path.

    Every rank of the group calls this with its own blocks, which together must make whole tensors. What
    several ranks hold is written by one of them; where their bits differ, the lowest rank's are saved and a
    warning is logged. `state` is any JSON data, taken from rank 0; `load` gives it back with `"iteration"`
    added. `first`: of a run that began elsewhere or anew, so that what the folder holds is none of its own.
    `check` is called on rank 0 before the folder is changed, and raises CheckpointError where it must not be.
    Returns when everything is on the disk.

    `group` carries the coordination (Python objects): a Gloo group keeps that on the CPU; None is the default
    group, which moves them through GPU memory if it has no CPU backend. Without any group it works alone.

    Raises CheckpointError on every rank when anything fails on one; an older checkpoint is then untouched.
    """
    root = Path(directory)

    def begin() -> Path:
        text = encode_state({**state, "iteration": iteration})
        check()
        with _naming(root):
            temporary = create_temporary(root, iteration)
            write_durably(temporary / STATE, text)
        return temporary

    held = listed_on_every_rank(blocks, group)
    temporary = on_first_rank(begin, group)
    try:
        with gathered_errors():
            planner = BlockSavePlanner(held, iteration)
            metadata: Metadata = dcp.save(
                {}, storage_writer=BlockWriter(temporary), planner=planner, process_group=group
            )

        def finish() -> Path:
            with _naming(root):
                earlier = [] if first else comes_after(root, iteration)
                write_manifest(temporary, iteration, earlier, metadata, planner.checksums)
                check()
                return publish(temporary, iteration)

        return on_first_rank(finish, group)
    except CheckpointError:
        if is_first_rank(group):
            shutil.rmtree(temporary, ignore_errors=True)
            check()  # or another run has removed what this one was writing, as a leftover
        raise


@contextmanager
def _naming(root: Path) -> Iterator[None]:
    """An OSError becomes a CheckpointError that names the folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot save to {root}: {error.strerror or error}") from error
