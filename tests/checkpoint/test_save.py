"""A save publishes a whole checkpoint or nothing, and says why on every rank."""

from __future__ import annotations

import errno
import io
import logging
import os
import pkgutil
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import Block, CheckpointError, foreign_checkpoints, load, read_state, save
from megalite.checkpoint.folder import restore_replaced
from tests.pool import JobFailed, WorkerPool

TRACKER = "latest_checkpointed_iteration.txt"


def vector(value: float, size: int = 4) -> list[Block]:
    """A whole tensor `x` filled with a value."""
    return [Block("x", (size,), (0,), torch.full((size,), value))]


def value_of(directory: Path, iteration: int | None = None) -> float:
    """The value that a saved `vector` was filled with."""
    blocks = vector(-1.0)
    load(directory, blocks, iteration)
    assert len(set(blocks[0].tensor.tolist())) == 1
    return float(blocks[0].tensor[0])


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_state_comes_back_equal(tmp_path: Path) -> None:
    state = {"consumed_samples": 2**60 + 1, "scheduler": {"lr": 0.1 + 0.2}, "names": ["ü", None, True]}
    path = save(tmp_path, 7, vector(1.0), state)
    assert path == tmp_path / "iter_0000007"
    assert load(tmp_path, vector(0.0)) == {**state, "iteration": 7}
    assert read_state(tmp_path, 7) == {**state, "iteration": 7}


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"by_rank": {0: 1}}, {"tensor": torch.ones(1)}])
def test_state_that_json_cannot_keep_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        save(tmp_path, 1, vector(1.0), state)
    assert entries(tmp_path) == []


def test_directory_after_saves(tmp_path: Path) -> None:
    save(tmp_path / "new", 100, vector(1.0), {})
    save(tmp_path / "new", 200, vector(2.0), {})
    assert entries(tmp_path / "new") == ["iter_0000100", "iter_0000200", TRACKER]
    assert (tmp_path / "new" / TRACKER).read_text() == "200\n"
    assert [value_of(tmp_path / "new", n) for n in (100, 200)] == [1.0, 2.0]


def test_the_same_iteration_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 100, vector(1.0), {})
    save(tmp_path, 100, vector(2.0), {})
    assert entries(tmp_path) == ["iter_0000100", TRACKER]
    assert value_of(tmp_path) == 2.0


def test_leftovers_are_ignored_then_removed(tmp_path: Path) -> None:
    save(tmp_path, 100, vector(1.0), {})
    (tmp_path / ".iter_0000200.tmp-0123abcd").mkdir()
    (tmp_path / ".iter_0000200.tmp-0123abcd" / "__0_0.distcp").write_bytes(b"part")
    assert value_of(tmp_path) == 1.0
    save(tmp_path, 300, vector(3.0), {})
    assert entries(tmp_path) == ["iter_0000100", "iter_0000300", TRACKER]


def test_leftovers_that_cannot_be_removed_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of another user, or on NFS while a process has one of their files open."""
    left = tmp_path / ".iter_0000200.tmp-0123abcd"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"part")

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "rmdir", busy)
    save(tmp_path, 300, vector(3.0), {})
    assert value_of(tmp_path) == 3.0
    assert entries(left) == []
    assert f"{left}, which a run has left or replaced, cannot be removed: Directory not empty" in caplog.text


def test_nothing_that_takes_long_comes_between_a_checkpoint_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill there costs the checkpoint: it would be passed over, as by a rollback."""
    done = []
    for owner, name in ((Path, "rename"), (Path, "replace"), (os, "fsync")):
        called = getattr(owner, name)

        def noted(*args: Any, name: str = name, called: Any = called) -> Any:
            done.append(name)
            return called(*args)

        monkeypatch.setattr(owner, name, noted)
    save(tmp_path, 100, vector(1.0), {})
    assert done[-4:] == ["fsync", "rename", "replace", "fsync"]


