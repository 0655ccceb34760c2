"""The one exception of this room; the C++ readers and writers raise the same class."""

from __future__ import annotations

from megalite._C import DataError

__all__ = ["DataError"]
