"""What the transformer looks like, from GPT-2 style to Llama style."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import REQUIRED, setting
from megalite.limits import INT32_LARGEST

MOST_LAYERS, MOST_CHANNELS = 2**16, 2**20


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and flavour of the decoder. Derived sizes are filled in on construction: always integers."""

    num_layers: int = setting(
        REQUIRED,
        "Number of transformer blocks in the whole model (not a stage). Must be divisible by the pipeline "
        "size. 12 for GPT-2 small, 32 for an 8B model.",
        minimum=1,
        maximum=MOST_LAYERS,
    )
    hidden_size: int = setting(
        REQUIRED,
        "Width of the residual stream. A multiple of 128 runs fastest. 768 for GPT-2 small, 4096 for 8B.",
        minimum=1,
        maximum=MOST_CHANNELS,
    )
    num_attention_heads: int = setting(
        REQUIRED,
        "Query heads a block. Must be divisible by the tensor-parallel size. 12 for GPT-2 small, 32 for 8B.",
        minimum=1,
        maximum=MOST_CHANNELS,
    )
    group_query_attention: bool = setting(
        False,
        "Let several query heads share one key/value head (GQA). Megatron's trap: --num-query-groups is "
        "silently ignored without this flag; here giving only one of the two is an error.",
    )
    num_query_groups: int = setting(
        None,
        "Key/value heads a block; used with --group-query-attention. 8 is common. Trap kept from Megatron: "
        "with --group-query-attention and no value it is 1, which is multi-query attention. Without GQA: "
        "one a query head. With fewer than tensor-parallel ranks, ranks share a head and each holds it.",
        minimum=1,
        maximum=MOST_CHANNELS,
    )
    kv_channels: int = setting(
        None,
        "Size of one attention head. Default: hidden size / attention heads. 64 or 128 run fastest.",
        minimum=1,
        maximum=MOST_CHANNELS,
    )
    ffn_hidden_size: int = setting(
        None,
        "Width of the MLP. Default: 4 x hidden; with --swiglu int(4 x hidden x 2/3 / 64) x 64, which keeps "
        "the parameter count. Must be divisible by the tensor-parallel size.",
        minimum=1,
        maximum=16 * MOST_CHANNELS,
    )
    seq_length: int = setting(
        REQUIRED,
        "Tokens a training sample. 1024 to 8192 is usual; must not exceed the positions.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    max_position_embeddings: int = setting(
        REQUIRED,
        "Longest sequence that the model has positions for, >= --seq-length. With learned positions each "
        "costs hidden-size parameters; with rope it costs nothing.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    position_embedding_type: str = setting(
        "learned_absolute",
        "How the model knows token order: learned_absolute (GPT-2), rope (Llama, rotates queries and keys), "
        "yarn (rope stretched to a longer context, see --yarn-rotary-scaling-factor), or none. Megatron's "
        "default is GPT-2's; a Llama-style model needs --position-embedding-type rope.",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_base: float = setting(
        10000.0,
        "Base of the rotary frequencies. 10000 for Llama 2, 500000 for Llama 3; larger for longer contexts.",
        above=0,
    )
    rotary_percent: float = setting(
        1.0,
        "Share of each head that is rotated (rope), in (0, 1]. 1.0 for Llama, 0.25 for GPT-NeoX.",
        above=0,
        maximum=1,
    )
    rotary_interleaved: bool = setting(
        False,
        "Rotate neighbouring channels (GPT-J layout) instead of the two halves of a head (Llama layout).",
    )
    use_rope_scaling: bool = setting(
        False,
        "Stretch rope as Llama 3.1 does: channels that turn less than once in 8192 positions turn "
        "--rope-scaling-factor times slower, those that turn more than four times are kept, those between "
        "are blended. For continuing a model trained on 8192 tokens with longer ones.",
    )
    rope_scaling_factor: float = setting(
        8.0, "How much slower, with --use-rope-scaling. 8 in Llama 3.1, 32 in Llama 3.2.", minimum=1
    )
    yarn_rotary_scaling_factor: float = setting(
        None,
        "With --position-embedding-type yarn: new context length / the one first trained with. Slow channels "
        "turn so much slower, and cos and sin grow by 0.1 ln(factor) + 1.",
        minimum=1,
    )
    yarn_original_max_position_embeddings: int = setting(
        None,
        "With --position-embedding-type yarn: the context length that the model was first trained with.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    yarn_beta_fast: float = setting(
        32.0, "Channels that turn more often than this over the original context are kept (yarn).", above=0
    )
    yarn_beta_slow: float = setting(
        1.0,
        "Channels that turn less often than this over the original context are scaled fully (yarn).",
        above=0,
    )
    normalization: str = setting(
        "LayerNorm",
        "LayerNorm (GPT-2; mean and bias) or RMSNorm (Llama; cheaper, one weight).",
        choices=("LayerNorm", "RMSNorm"),
    )
    norm_epsilon: float = setting(
        1e-5, "Added to the variance inside a norm. 1e-5 is usual, 1e-6 in some Llamas.", above=0, below=1
    )
    apply_layernorm_1p: bool = setting(
        False,
        "Norm weights are stored as their distance from 1 and start at 0, for LayerNorm and RMSNorm: near 1 "
        "a bf16 weight moves in steps of 0.008, near 0 in far smaller ones. Not for weights of models that "
        "were trained without it.",
    )
    swiglu: bool = setting(
        False,
        "Gated MLP, silu(gate) * up (Llama), instead of GELU. Adds a third matrix; see --ffn-hidden-size.",
    )
    add_bias_linear: bool = setting(
        True,
        "Biases in the linear layers (GPT-2). Llama-style models have none: --disable-bias-linear.",
        off_flags=("--disable-bias-linear",),
    )
    add_qkv_bias: bool = setting(
        False, "A bias in the query/key/value projection only (Qwen 2); implied by biases everywhere."
    )
    untie_embeddings_and_output_weights: bool = setting(
        False,
        "Give the output layer weights of its own (Llama). Megatron's default ties them to the embedding "
        "(GPT-2): fewer parameters, and one all-reduce between first and last stage a step.",
    )
    vocab_size: int = setting(
        None,
        "Tokens in the vocabulary, before padding. Default: read from the tokenizer. Needed with "
        "NullTokenizer. May be larger than the tokenizer's, never smaller.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        "The embedding table is padded to a multiple of this x the tensor-parallel size; padded rows stay "
        "zero, are masked out of the loss and are not saved. 128 keeps the matrices aligned.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    init_method_std: float = setting(
        0.02,
        "Standard deviation of the initial weights; attention and MLP output layers use it / sqrt(2 x "
        "layers). 0.02 is GPT-2's; wide models (>= 4096) train better with 0.006 to 0.01.",
        minimum=0,
    )
    hidden_dropout: float = setting(
        0.0,
        "Dropout on the residual branches. Differs from Megatron, whose 0.1 nobody wants for large-corpus "
        "pretraining and most scripts switch off.",
        minimum=0,
        below=1,
    )
    attention_dropout: float = setting(
        0.0,
        "Dropout on the attention weights. Differs from Megatron (0.1), as for --hidden-dropout.",
        minimum=0,
        below=1,
    )

    @property
    def has_rotary_positions(self) -> bool:
        """Whether queries and keys are rotated."""
        return self.position_embedding_type in ("rope", "yarn")

    def __post_init__(self) -> None:
        derived = {
            "kv_channels": self.hidden_size // max(self.num_attention_heads, 1),
            "num_query_groups": 1 if self.group_query_attention else self.num_attention_heads,
            "ffn_hidden_size": int(4 * self.hidden_size * 2 / 3 / 64) * 64
            if self.swiglu
            else 4 * self.hidden_size,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
