"""Shows how a preprocessing run advances: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .preprocess import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class ProgressDisplay:
    """Documents/s, MB/s, tokens/s and the time left, on standard error.

    The time left is known for plain files; compressed ones do not say how long they will be.
    """

    def __init__(self, inputs: Sequence[str], log_interval: float) -> None:
        """``log_interval``: seconds between lines where standard error is not a terminal."""
        compressed = any(
            path == "-" or path.endswith((".gz", ".zst", ".zstd", ".parquet")) for path in inputs
        )
        self._total = None if compressed else sum(os.path.getsize(path) for path in inputs)
        self._interval = log_interval
        self._start = self._last = time.monotonic()
        self._first: Progress | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> ProgressDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Called after each batch."""
        now = time.monotonic()
        if self._first is None:  # a resumed run does not count what an earlier one did
            self._first = Progress(progress.documents, progress.tokens, progress.input_bytes)
        seconds = max(now - self._start, 1e-9)
        text = (
            f"{progress.documents:,} documents "
            f"({(progress.documents - self._first.documents) / seconds:,.0f} docs/s, "
            f"{(progress.input_bytes - self._first.input_bytes) / seconds / 1e6:,.1f} MB/s, "
            f"{(progress.tokens - self._first.tokens) / seconds:,.0f} tokens/s)"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=progress.input_bytes, description=text)
        elif now - self._last >= self._interval:
            self._last = now
            print(f"Processed {text}{self._time_left(progress, seconds)}", file=sys.stderr, flush=True)

    def _time_left(self, progress: Progress, seconds: float) -> str:
        done = 0 if self._first is None else progress.input_bytes - self._first.input_bytes
        if self._total is None or done == 0:
            return ""
        left = round((self._total - progress.input_bytes) * seconds / done)
        return f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
