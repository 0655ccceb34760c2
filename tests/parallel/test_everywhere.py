"""What fails on one rank fails on all."""

from __future__ import annotations

import torch.distributed as dist

from megalite.parallel.everywhere import on_every_rank
from tests.pool import WorkerPool


class TellsAll(RuntimeError):
    pass


def fail(errors: list[Exception | None]) -> str:
    """What each rank raises of which some, or all, have one of `errors`."""

    def action() -> str:
        error = errors[dist.get_rank()]
        if error is not None:
            raise error
        return "done"

    try:
        return on_every_rank(action, ValueError, TellsAll)
    except Exception as error:  # of either type, which is what is looked at
        return f"{type(error).__name__}: {error}"


def test_an_expected_error_is_told_by_all(pool: WorkerPool) -> None:
    assert pool.run(3, fail, [None, None, None]) == ["done"] * 3
    assert pool.run(3, fail, [ValueError("no file")] * 3) == ["TellsAll: no file"] * 3
    told = "TellsAll: rank 1: no file"
    assert pool.run(3, fail, [None, ValueError("no file"), None]) == [told] * 3


def test_another_error_stays_what_it_is_and_ends_the_others(pool: WorkerPool) -> None:
    told = "TellsAll: rank 2: MemoryError: 8 GB"
    assert pool.run(3, fail, [None, None, MemoryError("8 GB")]) == [told, told, "MemoryError: 8 GB"]
