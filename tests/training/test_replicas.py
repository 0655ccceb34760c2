"""A replica whose bits changed ends the run, and is named."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.config import kv_replicas, parse
from megalite.parallel import replicas
from megalite.parallel.params import record_of
from megalite.parallel.replicas import fingerprint
from megalite.parallel.topology import build_topology
from megalite.training.errors import TrainingError
from megalite.training.loop import run
from megalite.training.replicas import check_replicas
from megalite.training.step import StepOutcome, Trainer
from tests.pool import WorkerPool

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 32 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --mock-data "
    "--global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 31 --lr 1e-2 --eval-iters 0 "
    "--no-memory-report "
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_one_bit_and_any_two_that_cancel_in_a_sum_change_the_fingerprint(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = int(fingerprint(values))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for element in range(values.numel()):
        for bit in range(8 * dtype.itemsize - 1):
            changed = values.clone()
            changed.view(integers).view(-1)[element] ^= 1 << bit
            assert int(fingerprint(changed)) != expected
    opposite = values.clone()
    opposite.view(integers).view(-1)[3] += 1
    opposite.view(integers).view(-1)[40] -= 1
    assert int(fingerprint(opposite)) != expected
    assert int(fingerprint(values.flip(0))) != expected
    monkeypatch.setattr(replicas, "PIECE", 10)
    assert int(fingerprint(values)) == expected


def check_with_a_changed_bit(tensor: int, rank: int, name: str) -> str | None:
    """What the check says on this rank of eight, with two pipeline stages, after a change on one."""
    flags = f"--train-iters 1 --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size 2"
    config = parse((MODEL + flags).split(), 8)
    topology = build_topology(tensor, 2, torch.device("cpu"), kv_replicas=kv_replicas(config.model, tensor))
    trainer = Trainer(config, topology)
    check_replicas(trainer, 1)  # equal: nothing is raised
    if topology.rank == rank:
        parts = [one for one in trainer.buckets.parameters if record_of(one).name == name]
        shared = max(parts, key=lambda one: len(record_of(one).replicated_over))
        shared.data.view(torch.int32).view(-1)[-1] ^= 1
    try:
        check_replicas(trainer, 7)
    except TrainingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("tensor", "rank", "name", "ranks"),
    [
        (2, 2, "layers.0.mlp.up.weight", "rank 2 differ from rank 0"),  # over dp
        (4, 6, "layers.2.mlp_norm.weight", "rank 6 differ from ranks 4, 5, 7"),  # over tp
        (4, 3, "layers.1.attention.qkv.weight", "rank 3 differ from rank 2"),  # of a key/value head
        (4, 5, "embedding.tokens.weight", "rank 5 differ from rank 1"),  # tied, on the last stage
    ],
)
def test_every_rank_names_the_parameter_and_the_rank(
    pool: WorkerPool, tensor: int, rank: int, name: str, ranks: str
) -> None:
    (message,) = set(pool.run(8, check_with_a_changed_bit, tensor, rank, name))
    assert message is not None
    assert message.splitlines()[:2] == [
        "iteration 7: replicas of weights differ, which should be equal to the bit:",
        f"  {name}: {ranks}",
    ]
    assert message.count("differ from") == 1


def train_with_a_change_after_step_two(*flags: str) -> str | None:
    topology = build_topology(1, 1, torch.device("cpu"))
    original, steps = Trainer.train_step, [0]

    def step_and_change(trainer: Trainer, *args: Any) -> StepOutcome:
        outcome = original(trainer, *args)
        steps[0] += 1
        if steps[0] == 2 and topology.rank == 1:
            trainer.buckets.parameters[0].data.view(torch.int32).view(-1)[0] ^= 1
        return outcome

    with patch.object(Trainer, "train_step", step_and_change):
        try:
            run(parse([*MODEL.split(), "--train-iters", "5", *flags], 2), topology)
        except TrainingError as error:
            return str(error)
    return None


def test_a_run_ends_at_the_next_check(pool: WorkerPool) -> None:
    flag = "--check-weight-hash-across-dp-replicas-interval"
    (message,) = set(pool.run(2, train_with_a_change_after_step_two, flag, "3"))
    assert message is not None
    assert message.startswith("iteration 3: replicas of weights differ")
    assert pool.run(2, train_with_a_change_after_step_two) == [None, None]
