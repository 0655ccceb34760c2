"""Ranks wait for one that has more to do before it joins them, also longer than a collective would."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.config import Config, parse
from megalite.parallel.topology import build_topology
from megalite.training import meeting, samples
from megalite.training.errors import RendezvousError, TrainingError
from megalite.training.meeting import meet, signs_of_life
from tests.pool import WorkerPool

RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--lr 1e-2 --train-iters 1 --mock-data"
)


MINUTE = timedelta(minutes=1)


def open_with_a_slow_rank(seconds: float, collective: float) -> int:
    """Samples that a rank finds whose collectives wait `collective` seconds, where rank 1 is slow."""
    config = parse(RUN.split(), 3)
    build_topology(1, 1, torch.device("cpu"))
    distributed_c10d._set_pg_timeout(timedelta(seconds=collective), dist.group.WORLD)
    opened = samples._open_datasets

    def slowly(config: Config, order: Mapping[str, Any] | None) -> Any:
        time.sleep(seconds if dist.get_rank() == 1 else 0)
        return opened(config, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "_open_datasets", slowly)
        patch.setattr(meeting, "LOOKS_SECONDS", 0.05)
        splits = samples.open_datasets(config, None)
    assert splits.train is not None
    return len(splits.train)


def test_index_arrays_may_take_longer_than_a_collective(pool: WorkerPool) -> None:
    assert pool.run(3, open_with_a_slow_rank, 2.5, 2.0) == [3] * 3


def meet_late(late: int, until: str, patience: float) -> tuple[str, list[str]]:
    """The error and the warnings of a rank; `late` comes to the second meeting when another has `until`."""
    store = dist.PrefixStore("test", distributed_c10d._get_default_store())
    said: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        store.set("warned", "")
        return True

    error = ""
    meeting.logger.addFilter(hear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "SPEAKS_SECONDS", 0.1)
        patch.setattr(meeting, "LOOKS_SECONDS", 0.05)
        meet("work", MINUTE, MINUTE, "advice")
        if dist.get_rank() == late:
            store.wait([until])
        try:
            meet("work", timedelta(seconds=patience), MINUTE, "advice")
        except TrainingError as found:
            error = str(found)
            store.set("given up", "")
    meeting.logger.removeFilter(hear)
    return error, said


def test_one_rank_tells_for_whom_it_waits(pool: WorkerPool) -> None:
    results = pool.run(3, meet_late, 2, "warned", 60.0)
    assert {error for error, _ in results} == {""}
    (lines,) = [said for _, said in results if said]
    assert re.fullmatch(r"rank 2 is still at work; the others have waited \d+:\d\d:\d\d", lines[0])


def meet_silently(lives: bool, first_has_died: bool) -> str:
    """The error of a rank, where rank 2 takes longer for its work than others miss its signs."""
    store = dist.PrefixStore("meetings", distributed_c10d._get_default_store())
    meetings = store.add(f"of rank {dist.get_rank()}", 0)
    if first_has_died:  # it was a rank of which nothing is heard
        store.compare_set(f"first of {meetings + 1}", "", "3")
    work, silence = (2.0, 1.5) if lives else (0.6, 0.2)  # a busy machine keeps a thread waiting, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "SPEAKS_SECONDS", 0.1)
        patch.setattr(meeting, "LOOKS_SECONDS", 0.05)
        patch.setattr(meeting, "SIGN_SECONDS", 0.05 if lives else 60.0)
        try:
            with signs_of_life():
                time.sleep(work if dist.get_rank() == 2 else 0.0)
                meet("work", MINUTE, timedelta(seconds=silence), "advice")
        except TrainingError as found:
            return str(found)
    return ""


@pytest.mark.parametrize(("lives", "first_has_died"), [(True, False), (False, False), (False, True)])
def test_a_rank_that_gives_no_sign_of_life_is_not_waited_for(
    pool: WorkerPool, lives: bool, first_has_died: bool
) -> None:
    message = "rank 2 has ended at work, or its node has: no sign of life for 0:00:00"
    assert pool.run(3, meet_silently, lives, first_has_died) == [("" if lives else message)] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_come_ends_all_with_one_message(pool: WorkerPool, late: int) -> None:
    results = pool.run(3, meet_late, late, "given up", 0.1)
    ((message, *others),) = [{error for error, _ in results}]
    assert not others
    waited = r"the others have waited \d+:\d\d:\d\d"
    assert re.fullmatch(rf"rank {late} is still at work; {waited}: advice", message)
    told = [line for _, said in results for line in said if line == message]
    assert len(told) == (late == 0), "the error is told by rank 0, which may be the one that is waited for"


def test_where_the_store_has_gone_each_rank_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank, which held it, cannot."""
    held = [dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)]
    store = dist.TCPStore("localhost", held[0].port, 2, is_master=False, wait_for_workers=False)

    def first_rank_dies(_: float) -> None:
        held.clear()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(time, "sleep", first_rank_dies)
    with pytest.raises(RendezvousError, match="the run has ended while this rank was at work"):
        meet("work", MINUTE, MINUTE, "advice")
