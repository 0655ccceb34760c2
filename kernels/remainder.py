"""An fp32 master weight as its bf16 weight and the 16 bits below it, exactly.

The weight is the master rounded to the nearest bf16, ties away from zero: the upper half of the bits, one
more where the lower half is 0x8000 or above. The lower half is stored beside it, and its own upper bit tells
whether the weight was rounded up. Ties to even could not be undone: 65,537 masters would share an even
weight. So that every form of the master gives the same weights, all of them round bf16 weights in this way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC0


def round_to(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of `dtype` for an fp32 `master`, nearest: in bf16 ties away from zero, else to even."""
    return split(master)[0] if dtype == torch.bfloat16 else master.to(dtype)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 to bf16 weights and int16 remainders of its shape. A NaN stays one, its payload is lost."""
    bits = master.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    nan = master.isnan()
    return high.masked_fill(nan, _NAN).view(torch.bfloat16), bits.to(torch.int16).masked_fill(nan, 0)


def join(weights: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master that `split` took apart."""
    low = remainder.to(torch.int32) & 0xFFFF
    high = weights.view(torch.int16).to(torch.int32) - (low >> 15)
    return ((high << 16) | low).view(torch.float32)
