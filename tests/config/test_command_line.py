"""Flags: spelling, help, Megatron's other flags, and the process that checks a command line."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megalite.config import ConfigError, exit_with_errors, parse_or_exit
from megalite.config.command_line import known_flags, parser
from megalite.config.megatron import ABSENT_BY_FLAG, ALWAYS, NOT_YET_BY_FLAG, ONLY_AT, WITHOUT_EFFECT_BY_FLAG
from megalite.config.settings import SETTINGS

from .minimal import errors_of, minimal, parsed

# The starred flags of Megatron-LM's training script.
STARRED = """
--num-layers --hidden-size --num-attention-heads --ffn-hidden-size --group-query-attention
--num-query-groups --max-position-embeddings --seq-length --position-embedding-type --rotary-base
--normalization --norm-epsilon --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--make-vocab-size-divisible-by --init-method-std --attention-dropout --hidden-dropout --micro-batch-size
--global-batch-size --train-iters --train-samples --exit-duration-in-mins --exit-signal-handler --lr
--min-lr --lr-decay-style --lr-decay-iters --lr-warmup-iters --lr-warmup-fraction --weight-decay --clip-grad
--adam-beta1 --adam-beta2 --adam-eps --bf16 --fp16 --tensor-model-parallel-size
--pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage --sequence-parallel
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --recompute-granularity
--recompute-method --recompute-num-layers --recompute-modules --recompute-activations --data-path --split
--data-cache-path --mock-data --num-workers --tokenizer-type --tokenizer-model --vocab-file --merge-file
--eval-iters --eval-interval --log-interval --log-throughput --tensorboard-dir --save --load --save-interval
--seed
"""


def test_every_starred_flag_is_known() -> None:
    assert set(STARRED.split()) <= set(known_flags())


def test_help_mentions_every_flag() -> None:
    words = set(parser().format_help().replace(",", " ").replace(".", " ").split())
    assert set(known_flags()) <= words


@pytest.mark.parametrize("name", SETTINGS)
def test_help_says_something(name: str) -> None:
    assert len(SETTINGS[name].metadata["help"]) > 15


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--micro_batch_size", "--micro_batch_size: unknown flag; did you mean --micro-batch-size?"),
        ("--num-layer", "--num-layer: unknown flag; did you mean --num-layers?"),
        ("--tensor-parallel-size", "did you mean --tensor-model-parallel-size?"),
        ("--lr-warm-up-iters", "did you mean --lr-warmup-iters?"),
        ("--xyzzy", "--xyzzy: unknown flag; see --help"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, message: str) -> None:
    found = errors_of(minimal(f"{flag} 3"))
    assert len(found) == 1
    assert message in found[0]


def test_abbreviations_are_not_taken() -> None:
    assert "unknown flag" in errors_of(minimal("--use-rotary"))[0]


def test_a_value_without_a_flag_is_an_error() -> None:
    assert errors_of(minimal("--swiglu yes --ffn-hidden-size 64")) == [
        "command line yes: belongs to no flag; flags start with --"
    ]


def test_a_second_list_of_datasets_does_not_replace_the_first() -> None:
    (error,) = errors_of(minimal("--data-path a --data-path b"))
    assert "argument --data-path: given twice; give all its values behind one" in error
    layers = "--recompute-granularity selective --recompute-modules norm"
    assert parsed(f"{layers} --recompute-modules mlp").activations.recompute_modules == ("mlp",)


def test_booleans_have_megatrons_spellings() -> None:
    for flag in ("--disable-bias-linear", "--no-add-bias-linear", "--disable-add-bias-linear"):
        assert not parsed(flag).model.add_bias_linear
    assert parsed("--disable-bias-linear --add-bias-linear").model.add_bias_linear
    assert not parsed("--no-check-for-nan-in-loss-and-grad").run.check_for_nan_in_loss_and_grad
    assert not parsed("--swiglu --ffn-hidden-size 64 --no-swiglu").model.swiglu
    assert parsed("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


@pytest.mark.parametrize("flag", [*NOT_YET_BY_FLAG, *ABSENT_BY_FLAG])
def test_a_flag_that_does_not_exist_here_is_refused_with_advice(flag: str) -> None:
    found = errors_of(minimal(f"{flag} 2"))
    assert len(found) == 1
    assert found[0].startswith(f"{flag} 2: ")
    assert "; " in found[0]


@pytest.mark.parametrize("flag", ONLY_AT)
def test_a_flag_is_taken_at_one_value(flag: str) -> None:
    allowed, advice = ONLY_AT[flag]
    assert parsed(f"{flag} {allowed[0]}") == parsed()
    assert errors_of(minimal(f"{flag} 7")) == [f"{flag} 7: only {allowed[0]} is supported; {advice}"]


def test_flags_without_effect_give_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    flags = " ".join(WITHOUT_EFFECT_BY_FLAG)
    parse_or_exit(minimal(f"{flags} {' '.join(ALWAYS)}"), 1, rank=0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(flag in lines[0] for flag in WITHOUT_EFFECT_BY_FLAG)
    assert not any(f"{flag} (" in lines[0] for flag in ALWAYS)


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--rotary-base 500000", "--rotary-base has no effect without --position-embedding-type rope"),
        ("--initial-loss-scale 65536", "--initial-loss-scale has no effect without --fp16"),
        (
            "--fp16 --loss-scale 8 --hysteresis 3",
            "--hysteresis has no effect without dynamic scaling, which --loss-scale replaces",
        ),
        (
            "--zero-stage 3 --ddp-bucket-size 1000",
            "--ddp-bucket-size has no effect without --zero-stage below 3: at 3 a bucket is a layer",
        ),
        ("--zero-prefetch-layers 2", "--zero-prefetch-layers has no effect without --zero-stage 3"),
        ("--rope-scaling-factor 4", "--rope-scaling-factor has no effect without --use-rope-scaling"),
        (
            "--cross-entropy-chunk-mib 4",
            "--cross-entropy-chunk-mib has no effect without --cross-entropy-fusion-impl linear",
        ),
        ("--lr-wsd-decay-iters 3", "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD"),
        ("--eval-interval 3 --eval-iters 0", "--eval-interval has no effect without --eval-iters above 0"),
        (
            "--optimizer-offload-fraction 0.5",
            "--optimizer-offload-fraction has no effect without --optimizer-cpu-offload",
        ),
        (
            "--no-store-param-remainders",
            "--store-param-remainders has no effect without --use-precision-aware-optimizer and --bf16",
        ),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16",
            "--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: the second moment hardly changes",
        ),
        ("--use-rotary-position-embeddings", "is old; use --position-embedding-type rope"),
    ],
)
def test_a_setting_that_changes_nothing_is_a_warning(
    flags: str, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_or_exit(minimal(flags), 1, rank=0)
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "ranks", "warning"),
    [
        (
            "--hidden-size 60 --ffn-hidden-size 64",
            1,
            "--hidden-size 60 makes rows of 60 on a rank, no multiple of 16: .* nearest: 48 or 64",
        ),
        (
            "--ffn-hidden-size 176 --tensor-model-parallel-size 2",
            2,
            "--ffn-hidden-size 176 makes rows of 88 on a rank.* nearest: 160 or 192",
        ),
        (
            "--make-vocab-size-divisible-by 25",
            1,
            "--make-vocab-size-divisible-by 25 makes rows of 100 on a rank.* nearest: 16 or 32",
        ),
    ],
)
def test_rows_that_a_gpu_reads_slowly_are_a_warning(
    flags: str, ranks: int, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_or_exit(minimal(flags), ranks, rank=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(warning, line)
    parse_or_exit(minimal(f"{flags} --params-dtype float64"), ranks, rank=0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16", "--params-dtype float32"])
def test_a_constant_loss_scale_is_applied_to_every_type_and_warned_of_for_none(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_or_exit(minimal(f"{dtype} --loss-scale 8"), 1, rank=0)
    assert capsys.readouterr().err == ""


def test_a_check_leaves_the_warnings_to_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    idle = minimal("--rotary-base 500000")
    parse_or_exit(idle, 1, rank=0, run_follows=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        parse_or_exit([*idle, "--print-config"], 1, rank=0, run_follows=True)  # then no run follows
    assert capsys.readouterr().err.count("--rotary-base has no effect") == 1


def test_the_throughput_flag_of_megatron_is_taken_silently(capsys: pytest.CaptureFixture[str]) -> None:
    parse_or_exit(minimal("--log-throughput"), 1, rank=0)
    assert capsys.readouterr() == ("", "")


def test_a_rest_of_the_samples_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    parse_or_exit(minimal("--train-samples 11 --global-batch-size 4", without="--train-iters"), 1, rank=0)
    assert "the last 3 of 11 samples fill no global batch" in capsys.readouterr().err


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megalite.config", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_good_command_line_is_quiet_and_0() -> None:
    done = run("--world-size", "4", *minimal("--tensor-model-parallel-size 2"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_bad_command_line_is_a_numbered_list_and_2() -> None:
    done = run("--world-size", "3", *minimal("--tensor-model-parallel-size 2 --foo"))
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "2 configuration errors:"
    assert [line[:5] for line in lines[1:]] == ["  1. ", "  2. "]


def test_a_switch_with_a_value_is_no_traceback() -> None:
    done = run(*minimal("--swiglu=true"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--swiglu" in done.stderr


def test_help_is_0_and_needs_nothing_else() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--num-layers N" in done.stdout


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as left:
        exit_with_errors([ConfigError("--lr", 0, "must be > 0")], rank=1)
    assert left.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, megalite.config as c; c.parse(sys.argv[1:], 1); "
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *minimal()], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
