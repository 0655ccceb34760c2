"""What can go wrong with a checkpoint, as every rank sees it."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Made of one string, so that it travels between ranks."""


class CheckpointNotFoundError(CheckpointError):
    """There is no checkpoint where one was asked for."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is incomplete, damaged or not one of ours."""


def describe(error: BaseException) -> str:
    """One line about an exception: its message, with its type where that is not already clear from it."""
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
