"""The loss scale against Megatron-LM's rules, as a table of steps."""

from __future__ import annotations

import random

import pytest
import torch

from megalite.optim import GradScaler

CPU = torch.device("cpu")


def _scales(scaler: GradScaler, steps: str) -> list[float]:
    """Scale after each step: `x` overflows, `.` is finite."""
    scales = []
    for step in steps:
        scaler.update(torch.tensor(step == "x"))
        scales.append(scaler.scale.item())
    return scales


def _dynamic(initial: float = 16.0, minimum: float = 1.0, window: int = 3, hysteresis: int = 2) -> GradScaler:
    return GradScaler(
        initial, dynamic=True, device=CPU, minimum=minimum, window=window, hysteresis=hysteresis
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("...", [16, 16, 32]),
        ("......", [16, 16, 32, 32, 32, 64]),
        ("xxx", [16, 8, 4]),  # the first is tolerated, each later one halves
        ("x.x.x", [16, 16, 8, 8, 4]),  # finite steps do not restore the hysteresis
        ("..x...", [16, 16, 16, 16, 16, 32]),  # an overflow restarts the window
        ("xx...x", [16, 8, 8, 8, 16, 16]),  # growth restores the hysteresis
        ("xxxxxxxx", [16, 8, 4, 2, 1, 1, 1, 1]),  # not below the minimum
    ],
)
def test_scale_after_each_step(steps: str, expected: list[float]) -> None:
    assert _scales(_dynamic(), steps) == expected


def test_the_scale_stays_a_number() -> None:
    """2^127 is the last power of two in fp32; doubled it would be infinite, and so every later gradient."""
    assert _scales(_dynamic(2.0**126, window=1), "...x") == [2.0**127] * 4
    assert _scales(_dynamic(2.0**126, window=1, hysteresis=1), "..x.") == [
        2.0**127,
        2.0**127,
        2.0**126,
        2.0**127,
    ]


class _HostScaler:
    """Megatron-LM's dynamic scaler, transcribed with host numbers."""

    def __init__(self, scale: float, minimum: float, window: int, hysteresis: int):
        self.scale, self.minimum, self.window, self.hysteresis = scale, minimum, window, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, overflow: bool) -> float:
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.window:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale *= 2.0
        return self.scale


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_agree_with_host_arithmetic(seed: int) -> None:
    draw = random.Random(seed)
    steps = "".join(draw.choice("x....") for _ in range(150))
    host = _HostScaler(64.0, 0.5, 4, 3)
    expected = [host.update(step == "x") for step in steps]
    assert _scales(_dynamic(64.0, 0.5, 4, 3), steps) == expected


def test_skips_are_counted_once_the_scale_is_at_its_minimum() -> None:
    scaler = _dynamic(initial=2.0)
    counts = []
    for step in "xxxxx.xx":
        scaler.update(torch.tensor(step == "x"))
        counts.append(int(scaler.stuck))
    assert counts == [0, 0, 1, 2, 3, 0, 1, 2]


def test_a_constant_scale_stays_and_counts_every_skip() -> None:
    scaler = GradScaler(128.0, dynamic=False, device=CPU)
    assert _scales(scaler, "xxx....xx") == [128.0] * 9
    assert int(scaler.stuck) == 2


def test_state_continues_exactly() -> None:
    straight, stopped, resumed = _dynamic(), _dynamic(), _dynamic()
    expected = _scales(straight, "x..x..xx...")[3:]
    _scales(stopped, "x..")
    resumed.load_state(stopped.state())
    assert _scales(resumed, "x..xx...") == expected


def test_a_constant_scale_ignores_a_saved_dynamic_one() -> None:
    saved = _dynamic()
    scaler = GradScaler(8.0, dynamic=False, device=CPU)
    scaler.load_state(saved.state())
    assert scaler.scale.item() == 8.0
    assert scaler.state() == {}


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"minimum": -1.0}, {"window": 0}, {"hysteresis": 0}, {"minimum": 32.0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        _dynamic(**wrong)  # type: ignore[arg-type]
