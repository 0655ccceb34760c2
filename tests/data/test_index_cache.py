"""The index cache never serves an index of other data, and never half of one."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from megalite.data import index_cache
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import ArraySpec, cached_arrays
from megalite.data.indexed_dataset import open_dataset
from megalite.data.sample_plan import plan_samples
from tests.data.corpora import write_dataset

SPECS = [ArraySpec("numbers", np.dtype(np.int64), (5,)), ArraySpec("none", np.dtype(np.int32), (0, 2))]


def dataset_of(prefix: str, cache: Path, requested: int | None = 10, seq_length: int = 8) -> GPTDataset:
    dataset = open_dataset(prefix)
    return GPTDataset(dataset, plan_samples(dataset, (0, dataset.sequences), seq_length, 1, requested), cache)


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_replaced_data_at_the_same_path_is_noticed(tmp_path: Path) -> None:
    first = dataset_of(write_dataset(tmp_path / "d", [10] * 20), tmp_path / "cache")
    second = dataset_of(write_dataset(tmp_path / "d", [10] * 10 + [9] * 5 + [11] * 5), tmp_path / "cache")
    assert first.plan.tokens == second.plan.tokens
    assert not np.array_equal(first.index.sample_index, second.index.sample_index)
    assert len(entries(tmp_path / "cache")) == 2


def test_same_data_elsewhere_and_other_request_share_an_entry(tmp_path: Path) -> None:
    dataset_of(write_dataset(tmp_path / "a", [10] * 20), tmp_path / "cache", requested=10)
    dataset_of(write_dataset(tmp_path / "b", [10] * 20, seed=5), tmp_path / "cache", requested=12)
    assert len(entries(tmp_path / "cache")) == 1
    dataset_of(str(tmp_path / "b"), tmp_path / "cache", seq_length=9)
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage"])
def test_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 20)
    first = dataset_of(prefix, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    victim = entry / "sample_index.npy"
    content = victim.read_bytes()
    victim.unlink()
    if damage != "missing":
        victim.write_bytes(content[:-4] if damage == "cut" else bytes(len(content)))
    second = dataset_of(prefix, tmp_path / "cache")
    assert np.array_equal(first.index.sample_index, second.index.sample_index)


def test_unwritable_cache_falls_back_to_memory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    dataset = dataset_of(write_dataset(tmp_path / "d", [10] * 20), tmp_path / "cache")
    assert len(dataset) == 24


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: list[np.ndarray]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_arrays(tmp_path, {"a": 1}, SPECS, fail)
    assert entries(tmp_path) == []


def _build_slowly(folder: str, log: str) -> int:
    def build(arrays: list[np.ndarray]) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        for i in range(5):
            arrays[0][i] = i
            arrays[0].flush() if isinstance(arrays[0], np.memmap) else None
            index_cache.time.sleep(0.02)

    numbers, _ = cached_arrays(Path(folder), {"a": 1}, SPECS, build)
    return int(numbers.sum())


def test_many_processes_build_once_and_all_see_the_whole(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sums = pool.starmap(
            _build_slowly, [(str(tmp_path / "cache"), str(tmp_path / "log"))] * 4, chunksize=1
        )
    assert sums == [10] * 4
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_without_locks_each_builds_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(index_cache.fcntl, "flock", no_locks)
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_full_disk_falls_back_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.os, "posix_fallocate", full)
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert entries(tmp_path / "cache") == []
