"""The run's bookkeeping: what is checked before it saves or stops, and resuming under other settings."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed as dist
from tokenizers.models import WordLevel

from megalite.checkpoint import CheckpointError, complete_iterations
from megalite.config import parse
from megalite.data import gpt_dataset
from megalite.data.errors import DataError
from megalite.parallel.topology import build_topology
from megalite.training.errors import TrainingError
from megalite.training.loop import run
from megalite.training.samples import open_datasets
from megalite.training.step import Trainer
from tests.data.corpora import write_dataset
from tests.pool import WorkerPool
from tests.training.runs import MODEL, progress_of, train
from tools.inspect_data import main as inspect_data


@pytest.mark.parametrize(
    "last_words", ["--save-interval 4", "--exit-interval 4", "--eval-interval 4 --eval-iters 1"]
)
def test_a_gradient_that_is_not_finite_is_told_before_saving_and_stopping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last_words: str
) -> None:
    """Also between two log lines, when nothing else reads the steps' results."""
    with pytest.raises(TrainingError, match="iteration 2: the gradient norm is"):
        train("--lr 1e38 --train-iters 100 --log-interval 50 --save", str(tmp_path), last_words)
    assert not list(tmp_path.glob("iter_*"))
    assert "validation loss" not in capsys.readouterr().out


