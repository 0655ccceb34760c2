"""A run from the command line: what it prints, what it writes, and that it resumes exactly."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.end_to_end.launch import launch

ITERATION = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\] iteration +(?P<iteration>\d+)/ +4 "
    r"\| consumed samples: +(?P<samples>\d+) "
    r"\| elapsed time per iteration \(ms\): (?P<ms>\d+\.\d) "
    r"\| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ "
    r"\| learning rate: (?P<rate>\d\.\d{6}E[+-]\d\d) "
    r"\| global batch size: +8 "
    r"\| lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) "
    r"\| loss scale: 1\.0 "
    r"\| grad norm: (?P<norm>\d+\.\d{3}) "
    r"\| number of skipped iterations: +0 "
    r"\| number of nan iterations: +0 \|.*"
)
STEP_KEYS = {
    "iteration",
    "consumed_samples",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "elapsed_ms",
    "skipped",
}


@dataclass(frozen=True)
class Run:
    """A finished run with its files."""

    process: subprocess.CompletedProcess[str]
    metrics: Path
    checkpoints: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def figures(self, *names: str) -> list[tuple[Any, ...]]:
        """(iteration, name, value) of what the metrics file tells of `names`, in its order."""
        return [(one["iteration"], name, one[name]) for one in self.records for name in names if name in one]

    def weights(self, iteration: int, scratch: Path) -> dict[str, Any]:
        """All that the checkpoint holds, read by PyTorch and not by the product."""
        dcp_to_torch_save(self.checkpoints / f"iter_{iteration:07d}", scratch)
        return flat(torch.load(scratch, weights_only=True))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def train(folder: Path, *flags: str) -> Run:
    metrics, checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
    process = launch(
        "--pipeline-model-parallel-size",
        "2",
        "--metrics-file",
        str(metrics),
        "--save",
        str(checkpoints),
        *flags,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return Run(process, metrics, checkpoints)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps without a stop, two pipeline stages: only the last has the loss."""
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps, a stop, and the same command again with --load."""
    folder = tmp_path_factory.mktemp("resumed")
    stopped = train(folder, "--exit-interval", "2")
    assert "stopping after iteration 2" in stopped.process.stdout
    return train(folder, "--load", str(folder / "checkpoints"))


def test_each_step_prints_megatrons_line_once(whole: Run) -> None:
    lines = [
        line for line in whole.process.stdout.splitlines() if " iteration " in line and "lm loss:" in line
    ]
    matches = [ITERATION.fullmatch(line) for line in lines]
    assert all(matches), "\n".join(lines)
    found = [match for match in matches if match]
    assert [int(match["iteration"]) for match in found] == [1, 2, 3, 4]
    assert [int(match["samples"]) for match in found] == [8, 16, 24, 32]
    assert all("tokens/s/GPU:" in line for line in lines)


def test_the_metrics_file_holds_what_was_printed(whole: Run) -> None:
    steps = [record for record in whole.records if "lm_loss" in record]
    assert all(record.keys() >= STEP_KEYS for record in steps)
    printed = [ITERATION.fullmatch(line) for line in whole.process.stdout.splitlines()]
    lines = [match for match in printed if match]
    assert [f"{record['lm_loss']:.6E}" for record in steps] == [match["loss"] for match in lines]
    assert [f"{record['learning_rate']:.6E}" for record in steps] == [match["rate"] for match in lines]
    assert [f"{record['grad_norm']:.3f}" for record in steps] == [match["norm"] for match in lines]
    assert steps[0]["lm_loss"] == pytest.approx(math.log(61), abs=0.1)


def test_validation_and_test_losses_are_reported(whole: Run) -> None:
    assert [iteration for iteration, _, _ in whole.figures("valid_loss")] == [2, 4]
    assert [iteration for iteration, _, _ in whole.figures("test_loss")] == [4]
    (_, _, loss), *_ = whole.figures("valid_loss")
    line = (
        f" validation loss at iteration 2 | lm loss value: {loss:.6E} | lm loss PPL: {math.exp(loss):.6E} | "
    )
    assert line in whole.process.stdout.splitlines()


def test_a_run_ends_with_a_checkpoint_and_says_how_to_go_on(whole: Run) -> None:
    assert (whole.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert f"--load {whole.checkpoints}" in whole.process.stdout
    assert "Traceback" not in whole.process.stderr
    assert "Warning" not in whole.process.stderr, whole.process.stderr


def test_a_resumed_run_is_the_same_to_the_bit(whole: Run, resumed: Run, tmp_path: Path) -> None:
    names = ("lm_loss", "grad_norm", "learning_rate", "valid_loss", "test_loss")
    after = [figure for figure in whole.figures(*names) if figure[:2] != (2, "valid_loss")]
    again = [figure for figure in resumed.figures(*names) if figure[:2] != (2, "valid_loss")]
    assert again == after
    assert len(after) == 4 * 3 + 2
    expected = whole.weights(4, tmp_path / "whole.pt")
    found = resumed.weights(4, tmp_path / "resumed.pt")
    assert found.keys() == expected.keys()
    assert {name.split(".")[0] for name in expected} >= {"model", "optimizer"}
    for name, value in expected.items():
        assert isinstance(value, torch.Tensor), name
        assert torch.equal(found[name], value), name
    before = whole.weights(4, tmp_path / "again.pt")["model.final_norm.weight"]
    assert not torch.equal(before, torch.ones_like(before)), "the weights must have moved"
