"""What is minimised, and how it is computed from the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy with its regularisers. Validation always reports the plain cross-entropy."""

    label_smoothing: float = setting(
        0.0,
        "Share of each target's weight that is spread evenly over the vocabulary, in [0, 1). Part of the "
        "printed training loss, not of the validation loss. 0 for pretraining; 0.1 in translation.",
        minimum=0,
        below=1,
    )
    z_loss_coeff: float = setting(
        0.0,
        "Adds this x log(sum exp(logits))^2 to each token's loss, which keeps logits from drifting in long "
        "bf16 runs. Part of the printed training loss, not of the validation loss. 1e-4 (PaLM) is usual.",
        minimum=0,
    )
    cross_entropy_loss_fusion: bool = setting(
        False,
        "Fuse the loss as --cross-entropy-fusion-impl says. The kernels of native run with and without it.",
    )
    cross_entropy_fusion_impl: str = setting(
        "native",
        "native: fused cross-entropy on the logits of a micro-batch. linear: output layer and cross-entropy "
        "together, a chunk of tokens at a time, so that never are all logits held: the largest tensor of a "
        "model with a large vocabulary is gone, at the same number of matrix products. Needs "
        "--cross-entropy-loss-fusion.",
        choices=("native", "linear"),
        elsewhere={"te": "Transformer Engine is not used; native runs everywhere, linear saves memory;"},
    )
    cross_entropy_chunk_mib: float = setting(
        512.0,
        "Memory in MiB for the logits of one chunk with --cross-entropy-fusion-impl linear. Smaller saves "
        "memory; below some 2048 tokens a chunk the matrix products become slower.",
        above=0,
    )
