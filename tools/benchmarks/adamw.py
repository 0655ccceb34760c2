"""Norm, clip and AdamW on this machine: flat buffers beside torch's clip_grad_norm_ and fused AdamW."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megalite.config import OptimizerConfig, PrecisionConfig
from megalite.config.rules.apex import has_fused_adam
from megalite.kernels.adamw import FlatAdamW, adamw
from megalite.kernels.flat import flat_zeros
from megalite.kernels.squared_norm import squared_norm
from megalite.optim import Optimizer
from megalite.parallel.flat import FlatBucket, Slot, main_grad_dtype
from megalite.parallel.params import ParamRecord
from megalite.parallel.topology import Axis

AWARE = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@dataclass(frozen=True)
class Contender:
    """One way to do a step. `moved`: bytes a parameter that it reads and writes, None where unknown."""

    name: str
    step: Callable[[], object]
    moved: int | None = None


@dataclass(frozen=True)
class Timing:
    """`milliseconds`: median over the rounds. `speed`: median of each round's torch / this one."""

    name: str
    milliseconds: float
    speed: float
    gigabytes_per_second: float | None


def benchmark_adamw(
    parameters: int = 50_000_000, tensors: int = 200, threads: int = 2, rounds: int = 15
) -> list[Timing]:
    """All take turns within a round, so that a busy neighbour slows all. On the GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _threads(threads):
        contenders = list(_contenders(parameters, tensors, device))
        for contender in contenders:
            contender.step()
        times = [[_milliseconds(contender.step, device) for contender in contenders] for _ in range(rounds)]
    timings = []
    for contender, column in zip(contenders, zip(*times, strict=True), strict=True):
        median = statistics.median(column)
        speed = statistics.median(row[0] / own for row, own in zip(times, column, strict=True))
        rate = None if contender.moved is None else contender.moved * parameters / median / 1e6
        timings.append(Timing(contender.name, median, speed, rate))
    return timings


def table(timings: list[Timing]) -> str:
    """Markdown."""
    lines = ["| | ms | times torch | GB/s |", "| --- | --- | --- | --- |"]
    for one in timings:
        rate = "" if one.gigabytes_per_second is None else f"{one.gigabytes_per_second:.0f}"
        lines.append(f"| {one.name} | {one.milliseconds:.1f} | {one.speed:.2f} | {rate} |")
    return "\n".join(lines)


def _contenders(parameters: int, tensors: int, device: torch.device) -> Iterator[Contender]:
    """torch first. Moved bytes with the norm's read of the gradient; see megalite.kernels.adamw."""
    yield Contender("torch: `clip_grad_norm_` + fused AdamW, fp32", _torch(parameters, tensors, device))

    def ours(dtype: torch.dtype, **settings: Any) -> Callable[[], object]:
        return _megalite(parameters, tensors, dtype, device, **settings)

    yield Contender("megalite, fp32", ours(torch.float32), 28 + 4)
    yield Contender("megalite, bf16 weights, fp32 master", ours(torch.bfloat16), 30 + 4)
    yield Contender("megalite, bf16 weights, remainder", ours(torch.bfloat16, **AWARE), 28 + 4)
    yield Contender("megalite, remainder, bf16 gradient and moments", ours(torch.bfloat16, **NARROW), 18 + 2)
    if has_fused_adam():
        settings = {"optimizer_impl": "apex"}
        yield Contender("apex, bf16 weights, fp32 master", ours(torch.bfloat16, **settings), 38 + 4)
    source, target = (flat_zeros(parameters, torch.float32, device) for _ in range(2))
    yield Contender("copy of fp32", lambda: target.copy_(source), 8)
    yield Contender("the norm alone, fp32", lambda: squared_norm(source, [(0, parameters)]), 4)
    memory = FlatAdamW(*(flat_zeros(parameters, torch.float32, device).fill_(1e-3) for _ in range(4)))
    scalars = torch.tensor([1e-3, 1.0, 1.0, 1.0, 0.0], device=device)

    def alone() -> None:
        adamw(memory, scalars, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_ranges=[])

    yield Contender("AdamW alone, fp32", alone, 28)


def _megalite(
    parameters: int, tensors: int, dtype: torch.dtype, device: torch.device, **settings: Any
) -> Callable[[], object]:
    own = {
        name: settings.pop(name) for name in list(settings) if name in OptimizerConfig.__dataclass_fields__
    }
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, **own)
    precision = PrecisionConfig(params_dtype=str(dtype).removeprefix("torch."), **settings)
    length = parameters // tensors
    grads_dtype = torch.bfloat16 if precision.main_grads_dtype == "bf16" else main_grad_dtype(dtype)
    weights = flat_zeros(parameters, dtype, device).normal_()
    grads = flat_zeros(parameters, grads_dtype, device).normal_()
    slots = []
    for index in range(tensors):
        start = index * length
        param = nn.Parameter(weights[start : start + length])
        param._record = ParamRecord(f"weight.{index}", (length,), decay=index % 2 == 0)  # type: ignore[attr-defined]
        slots.append(Slot(param, start, start + length))
    optimizer = Optimizer(
        [FlatBucket(weights, grads, tuple(slots))], config, precision, Axis("model"), device
    )
    return lambda: optimizer.step(1e-3)


def _torch(parameters: int, tensors: int, device: torch.device) -> Callable[[], object]:
    params = [nn.Parameter(torch.randn(parameters // tensors, device=device)) for _ in range(tensors)]
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


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def _milliseconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3
