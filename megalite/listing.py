"""How messages list things."""

from __future__ import annotations

from collections.abc import Sequence

LISTED = 10  # a wrong model size or folder would otherwise print thousands


def listing(entries: Sequence[str]) -> str:
    """The first entries, and how many more there are."""
    more = f" and {len(entries) - LISTED} more" if len(entries) > LISTED else ""
    return ", ".join(entries[:LISTED]) + more
