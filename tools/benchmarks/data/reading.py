"""Samples out of a dataset: through the dataset itself and through the loader, with and without the
boundaries of documents, beside megatron-core's GPTDataset and NumPy's memmap.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megalite.data.build import Dataset, DocumentRules
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.host_batches import read_documents
from megalite.data.indexed_dataset import open_dataset
from megalite.data.loader import StepLoader
from megalite.data.sample_plan import plan_samples
from tools.benchmarks.data import megatron
from tools.benchmarks.data.corpora import EOD, SEED, SEQ, write_lengths
from tools.benchmarks.data.measure import Row, in_process, least

DOCUMENTS = 200_000
MEAN_LENGTH = 492
BATCH = 64
MICRO_BATCH = 8
STEPS = 60
NAME = f"{SEQ}-token samples"
PLAIN, BOUNDED = DocumentRules(EOD), DocumentRules(EOD, reset_attention_mask=True)


def reading_rows(folder: Path, documents: int, rounds: int) -> list[Row]:
    """Random samples into int64 batches of 64."""
    prefix = write_lengths(folder / "small", min(DOCUMENTS, documents), MEAN_LENGTH)
    dataset = open_dataset(prefix)
    source = GPTDataset(dataset, plan_samples(dataset, (0, dataset.sequences), SEQ, SEED, None), None)
    return [*_through_the_dataset(prefix, source, rounds), *_through_the_loader(source, rounds)]


def _through_the_dataset(prefix: str, source: GPTDataset, rounds: int) -> list[Row]:
    """CPU time, with the memory that the samples go to at hand."""
    count = min(len(source), 4096) // BATCH * BATCH
    out = np.empty((BATCH // MICRO_BATCH, MICRO_BATCH, SEQ + 1), dtype=np.int64)

    def read(rules: DocumentRules) -> Callable[[], None]:
        dataset = Dataset(source, rules)

        def run() -> None:
            for first in range(0, count, BATCH):
                samples = np.arange(first, first + BATCH).reshape(out.shape[:2])
                read_documents(dataset, samples, out)

        return run

    def memmap() -> None:
        for first in range(0, count, BATCH):
            for row, sample in zip(out.reshape(BATCH, -1), range(first, first + BATCH), strict=True):
                place = 0
                for sequence, offset, tokens in source.reader.pieces(sample):
                    start = offsets[sequence] + offset
                    row[place : place + tokens] = stream[start : start + tokens]
                    place += tokens

    stream, offsets = source.dataset.stream(), np.array(source.dataset.offsets) // 2
    times = least(3 * rounds, read(PLAIN), read(BOUNDED), memmap)  # each is short
    plain, bounded, mapped = (count / seconds for seconds in times)
    rates: list[float | None] = [None] * 3
    if megatron.is_installed():
        with tempfile.TemporaryDirectory() as cache:
            rates = in_process("reading", prefix, cache, rounds)
    item, resets, dense = rates
    unit = "samples/s"
    return [
        Row(NAME, plain, unit, mapped, "NumPy memmap, a slice and a cast a document"),
        Row(NAME, plain, unit, item, "megatron-core's GPTDataset[i]"),
        Row(f"{NAME} with cu_seqlens", bounded, unit, plain, "the same without"),
        Row(f"{NAME} with cu_seqlens", bounded, unit, resets, "GPTDataset[i], positions and loss restarted"),
        Row(f"{NAME} with cu_seqlens", bounded, unit, dense, "the same with its dense mask"),
    ]


def _through_the_loader(source: GPTDataset, rounds: int) -> list[Row]:
    """Wall time: its reading thread and this one share the work."""
    rows = []
    for name, rules in ((NAME, PLAIN), (f"{NAME} with cu_seqlens", BOUNDED)):
        best = 0.0
        for _ in range(rounds):
            with StepLoader(
                Dataset(source, rules), MICRO_BATCH, BATCH, 0, 1, 0, torch.device("cpu")
            ) as loader:
                start, steps = time.perf_counter(), 0
                for steps, _ in enumerate(loader, 1):
                    if steps == STEPS:
                        break
                best = max(best, BATCH * steps / (time.perf_counter() - start))
        rows.append(Row(f"{name} through the loader, wall time", best, "samples/s"))
    return rows


def _getitem_rates(prefix: str, cache: str, rounds: int) -> list[float]:
    """Samples/s of megatron-core: plain, with positions and loss restarted, with the dense mask too."""
    rates = []
    for resets, dense, count in ((False, False, 2048), (True, False, 2048), (True, True, 64)):
        made = megatron.Corpus(prefix).samples(cache, None, resets, dense)
        some = range(min(count, len(made)))
        (seconds,) = least(rounds, partial(_draw, made, some))
        rates.append(len(some) / seconds)
    return rates


def _draw(dataset: Sequence[object], samples: range) -> None:
    for i in samples:
        dataset[i]


if __name__ == "__main__":
    print(json.dumps(_getitem_rates(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
