"""Large arrays in memory of the process's own, where the machine and its container can spare it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

RESERVE = 0.25  # of the machine's memory and of its container's is left to all others
TAKEN_AT_ONCE = 64 << 20  # bytes, then it is looked again: others may be taking memory, too
PAGE = 4096
# Where the files of control groups are mounted, and their names.
V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")


class Memory(NamedTuple):
    """Of a machine or container, in bytes."""

    total: int
    available: int


def spare_arrays(shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray] | None:
    """Arrays of these shapes and types, with content of any kind, all of whose memory is there; None where
    more than TAKEN_AT_ONCE would leave less than RESERVE, or where that is not known (not Linux).
    """
    left = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
    if left > TAKEN_AT_ONCE and not _spares(left):
        return None
    try:
        arrays = [np.empty(shape, dtype=dtype) for shape, dtype in shapes]
    except MemoryError:  # ulimit -v
        return None
    for array in arrays:
        content = array.reshape(-1).view(np.uint8)
        for start in range(0, len(content), TAKEN_AT_ONCE):
            if start and not _spares(left):
                return None
            piece = content[start : start + TAKEN_AT_ONCE]
            piece[::PAGE] = 0  # the kernel gives a page when it is touched
            left -= len(piece)
    return arrays


def _spares(size: int) -> bool:
    memories = list(known_memories(Path("/")))
    return bool(memories) and all(memory.available - size >= RESERVE * memory.total for memory in memories)


def known_memories(root: Path) -> Iterator[Memory]:
    """Of the machine, and of each control group with a limit that this process is in; `root`: where `proc`
    and `sys` are mounted. A file in the page cache counts as available.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        machine = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)
        }
        yield Memory(machine["MemTotal"], machine["MemAvailable"])
        own_groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, LookupError, ValueError):
        return
    for own in own_groups:
        _, controllers, path = own.split(":", 2)
        if controllers == "":
            mount, limit, usage, prefix = V2
        elif "memory" in controllers.split(","):
            mount, limit, usage, prefix = V1
        else:
            continue
        for group in _up_to(root / mount, path):
            try:
                total = int((group / limit).read_text())
                if total >= machine["MemTotal"]:
                    continue
                used = int((group / usage).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):  # no such group here, or "max"
                continue
            counts = dict(line.split() for line in lines)
            cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield Memory(total, total - used + cached)


def _up_to(mount: Path, path: str) -> Iterator[Path]:
    """The group `path` and those around it up to `mount`, which in a container may be all that is seen."""
    group = mount / path.lstrip("/")
    while group != mount:
        yield group
        group = group.parent
    yield mount
