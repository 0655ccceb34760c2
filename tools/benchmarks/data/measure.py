"""How the measures of the data pipeline are taken, and the table they are shown in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HOW = (
    "Times are CPU seconds of a process, the least of {rounds} rounds or more in which the contenders take "
    "turns, unless a row says wall time: they hold on a machine that others use as well, and leave out "
    "waiting for the disk. Memory is the growth of the peak resident set of a process of its own. "
    "Ratio: megalite's as part of the peer's."
)
HEAD = "| measure | megalite | peer | ratio | unit | what the peer is |\n" + "| --- " * 6 + "|"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    measure: str
    ours: float
    unit: str
    peer: float | None = None
    against: str = ""
    """What the peer is; without one the row has none."""

    def line(self) -> str:
        """Of a Markdown table, below HEAD."""
        missing = "not installed" if self.against else ""
        peer = missing if self.peer is None else _digits(self.peer)
        ratio = f"{self.ours / self.peer:,.3g}" if self.peer else ""
        cells = (self.measure, _digits(self.ours), peer, ratio, self.unit, self.against)
        return f"| {' | '.join(cells)} |"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def least(rounds: int, *tasks: Callable[[], object]) -> list[float]:
    """CPU seconds of each task, the least of `rounds` in which they take turns."""
    best = [float("inf")] * len(tasks)
    for _ in range(rounds):
        for i, task in enumerate(tasks):
            start = time.process_time()
            task()
            best[i] = min(best[i], time.process_time() - start)
    return best


def in_process(module: str, *arguments: object, variables: Mapping[str, str] | None = None) -> Any:
    """The JSON that a new process of the file `module` of this folder prints in its last line, given
    `arguments` and additional environment `variables`. Raises RuntimeError with what it said when it fails.
    """
    command = [sys.executable, "-m", f"tools.benchmarks.data.{module}", *map(str, arguments)]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """KiB that this process has in memory now; `peak_resident` counts from here on (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_resident() -> int:
    """KiB, the most since `resident`: getrusage's peak begins with that of the parent process."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
