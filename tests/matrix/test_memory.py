"""What a rank holds is what the formula says, to the byte."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from megalite.config import Config, PrecisionConfig
from megalite.optim.memory import bytes_per_parameter
from megalite.parallel.topology import build_topology
from megalite.training.step import Trainer
from tests.matrix import cases
from tests.matrix.batches import microbatches
from tests.matrix.cases import GPT2, Layout, Options
from tests.pool import WorkerPool


def living_bytes() -> int:
    """All memory that any tensor of this process refers to, each piece once; scalars left out."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.numel() > 1]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def held_after_steps(layout: Layout, config: Config) -> tuple[int, int]:
    """Bytes that a trainer holds after two steps, counted and by formula."""
    topology = build_topology(layout.tensor, layout.pipeline, torch.device("cpu"))
    before = living_bytes()
    trainer = Trainer(config, topology)
    for step in range(2):
        trainer.train_step(microbatches(step, layout, topology.dp.rank, config.batch.micro_batch_size), 1e-2)
    trainer.buckets.wait_for_weights()
    counted = living_bytes() - before
    return counted, bytes_per_parameter(trainer.config.precision).held(trainer.buckets.held_elements)


FORMS = {
    "bfloat16": PrecisionConfig(params_dtype="bfloat16"),
    "float32": PrecisionConfig(params_dtype="float32"),
    "narrow": PrecisionConfig(
        params_dtype="bfloat16",
        use_precision_aware_optimizer=True,
        main_grads_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (Layout(1, 1, 2), 0),
        (Layout(1, 1, 4), 1),
        (Layout(2, 2, 2), 1),
        (Layout(1, 1, 4), 2),
        (Layout(2, 1, 2), 3),
    ],
)
def test_held_bytes_are_those_of_the_formula(pool: WorkerPool, layout: Layout, stage: int, form: str) -> None:
    options = Options(2, ddp_bucket_size=5000, zero_stage=stage, overlap_grad_reduce=stage > 1)
    config = replace(cases.make_config(GPT2, layout, options), precision=FORMS[form])
    for counted, formula in pool.run(layout.ranks, held_after_steps, layout, config):
        assert counted == formula
