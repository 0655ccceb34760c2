"""Many documents of one token: time to add them, to complete their .idx, and the memory that it takes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from megalite.data.indexed_dataset import DatasetWriter
from tools.benchmarks.data.measure import Row, in_process, peak_resident, resident

BATCH = 4000


def writing_rows(folder: Path, documents: int, rounds: int) -> list[Row]:
    """Each time in a new process."""
    runs = [in_process("writing", folder / "tiny", documents) for _ in range(rounds)]
    adding, completing, kibibytes = (min(values) for values in zip(*runs, strict=True))
    name = f"{documents:,} documents of one token"
    return [
        Row(f"{name}: adding", adding, "s"),
        Row(f"{name}: completing the .idx", completing, "s"),
        Row(f"{name}: memory", kibibytes / 1024, "MiB"),
    ]


def write_tiny(prefix: str, documents: int) -> tuple[float, float, int]:
    """Seconds to add, seconds to complete, KiB."""
    before, start = resident(), time.process_time()
    writer = DatasetWriter(prefix, "uint16", sync=False)
    tokens, ones = np.zeros(BATCH, dtype=np.uint16), np.ones(BATCH, dtype=np.int32)
    for _ in range(documents // BATCH):
        writer.add(tokens, ones)
    added = time.process_time()
    writer.publish()
    return added - start, time.process_time() - added, peak_resident() - before


if __name__ == "__main__":
    print(json.dumps(write_tiny(sys.argv[1], int(sys.argv[2]))))
