"""The data pipeline beside its alternatives, part after part in one run, a subject a file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from tools.benchmarks.data.blending import blending_rows
from tools.benchmarks.data.index import index_rows
from tools.benchmarks.data.measure import HEAD, HOW
from tools.benchmarks.data.preprocessing import preprocessing_rows
from tools.benchmarks.data.reading import reading_rows
from tools.benchmarks.data.writing import writing_rows

PEERS = ("megatron-core", "tokenizers", "fastokens", "gigatoken")


def benchmark_data(
    documents: int,
    rounds: int,
    corpus: Path,
    tokenizer_json: Path,
    parts: Sequence[str],
    show: Callable[[str], object],
) -> None:
    """The measures of `parts`, each shown as a line of a Markdown table when its part is done; megatron-core
    and the faster engines come along where they are installed.
    """
    start, count = time.perf_counter(), 0
    show(HEAD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = {
            "preprocessing": lambda: preprocessing_rows(
                folder, corpus.resolve(), tokenizer_json.resolve(), rounds
            ),
            "writing": lambda: writing_rows(folder, documents, rounds),
            "reading": lambda: reading_rows(folder, documents, rounds),
            "index": lambda: index_rows(folder, documents, rounds),
            "blending": lambda: blending_rows(rounds),
        }
        for part in parts:
            rows = run[part]()
            count += len(rows)
            show("\n".join(row.line() for row in rows))
    show(f"\n{count} measures in {time.perf_counter() - start:.0f} s.")


def conditions(rounds: int) -> str:
    """What is measured with, on what and how."""
    versions = []
    for name in PEERS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{datetime.now():%Y-%m-%d %H:%M}, {os.cpu_count()} cores of {_processor()}, "
        f"Python {platform.python_version()}; load {load} over the last 1, 5, 15 minutes.\n"
        f"Beside: {', '.join(versions)}.\n\n{HOW.format(rounds=rounds)}\n"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
