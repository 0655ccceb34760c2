"""Made-up tokens, so that a training run needs no corpus."""

from __future__ import annotations

import numpy as np

from megalite.data.gpt_dataset import Piece
from megalite.data.stretches import DatasetPlace


class MockDataset:
    """Token t of sample k is a hash of (seed, k, t) below the vocabulary size."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, samples: int) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Row i of `out`, int64 (n, seq_length + 1), becomes sample `samples[i]`."""
        rows = _mix(samples.astype(np.uint64) ^ np.uint64((self.seed << 32) % 2**64))
        columns = np.arange(out.shape[1], dtype=np.uint64)
        out[:] = _mix(rows[:, None] + columns) % np.uint64(self.vocab_size)

    def pieces(self, sample: int) -> list[Piece]:
        return [Piece("mock data", sample, 0, self.seq_length + 1)]

    def consumed(self, samples: int) -> dict[str, int]:
        """Nothing: they come from no dataset."""
        return {}

    def places(self, samples: int) -> list[DatasetPlace]:
        return []


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; uint64 arithmetic wraps."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
