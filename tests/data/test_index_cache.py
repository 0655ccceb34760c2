"""The index cache never serves an index of other data, and never half of one."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite import _C
from megalite.data import index_cache, ordinary_memory
from megalite.data.blended_dataset import cached_blend_index
from megalite.data.build import build_datasets
from megalite.data.errors import DataError, ShortageError
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import ArraySpec, cached_arrays, watched
from megalite.data.indexed_dataset import open_dataset
from megalite.data.ordinary_memory import Memory, known_memories, spare_arrays
from megalite.data.sample_plan import build_sample_index, plan_samples
from megalite.data.temporary_names import process_space
from tests.data.corpora import Words, data_config, write_dataset

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


DAMAGE = {
    "cut": lambda content: content[:-4],
    "garbage": lambda content: bytes(len(content)),
    "bit": lambda content: content[:-4] + bytes([content[-4] ^ 1]) + content[-3:],  # a number that could be
}
ARRAYS = ("document_index.npy", "sample_index.npy", "shuffle_index.npy")


@pytest.mark.parametrize(
    ("name", "damage"), [*itertools.product(ARRAYS, DAMAGE), ("description.json", "cut")]
)
def test_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 20)
    dataset_of(prefix, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    before = (entry / name).read_bytes()
    (entry / name).write_bytes(DAMAGE[damage](before))
    dataset = dataset_of(prefix, tmp_path / "cache")
    assert (entry / name).read_bytes() == before
    fresh = build_sample_index(dataset.dataset, dataset.plan)
    assert all(np.array_equal(x, y) for x, y in zip(fresh, dataset.index, strict=True))


def test_an_entry_is_opened_without_pythons_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's fails now and then where several threads use it, as those that open a blend do."""

    def fail(text: object) -> object:
        raise SystemError("AST constructor recursion depth mismatch")

    built: list[list[np.ndarray]] = []
    for _ in range(2):
        cached_arrays(tmp_path, {"kind": "test"}, SPECS, built.append)
        monkeypatch.setattr("ast.literal_eval", fail)
    assert len(built) == 1


