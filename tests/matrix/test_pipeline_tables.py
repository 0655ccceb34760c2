"""Tables with stages on any rank and actions in any order give the numbers of the reference too."""

from __future__ import annotations

import pytest

from megalite.pipeline.checker import check
from tests.matrix.cases import Layout, Options
from tests.matrix.combinations import Combination
from tests.matrix.job import train_three_steps
from tests.matrix.tables import random_table, stages_of_a_table
from tests.matrix.test_layouts import check_combination
from tests.pool import WorkerPool


@pytest.mark.parametrize(
    ("layout", "variant", "micro_batch_size"),
    [
        (Layout(1, 1, 1), "gpt2-untied", 1),  # what a rank hands to itself is taken in any order
        (Layout(1, 1, 2), "gpt2", 2),
        (Layout(1, 2, 1), "llama", 2),
        (Layout(2, 2, 2), "llama-tied", 2),
        (Layout(1, 4, 1), "gpt2", 4),  # tied: the first and the last stage are on neither end
        (Layout(1, 4, 2), "gpt2-untied", 2),
    ],
    ids=str,
)
def test_a_table_from_a_file(pool: WorkerPool, layout: Layout, variant: str, micro_batch_size: int) -> None:
    one = Combination(variant, layout, Options(micro_batch_size, pipeline_table=True))
    assert one.is_allowed
    ranks = pool.run(layout.ranks, train_three_steps, layout, [one.config])
    check_combination(one, [results[0] for results in ranks])


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_the_tables_are_sound(pp: int, microbatches: int) -> None:
    check(random_table(pp, stages_of_a_table(pp), microbatches))


def test_the_tied_table_has_its_ends_where_no_schedule_has_them() -> None:
    assert random_table(4, 7, 4).ends not in ((0, 3), (0, 0))
