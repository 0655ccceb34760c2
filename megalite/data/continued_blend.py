"""Datasets mixed by weight from a place inside each of them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megalite import _C
from megalite.data.blend_counts import BlendCounts
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset, Piece
from megalite.data.index_cache import intact, watched
from megalite.data.stretches import DatasetPlace, Stretch


class ContinuedBlend:
    """The samples of one stretch, numbered as in the run: those before its first do not exist here."""

    def __init__(
        self,
        stretch: Stretch,
        rounds: Sequence[Sequence[GPTDataset]],
        skipped: Sequence[int],
        dataset_index: np.ndarray,
        dataset_sample_index: np.ndarray,
    ) -> None:
        """`rounds`: of each dataset those that are not over; `skipped`: samples in the rounds before them.

        `dataset_index` int16 and `dataset_sample_index` int64, both (samples,): the mixture, its samples of
        each dataset counted from 0. Raises DataError when a dataset is asked for more than its rounds have.
        """
        self.stretch = stretch
        self.seq_length = rounds[0][0].seq_length
        self.dataset_index = dataset_index
        self.dataset_sample_index = dataset_sample_index
        self._rounds = [dataset for each in rounds for dataset in each]
        self._readers = [dataset.reader for dataset in self._rounds]
        self._files = watched((dataset_index, dataset_sample_index))
        self._first_round = np.cumsum([0, *(len(each) for each in rounds)])[:-1]
        starts = [place.place for place in stretch.datasets]
        self._offset = np.array(starts, dtype=np.int64) - np.array(skipped, dtype=np.int64)
        # (datasets, most rounds): where each round ends; those that are not there never begin.
        most = max(len(each) for each in rounds)
        self._ends = np.full((len(rounds), most), np.iinfo(np.int64).max)
        for row, each in zip(self._ends, rounds, strict=True):
            row[: len(each)] = np.cumsum([len(dataset) for dataset in each])
        self._counts = BlendCounts(dataset_index, len(rounds))
        counts = self._counts.first(len(dataset_index))
        for place, each, begin, count in zip(stretch.datasets, rounds, self._offset, counts, strict=True):
            there = sum(len(dataset) for dataset in each)
            if begin + count > there:
                raise DataError(
                    f"{place.prefix}: the blend asks for {count} more samples, but it has {there - begin}"
                )

    def __len__(self) -> int:
        return self.stretch.first_sample + len(self.dataset_index)

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Row i of `out`, int64 (n, seq_length + 1), becomes sample `samples[i]` of the run."""
        _C.read_samples(self._readers, *self._find(samples), out)

    def pieces(self, sample: int) -> list[Piece]:
        """Where the tokens of `sample` come from."""
        ((reader,), (number,)) = self._find(np.array([sample]))
        return self._rounds[int(reader)].pieces(int(number))

    def consumed(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` of the run came from each dataset since the stretch began."""
        totals: dict[str, int] = {}
        for place, begin in zip(self.places(samples), self.stretch.datasets, strict=True):
            totals[place.prefix] = totals.get(place.prefix, 0) + place.place - begin.place
        return totals

    def places(self, samples: int) -> list[DatasetPlace]:
        """How far each dataset is read after the first `samples` of the run."""
        counts = self._counts.first(max(0, samples - self.stretch.first_sample))
        return [
            replace(place, place=place.place + int(count))
            for place, count in zip(self.stretch.datasets, counts, strict=True)
        ]

    def _find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reader and sample of that reader, both int64 (n,), for each of `samples`."""
        first = self.stretch.first_sample
        if len(samples) and not (samples.min() >= first and samples.max() < len(self)):
            raise DataError(
                f"samples {samples.min()} to {samples.max()} asked for, but here are those from {first} to "
                f"{len(self) - 1}"
            )
        with intact(self._files):
            dataset = self.dataset_index[samples - first].astype(np.int64)
            number = self._offset[dataset] + self.dataset_sample_index[samples - first]
        ends = self._ends[dataset]
        over = (number[:, None] >= ends).sum(axis=1)
        begins = np.where(
            over > 0, np.take_along_axis(ends, np.maximum(over - 1, 0)[:, None], axis=1)[:, 0], 0
        )
        return self._first_round[dataset] + over, number - begins
