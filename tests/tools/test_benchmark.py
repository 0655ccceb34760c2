"""`tools/benchmark.py train`: the runs that it compares, and one that the flags of training describe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megalite.config import parse
from tools import benchmark
from tools.benchmarks.contender import megalite, with_recipe
from tools.benchmarks.train import SETTINGS, Setting

TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --vocab-size 64"
SHORT = "--seq-length 16 --micro-batch-size 1 --global-batch-size 2"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_row_can_be_started(setting: Setting) -> None:
    ranks = setting.config.data_parallel_size(setting.processes)
    microbatches = 8 if "pp" in setting.name else 4
    assert setting.tokens == ranks * microbatches * 4 * 512


def test_flags_of_training_override_the_recipe() -> None:
    config = parse(with_recipe(f"{TINY} {SHORT}".split()), 1)
    assert (config.model.num_layers, config.model.seq_length, config.model.swiglu) == (1, 16, True)
    assert (config.batch.global_batch_size, config.precision.params_dtype) == (2, "bfloat16")
    step = megalite(config, world_size=1)
    assert step() is not None


def test_a_run_that_cannot_be_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["benchmark.py", "train", "--processes", "2", "--tensor-model-parallel-size", "3"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as left:
        benchmark.main()
    assert left.value.code == 2
    assert "--tensor-model-parallel-size 3: 2 processes not divisible" in capsys.readouterr().err


def test_flags_of_training_are_for_training_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "head", "--num-layers", "3"])
    with pytest.raises(SystemExit) as left:
        benchmark.main()
    assert left.value.code == 2
    assert "unrecognized arguments: --num-layers 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--corpus", "nosuch.jsonl"], 1, "benchmark: error: nosuch.jsonl: no such file"),
        (["--tokenizer-model", "nosuch.json"], 1, "benchmark: error: nosuch.json: no such file"),
        (["--rounds", "0"], 2, "--rounds: 0: expected a whole number from 1"),
        (["--documents", "-5"], 2, "--documents: -5: expected a whole number from 1"),
    ],
)
def test_wrong_flags_of_the_data_benchmark_are_messages(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", *flags])
    try:
        left: object = benchmark.main()
    except SystemExit as leaving:
        left = leaving.code
    assert left == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"text": ["a", "b"]}', '{"text": "a", "s": NaN}', '["a"]', ""])
def test_a_corpus_that_not_every_engine_takes_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "data", "--corpus", str(tmp_path / "in.jsonl")])
    assert benchmark.main() == 1
    assert (
        f"{tmp_path}/in.jsonl:2: expected a JSON object, without NaN, with a text" in capsys.readouterr().err
    )
    (tmp_path / "in.jsonl").write_text("")
    assert benchmark.main() == 1
    assert f"{tmp_path}/in.jsonl: holds no text" in capsys.readouterr().err
