"""Whose the folder is that a run saves to."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.checkpoint import CheckpointError, complete_iterations
from megalite.training import save_folder
from megalite.training.errors import TrainingError
from megalite.training.metrics import Reporter
from megalite.training.save_folder import only_writer
from tests.pool import WorkerPool
from tests.training.runs import progress_of, train


def test_two_runs_do_not_save_to_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    train("--train-iters 1 --save", str(folder))
    other = os.open(folder / ".lock", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="another run is saving there"):
            train("--train-iters 2 --save", str(folder))
        train("--train-iters 2 --load", str(folder))
    finally:
        os.close(other)
    train("--train-iters 2 --save", str(folder))
    assert progress_of(folder, 2)["iteration"] == 2


def test_another_programs_checkpoints_are_not_saved_over(tmp_path: Path) -> None:
    """A damaged one of this program is no other's, nor is a folder without anything in it."""
    train("--train-iters 3 --save-interval 1 --save", str(tmp_path))
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    (tmp_path / "iter_0000002" / "state.json").unlink()
    (tmp_path / "iter_0000005").mkdir()
    train("--train-iters 4 --save", str(tmp_path))
    weights = tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    weights.parent.mkdir()
    weights.write_text("weights")
    with pytest.raises(TrainingError, match="holds iter_0000005, no whole checkpoint of this program"):
        train("--train-iters 5 --save", str(tmp_path))
    assert weights.exists()
    assert not (tmp_path / "iter_0000005" / "state.json").exists()


def test_a_folder_is_held_against_runs_on_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks files that are open for writing on its server, and folders on the node alone."""
    lock = fcntl.flock

    def lock_of_nfs(descriptor: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_of_nfs)
    folder, message = str(tmp_path), "another run is saving there"
    with only_writer(folder, True), pytest.raises(TrainingError, match=message), only_writer(folder, True):
        pass


def test_a_lock_that_another_user_left_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").touch()
    opened = os.open

    def readable(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", readable)
    folder, message = str(tmp_path), "another run is saving there"
    with only_writer(folder, True), pytest.raises(TrainingError, match=message), only_writer(folder, True):
        pass


def held_by_node(folder: str) -> str:
    """What is said where each rank has a folder of its own under the name of the one that is shared."""
    patience, save_folder.PATIENCE_SECONDS = save_folder.PATIENCE_SECONDS, 0.0
    rank = dist.get_rank()
    try:
        with only_writer(os.path.join(folder, str(rank)), rank == 0):
            return ""
    except TrainingError as error:
        return str(error)
    finally:
        save_folder.PATIENCE_SECONDS = patience


def test_a_folder_that_the_ranks_do_not_share_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    told = pool.run(2, held_by_node, str(tmp_path))
    expected = f"rank 1: --save {tmp_path}/1: what the first rank wrote there is not seen on "
    assert [message.startswith(expected) for message in told] == [True, True]


def test_a_child_of_a_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    """As a process that reads data, which may outlive a run that is killed."""
    forked, told = os.pipe()
    with only_writer(str(tmp_path), True):
        if (child := os.fork()) == 0:
            os.write(told, b".")
            signal.pause()
    try:
        os.read(forked, 1)
        with only_writer(str(tmp_path), True):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(forked)
        os.close(told)


def test_of_two_runs_where_locks_are_those_of_a_node_the_later_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre with `localflock`: a job that was submitted twice, on two nodes."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    say = Reporter.say

    def while_another_begins(reporter: Reporter, text: str) -> None:
        say(reporter, text)
        if text.startswith("saved checkpoint of iteration 2 "):
            with only_writer(str(tmp_path), True) as check:
                check()

    monkeypatch.setattr(Reporter, "say", while_another_begins)
    with pytest.raises(CheckpointError, match=f"--save {tmp_path}: another run has begun to save there"):
        train("--train-iters 5 --save-interval 1 --save", str(tmp_path))
    assert sorted(complete_iterations(tmp_path)) == [1, 2]
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]


def test_a_folder_is_not_lost_by_a_lock_that_cannot_be_read(tmp_path: Path) -> None:
    with only_writer(str(tmp_path), True) as check:
        check()
        (tmp_path / ".lock").write_text("")
        check()
        (tmp_path / ".lock").unlink()
        check()
        (tmp_path / ".lock").write_text("another")
        with pytest.raises(CheckpointError, match="another run has begun"):
            check()