def test_a_missing_array_is_built_again(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 20)
    dataset_of(prefix, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    (entry / "sample_index.npy").unlink()
    dataset_of(prefix, tmp_path / "cache")
    assert (entry / "sample_index.npy").exists()


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_an_index_that_is_cut_while_it_is_read_is_a_message(tmp_path: Path, name: str) -> None:
    """And one that is removed is still there for who reads it."""
    dataset = dataset_of(write_dataset(tmp_path / "d", [10] * 20000), tmp_path / "cache", 20000)
    (entry,) = entries(tmp_path / "cache")
    before, out = np.empty((20000, 9), dtype=np.int64), np.empty((20000, 9), dtype=np.int64)
    dataset.read(np.arange(20000), before)
    moved = entry.rename(tmp_path / "moved")
    dataset.read(np.arange(20000), out)
    assert np.array_equal(out, before)
    moved.rename(entry)
    os.truncate(entry / f"{name}.npy", 200)
    time.sleep(0.02)  # a file that was good is not looked at for 10 ms
    with pytest.raises(DataError, match=rf"{name}\.npy: had .* bytes when it was opened and has 200 now"):
        dataset.read(np.arange(20000), out)


def test_small_files_take_no_mappings(tmp_path: Path) -> None:
    """A process may have 65,530, and a blend of 6,000 datasets had 11 for each."""
    prefixes = [write_dataset(tmp_path / f"d{n}", [10] * (20 + n)) for n in range(5)]
    weighted = [word for prefix in prefixes for word in ("1", prefix)]
    splits = build_datasets(
        data_config(tmp_path / "cache", *weighted, split="60,20,20"), Words(1000, 999), 8, 1, (50, 10, 10)
    )
    assert all(split is not None for split in splits[:3])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


SHORTAGE = """
import resource, sys
from pathlib import Path
import numpy as np
from megalite.data.errors import ShortageError
from megalite.data.index_cache import ArraySpec, cached_arrays

specs, built = [ArraySpec("numbers", np.dtype(np.int64), (1 << 24,))], []
arrays = lambda: cached_arrays(Path(sys.argv[1]), {}, specs, built.append)
arrays()
before = [path.stat() for path in sorted(Path(sys.argv[1]).glob("*/*"))]
limit, most = {
    "memory": (resource.RLIMIT_AS, 4096 * int(Path("/proc/self/statm").read_text().split()[0]) + (32 << 20)),
    "descriptors": (resource.RLIMIT_NOFILE, 3),
}[sys.argv[2]]
resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
try:
    arrays()
except ShortageError as error:
    print(error)
resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
arrays()
after = [path.stat() for path in sorted(Path(sys.argv[1]).glob("*/*"))]
assert [file.st_ino for file in after] == [file.st_ino for file in before]
assert len(built) == 1
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("memory", r"numbers\.npy: cannot be mapped .*: Cannot allocate memory \(ulimit -v, or vm\.max_"),
        ("descriptors", r"[0-9a-f]{32}: cannot be opened: Too many open files"),
    ],
)
def test_an_entry_is_not_damaged_where_the_system_lacks_something(
    tmp_path: Path, what: str, told: str
) -> None:
    """It is neither removed nor built, and the message says what was lacking."""
    done = subprocess.run(
        [sys.executable, "-c", SHORTAGE, str(tmp_path), what], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(told, done.stdout)


def test_mappings_end_before_the_process_can_do_nothing_more(tmp_path: Path) -> None:
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    if allowed > 300_000:
        pytest.skip(f"to take {allowed} mappings would take long (vm.max_map_count)")
    path = tmp_path / "file"
    path.write_bytes(bytes(_C.MappedFile.SMALL + 1))
    files: list[_C.MappedFile] = []
    with pytest.raises(ShortageError, match=rf"file: .* {allowed} mappings; .*max_map_count=.*merge_data"):
        files.extend(_C.MappedFile(str(path)) for _ in range(allowed))
    assert len(files) == pytest.approx(allowed * 7 / 8, abs=100)  # the arrays of other tests among them
    del files[:1]
    _C.MappedFile(str(path))


def test_an_index_in_use_holds_no_descriptor(tmp_path: Path) -> None:
    """A blend of 1,000 datasets would need 3,000, and 1,024 are usual."""
    before = len(os.listdir("/proc/self/fd"))
    dataset = dataset_of(write_dataset(tmp_path / "d", [10] * 20), tmp_path / "cache")
    assert len(watched(dataset.index)) == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_index_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    (entry / index_cache.CHECKED).unlink()
    with next(entry.glob("*.npy")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    renamed, told = Path.rename, []

    def denied(path: Path, target: Path) -> Path:
        if path == entry:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", denied)
    for _ in range(2):
        found = cached_arrays(
            tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(2), lambda *reason: told.append(reason)
        )
        assert (found[0] == 2).all()
    assert told == [(tmp_path, f"{entry.name} is damaged and cannot be replaced")] * 2


def test_what_killed_builders_left_is_removed(tmp_path: Path) -> None:
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    child = subprocess.Popen(["true"])
    child.wait()
    left = f"{process_space()}.{child.pid}.1.partial"
    shutil.copytree(entry, tmp_path / f"{entry.name}.replaced.{left}")
    entry.rename(tmp_path / f"{entry.name}.{left}")
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    assert entries(tmp_path) == [entry]


def test_what_cannot_be_there_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as the folder has entries, and so the square of that for all of a blend."""
    monkeypatch.setattr(index_cache, "left_behind", lambda _: pytest.fail("looked for"))
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))


