"""Learning rates against hand-computed values, and the properties every schedule has."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import BatchConfig, OptimizerConfig
from megalite.optim import LearningRateSchedule, learning_rate
from megalite.optim.schedule import STYLES, WSD_STYLES

COSINE = LearningRateSchedule(1.0, 0.1, 0.2, warmup_samples=100, decay_samples=1100, style="cosine")
WSD = replace(COSINE, style="WSD", wsd_samples=200)
SQRT_HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "consumed", "expected"),
    [
        (COSINE, 0, 0.2),  # warm-up starts at warmup_init: the rate of the very first step
        (COSINE, 50, 0.6),
        (COSINE, 100, 1.0),
        (COSINE, 350, 0.1 + 0.9 * 0.5 * (1 + SQRT_HALF)),  # a quarter of the decay: cos(pi / 4)
        (COSINE, 600, 0.55),
        (COSINE, 1100, 0.1),
        (COSINE, 1101, 0.1),
        (replace(COSINE, style="linear"), 350, 0.1 + 0.9 * 0.75),
        (replace(COSINE, style="linear"), 10**9, 0.1),
        (replace(COSINE, style="constant"), 50, 0.6),
        (replace(COSINE, style="constant"), 10**9, 1.0),
        (replace(COSINE, style="inverse-square-root"), 100, 1.0),
        (replace(COSINE, style="inverse-square-root"), 400, 0.5),
        (replace(COSINE, style="inverse-square-root", minimum=0.6), 400, 0.6),
        (replace(COSINE, style="inverse-square-root"), 1101, 0.1),
        (replace(COSINE, style="inverse-square-root", warmup_samples=0), 0, 1.0),
        (replace(COSINE, style="inverse-square-root", warmup_samples=0), 4, 0.5),
        (WSD, 900, 1.0),
        (WSD, 1000, 0.1 + 0.9 * (math.sqrt(2) - 1)),  # exponential: 2 * 0.5^0.5 - 1
        (WSD, 1100, 0.1),
        (replace(WSD, wsd_style="linear"), 950, 0.1 + 0.9 * 0.75),
        (replace(WSD, wsd_style="cosine"), 950, 0.1 + 0.9 * 0.5 * (1 + SQRT_HALF)),
        (replace(WSD, wsd_style="minus_sqrt"), 950, 0.55),
        (replace(COSINE, warmup_samples=0), 0, 1.0),
    ],
)
def test_hand_computed_rate(schedule: LearningRateSchedule, consumed: int, expected: float) -> None:
    assert learning_rate(schedule, consumed) == pytest.approx(expected, rel=1e-14)


@st.composite
def schedules(draw: st.DrawFn) -> LearningRateSchedule:
    peak = draw(st.floats(1e-6, 1.0))
    decay = draw(st.integers(1, 10**7))
    return LearningRateSchedule(
        peak,
        minimum=peak * draw(st.floats(0, 1)),
        initial=peak * draw(st.floats(0, 1)),
        warmup_samples=decay * draw(st.floats(0, 0.99)),
        decay_samples=decay,
        style=draw(st.sampled_from(STYLES)),
        wsd_samples=draw(st.integers(1, decay)),
        wsd_style=draw(st.sampled_from(WSD_STYLES)),
    )


@settings(deadline=None)
@given(schedules(), st.integers(0, 2 * 10**7))
def test_rate_stays_between_its_bounds(schedule: LearningRateSchedule, consumed: int) -> None:
    lowest = min(schedule.minimum, schedule.initial)
    tolerance = 1e-12 * schedule.peak
    assert lowest - tolerance <= learning_rate(schedule, consumed) <= schedule.peak + tolerance


@settings(deadline=None)
@given(schedules(), st.lists(st.integers(0, 2 * 10**7), min_size=2, max_size=2).map(sorted))
def test_rate_rises_in_warmup_and_never_after(schedule: LearningRateSchedule, places: list[int]) -> None:
    early, late = (learning_rate(schedule, place) for place in places)
    tolerance = 1e-12 * schedule.peak
    if places[1] <= schedule.warmup_samples:
        assert late >= early - tolerance
    if places[0] >= schedule.warmup_samples:
        assert late <= early + tolerance


@settings(deadline=None)
@given(schedules())
def test_decay_ends_at_the_minimum(schedule: LearningRateSchedule) -> None:
    expected = schedule.peak if schedule.style == "constant" else schedule.minimum
    assert learning_rate(schedule, schedule.decay_samples + 1) == expected


def _from_config(batch: dict[str, Any], **optimizer: Any) -> LearningRateSchedule:
    config = OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="cosine", **optimizer)
    return LearningRateSchedule.from_config(
        config, BatchConfig(micro_batch_size=1, global_batch_size=8, **batch)
    )


def test_iterations_count_whole_global_batches() -> None:
    schedule = _from_config({"train_iters": 100}, lr_warmup_iters=10)
    assert (schedule.warmup_samples, schedule.decay_samples) == (80, 800)
    assert learning_rate(schedule, 40) == pytest.approx(1.5e-4, rel=1e-14)


def test_a_run_in_samples_has_the_same_rates_as_one_in_iterations() -> None:
    in_samples = _from_config(
        {"train_samples": 800}, lr_warmup_samples=80, lr_decay_samples=640, lr_wsd_decay_samples=160
    )
    in_iterations = _from_config(
        {"train_iters": 100}, lr_warmup_iters=10, lr_decay_iters=80, lr_wsd_decay_iters=20
    )
    assert in_samples == in_iterations


def test_warmup_fraction_is_of_the_decay_and_not_rounded() -> None:
    schedule = _from_config({"train_iters": 100}, lr_decay_iters=50, lr_warmup_fraction=0.001)
    assert schedule.warmup_samples == pytest.approx(0.4)
    assert learning_rate(schedule, 0) == 0.0
    assert learning_rate(schedule, 1) < 3e-4


def test_a_resumed_run_follows_the_new_schedule_at_once() -> None:
    """The rate is no state: the first resumed step has that of the configuration given now."""
    first = _from_config({"train_iters": 100})
    second = replace(first, peak=3e-5, minimum=3e-6)
    assert learning_rate(second, 400) == pytest.approx(learning_rate(first, 400) / 10, rel=1e-14)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minimum": 2.0}, "minimum 2.0 must lie between 0 and the peak 1.0"),
        ({"initial": 2.0}, "initial 2.0"),
        ({"warmup_samples": 1100}, "warm-up of 1100 samples must end before the decay, at 1100"),
        ({"style": "exponential"}, "'exponential' must be one of constant, linear, cosine"),
        ({"style": "WSD"}, "final decay of 0 samples"),
        ({"style": "WSD", "wsd_samples": 10, "wsd_style": "sqrt"}, "'sqrt' must be one of exponential"),
    ],
)
def test_an_impossible_schedule_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(COSINE, **change)


def test_a_run_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="must end before the decay, at 0"):
        _from_config({})
