"""`tools/plan.py activations`: the rows of a configured run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megalite.model.activation_table import GPT, reference_config, rows_of

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --bf16 "
    "--tensor-model-parallel-size 2 --recompute-budget 0.5"
)


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), "activations", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_it_prints_the_rows_of_the_run_that_the_flags_describe() -> None:
    done = plan("--world-size", "2", *FLAGS.split())
    assert done.returncode == 0, done.stderr
    words = [line.replace("│", " ").split() for line in done.stdout.splitlines() if "│" in line]
    full = next(row for row in words if row[0] == "full" and row[1] != "distributed")
    assert full == ["full", f"{2 * 64 * 2 * 64:,}", "2.000", "2", full[-1]]
    assert {"nothing", "norm", "core_attn", "mlp", "attn"} <= {row[0] for row in words}


def test_flags_that_cannot_train_are_errors() -> None:
    done = plan("--world-size", "3", *FLAGS.split())
    assert done.returncode == 2
    assert "3 processes not divisible by TP 2" in done.stderr


def test_formulas_that_are_not_for_the_layer_are_left_out() -> None:
    rows = list(rows_of(reference_config(GPT, 1, False)))
    assert [row.mode for row in rows if row.published is not None] == ["nothing", "full"]
