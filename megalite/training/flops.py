"""Floating-point operations of a training step, counted on the model, not on the hardware."""

from __future__ import annotations

from megalite.config import ModelConfig, padded_vocab_size

CONVENTION = "causal attention counted half, recompute not counted"


def flops_per_token(model: ModelConfig, tensor_parallel: int = 1) -> float:
    """FLOPs of forward and backward for one token of a full sequence.

    Megatron-LM's formula: 6 per weight of every matrix product (2 a multiply-add, 3 for forward and the two
    gradients), the head over the padded vocabulary, and 6 * layers * heads * head_dim * seq for causal
    attention, that is half of the full square. Tables published before 2025 mostly count the full square.
    """
    hidden, width = model.hidden_size, model.num_attention_heads * model.kv_channels
    keys_and_values = 2 * model.num_query_groups * model.kv_channels
    mlp_matrices = 3 if model.swiglu else 2
    layer = (
        hidden * (width + keys_and_values) + width * hidden + mlp_matrices * hidden * model.ffn_hidden_size
    )
    head = hidden * padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, tensor_parallel)
    attention = 6 * model.num_layers * width * model.seq_length
    return 6.0 * (model.num_layers * layer + head) + attention
