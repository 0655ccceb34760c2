"""Several datasets mixed by weight: sample i comes from the dataset whose count lags most behind its share
of i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megalite import _C
from megalite.data.blend_counts import BlendCounts
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset, Piece
from megalite.data.index_cache import ArraySpec, Tell, cached_arrays, intact, watched
from megalite.data.sample_plan import INDEX_LIMIT_BYTES
from megalite.data.stretches import DatasetPlace

# Megatron builds each dataset this much longer than its share, so that rounding never exhausts it.
SURPLUS = 0.005
BYTES_A_SAMPLE = 10  # of dataset_index and dataset_sample_index


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1, by NumPy's float64 sum as in Megatron-LM (the blend depends on the last bit)."""
    array = np.array(weights, dtype=np.float64)
    return [float(weight) for weight in array / array.sum()]


def samples_per_dataset(weights: Sequence[float], size: int) -> list[int]:
    """How many samples of a blend of `size` each dataset is meant to give; they may sum to more than
    `size`.
    """
    return [math.ceil(size * weight) for weight in weights]


def with_surplus(samples: int) -> int:
    """How many samples are built to give `samples`."""
    return math.ceil(samples * (1 + SURPLUS))


def blend_index(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples its dataset, int16, and its number in that dataset, int64; weights sum
    to 1.
    """
    datasets, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    _C.fill_blend(datasets, samples, np.array(weights, dtype=np.float64))
    return datasets, samples


def exhaustive_blend_index(sizes: Sequence[int], count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Like `blend_index`, but each dataset once from end to end, mixed in proportion to the sizes; the first
    `count` samples of that, by default all.
    """
    count = sum(sizes) if count is None else min(count, sum(sizes))
    datasets, samples = np.empty(count, dtype=np.int16), np.empty(count, dtype=np.int64)
    _C.fill_exhaustive_blend(datasets, samples, np.array(sizes, dtype=np.int64))
    return datasets, samples


class BlendedDataset:
    """A mix of datasets; sample k is a pure function of the weights, the size and k."""

    def __init__(
        self, datasets: Sequence[GPTDataset], dataset_index: np.ndarray, dataset_sample_index: np.ndarray
    ) -> None:
        """`dataset_index` int16 and `dataset_sample_index` int64, both (samples,).

        Raises DataError when a dataset is asked for more samples than it has.
        """
        self.datasets = list(datasets)
        self.seq_length = datasets[0].seq_length
        self.dataset_index = dataset_index
        self.dataset_sample_index = dataset_sample_index
        self._files = watched((dataset_index, dataset_sample_index))
        self._counts = BlendCounts(dataset_index, len(self.datasets))
        for dataset, count in zip(self.datasets, self._counts.first(len(self)), strict=True):
            if count > len(dataset):
                raise DataError(
                    f"{dataset.prefix}: the blend asks for {count} samples, but it has {len(dataset)}"
                )
        self._readers = [dataset.reader for dataset in self.datasets]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Row i of `out`, int64 (n, seq_length + 1), becomes sample `samples[i]` of the mix."""
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self)):
            raise DataError(
                f"samples {samples.min()} to {samples.max()} asked for, but the blend has {len(self)}"
            )
        with intact(self._files):
            datasets = self.dataset_index[samples].astype(np.int64)
            numbers = self.dataset_sample_index[samples]
        _C.read_samples(self._readers, datasets, numbers, out)

    def pieces(self, sample: int) -> list[Piece]:
        """Where the tokens of `sample` come from."""
        return self.datasets[int(self.dataset_index[sample])].pieces(int(self.dataset_sample_index[sample]))

    def consumed(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` came from each dataset, by prefix."""
        totals: dict[str, int] = {}
        for dataset, count in zip(self.datasets, self._counts.first(samples), strict=True):
            totals[dataset.prefix] = totals.get(dataset.prefix, 0) + int(count)
        return totals

    def places(self, samples: int) -> list[DatasetPlace]:
        """How far each dataset is read after the first `samples`, one after another as in the blend."""
        counts = self._counts.first(samples)
        return [dataset.places(int(count))[0] for dataset, count in zip(self.datasets, counts, strict=True)]


def cached_blend_index(
    cache: Path | None, weights: Sequence[float], size: int, tell: Tell = lambda *_: None
) -> tuple[np.ndarray, np.ndarray]:
    """`blend_index` kept in the folder `cache`, or built in memory for None; `tell` as in `cached_arrays`."""
    _check_size(size)
    if cache is None:
        return blend_index(weights, size)
    description = {"kind": "blend", "weights": [weight.hex() for weight in weights], "size": size}
    given = np.array(weights, dtype=np.float64)
    return _cached_index(cache, description, size, lambda made: _C.fill_blend(*made, given), tell)


def cached_exhaustive_index(
    cache: Path | None, sizes: Sequence[int], count: int | None, tell: Tell = lambda *_: None
) -> tuple[np.ndarray, np.ndarray]:
    """`exhaustive_blend_index` in the same way."""
    count = sum(sizes) if count is None else min(count, sum(sizes))
    _check_size(count)
    if cache is None:
        return exhaustive_blend_index(sizes, count)
    description = {"kind": "exhaustive blend", "sizes": list(sizes), "size": count}
    given = np.array(sizes, dtype=np.int64)
    return _cached_index(cache, description, count, lambda made: _C.fill_exhaustive_blend(*made, given), tell)


def _check_size(size: int) -> None:
    if BYTES_A_SAMPLE * size > INDEX_LIMIT_BYTES:
        raise DataError(
            f"a blend of {size} samples would take an index of {BYTES_A_SAMPLE * size / 1e9:.0f} GB; ask for "
            "fewer samples"
        )


def _cached_index(
    cache: Path,
    description: dict[str, object],
    size: int,
    build: Callable[[list[np.ndarray]], None],
    tell: Tell,
) -> tuple[np.ndarray, np.ndarray]:
    """Of `size` samples."""
    specs = [
        ArraySpec("dataset_index", np.dtype(np.int16), (size,)),
        ArraySpec("dataset_sample_index", np.dtype(np.int64), (size,)),
    ]
    datasets, samples = cached_arrays(cache, description, specs, build, tell)
    return datasets, samples
