"""What is kept between a forward pass and its backward, and what is made again."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting
from megalite.config.schema.model import MOST_LAYERS

# Parts of a block, and the head's logits, that can be dropped after use and made again in backward.
PARTS = ("core_attn", "norm", "mlp_act", "rope", "mlp", "attn", "logits")
DEFAULT_PARTS = ("core_attn",)


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Activation memory: recompute in the backward pass, or wait in host memory."""

    recompute_granularity: str | None = setting(
        None,
        "What backward makes again instead of keeping. full: whole layers, of which only the input stays, "
        "for about a third more compute. selective: the parts of --recompute-modules. Default: nothing.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = setting(
        None,
        "With --recompute-granularity full. uniform: every layer, in groups of --recompute-num-layers that "
        "keep one input each. block: only the first --recompute-num-layers of each pipeline chunk.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = setting(
        None,
        "Layers in a group (uniform) or recomputed in each pipeline chunk (block). Uniform with 1 keeps "
        "2 x seq x batch x hidden bytes a layer in bf16; larger groups keep less and hold more in backward.",
        minimum=1,
        maximum=MOST_LAYERS,
    )
    recompute_modules: tuple[str, ...] = setting(
        DEFAULT_PARTS,
        "Parts that --recompute-granularity selective makes again, separated by spaces. norm, mlp_act (GELU "
        "or SwiGLU) and rope cost next to nothing and save most: try them first. core_attn: attention's "
        "scores and result. mlp, attn: the whole half of a layer. logits: final norm, head and loss. "
        "Megatron's default, core_attn, saves little here: attention never stores its scores.",
    )
    recompute_budget: float | None = setting(
        None,
        "Share of the activation bytes that may be kept, e.g. 0.5: chooses the parts for selective "
        "recompute that reach it with the least extra compute, and prints them. Megatron has no such flag.",
        above=0,
        maximum=1,
    )
    distribute_saved_activations: bool = setting(
        False,
        "With full recompute: cut the kept inputs over the tensor-parallel ranks and gather them in "
        "backward. With --sequence-parallel they are cut already.",
    )
    cpu_offloading_num_layers: int = setting(
        0,
        "First layers of each pipeline chunk whose kept activations wait in host memory; on a GPU the "
        "copies run beside the compute. Worth it where PCIe keeps up: long sequences, large layers.",
        minimum=0,
        maximum=MOST_LAYERS,
    )
