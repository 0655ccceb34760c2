"""When linear layers compute their weight gradients, and how these are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megalite.kernels.weight_gradient import Accumulate, accumulate_fused


class WeightGradients:
    """Runs the weight gradients of a process's layers, at once unless `put_off` is active.

    `accumulate(total, left, right)` adds a product to a main gradient.
    """

    def __init__(self, accumulate: Accumulate = accumulate_fused) -> None:
        self.accumulate = accumulate
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
