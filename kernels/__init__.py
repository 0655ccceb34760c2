"""The fused operations of a training step; each module holds one, beside its plain-torch reference."""

from __future__ import annotations

from megalite.kernels.cross_entropy import cross_entropy_reference, vocab_parallel_cross_entropy
from megalite.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from megalite.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from megalite.kernels.rope import rope, rope_reference
from megalite.kernels.rotary import Llama3Scaling, YarnScaling, rotary_table
from megalite.kernels.swiglu import swiglu, swiglu_pair, swiglu_reference

__all__ = [
    "Llama3Scaling",
    "YarnScaling",
    "add_rms_norm",
    "add_rms_norm_reference",
    "cross_entropy_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "rotary_table",
    "swiglu",
    "swiglu_pair",
    "swiglu_reference",
    "vocab_parallel_cross_entropy",
]