def test_what_others_are_building_is_left_alone(tmp_path: Path) -> None:
    """Where locks are those of one node, other nodes build at the same time."""
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    node = process_space()
    others = [
        tmp_path / f"{entry.name}.{of}.partial"
        for of in (f"{node}.1.1", f"{node}-2.{1 << 30}.1", f"{node}.b.{1 << 30}.1")
    ]
    for partial in others:
        partial.mkdir()
    entry.rename(tmp_path / "away")
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    assert all(partial.is_dir() for partial in others)
    assert entry.is_dir()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays that were hashed, in bytes."""
    sizes: list[int] = []
    compute = _C.content_hash

    def content_hash(array: np.ndarray) -> int:
        sizes.append(array.nbytes)
        return compute(array)

    monkeypatch.setattr(_C, "content_hash", content_hash)
    return sizes


def test_an_array_is_read_whole_once_when_it_is_built_and_once_a_start(
    tmp_path: Path, hashed: list[int]
) -> None:
    def build(arrays: list[np.ndarray]) -> None:
        arrays[0].fill(1)
        time.sleep(0.02)  # the clock of a file system ticks every few milliseconds

    cached_arrays(tmp_path, {"a": 1}, SPECS, build)
    assert hashed == [40, 0]
    time.sleep(0.02)
    (entry,) = entries(tmp_path)
    (entry / "checked").unlink()  # a later start
    hashed.clear()
    for _ in range(3):  # its processes
        numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, build)
        assert numbers.tolist() == [1] * 5
    assert hashed == [40, 0]


@pytest.mark.parametrize("when", ["long ago", "of what was copied", "in a folder that can only be read"])
def test_an_array_is_not_taken_at_another_ones_word(
    tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    soon = time.time() + 60  # later than the arrays, whatever the clock of the file system
    os.utime(entry / "checked", (soon, soon))
    hashed.clear()
    if when == "long ago":
        monkeypatch.setattr(time, "time", lambda: soon + 601)
    elif when == "of what was copied":
        entry.rename(tmp_path / "first")
        shutil.copytree(tmp_path / "first", entry)
    else:
        (entry / "checked").unlink()

        def read_only(*_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(index_cache, "_locked", read_only)
    numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, lambda _: pytest.fail("built again"))
    assert watched([numbers])
    assert hashed == [40, 0]


def test_an_array_that_is_swapped_while_it_is_checked_is_not_noted_as_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(arrays: list[np.ndarray]) -> None:
        arrays[0].fill(1)

    cached_arrays(tmp_path, {"a": 1}, SPECS, build)
    (entry,) = entries(tmp_path)
    (entry / "checked").unlink()
    compute = _C.content_hash

    def swap(array: np.ndarray) -> int:
        damaged = tmp_path / "damaged"
        damaged.write_bytes((entry / "numbers.npy").read_bytes()[:-8] + bytes(8))
        damaged.rename(entry / "numbers.npy")
        time.sleep(0.02)  # the clock of a file system ticks every few milliseconds
        return compute(array)

    monkeypatch.setattr(_C, "content_hash", swap)
    cached_arrays(tmp_path, {"a": 1}, SPECS, build)
    monkeypatch.undo()
    numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, build)
    assert numbers.tolist() == [1] * 5


@pytest.mark.parametrize("what", ["a loop", "a file"])
def test_something_else_in_the_place_of_an_entry_is_replaced(tmp_path: Path, what: str) -> None:
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    entry.rename(tmp_path / "away")
    entry.symlink_to(entry) if what == "a loop" else entry.write_text("")
    numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    assert numbers.tolist() == [1] * 5
    assert (entry / "numbers.npy").exists()


def test_a_disk_that_is_too_small_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("takes what there is"))
    specs = [ArraySpec("numbers", np.dtype(np.int64), (1 << 40,))]  # 8.8 TB; a sparse file may be so long
    with pytest.raises(DataError, match="No space left on device"):
        cached_arrays(tmp_path, {"a": 1}, specs, lambda _: None)


@pytest.mark.parametrize(("blocks", "kept"), [(0, True), (1, False)])
def test_a_file_system_that_knows_no_blocks_keeps_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, kept: bool
) -> None:
    """As some of FUSE."""
    found = list(os.statvfs(tmp_path))
    found[2:5] = [blocks, 0, 0]
    with monkeypatch.context() as file_system:
        file_system.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
        cached_arrays(tmp_path, {}, SPECS, lambda _: None, lambda *_: None)
    assert bool(entries(tmp_path)) == kept


def test_a_system_that_cannot_reserve_room_keeps_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(index_cache, "spare_arrays", lambda _: None)
    numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    assert numbers.tolist() == [1] * 5
    assert watched([numbers])


def test_an_index_that_fits_nowhere_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"an index of 9007199\.3 GB cannot be kept there .*, nor in memory"):
        cached_arrays(tmp_path, {"a": 1}, [ArraySpec("a", np.dtype(np.int64), (1 << 50,))], lambda _: None)
    assert entries(tmp_path) == []


def test_unwritable_cache_falls_back_to_memory(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    dataset = dataset_of(write_dataset(tmp_path / "d", [10] * 20), tmp_path / "cache")
    assert len(dataset) == 24


def test_an_index_that_cannot_be_written_in_the_end_is_not_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[np.ndarray]] = []

    def build(arrays: list[np.ndarray]) -> None:
        assert all(before() is None for before in built)
        built.append(weakref.ref(arrays[0]))

    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    reasons: list[str] = []
    spec = ArraySpec("a", np.dtype(np.int64), (1000,))
    cached_arrays(tmp_path, {}, [spec], build, lambda folder, reason: reasons.append(reason))
    assert len(built) == 2
    assert reasons == ["Disk quota exceeded"]


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


def test_one_of_those_that_wait_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_cache, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(index_cache, "LOCK_PATIENCE_SECONDS", 0.1)
    lock = tmp_path / f"{index_cache.cache_key({'a': 1})}.lock"
    with index_cache._locked(lock):
        for _ in range(2):
            cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    message = f"{lock}: waiting for {holder}, which builds or checks these index arrays"
    assert caplog.messages == [message]


def test_a_lock_that_another_user_left_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "entry.lock"
    lock.touch()
    opened: Any = Path.open

    def readable(path: Path, mode: str = "r", *more: int) -> Any:
        if mode == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, mode, *more)

    monkeypatch.setattr(Path, "open", readable)
    monkeypatch.setattr(index_cache, "LOCK_PATIENCE_SECONDS", 0.0)
    with index_cache._locked(lock) as held, index_cache._locked(lock) as again:
        assert (held, again) == (True, False)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_each_builds_for_itself(tmp_path: Path) -> None:
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_entry_of_another_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers may be opening it."""

    def build(arrays: list[np.ndarray]) -> None:
        arrays[0].fill(1)
        if not entries(tmp_path / "cache")[0].suffix:
            return
        monkeypatch.setattr(index_cache.os, "getpid", lambda: 1)  # another process is faster
        cached_arrays(tmp_path / "cache", {"a": 1}, SPECS, lambda made: made[0].fill(1))
        firsts.extend(path.stat().st_ino for path in entries(tmp_path / "cache") if not path.suffix)

    firsts: list[int] = []
    numbers, _ = cached_arrays(tmp_path / "cache", {"a": 1}, SPECS, build)
    assert numbers.tolist() == [1] * 5
    assert [path.stat().st_ino for path in entries(tmp_path / "cache")] == firsts != []


