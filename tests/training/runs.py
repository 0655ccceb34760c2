"""Short runs of the trainer in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megalite.config import parse
from megalite.parallel.topology import build_topology
from megalite.training.loop import run

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 2 --tokenizer-type NullTokenizer "
    "--vocab-size 31 --lr 1e-2 --log-interval 1 --eval-iters 0 --no-memory-report"
)


def train(*flags: str, batch: int = 4, mock: bool = True, started: float | None = None) -> None:
    data = ["--mock-data"] if mock else []
    argv = [*MODEL.split(), *data, "--global-batch-size", str(batch), *" ".join(flags).split()]
    run(parse(argv, 1), build_topology(1, 1, torch.device("cpu")), started)


def progress_of(folder: Path, iteration: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / f"iter_{iteration:07d}" / "state.json").read_text())
    return state["progress"]
