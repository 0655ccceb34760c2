"""When linear layers compute their weight gradients: in the backward pass, or later by schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WeightGradients:
    """Runs the weight gradients of a process's layers, at once unless `put_off` is active."""

    def __init__(self) -> None:
        self._later: list[Callable[[], None]] | None = None

    def compute(self, work: Callable[[], None]) -> None:
        """Do `work`, which adds one weight's gradient, now or when the list of `put_off` is run."""
        if self._later is None:
            work()
        else:
            self._later.append(work)

    @contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the weight gradients of the backward pass within; the caller calls each later, in order."""
        self._later = []
        try:
            yield self._later
        finally:
            self._later = None
