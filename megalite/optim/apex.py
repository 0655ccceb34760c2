"""The fused Adam of NVIDIA's apex on the same flat memory, to compare with."""

from __future__ import annotations

import torch

from megalite.kernels.flat import gaps
from megalite.kernels.remainder import round_to
from megalite.optim.state import FlatState


class ApexState(FlatState):
    """FlatState whose update is apex's, in the form that reads everything from the device.

    It multiplies the gradients by the scale in place, and knows no bf16 weights (apex#1728): they are
    rounded from the master in a pass of their own, 38 bytes a parameter in all instead of 30. fp32 moments,
    gradients and master only. Raises ImportError where NVIDIA's apex is not installed.
    """

    @torch.no_grad()
    def update(self, scalars: torch.Tensor, step: torch.Tensor) -> None:
        """As FlatState's."""
        from amp_C import multi_tensor_adam_capturable  # device only
        from apex.multi_tensor_apply import multi_tensor_applier

        memory, options = self.memory, self.options
        target = memory.weights if memory.master is None else memory.master
        lr, grad_scale, _, _, skip = scalars.float().split(1)
        decayed, others = self.decay_ranges, gaps(self.decay_ranges, target.numel())
        for ranges, weight_decay in ((decayed, options.weight_decay), (others, 0.0)):
            if not ranges:
                continue
            flats = (memory.grads, target, memory.exp_avg, memory.exp_avg_sq)
            multi_tensor_applier(
                multi_tensor_adam_capturable,
                skip.to(torch.int32),
                [[flat[start:stop] for start, stop in ranges] for flat in flats],
                lr,
                options.beta1,
                options.beta2,
                options.eps,
                step.to(torch.int32),
                1,  # AdamW: decay apart from the gradient
                1,  # with bias correction
                weight_decay,
                grad_scale,
            )
        if memory.master is not None:
            memory.weights.copy_(round_to(memory.master, memory.weights.dtype))
