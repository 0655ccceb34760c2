"""A run whose global batch grows, stopped in the ramp and resumed on another layout and schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config import parse
from megalite.parallel.topology import build_topology
from megalite.training.loop import run
from tests.pool import WorkerPool

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--lr 1e-2 --log-interval 1 --eval-iters 1 --eval-interval 4 --mock-data --params-dtype float64 "
    "--hidden-dropout 0.1 --no-memory-report"
)
RAMP = "--train-samples 64 --rampup-batch-size 4 4 24 --global-batch-size 16 --lr-warmup-samples 30"


def train(argv: list[str], world_size: int) -> None:
    """One rank of a run."""
    config = parse(argv, world_size)
    parallel = config.parallel
    sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    run(config, build_topology(*sizes, torch.device("cpu")))


def records(pool: WorkerPool, ranks: int, metrics: Path, *flags: str) -> list[dict[str, Any]]:
    argv = [*MODEL.split(), *RAMP.split(), "--metrics-file", str(metrics), *" ".join(flags).split()]
    pool.run(ranks, train, argv, ranks)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_the_numbers_are_those_of_one_run_on_one_layout(pool: WorkerPool, tmp_path: Path) -> None:
    """Micro-batches a step: 2, 2, 4, 6, 8 and 8; half of them with dp 2."""
    whole = records(pool, 1, tmp_path / "whole.jsonl")
    parts, folder = tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-schedule"
    records(pool, 4, parts, pipeline, "interleaved --exit-interval 3 --save", folder)
    resumed = records(pool, 2, parts, pipeline, "zbv --load", folder, "--save", folder)
    steps = [record for record in whole if "lm_loss" in record]
    assert [record["global_batch_size"] for record in steps] == [4, 4, 8, 12, 16, 16]
    assert [record["consumed_samples"] for record in steps] == [4, 8, 16, 28, 44, 60]
    assert [record["train_iters"] for record in steps] == [6] * 6
    assert [record["iteration"] for record in whole if "valid_loss" in record] == [4, 6]
    assert len(resumed) == len(whole)
    for once, again in zip(whole, resumed, strict=True):
        for name in ("iteration", "consumed_samples", "global_batch_size", "learning_rate"):
            assert once.get(name) == again.get(name)
        for name in {"lm_loss", "grad_norm", "valid_loss", "test_loss"} & once.keys():
            assert again[name] == pytest.approx(once[name], abs=1e-10), (name, once["iteration"])
