"""Shows how a preprocessing run advances: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.data.inputs import COMPRESSED, Part, read_once
from megalite.data.preprocess import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REFRESH_SECONDS = 0.1


class ProgressDisplay:
    """Documents/s, MB/s, tokens/s and the time left, on standard error.

    The time left is known for plain files; compressed ones do not say how long they will be.
    """

    def __init__(self, inputs: Sequence[Part], log_interval: int) -> None:
        """`log_interval`: documents between lines where standard error is not a terminal; at most one a
        second.
        """
        unknown = any(
            read_once(part.path) or part.path.endswith(COMPRESSED) or part.format == "parquet"
            for part in inputs
        )
        self._total = None if unknown else sum(_bytes(part) for part in inputs)
        self._interval = log_interval
        self._start = self._last = time.monotonic()
        self._last_documents = 0
        self.skipped = 0
        self._first: Progress | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> ProgressDisplay:
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            # Drawn by `show`: a thread of its own is one that the system may not give.
            self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Called after each batch."""
        self.skipped = progress.skipped
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
            due = now - self._last >= REFRESH_SECONDS
            self._last = now if due else self._last
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=progress.input_bytes, description=text, refresh=due)
        elif now - self._last >= 1 and progress.documents - self._last_documents >= self._interval:
            self._last, self._last_documents = now, progress.documents
            print(f"Processed {text}{self._time_left(progress, seconds)}", file=sys.stderr, flush=True)

    def _time_left(self, progress: Progress, seconds: float) -> str:
        done = 0 if self._first is None else progress.input_bytes - self._first.input_bytes
        if self._total is None or done == 0:
            return ""
        left = round((self._total - progress.input_bytes) * seconds / done)
        return f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


def _bytes(part: Part) -> int:
    return (os.path.getsize(part.path) if part.end < 0 else part.end) - part.start