def test_an_entry_that_another_node_has_just_mended_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks may be those of one node; it uses its own, of which nothing would be left over a network."""
    cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    (entry,) = entries(tmp_path)
    mended = shutil.copytree(entry, tmp_path / "mended")
    place = mended.stat().st_ino
    os.truncate(entry / "numbers.npy", 1)
    opened, looks = index_cache._open, []

    def then_mended(path: Path, specs: list[ArraySpec], *, check: bool) -> list[np.ndarray] | None:
        found = opened(path, specs, check=check)
        looks.append(path == entry and found is None)
        if sum(looks) == 2 and mended.exists():  # behind the last look
            shutil.rmtree(entry)
            mended.rename(entry)
        return found

    monkeypatch.setattr(index_cache, "_open", then_mended)
    numbers, _ = cached_arrays(tmp_path, {"a": 1}, SPECS, lambda arrays: arrays[0].fill(1))
    assert numbers.tolist() == [1] * 5
    assert [path.stat().st_ino for path in entries(tmp_path)] == [place]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_threads_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """As of a blend whose datasets have documents of the same lengths."""

    def slow(arrays: list[np.ndarray]) -> None:
        begun.set()
        assert ended.wait(timeout=30)
        arrays[0].fill(7)

    def fast(arrays: list[np.ndarray]) -> None:
        arrays[0].fill(7)
        others.append(pool.submit(cached_arrays, tmp_path / "cache", {"a": 1}, SPECS, slow))
        assert begun.wait(timeout=30)

    begun, ended = threading.Event(), threading.Event()
    others: list[Future[list[np.ndarray]]] = []
    with ThreadPoolExecutor(1) as pool:
        numbers, _ = cached_arrays(tmp_path / "cache", {"a": 1}, SPECS, fast)
        found = numbers.tolist()
        ended.set()
        assert (found, others[0].result()[0].tolist()) == ([7] * 5, [7] * 5)
    assert [path.suffix for path in entries(tmp_path / "cache")] == [""]


@pytest.mark.parametrize("where", ["posix_fallocate", "fsync"])
def test_full_disk_falls_back_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.os, where, full)
    if where == "posix_fallocate":
        monkeypatch.setattr(index_cache, "spare_arrays", lambda _: None)
    assert _build_slowly(str(tmp_path / "cache"), str(tmp_path / "log")) == 10
    assert entries(tmp_path / "cache") == []


def test_a_damaged_blend_in_the_cache_is_built_again(tmp_path: Path) -> None:
    before = [array.tolist() for array in cached_blend_index(tmp_path, [0.5, 0.5], 20)]
    for path in tmp_path.glob("*/*.npy"):
        array = np.load(path)
        for wrong in (-1, 0, 12345):
            np.save(path, np.full_like(array, wrong))
            assert [array.tolist() for array in cached_blend_index(tmp_path, [0.5, 0.5], 20)] == before


def test_a_cache_that_is_not_written_is_not_reported_as_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.inspect_data import main

    prefix = write_dataset(tmp_path / "a", [40] * 5)
    (tmp_path / "file").touch()
    flags = ["--data-path", prefix, "--split", "1", "--seq-length", "8", "--build-cache"]
    nowhere = ["--data-cache-path", str(tmp_path / "file" / "cache")]
    assert main([*flags, *nowhere]) == 1
    message = f"index arrays cannot be kept in {tmp_path / 'file' / 'cache'} (Not a directory): every process"
    assert f"error: --build-cache: {message}" in capsys.readouterr().err
    assert main([*flags[:-1], "--train-samples", "3", "--valid-samples", "3", *nowhere]) == 0
    assert capsys.readouterr().err.count(f"warning: {message}") == 1
    assert main([*flags, "--data-cache-path", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().err == ""
    for cache, told in (("file/cache", message), ("cache", None)):
        config = data_config(tmp_path / cache, "1", prefix, "2", prefix)
        found = build_datasets(config, Words(1000, 999), 8, 1, (9, 0, 0)).warning
        assert found is told is None or message in str(found)


def test_arrays_are_written_front_to_back_where_memory_can_be_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel makes each jump in a large file wait for the disk; where memory lacks there is no choice."""
    mapped = []

    def build(arrays: list[np.ndarray]) -> None:
        mapped.append([isinstance(array, np.memmap) for array in arrays])
        arrays[0][:] = np.arange(5)

    files = []
    monkeypatch.setattr(ordinary_memory, "TAKEN_AT_ONCE", 16)
    for folder, available in (("plenty", 80), ("little", 20)):
        memory = Memory(100 << 20, available << 20)
        monkeypatch.setattr(ordinary_memory, "known_memories", lambda _, memory=memory: [memory])
        found = cached_arrays(tmp_path / folder, {"a": 1}, SPECS, build)
        assert [array.tolist() for array in found] == [[0, 1, 2, 3, 4], []]
        (entry,) = entries(tmp_path / folder)
        files.append({path.name: path.read_bytes() for path in entry.iterdir() if path.name != "checked"})
    assert mapped == [[False, False], [True, False]]
    assert files[0] == files[1]
    assert np.load(entry / "none.npy").shape == (0, 2)


