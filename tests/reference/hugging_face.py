"""Hugging Face's models as independent truth: their weights or gradients under the product's global names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.reference.gpt import Architecture, part


class NoSinglePrecision(TorchFunctionMode):
    """Keeps code in fp64 that casts to fp32 on the way (norms, softmax, rotary angles in Transformers)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Gives every parameter random values, biases and norm weights too: no mistake can hide in them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
            if "norm" in name.lower() or ".ln_" in name:
                parameter.add_(1.0)


def parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in found.items() if gradient is None]
    if missing:
        raise ValueError(f"no gradient reached {missing}")
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def gpt2_architecture(config: Any) -> Architecture:
    return Architecture(num_layers=config.n_layer, norm_epsilon=config.layer_norm_epsilon)


def gpt2_to_global(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """`state` of GPT2LMHeadModel; its Conv1D weights are (in, out)."""
    heads = config.n_head
    out = {
        "embedding.tokens.weight": state["transformer.wte.weight"],
        "embedding.positions.weight": state["transformer.wpe.weight"],
        **renamed(part(state, "transformer.ln_f."), "final_norm."),
        **renamed(part(state, "lm_head."), "head."),
    }
    for layer in range(config.n_layer):
        own, name = part(state, f"transformer.h.{layer}."), f"layers.{layer}."
        out |= renamed(part(own, "ln_1."), f"{name}attention_norm.") | renamed(
            part(own, "ln_2."), f"{name}mlp_norm."
        )
        for kind, turn in (("weight", Tensor.t), ("bias", Tensor.clone)):
            query, key, value = turn(own[f"attn.c_attn.{kind}"]).chunk(3, dim=0)
            out[f"{name}attention.qkv.{kind}"] = fused_qkv(query, key, value, heads, heads)
            out[f"{name}attention.proj.{kind}"] = turn(own[f"attn.c_proj.{kind}"])
            out[f"{name}mlp.up.{kind}"] = turn(own[f"mlp.c_fc.{kind}"])
            out[f"{name}mlp.down.{kind}"] = turn(own[f"mlp.c_proj.{kind}"])
    return out


def llama_architecture(config: Any, *, interleaved: bool = False) -> Architecture:
    """`interleaved` for Ernie 4.5, which is Llama with neighbouring channels rotated as pairs."""
    return Architecture(
        num_layers=config.num_hidden_layers,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        swiglu=True,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        rotary_interleaved=interleaved,
    )


def llama_to_global(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """`state` of LlamaForCausalLM, or of a model with the same names."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    out = {
        "embedding.tokens.weight": state["model.embed_tokens.weight"],
        **renamed(part(state, "model.norm."), "final_norm."),
        **renamed(part(state, "lm_head."), "head."),
    }
    for layer in range(config.num_hidden_layers):
        own, name = part(state, f"model.layers.{layer}."), f"layers.{layer}."
        out |= renamed(part(own, "input_layernorm."), f"{name}attention_norm.")
        out |= renamed(part(own, "post_attention_layernorm."), f"{name}mlp_norm.")
        out |= renamed(part(own, "self_attn.o_proj."), f"{name}attention.proj.")
        out |= renamed(part(own, "mlp.down_proj."), f"{name}mlp.down.")
        for kind in part(own, "self_attn.q_proj."):
            query, key, value = (own[f"self_attn.{one}_proj.{kind}"] for one in "qkv")
            out[f"{name}attention.qkv.{kind}"] = fused_qkv(query, key, value, heads, groups)
        for kind in part(own, "mlp.gate_proj."):
            out[f"{name}mlp.gate_up.{kind}"] = torch.stack(
                (own[f"mlp.gate_proj.{kind}"], own[f"mlp.up_proj.{kind}"])
            )
    return out


def gpt_neox_architecture(config: Any) -> Architecture:
    return Architecture(
        num_layers=config.num_hidden_layers,
        norm_epsilon=config.layer_norm_eps,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        rotary_percent=config.rope_parameters["partial_rotary_factor"],
    )


def gpt_neox_to_global(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """`state` of GPTNeoXForCausalLM without parallel residual; its fused block is (heads, 3, ...)."""
    heads = config.num_attention_heads
    out = {
        "embedding.tokens.weight": state["gpt_neox.embed_in.weight"],
        **renamed(part(state, "gpt_neox.final_layer_norm."), "final_norm."),
        **renamed(part(state, "embed_out." if "embed_out.weight" in state else "lm_head."), "head."),
    }
    for layer in range(config.num_hidden_layers):
        own, name = part(state, f"gpt_neox.layers.{layer}."), f"layers.{layer}."
        out |= renamed(part(own, "input_layernorm."), f"{name}attention_norm.")
        out |= renamed(part(own, "post_attention_layernorm."), f"{name}mlp_norm.")
        out |= renamed(part(own, "attention.dense."), f"{name}attention.proj.")
        out |= renamed(part(own, "mlp.dense_h_to_4h."), f"{name}mlp.up.")
        out |= renamed(part(own, "mlp.dense_4h_to_h."), f"{name}mlp.down.")
        for kind, block in part(own, "attention.query_key_value.").items():
            out[f"{name}attention.qkv.{kind}"] = block.unflatten(0, (heads, 3, -1))
    return out


def renamed(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in weights.items()}


def fused_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """Query, key and value to one block (groups, heads / groups + 2, head_dim, ...).

    query: (heads * head_dim, ...); key, value: (groups * head_dim, ...).
    """
    queries = query.unflatten(0, (groups, heads // groups, -1))
    return torch.cat((queries, key.unflatten(0, (groups, 1, -1)), value.unflatten(0, (groups, 1, -1))), dim=1)
