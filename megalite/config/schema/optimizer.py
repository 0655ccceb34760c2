"""AdamW and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import FP32_LARGEST, REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, and a schedule with lengths in steps (--train-iters) or in samples (--train-samples)."""

    optimizer: str = setting(
        "adam",
        "adam is AdamW: decoupled weight decay and bias correction.",
        choices=("adam",),
        elsewhere={"sgd": "AdamW is the only optimizer;"},
    )
    lr: float = setting(
        REQUIRED,
        "Peak learning rate, after warm-up. 6e-4 for 125M, 3e-4 for 1 to 8B, 1.5e-4 for 70B.",
        above=0,
    )
    min_lr: float = setting(
        0.0,
        "Learning rate at the end of the decay. Megatron's default 0 wastes the last steps; a tenth of --lr "
        "is usual.",
        minimum=0,
    )
    lr_decay_style: str = setting(
        "linear",
        "Shape between peak and minimum: cosine is the usual choice (Megatron's default is linear); "
        "constant; inverse-square-root; WSD holds the peak and decays in the last --lr-wsd-decay-iters.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = setting(
        None, "Steps over which the rate decays. Default: the whole run.", minimum=1
    )
    lr_decay_samples: int | None = setting(
        None, "Samples over which the rate decays. Default: the whole run.", minimum=1
    )
    lr_warmup_fraction: float | None = setting(
        None,
        "Linear warm-up over this share of the decay length, in [0, 1). 0.001 to 0.01 is usual.",
        minimum=0,
        below=1,
    )
    lr_warmup_iters: int = setting(
        0,
        "Linear warm-up over so many steps. Megatron's default 0 means none; 500 to 2000 is usual.",
        minimum=0,
    )
    lr_warmup_samples: int = setting(0, "Linear warm-up over so many samples.", minimum=0)
    lr_warmup_init: float = setting(0.0, "Learning rate at the first sample of the warm-up.", minimum=0)
    lr_wsd_decay_style: str = setting(
        "exponential",
        "Shape of the last part of a WSD schedule.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = setting(
        None, "Steps of the final decay of a WSD schedule. 10 % of the run is usual.", minimum=1
    )
    lr_wsd_decay_samples: int | None = setting(
        None, "Samples of the final decay of a WSD schedule.", minimum=1
    )
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay; biases and norm weights are exempt. Megatron's 0.01 is low: 0.1 is usual.",
        minimum=0,
    )
    clip_grad: float = setting(
        1.0,
        "Gradients are scaled down to this global norm. 1.0 is usual; 0 switches clipping off.",
        minimum=0,
    )
    adam_beta1: float = setting(0.9, "Decay of the first moment.", minimum=0, below=1)
    adam_beta2: float = setting(
        0.999,
        "Decay of the second moment. Megatron's 0.999 is slow for LLMs: 0.95 is usual.",
        minimum=0,
        below=1,
    )
    adam_eps: float = setting(
        1e-8, "Added to the root of the second moment. 1e-8.", above=0, maximum=FP32_LARGEST
    )
    optimizer_impl: str = setting(
        "auto",
        "What computes the update. auto: megalite's own kernel, Triton on a GPU, C++ on a CPU. torch: plain "
        "torch operators, slow. apex: the fused Adam of NVIDIA's apex, GPUs only, to compare with.",
        choices=("auto", "torch", "apex"),
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "Keep master weights and moments in host memory and update them there, by the C++ AdamW, in pieces "
        "that overlap with the copies. Saves up to 12 bytes a parameter on the GPU; the update becomes as "
        "fast as the host's memory.",
    )
    optimizer_offload_fraction: float = setting(
        1.0,
        "Share of the parameters whose optimizer state --optimizer-cpu-offload moves.",
        minimum=0,
        maximum=1,
    )
