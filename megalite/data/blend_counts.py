"""How many of the first samples of a blend each dataset gives."""

from __future__ import annotations

import numpy as np

from megalite import _C
from megalite.data.index_cache import intact, watched


class BlendCounts:
    """Counted on from the last answer: a checkpoint of a long run does not go through all of its samples."""

    def __init__(self, dataset_index: np.ndarray, datasets: int) -> None:
        """`dataset_index`: int16 (samples,), numbers below `datasets`."""
        self._index = dataset_index
        self._files = watched((dataset_index,))
        self._samples = 0
        self._counts = np.zeros(datasets, dtype=np.int64)

    def first(self, samples: int) -> np.ndarray:
        """Of each dataset, int64 (datasets,). Raises DataError for an index that was cut, or is none."""
        samples = min(samples, len(self._index))
        onward = samples >= self._samples
        counts = self._counts.copy() if onward else np.zeros_like(self._counts)
        with intact(self._files):
            _C.count_datasets(self._index[self._samples if onward else 0 : samples], counts)
        self._samples, self._counts = samples, counts
        return counts.copy()