def test_without_training_the_checkpoint_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the data does not last for the training that its flags speak of."""
    a, b = (write_dataset(tmp_path / name, [9] * 200, vocab_size=31) for name in "ab")
    data = f"--data-path {a} {b} --split 50,25,25"
    folder = tmp_path / "run"
    train(data, "--train-iters 2 --save", str(folder), mock=False)
    files = sorted(folder.rglob("*"))
    capsys.readouterr()
    train(
        data,
        "--train-iters 500 --eval-iters 1 --skip-train --load",
        str(folder),
        "--save",
        str(folder),
        mock=False,
    )
    shown = capsys.readouterr().out
    assert re.findall(r"validation loss at (.*?) \| lm loss value", shown) == [
        "iteration 2",
        "iteration 2 on test set",
    ], shown
    assert sorted(folder.rglob("*")) == files


def test_skipped_steps_are_counted_in_every_checkpoint(tmp_path: Path) -> None:
    train("--lr 1e38 --train-iters 8 --log-interval 5 --save-interval 3 --save", str(tmp_path),
          "--no-check-for-nan-in-loss-and-grad")  # fmt: skip
    assert [progress_of(tmp_path, n)["skipped_iterations"] for n in (3, 6, 8)] == [2, 5, 7]


def test_skipped_steps_between_log_lines_are_told_by_the_next(tmp_path: Path) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    train("--lr 1e38 --train-iters 8 --log-interval 4 --save-interval 3 --no-check-for-nan-in-loss-and-grad",
          "--save", str(folder), "--metrics-file", str(metrics))  # fmt: skip
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(record["iteration"], record["skipped"]) for record in records] == [(1, 0), (4, 3), (8, 4)]


def test_a_run_measured_in_samples_ends_there_whatever_the_batch(tmp_path: Path) -> None:
    folder = str(tmp_path)
    train("--train-samples 32 --exit-interval 2 --save", folder, batch=8)
    for batch, iteration in ((16, 3), (4, 6)):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
        train("--train-samples 32 --load", folder, "--save", folder, batch=batch)
        assert progress_of(tmp_path, iteration) == {
            "iteration": iteration,
            "consumed_samples": 32,
            "consumed_valid_samples": 0,
            "skipped_iterations": 0,
        }


def test_a_ramp_is_resumed_in_its_middle(tmp_path: Path) -> None:
    """Batches of 4, 4, 8, 12 and 16: the same samples, losses and end as without a stop."""
    ramp = "--train-samples 50 --lr-warmup-samples 20 --rampup-batch-size 4 4 24"
    whole, parts, folder = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    train(ramp, "--metrics-file", str(whole), batch=16)
    for stop in ("--exit-interval 3", ""):
        train(ramp, stop, "--metrics-file", str(parts), "--save", folder, "--load", folder, batch=16)
    names = ("iteration", "train_iters", "consumed_samples", "global_batch_size", "learning_rate", "lm_loss")
    once, twice = (
        [[json.loads(line)[name] for name in names] for line in file.read_text().splitlines()]
        for file in (whole, parts)
    )
    assert once == twice
    assert [row[:4] for row in once] == [
        [1, 5, 4, 4],
        [2, 5, 8, 4],
        [3, 5, 16, 8],
        [4, 5, 28, 12],
        [5, 5, 44, 16],
    ]
    assert [row[4] for row in once[:4]] == pytest.approx(
        [0, 2e-3, 4e-3, 8e-3]
    )  # before each step: 0, 4, 8, 16
    assert progress_of(tmp_path / "checkpoints", 5)["consumed_samples"] == 44


def test_a_batch_is_decreased_when_asked(tmp_path: Path) -> None:
    folder = str(tmp_path)
    train(
        "--train-iters 3 --decrease-batch-size-if-needed --eval-iters 1 --eval-interval 2 --save",
        folder,
        batch=7,
    )
    progress = progress_of(tmp_path, 3)
    assert (progress["consumed_samples"], progress["consumed_valid_samples"]) == (3 * 6, 6)


def test_the_time_left_is_that_of_the_samples_left(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    train("--train-samples 50 --rampup-batch-size 4 4 24 --metrics-file", str(metrics), batch=16)
    for record in map(json.loads, metrics.read_text().splitlines()):
        rate = record["global_batch_size"] / (record["elapsed_ms"] / 1e3)
        assert record["seconds_left"] == pytest.approx((44 - record["consumed_samples"]) / rate)
        assert record["tokens_per_second_per_gpu"] == pytest.approx(8 * rate)


def test_more_consumed_than_the_iterations_amount_to_is_told_before_training(tmp_path: Path) -> None:
    train("--train-iters 4 --exit-interval 2 --save", str(tmp_path), batch=8)
    with pytest.raises(TrainingError, match="Give its length as --train-samples 24"):
        train("--train-iters 4 --load", str(tmp_path), batch=4)


def test_rarer_evaluations_after_a_resume_start_over_with_the_validation_data(tmp_path: Path) -> None:
    train("--train-iters 6 --eval-iters 1 --eval-interval 1 --exit-interval 4 --save", str(tmp_path))
    assert progress_of(tmp_path, 4)["consumed_valid_samples"] == 4 * 4
    train("--train-iters 6 --eval-iters 1 --eval-interval 5 --load", str(tmp_path), "--save", str(tmp_path))
    assert progress_of(tmp_path, 6)["consumed_valid_samples"] == 4


def test_a_checkpoint_without_optimizer_says_how_to_go_on(tmp_path: Path) -> None:
    train("--train-iters 1 --no-save-optim --save", str(tmp_path))
    with pytest.raises(TrainingError, match=r"no optimizer state .*--no-load-optim"):
        train("--train-iters 2 --load", str(tmp_path))
    train("--train-iters 2 --no-load-optim --load", str(tmp_path))


@pytest.mark.parametrize("needs_one", ["--exit-on-missing-checkpoint", "--finetune"])
def test_a_checkpoint_that_is_needed_is_found_without_its_record(tmp_path: Path, needs_one: str) -> None:
    """As in a copy, or of a run that was killed in its first save."""
    base, new = tmp_path / "base", str(tmp_path / "new")
    train("--train-iters 1 --save", str(base))
    (base / "latest_checkpointed_iteration.txt").unlink()
    train("--train-iters 2", needs_one, "--load", str(base), "--save", new)
    (base / "iter_0000001").rename(base / "iter_1")
    with pytest.raises(TrainingError, match=f"has no checkpoint, and {needs_one} is set"):
        train("--train-iters 2", needs_one, "--load", str(base))


def test_a_checkpoint_of_another_model_is_told_by_its_settings(tmp_path: Path) -> None:
    train("--train-iters 1 --save", str(tmp_path))
    with pytest.raises(TrainingError) as caught:
        train("--train-iters 2 --num-layers 2 --vocab-size 33 --load", str(tmp_path))
    assert str(caught.value).splitlines()[1:] == [
        "num_layers was 1 when it was saved and is 2 now",
        "vocab_size was 31 when it was saved and is 33 now",
    ]


def test_a_checkpoint_whose_norm_weights_mean_other_numbers_is_refused(tmp_path: Path) -> None:
    """Names and shapes fit: it would load, and train from a model that is none."""
    train("--train-iters 1 --save", str(tmp_path))
    with pytest.raises(TrainingError, match="apply_layernorm_1p was False when it was saved and is True now"):
        train("--train-iters 2 --apply-layernorm-1p --load", str(tmp_path))


@pytest.mark.parametrize("fresh", ["--finetune", "--no-load-optim"])
def test_weights_alone_are_converted_to_the_dtype_of_the_run(tmp_path: Path, fresh: str) -> None:
    train("--train-iters 1 --save", str(tmp_path))
    train("--train-iters 2 --bf16 --load", str(tmp_path), fresh)
    with pytest.raises(TrainingError, match="params_dtype was float32 when it was saved and is bfloat16 now"):
        train("--train-iters 2 --bf16 --load", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ("", "give the same command again with --load {0}/tuned"),
        ("--load {0}/tuned", "give the same command again"),
        (
            "--load {0}/before --finetune",
            "give the same command again without --finetune and with --load {0}/tuned",
        ),
        (
            "--load {0}/before --finetune --no-load-optim",
            "again without --finetune and --no-load-optim and with",
        ),
        (
            "--load {0}/before --no-load-optim --no-save-optim",
            "give the same command again with --load {0}/tuned",
        ),
        ("--load {0}/tuned --no-save-optim", "give the same command again with --no-load-optim"),
    ],
)
def test_how_to_resume_is_told_by_what_the_next_command_must_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, how: str
) -> None:
    train("--train-iters 1 --save", str(tmp_path / "before"))
    capsys.readouterr()
    train(
        "--train-iters 2 --exit-interval 1 --save", str(tmp_path / "tuned"), *flags.format(tmp_path).split()
    )
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("to resume this run, "))
    assert how.format(tmp_path) in line
    assert "warning" not in out


def test_the_duration_of_a_run_begins_with_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when its ranks have met: the cluster's limit counts from the start."""
    train("--train-iters 3 --exit-duration-in-mins 30 --save", str(tmp_path), started=time.monotonic() - 1801)
    assert "saved checkpoint of iteration 1 " in capsys.readouterr().out
    assert list(complete_iterations(str(tmp_path))) == [1]


