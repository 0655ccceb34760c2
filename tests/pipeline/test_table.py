"""Schedules written, read and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.pipeline.schedule import Schedule, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from megalite.pipeline.simulation import ScheduleError, simulate
from megalite.pipeline.table import draw, read_csv, write_csv

SCHEDULES = [gpipe(3, 4), one_f_one_b(4, 6), interleaved(2, 7, 3, group=5), zb_h1(4, 8), zb_v(4, 9)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_schedule_survives_its_file(tmp_path: Path, schedule: Schedule) -> None:
    path = tmp_path / "schedule.csv"
    write_csv(schedule, path)
    read = read_csv(path)
    assert (read.actions, read.stages, read.microbatches) == (
        schedule.actions,
        schedule.stages,
        schedule.microbatches,
    )
    assert read.sends_in_flight <= schedule.sends_in_flight
    assert simulate(read).makespan == simulate(schedule).makespan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"line 2: cell '1X0' is not <stage>"),
        ("0F0,0B0\n1F0\n", r"rank 1 has for micro-batch 0, chunk 0: 1 F, 0 B"),
        ("0F0,0B0\n0F0,0B0\n", r"stages are \[0, 0\]"),
        ("0F0,0B0\n1B0,1F0\n", r"deadlock"),
        ("0F0,0B0\n1Fé,1B0\n", r"line 2: cell '1Fé' is not <stage>"),
        ("0F0,0B0\n1F\N{ARABIC-INDIC DIGIT ZERO},1B0\n", r"line 2: cell '1F.' is not <stage>"),
        ("\n", r"holds no actions"),
    ],
)
def test_files_that_cannot_be_run_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=message):
        read_csv(path)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8-sig"])
def test_blank_cells_and_byte_order_marks_of_other_tools_are_skipped(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,,0B0\n,1F0,1B0,\n", encoding=encoding)
    assert read_csv(path).actions == one_f_one_b(2, 1).actions


def test_a_drawing_shows_the_bubbles() -> None:
    timeline = simulate(one_f_one_b(2, 3))
    assert draw(timeline) == "\n".join(
        [
            "  0 | F0 F1       B0 -- F2 B1 --    B2 --",
            "  1 |    F0 B0 -- F1 B1 -- F2 B2 --",
        ]
    )
