"""Bytes and sample order equal Megatron-LM's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.data.blended_dataset import BlendedDataset
from megalite.data.build import Dataset, DocumentRules, build_sample_sources, sample_builder
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.loader import StepLoader
from tests.data.corpora import GOLDENS, data_config

DATASETS = sorted(path.name.removesuffix(".docs.npz") for path in (GOLDENS / "data").glob("*.docs.npz"))
CASES = sorted(path.stem for path in GOLDENS.glob("*.json"))
INDICES = ("document_index", "sample_index", "shuffle_index")


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("pieces", [1, 7])
def test_written_bytes(tmp_path: Path, name: str, pieces: int) -> None:
    docs = np.load(GOLDENS / "data" / f"{name}.docs.npz")
    golden = GOLDENS / "data" / name
    flat, lengths, counts = docs["flat"], docs["sequence_lengths"], docs["sequences_per_document"]
    with DatasetWriter(str(tmp_path / "out"), open_dataset(str(golden)).dtype) as writer:
        for part in np.array_split(np.arange(len(counts)), pieces):
            first, last = counts[: part[0]].sum(), counts[: part[-1] + 1].sum()
            begin, end = lengths[:first].sum(), lengths[:last].sum()
            writer.add(flat[begin:end], lengths[first:last], counts[part].astype(np.int64))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == golden.with_suffix(suffix).read_bytes()


@pytest.mark.parametrize("name", DATASETS)
def test_read_back(name: str) -> None:
    docs = np.load(GOLDENS / "data" / f"{name}.docs.npz")
    dataset = open_dataset(str(GOLDENS / "data" / name))
    assert np.array_equal(dataset.lengths, docs["sequence_lengths"])
    assert np.array_equal(np.diff(dataset.boundaries), docs["sequences_per_document"])
    assert np.array_equal(dataset.stream(), docs["flat"])
    ends = np.cumsum(docs["sequence_lengths"])
    for i in (0, 5, dataset.sequences - 1):
        assert np.array_equal(dataset.sequence(i), docs["flat"][ends[i] - dataset.lengths[i] : ends[i]])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    description = json.loads((GOLDENS / f"{request.param}.json").read_text())
    config = description["config"]
    prefixes, weights = config["blend"]
    paths = [str(GOLDENS / "data" / prefix) for prefix in prefixes]
    if weights is not None:
        paths = [word for weight, path in zip(weights, paths, strict=True) for word in (str(weight), path)]
    settings = data_config(tmp_path_factory.mktemp("cache"), *paths, split=config["split"])
    # Twice: the second time the arrays come from the cache.
    built = [
        build_sample_sources(
            sample_builder(settings, config["seq_length"], config["seed"]), settings, config["sizes"]
        )
        for _ in range(2)
    ]
    return {"description": description, "arrays": np.load(GOLDENS / f"{request.param}.npz"), "built": built}


def _same(case: dict[str, Any], key: str, array: np.ndarray) -> None:
    golden = case["arrays"][key]
    assert array.dtype == golden.dtype, key
    assert np.array_equal(array, golden), key


@pytest.mark.parametrize("again", [0, 1])
def test_index_arrays(case: dict[str, Any], again: int) -> None:
    for name, source in zip(("train", "valid", "test"), case["built"][again], strict=True):
        if source is None:
            assert case["description"]["splits"][name] is None
        elif isinstance(source, BlendedDataset):
            _same(case, f"{name}.dataset_index", source.dataset_index)
            _same(case, f"{name}.dataset_sample_index", source.dataset_sample_index)
            for k, dataset in enumerate(source.datasets):
                for index in INDICES:
                    _same(case, f"{name}.{k}.{index}", getattr(dataset.index, index))
        else:
            assert isinstance(source, GPTDataset)
            for index in INDICES:
                _same(case, f"{name}.{index}", getattr(source.index, index))


def test_every_sample(case: dict[str, Any]) -> None:
    seq_length = case["description"]["config"]["seq_length"]
    for name, source in zip(("train", "valid", "test"), case["built"][0], strict=True):
        if source is None:
            continue
        out = np.empty((len(source), seq_length + 1), dtype=np.int64)
        source.read(np.arange(len(source)), out)
        digest = hashlib.sha256(out[:, :-1].astype(np.int32).tobytes()).hexdigest()
        assert digest == case["description"]["splits"][name]["sha256_all_tokens_i32"], name


def test_batches(case: dict[str, Any]) -> None:
    config, arrays = case["description"]["config"], case["arrays"]
    rules = DocumentRules(
        case["description"]["tokenizer"]["eod"],
        reset_position_ids=config["reset_position_ids"],
        reset_attention_mask=config["reset_attention_mask"],
        eod_mask_loss=config["eod_mask_loss"],
    )
    for name, source in zip(("train", "valid", "test"), case["built"][0], strict=True):
        if source is None or f"{name}.tokens" not in arrays:
            continue
        rows = len(arrays[f"{name}.tokens"])
        with StepLoader(Dataset(source, rules), rows, rows, 0, 1, 0, torch.device("cpu")) as loader:
            (batch,) = next(loader)
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(getattr(batch, field).numpy(), arrays[f"{name}.{field}"]), (name, field)