def test_a_run_that_is_complete_names_the_flag_that_extends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        train("--train-samples 4 --save", str(tmp_path), "--load", str(tmp_path))
    out = capsys.readouterr().out
    assert "already trained for 1 of 1 iterations; a larger --train-samples goes on" in out
    assert "to extend it, raise --train-samples" in out


def test_a_run_that_begins_where_another_was_saved_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--train-iters 2 --exit-interval 1 --save", str(tmp_path))
    capsys.readouterr()
    begun = f"warning: {tmp_path} holds a run up to iteration 1, and this one begins anew and will write over"
    flags = "--train-iters 2 --exit-interval 1 --finetune"
    train(flags, "--save", str(tmp_path), "--load", str(tmp_path))
    how = "to go on with that one, give the same command again without --finetune"
    assert f"{begun} it; {how}\n" in capsys.readouterr().out
    train("--train-iters 2 --save", str(tmp_path), "--load", str(tmp_path))
    assert "warning" not in capsys.readouterr().out


def test_a_branch_that_begins_anew_over_its_own_checkpoints_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command of a job that was preempted is given again."""
    base, branch = str(tmp_path / "base"), str(tmp_path / "branch")
    train("--train-iters 1 --save", base)
    again = ("--train-iters 3 --exit-interval 2 --save", branch, "--load", base)
    train(*again)
    assert "warning" not in capsys.readouterr().out
    train(*again)
    assert (
        f"warning: {branch} holds a run up to iteration 2, and this one begins at iteration 1 of {base} and "
        f"will write over it; to go on with that one, give the same command again with --load {branch}\n"
    ) in capsys.readouterr().out


def test_what_another_run_left_in_the_folder_is_not_fallen_back_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    train("--train-iters 2 --save-interval 1 --save", folder)  # another run, as far as iteration 2
    train("--train-iters 6 --save-interval 3 --exit-interval 3 --seed 7 --save", folder)
    train("--train-iters 6 --save-interval 2 --exit-interval 4 --seed 7 --save", folder, "--load", folder)
    assert list(complete_iterations(folder)) == [4, 3]
    for iteration in (3, 4):
        (tmp_path / f"iter_{iteration:07d}" / "state.json").write_text("damaged")
    with pytest.raises(CheckpointError):
        train("--train-iters 6 --seed 7 --load", folder)


def test_longer_mock_runs_draw_the_samples_they_would_have_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--train-iters 1 --save", str(tmp_path))
    train("--train-iters 2 --load", str(tmp_path))
    assert "warning" not in capsys.readouterr().out
    train("--train-iters 2 --seed 7 --load", str(tmp_path))
    assert "warning: seed was 1234 when the checkpoint was saved and is 7 now" in capsys.readouterr().out


def test_made_up_samples_and_datasets_do_not_follow_each_other(tmp_path: Path) -> None:
    prefix, folder = write_dataset(tmp_path / "a", [50] * 20, vocab_size=31), str(tmp_path / "run")
    data = f"--split 1,0,0 --data-path {prefix} --save {folder} --load {folder}"
    train(f"{data} --train-iters 1", mock=False)
    message = "was trained on datasets, and --mock-data cannot follow in the same run: its place"
    with pytest.raises(TrainingError, match=message):
        train("--train-iters 2", "--load", folder)
    train("--train-iters 2 --finetune", "--load", folder, "--save", str(tmp_path / "mock"))
    with pytest.raises(TrainingError, match="was trained on --mock-data, and datasets cannot follow"):
        train(f"--split 1,0,0 --data-path {prefix} --train-iters 3 --load {tmp_path}/mock", mock=False)


def test_samples_are_counted_by_dataset_over_all_parts_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that were drawn before the blend was changed."""
    a, b = (write_dataset(tmp_path / name, [50] * 20, vocab_size=31) for name in "ab")
    folder = str(tmp_path / "checkpoints")
    flags = f"--save {folder} --load {folder} --split 1,0,0 --log-interval 100"

    def counts(iteration: int) -> dict[str, int]:
        state = json.loads((tmp_path / f"checkpoints/iter_{iteration:07d}/state.json").read_text())
        found: dict[str, int] = state["samples_by_dataset"]
        return found

    train(f"{flags} --train-iters 8 --exit-interval 4 --data-path 3 {a} 1 {b}", mock=False)
    assert counts(4) == {a: 12, b: 4}
    assert f"samples drawn from {a}: 12\nsamples drawn from {b}: 4\n" in capsys.readouterr().out
    train(f"{flags} --train-iters 8 --data-path 1 {a} 3 {b}", mock=False)
    assert counts(8) == {a: 16, b: 16}
    out = capsys.readouterr().out
    assert out.index(f"samples drawn from {a}: 12\n") < out.index(f"samples drawn from {a}: 16\n")
    assert f"blend is another one\n{a} goes on at its sample 12\n{b} goes on at its sample 4\n" in out
    assert "warning" not in out
    shown = f"--data-path 1 {a} 3 {b} --split 1,0,0 --seq-length 8 --load {folder} --global-batch-size 4"
    assert inspect_data([*shown.split(), "--iteration", "4"]) == 0
    early = capsys.readouterr().out
    assert inspect_data([*shown.split(), "--iteration", "5"]) == 0
    late = capsys.readouterr().out
    assert [early.count(f"{each}: document") > late.count(f"{each}: document") for each in (a, b)] == [
        True,
        False,
    ]
    train(f"{flags} --train-iters 12 --seed 7 --data-path {tmp_path}/./a", mock=False)
    assert "warning: seed was 1234 and is 7 now: that makes another order" in capsys.readouterr().out
    assert counts(12) == {a: 32, b: 16}, "also where a path is spelled otherwise"


