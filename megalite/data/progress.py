"""Shows how work on data advances: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megalite.data.inputs import Part, is_compressed, read_once
from megalite.data.preprocess import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REFRESH_SECONDS = 0.1
LINE_SECONDS = 1.0  # between lines at least
READING_LINE_SECONDS = 10.0


class _Display:
    """A bar or lines on standard error; nothing before the first `draw`."""

    def __init__(self, line_seconds: float) -> None:
        """`line_seconds`: between lines at least."""
        self._line_seconds = line_seconds
        self._bar: Bar | None = None
        self.begin()

    def begin(self) -> None:
        """Rates count from now on."""
        self._start = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def draw(self, text: str, done: int, total: int | None, first: int = 0, line: bool = True) -> bool:
        """`done` of `total` bytes, the `first` of them by an earlier run; `line`: one may be written. Returns
        whether one was.
        """
        now = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = self._bar or _started_bar()
            due = now - self._last >= REFRESH_SECONDS
            self._last = now if due else self._last
            self._bar.update(
                self._bar.task_ids[0], completed=done, total=total, description=text, refresh=due
            )
            return False
        if not line or now - self._last < self._line_seconds:
            return False
        self._last = now
        rest = 0 if total is None else max(total - done, 0)  # the last line of a share ends behind it
        left = "" if total is None or done == first else _time(rest * self.seconds / (done - first))
        print(text + left, file=sys.stderr, flush=True)
        return True

    def stop(self) -> None:
        """The bar stays as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _started_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    # Drawn by `draw`: a thread of its own is one that the system may not give.
    bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
    bar.add_task("", total=None)
    bar.start()
    return bar


def _time(seconds: float) -> str:
    left = round(seconds)
    return f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


class ReadingDisplay:
    """MB/s and the time left of files that are read whole."""

    def __init__(self, what: str) -> None:
        """`what`: as in "Merged"."""
        self._what = what
        self._done = 0
        self._display = _Display(READING_LINE_SECONDS)

    def __enter__(self) -> ReadingDisplay:
        self._display.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the terminal to another display."""
        self._display.stop()

    def show(self, size: int, total: int) -> None:
        """Called behind each piece of `size` bytes of `total`."""
        self._done += size
        rate = self._done / self._display.seconds / 1e6
        text = f"{self._what} {self._done / 1e9:,.1f} of {total / 1e9:,.1f} GB ({rate:,.0f} MB/s)"
        self._display.draw(text, self._done, total)


class ProgressDisplay:
    """Documents/s, MB/s, tokens/s and the time left.

    The time left is known for plain files; compressed ones do not say how long they will be.
    """

    def __init__(self, inputs: Sequence[Part], log_interval: int) -> None:
        """`log_interval`: documents between lines where standard error is not a terminal; at most one a
        second.
        """
        unknown = any(
            read_once(part.path) or is_compressed(part.path) or part.format == "parquet" for part in inputs
        )
        self._total = None if unknown else sum(_bytes(part) for part in inputs)
        self._interval = log_interval
        self._display = _Display(LINE_SECONDS)
        self._read_back = ReadingDisplay("Read back")
        self._last_documents = 0
        self.skipped = 0
        self._first: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        self._display.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._read_back.stop()
        self._display.stop()

    def read_back(self, size: int, total: int) -> None:
        """Called behind each piece of `size` bytes that an interrupted run has written, of `total`."""
        self._read_back.show(size, total)
        self._display.begin()

    def show(self, progress: Progress) -> None:
        """Called after each batch."""
        self._read_back.stop()
        self.skipped = progress.skipped
        if self._first is None:  # a resumed run does not count what an earlier one did
            self._first = Progress(progress.documents, progress.tokens, progress.input_bytes)
        first, seconds = self._first, self._display.seconds
        text = (
            f"Processed {progress.documents:,} documents "
            f"({(progress.documents - first.documents) / seconds:,.0f} docs/s, "
            f"{(progress.input_bytes - first.input_bytes) / seconds / 1e6:,.1f} MB/s, "
            f"{(progress.tokens - first.tokens) / seconds:,.0f} tokens/s)"
        )
        enough = progress.documents - self._last_documents >= self._interval
        if self._display.draw(text, progress.input_bytes, self._total, first.input_bytes, enough):
            self._last_documents = progress.documents


def _bytes(part: Part) -> int:
    return (os.path.getsize(part.path) if part.end < 0 else part.end) - part.start
