"""Schedules as text: CSV files as torch.distributed.pipelining writes them, a timeline for the terminal."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from megalite.config.schedule_file import read_schedule_file
from megalite.pipeline.checker import check
from megalite.pipeline.schedule import Action, Kind, Schedule
from megalite.pipeline.simulation import ScheduleError, Timeline, in_flight_peaks, simulate


def read_csv(path: Path) -> Schedule:
    """The checked schedule in `path`, of the form that `config.schedule_file` tells.

    A rank's chunks are its stages in ascending order; any placement of stages on ranks will do. Raises
    ScheduleError for cells of another form and for tables that cannot be run.
    """
    try:
        file = read_schedule_file(path)
    except ValueError as error:
        raise ScheduleError(str(error)) from None
    stages = tuple(tuple(sorted({stage for stage, _, _ in cells})) for cells in file.ranks)
    actions = tuple(
        tuple(Action(Kind(kind), microbatch, place[stage]) for stage, kind, microbatch in cells)
        for cells, place in zip(file.ranks, map(_chunk_numbers, stages), strict=True)
    )
    most = sum(map(len, actions))
    unbounded = Schedule(str(path), file.microbatches, actions, stages, (), sends_in_flight=most)
    schedule = replace(unbounded, max_in_flight=in_flight_peaks(unbounded))
    check(schedule)
    return replace(schedule, sends_in_flight=_free_sends(schedule))


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write `schedule` so that `read_csv` gives the same actions."""
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows(
            [f"{schedule.stages[rank][a.chunk]}{a.kind.value}{a.microbatch}" for a in actions]
            for rank, actions in enumerate(schedule.actions)
        )


def draw(timeline: Timeline) -> str:
    """One line a rank, one column a unit of time: `F3` starts on micro-batch 3, `--` goes on, blanks wait.

    Actions of chunk 1, 2, ... carry as many primes: `F3'`. Needs integer times.
    """
    labels = {
        action: action.kind.value + str(action.microbatch) + "'" * action.chunk
        for actions in timeline.schedule.actions
        for action in actions
    }
    width = max(map(len, labels.values()))
    lines = []
    for rank, spans in enumerate(timeline.spans):
        columns = [" " * width] * int(timeline.makespan)
        for span in spans:
            start, finish = int(span.start), int(span.finish)
            columns[start:finish] = ["-" * width] * (finish - start)
            if finish > start:
                columns[start] = labels[span.action].ljust(width)
        lines.append(f"{rank:>3} | " + " ".join(columns).rstrip())
    return "\n".join(lines)


def _chunk_numbers(stages: tuple[int, ...]) -> dict[int, int]:
    return {stage: chunk for chunk, stage in enumerate(stages)}


def _free_sends(schedule: Schedule) -> int:
    """The fewest sends in flight, but at least 2, that cost no time when all actions take the same."""
    makespan = simulate(schedule).makespan

    def costs_time(sends: int) -> bool:
        try:
            return simulate(schedule, sends_in_flight=sends).makespan > makespan
        except ScheduleError:
            return True

    enough = 2
    while enough < schedule.sends_in_flight and costs_time(enough):
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1 and enough > 2:
        middle = (too_few + enough) // 2
        too_few, enough = (middle, enough) if costs_time(middle) else (too_few, middle)
    return enough
