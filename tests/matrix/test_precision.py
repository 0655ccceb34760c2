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
AWARE = PrecisionConfig(params_dtype="bfloat16", use_precision_aware_optimizer=True)
STEPS = 12


def make_config(
    precision: PrecisionConfig,
    layout: Layout = LAYOUT,
    offload_fraction: float | None = None,
    zero_stage: int = 0,
    reduce_in_bf16: bool = False,
) -> Config:
    options = Options(
        4,
        layout.tensor > 1,
        overlap_grad_reduce=True,
        offload_fraction=offload_fraction,
        zero_stage=zero_stage,
        overlap_param_gather=zero_stage > 0,
    )
    config = replace(cases.make_config(LLAMA, layout, options), precision=precision)
    return replace(config, parallel=replace(config.parallel, grad_reduce_in_bf16=reduce_in_bf16))


def loss_of(ranks: list[list[Outcomes]], number: int) -> list[float]:
    """Losses of one run, summed over the data-parallel ranks of the last stage."""
    last = [results[number] for rank, results in enumerate(ranks) if LAYOUT.coordinates(rank)[:2] == (0, 1)]
    return [sum(parts) for parts in zip(*(one.losses for one in last), strict=True)]


def test_half_precision_follows_single_precision(pool: WorkerPool) -> None:
    configs = [
        make_config(PrecisionConfig(params_dtype="float32")),
        make_config(PrecisionConfig(params_dtype="bfloat16")),
        *(
            make_config(PrecisionConfig(params_dtype="bfloat16"), zero_stage=stage, reduce_in_bf16=True)
            for stage in (0, 1)
        ),
        make_config(PrecisionConfig(params_dtype="float16", initial_loss_scale=2.0**8)),
        make_config(replace(AWARE, main_grads_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    ]
    ranks = pool.run(LAYOUT.ranks, outcomes, LAYOUT, configs, STEPS)
    exact = loss_of(ranks, 0)
    assert exact[-1] < exact[0] - 0.1
    for number in range(1, len(configs)):
        assert loss_of(ranks, number) == pytest.approx(exact, abs=0.02)
    assert loss_of(ranks, 2) != loss_of(ranks, 1), "gradients that travelled in bf16 are rounded"


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(2, 1, 2)], ids=str)
def test_remainders_and_offloading_change_no_bit_of_a_bf16_run(pool: WorkerPool, layout: Layout) -> None:
    """The loss of every step, the last of which depends on all weights after the step before."""
    configs = [
        make_config(PrecisionConfig(params_dtype="bfloat16"), layout),
        make_config(AWARE, layout),
        make_config(AWARE, layout, offload_fraction=0.4),
    ]
    for separate, joined, offloaded in pool.run(layout.ranks, outcomes, layout, configs, STEPS):
        assert all(separate.moved)
        assert joined == separate
        assert offloaded == separate


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_overflow_is_skipped_on_all_ranks_alike(pool: WorkerPool, zero_stage: int) -> None:
    """A scale too large for fp16: steps are skipped and the scale halved until one fits, everywhere alike."""
    precision = PrecisionConfig(params_dtype="float16", initial_loss_scale=2.0**22, hysteresis=1)
    ranks = pool.run(LAYOUT.ranks, outcomes, LAYOUT, [make_config(precision, zero_stage=zero_stage)], STEPS)
    (first,), *others = ranks
    for (other,) in others:
        assert other.skipped == first.skipped
        assert other.loss_scales == first.loss_scales
    assert first.skipped[0]
    assert not first.skipped[-1]
    assert min(first.loss_scales) == 2.0 ** (22 - sum(first.skipped))
    assert first.moved == [not skipped for skipped in first.skipped], "a skipped step must change nothing"
