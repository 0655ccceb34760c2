"""The FLOPs formula against published throughput."""

from __future__ import annotations

import pytest

from megalite.config import ModelConfig
from megalite.training.flops import flops_per_token


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=ffn,
        swiglu=True,
        seq_length=8192,
        max_position_embeddings=8192,
        vocab_size=128256,
    )


# tokens/s a GPU published by NVIDIA for Llama 3, and what Megatron-LM's present formula makes of them
def test_matches_megatron_on_llama_3_8b() -> None:
    assert 13812 * flops_per_token(_llama(32, 4096, 32, 14336)) / 1e12 == pytest.approx(710.9, abs=0.1)


def test_six_per_weight_plus_causal_attention() -> None:
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        seq_length=16,
        max_position_embeddings=16,
        vocab_size=128,
    )
    weights = 2 * (4 * 8 * 8 + 2 * 8 * 32) + 8 * 128
    assert flops_per_token(model) == 6 * weights + 6 * 2 * 8 * 16


def test_the_head_is_counted_over_the_padded_vocabulary() -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        seq_length=16,
        max_position_embeddings=16,
        vocab_size=100,
    )
    assert flops_per_token(model, 2) - flops_per_token(model, 1) == 6 * 8 * 128
