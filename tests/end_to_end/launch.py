"""Starting `examples/pretrain_gpt.sh` on a tiny model and mock data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.sh"
# Far below the 10 minutes after which a hanging collective would end the job: no test can pass by way of it.
LIMIT_SECONDS = 240.0
MODEL_FLAGS = {
    "num-layers": "2",
    "hidden-size": "32",
    "num-attention-heads": "4",
    "num-query-groups": "2",
    "ffn-hidden-size": "64",
    "seq-length": "16",
    "max-position-embeddings": "16",
    "micro-batch-size": "2",
    "global-batch-size": "8",
    "train-iters": "4",
    "lr": "1e-2",
    "lr-warmup-fraction": "0.25",
    "log-interval": "1",
    "eval-interval": "2",
    "eval-iters": "1",
    "tokenizer-type": "NullTokenizer",
    "vocab-size": "61",
}


def environment() -> dict[str, str]:
    """This process's environment without what a surrounding launcher may have set; one thread a process, as
    the suite has the cores busy and threads wait for each other.
    """
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "TORCHELASTIC",
        "PET_",
        "SLURM_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


def command(*flags: str, processes: int = 2, mock: bool = True) -> list[str]:
    """The script with the tiny model's flags; those given come last and override."""
    model = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
    data = ["--mock-data", "--no-memory-report"] if mock else ["--no-memory-report"]
    return ["bash", str(SCRIPT), "--nproc-per-node", str(processes), *model, *data, *flags]


def launch(*flags: str, processes: int = 2, mock: bool = True) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr apart. Raises TimeoutExpired when the job hangs."""
    return subprocess.run(
        command(*flags, processes=processes, mock=mock),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
