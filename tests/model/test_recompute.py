"""Which layers and parts are recomputed, and that no bit changes by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import ActivationConfig
from megalite.model.recompute import layer_groups, selected_parts
from tests.matrix import cases
from tests.matrix.cases import Layout, Options
from tests.matrix.job import Trained, train_three_steps


def full(method: str, number: int, **more: Any) -> ActivationConfig:
    return ActivationConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=number, **more
    )


def selective(parts: str, **more: Any) -> ActivationConfig:
    return ActivationConfig(recompute_granularity="selective", recompute_modules=tuple(parts.split()), **more)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        (ActivationConfig(), [([0], False), ([1], False), ([2], False)]),
        (selective("norm"), [([0], False), ([1], False), ([2], False)]),
        (full("uniform", 1), [([0], True), ([1], True), ([2], True)]),
        (full("uniform", 2), [([0, 1], True), ([2], True)]),
        (full("uniform", 3), [([0, 1, 2], True)]),
        (full("block", 2), [([0], True), ([1], True), ([2], False)]),
    ],
    ids=["nothing", "selective", "uniform 1", "uniform 2", "uniform 3", "block 2"],
)
def test_layers_of_a_chunk_are_grouped(
    settings: ActivationConfig, groups: list[tuple[list[int], bool]]
) -> None:
    assert [(list(places), recomputed) for places, recomputed in layer_groups(settings, 3)] == groups


def test_parts_are_those_of_selective_recompute_alone() -> None:
    assert selected_parts(selective("norm mlp_act")) == {"norm", "mlp_act"}
    assert selected_parts(ActivationConfig()) == selected_parts(full("uniform", 1)) == frozenset()
    assert selected_parts(ActivationConfig(recompute_granularity="selective")) == {"core_attn"}


MODES = [
    full("uniform", 1),
    full("uniform", 2, cpu_offloading_num_layers=2),
    full("block", 1),
    *(selective(part) for part in ("core_attn", "norm", "mlp_act", "rope", "mlp", "attn", "logits")),
    selective("core_attn norm mlp_act rope logits", cpu_offloading_num_layers=1),
    selective("norm attn mlp logits"),
    ActivationConfig(cpu_offloading_num_layers=2),
]


def same_bits(first: Trained, second: Trained) -> bool:
    gradients = (zip(*steps, strict=True) for steps in zip(first.gradients, second.gradients, strict=True))
    return first.losses == second.losses and all(
        np.array_equal(a.values, b.values) for step in gradients for a, b in step
    )


@pytest.mark.parametrize(
    ("variant", "options", "dtype"),
    [
        ("gpt2", Options(8, dropout=True), "float64"),
        ("llama", Options(8, by_document=True), "bfloat16"),
        ("mixed", Options(16), "float32"),
    ],
    ids=["gpt2", "llama", "mixed"],
)
def test_recompute_and_offload_change_no_bit(variant: str, options: Options, dtype: str) -> None:
    torch.set_num_threads(1)
    layout = Layout()
    model = cases.model_for(variant, layout, options)
    plain = cases.make_config(model, layout, options, dtype)
    trained = train_three_steps(layout, [plain, *(replace(plain, activations=mode) for mode in MODES)])
    for mode, one in zip(MODES, trained[1:], strict=True):
        assert same_bits(trained[0], one), mode
