"""Do rectangles tile a tensor exactly? Pure arithmetic, used when saving and when loading."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def coverage_problem(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Why `chunks` do not hold every element of a tensor of `shape` exactly once, or None if they do."""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"block {_text(chunk)} does not have {len(shape)} dims"
        for offset, size, full in zip(chunk.offsets, chunk.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > full:
                return f"block {_text(chunk)} exceeds shape {tuple(shape)}"
    overlapping = _overlap(shape, chunks)
    if overlapping is not None:
        return f"blocks {_text(overlapping[0])} and {_text(overlapping[1])} overlap"
    held, total = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if held != total:
        return f"only {held} of {total} elements of shape {tuple(shape)} are held by any rank"
    return None


def _overlap(
    shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]
) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Two chunks that share an element, found by a sweep along the dim with the most distinct offsets."""
    if not shape:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    dim = max(range(len(shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > chunk.offsets[dim]]
        for other in active:
            if all(
                chunk.offsets[d] < other.offsets[d] + other.sizes[d]
                and other.offsets[d] < chunk.offsets[d] + chunk.sizes[d]
                for d in range(len(shape))
            ):
                return other, chunk
        active.append(chunk)
    return None


def _text(chunk: ChunkStorageMetadata) -> str:
    ranges = (f"{o}:{o + n}" for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    return "[" + ", ".join(ranges) + "]"
