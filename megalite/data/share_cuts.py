"""What tells that the files in which shares of a corpus begin and end stayed the same from share to share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from megalite.data.errors import reading
from megalite.data.inputs import Part

SAMPLED_BYTES = 4096  # at each place


def cut_hashes(parts: Sequence[Part]) -> tuple[str | None, str | None]:
    """Of the file inside which the share `parts` begins, and of that inside which it ends; None where it
    does not. One share ends where the next begins: if the two hashes differ, the file was replaced between
    them, as one that was shuffled in its place. Raises DataError for a file that cannot be read.
    """
    if not parts:
        return None, None
    first, last = parts[0], parts[-1]
    begins = _hash(first.path, first.start) if first.start > 0 else None
    with reading(last.path):
        inside = 0 <= last.end < os.path.getsize(last.path)
    return begins, _hash(last.path, last.end) if inside else None


def _hash(path: str, cut: int) -> str:
    """Of the bytes around `cut` and at both ends of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for first in (0, cut - SAMPLED_BYTES, cut, size - SAMPLED_BYTES):
            file.seek(max(0, first))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
