"""Half precision on a layout with all axes: near the fp32 run, and every rank agrees on what was skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config, PrecisionConfig
from tests.matrix import cases
from tests.matrix.cases import LLAMA, Layout, Options
from tests.matrix.job import Outcomes, outcomes
from tests.pool import WorkerPool

LAYOUT = Layout(2, 2, 2)
STEPS = 12


def make_config(precision: PrecisionConfig) -> Config:
    options = Options(2, sequence_parallel=True, overlap_grad_reduce=True)
    return replace(cases.make_config(LLAMA, LAYOUT, options), precision=precision)


def loss_of(ranks: list[list[Outcomes]], number: int) -> list[float]:
    """Losses of one run, summed over the data-parallel ranks of the last stage."""
    last = [results[number] for rank, results in enumerate(ranks) if LAYOUT.coordinates(rank)[:2] == (0, 1)]
    return [sum(parts) for parts in zip(*(one.losses for one in last), strict=True)]


def test_half_precision_follows_single_precision(pool: WorkerPool) -> None:
    configs = [
        make_config(PrecisionConfig(params_dtype="float32")),
        make_config(PrecisionConfig(params_dtype="bfloat16")),
        make_config(PrecisionConfig(params_dtype="float16", initial_loss_scale=2.0**8)),
    ]
    ranks = pool.run(LAYOUT.ranks, outcomes, LAYOUT, configs, STEPS)
    exact = loss_of(ranks, 0)
    assert exact[-1] < exact[0] - 0.1
    assert loss_of(ranks, 1) == pytest.approx(exact, abs=0.02)
    assert loss_of(ranks, 2) == pytest.approx(exact, abs=0.02)


def test_overflow_is_skipped_on_all_ranks_alike(pool: WorkerPool) -> None:
    """A scale too large for fp16: steps are skipped and the scale halved until one fits, everywhere alike."""
    precision = PrecisionConfig(params_dtype="float16", initial_loss_scale=2.0**22, hysteresis=1)
    ranks = pool.run(LAYOUT.ranks, outcomes, LAYOUT, [make_config(precision)], STEPS)
    (first,), *others = ranks
    for (other,) in others:
        assert other.skipped == first.skipped
        assert other.loss_scales == first.loss_scales
    assert first.skipped[0]
    assert not first.skipped[-1]
    assert min(first.loss_scales) == 2.0 ** (22 - sum(first.skipped))
    assert first.moved == [not skipped for skipped in first.skipped], "a skipped step must change nothing"
