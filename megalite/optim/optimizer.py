"""One update of a stage's weights from its reduced gradients, without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megalite.config import OptimizerConfig, PrecisionConfig
from megalite.optim.apex import ApexState
from megalite.optim.gradient_norm import clip_coefficient, gradient_norm, merged_ranges
from megalite.optim.offload import OffloadedState
from megalite.optim.scaler import GradScaler
from megalite.optim.state import FlatState, State, StateOptions
from megalite.parallel.flat import FlatBucket
from megalite.parallel.topology import Axis


@dataclass(frozen=True)
class StepStats:
    """What a step did; scalar tensors on the device, which later steps do not change.

    `grad_norm` fp64: of the unscaled gradient, before clipping. `skipped` bool: not finite, nothing was
    changed. `loss_scale`: the one used in this step. `stuck` int64: steps in a row skipped at the lowest
    loss scale (see GradScaler).
    """

    grad_norm: torch.Tensor
    skipped: torch.Tensor
    loss_scale: torch.Tensor
    stuck: torch.Tensor


class StateBlock(NamedTuple):
    """One kind of state (see FlatState.logical) of the elements `first ... first + n` of a parameter."""

    kind: str
    param: nn.Parameter
    values: torch.Tensor
    """(n,), in the master's dtype."""
    first: int


class Optimizer:
    """AdamW over flat buckets, with gradient clipping, loss scaling and master weights.

    `buckets`: weights and summed main gradients, the latter multiplied by `loss_scale`. `norm_axis`: the
    ranks that add up the gradient norm; those with `counted` hold one copy of the model. A step whose
    gradient norm is not finite changes neither weights, moments nor step count, on any rank.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        norm_axis: Axis,
        device: torch.device,
        counted: bool = True,
    ):
        if not buckets:
            raise ValueError("optimizer: no buckets; a stage needs at least one parameter")
        self.config = config
        self.norm_axis = norm_axis
        options = StateOptions.from_config(config, precision)
        self._buckets = list(buckets)
        self._counted = self._buckets if counted else []
        self._states = [_state_of(bucket, options, config) for bucket in buckets]
        self._scaler = _scaler_of(precision, device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._lr = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def loss_scale(self) -> torch.Tensor:
        """What the loss is multiplied by: a scalar, always the same; fp64 for fp64 weights, else fp32."""
        return self._scaler.scale

    @torch.no_grad()
    def step(self, lr: float) -> StepStats:
        """Unscale, clip and apply the gradients with learning rate `lr`. Gradients are left as they are."""
        self._lr.fill_(lr)
        for state in self._states:
            state.start_copies()
        scale = self._scaler.scale.to(torch.float64, copy=True)
        norm = gradient_norm(self._counted, self.norm_axis, scale.device) / scale
        finite = torch.isfinite(norm)
        self._step += finite
        scalars = self._step_scalars(clip_coefficient(norm, self.config.clip_grad) / scale, ~finite)
        for state in self._states:
            state.update(scalars, self._step)
        self._scaler.update(~finite)
        return StepStats(norm, ~finite, scale, self._scaler.stuck.clone())

    def _step_scalars(self, grad_scale: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """The tensor that kernels.adamw reads (its SCALARS), computed in fp64."""
        steps = self._step.to(torch.float64)
        inverse_bias = [
            1.0 / (1.0 - beta**steps) for beta in (self.config.adam_beta1, self.config.adam_beta2)
        ]
        return torch.stack([self._lr, grad_scale, *inverse_bias, skip.to(torch.float64)])

    def copy_weights_to_master(self) -> None:
        """Take the weights as they are as the new master: after weights came from elsewhere than a step."""
        for state in self._states:
            state.take_weights()

    def held(self) -> Iterator[torch.Tensor]:
        """The memory of the state, in the form and place in which it is kept."""
        for state in self._states:
            yield from state.held()

    def offloaded(self) -> Iterator[torch.Tensor]:
        """The part of `held` that is meant to be in host memory, wherever the weights are."""
        for state in self._states:
            yield from state.offloaded()

    def copied(self) -> Iterator[torch.Tensor]:
        """Weights and gradients that are brought to the host and back, if they live elsewhere."""
        for state in self._states:
            yield from state.copied()

    def state_blocks(self) -> Iterator[StateBlock]:
        """The whole state in logical values, to be read; see `loading` for writing."""
        for bucket, state in zip(self._buckets, self._states, strict=True):
            yield from _blocks_of(bucket, state.logical())

    @contextmanager
    def loading(self) -> Iterator[list[StateBlock]]:
        """Blocks as `state_blocks` gives them, to be filled; they are the new state when the context ends."""
        values = [state.logical() for state in self._states]
        pairs = zip(self._buckets, values, strict=True)
        yield [block for bucket, logical in pairs for block in _blocks_of(bucket, logical)]
        for state, logical in zip(self._states, values, strict=True):
            state.take_logical(logical)

    def scalars(self) -> dict[str, float]:
        """Step count and loss scale for a checkpoint, the same on every rank; reads the device."""
        return {"step": int(self._step), **self._scaler.state()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Restore `scalars`. Raises KeyError without a step count."""
        self._step.fill_(int(scalars["step"]))
        self._scaler.load_state(scalars)


def _state_of(bucket: FlatBucket, options: StateOptions, config: OptimizerConfig) -> State:
    decayed = merged_ranges(bucket, lambda record: record.decay)
    if config.optimizer_cpu_offload:
        fraction = config.optimizer_offload_fraction
        return OffloadedState(bucket.weights, bucket.grads, decayed, options, fraction)
    make = ApexState if config.optimizer_impl == "apex" else FlatState
    return make(bucket.weights, bucket.grads, decayed, options)


def _blocks_of(bucket: FlatBucket, logical: dict[str, torch.Tensor]) -> Iterator[StateBlock]:
    for slot in bucket.slots:
        for kind, flat in logical.items():
            yield StateBlock(kind, slot.param, flat[slot.start : slot.stop], slot.first)


def _scaler_of(precision: PrecisionConfig, device: torch.device) -> GradScaler:
    """Dynamic for fp16 unless a constant scale is configured; otherwise constant, 1 by default."""
    dynamic = precision.params_dtype == "float16" and precision.loss_scale is None
    constant = 1.0 if precision.loss_scale is None else precision.loss_scale
    return GradScaler(
        precision.initial_loss_scale if dynamic else constant,
        dynamic=dynamic,
        device=device,
        dtype=torch.float64 if precision.params_dtype == "float64" else torch.float32,
        minimum=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
