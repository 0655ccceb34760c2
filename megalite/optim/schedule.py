"""The learning rate as a closed form of one counter: the samples consumed so far.

Megatron-LM's formulas (core/optimizer_param_scheduler.py). The rate of a step is that of the samples consumed
*before* it: the first step of a run with warm-up uses `initial`. This package's logs print the rate that
was applied in the step they report; Megatron-LM prints the rate of the next one. Since consumed samples also
count steps that fp16 skipped, so does the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config import BatchConfig, OptimizerConfig, schedule_samples

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from `initial` to `peak`, then a decay to `minimum`.

    All lengths in samples; the decay is done `decay_samples` from the start of training, warm-up included;
    `warmup_samples` may be fractional. `style`: one of STYLES. A WSD schedule (Hu et al. 2024, arXiv
    2404.06395) holds the peak and decays in its last `wsd_samples` with `wsd_style`, one of WSD_STYLES.
    """

    peak: float
    minimum: float
    initial: float
    warmup_samples: float
    decay_samples: int
    style: str
    wsd_samples: int = 0
    wsd_style: str = "exponential"

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.minimum <= self.peak:
            problems.append(f"minimum {self.minimum} must lie between 0 and the peak {self.peak}")
        if not 0 <= self.initial <= self.peak:
            problems.append(f"initial {self.initial} must lie between 0 and the peak {self.peak}")
        if not 0 <= self.warmup_samples < self.decay_samples:
            problems.append(
                f"warm-up of {self.warmup_samples} samples must end before the decay, at {self.decay_samples}"
            )
        if self.style not in STYLES:
            problems.append(f"style {self.style!r} must be one of {', '.join(STYLES)}")
        if self.style == "WSD" and not 0 < self.wsd_samples <= self.decay_samples:
            problems.append(
                f"final decay of {self.wsd_samples} samples must be within 1 to {self.decay_samples}"
            )
        if self.style == "WSD" and self.wsd_style not in WSD_STYLES:
            problems.append(f"WSD style {self.wsd_style!r} must be one of {', '.join(WSD_STYLES)}")
        if problems:
            raise ValueError("learning-rate schedule: " + "; ".join(problems))

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, batch: BatchConfig) -> LearningRateSchedule:
        """The schedule of a run. Raises ValueError when its lengths or rates contradict each other."""
        lengths = schedule_samples(optimizer, batch)
        return cls(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            initial=optimizer.lr_warmup_init,
            warmup_samples=lengths.warmup,
            decay_samples=lengths.decay,
            style=optimizer.lr_decay_style,
            wsd_samples=lengths.wsd_decay,
            wsd_style=optimizer.lr_wsd_decay_style,
        )


def learning_rate(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """The rate to apply in the step that follows `consumed_samples`.

    Up to and including the last warm-up sample: initial + (peak - initial) n / warmup. Then, with x the share
    of the decay that is done, minimum + (peak - minimum) c(x): linear 1 - x, cosine (1 + cos pi x) / 2, WSD
    as `_wsd_coefficient`. inverse-square-root is peak sqrt(warmup / n), at least the minimum; constant
    never decays. Beyond `decay_samples`: the minimum.
    """
    n, s = consumed_samples, schedule
    if s.warmup_samples > 0 and n <= s.warmup_samples:
        return s.initial + (s.peak - s.initial) * (n / s.warmup_samples)
    if s.style == "constant":
        return s.peak
    if n > s.decay_samples:
        return s.minimum
    if s.style == "inverse-square-root":
        return max(s.minimum, s.peak * math.sqrt(max(s.warmup_samples, 1) / max(n, 1)))
    if s.style == "WSD":
        coefficient = _wsd_coefficient(s, n)
    else:
        done = (n - s.warmup_samples) / (s.decay_samples - s.warmup_samples)
        coefficient = 1.0 - done if s.style == "linear" else _half_cosine(done)
    return s.minimum + coefficient * (s.peak - s.minimum)


def _wsd_coefficient(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """1 until the final decay; then, with x its share done, the curve of the style.

    exponential 2 * 0.5^x - 1, linear 1 - x, cosine (1 + cos pi x) / 2, minus_sqrt 1 - sqrt x.
    """
    start = schedule.decay_samples - schedule.wsd_samples
    if consumed_samples <= start:
        return 1.0
    done = (consumed_samples - start) / schedule.wsd_samples
    if schedule.wsd_style == "exponential":
        return 2.0 * 0.5**done - 1.0
    if schedule.wsd_style == "linear":
        return 1.0 - done
    return _half_cosine(done) if schedule.wsd_style == "cosine" else 1.0 - math.sqrt(done)


def _half_cosine(done: float) -> float:
    return 0.5 * (math.cos(math.pi * done) + 1.0)
