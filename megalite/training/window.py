"""Figures of the steps since the last report, kept on the device until they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megalite.accelerator import peak_memory_bytes, synchronize
from megalite.config import Config
from megalite.parallel.mappings import all_reduce
from megalite.parallel.topology import Topology
from megalite.parallel.traffic import Timing
from megalite.training.errors import TrainingError
from megalite.training.flops import flops_per_token
from megalite.training.metrics import StepMetrics
from megalite.training.progress import Progress
from megalite.training.samples import End
from megalite.training.step import StepOutcome
from megalite.training.timing import timing_lines

# An fp16 run whose scale is at its minimum and that still overflows this often in a row will not recover.
MOST_SKIPS_AT_LOWEST_SCALE = 20


@dataclass(frozen=True)
class _Step:
    """Figures of one step, on the host."""

    loss: float
    grad_norm: float
    skipped: bool
    loss_scale: float


class Window:
    """Collects step outcomes; `settle` reads and judges them, `close` makes metrics of them."""

    def __init__(self, config: Config, topology: Topology, peak_flops: float | None, end: End):
        self.config, self.topology, self.peak_flops = config, topology, peak_flops
        self.end = end
        model, parallel = config.model, config.parallel
        self._flops_per_token = flops_per_token(model, parallel.tensor_model_parallel_size)
        self._outcomes: list[StepOutcome] = []  # not settled yet
        self._steps: list[_Step] = []
        self._samples: list[int] = []  # of each step
        self._data_wait = 0.0
        self._timing = Timing()
        self._started = time.perf_counter()

    def add(self, outcome: StepOutcome, samples: int, data_wait_seconds: float) -> None:
        """Note one step over `samples`. Reads nothing from the device."""
        self._outcomes.append(outcome)
        self._samples.append(samples)
        self._data_wait += data_wait_seconds

    @contextmanager
    def paused(self, progress: Progress) -> Iterator[Progress]:
        """Settle the steps so far, and count nothing of what is done inside as their time or traffic."""
        settled = self.settle(progress)
        begun = time.perf_counter()
        yield settled
        self._started += time.perf_counter() - begun
        self.topology.traffic.take()

    def settle(self, progress: Progress) -> Progress:
        """Wait for the steps noted so far and judge them; returns `progress` with the skipped ones counted.

        To be called before anything is done with their result: reporting, evaluating, saving, leaving. A
        collective over dp and pp, and the one place that waits for the device. Raises TrainingError on every
        rank when a gradient was not finite (unless --no-check-for-nan-in-loss-and-grad), or when the fp16
        loss scale cannot fall further.
        """
        synchronize(self.topology.device)
        self._timing += self.topology.traffic.take() or Timing()
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return progress
        losses = torch.stack([outcome.loss for outcome in outcomes]).double()
        losses = all_reduce(all_reduce(losses, self.topology.dp), self.topology.pp)
        steps = [
            _Step(loss, float(update.grad_norm), bool(update.skipped), float(update.loss_scale))
            for loss, update in zip(losses.tolist(), (outcome.update for outcome in outcomes), strict=True)
        ]
        self._check(progress.iteration - len(steps), steps, int(outcomes[-1].update.stuck))
        self._steps += steps
        skipped = sum(step.skipped for step in steps)
        return replace(progress, skipped_iterations=progress.skipped_iterations + skipped)

    def timing(self, lengths: Sequence[int]) -> list[str]:
        """Lines about where the time of the settled steps went, if asked for; before `close`. `lengths`:
        elements of each bucket.
        """
        level, seconds = self.config.logging.timing_log_level, time.perf_counter() - self._started
        if level == 0:
            return []
        return list(timing_lines(self._timing, len(self._steps), seconds, self._data_wait, level, lengths))

    def close(self, progress: Progress, learning_rate: float) -> StepMetrics:
        """Metrics of the settled steps since the last call."""
        seconds = time.perf_counter() - self._started
        steps, self._steps = self._steps, []
        count, last = len(steps), steps[-1]
        skipped = sum(step.skipped for step in steps)
        dynamic_scale = self.config.precision.params_dtype == "float16"
        trained = [step.loss for step in steps if not step.skipped]
        samples, self._samples = self._samples, []
        per_second = sum(samples) / seconds
        tokens = per_second * self.config.model.seq_length / self.topology.world_size
        flops = tokens * self._flops_per_token
        metrics = StepMetrics(
            iteration=progress.iteration,
            train_iters=self.end.iteration,
            consumed_samples=progress.consumed_samples,
            global_batch_size=samples[-1],
            lm_loss=sum(trained) / len(trained) if trained else last.loss,
            grad_norm=last.grad_norm,
            learning_rate=learning_rate,
            loss_scale=last.loss_scale,
            elapsed_ms=1e3 * seconds / count,
            data_wait_ms=1e3 * self._data_wait / count,
            tokens_per_second_per_gpu=tokens,
            tflops_per_gpu=flops / 1e12,
            mfu=None if self.peak_flops is None else flops / self.peak_flops,
            memory_bytes=peak_memory_bytes(self.topology.device),
            skipped=skipped,
            nan=0 if dynamic_scale else skipped,
            seconds_left=max(0, self.end.samples - progress.consumed_samples) / per_second,
        )
        self._data_wait, self._timing = 0.0, Timing()
        self._started = time.perf_counter()
        return metrics

    def _check(self, before: int, steps: list[_Step], stuck: int) -> None:
        """Stop a run that cannot go on. Every rank has the same numbers, so every rank stops."""
        if self.config.precision.params_dtype == "float16":
            if stuck >= MOST_SKIPS_AT_LOWEST_SCALE:
                raise TrainingError(
                    f"the last {stuck} steps overflowed at the lowest loss scale and were skipped: "
                    "training makes no progress. A lower --lr, "
                    "a longer warm-up, --bf16 or a smaller --min-loss-scale may help."
                )
        elif self.config.run.check_for_nan_in_loss_and_grad and any(step.skipped for step in steps):
            first = next(index for index, step in enumerate(steps) if step.skipped)
            raise TrainingError(
                f"iteration {before + first + 1}: the gradient norm is {steps[first].grad_norm}; "
                f"no update was made with it. "
                f"First suspects: the learning rate (--lr {self.config.optimizer.lr:g}) and its warm-up. "
                "--no-check-for-nan-in-loss-and-grad skips such steps and goes on."
            )
