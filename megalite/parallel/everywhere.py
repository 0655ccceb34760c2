"""Python objects and errors that reach every rank: for messages, never for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The object of each rank of the group, in order; of a process alone its own. A collective."""
    if not dist.is_initialized():
        return [mine]
    everyones = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def on_every_rank(
    action: Callable[[], T],
    expected: type[Exception],
    raised: type[Exception],
    group: dist.ProcessGroup | None = None,
    meet: Callable[[], None] = lambda: None,
) -> T:
    """Call `action` on every rank and return each its own result; what fails on one fails on all.

    When `action` raises `expected` on any rank, `raised` is raised on every one, with one message, so that
    nobody waits for a rank that has given up. Any other exception stays what it is on its own rank, and is
    `raised` on the others. `meet` lets ranks wait for each other that may take longer for
    `action` than a collective waits.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    meet()
    usual = failure is None or isinstance(failure, expected)
    text = str(failure) if usual else f"{type(failure).__name__}: {failure}"
    messages = gather_objects(None if failure is None else text, group)
    if failure is not None and not usual:
        raise failure
    failures = {text: rank for rank, text in reversed(list(enumerate(messages))) if text is not None}
    if failures:
        everywhere = len(failures) == 1 and None not in messages
        raise raised(
            "\n".join(text if everywhere else f"rank {rank}: {text}" for text, rank in failures.items())
        ) from failure
    return result  # type: ignore[return-value]  # no failure: the action has returned
