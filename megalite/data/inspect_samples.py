"""What a training run draws from its data: index arrays, first samples, and the documents of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from megalite.accelerator import is_out_of_memory
from megalite.data.blended_dataset import BlendedDataset
from megalite.data.build import Dataset, SampleSource
from megalite.data.errors import replacing
from megalite.data.gpt_dataset import GPTDataset, Piece
from megalite.data.loader import StepLoader
from megalite.data.splits import SPLIT_NAMES
from megalite.limits import INT32_LARGEST

FIRST_SAMPLES = 64


class Pieces(Protocol):
    """What tells where samples come from: a SampleSource, or the history of a run."""

    def __len__(self) -> int: ...
    def pieces(self, sample: int) -> list[Piece]: ...


def index_arrays(name: str, source: SampleSource) -> dict[str, np.ndarray]:
    """`NAME.document_index` and so on; for a blend `NAME.dataset_index`, ... and
    `NAME.K.document_index`, ...
    """
    if isinstance(source, BlendedDataset):
        arrays = {
            f"{name}.dataset_index": source.dataset_index,
            f"{name}.dataset_sample_index": source.dataset_sample_index,
        }
        for k, dataset in enumerate(source.datasets):
            arrays |= index_arrays(f"{name}.{k}", dataset)
        return arrays
    if isinstance(source, GPTDataset):
        return {f"{name}.{field}": array for field, array in source.index._asdict().items()}
    return {}


def first_samples(name: str, dataset: Dataset) -> dict[str, np.ndarray]:
    """The first FIRST_SAMPLES samples as the model gets them: `NAME.tokens`, `.labels`, `.position_ids`,
    `.loss_mask`.
    """
    count = min(FIRST_SAMPLES, len(dataset))
    if count == 0:
        return {}
    try:
        with StepLoader(dataset, count, count, 0, 1, 0, torch.device("cpu")) as loader:
            (batch,) = next(loader)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"--dump: the first {count} samples of {dataset.samples.seq_length:,} tokens do not fit in memory"
        ) from None
    largest = int(max(batch.tokens.max(), batch.labels.max()))
    ids = np.int32 if largest <= INT32_LARGEST else np.int64  # that a dataset of int64 may hold
    fields = {"tokens": ids, "labels": ids, "position_ids": np.int32, "loss_mask": np.uint8}
    arrays = {
        f"{name}.{field}": getattr(batch, field).numpy().astype(dtype) for field, dtype in fields.items()
    }
    if isinstance(dataset.samples, BlendedDataset):
        arrays[f"{name}.dataset_id"] = dataset.samples.dataset_index[:count]
    return arrays


def dump(path: Path, datasets: Mapping[str, Dataset]) -> list[str]:
    """Write the arrays of all splits to the .npz `path`; returns their names.

    Raises DataError where something else than a file has that name: it would be replaced.
    """
    arrays: dict[str, np.ndarray] = {}
    with replacing(path) as temporary:
        for name, dataset in datasets.items():
            arrays |= index_arrays(name, dataset.samples) | first_samples(name, dataset)
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for flags
    return list(arrays)


def named(sources: Sequence[SampleSource | None]) -> dict[str, SampleSource]:
    """The splits that there are, by name."""
    return {name: source for name, source in zip(SPLIT_NAMES, sources, strict=True) if source is not None}
