"""In fp32, from the product's own initial weights, any two layouts print the same losses."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config
from tests.matrix import cases
from tests.matrix.cases import MODELS, Layout, Options
from tests.matrix.job import printed_losses
from tests.pool import WorkerPool

STEPS = 20
VARIANTS = ("gpt2", "llama")
CASES = [
    (Layout(2, 1, 1), Options(8, sequence_parallel=True)),
    (Layout(1, 2, 1), Options(2)),
    (Layout(1, 1, 2), Options(4, overlap_grad_reduce=True, ddp_bucket_size=2000)),
    (Layout(2, 2, 1), Options(16)),
    (Layout(2, 2, 2), Options(4, sequence_parallel=True, overlap_grad_reduce=True)),
    (Layout(1, 4, 2), Options(4)),
    (Layout(4, 1, 1), Options(16, sequence_parallel=True)),
]


def make_configs(layout: Layout, options: Options) -> list[Config]:
    configs = [
        cases.make_config(replace(MODELS[name], num_layers=4, ffn_hidden_size=32), layout, options, "float32")
        for name in VARIANTS
    ]
    return [replace(config, optimizer=replace(config.optimizer, lr=1e-3)) for config in configs]


@functools.cache
def single_process() -> list[list[float]]:
    return printed_losses(Layout(), make_configs(Layout(), Options(4)), STEPS)


@pytest.mark.parametrize(("layout", "options"), CASES, ids=[str(layout) for layout, _ in CASES])
def test_losses_of_twenty_steps_agree(pool: WorkerPool, layout: Layout, options: Options) -> None:
    ranks = pool.run(layout.ranks, printed_losses, layout, make_configs(layout, options), STEPS)
    for number, expected in enumerate(single_process()):
        parts = [
            results[number]
            for rank, results in enumerate(ranks)
            if layout.coordinates(rank)[:2] == (0, layout.pipeline - 1)
        ]
        losses = [sum(step) for step in zip(*parts, strict=True)]
        assert losses == pytest.approx(expected, abs=1e-5)
        assert losses[-1] < losses[0] - 0.1, "the model must have learnt something for this to mean anything"
