"""`tools/preprocess_data.py`, writing included, beside its engine alone on the same text, both cold and with
two threads.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.data.corpora import write_shuffled
from tools.benchmarks.data.measure import ROOT, Row, in_process

THREADS = 2
LIBRARY_REPEATS = 12  # of the corpus of 2 MB: costs that do not grow with it are not what is asked
ENGINE_BYTES = 300_000_000


@dataclass(frozen=True)
class Seconds:
    """Of one process."""

    cpu: float
    wall: float


def preprocessing_rows(folder: Path, corpus: Path, tokenizer_json: Path, rounds: int) -> list[Row]:
    """The library on the corpus twelve times, without the start-up of the tool; the faster engines that are
    installed on 300 MB, with the check of their ids, with start-up and without.
    """
    tool = _Tool(folder, tokenizer_json)
    tool.write_input(corpus, 0)
    start_up = [tool.run("library") for _ in range(max(rounds, 3))]
    start = Seconds(min(each.cpu for each in start_up), min(each.wall for each in start_up))
    size = tool.write_input(corpus, LIBRARY_REPEATS * corpus.stat().st_size)
    alone, whole = tool.beside("library", "tokenizers", rounds)
    rows = [
        Row("start-up of preprocess_data.py", start.cpu, "s"),
        Row("start-up of preprocess_data.py, wall time", start.wall, "s"),
        Row(
            f"preprocessing {size / 1e6:.0f} MB, library, without start-up",
            size / 1e6 / (whole.cpu - start.cpu),
            "MB a CPU second",
            size / 1e6 / alone.cpu,
            "encode_batch_fast alone",
        ),
    ]
    for engine in ("fastokens", "gigatoken"):
        if importlib.util.find_spec(engine) is None:
            continue
        size = tool.write_input(corpus, ENGINE_BYTES)
        alone, whole = tool.beside(engine, engine, rounds)
        name, megabytes = f"preprocessing {size / 1e6:.0f} MB, {engine}", size / 1e6
        for unit, ours, theirs in (
            ("MB a CPU second", whole.cpu, alone.cpu),
            ("MB a CPU second without start-up", whole.cpu - start.cpu, alone.cpu),
            ("MB/s, wall time", whole.wall, alone.wall),
            ("MB/s, wall time, without start-up", whole.wall - start.wall, alone.wall),
        ):
            rows.append(Row(name, megabytes / ours, unit, megabytes / theirs, f"{engine} alone"))
    return rows


class _Tool:
    def __init__(self, folder: Path, tokenizer_json: Path) -> None:
        self._input, self._output = folder / "corpus.jsonl", folder / "out"
        self._tokenizer_json = tokenizer_json

    def write_input(self, corpus: Path, size: int) -> int:
        """At least `size` bytes made of `corpus`; returns how many."""
        return write_shuffled(corpus, self._input, size)

    def run(self, engine: str) -> Seconds:
        """Preprocess the input. Raises RuntimeError with what the tool said when it fails."""
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(self._input)]
        command += ["--output-prefix", str(self._output), "--tokenizer-model", str(self._tokenizer_json)]
        command += ["--append-eod", "--workers", str(THREADS), "--engine", engine]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
        return Seconds(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)

    def beside(self, engine: str, module: str, rounds: int) -> tuple[Seconds, Seconds]:
        """The least of the engine alone and of the tool, in turns."""
        threads = {"RAYON_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "true"}
        alone, whole = [], []
        for _ in range(rounds):
            given = (module, self._tokenizer_json, self._input)
            alone.append(Seconds(*in_process("raw_engine", *given, variables=threads)))
            whole.append(self.run(engine))
        first, second = (
            Seconds(min(run.cpu for run in runs), min(run.wall for run in runs)) for runs in (alone, whole)
        )
        return first, second
