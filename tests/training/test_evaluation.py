"""Validation while training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.checkpoint import complete_iterations
from megalite.data.errors import DataError
from tests.data.corpora import write_dataset
from tests.training.runs import progress_of, train


def test_rarer_evaluations_after_a_resume_start_over_with_the_validation_data(tmp_path: Path) -> None:
    train("--train-iters 6 --eval-iters 1 --eval-interval 1 --exit-interval 4 --save", str(tmp_path))
    assert progress_of(tmp_path, 4)["consumed_valid_samples"] == 4 * 4
    train("--train-iters 6 --eval-iters 1 --eval-interval 5 --load", str(tmp_path), "--save", str(tmp_path))
    assert progress_of(tmp_path, 6)["consumed_valid_samples"] == 4


def test_a_validation_that_fails_costs_no_steps(tmp_path: Path) -> None:
    """The resume goes on behind it, with the validation samples that are next."""
    data, save, metrics = write_dataset(tmp_path / "a", [9] * 40, 30), tmp_path / "save", tmp_path / "m.jsonl"
    flags = ["--train-iters 6 --eval-iters 1 --eval-interval 2 --save-interval 2 --train-data-path", data]
    flags += ["--valid-data-path", str(tmp_path / "b"), "--metrics-file", str(metrics)]
    flags += ["--save", str(save), "--load", str(save)]
    write_dataset(tmp_path / "b", [9] * 40, 1000)
    with pytest.raises(DataError, match=r"b: document \d+ holds id"):
        train(*flags, mock=False)
    assert list(complete_iterations(save)) == [2]
    assert progress_of(save, 2)["consumed_valid_samples"] == 4
    write_dataset(tmp_path / "b", [9] * 40, 30)
    train(*flags, mock=False)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["iteration"] for record in records if "valid_loss" in record] == [4, 6]
    assert progress_of(save, 6)["consumed_valid_samples"] == 8
