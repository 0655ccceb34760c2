"""The loss scale that keeps fp16 gradients within range; it adapts on the device, unread by the host."""

from __future__ import annotations

import torch

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
LARGEST = 2.0**127  # the last power of two in fp32


class GradScaler:
    """Dynamic or constant loss scale with Megatron-LM's rules.

    A step with non-finite gradients uses up one of `hysteresis`; once they are used up, every such step
    halves the scale, not below `minimum`. `window` steps in a row with finite gradients double the scale,
    not above 2^127, and restore the hysteresis.

    `scale`: scalar tensor of `dtype`, updated in place. `stuck`: int64 scalar tensor, how many steps in
    a row were skipped although the scale could not be lowered any more; a training loop that reads a large
    number there has no way forward but to stop.
    """

    def __init__(
        self,
        initial: float,
        *,
        dynamic: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ):
        for name, value in (
            ("initial", initial),
            ("minimum", minimum),
            ("window", window),
            ("hysteresis", hysteresis),
        ):
            if value <= 0:
                raise ValueError(f"loss scale: {name} is {value}, must be positive")
        if dynamic and minimum > initial:
            raise ValueError(f"loss scale: minimum {minimum} exceeds the initial scale {initial}")
        self.dynamic = dynamic
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.scale = torch.tensor(initial, dtype=dtype, device=device)
        self.stuck = torch.zeros((), dtype=torch.int64, device=device)
        self._finite_steps = torch.zeros_like(self.stuck)
        self._hysteresis_left = torch.full_like(self.stuck, hysteresis)

    def update(self, overflow: torch.Tensor) -> None:
        """Learn from a step; `overflow`: bool scalar tensor, whether its gradients were not finite."""
        lowest = self.scale <= self.minimum if self.dynamic else torch.ones_like(overflow)
        self.stuck.copy_(torch.where(overflow & lowest, self.stuck + 1, 0))
        if not self.dynamic:
            return
        finite_steps = torch.where(overflow, 0, self._finite_steps + 1)
        hysteresis_left = torch.where(overflow, self._hysteresis_left - 1, self._hysteresis_left)
        grow = finite_steps == self.window
        shrink = overflow & (hysteresis_left <= 0)
        lowered = (self.scale * BACKOFF_FACTOR).clamp(min=self.minimum)
        raised = (self.scale * GROWTH_FACTOR).clamp(max=LARGEST)
        self.scale.copy_(torch.where(shrink, lowered, torch.where(grow, raised, self.scale)))
        self._finite_steps.copy_(torch.where(grow, 0, finite_steps))
        self._hysteresis_left.copy_(torch.where(grow, self.hysteresis, hysteresis_left))

    def state(self) -> dict[str, float]:
        """Host values for a checkpoint, none for a constant scale (configuration). Reads the device."""
        if not self.dynamic:
            return {}
        return {name: float(value) for name, value in self._state_tensors().items()}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore `state`; a constant scale stays, and a state without a scale changes nothing."""
        if not self.dynamic:
            return
        for name, tensor in self._state_tensors().items():
            if name in state:
                tensor.fill_(state[name])

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "loss_scale": self.scale,
            "loss_scale_finite_steps": self._finite_steps,
            "loss_scale_hysteresis_left": self._hysteresis_left,
            "loss_scale_stuck": self.stuck,
        }
