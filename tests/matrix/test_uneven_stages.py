"""Stages of different numbers of layers give the numbers of the reference too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.matrix import cases
from tests.matrix.cases import GPT2, Layout, Options
from tests.matrix.job import train_three_steps
from tests.matrix.test_layouts import check_against
from tests.pool import WorkerPool

MODEL = replace(GPT2, num_layers=3)


@pytest.mark.parametrize(
    ("layout", "uneven"),
    [
        (Layout(1, 2, 1), {"decoder_first_pipeline_num_layers": 1}),
        (Layout(2, 2, 1), {"decoder_last_pipeline_num_layers": 1}),
        (Layout(1, 2, 2), {"account_for_embedding_in_pipeline_split": True}),
        (Layout(1, 4, 1), {"account_for_loss_in_pipeline_split": True}),
        (Layout(1, 4, 1), {"account_for_loss_in_pipeline_split": True, "pipeline_schedule": "zb-h1"}),
    ],
    ids=str,
)
def test_uneven_stages(pool: WorkerPool, layout: Layout, uneven: dict[str, object]) -> None:
    config = cases.make_config(MODEL, layout, Options(micro_batch_size=2))
    config = replace(config, parallel=replace(config.parallel, **uneven))  # type: ignore[arg-type]
    check_against(
        MODEL, layout, [results[0] for results in pool.run(layout.ranks, train_three_steps, layout, [config])]
    )
