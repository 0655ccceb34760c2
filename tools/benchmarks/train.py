"""Tokens a second of training steps on this CPU, beside the loops that people would write instead."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megalite.config import Config, parse
from megalite.training.flops import flops_per_token
from tools.benchmarks.contender import with_recipe

CONTENDER = Path(__file__).with_name("contender.py")


@dataclass(frozen=True)
class Setting:
    """How a contender is started: processes, threads in each, flags of training that override the recipe."""

    name: str
    processes: int
    threads: int
    flags: tuple[str, ...] = ()
    kind: str = "megalite"

    @property
    def config(self) -> Config:
        """What is trained. Raises ConfigErrors."""
        return parse(with_recipe(self.flags), self.processes)

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all data-parallel ranks."""
        return self.config.batch.global_batch_size * self.config.model.seq_length


TP = ("--tensor-model-parallel-size", "2")
SP = (*TP, "--sequence-parallel")
# Of pp 2: a head of 32,000 x 512 has the matrix products of 5 layers, and takes the time of some 4.
PP = ("--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "2")
CHEAP_PARTS = ("--recompute-granularity", "selective", "--recompute-modules", "norm", "mlp_act", "rope")
WHOLE_LAYERS = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
TWICE = ("--global-batch-size", "32")
SETTINGS = (
    Setting("transformers", 1, 2, kind="transformers"),
    Setting("megalite", 1, 2),
    Setting("megalite, norm mlp_act rope recomputed", 1, 2, CHEAP_PARTS),
    Setting("megalite, layers recomputed", 1, 2, WHOLE_LAYERS),
    Setting("megalite tp 2", 2, 1, TP),
    Setting("megalite tp 2, sp", 2, 1, SP),
    Setting("megalite tp 2, sp, overlap", 2, 1, (*SP, "--tp-comm-overlap")),
    Setting("megalite pp 2", 2, 1, (*PP, *TWICE)),
    Setting("megalite dp 2", 2, 1, TWICE),
    Setting("transformers ddp 2", 2, 1, TWICE, kind="transformers"),
)


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; `ratio`: of each round's rate to that of megalite in one process."""

    setting: Setting
    tokens_per_second: float
    ratio: float
    peak_bytes: int


def matmul_rate(threads: int = 2, size: int = 2048) -> float:
    """FLOP/s of a large bf16 matrix product, the best of several: what this machine can do."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def benchmark_training(
    rounds: int = 5, steps: int = 2, settings: tuple[Setting, ...] = SETTINGS
) -> list[Result]:
    """Each round starts every contender once, so that a busy neighbour slows all of them alike."""
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    peaks: dict[Setting, int] = {}
    for _ in range(rounds):
        for setting in settings:
            seconds, peak = _run(setting, steps)
            rates[setting].append(setting.tokens / statistics.median(seconds))
            peaks[setting] = max(peak, peaks.get(setting, 0))
    own = rates[next((setting for setting in settings if setting.name == "megalite"), settings[0])]
    return [
        Result(
            setting,
            statistics.median(rates[setting]),
            statistics.median(rate / mine for rate, mine in zip(rates[setting], own, strict=True)),
            peaks[setting],
        )
        for setting in settings
    ]


def _run(setting: Setting, steps: int) -> tuple[list[float], int]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
        if setting.processes > 1
        else []
    )
    flags = ["--steps", str(steps), "--threads", str(setting.threads), *setting.flags]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(setting.threads),
        "PYTHONPATH": str(CONTENDER.parents[2]),
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(CONTENDER), setting.kind, *flags],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{setting.name} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["seconds"], result["peak_bytes"]


def report(results: list[Result], peak: float) -> None:
    """Print the table; `peak`: FLOP/s that the machine can do."""
    table = Table(title=f"training, tokens/s; bf16 matrix product: {peak / 1e9:.0f} GFLOP/s")
    for column in (
        "",
        "processes x threads",
        "micro-batches",
        "tokens/s",
        "of megalite",
        "of matmul rate",
        "peak GB",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for result in results:
        setting = result.setting
        table.add_row(
            setting.name,
            f"{setting.processes} x {setting.threads}",
            str(setting.config.num_microbatches(setting.processes)),
            f"{result.tokens_per_second:.0f}",
            f"{result.ratio:.2f}",
            f"{result.tokens_per_second * flops_per_token(setting.config.model) / peak:.0%}",
            f"{result.peak_bytes / 1e9:.2f}",
        )
    Console(width=110).print(table)
