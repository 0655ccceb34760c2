"""How many training samples came from each dataset, over all processes that a run was spread over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.data.build import Dataset
from megalite.data.stretches import normal

SHOWN = 20


class Drawn:
    """Counts by absolute prefix. The order of the samples tells them, but only since the last start: a run
    that was resumed may have another order.
    """

    def __init__(self, dataset: Dataset, consumed_samples: int, before: Mapping[str, int] | None) -> None:
        """`before`: the counts of the checkpoint at `consumed_samples`; None when it has none."""
        self._source = dataset.samples
        self._order = dataset.order
        self._names = {prefix: normal(prefix) for prefix in self._source.consumed(0)}
        self._start = self._consumed(consumed_samples)
        moved = {} if self._order is None else self._order.moved(consumed_samples)
        self._before: dict[str, int] = {}
        for prefix, count in (self._start if before is None else before).items():
            name = moved.get(normal(prefix), normal(prefix))
            self._before[name] = self._before.get(name, 0) + count

    def _consumed(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` came from each dataset since the last start."""
        counts: dict[str, int] = {}
        for prefix, count in self._source.consumed(samples).items():
            counts[self._names[prefix]] = counts.get(self._names[prefix], 0) + count
        return counts

    def after(self, consumed_samples: int) -> dict[str, int]:
        """Counts after that many samples of the run."""
        counts = dict(self._before)
        for name, count in self._consumed(consumed_samples).items():
            counts[name] = counts.get(name, 0) + count - self._start.get(name, 0)
        return counts

    def order(self, consumed_samples: int) -> dict[str, Any] | None:
        """What a checkpoint keeps of their order; None for mock data."""
        return None if self._order is None else self._order.record(consumed_samples).to_json()


def drawn_lines(counts: Mapping[str, int]) -> list[str]:
    """The counts to be read, the largest first."""
    largest = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"samples drawn from {prefix}: {count:,}" for prefix, count in largest[:SHOWN]]
    rest = [count for _, count in largest[SHOWN:]]
    return [*lines, *([f"samples drawn from {len(rest)} other datasets: {sum(rest):,}"] if rest else [])]
