"""Errors that reach every rank: what fails on one must not leave the others waiting."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megalite.checkpoint.block import Block
from megalite.checkpoint.errors import CheckpointCorruptError, CheckpointError, describe
from megalite.listing import listing
from megalite.parallel.everywhere import on_every_rank

T = TypeVar("T")


def is_first_rank(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is rank 0 of the group, or alone."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call `action` on rank 0 of the group alone and return its result, or raise its error, on every rank."""
    outcome: list[Any] = [None, None]  # result, error
    if is_first_rank(group):
        try:
            outcome[0] = action()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            outcome[1] = error if isinstance(error, CheckpointError) else CheckpointError(describe(error))
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def listed_on_every_rank(blocks: Iterable[Block], group: dist.ProcessGroup | None) -> list[Block]:
    """All of `blocks`, which may be made as they are asked for; an error on any rank is raised on all."""

    def listed() -> list[Block]:
        try:
            return list(blocks)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            raise CheckpointError(describe(error)) from error

    return on_every_rank(listed, CheckpointError, CheckpointError, group)


@contextmanager
def gathered_errors() -> Iterator[None]:
    """Turn what torch.distributed.checkpoint collected from all ranks into one error, the same on each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        try:
            yield
        except CheckpointException as exception:
            errors = {rank: failure[0] for rank, failure in exception.failures.items()}
            ours = all(isinstance(error, CheckpointError) for error in errors.values())
            # Ours name what they are about; of a stranger the rank and the traceback matter too.
            texts = [
                describe(error) if isinstance(error, CheckpointError) else f"rank {rank}: {describe(error)}"
                for rank, error in errors.items()
            ]
            corrupt = all(isinstance(error, CheckpointCorruptError) for error in errors.values())
            kind = CheckpointCorruptError if corrupt else CheckpointError
            raise kind(listing(list(dict.fromkeys(texts)))) from (None if ours else exception)
