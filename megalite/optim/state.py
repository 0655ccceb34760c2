"""What AdamW keeps beside a flat piece of the weights, a whole bucket or a shard of one, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megalite.config import OptimizerConfig, PrecisionConfig
from megalite.kernels.adamw import FlatAdamW, adamw
from megalite.kernels.flat import Range, clipped, flat_zeros
from megalite.kernels.remainder import join, split

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class StateOptions:
    """Constants of the update, and the form in which the state is kept.

    `store_param_remainders`: of bf16 weights' master only the 16 bits below the weights, with the same
    numbers. The moments' dtypes: None for the master's, or bf16.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    store_param_remainders: bool = False
    exp_avg_dtype: torch.dtype | None = None
    exp_avg_sq_dtype: torch.dtype | None = None
    backend: str | None = None

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, precision: PrecisionConfig) -> StateOptions:
        """As configured; `--optimizer-impl torch` is a matter of the kernel's backend."""
        return cls(
            optimizer.adam_beta1,
            optimizer.adam_beta2,
            optimizer.adam_eps,
            optimizer.weight_decay,
            precision.use_precision_aware_optimizer and precision.store_param_remainders,
            narrow_dtype(precision.exp_avg_dtype),
            narrow_dtype(precision.exp_avg_sq_dtype),
            backend="torch" if optimizer.optimizer_impl == "torch" else None,
        )


def narrow_dtype(name: str) -> torch.dtype | None:
    """bf16, or None for fp32, which stands for the master's dtype."""
    return torch.bfloat16 if name == "bf16" else None


class State(Protocol):
    """What an optimizer asks of the state beside a piece of the weights; see FlatState."""

    def start_copies(self) -> None: ...
    def update(self, scalars: torch.Tensor, step: torch.Tensor) -> None: ...
    def take_weights(self) -> None: ...
    def held(self) -> Iterator[torch.Tensor]: ...
    def offloaded(self) -> Iterator[torch.Tensor]: ...
    def copied(self) -> Iterator[torch.Tensor]: ...
    def logical(self) -> dict[str, torch.Tensor]: ...
    def take_logical(self, values: Mapping[str, torch.Tensor]) -> None: ...


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
        self.decay_ranges, self.options = decay_ranges, options
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        by_remainder = options.store_param_remainders and weights.dtype == torch.bfloat16
        length, device = weights.numel(), weights.device

        def zeros(kind: torch.dtype) -> torch.Tensor:
            return flat_zeros(length, kind, device)

        self.memory = FlatAdamW(
            weights,
            grads,
            exp_avg=zeros(options.exp_avg_dtype or dtype),
            exp_avg_sq=zeros(options.exp_avg_sq_dtype or dtype),
            master=zeros(dtype) if weights.dtype != dtype and not by_remainder else None,
            remainder=zeros(torch.int16) if by_remainder else None,
        )
        self.take_weights()

    def start_copies(self) -> None:
        """Nothing: gradients and state are in one place."""

    def update(self, scalars: torch.Tensor, step: torch.Tensor) -> None:
        """One step: `scalars` (5,) fp64 on the device, as kernels.adamw.SCALARS names them; `step` int64, how
        many were applied with this one.
        """
        self.update_piece(slice(0, self.memory.weights.numel()), scalars)

    def update_piece(self, piece: slice, scalars: torch.Tensor) -> None:
        """One step of these elements alone."""
        adamw(
            self.memory.narrow(piece),
            scalars.to(self.memory.dtype),
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            eps=self.options.eps,
            weight_decay=self.options.weight_decay,
            decay_ranges=clipped(self.decay_ranges, piece.start, piece.stop),
            backend=self.options.backend,
        )

    def held(self) -> Iterator[torch.Tensor]:
        """The memory of the state, in the form in which it is kept."""
        for name, flat in self.memory.tensors().items():
            if name not in ("weights", "grads"):
                yield flat

    def offloaded(self) -> Iterator[torch.Tensor]:
        """The part of `held` that is meant to be in host memory, wherever the weights are: none."""
        yield from ()

    def copied(self) -> Iterator[torch.Tensor]:
        """Weights and gradients of which the host has copies, if they live elsewhere: none."""
        yield from ()

    @torch.no_grad()
    def take_weights(self) -> None:
        """The weights as they are become the master: after they came from elsewhere than `update`."""
        if self.memory.master is not None:
            self.memory.master.copy_(self.memory.weights)
        if self.memory.remainder is not None:
            self.memory.remainder.zero_()

    def logical(self) -> dict[str, torch.Tensor]:
        """Each kind of state as (n,) values in the master's dtype, whatever form they are kept in.

        Kinds: master (where the weights are not themselves the master), exp_avg, exp_avg_sq. A tensor is the
        memory itself or, in host memory, a copy: whoever writes into one hands all to `take_logical` then.
        """
        memory = self.memory
        values = {}
        if memory.remainder is not None:
            values[MASTER] = join(memory.weights.cpu(), memory.remainder.cpu())
        elif memory.master is not None:
            values[MASTER] = memory.master
        for kind, flat in ((EXP_AVG, memory.exp_avg), (EXP_AVG_SQ, memory.exp_avg_sq)):
            values[kind] = flat if flat.dtype == memory.dtype else flat.cpu().to(memory.dtype)
        return values

    @torch.no_grad()
    def take_logical(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the state to `values`, as `logical` gives them; with a remainder also the weights.

        Moments that are kept in bf16 are rounded to nearest, ties to even.
        """
        memory = self.memory
        if memory.remainder is not None:
            for flat, part in zip((memory.weights, memory.remainder), split(values[MASTER]), strict=True):
                flat.copy_(part)
        elif memory.master is not None:
            memory.master.copy_(values[MASTER])
        memory.exp_avg.copy_(values[EXP_AVG])
        memory.exp_avg_sq.copy_(values[EXP_AVG_SQ])
