"""What AdamW keeps beside a flat piece of the weights, a whole bucket or a shard of one, and its update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megalite.kernels.adamw import adamw
from megalite.kernels.flat import Range

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class StateOptions:
    """Constants of the update."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class FlatState:
    """AdamW's memory for `weights` (n,) whose summed gradients are `grads` (n,).

    Both are kept, not copied; `update` writes the weights in place. `decay_ranges`: ordered, disjoint
    [start, stop) of the elements that are decayed, relative to these tensors. Any n, 0 included.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        grads: torch.Tensor,
        decay_ranges: tuple[Range, ...],
        options: StateOptions,
    ):
        self.weights, self.grads = weights, grads
        self.decay_ranges, self.options = decay_ranges, options
        own_master = weights.dtype != grads.dtype
        self._master = torch.zeros_like(grads) if own_master else None
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(grads), torch.zeros_like(grads)
        self.take_weights()

    def update(self, scalars: torch.Tensor) -> None:
        """One step; `scalars` (5,) fp64 on the device, as kernels.adamw.SCALARS names them."""
        adamw(
            self.weights,
            self.grads,
            self._exp_avg,
            self._exp_avg_sq,
            scalars.to(self.grads.dtype),
            master=self._master,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            eps=self.options.eps,
            weight_decay=self.options.weight_decay,
            decay_ranges=self.decay_ranges,
        )

    @torch.no_grad()
    def take_weights(self) -> None:
        """The weights as they are become the master: after they came from elsewhere than `update`."""
        if self._master is not None:
            self._master.copy_(self.weights)

    def logical(self) -> dict[str, torch.Tensor]:
        """Each kind of state as (n,) values in the master's dtype, whatever form they are kept in.

        Kinds: master (where the weights are not themselves the master), exp_avg, exp_avg_sq. A tensor may
        be the memory itself or a copy: whoever writes into one hands all to `take_logical` afterwards.
        """
        kinds = {MASTER: self._master, EXP_AVG: self._exp_avg, EXP_AVG_SQ: self._exp_avg_sq}
        return {kind: flat for kind, flat in kinds.items() if flat is not None}

    @torch.no_grad()
    def take_logical(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the state to `values`, as `logical` gives them."""
        for kind, flat in self.logical().items():
            if flat.data_ptr() != values[kind].data_ptr():
                flat.copy_(values[kind])
