"""The planned bytes against those of real processes that train."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image

import tools.plan
from megalite.config import Config, parse, replace
from megalite.model.live_bytes import LiveBytes, device_bytes
from megalite.training.memory.account import buffer_bytes, buffers_on_device
from megalite.training.memory.plan import plan_memory
from megalite.training.memory.report import MOST_ROWS, plan_lines
from megalite.training.step import Trainer
from tests.end_to_end.launch import MODEL_FLAGS, launch
from tests.matrix.batches import microbatches
from tests.matrix.cases import Layout, Options, make_config, model_for
from tests.matrix.job import topologies
from tests.pool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
SCALARS = 64  # bytes: losses, token counts, the optimizer's scalars, which a step makes and a plan leaves out

CASES = {
    Layout(1, 1, 1): [
        ("gpt2", Options(4, dropout=True), "bfloat16"),
        ("llama", Options(2, linear_cross_entropy=True), "float32"),
        ("gpt2", Options(4, pipeline_schedule="zb-h1", recompute="selective norm mlp_act"), "bfloat16"),
    ],
    Layout(1, 1, 2): [
        ("gpt2", Options(4, zero_stage=1, overlap_grad_reduce=True, recompute="full uniform 1"), "bfloat16"),
        (
            "llama",
            Options(2, zero_stage=2, ddp_bucket_size=2000, recompute="selective norm mlp_act rope"),
            "bfloat16",
        ),
        (
            "gpt2",
            Options(2, zero_stage=2, ddp_bucket_size=2000, overlap_grad_reduce=True),
            "float32",
        ),
        (
            "gpt2",
            Options(2, zero_stage=2, overlap_grad_reduce=True, pipeline_schedule="zb-h1"),
            "bfloat16",
        ),
        (
            "llama",
            Options(
                2, zero_stage=2, ddp_bucket_size=2000, overlap_grad_reduce=True, linear_cross_entropy=True
            ),
            "bfloat16",
        ),
        ("mixed", Options(2, zero_stage=3, offload_fraction=0.4), "bfloat16"),
        ("gpt2", Options(4, offloaded_layers=1, offload_fraction=1.0), "float32"),
        ("llama", Options(4, offloaded_layers=2, recompute="selective norm mlp_act rope"), "bfloat16"),
    ],
    Layout(2, 1, 2): [
        ("llama", Options(4, sequence_parallel=True, overlap_grad_reduce=True), "bfloat16"),
        ("gpt2-untied", Options(2, ddp_bucket_size=2000), "float32"),
    ],
    Layout(1, 4, 1): [
        ("gpt2", Options(2, pipeline_schedule="zb-h1", dropout=True), "float32"),
        ("mixed", Options(2, pipeline_schedule="zb-h1", recompute="selective norm mlp_act rope"), "float32"),
        ("llama-tied", Options(4, pipeline_schedule="gpipe"), "bfloat16"),
    ],
    Layout(2, 2, 2): [
        ("llama", Options(1, sequence_parallel=True, pipeline_schedule="interleaved"), "bfloat16"),
        ("gpt2", Options(2, pipeline_schedule="zbv", regularised_loss=True), "float32"),
        ("mixed", Options(1, pipeline_schedule="1f1b"), "float32"),
    ],
}


def measured(layout: Layout, configs: Sequence[Config]) -> list[tuple[Counter[str], Counter[str], int]]:
    """For each configuration this rank's flat buffers, what lived beside them at the peak of a step, and the
    most activations in host memory.
    """
    found = []
    for config, topology in zip(configs, topologies(layout, configs), strict=True):
        trainer = Trainer(config, topology)
        mine = microbatches(0, layout, topology.dp.rank, config.batch.micro_batch_size)
        trainer.train_step(mine, 1e-3)
        with LiveBytes(trainer.activation_bytes_on_host) as live:
            trainer.train_step(mine, 1e-3)
        found.append((buffer_bytes(trainer), live.peak, live.most_elsewhere))
    return found


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_the_plan_is_what_a_training_step_holds_on_every_rank(layout: Layout, pool: WorkerPool) -> None:
    cases = CASES[layout]
    configs = [
        make_config(model_for(variant, layout, options), layout, options, dtype)
        for variant, options, dtype in cases
    ]
    if layout.data > 1:
        configs[-1] = replace(configs[-1], grad_reduce_in_bf16=True)
    results = pool.run(layout.ranks, measured, layout, configs)
    wrong = []
    for index, config in enumerate(configs):
        plan = plan_memory(config, layout.ranks, host_is_device=True)
        for rank in range(layout.ranks):
            buffers, peak, most_on_host = results[rank][index]
            account = plan.ranks[layout.coordinates(rank)[1]].account
            assert account.parameters == buffers["parameters"]
            assert account.gradients == buffers["gradients"]
            assert account.optimizer == buffers["optimizer"] - buffers["offloaded"]
            assert account.host == buffers["offloaded"] + most_on_host
            beside = account.total - buffers_on_device(buffers)
            # Between processes threads decide when a message's memory is free again: 3 % of the total.
            exact = layout.ranks == 1 or config.parallel.zero_stage == 2  # which frees its messages itself
            allowed = SCALARS if exact else 0.03 * account.total
            if abs(beside - device_bytes(peak)) > allowed:
                wrong.append((index, rank, beside, device_bytes(peak)))
    assert not wrong


def test_a_storage_counts_once_from_its_making_to_its_last_view() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        made = before + 1
        view = made.view(10, 10)
        del made
        assert live.bytes().total() == 400
        weight = torch.ones(100, requires_grad=True)
        saved = (weight * view.view(-1)).sum()  # autograd holds both factors
        assert live.bytes().total() == 400 + 400 + 4
        del view
        assert live.bytes().total() == 400 + 400 + 4
        del saved
        assert live.bytes().total() == 400
        weight.detach().untyped_storage().resize_(0)
        assert live.bytes().total() == 0
        before.add_(1)
        assert live.bytes().total() == 0
    assert live.peak.total() == 400 + 400 + 400 + 4  # the product, before its sum


LLAMA_70B = {
    "num-layers": "80",
    "hidden-size": "8192",
    "num-attention-heads": "64",
    "num-query-groups": "8",
    "ffn-hidden-size": "28672",
    "seq-length": "4096",
    "max-position-embeddings": "4096",
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "micro-batch-size": "1",
    "global-batch-size": "1024",
    "train-iters": "10",
    "lr": "1e-4",
    "tokenizer-type": "NullTokenizer",
    "vocab-size": "128256",
    "tensor-model-parallel-size": "8",
    "pipeline-model-parallel-size": "8",
}
SWITCHES = ("group-query-attention", "swiglu", "disable-bias-linear", "bf16", "sequence-parallel")


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    model = [part for name, value in LLAMA_70B.items() for part in (f"--{name}", value)]
    switches = [f"--{name}" for name in (*SWITCHES, "untie-embeddings-and-output-weights")]
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), "memory", *model, *switches, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_70b_model_on_1024_ranks_is_planned_on_one_core() -> None:
    done = plan("--world-size", "1024", "--json")
    assert done.returncode == 0, done.stderr
    first, *middle, last = (rank["bytes"] for rank in json.loads(done.stdout)["ranks"])
    hidden, ffn, layers = 8192, 28672, 10
    qkv = hidden * (hidden + 2 * 1024)
    layer = (qkv + hidden * hidden + 3 * hidden * ffn) // 8 + 2 * hidden
    table = 129024 // 8 * hidden  # padded to a multiple of 128 x tp
    assert middle[0]["parameters"] == 2 * layers * layer  # each a multiple of the buckets' alignment
    assert first["parameters"] == 2 * (layers * layer + table)
    assert last["parameters"] == 2 * (layers * layer + table + hidden)
    assert all(rank["gradients"] == 2 * rank["parameters"] for rank in (first, *middle, last))
    assert all(rank["optimizer"] == 6 * rank["parameters"] for rank in (first, *middle, last))
    assert [rank["logits_and_loss"] > 0 for rank in (first, *middle, last)] == [False] * 7 + [True]
    held = [rank["activations"] for rank in (first, *middle)]
    assert held == sorted(held, reverse=True)  # 1F1B: 8, 7, ... micro-batches in flight


def test_the_table_has_one_row_for_equal_ranks() -> None:
    offload = ("--cpu-offloading-num-layers", "1", "--optimizer-cpu-offload")  # for a column more
    done = plan("--world-size", "64", "--pipeline-schedule", "gpipe", "--num-layers", "16", *offload)
    assert done.returncode == 0, done.stderr
    assert {"host", "total"} <= set(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert "1 .. 6" in done.stdout
    assert "64 ranks, tp 8 x pp 8 x dp 1" in done.stdout


def test_flags_of_the_training_run_are_judged_as_there() -> None:
    done = plan("--world-size", "1000")
    assert done.returncode == 2
    assert "--tensor-model-parallel-size 8: 1000 processes not divisible" in done.stderr


TINY = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
TINY += ["--group-query-attention", "--seq-length", "64", "--max-position-embeddings", "64"]


def told(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Exit code of `tools/plan.py memory`, in this process."""
    monkeypatch.setattr(sys, "argv", ["plan.py", "memory", *TINY, *flags])
    return tools.plan.main()


