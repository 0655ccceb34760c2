"""Which dataset gives each sample of a blend."""

from __future__ import annotations

from functools import partial

import numpy as np

from megalite import _C
from megalite.data.blended_dataset import normalize
from tools.benchmarks.data import megatron
from tools.benchmarks.data.measure import Row, least

DATASETS = (3, 100, 1000)
SAMPLES = 300_000


def blending_rows(rounds: int) -> list[Row]:
    """A sample of blends with random weights; each round is short, so there are four times as many."""
    helpers = megatron.helpers() if megatron.is_installed() else None
    rows = []
    for datasets in DATASETS:
        weights = np.array(normalize(list(np.random.default_rng(1).random(datasets))))
        index, samples = np.empty(SAMPLES, dtype=np.int16), np.empty(SAMPLES, dtype=np.int64)
        arrays = index, samples, weights
        tasks = [partial(_C.fill_blend, *arrays)]
        if helpers is not None:
            tasks.append(partial(helpers.build_blending_indices, *arrays, datasets, SAMPLES, False))
        each = [1e9 * seconds / SAMPLES for seconds in least(4 * rounds, *tasks)]
        peer = each[1] if len(each) > 1 else None
        rows.append(
            Row(f"blending, {datasets:,} datasets", each[0], "ns a sample", peer, "build_blending_indices")
        )
    return rows
