"""Number formats and the fp16 loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import FP32_LARGEST, FP32_SMALLEST, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Types of weights, gradients and optimizer state; the latter are fp64 for fp64 weights."""

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
    use_precision_aware_optimizer: bool = setting(
        False,
        "Let the next five flags choose the optimizer's number formats. Alone, with bf16 weights, it saves 2 "
        "of 18 bytes a parameter and changes no number. Works without --use-distributed-optimizer too.",
    )
    main_grads_dtype: str = setting(
        "fp32",
        "Type in which gradients are accumulated and reduced. bf16 halves both, and loses small "
        "contributions when many micro-batches or ranks are summed: keep fp32 unless memory decides.",
        choices=("fp32", "bf16"),
    )
    main_params_dtype: str = setting(
        "fp32",
        "Type of the master weights.",
        choices=("fp32",),
        elsewhere={"fp16": "fp32 beside bf16 weights takes no more, by --store-param-remainders;"},
    )
    store_param_remainders: bool = setting(
        True,
        "With --use-precision-aware-optimizer and bf16 weights: keep of each fp32 master weight only the 16 "
        "bits that the bf16 weight lacks. Bit-exact, 2 bytes a parameter instead of 4.",
    )
    exp_avg_dtype: str = setting(
        "fp32",
        "Type in which Adam's first moment is kept, rounded to nearest; computed in fp32. bf16 is usual "
        "where memory is short.",
        choices=("fp32", "bf16"),
        elsewhere={"fp16": "bf16 takes as much and cannot overflow;", "fp8": "bf16 is the narrowest;"},
    )
    exp_avg_sq_dtype: str = setting(
        "fp32",
        "Type in which Adam's second moment is kept. In bf16 it cannot follow slower changes than 1/256 a "
        "step: only with --adam-beta2 of 0.99 or below.",
        choices=("fp32", "bf16"),
        elsewhere={"fp16": "bf16 takes as much and cannot overflow;", "fp8": "bf16 is the narrowest;"},
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
