"""Options that meet by chance must not change a number either.

    python -m pytest tests/matrix/test_combinations.py --matrix-rounds 1 --matrix-seed 5

goes through every layout, variant and schedule with all other options drawn; `make test-matrix` does so too.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.matrix import cases
from tests.matrix.cases import LAYOUTS, MODELS, Layout, Options
from tests.matrix.combinations import Combination, domains, one_for_each_layout, one_for_each_schedule
from tests.matrix.job import train_three_steps
from tests.matrix.test_layouts import check_combination
from tests.pool import WorkerPool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn" not in metafunc.fixturenames:
        return
    rounds, seed = (metafunc.config.getoption(name) for name in ("--matrix-rounds", "--matrix-seed"))
    drawn = (
        [one for number in range(rounds) for one in one_for_each_schedule(f"{seed}.{number}")]
        if rounds
        else list(one_for_each_layout(str(seed)))
    )
    metafunc.parametrize("drawn", drawn, ids=str)


def test_a_drawn_combination_gives_the_numbers_of_the_reference(pool: WorkerPool, drawn: Combination) -> None:
    ranks = pool.run(drawn.layout.ranks, train_three_steps, drawn.layout, [drawn.config])
    check_combination(drawn, [results[0] for results in ranks])


def test_every_value_in_the_rotation_is_drawn() -> None:
    """Within one round."""
    found: dict[str, set[object]] = {field.name: set() for field in fields(Options)}
    triples = set()
    for one in one_for_each_schedule("0"):
        triples.add((one.layout, one.variant, one.options.pipeline_schedule))
        for name, values in found.items():
            values.add(getattr(one.options, name))
    assert {name: sorted(values, key=str) for name, values in found.items()} == domains()
    pipelines = sum(layout.pipeline > 1 for layout in LAYOUTS)
    assert len(triples) == len(MODELS) * (pipelines * (len(cases.SCHEDULES) + 1) + len(LAYOUTS) - pipelines)


def test_a_seed_draws_the_same_again_and_another_seed_does_not() -> None:
    first, again, other = (list(one_for_each_layout(seed)) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    assert [one.layout for one in first] == LAYOUTS


@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        (Layout(1, 2, 1), Options(2, sequence_parallel=True)),
        (Layout(2, 1, 1), Options(2, pipeline_schedule="interleaved")),
        (Layout(2, 1, 4), Options(8)),
        (Layout(2, 1, 2), Options(2, by_document=True, dropout=True)),
    ],
    ids=str,
)
def test_what_the_rules_refuse_is_not_drawn(layout: Layout, chosen: Options) -> None:
    assert not Combination("gpt2", layout, chosen).is_allowed
    assert Combination("gpt2", layout, Options(2)).is_allowed


def test_a_combination_names_what_is_needed_to_train_it() -> None:
    one = Combination("llama", Layout(2, 1, 2), Options(4, overlap_grad_reduce=True, ddp_bucket_size=1))
    assert str(one) == "tp2-pp1-dp2,llama,micro_batch_size=4,overlap_grad_reduce=True,ddp_bucket_size=1"
