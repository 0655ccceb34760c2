"""Turns gradients into new weights: learning rate, loss scale, gradient norm, AdamW on flat buckets."""

from __future__ import annotations

from megalite.optim.apex import ApexState
from megalite.optim.gradient_norm import clip_coefficient, gradient_norm
from megalite.optim.memory import BytesPerParameter, bytes_per_parameter
from megalite.optim.offload import OffloadedState
from megalite.optim.optimizer import Optimizer, StateBlock, StepStats
from megalite.optim.scaler import GradScaler
from megalite.optim.schedule import LearningRateSchedule, learning_rate
from megalite.optim.state import FlatState, State, StateOptions

__all__ = [
    "ApexState",
    "BytesPerParameter",
    "FlatState",
    "GradScaler",
    "LearningRateSchedule",
    "OffloadedState",
    "Optimizer",
    "State",
    "StateBlock",
    "StateOptions",
    "StepStats",
    "bytes_per_parameter",
    "clip_coefficient",
    "gradient_norm",
    "learning_rate",
]
