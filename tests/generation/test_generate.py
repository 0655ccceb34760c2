"""Texts are the same on every layout, alone or in a batch, and hold no token that the vocabulary has not."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.config import parse
from megalite.data.batch import Batch
from megalite.generation.decode import generate
from megalite.generation.model import LoadedModel, load_model
from megalite.generation.sampling import Sampling
from megalite.model.ends import Head
from megalite.parallel.params import record_of
from megalite.parallel.topology import build_topology
from megalite.training.loop import run
from tests.end_to_end.launch import ROOT, environment
from tests.pool import WorkerPool

CPU = torch.device("cpu")
VOCAB, SEQ = 61, 8
RUN = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 4 --global-batch-size 4 --train-iters 3 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 61 --null-tokenizer-eod-id 60 --mock-data --lr 0.3 "
    "--params-dtype float64 --make-vocab-size-divisible-by 16 --no-memory-report"
)
VARIANTS = {
    "gpt2": "",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
}
PROMPTS = ((5,), (7, 8, 9, 10, 11), tuple(range(20, 32)), (1, 2), (3, 3, 3))
SAMPLINGS = (Sampling(0.0), Sampling(1.0, 10), Sampling(1.5, 0, 0.9, seed=7))


def trained(variant: str, folders: pytest.TempPathFactory) -> str:
    folder = str(folders.mktemp(variant))
    argv = [*RUN.split(), *VARIANTS[variant].split(), "--save", folder]
    run(parse(argv, 1), build_topology(1, 1, CPU))
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(request.param, tmp_path_factory)


@functools.cache
def on_one_process(folder: str) -> list[list[list[int]]]:
    model = load_model(folder, CPU)
    return [generate(model, PROMPTS, 12, sampling) for sampling in SAMPLINGS]


def with_loud_padding(model: LoadedModel) -> LoadedModel:
    """Rows beyond the vocabulary get the largest logits; their sign is that of every second row."""
    if isinstance(head := model.stage.head, Head):
        rows = head.weight[max(0, VOCAB - record_of(head.weight).offsets[0]) :]
        signs = torch.where(torch.arange(len(rows)) % 2 == 0, 1e3, -1e3).unsqueeze(1)
        rows.data.copy_(signs.expand_as(rows))
    return model


def on_many(folder: str, tensor: int, pipeline: int) -> list[list[list[int]]]:
    model = with_loud_padding(load_model(folder, CPU, tensor, pipeline))
    return [generate(model, PROMPTS, 12, sampling) for sampling in SAMPLINGS]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (1, 3), (4, 1)])
def test_every_layout_writes_the_same(pool: WorkerPool, checkpoint: str, tensor: int, pipeline: int) -> None:
    for texts in pool.run(tensor * pipeline, on_many, checkpoint, tensor, pipeline):
        assert texts == on_one_process(checkpoint)


def test_greedy_texts_are_those_of_plain_forward_passes(checkpoint: str) -> None:
    """One text at a time, without padding, and the largest logit by hand."""
    model = load_model(checkpoint, CPU)
    greedy = on_one_process(checkpoint)[0]
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        text = list(prompt)
        for _ in expected:
            window = torch.tensor([text[-SEQ:]])
            text.append(int(_plain_logits(model, window)[-1, 0, :VOCAB].argmax()))
        assert text[len(prompt) :] == expected
        assert len(expected) == 12 or expected[-1] == 60


@torch.no_grad()
def _plain_logits(model: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1]).unsqueeze(0)
    batch = Batch(tokens, tokens, tokens, places, torch.zeros(1, dtype=torch.int64))
    head = model.stage.head
    assert head is not None  # the only stage is also the last
    return head.logits(model.stage.hidden_states(batch, None))


def test_a_text_does_not_depend_on_its_neighbours(checkpoint: str) -> None:
    model = load_model(checkpoint, CPU)
    for sampling, texts in zip(SAMPLINGS, on_one_process(checkpoint), strict=True):
        assert generate(model, PROMPTS[:1], 12, sampling) == texts[:1]
        assert generate(model, PROMPTS[:3], 12, sampling) == texts[:3]


def test_a_seed_writes_its_own_texts_and_sampling_is_not_greedy(checkpoint: str) -> None:
    model = load_model(checkpoint, CPU)
    texts = [generate(model, PROMPTS, 12, replace(SAMPLINGS[2], seed=seed)) for seed in (1, 2)]
    assert texts[0] != texts[1]
    assert on_one_process(checkpoint)[0] not in texts


def test_texts_end_with_the_end_of_document(checkpoint: str) -> None:
    """A temperature at which every token is as likely as any other draws the end among 60 soon."""
    model = load_model(checkpoint, CPU)
    for text in generate(model, PROMPTS, 1000, Sampling(1e6, 0)):
        assert text[-1] == 60
        assert 60 not in text[:-1]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], [61]], [[-1]]])
def test_prompts_that_cannot_be_read_are_refused(checkpoint: str, prompts: Sequence[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one token, each from 0 to 60"):
        generate(load_model(checkpoint, CPU), prompts, 1, Sampling())


def test_layouts_that_the_model_does_not_fit_are_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="4 heads not divisible by tensor-parallel size 3"):
        load_model(checkpoint, CPU, tensor=3)
    with pytest.raises(ValueError, match="3 layers are fewer than pipeline-parallel size 4"):
        load_model(checkpoint, CPU, pipeline=4)


def tool(*words: str, launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tools" / "generate.py"), *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_command_writes_the_same_under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = trained("gpt2", tmp_path_factory)
    words = (
        "--load",
        folder,
        "--prompt",
        "5 6",
        "--prompt",
        "7 8 9",
        "--max-new-tokens",
        "5",
        "--top-p",
        "0.9",
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    spread = tool(*words, "--pipeline-model-parallel-size", "2", launcher=torchrun)
    added = generate(load_model(folder, CPU), [[5, 6], [7, 8, 9]], 5, Sampling(0.8, 50, 0.9, 1234))
    texts = ["5 6 " + " ".join(map(str, added[0])), "7 8 9 " + " ".join(map(str, added[1]))]
    assert spread.stdout.strip() == "\n\n".join(texts), spread.stderr


def test_the_command_refuses_processes_that_the_layout_does_not_use(tmp_path: Path) -> None:
    done = tool("--load", str(tmp_path), "--tensor-model-parallel-size", "2")
    assert done.returncode == 1
    assert "TP 2 x PP 1 must be the number of processes, 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_reads_the_text_may_have_gone(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = trained("gpt2", tmp_path_factory)
    words = [str(ROOT / "tools" / "generate.py"), "--load", folder, "--prompt", "5"]
    done = subprocess.run(
        ["sh", "-c", '"$@" | true', "sh", sys.executable, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stderr == ""
