"""Pipeline schedules run for real, a sleep in place of each stage's compute, beside the times they predict.

Every rank is a process, tensors travel over Gloo, and the executor is the product's: what is measured is what
waiting, sending and bookkeeping add to the table.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.parallel.weight_gradients import WeightGradients
from megalite.pipeline.executor import run_schedule
from megalite.pipeline.links import build_links
from megalite.pipeline.schedule import Kind, Schedule, make_schedule
from megalite.pipeline.simulation import in_flight_peaks, simulate

SHAPE = (64, 1, 64)  # (seq, micro_batch, hidden): 16 KB of fp32
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


@dataclass(frozen=True)
class Event:
    """One part of the work: when it began and ended, by this machine's monotonic clock, in seconds."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    finish: float


@dataclass(frozen=True)
class Measured:
    """A schedule's step: its time by the table, the median of the measured times, activations at most."""

    schedule: Schedule
    predicted: float
    seconds: float
    held: tuple[int, ...]


class SleepingStage:
    """Takes `seconds` for a forward, as many for an input gradient and as many for a weight gradient."""

    def __init__(self, stage: int, last: bool, seconds: float, gradients: WeightGradients, log: list[Event]):
        self.stage, self.last, self.seconds = stage, last, seconds
        self.gradients, self.log = gradients, log

    def __call__(self, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        given = torch.zeros(SHAPE, requires_grad=True) if hidden is None else hidden
        output: torch.Tensor = _Sleep.apply(given, self, microbatch)
        return output.sum() if self.last else output

    def work(self, kind: Kind, microbatch: int) -> None:
        start = time.monotonic()
        time.sleep(self.seconds)
        self.log.append(Event(kind, self.stage, microbatch, start, time.monotonic()))


class _Sleep(torch.autograd.Function):
    """The identity, slowly."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, stage: SleepingStage, microbatch: int) -> torch.Tensor:
        ctx.stage, ctx.microbatch = stage, microbatch
        stage.work(Kind.F, microbatch)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage, microbatch = ctx.stage, ctx.microbatch
        stage.work(Kind.I, microbatch)
        stage.gradients.compute(lambda: stage.work(Kind.W, microbatch))
        return gradient, None, None


def run_steps(schedule: Schedule, seconds: float, steps: int) -> list[list[Event]]:
    """This rank's events of each step. A rank's share of the model takes `seconds` for each of F, I and W,
    a chunk of v its v-th part. The default process group is the pipeline.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    links = build_links(schedule, [range(world)], CPU, TIMEOUT)
    events = []
    for _ in range(steps):
        log: list[Event] = []
        gradients = WeightGradients()
        stages = [
            SleepingStage(
                stage, stage == schedule.num_stages - 1, seconds * world / schedule.num_stages, gradients, log
            )
            for stage in schedule.stages[rank]
        ]
        dist.barrier()
        run_schedule(
            schedule[rank],
            stages,
            range(schedule.microbatches),
            links,
            hidden_shape=SHAPE,
            hidden_dtype=torch.float32,
            device=CPU,
            weight_gradients=gradients,
            sends_in_flight=schedule.sends_in_flight,
        )
        events.append(log)
    return events


def step_seconds(ranks: Sequence[Sequence[Event]]) -> float:
    """From the first event of a step to the last, over all ranks."""
    return max(event.finish for log in ranks for event in log) - min(
        event.start for log in ranks for event in log
    )


def benchmark_pipeline(pp: int, microbatches: int, milliseconds: float, rounds: int) -> list[Measured]:
    """Every schedule on `pp` processes, `rounds` steps each after one that is not counted."""
    results = []
    seconds = milliseconds / 1e3
    for name in SCHEDULES:
        schedule = make_schedule(name, pp, microbatches, 2 if name == "interleaved" else 1)
        chunk = seconds * pp / schedule.num_stages
        predicted = simulate(schedule, chunk, chunk, chunk).makespan
        ranks = _in_processes(pp, run_steps, schedule, seconds, 1 + rounds)
        times = [step_seconds([log[step] for log in ranks]) for step in range(1, 1 + rounds)]
        results.append(Measured(schedule, predicted, statistics.median(times), in_flight_peaks(schedule)))
    return results


def table(results: Sequence[Measured]) -> str:
    """Markdown. Activations are counted in micro-batches of a rank's whole share of the model."""
    lines = [
        "| schedule | predicted ms | measured ms | measured / predicted | of 1F1B's time | held |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    base = next(one.seconds for one in results if one.schedule.name == "1f1b")
    for one in results:
        chunks = len(one.schedule.stages[0])
        held = ", ".join(f"{peak / chunks:g}" for peak in one.held)
        lines.append(
            f"| {one.schedule.name} | {1e3 * one.predicted:.0f} | {1e3 * one.seconds:.0f} | "
            f"{one.seconds / one.predicted:.3f} | {one.seconds / base:.3f} | {held} |"
        )
    return "\n".join(lines)


def _in_processes(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on `count` ranks over Gloo; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            calls = [(function, args, rank, count, store) for rank in range(count)]
            return pool.starmap(_on_rank, calls, chunksize=1)


def _on_rank(function: Callable[..., Any], args: tuple[Any, ...], rank: int, count: int, store: str) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=TIMEOUT
    )
    try:
        result = function(*args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result