def test_the_verdict_for_a_device_and_its_advice_followed_literally(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = ("--world-size", "2", "--bf16")
    assert told(monkeypatch, *world, "--json") == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    need = rank["bytes"]["total"]
    assert told(monkeypatch, *world, "--device-memory", f"{2 * need / 1000}KB") == 0
    assert capsys.readouterr().err.startswith("fits: ")
    size = ("--device-memory", f"{need / 1000}KB")  # of which 90 % may be used
    assert told(monkeypatch, *world, *size) == 1
    title, *advice = capsys.readouterr().err.splitlines()
    assert title.startswith("does not fit: ")
    assert "what would help, the cheapest first" in title
    assert advice[0].startswith("  1. --zero-stage 1: saves ")
    found = re.fullmatch(r"  \d+\. (--.*): saves .*, needs .*, fits; .*", advice[-1])
    assert found is not None, advice
    assert all("does not fit alone" in line for line in advice[:-1])
    assert told(monkeypatch, *world, *size, *found[1].split()) == 0


@pytest.mark.parametrize("size", ["much", "80"])  # not 80 bytes
def test_a_size_needs_its_unit(
    size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        told(monkeypatch, "--device-memory", size)
    assert leaving.value.code == 2
    assert f"'{size}' is no size; give e.g. 80GB or 64GiB" in capsys.readouterr().err


def test_the_picture_has_a_row_of_bars_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []
    for ranks in ("1", "2"):
        path = tmp_path / f"{ranks}.png"
        sizes = ("--world-size", ranks, "--pipeline-model-parallel-size", ranks)
        assert told(monkeypatch, *sizes, "--png", str(path)) == 0
        pixels = image.imread(path)
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 5  # a colour a purpose
        heights.append(pixels.shape[0])
    assert heights[0] < heights[1]


def test_a_run_that_will_not_fit_is_warned_and_its_table_is_short() -> None:
    flags = [*TINY, "--mock-data", "--num-layers", "12", "--pipeline-model-parallel-size", "12"]
    planned = plan_memory(parse([*flags, "--global-batch-size", "24"], 12), 12, True)
    largest = planned.largest.account
    beside = largest.activations + largest.working + largest.logits_and_loss + largest.communication
    (table,) = plan_lines(planned, beside)
    assert table.count("\n") == 5 + MOST_ROWS - 1  # the largest is among those that are evenly spread
    assert f"{MOST_ROWS - 1} of 12 kinds of ranks; tools/plan.py memory shows all" in table
    assert plan_lines(planned, None) == [table]
    _, warning = plan_lines(planned, beside - 1)
    assert warning.startswith("warning: a step needs ")


def test_a_run_tells_its_plan_and_what_its_first_step_measured() -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--train-iters", "2", "--eval-iters", "0")
    done = launch("--memory-report", "--group-query-attention", *flags)
    assert done.returncode == 0, done.stderr
    assert "Memory of a rank at the peak of a step, in MiB: 2 ranks, tp 1 x pp 2 x dp 1" in done.stdout
    found = re.findall(r"memory of pp rank (\d): planned .* measured .* \((.*)%\), resident ", done.stdout)
    assert [rank for rank, _ in found] == ["0", "1"]
    assert all(abs(float(difference)) < 3 for _, difference in found), found


def test_activations_that_wait_on_the_host_are_not_on_the_device() -> None:
    layout = Layout()
    plain, offloaded = (
        make_config(model_for("gpt2", layout, options), layout, options, "float32")
        for options in (Options(8), Options(8, offloaded_layers=2))
    )
    # When the first backward starts, what its forward saved is held.
    before, after = (
        plan_memory(config, 1, True).largest.moments[1].held["activations"] for config in (plain, offloaded)
    )
    assert after < 0.2 * before
