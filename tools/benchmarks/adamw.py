"""Norm, clip and AdamW on this CPU: flat buffers beside torch's clip_grad_norm_ and fused AdamW."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megalite.config import OptimizerConfig, PrecisionConfig
from megalite.optim import Optimizer
from megalite.parallel.flat import FlatBucket, Slot, main_grad_dtype
from megalite.parallel.params import ParamRecord
from megalite.parallel.topology import Axis


@dataclass(frozen=True)
class AdamWTimings:
    """Medians over the rounds, in milliseconds; `ratio` is the median of each round's torch / megalite."""

    parameters: int
    threads: int
    megalite_ms: float
    torch_ms: float
    ratio: float
    megalite_bf16_ms: float


def benchmark_adamw(
    parameters: int = 50_000_000, tensors: int = 200, threads: int = 2, rounds: int = 15
) -> AdamWTimings:
    """Both sides take turns within a round, so that a busy neighbour slows both.

    fp32 weights on both; beside them, without a counterpart in torch, bf16 weights with an fp32 master.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sides = [
            _megalite(parameters, tensors, torch.float32),
            _torch(parameters, tensors),
            _megalite(parameters, tensors, torch.bfloat16),
        ]
        for side in sides:
            side()
        times = [[_milliseconds(side) for side in sides] for _ in range(rounds)]
    finally:
        torch.set_num_threads(before)
    ours, theirs, narrow = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(row[1] / row[0] for row in times)
    return AdamWTimings(parameters, threads, ours, theirs, ratio, narrow)


def _megalite(parameters: int, tensors: int, dtype: torch.dtype) -> Callable[[], object]:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
    precision = PrecisionConfig(params_dtype=str(dtype).removeprefix("torch."))
    length = parameters // tensors
    weights = torch.randn(parameters).to(dtype)
    grads = torch.randn(parameters).to(main_grad_dtype(dtype))
    slots = []
    for index in range(tensors):
        start = index * length
        param = nn.Parameter(weights[start : start + length])
        param._record = ParamRecord(f"weight.{index}", (length,), decay=index % 2 == 0)  # type: ignore[attr-defined]
        slots.append(Slot(param, start, start + length))
    optimizer = Optimizer(
        [FlatBucket(weights, grads, tuple(slots))], config, precision, Axis("model"), weights.device
    )
    return lambda: optimizer.step(1e-3)


def _torch(parameters: int, tensors: int) -> Callable[[], object]:
    params = [nn.Parameter(torch.randn(parameters // tensors)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.randn_like(param)
    groups = [
        {"params": params[0::2], "weight_decay": 0.1},
        {"params": params[1::2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def _milliseconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3
