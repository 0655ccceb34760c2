"""Which checkpoints of a folder are of one run: each knows those before it.

A run that goes on from an older checkpoint, because the tracker names that one, leaves the later ones where
they are. They are no history of what it saves then, nor what it may fall back to.
"""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.folder import folder_of, published_iterations, read_tracker
from megalite.checkpoint.manifest import earlier_checkpoints


def newest_first(directory: Path) -> list[int]:
    """The recorded latest iteration and the older ones that it comes after; all of them where nothing is
    recorded, and all older ones where the latest does not say.
    """
    published = published_iterations(directory)
    latest = read_tracker(directory)
    if latest is None:
        return published[::-1]
    known = earlier_checkpoints(folder_of(directory, latest))
    older = [number for number in reversed(published) if number < latest]
    return [latest, *(older if known is None else [number for number in older if number in known])]


def comes_after(directory: Path, iteration: int) -> list[int]:
    """The checkpoints that one of `iteration`, to be published next, comes after, in ascending order."""
    return sorted(number for number in newest_first(directory) if number < iteration)
