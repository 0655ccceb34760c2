"""Schedules run by real processes with sleeps as compute: what holds whatever the machine does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megalite.pipeline.schedule import Action, Kind, Schedule, make_schedule
from megalite.pipeline.simulation import in_flight_peaks, product_of, requirements, simulate
from tests.pool import WorkerPool
from tools.benchmarks.pipeline import SCHEDULES, Event, run_steps, step_seconds

PP, MICROBATCHES = 4, 6
SECONDS = 0.004


def schedule_called(name: str) -> Schedule:
    return make_schedule(name, PP, MICROBATCHES, 2 if name == "interleaved" else 1)


def expected_order(schedule: Schedule, rank: int) -> list[tuple[Kind, int, int]]:
    """Parts of the work as the table lists them; a whole backward is two of them."""
    parts: list[tuple[Kind, int, int]] = []
    for action in schedule[rank]:
        kinds = (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,)
        stage = schedule.stages[rank][action.chunk]
        parts += [(kind, stage, action.microbatch) for kind in kinds]
    return parts


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_work_in_the_order_of_the_table_and_never_before_their_input(
    pool: WorkerPool, name: str
) -> None:
    schedule = schedule_called(name)
    ranks = [steps[0] for steps in pool.run(PP, run_steps, schedule, SECONDS, 1)]
    made: dict[tuple[Kind, int, int], Event] = {}
    for rank, log in enumerate(ranks):
        assert [(one.kind, one.stage, one.microbatch) for one in log] == expected_order(schedule, rank)
        assert all(before.finish <= after.start for before, after in pairwise(log))
        made |= {product_of(Action(one.kind, one.microbatch), one.stage): one for one in log}
    for log in ranks:
        for one in log:
            for product in requirements(Action(one.kind, one.microbatch), one.stage, schedule.num_stages):
                assert made[product].finish <= one.start, (one, product)
    # A sleep lasts at least as long as it is asked to: no step can beat its table, only a wrong one would.
    chunk = SECONDS * PP / schedule.num_stages
    assert step_seconds(ranks) >= simulate(schedule, chunk, chunk, chunk).makespan


def test_the_tables_predict_what_the_benchmark_is_to_show() -> None:
    """zbv < zb-h1 < interleaved < 1F1B = GPipe in time, 1F1B < GPipe in activations; times equal."""
    times = {}
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
        chunk = 8 / schedule.num_stages
        times[name] = simulate(schedule, chunk, chunk, chunk).makespan
    assert times["zbv"] < times["zb-h1"] < times["interleaved"] < times["1f1b"] == times["gpipe"]
    held = {name: max(in_flight_peaks(make_schedule(name, 4, 8))) for name in ("1f1b", "gpipe")}
    assert held == {"1f1b": 4, "gpipe": 8}
