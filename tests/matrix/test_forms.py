"""A checkpoint of one form of the optimizer's state goes on in another, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.checkpoint import load, save
from megalite.config import Config, PrecisionConfig
from megalite.parallel.topology import build_topology
from megalite.training.step import Trainer
from tests.matrix import cases
from tests.matrix.batches import microbatches
from tests.matrix.cases import LEARNING_RATES, LLAMA, Layout, Options
from tests.matrix.gather import LocalBlock
from tests.matrix.job import randomize, weights_of
from tests.pool import WorkerPool

LAYOUT = Layout(2, 1, 2)
MASTER = PrecisionConfig(params_dtype="bfloat16")
REMAINDER = replace(MASTER, use_precision_aware_optimizer=True)


def make_config(precision: PrecisionConfig, offload_fraction: float | None = None) -> Config:
    options = Options(4, zero_stage=1, offload_fraction=offload_fraction)
    return replace(cases.make_config(LLAMA, LAYOUT, options), precision=precision)


FORMS = {
    "master": make_config(MASTER),
    "remainder": make_config(REMAINDER),
    "host": make_config(REMAINDER, 0.4),
}


def a_run_of_each(configs: Sequence[Config], folder: str) -> list[LocalBlock]:
    """A step with each, by a process that loads what the one before saved. Returns the weights."""
    topology = build_topology(LAYOUT.tensor, LAYOUT.pipeline, torch.device("cpu"))
    for step, config in enumerate(configs):
        trainer = Trainer(config, topology)
        if step:
            with trainer.loading() as blocks:
                state = load(folder, blocks, step)
            trainer.optimizer.load_scalars(state["optimizer"])
        else:
            randomize(trainer)
        mine = microbatches(step, LAYOUT, topology.dp.rank, config.batch.micro_batch_size)
        trainer.train_step(mine, LEARNING_RATES[step])
        save(folder, step + 1, trainer.blocks(), {"optimizer": trainer.optimizer.scalars()})
    return weights_of(trainer)


@pytest.mark.parametrize("order", [("master", "remainder", "host"), ("host", "master", "remainder")], ids=str)
def test_a_change_of_form_changes_no_bit(pool: WorkerPool, tmp_path: Path, order: Sequence[str]) -> None:
    straight, changed = (
        pool.run(
            LAYOUT.ranks, a_run_of_each, [FORMS[name] for name in names], str(tmp_path / "-".join(names))
        )
        for names in (("master",) * 3, order)
    )
    for before, after in zip(straight, changed, strict=True):
        for one, other in zip(before, after, strict=True):
            assert one.name == other.name
            assert np.array_equal(one.values, other.values), one.name
