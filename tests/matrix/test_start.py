"""Where every layout starts from: the same weights, in the number that the formula gives."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig, parameter_count
from tests.matrix import cases
from tests.matrix.cases import MODELS, Layout
from tests.matrix.gather import assemble
from tests.matrix.job import initial_weights
from tests.matrix.shapes import global_shapes, number_of_parameters
from tests.pool import WorkerPool

LAYOUTS = [Layout(2, 2, 2), Layout(8, 1, 1), Layout(1, 8, 1), Layout(4, 2, 1)]
EIGHT_LAYERS = [replace(model, num_layers=8) for model in MODELS.values()]


@functools.cache
def single_process() -> list[dict[str, Tensor]]:
    configs = [cases.make_config(model, Layout(), cases.Options(1)) for model in EIGHT_LAYERS]
    return [assemble([blocks]) for blocks in initial_weights(Layout(), configs)]


@pytest.mark.parametrize(
    ("layout", "stage"),
    [*((layout, 0) for layout in LAYOUTS), (Layout(1, 1, 2), 1), (Layout(2, 1, 2), 3)],
    ids=str,
)
def test_initial_weights_are_the_same_bits_on_every_layout(
    pool: WorkerPool, layout: Layout, stage: int
) -> None:
    options = cases.Options(1, zero_stage=stage)
    configs = [cases.make_config(model, layout, options) for model in EIGHT_LAYERS]
    ranks = pool.run(layout.ranks, initial_weights, layout, configs)
    for number, expected in enumerate(single_process()):
        weights = assemble([results[number] for results in ranks])
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("number", range(len(MODELS)), ids=list(MODELS))
def test_initial_weights_follow_their_distributions(number: int) -> None:
    model = EIGHT_LAYERS[number]
    weights = single_process()[number]
    assert {name: tuple(value.shape) for name, value in weights.items()} == global_shapes(model)
    for name, value in weights.items():
        if name.endswith("norm.weight"):
            assert (value == (0 if model.apply_layernorm_1p else 1)).all()
        elif name.endswith(".bias"):
            assert (value == 0).all()
        else:
            narrow = name.endswith(("proj.weight", "down.weight"))
            std = model.init_method_std / math.sqrt(2 * model.num_layers) if narrow else model.init_method_std
            samples = value.numel()
            assert value.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * samples)), name
            assert value.mean().item() == pytest.approx(0, abs=4.5 * std / math.sqrt(samples)), name


def test_no_two_weights_start_alike() -> None:
    """Every row of every random matrix is drawn anew, over all parameters and models' layers."""
    for weights in single_process():
        rows = [
            tuple(row.tolist())
            for name, value in weights.items()
            if not name.endswith(("norm.weight", ".bias"))
            for row in value.flatten(0, -2)[:, :8]
        ]
        assert len(set(rows)) == len(rows)


def test_another_seed_gives_other_weights() -> None:
    config = cases.make_config(MODELS["llama"], Layout(), cases.Options(1))
    other = replace(config, run=replace(config.run, seed=config.run.seed + 1))
    first, second = (assemble([blocks]) for blocks in initial_weights(Layout(), [config, other]))
    assert not torch.equal(first["layers.0.mlp.down.weight"], second["layers.0.mlp.down.weight"])


@pytest.mark.parametrize("variant", MODELS)
def test_parameter_count_is_the_formula(variant: str) -> None:
    assert parameter_count(MODELS[variant]) == number_of_parameters(MODELS[variant])


def test_parameter_count_of_known_models() -> None:
    """GPT-2 small and Llama 3 8B, as their authors' checkpoints hold them."""
    gpt2 = ModelConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=1024,
        max_position_embeddings=1024,
        vocab_size=50257,
    )
    assert parameter_count(gpt2) == 124_439_808
    llama = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=14336,
        seq_length=8192,
        max_position_embeddings=8192,
        vocab_size=128256,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    assert parameter_count(llama) == 8_030_261_248
