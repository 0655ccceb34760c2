"""Schedules as text: CSV files as torch.distributed.pipelining writes them, a timeline for the terminal."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.pipeline.checker import check
from megalite.pipeline.schedule import Action, Kind, Schedule
from megalite.pipeline.simulation import ScheduleError, Timeline, in_flight_peaks, simulate

CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def read_csv(path: Path) -> Schedule:
    """The checked schedule in `path`: a line a rank, a cell `<stage><kind><micro-batch>` an action.

    B is a full backward; I and W are its input- and weight-gradient parts. Empty cells are skipped. A rank's
    chunks are its stages in ascending order. Raises ScheduleError for cells of another form and for tables
    that cannot be run.
    """
    with path.open(newline="") as lines:
        rows = [_parse_row(row, f"{path}, line {number}") for number, row in enumerate(csv.reader(lines), 1)]
    cells = [cell for row in rows for cell in row]
    if not cells:
        raise ScheduleError(f"{path} holds no actions")
    stages = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in rows)
    actions = tuple(
        tuple(Action(kind, microbatch, chunks.index(stage)) for stage, kind, microbatch in row)
        for row, chunks in zip(rows, stages, strict=True)
    )
    microbatches = 1 + max(microbatch for _, _, microbatch in cells)
    unbounded = Schedule(str(path), microbatches, actions, stages, (), sends_in_flight=len(cells))
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


def _parse_row(row: Sequence[str], where: str) -> list[tuple[int, Kind, int]]:
    cells = []
    for text in filter(None, (cell.strip() for cell in row)):
        match = CELL.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{where}: cell {text!r} is not <stage><F, B, I or W><micro-batch>")
        cells.append((int(match[1]), Kind(match[2]), int(match[3])))
    return cells


def _free_sends(schedule: Schedule) -> int:
    """The fewest sends in flight, but at least 2, that cost no time when all actions take the same."""
    makespan = simulate(schedule).makespan
    for sends in range(2, schedule.sends_in_flight):
        try:
            if simulate(schedule, sends_in_flight=sends).makespan == makespan:
                return sends
        except ScheduleError:
            continue
    return schedule.sends_in_flight
