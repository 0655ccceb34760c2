"""What a run reports: Megatron-LM's log line, one JSON object a logged step, TensorBoard scalars."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from megalite.training.flops import CONVENTION


@dataclass(frozen=True)
class StepMetrics:
    """Figures of the steps since the last report. Times are wall time, rates a device (or process).

    `lm_loss`: nats a token, averaged over the steps. `grad_norm`, `learning_rate`, `loss_scale`: of
    the last step. `skipped`: steps whose update was left out; `nan`: those of them without an overflow to
    blame. `seconds_left`: until the run's last sample, at this rate of samples. `global_batch_size`: of the
    last step.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    elapsed_ms: float
    data_wait_ms: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    memory_bytes: int
    skipped: int
    nan: int
    seconds_left: float

    def line(self) -> str:
        """Megatron-LM's log line; tokens/s, MFU, data wait, memory and time left follow its last field."""
        left = timedelta(seconds=round(self.seconds_left))
        digits = 1 if self.tflops_per_gpu >= 1 else 4  # on a CPU it would read 0.0
        parts = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.elapsed_ms:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_gpu:.{digits}f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.lm_loss:.6E}",
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.nan:3d}",
            f"tokens/s/GPU: {self.tokens_per_second_per_gpu:.1f}",
        ]
        if self.mfu is not None:
            parts.append(f"MFU: {self.mfu:.1%} ({CONVENTION})")
        parts += [
            f"data wait (ms): {self.data_wait_ms:.1f}",
            f"memory (MiB): {self.memory_bytes / 2**20:.0f}",
            f"time left: {left}",
        ]
        return " | ".join(parts) + " |"


def validation_lines(label: str, loss: float) -> str:
    """Megatron-LM's report of an evaluation, between dashed lines. The perplexity is cut at exp(20)."""
    perplexity = math.exp(min(loss, 20.0))  # in this order NaN stays NaN
    text = f" validation loss at {label} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
    rule = "-" * len(text)
    return f"{rule}\n{text}\n{rule}"


class Reporter:
    """Writes metrics to the console, a JSON-lines file and TensorBoard; silent unless `enabled`.

    Both files are appended to, so that a resumed run continues them. What cannot be written, as on a full
    disk, does not end the run; it is told once.
    """

    def __init__(self, metrics_file: str | None, tensorboard_dir: str | None, enabled: bool):
        self.enabled = enabled
        self.metrics_file, self.tensorboard_dir = metrics_file, tensorboard_dir
        self._file: FileIO | None = None
        self._torn = False  # whether the file ends within a line
        self._board: Any = None
        self._failing: set[str] = set()  # names of what cannot be written

    def __enter__(self) -> Reporter:
        if self.enabled and self.metrics_file is not None:
            path = Path(self.metrics_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_within_a_line(path)
            self._file = path.open("ab", buffering=0)
        if self.enabled and self.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # an optional dependency, slow to import

            with self._going_on(self.tensorboard_dir):
                self._board = SummaryWriter(self.tensorboard_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with self._going_on(str(self.metrics_file)):
                self._file.close()
        if self._board is not None:
            with self._going_on(str(self.tensorboard_dir)):
                self._board.close()

    def say(self, text: str) -> None:
        """Print a line on the reporting rank."""
        if self.enabled:
            print(text, flush=True)

    def step(self, metrics: StepMetrics) -> None:
        """Report training steps."""
        if not self.enabled:
            return
        self.say(metrics.line())
        record = {key: value for key, value in asdict(metrics).items() if value is not None}
        self._write(record)
        for field in fields(metrics):
            if field.name in record:
                self._draw(field.name, record[field.name], metrics.iteration)

    def validation(self, iteration: int, name: str, label: str, loss: float | None) -> None:
        """Report an evaluation, None: that it was given up; `name` is the key, valid_loss or test_loss."""
        if not self.enabled:
            return
        if loss is None:
            self.say(f"the evaluation at {label} was given up")
            return
        self.say(validation_lines(label, loss))
        self._write({"iteration": iteration, name: loss})
        self._draw(name, loss, iteration)

    def _draw(self, name: str, value: float, iteration: int) -> None:
        if self._board is not None:
            with self._going_on(str(self.tensorboard_dir)):
                self._board.add_scalar(name, value, iteration)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        left = memoryview((b"\n" if self._torn else b"") + orjson.dumps(record) + b"\n")
        with self._going_on(str(self.metrics_file)):
            while left:
                left = left[self._file.write(left) :]
                self._torn = len(left) > 0

    @contextlib.contextmanager
    def _going_on(self, path: str) -> Iterator[None]:
        """Around what writes to `path`: an OSError is told when it is the first."""
        try:
            yield
        except OSError as error:
            if path not in self._failing:
                self._failing.add(path)
                reason = error.strerror or error
                print(f"warning: {path}: cannot be written: {reason}; the run goes on", file=sys.stderr)


def _ends_within_a_line(path: Path) -> bool:
    """Whether a killed run left half a record, which must not swallow the next one."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
