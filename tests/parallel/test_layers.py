"""Parallel layers against the same layer in one process: values, input gradients and weight gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from megalite.kernels.weight_gradient import accumulate_fused, accumulate_unfused, accumulate_with_apex
from megalite.parallel.embedding import vocab_parallel_embedding
from megalite.parallel.linear import column_linear, row_linear
from megalite.parallel.products import TensorParallel
from megalite.parallel.topology import build_topology
from megalite.training.step import Trainer
from tests.pool import WorkerPool

SEQ, BATCH, WIDE, NARROW, VOCAB = 8, 2, 12, 8, 16


def _numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _through(kind: str, tp: int, sequence_parallel: bool, overlap: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of one layer, assembled from this rank's parts where they are parts."""
    topology = build_topology(tp, 1, torch.device("cpu"))
    axis = topology.tp
    how = TensorParallel(axis, sequence_parallel, overlap)
    shard = slice(axis.rank * SEQ // tp, (axis.rank + 1) * SEQ // tp) if sequence_parallel else slice(None)

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp, dim)[axis.rank].clone().requires_grad_()

    if kind == "column":
        x = _numbers(SEQ, BATCH, NARROW, seed=1)[shard].clone().requires_grad_()
        weight, bias = part(_numbers(WIDE, NARROW, seed=2), 0), part(_numbers(WIDE, seed=3), 0)
        y = column_linear(x, weight, bias, how)
        y.backward(_numbers(SEQ, BATCH, WIDE, seed=4).chunk(tp, -1)[axis.rank])
        return {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}  # type: ignore[dict-item]
    if kind == "row":
        x, weight = part(_numbers(SEQ, BATCH, WIDE, seed=1), -1), part(_numbers(NARROW, WIDE, seed=2), 1)
        bias = _numbers(NARROW, seed=3).requires_grad_()
        y = row_linear(x, weight, bias, how)
        y.backward(_numbers(SEQ, BATCH, NARROW, seed=4)[shard])
        return {"y": y, "x": x.grad, "weight": weight.grad, "bias": bias.grad}  # type: ignore[dict-item]
    tokens = torch.randint(VOCAB, (SEQ, BATCH), generator=torch.Generator().manual_seed(1))
    weight = part(_numbers(VOCAB, NARROW, seed=2), 0)
    y = vocab_parallel_embedding(tokens, weight, axis.rank * VOCAB // tp, axis, sequence_parallel)
    y.backward(_numbers(SEQ, BATCH, NARROW, seed=4)[shard])
    return {"y": y, "weight": weight.grad}  # type: ignore[dict-item]


def _detached(kind: str, tp: int, sequence_parallel: bool, overlap: bool) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in _through(kind, tp, sequence_parallel, overlap).items()}


# For each result, without and with sequence parallelism: the dim that tp cuts; None: whole; "sum": partial.
LAYOUT: dict[str, dict[str, tuple[Any, Any]]] = {
    "column": {"y": (-1, -1), "x": (None, 0), "weight": (0, 0), "bias": (0, 0)},
    "row": {"y": (None, 0), "x": (-1, -1), "weight": (1, 1), "bias": (None, "sum")},
    "embedding": {"y": (None, 0), "weight": (0, 0)},
}


@pytest.mark.parametrize(("sequence_parallel", "overlap"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", list(LAYOUT))
@pytest.mark.parametrize("tp", [2, 4])
def test_layer_equals_the_unsplit_layer(
    pool: WorkerPool, kind: str, tp: int, sequence_parallel: bool, overlap: bool
) -> None:
    expected = _detached(kind, 1, False, False)
    parts = pool.run(tp, _detached, kind, tp, sequence_parallel, overlap)
    for name, layouts in LAYOUT[kind].items():
        cut = layouts[sequence_parallel]
        pieces = [rank[name] for rank in parts]
        if cut is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs between ranks"
            whole = pieces[0]
        else:
            whole = torch.stack(pieces).sum(0) if cut == "sum" else torch.cat(pieces, cut)
        # fp64 sums of at most 16 numbers in another order
        assert (whole - expected[name]).abs().max() < 1e-13, name


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (PrecisionConfig(), accumulate_fused),
        (PrecisionConfig(gradient_accumulation_fusion=False), accumulate_unfused),
        (PrecisionConfig(gradient_accumulation_fusion_impl="apex"), accumulate_with_apex),
    ],
)
def test_weight_gradients_are_accumulated_as_configured(precision: PrecisionConfig, expected: Any) -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        seq_length=4,
        max_position_embeddings=4,
        vocab_size=8,
    )
    config = Config(
        model=model,
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-3),
        precision=precision,
        data=DataConfig(mock_data=True),
    )
    trainer = Trainer(config, build_topology(1, 1, torch.device("cpu")))
    assert trainer.buckets.weight_gradients.accumulate is expected