def test_samples_are_counted_once_for_data_that_moves(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    here, there = str(tmp_path / "a"), str(tmp_path / "moved" / "a")
    write_dataset(Path(here), [50] * 20, vocab_size=31)
    flags = f"--save {tmp_path}/checkpoints --load {tmp_path}/checkpoints --split 1,0,0 --train-iters 4"
    train(f"{flags} --exit-interval 2 --data-path {here}", mock=False)
    for suffix in (".bin", ".idx"):
        Path(here + suffix).rename(there + suffix)
    train(f"{flags} --data-path {there}", mock=False)
    state = json.loads((tmp_path / "checkpoints/iter_0000004/state.json").read_text())
    assert state["samples_by_dataset"] == {there: 16}
    assert [place["prefix"] for place in state["data_order"]["read"]] == [there]


def test_a_validation_set_that_comes_later_is_told_where_it_makes_another_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (write_dataset(tmp_path / name, [50] * 20, vocab_size=31) for name in "ab")
    both = f"--train-iters 4 --train-data-path {a} --valid-data-path {b} --load"
    warning = "share of the documents was 0 to 0.969 and is 0 to 1 now"
    for split, told in (("1,0,0", False), ("969,30,1", True)):
        folder = str(tmp_path / split[0])
        train(
            "--train-iters 4 --exit-interval 2 --data-path", a, f"--split {split} --save", folder, mock=False
        )
        train(both, folder, mock=False)
        out = capsys.readouterr().out
        assert (warning in out, "warning: " in out) == (told, told)


def test_the_steps_of_a_run_are_shown_as_it_took_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over another batch size and another seed."""
    a, folder = write_dataset(tmp_path / "a", [50] * 20, vocab_size=31), str(tmp_path / "checkpoints")
    flags = f"--save {folder} --load {folder} --split 1,0,0 --data-path {a} --train-samples 64"
    train(flags, "--exit-interval 4", batch=4, mock=False)
    train(flags, "--exit-interval 6", batch=8, mock=False)
    train(flags, "--exit-interval 8 --seed 7", batch=8, mock=False)
    run = f"--load {folder} --split 1,0,0 --data-path {a} --train-samples 64 --seq-length 8"

    def shown(iteration: int, batch: int, more: str = "") -> str:
        capsys.readouterr()
        code = inspect_data([*f"{run} {more} --iteration {iteration} --global-batch-size {batch}".split()])
        output = capsys.readouterr()
        return output.out[output.out.index("sample ") :] if code == 0 else output.err

    def drawn(seed: int, *samples: int) -> str:
        new = run.replace(f"--load {folder}", f"--seed {seed}")
        parts = []
        for sample in samples:
            capsys.readouterr()
            assert inspect_data([*f"{new} --iteration {sample + 1} --global-batch-size 1".split()]) == 0
            out = capsys.readouterr().out
            parts.append(out[out.index("sample ") :])
        return "".join(parts)

    assert shown(3, 4, "--seed 7") == drawn(1234, 8, 9, 10, 11)
    assert shown(6, 8, "--seed 7") == drawn(1234, *range(24, 32))
    for iteration in (7, 9):  # before and behind the newest checkpoint
        assert shown(iteration, 8, "--seed 7") == drawn(7, *range(8 * iteration - 24, 8 * iteration - 16))
    for iteration, batch in ((3, 8), (6, 4)):
        assert f"--iteration {iteration}: by the checkpoints, steps " in shown(iteration, batch, "--seed 7")
    assert "was saved with --global-batch-size 8. " in shown(6, 4)
    assert inspect_data([*f"{run} --seed 7 --dump {tmp_path}/out.npz".split()]) == 1
    assert "--dump: this run has its present order only from sample 32 on" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")  # the rest is given up
    train(flags, batch=16, mock=False)
    for iteration in (5, 6, 7):
        assert shown(iteration, 16) == drawn(1234, *range(16 * iteration - 64, 16 * iteration - 48))


def open_copies(folders: list[str]) -> str:
    """What a rank says, of an error or else a warning, whose node has the data in its own of `folders`."""
    topology = build_topology(1, 1, torch.device("cpu"))
    data = f"--split 8,2,0 --train-iters 4 --data-path {folders[topology.rank]}/a"
    config = parse([*MODEL.split(), *data.split(), "--eval-iters", "1", "--global-batch-size", "8"], 4)
    try:
        return open_datasets(config, None).warning or ""
    except TrainingError as error:
        return str(error)


def test_ranks_that_find_other_data_are_told(tmp_path: Path, pool: WorkerPool) -> None:
    """As on nodes with copies of their own, one of which is an old one of the same size."""
    for name, seed in (("copy", 0), ("another", 0), ("old", 1)):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name / "a", [50] * 20, vocab_size=31, seed=seed)
    copy, another, old = (str(tmp_path / name) for name in ("copy", "another", "old"))
    assert set(pool.run(4, open_copies, [copy, another, copy, another])) == {""}
    told = pool.run(4, open_copies, [copy, old, copy, old])
    assert (
        told[0]
        == f"{copy}/a: holds other documents on rank 1, 3 than on rank 0; every node must have the same files"
    )
    assert [text.split(": ")[1] for text in told] == [told[0].split(": ")[1]] * 4


def go_on_from(orders: list[dict[str, object]], prefix: str) -> str:
    """What a rank says, of an error, that goes on from its own of `orders`."""
    topology = build_topology(1, 1, torch.device("cpu"))
    data = f"--split 1,0,0 --train-iters 9 --data-path 1 {prefix}"
    config = parse([*MODEL.split(), *data.split(), "--eval-iters", "0", "--global-batch-size", "8"], 4)
    try:
        open_datasets(config, orders[topology.rank])
    except TrainingError as error:
        return str(error)
    return ""


def test_ranks_that_go_on_in_another_order_are_told(tmp_path: Path, pool: WorkerPool) -> None:
    prefix = write_dataset(tmp_path / "a", [50] * 60, vocab_size=31)
    data = f"--split 1,0,0 --train-iters 9 --data-path 1 {prefix}"
    config = parse([*MODEL.split(), *data.split(), "--eval-iters", "0", "--global-batch-size", "8"], 1)
    train = open_datasets(config, None).train
    assert train is not None
    assert train.order is not None
    order = train.order
    same, other = (order.record(samples).to_json() for samples in (24, 32))
    assert pool.run(4, go_on_from, [same] * 4, prefix) == [""] * 4
    other["stretches"][0]["datasets"][0]["place"] = 1
    told = pool.run(4, go_on_from, [same, other, same, same], prefix)
    message = "the order of the training samples: is another on rank 1 than on rank 0; every node must have"
    assert [text[: len(message)] for text in told] == [message] * 4


def open_with_tokenizer(folders: list[str]) -> str:
    """What a rank says, of an error, whose node has the tokenizer in its own of `folders`."""
    topology = build_topology(1, 1, torch.device("cpu"))
    model = MODEL.replace("--tokenizer-type NullTokenizer --vocab-size 31", "--mock-data --eod-mask-loss")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folders[topology.rank]}"
    try:
        open_datasets(parse([*model.split(), *tokenizer.split(), "--train-iters", "1"], 2), None)
    except TrainingError as error:
        return str(error)
    return ""


def test_ranks_that_find_another_tokenizer_are_told(tmp_path: Path, pool: WorkerPool) -> None:
    """Of the same size, or with another token that ends documents."""
    for name, tokens, eod in (
        ("copy", "ab<>", "<"),
        ("another", "ab<>", "<"),
        ("old", "ba<>", "<"),
        ("eod", "ab<>", ">"),
    ):
        (tmp_path / name).mkdir()
        ids = {token: number for number, token in enumerate(tokens)}
        tokenizers.Tokenizer(WordLevel(ids, "a")).save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": eod}))
    copy, another, old, eod = (str(tmp_path / name) for name in ("copy", "another", "old", "eod"))
    assert pool.run(2, open_with_tokenizer, [copy, another]) == ["", ""]
    message = (
        "--tokenizer-model: make another tokenizer on rank 1 than on rank 0; every node must have the same"
    )
    for other in (old, eod):
        assert pool.run(2, open_with_tokenizer, [copy, other]) == [f"{message} files"] * 2


def test_index_arrays_that_another_node_cannot_keep_are_told(tmp_path: Path, pool: WorkerPool) -> None:
    for name in ("copy", "full"):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name / "a", [50] * 20, vocab_size=31)
    (tmp_path / "full/a.cache").touch()
    copy, full = str(tmp_path / "copy"), str(tmp_path / "full")
    message = f"rank 2, 2 of 4: index arrays cannot be kept in {full}/a.cache (File exists): every process"
    told = pool.run(4, open_copies, [copy, copy, full, full])
    assert [text[: len(message)] for text in told] == [message] * 4


def open_unreadable(folder: str) -> str:
    """What a rank says when rank 1 cannot read the tokens by which the validation split is known."""

    def identity_of(dataset: object, first: int, last: int) -> str:
        if dist.get_rank() == 1 and first > 0:
            raise DataError("cannot be read")
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_dataset, "identity_of", identity_of)
        return open_copies([folder] * 4)


def test_tokens_that_one_rank_cannot_read_are_told_on_every_rank(tmp_path: Path, pool: WorkerPool) -> None:
    write_dataset(tmp_path / "a", [50] * 20, vocab_size=31)
    assert pool.run(4, open_unreadable, str(tmp_path)) == ["rank 1: cannot be read"] * 4


def test_the_largest_seed_trains_and_evaluates_on_mock_data() -> None:
    """Validation and test samples are made from the seeds that follow it."""
    train("--train-iters 1 --eval-iters 1 --seed 4294967295")


def stopped_by_a_signal(folder: str, during: str) -> tuple[list[int], int]:
    """The checkpoints of a run of which rank 1 gets SIGTERM in its second step or its first validation, and
    how many batches it has had, evaluations of 50 included.
    """
    argv = [*MODEL.split(), "--mock-data", "--global-batch-size", "4"]
    argv += ["--train-iters", "2" if during == "the last step" else "100"]
    argv += ["--exit-signal-handler", "--eval-iters", "50", "--eval-interval", "2", "--save", folder]
    called = {"train_step": 0, "_run": 0}

    def counted(name: str, kill_at: int) -> Any:
        original = getattr(Trainer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            if dist.get_rank() == 1 and called[name] == kill_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)

        return call

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", counted("train_step", 2 if during.endswith("step") else 0))
        patch.setattr(Trainer, "_run", counted("_run", 5 if during == "a validation" else 0))
        run(parse(argv, 2), build_topology(1, 1, torch.device("cpu")))
    assert signal.getsignal(signal.SIGTERM) == before
    return sorted(complete_iterations(folder)), called["_run"]


@pytest.mark.parametrize(("during", "batches"), [("a step", 3), ("a validation", 5), ("the last step", 2)])
def test_a_signal_ends_the_run_behind_the_batch_that_it_is_at(
    pool: WorkerPool, tmp_path: Path, during: str, batches: int
) -> None:
    assert pool.run(2, stopped_by_a_signal, str(tmp_path), during) == [([2], batches)] * 2


@pytest.mark.parametrize("level", [0, 1, 2])
def test_where_the_time_of_a_step_goes_is_told_when_asked(
    capfd: pytest.CaptureFixture[str], level: int
) -> None:
    train("--train-iters", "3", "--log-interval", "2", "--timing-log-level", str(level))
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith(" time of a step (ms)")]
    assert len(lines) == (3 if level else 0)  # after the first, the second and the last step
    for line in lines:
        shares = [int(part) for part in re.findall(r"\((-?\d+)%\)", line)]
        assert len(shares) == 5
        assert abs(sum(shares) - 100) <= 3
        assert min(shares) >= 0
