"""A checkpoint of one layout goes on under another, key/value heads being replicated in some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import load, save
from megalite.config import Config, ModelConfig
from megalite.training.step import Trainer
from tests.matrix import cases
from tests.matrix.batches import microbatches
from tests.matrix.cases import LEARNING_RATES, MODELS, STEPS, Layout, Options
from tests.matrix.gather import LocalBlock, assemble
from tests.matrix.job import randomize, topologies, weights_of
from tests.matrix.test_layouts import TOLERANCE, reference
from tests.pool import WorkerPool
from tests.reference.compare import differences

LAYOUTS = (Layout(4, 1, 1), Layout(), Layout(2, 2, 1), Layout(8, 1, 1))
VARIANTS = ("llama-tied", "mixed")  # 1 and 2 key/value heads


def one_step(layout: Layout, configs: list[Config], folder: str, step: int) -> list[list[LocalBlock]]:
    """Load what the step before saved, if there was one; train a step; save. Returns the weights."""
    results = []
    for number, (config, topology) in enumerate(zip(configs, topologies(layout, configs), strict=True)):
        directory = f"{folder}/{number}"
        trainer = Trainer(config, topology)
        if step:
            trainer.optimizer.load_scalars(load(directory, trainer.blocks(), step)["optimizer"])
            trainer.optimizer.copy_weights_to_master()
        else:
            randomize(trainer)
        mine = microbatches(step, layout, topology.dp.rank, config.batch.micro_batch_size)
        trainer.train_step(mine, LEARNING_RATES[step])
        save(directory, step + 1, trainer.blocks(), {"optimizer": trainer.optimizer.scalars()})
        results.append(weights_of(trainer))
    return results


def models() -> list[ModelConfig]:
    return [MODELS[variant] for variant in VARIANTS]


@pytest.mark.parametrize("first", range(2), ids=["shared-first", "whole-first"])
def test_three_steps_on_three_layouts_are_three_steps_on_one(
    pool: WorkerPool, tmp_path: Path, first: int
) -> None:
    for step, layout in enumerate(LAYOUTS[first : first + STEPS]):
        configs = [cases.make_config(model, layout, Options(4)) for model in models()]
        ranks = pool.run(layout.ranks, one_step, layout, configs, str(tmp_path), step)
        for number, model in enumerate(models()):
            weights = assemble([results[number] for results in ranks])
            where = f"{VARIANTS[number]} after step {step} on {layout}"
            assert not differences(weights, reference(model)[step].weights, TOLERANCE), where