def test_a_reader_that_restores_what_is_being_replaced_does_not_end_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 100, vector(1.0), {})
    rename = Path.rename

    def between(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if ".replaced-" in Path(target).name:
            monkeypatch.setattr(Path, "rename", rename)
            restore_replaced(tmp_path)
        return renamed

    monkeypatch.setattr(Path, "rename", between)
    save(tmp_path, 100, vector(2.0), {})
    assert entries(tmp_path) == ["iter_0000100", TRACKER]
    assert value_of(tmp_path) == 2.0


@pytest.mark.parametrize("replacing", [False, True])
def test_a_rename_that_nfs_has_asked_for_twice_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    """Where the first answer was lost, the second is that the old name is not there."""
    if replacing:
        save(tmp_path, 100, vector(1.0), {})
    rename = Path.rename

    def repeated(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if Path(target).name == "iter_0000100":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return renamed

    monkeypatch.setattr(Path, "rename", repeated)
    save(tmp_path, 100, vector(2.0), {})
    assert entries(tmp_path) == ["iter_0000100", TRACKER]
    assert value_of(tmp_path) == 2.0


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_to_a_checkpoint_is_replaced(tmp_path: Path, dangling: bool) -> None:
    """As of one that was moved to other storage, which is left alone."""
    root, cold = tmp_path / "run", tmp_path / "cold"
    save(root, 100, vector(1.0), {})
    (root / "iter_0000100").rename(cold)
    (root / "iter_0000100").symlink_to(tmp_path / "gone" if dangling else cold)
    save(root, 100, vector(2.0), {})
    save(root, 200, vector(3.0), {})
    assert entries(root) == ["iter_0000100", "iter_0000200", TRACKER]
    assert [value_of(root, n) for n in (100, 200)] == [2.0, 3.0]
    assert (cold / "manifest.json").is_file()


@pytest.mark.parametrize("lost", ["at its beginning", "meanwhile", "with what it has written"])
def test_a_folder_that_another_run_has_taken_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    save(tmp_path, 100, vector(1.0), {})
    calls: list[str] = []

    def check() -> None:
        calls.append(lost)
        if lost == "at its beginning" or len(calls) == 2:
            raise CheckpointError("another has it")

    if lost == "with what it has written":

        def removed(folder: Path, *_: object) -> None:
            shutil.rmtree(folder)
            folder.stat()

        monkeypatch.setattr(sys.modules[save.__module__], "write_manifest", removed)
    with pytest.raises(CheckpointError, match="another has it"):
        save(tmp_path, 100, vector(2.0), {}, check=check)
    assert entries(tmp_path) == ["iter_0000100", TRACKER]
    assert value_of(tmp_path) == 1.0


@pytest.mark.parametrize("where", ["create_temporary", "publish"])
def test_a_save_that_fails_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At its beginning or at its end."""

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.modules["megalite.checkpoint.save"], where, full)
    with pytest.raises(CheckpointError, match=f"cannot save to {tmp_path}: No space left on device"):
        save(tmp_path, 100, vector(1.0), {})


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 100, vector(1.0), {})

    rename = Path.rename

    def denied(path: Path, target: Path) -> Path:
        if Path(target).name == "iter_0000200":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path, 200, vector(2.0), {})
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", TRACKER]  # nor hidden


def test_what_nfs_keeps_of_a_removed_checkpoint_is_no_foreign_one(tmp_path: Path) -> None:
    for name in ("iter_0000100/.nfs0001", "iter_0000200/mp_rank_00"):
        (tmp_path / name).mkdir(parents=True)
    assert foreign_checkpoints(tmp_path) == [tmp_path / "iter_0000200"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_that_does_not_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fsync = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    save(tmp_path, 100, vector(1.0), {})
    assert value_of(tmp_path) == 1.0


def test_a_replaced_checkpoint_that_cannot_be_restored_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 100, vector(1.0), {})
    replaced = (tmp_path / "iter_0000100").rename(tmp_path / ".iter_0000100.replaced-0123abcd")
    rename = Path.rename

    def denied(path: Path, target: Path) -> Path:
        if path == replaced:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", denied)
        save(tmp_path, 300, vector(3.0), {})
    assert "the interrupted replacement" in caplog.text
    save(tmp_path, 400, vector(4.0), {})
    assert value_of(tmp_path, 100) == 1.0


def pieces(rank: int) -> list[Block]:
    """`x` of 8 elements in two halves, one a rank, and `y`, a replica on both."""
    return [
        Block("x", (8,), (4 * rank,), torch.full((4,), float(rank))),
        Block("y", (2,), (0,), torch.ones(2)),
    ]


def hole(rank: int) -> list[Block]:
    return pieces(rank) if rank == 0 else pieces(rank)[1:]


def overlap(rank: int) -> list[Block]:
    return [*pieces(rank), Block("x", (8,), (3,), torch.ones(2))] if rank == 0 else pieces(rank)


def dtypes(rank: int) -> list[Block]:
    y = torch.ones(2, dtype=(torch.float32, torch.bfloat16)[rank])
    return [pieces(rank)[0], Block("y", (2,), (0,), y)]


def outside(rank: int) -> list[Block]:
    return [*pieces(rank), Block("z", (3,), (2,), torch.ones(2))]


def raising(rank: int) -> Iterator[Block]:
    yield from pieces(rank)
    if rank == 1:
        raise KeyError("no such moment")


def save_blocks(directory: str, make: Callable[[int], list[Block]], iteration: int = 1) -> str:
    """Runs on every rank: the error of a save, or an empty string."""
    try:
        save(directory, iteration, make(dist.get_rank()), {})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hole, "x: only 4 of 8 elements of shape (8,) are held by any rank"),
        (overlap, "x: blocks [0:4] and [3:5] overlap"),
        (dtypes, "y: shape (2,) torch.float32 on rank 0, shape (2,) torch.bfloat16 on rank 1"),
        (outside, "z: local shape (2,) at offsets (2,) exceeds global shape (3,)"),
        (raising, "rank 1: KeyError: 'no such moment'"),
    ],
)
def test_blocks_that_are_not_whole_tensors(
    pool: WorkerPool, tmp_path: Path, make: Callable[[int], list[Block]], message: str
) -> None:
    messages = pool.run(2, save_blocks, str(tmp_path), make)
    assert messages[0] == messages[1]
    assert message in messages[0]
    assert entries(tmp_path) == []


def save_drifted(directory: str) -> str:
    """Runs on every rank: save a replica whose last bit differs on rank 1; what is logged."""
    blocks = pieces(dist.get_rank())
    blocks[1].tensor[0] += 2.0**-23 * dist.get_rank()
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("megalite.checkpoint")
    logger.addHandler(handler)
    try:
        save(directory, 1, blocks, {})
    finally:
        logger.removeHandler(handler)
    return stream.getvalue()


def test_replicas_that_differ_are_reported_and_saved_from_the_lowest_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    logged = pool.run(2, save_drifted, str(tmp_path))
    assert logged == ["replicas differ, the lowest rank's are saved: y on rank 1 from rank 0\n", ""]
    x, y = torch.zeros(8), torch.zeros(2)
    load(tmp_path, [Block("x", (8,), (0,), x), Block("y", (2,), (0,), y)])
    assert torch.equal(y, torch.ones(2))


def save_two_iterations(directory: str) -> str:
    return save_blocks(directory, pieces, iteration=1 + dist.get_rank())


def test_ranks_that_disagree_about_the_iteration(pool: WorkerPool, tmp_path: Path) -> None:
    messages = pool.run(2, save_two_iterations, str(tmp_path))
    assert all("ranks save different iterations: [1, 2]" in message for message in messages)


def save_with_full_disk(directory: str) -> str:
    """Rank 1 may not write files of more than 4 KiB, as if its disk were full."""
    size = 100_000
    block = Block("x", (2 * size,), (size * dist.get_rank(),), torch.ones(size))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        save(directory, 200, [block], {})
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    return ""


def test_a_full_disk_on_one_rank_is_an_error_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    save(tmp_path, 100, vector(1.0), {})
    messages = pool.run(2, save_with_full_disk, str(tmp_path))
    assert messages[0] == messages[1]
    assert "cannot write to" in messages[0]
    assert "File too large" in messages[0]
    assert entries(tmp_path) == ["iter_0000100", TRACKER]
    assert value_of(tmp_path) == 1.0


def save_and_die(directory: str, iteration: int, rank: int, where: str, calls: int) -> None:
    """Save 2.0; a rank is gone at its n-th call of a function, as if it had been killed there."""
    original = pkgutil.resolve_name(where)
    left = calls

    def dying(*args: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(9)
        return original(*args, **options)

    if dist.get_rank() == rank:
        patch(where, dying).start()
    save(directory, iteration, [Block("x", (4,), (2 * dist.get_rank(),), torch.full((2,), 2.0))], {})


DEATHS = [
    pytest.param(1, "torch.save", 1, id="while writing tensors"),
    pytest.param(0, "pathlib.Path.rename", 2, id="before it is published"),
    pytest.param(0, "pathlib.Path.replace", 1, id="before it is recorded"),
]


@pytest.mark.parametrize(("rank", "where", "calls"), DEATHS)
def test_killed_during_save_leaves_the_previous_one(
    pool: WorkerPool, tmp_path: Path, rank: int, where: str, calls: int
) -> None:
    save(tmp_path, 100, vector(1.0), {})
    with pytest.raises(JobFailed, match="exit code 9"):
        pool.run(2, save_and_die, str(tmp_path), 200, rank, where, calls)
    assert value_of(tmp_path) == 1.0
    save(tmp_path, 200, vector(3.0), {})
    assert entries(tmp_path) == ["iter_0000100", "iter_0000200", TRACKER]
    assert value_of(tmp_path) == 3.0


def test_killed_between_the_renames_of_a_replacement(pool: WorkerPool, tmp_path: Path) -> None:
    save(tmp_path, 100, vector(1.0), {})
    with pytest.raises(JobFailed, match="exit code 9"):
        pool.run(2, save_and_die, str(tmp_path), 100, 0, "pathlib.Path.rename", 3)
    assert not (tmp_path / "iter_0000100").exists()
    assert value_of(tmp_path) == 1.0
