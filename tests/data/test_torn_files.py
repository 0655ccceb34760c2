"""Files that are cut while they are mapped: a message, where touching the mapping would end the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.data.build import Dataset, DocumentRules, build_datasets
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.loader import StepLoader
from megalite.data.sample_plan import plan_samples
from tests.data.corpora import Words, data_config, write_dataset

PREPARE = """
import os, sys, threading
from pathlib import Path
import numpy as np
from megalite import _C
from megalite.data.blended_dataset import BlendedDataset, cached_blend_index
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import open_dataset
from megalite.data.sample_plan import plan_samples

prefix = sys.argv[1]
"""


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which a bus error would end."""
    return subprocess.run(
        [sys.executable, "-c", PREPARE + code, *args], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """So large that neither its files nor its index arrays are read into memory, where a cut does no harm."""
    with DatasetWriter(str(tmp_path / "words"), "uint16", sync=False) as writer:
        writer.add(np.ones(20 * 20_000, dtype=np.int64), np.full(20_000, 20, dtype=np.int32))
    return str(tmp_path / "words")


CUT = [".bin", ".idx", "shuffle_index.npy", "sample_index.npy", "document_index.npy"]


@pytest.mark.parametrize("cut", CUT)
def test_a_file_that_is_cut_between_two_reads(prefix: str, cut: str) -> None:
    """At once: sizes that were good are not looked at again for 10 ms."""
    done = run(
        """
cache = Path(prefix).parent / "cache"
dataset = open_dataset(prefix)
samples = GPTDataset(dataset, plan_samples(dataset, (0, 20_000), 16, 1, None), cache)
out = np.empty((len(samples), 17), dtype=np.int64)
paths = [Path(prefix + sys.argv[2])] if sys.argv[2][0] == "." else list(cache.glob(f"*/{sys.argv[2]}"))
samples.read(np.arange(10), out[:10])
for path in paths:
    os.truncate(path, 0)
try:
    samples.read(np.arange(len(samples)), out)
except DataError as error:
    print(error)
""",
        prefix,
        cut,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert cut in done.stdout
    assert "cut it while it was in use" in done.stdout


@pytest.mark.parametrize("cut", ["dataset_index.npy", "dataset_sample_index.npy"])
def test_a_blend_that_is_cut_between_two_reads(prefix: str, cut: str) -> None:
    done = run(
        """
cache = Path(prefix).parent / "cache"
dataset = open_dataset(prefix)
datasets = [GPTDataset(dataset, plan_samples(dataset, (0, 20_000), 16, seed, None), None) for seed in (1, 2)]
samples = BlendedDataset(datasets, *cached_blend_index(cache, [0.5, 0.5], 40_000))
out = np.empty((40_000, 17), dtype=np.int64)
(path,) = cache.glob(f"*/{sys.argv[2]}")
samples.read(np.arange(10), out[:10])
os.truncate(path, 0)
try:
    samples.read(np.arange(40_000), out)
except DataError as error:
    print(error)
""",
        prefix,
        cut,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert cut in done.stdout
    assert "cut it while it was in use" in done.stdout


def reader(prefix: str) -> Callable[[], np.ndarray]:
    """Reads 50 samples, after the time for which sizes are not looked at again."""
    dataset = open_dataset(prefix)
    samples = GPTDataset(dataset, plan_samples(dataset, (0, dataset.sequences), 16, 1, None), None)

    def read() -> np.ndarray:
        out = np.empty((50, 17), dtype=np.int64)
        time.sleep(0.02)
        samples.read(np.arange(50), out)
        return out

    return read


@pytest.mark.parametrize("documents", [60, 6000])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_touched_or_grows_holds_what_it_held(
    tmp_path: Path, suffix: str, documents: int
) -> None:
    prefix = write_dataset(tmp_path / "d", [60] * documents)
    read = reader(prefix)
    before = read()
    os.utime(prefix + suffix, (0, 0))
    assert np.array_equal(read(), before)
    with open(prefix + suffix, "ab") as growing:
        growing.write(b"more")
    assert np.array_equal(read(), before)


@pytest.mark.parametrize("was_read", [True, False])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_another_is_copied_onto(tmp_path: Path, suffix: str, was_read: bool) -> None:
    """Validation may read its first sample hours after the run has begun."""
    lengths = [60] * 6000  # of files that are too large to be read at once
    prefix = write_dataset(tmp_path / "d", lengths)
    other = write_dataset(tmp_path / "other", [61, *lengths[1:]], seed=1)
    read = reader(prefix)
    if was_read:
        read()
    Path(prefix + suffix).write_bytes(Path(other + suffix).read_bytes() + b"more")
    for _ in range(2):
        with pytest.raises(DataError, match=f"{suffix}: something wrote to it while it was in use"):
            read()


def test_an_index_that_is_cut_while_it_is_opened(tmp_path: Path) -> None:
    with DatasetWriter(str(tmp_path / "many"), "uint16", sync=False) as writer:
        writer.add(np.ones(1_000_000, dtype=np.int64), np.ones(1_000_000, dtype=np.int32))
    done = run(
        """
whole = Path(prefix + ".idx").read_bytes()
found = []
for attempt in range(30):
    Path(prefix + ".idx").write_bytes(whole)
    cutting = threading.Timer(attempt * 0.0002, os.truncate, [prefix + ".idx", 4096])
    cutting.start()
    try:
        found.append(open_dataset(prefix).sequences)
    except DataError as error:
        found.append(str(error))
    cutting.join()
assert len(found) == 30
""",
        str(tmp_path / "many"),
    )
    assert (done.returncode, done.stderr) == (0, "")  # cuts at 30 moments meet the check of the arrays, too


@pytest.mark.parametrize(
    ("before", "told"), [("", ""), ("import faulthandler; faulthandler.enable()", "Bus error")]
)
def test_other_memory_is_not_looked_after(prefix: str, before: str, told: str) -> None:
    """A bus error of a mapping that is not ours ends the process as it always did, by the handler before."""
    done = run(
        before
        + """
dataset = open_dataset(prefix)
other = Path(prefix + ".other")
other.write_bytes(bytes(1 << 16))
view = np.memmap(other, mode="r")
os.truncate(other, 0)
print(view[5000])
""",
        prefix,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")
    assert told in done.stderr


def test_a_blend_that_is_cut_while_it_is_read_is_a_message(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, [30] * 2000) for name in "ab"]
    config = data_config(tmp_path / "cache", "1", prefixes[0], "1", prefixes[1])
    dataset = build_datasets(config, Words(1000, 999), 8, 1, (40_000, 0, 0)).train
    assert dataset is not None
    assert dataset.order is not None
    saved = dataset.order.record(10)
    changed = data_config(tmp_path / "cache", "1", prefixes[0], "2", prefixes[1])
    resumed = build_datasets(changed, Words(1000, 999), 8, 1, (40_000, 0, 0), saved).train
    assert resumed is not None
    for path in (tmp_path / "cache").glob("*/dataset_sample_index.npy"):
        os.truncate(path, 200)
    time.sleep(0.02)  # a file that was good is not looked at for 10 ms
    for source in (dataset.samples, resumed.samples):
        with pytest.raises(DataError, match=r"dataset_sample_index\.npy: had .* bytes when it was opened"):
            source.read(np.arange(30_000, 30_010), np.empty((10, 9), dtype=np.int64))
    for path in (tmp_path / "cache").glob("*/dataset_index.npy"):
        os.truncate(path, 200)
    time.sleep(0.02)
    for source in (dataset.samples, resumed.samples):
        with pytest.raises(DataError, match="something cut it while it was in use"):
            source.places(30_000)


class CutWhileItIsRead(GPTDataset):
    """Whose file is cut just behind the look at its size."""

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        super().read(samples[:1], out[:1])
        os.truncate(f"{self.prefix}.bin", 4096)
        super().read(samples[1:], out[1:])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_page_that_is_gone_is_an_error_of_its_file_in_every_reader(tmp_path: Path, workers: int) -> None:
    """torch puts a handler of its own into the processes that read."""
    dataset = open_dataset(write_dataset(tmp_path / "d", [60] * 6000))
    samples = CutWhileItIsRead(dataset, plan_samples(dataset, (0, dataset.sequences), 16, 1, None), None)
    with (
        StepLoader(
            Dataset(samples, DocumentRules(0)), 64, 64, 0, 1, 0, torch.device("cpu"), workers=workers
        ) as loader,
        pytest.raises(DataError, match=r"d\.bin: .*something cut it while it was in use"),
    ):
        list(loader)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_small_file_stays_what_it_was(tmp_path: Path, suffix: str) -> None:
    """It was read whole, and another that takes its place may get its number, with fewer bytes."""
    prefix = write_dataset(tmp_path / "d", [60] * 60)
    read = reader(prefix)
    before = read()
    os.truncate(prefix + suffix, 100)
    assert np.array_equal(read(), before)
