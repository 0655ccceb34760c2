"""Names and shapes of all parameters, written down once more and independently of the product."""

from __future__ import annotations

from math import prod

from megalite.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def global_shapes(model: ModelConfig) -> Shapes:
    hidden, vocabulary = model.hidden_size, model.vocab_size
    shapes: Shapes = {"embedding.tokens.weight": (vocabulary, hidden)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.positions.weight"] = (model.max_position_embeddings, hidden)
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    shapes |= {f"final_norm.{name}": shape for name, shape in norm_shapes(model).items()}
    if model.untie_embeddings_and_output_weights:
        shapes["head.weight"] = (vocabulary, hidden)
    return shapes


def block_shapes(model: ModelConfig) -> Shapes:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    fused = (
        model.num_query_groups,
        model.num_attention_heads // model.num_query_groups + 2,
        model.kv_channels,
    )
    up, wide = ("mlp.gate_up", (2, ffn)) if model.swiglu else ("mlp.up", (ffn,))
    shapes: Shapes = {
        "attention.qkv.weight": (*fused, hidden),
        "attention.proj.weight": (hidden, model.num_attention_heads * model.kv_channels),
        f"{up}.weight": (*wide, hidden),
        "mlp.down.weight": (hidden, ffn),
    }
    if model.add_bias_linear:
        shapes |= {"attention.proj.bias": (hidden,), f"{up}.bias": wide, "mlp.down.bias": (hidden,)}
    if model.add_bias_linear or model.add_qkv_bias:
        shapes["attention.qkv.bias"] = fused
    for norm in ("attention_norm", "mlp_norm"):
        shapes |= {f"{norm}.{name}": shape for name, shape in norm_shapes(model).items()}
    return shapes


def norm_shapes(model: ModelConfig) -> Shapes:
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return dict.fromkeys(kinds, (model.hidden_size,))


def number_of_parameters(model: ModelConfig) -> int:
    return sum(prod(shape) for shape in global_shapes(model).values())
