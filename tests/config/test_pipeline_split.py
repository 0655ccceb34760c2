"""Which layers each stage gets, and which schedule the flags select."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    pipeline_schedule,
    split_layers,
    stage_layers,
    virtual_stages,
)


@pytest.mark.parametrize(
    ("layers", "stages", "options", "expected"),
    [
        (8, 4, {}, [2, 2, 2, 2]),
        (8, 1, {}, [8]),
        (10, 4, {"first": 2, "last": 2}, [2, 3, 3, 2]),
        (7, 4, {"last": 1}, [2, 2, 2, 1]),
        (6, 2, {"first": 1}, [1, 5]),
        (6, 2, {"first": 2, "last": 4}, [2, 4]),
        (7, 4, {"embedding_is_layer": True}, [1, 2, 2, 2]),
        (6, 4, {"embedding_is_layer": True, "loss_is_layer": True}, [1, 2, 2, 1]),
        (2, 4, {"embedding_is_layer": True, "loss_is_layer": True}, [0, 1, 1, 0]),
    ],
)
def test_layers_are_shared_out(
    layers: int, stages: int, options: dict[str, int], expected: list[int]
) -> None:
    split = split_layers(layers, stages, **options)  # type: ignore[arg-type]
    assert [len(part) for part in split] == expected
    assert [layer for part in split for layer in part] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "options"),
    [(30, 4, {}), (6, 2, {"first": 2, "last": 5}), (7, 4, {"first": 2}), (4, 2, {"first": 5})],
)
def test_no_layer_is_lost(layers: int, stages: int, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{layers} layers do not come out even over {stages} stages"):
        split_layers(layers, stages, **options)  # type: ignore[arg-type]


def _config(**parallel: object) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=16,
            hidden_size=8,
            num_attention_heads=2,
            seq_length=8,
            max_position_embeddings=8,
            vocab_size=9,
        ),
        batch=BatchConfig(micro_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-3),
        parallel=replace(ParallelConfig(pipeline_model_parallel_size=4), **parallel),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("parallel", "schedule", "chunks"),
    [
        ({}, "1f1b", 1),
        ({"pipeline_schedule": "gpipe"}, "gpipe", 1),
        ({"pipeline_schedule": "zb-h1"}, "zb-h1", 1),
        ({"pipeline_schedule": "zbv"}, "zbv", 2),
        ({"pipeline_schedule": "interleaved"}, "interleaved", 2),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "interleaved", 4),
        ({"num_virtual_stages_per_pipeline_rank": 4}, "interleaved", 4),
        ({"num_virtual_stages_per_pipeline_rank": 4, "pipeline_schedule": "interleaved"}, "interleaved", 4),
    ],
)
def test_flags_select_the_schedule(parallel: dict[str, object], schedule: str, chunks: int) -> None:
    config = _config(**parallel)
    assert (pipeline_schedule(config), virtual_stages(config)) == (schedule, chunks)
    assert [len(part) for part in stage_layers(config)] == [16 // (4 * chunks)] * 4 * chunks
