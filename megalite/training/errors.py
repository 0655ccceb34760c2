"""Failures that end a run and are the user's to mend: reported as a message, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class TrainingError(RuntimeError):
    """A run cannot start or go on; the message says why and what would help."""


def on_every_rank(action: Callable[[], T], expected: type[Exception]) -> T:
    """Call `action` on every rank and return each its own result; what fails on one fails on all.

    Raises TrainingError on every rank, with one message, when `action` raised `expected` on any, so that
    nobody waits for a rank that has given up.
    """
    result: T | None = None
    message: str | None = None
    try:
        result = action()
    except expected as error:
        message = str(error)
    messages: list[str | None] = [message]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
    failures = {text: rank for rank, text in reversed(list(enumerate(messages))) if text is not None}
    if failures:
        everywhere = len(failures) == 1 and all(messages)
        raise TrainingError(
            "\n".join(text if everywhere else f"rank {rank}: {text}" for text, rank in failures.items())
        )
    return result  # type: ignore[return-value]  # no failure: the action has returned
