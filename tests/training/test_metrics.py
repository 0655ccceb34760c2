"""Console line, JSON lines and validation report."""

from __future__ import annotations

import errno
import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.training.metrics import Reporter, StepMetrics, validation_lines

METRICS = StepMetrics(
    iteration=20,
    train_iters=1000,
    consumed_samples=640,
    global_batch_size=32,
    lm_loss=5.4321,
    grad_norm=1.2345,
    learning_rate=3e-4,
    loss_scale=1.0,
    elapsed_ms=250.0,
    data_wait_ms=0.5,
    tokens_per_second_per_gpu=2048.0,
    tflops_per_gpu=410.26,
    mfu=None,
    memory_bytes=2**30,
    skipped=0,
    nan=0,
    seconds_left=245.0,
)

# What scripts that read Megatron-LM's log look for, field by field, in this order.
MEGATRON = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): ([\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \| "
    r"learning rate: ([-+.\dE]+) \| global batch size: +(\d+) \| lm loss: ([-+.\dE]+) \| "
    r"loss scale: ([\d.]+) \| grad norm: ([\d.]+) \| "
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


def test_the_line_reads_as_megatrons() -> None:
    found = MEGATRON.match(METRICS.line())
    assert found is not None, METRICS.line()
    assert found.groups() == (
        *(
            "20",
            "1000",
            "640",
            "250.0",
            "410.3",
            "3.000000E-04",
            "32",
            "5.432100E+00",
            "1.0",
            "1.234",
            "0",
            "0",
        ),
    )


def test_rates_that_megatron_does_not_print_follow() -> None:
    line = replace(METRICS, mfu=0.415).line()
    assert "tokens/s/GPU: 2048.0" in line
    assert "MFU: 41.5% (causal attention counted half, recompute not counted)" in line
    assert "memory (MiB): 1024" in line
    assert "time left: 0:04:05" in line
    assert "MFU" not in METRICS.line()


def test_a_small_rate_is_not_printed_as_zero() -> None:
    assert "TFLOP/s/GPU): 0.0123 |" in replace(METRICS, tflops_per_gpu=0.01234).line()


def test_perplexity_is_cut() -> None:
    rule, text, again = validation_lines("iteration 5", 2.0).splitlines()
    assert (
        text == " validation loss at iteration 5 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert rule == again == "-" * len(text)
    assert "lm loss PPL: 4.851652E+08" in validation_lines("iteration 5", 25.0)


def test_json_lines_are_appended_by_the_reporting_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for enabled in (False, True, True):
        with Reporter(str(path), None, enabled) as reporter:
            reporter.step(METRICS)
            reporter.validation(20, "valid_loss", "iteration 20", 5.5)
        assert path.exists() == enabled
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 4
    assert records[1] == {"iteration": 20, "valid_loss": 5.5}
    required = {"iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "loss_scale"}
    required |= {"tokens_per_second_per_gpu", "tflops_per_gpu", "elapsed_ms", "skipped"}
    assert required <= set(records[0])
    assert records[0]["lm_loss"] == METRICS.lm_loss


def test_nothing_is_printed_by_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(None, None, enabled=False) as reporter:
        reporter.step(METRICS)
        reporter.say("hello")
    assert capsys.readouterr().out == ""


def test_a_record_cut_off_by_a_kill_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration":1}\n{"iterat')
    with Reporter(str(path), None, enabled=True) as reporter:
        reporter.validation(2, "valid_loss", "iteration 2", 5.5)
    assert json.loads(path.read_text().splitlines()[-1]) == {"iteration": 2, "valid_loss": 5.5}


def test_a_disk_that_is_full_before_the_run_does_not_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=full))
    with Reporter(None, str(tmp_path), enabled=True) as reporter:
        reporter.validation(1, "valid_loss", "iteration 1", 5.5)
    told = f"warning: {tmp_path}: cannot be written: No space left on device; the run goes on\n"
    assert capsys.readouterr().err == told


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Reporter(str(path), None, enabled=True) as reporter:
        reporter.validation(1, "valid_loss", "iteration 1", 5.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, unlimited[1]))
        try:
            for iteration in (2, 3):
                reporter.validation(iteration, "valid_loss", f"iteration {iteration}", 5.5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        reporter.validation(4, "valid_loss", "iteration 4", 5.5)
    told = f"warning: {path}: cannot be written: File too large; the run goes on\n"
    assert capsys.readouterr().err == told, "once"
    first, torn, last = path.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in (first, last)] == [1, 4]
    assert torn == '{"ite'


def test_the_perplexity_of_nan_is_nan() -> None:
    assert "lm loss PPL: NAN" in validation_lines("iteration 5", float("nan"))
