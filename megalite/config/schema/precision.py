"""Number formats and the fp16 loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import FP32_LARGEST, FP32_SMALLEST, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Type of the weights; gradients, master weights and moments are fp32 (fp64 for fp64 weights)."""

    params_dtype: str = setting(
        "float32",
        "Type of weights and activations; --bf16 and --fp16 are short for it. Megatron's default fp32 is "
        "slow on GPUs: use --bf16. float64 exists for tests.",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    gradient_accumulation_fusion: bool = setting(
        True,
        "Add weight gradients of linear layers to the fp32 main gradient inside the matrix product, where "
        "the device's library can: no rounding to bf16 in between, no tensor for it. Off: product, then sum, "
        "as on a CPU.",
    )
    gradient_accumulation_fusion_impl: str = setting(
        "native",
        "What does so. native: torch's cuBLAS product with fp32 output. apex: NVIDIA apex's kernel, which "
        "Megatron needs for this; it must have been built with --cuda_ext.",
        choices=("native", "apex"),
    )
    loss_scale: float | None = setting(
        None,
        "Constant loss scale, a power of two. Default: dynamic with fp16, 1 with the other types.",
        minimum=FP32_SMALLEST,
        maximum=FP32_LARGEST,
    )
    initial_loss_scale: float = setting(
        2.0**32,
        "First dynamic fp16 loss scale. Megatron's 2^32 skips some 16 steps at the start; 65536 skips few.",
        minimum=FP32_SMALLEST,
        maximum=FP32_LARGEST,
    )
    min_loss_scale: float = setting(
        1.0, "Smallest dynamic loss scale.", minimum=FP32_SMALLEST, maximum=FP32_LARGEST
    )
    loss_scale_window: int = setting(
        1000, "Steps without overflow after which the dynamic loss scale doubles.", minimum=1
    )
    hysteresis: int = setting(
        2, "Overflows that are tolerated before the dynamic loss scale is halved.", minimum=1
    )
