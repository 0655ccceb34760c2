"""Weights and optimizer state go to any other layout and stage of sharding, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import load, save
from megalite.config import Config
from megalite.parallel.topology import build_topology
from megalite.training.step import Trainer
from tests.matrix import cases
from tests.matrix.batches import microbatches
from tests.matrix.cases import GPT2, LLAMA, Layout, Options
from tests.matrix.gather import LocalBlock, assemble
from tests.pool import WorkerPool


def blocks_of(trainer: Trainer) -> list[LocalBlock]:
    """What the rank would write into a checkpoint."""
    return [
        LocalBlock(
            block.name,
            tuple(block.global_shape),
            tuple(block.offsets),
            block.tensor.detach().to(torch.float64).numpy().copy(),
            counted=False,
        )
        for block in trainer.blocks()
    ]


def train_and_save(layout: Layout, config: Config, folder: str) -> list[LocalBlock]:
    topology = build_topology(layout.tensor, layout.pipeline, torch.device("cpu"))
    trainer = Trainer(config, topology)
    for step in range(2):
        mine = microbatches(step, layout, topology.dp.rank, config.batch.micro_batch_size)
        trainer.train_step(mine, 1e-2)
    save(folder, 2, trainer.blocks(), {})
    return blocks_of(trainer)


def load_there(layout: Layout, config: Config, folder: str) -> list[LocalBlock]:
    trainer = Trainer(config, build_topology(layout.tensor, layout.pipeline, torch.device("cpu")))
    with trainer.loading() as blocks:
        load(folder, blocks)
    return blocks_of(trainer)


@pytest.mark.parametrize(
    ("model", "before", "stage_before", "after", "stage_after"),
    [
        (GPT2, Layout(1, 1, 2), 1, Layout(1, 1, 1), 0),
        (LLAMA, Layout(2, 1, 1), 0, Layout(1, 1, 4), 1),
        (LLAMA, Layout(1, 2, 2), 1, Layout(2, 1, 2), 1),
        (GPT2, Layout(2, 1, 4), 2, Layout(1, 2, 1), 0),
        (LLAMA, Layout(2, 1, 2), 3, Layout(1, 2, 2), 1),
        (GPT2, Layout(2, 1, 1), 0, Layout(1, 1, 4), 3),
    ],
    ids=str,
)
def test_a_checkpoint_belongs_to_no_layout_and_stage(
    pool: WorkerPool,
    tmp_path: Path,
    model: Any,
    before: Layout,
    stage_before: int,
    after: Layout,
    stage_after: int,
) -> None:
    def config(layout: Layout, stage: int) -> Config:
        options = Options(2, ddp_bucket_size=5000, zero_stage=stage, overlap_param_gather=stage == 1)
        return cases.make_config(model, layout, options, "bfloat16")

    saved = assemble(
        pool.run(before.ranks, train_and_save, before, config(before, stage_before), str(tmp_path))
    )
    loaded = assemble(pool.run(after.ranks, load_there, after, config(after, stage_after), str(tmp_path)))
    assert {name.split(".")[1] for name in saved if name.startswith("optimizer")} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert all(values.abs().sum() > 0 for name, values in saved.items() if not name.endswith("bias"))
