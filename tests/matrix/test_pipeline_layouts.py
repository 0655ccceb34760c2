"""Stages written as a layout string give the numbers of the reference, under every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import validate
from tests.matrix import cases
from tests.matrix.cases import GPT2, LLAMA, Layout, Options
from tests.matrix.job import train_three_steps
from tests.matrix.tables import random_table, stages_of_a_table, table_file
from tests.matrix.test_layouts import check_against
from tests.pool import WorkerPool


@pytest.mark.parametrize(
    ("layout", "stages", "schedule"),
    [
        (Layout(1, 1, 2), "Et*3,L", None),
        (Layout(1, 2, 1), "E|t*3L", None),
        (Layout(2, 2, 1), "Ettt|L", "zb-h1"),
        (Layout(1, 4, 1), "E|t|tt|L", "gpipe"),
        (Layout(1, 4, 2), "Et|t|t|L", "zb-h1"),
        (Layout(1, 2, 2), "E(t|)*3L", None),  # four stages: interleaved
        (Layout(1, 2, 1), "Et|t|t|||L", "interleaved"),  # six, two of them empty
        (Layout(2, 2, 2), "E|tt|t|L", "zbv"),
        (Layout(1, 4, 1), "E|t|||t|t||L", "zbv"),  # the inner ranks hold a layer in one chunk of two
    ],
    ids=str,
)
def test_stages_of_a_layout_string(
    pool: WorkerPool, layout: Layout, stages: str, schedule: str | None
) -> None:
    model = replace(GPT2 if schedule else LLAMA, num_layers=3)
    config = cases.make_config(model, layout, Options(2, pipeline_schedule=schedule))
    config = replace(config, parallel=replace(config.parallel, pipeline_model_parallel_layout=stages))
    assert validate(config, layout.ranks) == []
    check_against(
        model, layout, [results[0] for results in pool.run(layout.ranks, train_three_steps, layout, [config])]
    )


def test_a_layout_string_for_the_stages_of_a_table(pool: WorkerPool) -> None:
    layout, model = Layout(1, 2, 2), replace(GPT2, num_layers=3)
    assert random_table(2, stages_of_a_table(2), 4).num_stages == 3
    config = cases.make_config(model, layout, Options(2))
    parallel = replace(
        config.parallel, pipeline_schedule_csv=table_file(2, 4), pipeline_model_parallel_layout="E|ttt|L"
    )
    config = replace(config, parallel=parallel)
    assert validate(config, layout.ranks) == []
    check_against(
        model, layout, [results[0] for results in pool.run(layout.ranks, train_three_steps, layout, [config])]
    )
