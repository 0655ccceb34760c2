"""A pipeline schedule in a CSV file, as torch.distributed.pipelining writes them: its cells, not their sense.

A line a rank, a cell `<stage><kind><micro-batch>` an action in its order; empty cells are skipped:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

F is a forward, B a backward; I and W are a backward's two parts, input and weight gradient.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path

from megalite.config.paths import open_regular

CELL = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})", re.ASCII)
MOST_BYTES = 2**24
MOST_ACTIONS = 2**20  # pp 64 with 8 chunks and 1024 micro-batches is half of it


@dataclass(frozen=True)
class ScheduleFile:
    """`ranks[rank]`: its actions as (stage, kind, micro-batch)."""

    ranks: tuple[tuple[tuple[int, str, int], ...], ...]

    @property
    def num_stages(self) -> int:
        return 1 + max(stage for rank in self.ranks for stage, _, _ in rank)

    @property
    def microbatches(self) -> int:
        return 1 + max(microbatch for rank in self.ranks for _, _, microbatch in rank)


def read_schedule_file(path: str | Path) -> ScheduleFile:
    """The cells of `path`. Raises ValueError, with line and cell, for a file that holds anything else."""
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} has more than {MOST_BYTES >> 20} MiB")
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.reader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "not a CSV file"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    ranks = tuple(_parse_row(row, f"{path}, line {number}") for number, row in enumerate(rows, 1))
    actions = sum(map(len, ranks))
    if actions == 0:
        raise ValueError(f"{path} holds no actions")
    if actions > MOST_ACTIONS:
        raise ValueError(f"{path} holds {actions} actions; at most {MOST_ACTIONS} are read")
    return ScheduleFile(ranks)


def _parse_row(row: list[str], where: str) -> tuple[tuple[int, str, int], ...]:
    cells = []
    for text in filter(None, (cell.strip() for cell in row)):
        match = CELL.fullmatch(text)
        if match is None:
            raise ValueError(f"{where}: cell {text[:40]!r} is not <stage><F, B, I or W><micro-batch>")
        cells.append((int(match[1]), match[2], int(match[3])))
    return tuple(cells)
