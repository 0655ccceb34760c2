"""Where even the bits must agree: a run repeated, and options that only change when things happen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.matrix import cases
from tests.matrix.cases import LLAMA, RECOMPUTE, Layout, Options
from tests.matrix.job import Trained, train_three_steps
from tests.pool import WorkerPool


def same_bits(first: Trained, second: Trained) -> bool:
    return (
        first.losses == second.losses
        and first.grad_norms == second.grad_norms
        and all(
            np.array_equal(a.values, b.values) for a, b in zip(first.weights, second.weights, strict=True)
        )
    )


def test_two_runs_with_one_seed_are_the_same_to_the_bit(pool: WorkerPool) -> None:
    layout = Layout(2, 2, 2)
    options = Options(2, sequence_parallel=True, overlap_grad_reduce=True, ddp_bucket_size=2000)
    config = cases.make_config(LLAMA, layout, options, "float32")
    ranks = pool.run(layout.ranks, train_three_steps, layout, [config, config])
    assert all(same_bits(first, second) for first, second in ranks)
    once_more = pool.run(layout.ranks, train_three_steps, layout, [config])
    assert all(same_bits(ranks[rank][0], again) for rank, (again,) in enumerate(once_more))


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(1, 2, 2), Layout(1, 1, 4)], ids=str)
def test_overlap_changes_no_bit(pool: WorkerPool, layout: Layout) -> None:
    sizes = (None, 2000, 1)
    variants = [
        Options(2, overlap_grad_reduce=on, ddp_bucket_size=size) for size in sizes for on in (False, True)
    ]
    configs = [cases.make_config(LLAMA, layout, options, "float32") for options in variants]
    for results in pool.run(layout.ranks, train_three_steps, layout, configs):
        assert all(same_bits(off, on) for off, on in zip(results[::2], results[1::2], strict=True))


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 1, 4)], ids=str)
def test_weights_that_arrive_during_the_next_forward_are_the_same_bits(
    pool: WorkerPool, layout: Layout
) -> None:
    variants = [
        Options(2, ddp_bucket_size=2000, zero_stage=1, overlap_param_gather=on) for on in (False, True)
    ]
    configs = [cases.make_config(LLAMA, layout, options, "float32") for options in variants]
    for at_once, later in pool.run(layout.ranks, train_three_steps, layout, configs):
        assert same_bits(at_once, later)


@pytest.mark.parametrize(
    ("layout", "schedule", "sequence_parallel"),
    [(Layout(2, 2, 1), "zb-h1", False), (Layout(2, 1, 1), None, True)],
    ids=str,
)
def test_recompute_changes_no_bit(
    pool: WorkerPool, layout: Layout, schedule: str | None, sequence_parallel: bool
) -> None:
    """Weight gradients that a schedule puts off included."""
    plain = Options(
        4,
        sequence_parallel=sequence_parallel,
        pipeline_schedule=schedule,
        dropout=True,
    )
    modes = RECOMPUTE[::2] if sequence_parallel else RECOMPUTE[1::2]
    variants = [replace(plain, recompute=mode, offloaded_layers=n % 2) for n, mode in enumerate(modes)]
    model = cases.model_for("llama", layout, plain)
    configs = [cases.make_config(model, layout, one, "float32") for one in (plain, *variants)]
    for first, *rest in pool.run(layout.ranks, train_three_steps, layout, configs):
        for mode, one in zip(modes, rest, strict=True):
            assert same_bits(first, one), mode
