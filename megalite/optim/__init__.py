"""Turns gradients into new weights: learning rate, loss scale, gradient norm, AdamW on flat buckets."""

from __future__ import annotations

from megalite.optim.gradient_norm import clip_coefficient, gradient_norm
from megalite.optim.memory import BytesPerParameter, bytes_per_parameter
from megalite.optim.optimizer import Optimizer, StepStats
from megalite.optim.scaler import GradScaler
from megalite.optim.schedule import LearningRateSchedule, learning_rate

__all__ = [
    "BytesPerParameter",
    "GradScaler",
    "LearningRateSchedule",
    "Optimizer",
    "StepStats",
    "bytes_per_parameter",
    "clip_coefficient",
    "gradient_norm",
    "learning_rate",
]
