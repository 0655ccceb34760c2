"""The index arrays of many short documents: time and memory, beside megatron-core's."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sized
from pathlib import Path

import numpy as np

from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import open_dataset
from megalite.data.sample_plan import plan_samples
from tools.benchmarks.data import megatron
from tools.benchmarks.data.corpora import SEED, SEQ, write_lengths
from tools.benchmarks.data.measure import Row, in_process, peak_resident, resident

MEAN_LENGTH = 20


def index_rows(folder: Path, documents: int, rounds: int) -> list[Row]:
    """Of 1 and of 3 epochs into a cache folder, each time in a new process."""
    prefix = write_lengths(folder / "large", documents, MEAN_LENGTH)
    return [row for epochs in (1, 3) for row in _rows(prefix, documents, epochs, rounds)]


def _rows(prefix: str, documents: int, epochs: int, rounds: int) -> list[Row]:
    best: dict[str, list[float]] = {}
    for _ in range(rounds):
        for who in ("megalite", *(["megatron"] if megatron.is_installed() else [])):
            with tempfile.TemporaryDirectory() as cache:
                found = in_process("index", prefix, epochs, who, cache)
            best[who] = [min(pair) for pair in zip(found, best.get(who, found), strict=True)]
    ours, theirs = best["megalite"], best.get("megatron")
    if theirs is not None and ours[2] != theirs[2]:
        raise RuntimeError(f"{prefix}: {ours[2]} samples here, {theirs[2]} there")
    name = f"index of {documents:,} documents, {epochs} epoch{'s' * (epochs > 1)}"
    peer = "megatron-core's GPTDataset"
    seconds, kibibytes = (None, None) if theirs is None else theirs[:2]
    memory = None if kibibytes is None else kibibytes / 1024
    return [
        Row(name, ours[0], "s", seconds, peer),
        Row(f"{name}: memory", ours[1] / 1024, "MiB", memory, peer),
    ]


def _ours(prefix: str, epochs: int, cache: str) -> Callable[[], Sized]:
    dataset = open_dataset(prefix)
    wanted = _wanted(epochs, dataset.tokens)

    def build() -> GPTDataset:
        plan = plan_samples(dataset, (0, dataset.sequences), SEQ, SEED, wanted)
        return GPTDataset(dataset, plan, Path(cache))

    return build


def _theirs(prefix: str, epochs: int, cache: str) -> Callable[[], Sized]:
    corpus = megatron.Corpus(prefix)
    wanted = _wanted(epochs, int(corpus.tokens.sequence_lengths.sum(dtype=np.int64)))
    return lambda: corpus.samples(cache, wanted)


def _wanted(epochs: int, tokens: int) -> int | None:
    return None if epochs == 1 else int((epochs - 0.1) * tokens / SEQ)


if __name__ == "__main__":
    make = _ours if sys.argv[3] == "megalite" else _theirs
    build = make(sys.argv[1], int(sys.argv[2]), sys.argv[4])
    before, start = resident(), time.process_time()
    made = build()
    seconds = time.process_time() - start
    print(json.dumps([seconds, peak_resident() - before, len(made)]))
