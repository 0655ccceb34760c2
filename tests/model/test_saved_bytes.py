"""Counted bytes of activations against sums of the tensors that a layer needs, written down by hand."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megalite.config import ActivationConfig, Config, ConfigErrors, ModelConfig
from megalite.config import replace as with_settings
from megalite.model.activation_table import (
    GPT,
    LLAMA,
    Row,
    published_per_sbh,
    reference_config,
    rows_of,
)
from megalite.model.recompute_budget import Choice, cheapest, measured_choices, within_budget
from megalite.model.saved_bytes import _FakeStage, activation_bytes, layer_bytes

LAYOUTS = [(1, False), (2, False), (2, True), (4, True)]


def by_hand(model: ModelConfig, mode: str, tp: int, split: bool, batch: int) -> int:
    """Bytes of a layer in bf16: each kept tensor as channels a token."""
    tokens = model.seq_length * batch
    shards = tp if split else 1
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads
    keys = model.num_query_groups * model.kv_channels
    statistics = 2 * 2  # of each norm an fp32 number, or on a CPU LayerNorm's two in 16 bits
    whole = {"input": hidden, "norms": 2 * hidden, "middle": hidden, "statistics": statistics}
    cut = {
        "qkv": hidden + 2 * keys,
        "rotated": hidden + keys if model.has_rotary_positions else 0,
        "context": hidden + 2 * heads,  # and an fp32 number a head: the logarithm of its softmax's sum
        "inner": ffn * (2 if model.swiglu else 1),
        "activated": ffn,
    }
    dropped = {
        "norm": {"norms"},
        "mlp_act": {"activated"},
        "rope": {"rotated"},
        "core_attn": {"context"},
        "attn": {"qkv", "rotated", "context"},
        "mlp": {"inner", "activated"},
    }
    if mode.startswith("full"):
        return 2 * tokens * hidden // (tp if "distributed" in mode else shards)
    gone = set().union(*(dropped[part] for part in mode.split() if part != "nothing"))
    kept_whole = sum(size for name, size in whole.items() if name not in gone)
    kept_cut = sum(size for name, size in cut.items() if name not in gone)
    return 2 * tokens * kept_whole // shards + 2 * tokens * kept_cut // tp


@functools.cache
def table(model: ModelConfig, tp: int, split: bool, batch: int = 1) -> dict[str, Row]:
    config = with_settings(
        reference_config(model, tp, split), micro_batch_size=batch, global_batch_size=batch
    )
    return {row.mode: row for row in rows_of(config)}


@pytest.mark.parametrize(("tp", "split"), LAYOUTS)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_layer_keeps_what_it_needs_to_the_byte(model: ModelConfig, tp: int, split: bool) -> None:
    found = table(model, tp, split)
    assert {mode: row.kept for mode, row in found.items()} == {
        mode: by_hand(model, mode, tp, split, batch=1) for mode in found
    }
    assert len(found) == 9 + 2 * model.swiglu + (tp > 1 and not split)


def test_several_samples_keep_as_much_each() -> None:
    model = replace(LLAMA, seq_length=64, hidden_size=64, num_attention_heads=8, num_query_groups=2)
    model = replace(model, kv_channels=8, ffn_hidden_size=96)
    for mode, row in table(model, 2, True, batch=3).items():
        assert row.kept == by_hand(model, mode, 2, True, batch=3), mode


@pytest.mark.parametrize(("tp", "split"), LAYOUTS)
def test_what_recompute_promises(tp: int, split: bool) -> None:
    """At most 0.6 of the published bytes for less than 3 % more FLOPs; full keeps the input alone."""
    rows = table(GPT, tp, split)
    without_recompute = published_per_sbh("nothing", tp, split)
    assert without_recompute is not None
    assert rows["norm mlp_act"].per_sbh <= 0.6 * without_recompute
    assert rows["norm mlp_act"].extra_flops < 0.03
    assert rows["nothing"].per_sbh <= without_recompute
    assert rows["full"].per_sbh == rows["full"].published == 2 / (tp if split else 1)
    assert 0.30 < rows["full"].extra_flops < 0.34


def test_a_llama_layer_keeps_at_most_six_tenths_for_less_than_three_percent() -> None:
    rows = table(replace(LLAMA, seq_length=2048), 4, True)
    cheap, cheaper = rows["norm mlp_act rope core_attn"], rows["norm mlp_act rope"]
    assert cheap.kept <= 0.6 * rows["nothing"].kept
    assert cheap.extra_flops < 0.03
    assert cheaper.kept <= 0.64 * rows["nothing"].kept
    assert cheaper.extra_flops < 0.001


SMALL = {
    "gpt": replace(GPT, num_query_groups=4),
    "llama": replace(LLAMA, num_query_groups=2),
}


def small(style: str, **settings: Any) -> Config:
    model = replace(
        SMALL[style],
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        kv_channels=16,
        ffn_hidden_size=96,
        seq_length=32,
        max_position_embeddings=32,
        vocab_size=96,
    )
    return with_settings(reference_config(model, 1, False), **settings)


MODES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cheap parts": {
        "recompute_granularity": "selective",
        "recompute_modules": ("norm", "mlp_act", "core_attn", "logits"),
    },
    "halves": {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp", "attn")},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "offload": {"cpu_offloading_num_layers": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("style", SMALL)
def test_tensors_without_memory_count_as_those_with(style: str, mode: str) -> None:
    config = small(style, **MODES[mode])
    real = _FakeStage(config, 2, config.activations)
    found = activation_bytes(config)
    layers, head = real.layers(), real.head()
    assert sum(one.kept for one in found.layers) == layers.kept
    assert sum(one.on_host for one in found.layers) == layers.on_host
    assert sum(one.flops for one in found.layers) == layers.flops
    assert found.layers[0].keeps_input == layers.keeps_input
    assert (found.head.kept, found.head.flops) == (head.kept, head.flops)
    assert found.embedding == real.embedding()
    assert found.shared == real.shared()
    if mode == "full":
        assert (found.layers[0].backward_peak, found.layers[0].forward_peak) == (
            layers.backward_peak,
            layers.forward_peak,
        )


@pytest.mark.parametrize("style", SMALL)
def test_without_recompute_the_count_is_that_of_the_tensors_autograd_saves(style: str) -> None:
    """Another way to count: autograd is asked for what it saves."""
    config = small(style)
    stage = _FakeStage(config, 1, ActivationConfig())
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {each.untyped_storage().data_ptr() for each in stage.stage.parameters()}
    sequences = stage.stage.sequences(stage.batch)
    shared = {each.untyped_storage().data_ptr() for each in sequences.rotation or ()}
    x = torch.zeros(stage.hidden_shape, dtype=stage.dtype, requires_grad=True).clone()
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = stage.stage.through_layers(x, sequences)
    kept = sum(size for place, size in storages.items() if place not in parameters | shared)
    assert kept == layer_bytes(config).kept
    del output


def test_an_offloaded_layer_keeps_its_bytes_on_the_host() -> None:
    plain, offloaded = layer_bytes(small("gpt")), layer_bytes(small("gpt", cpu_offloading_num_layers=2))
    assert offloaded.kept + offloaded.on_host == plain.kept
    assert not offloaded.keeps_input
    assert offloaded.kept < 0.03 * plain.kept  # row statistics are not worth a copy


def test_extra_flops_are_those_of_the_layers_that_are_recomputed() -> None:
    plain = activation_bytes(small("llama"))
    assert [one.extra_flops for one in (*plain.layers, plain.head)] == [0, 0, 0]
    settings = {**MODES["full"], "recompute_method": "block", "recompute_num_layers": 1}
    half = activation_bytes(small("llama", **settings))
    assert [one.extra_flops > 0 for one in (*half.layers, half.head)] == [True, False, False]
    assert half.layers[0].kept < half.layers[1].kept == plain.layers[1].kept


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return measured_choices(small("llama"))


def test_every_set_of_parts_is_measured(choices: list[Choice]) -> None:
    assert len(choices) == len({frozenset(choice.parts) for choice in choices}) == 60
    assert choices[0] == Choice((), choices[0].kept, 1.0, 0.0)
    assert all(choice.share < 1 and choice.extra_flops > 0 for choice in choices[1:])


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.5, 0.35])
def test_a_budget_chooses_the_cheapest_set_that_meets_it(choices: list[Choice], budget: float) -> None:
    chosen = cheapest(choices, budget)
    assert chosen.share <= budget
    assert all(one.share > budget for one in choices if one.extra_flops < chosen.extra_flops)
    assert bool(chosen.parts) == (budget < 1)


def test_a_budget_that_cannot_be_met_names_the_lowest_share(choices: list[Choice]) -> None:
    least = min(choice.share for choice in choices)
    with pytest.raises(ConfigErrors) as found:
        cheapest(choices, 0.01)
    (error,) = found.value.errors
    assert f"the lowest reachable share is {least:.4f}" in str(error)
    assert cheapest(choices, float(error.suggestion.split("at least ")[1].split(",")[0])).share == least


def test_the_chosen_parts_are_configured(choices: list[Choice]) -> None:
    config, choice = within_budget(small("llama", recompute_budget=0.5))
    assert choice == cheapest(choices, 0.5)
    assert config.activations.recompute_modules == choice.parts
    assert config.activations.recompute_budget is None
    found = activation_bytes(config)
    assert choice.kept == sum(one.kept for one in (found.embedding, *found.layers, found.head))
    assert str(choice).startswith(f"recompute of {' '.join(choice.parts)}: keeps ")
    assert within_budget(small("llama")) == (small("llama"), None)


def test_a_budget_is_the_same_share_on_any_number_of_stages(choices: list[Choice]) -> None:
    _, choice = within_budget(small("llama", recompute_budget=0.5, pipeline_model_parallel_size=2))
    assert choice == cheapest(choices, 0.5)
