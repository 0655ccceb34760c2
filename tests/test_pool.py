"""The worker pool itself: results by rank, failures with their cause, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import JobFailed, WorkerPool


def sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_results_come_by_rank(pool: WorkerPool, world_size: int) -> None:
    results = pool.run(world_size, sum_of_ranks, 10)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    expected = sum(range(world_size)) + 10 * world_size
    assert all(total.item() == expected for _, _, total in results)


def test_workers_are_reused(pool: WorkerPool) -> None:
    first, second = ([pid for _, pid, _ in pool.run(3, sum_of_ranks, 0)] for _ in range(2))
    assert first == second


def test_an_exception_names_its_rank_and_the_pool_goes_on(pool: WorkerPool) -> None:
    with pytest.raises(JobFailed, match=r"rank 2 of 4 failed(?s:.*)raise_on(?s:.*)does not like this"):
        pool.run(4, raise_on, 2)
    assert len(pool.run(4, sum_of_ranks, 0)) == 4


def test_a_dead_rank_is_reported_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(JobFailed, match=r"rank 1 of 3 failed(?s:.*)exit code 7"):
        pool.run(3, die_on, 1)
    assert len(pool.run(3, sum_of_ranks, 0)) == 3


def test_a_hanging_rank_is_killed_after_the_timeout(pool: WorkerPool) -> None:
    with pytest.raises(JobFailed, match=r"did not finish within 2 s") as caught:
        pool.run(2, hang_on, 1, timeout=2.0)
    assert 1 in caught.value.failures
    assert len(pool.run(2, sum_of_ranks, 0)) == 2


def test_world_size_beyond_the_pool_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"outside 1\.\.8"):
        pool.run(9, sum_of_ranks, 0)


SESSION = """
import os, time
from tests.pool import WorkerPool
from tests.test_pool import sum_of_ranks, hang_on

if __name__ == "__main__":
    pool = WorkerPool(2)
    print(*(pid for _, pid, _ in pool.run(2, sum_of_ranks, 0)), flush=True)
    pool.run(2, hang_on, 1)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_do_not_outlive_a_killed_session(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    session = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert session.stdout is not None
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    session.send_signal(signal.SIGKILL)
    session.wait()
    session.stdout.close()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
