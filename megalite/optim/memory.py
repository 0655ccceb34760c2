"""Bytes that training keeps for each parameter, activations aside."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalite.config import PrecisionConfig
from megalite.optim.state import narrow_dtype
from megalite.parallel.flat import HeldElements, main_grad_dtype


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes a parameter, by purpose.

    `master` is 0 where the weights themselves are the master; `moments` are both of Adam's.
    """

    weights: int
    main_grads: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """What the optimizer itself adds: master and moments."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        return self.weights + self.main_grads + self.optimizer

    def held(self, elements: HeldElements) -> int:
        """Bytes of what a rank holds."""
        return (
            self.weights * elements.weights
            + self.main_grads * elements.grads
            + self.optimizer * elements.updated
        )

    def formula(self, dp: int, zero_stage: int) -> str:
        """For a reader: what is shared out has its divisor; "2 + 4 + 12/8 = 7.5"."""
        shares = (
            (self.weights, zero_stage > 2),
            (self.main_grads, zero_stage > 1),
            (self.optimizer, zero_stage > 0),
        )
        parts = [f"{size}/{dp}" if shared and dp > 1 else str(size) for size, shared in shares]
        total = sum(size / dp if shared else size for size, shared in shares)
        return f"{' + '.join(parts)} = {total:.4g}"


def bytes_per_parameter(precision: PrecisionConfig) -> BytesPerParameter:
    """fp32: 4 + 4 + 0 + 8 = 16; bf16 and fp16: 2 + 4 + 4 + 8 = 18; fp64: 8 + 8 + 0 + 16 = 32.

    bf16 with remainders instead of a master: 2 + 4 + 2 + 8 = 16, with bf16 moments 12, with bf16 gradients
    too 10.
    """
    weights: torch.dtype = getattr(torch, precision.params_dtype)
    main = main_grad_dtype(weights)
    moments = (precision.exp_avg_dtype, precision.exp_avg_sq_dtype)
    by_remainder = precision.use_precision_aware_optimizer and precision.store_param_remainders
    master = 2 if by_remainder and weights == torch.bfloat16 else main.itemsize
    return BytesPerParameter(
        weights=weights.itemsize,
        main_grads=(narrow_dtype(precision.main_grads_dtype) or main).itemsize,
        master=0 if weights == main else master,
        moments=sum((narrow_dtype(name) or main).itemsize for name in moments),
    )