@pytest.mark.parametrize(("available", "others", "given"), [(350, 0, True), (349, 0, False), (350, 1, False)])
def test_memory_is_taken_while_a_quarter_stays_for_others(
    monkeypatch: pytest.MonkeyPatch, available: int, others: int, given: bool
) -> None:
    """`others` take theirs at the same time."""
    left = iter([available, available - 64 - others])
    monkeypatch.setattr(ordinary_memory, "known_memories", lambda _: [Memory(1000 << 20, next(left) << 20)])
    arrays = spare_arrays([((100 << 20,), np.dtype(np.uint8)), ((0,), np.dtype(np.int64))])
    assert (arrays is not None) == given


GROUPS = {
    "no limit": ("0::/job\n", {}, []),
    "a job's": (
        "0::/job/step\n",
        {
            "job/step": {"memory.max": "max", "memory.current": "900"},
            "job": {
                "memory.max": "1000",
                "memory.current": "900",
                "memory.stat": "file 999\nactive_file 300\ninactive_file 50\n",
            },
        },
        [(1000, 450)],
    ),
    "a container's": (
        "12:memory:/docker/abc\n0::/docker/abc\n",
        {
            "memory/docker": {"memory.limit_in_bytes": "9223372036854771712"},
            "memory": {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "600",
                "memory.stat": "active_file 1\ntotal_active_file 5\ntotal_inactive_file 7\n",
            },
        },
        [(1000, 412)],
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_memory_of_a_container_is_known(tmp_path: Path, kind: str) -> None:
    own, files, limits = GROUPS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable: 3 kB\n")
    for group, contents in files.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_text(content)
    assert list(known_memories(tmp_path)) == [(8192, 3072), *limits]
