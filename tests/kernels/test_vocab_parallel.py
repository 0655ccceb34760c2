"""Cross-entropy over real process groups: every cut of the vocabulary gives the one-process numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels import cross_entropy_reference, vocab_parallel_cross_entropy
from tests.pool import WorkerPool

VOCABULARY = 37


def whole() -> tuple[Tensor, Tensor, Tensor]:
    """Logits (tokens, padded vocabulary), targets with an ignored one, and a gradient a token; fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 48, dtype=torch.float64, generator=generator)
    grad = torch.randn(6, dtype=torch.float64, generator=generator)
    return logits, torch.tensor([0, 36, -100, 12, 24, 11]), grad


def shard(widths: tuple[int, ...], label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of this rank's columns."""
    rank = torch.distributed.get_rank()
    start = sum(widths[:rank])
    logits, target, grad = whole()
    mine = logits[:, start : start + widths[rank]].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        mine,
        target,
        start,
        VOCABULARY,
        torch.distributed.group.WORLD,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    loss.backward(grad)
    assert mine.grad is not None
    return loss.detach(), mine.grad


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize("widths", [(24, 24), (12, 12, 12, 12), (37, 11), (20, 9, 7, 12)])
def test_any_cut_of_the_vocabulary(
    pool: WorkerPool, widths: tuple[int, ...], label_smoothing: float, z_loss: float
) -> None:
    logits, target, grad = whole()
    logits.requires_grad_()
    expected = cross_entropy_reference(logits, target, VOCABULARY, -100, label_smoothing, z_loss)
    expected.backward(grad)
    parts = pool.run(len(widths), shard, widths, label_smoothing, z_loss)
    for loss, _ in parts:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
    gradient = torch.cat([part for _, part in parts], -1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-13, atol=1e-13)
    assert gradient[:, VOCABULARY:].eq(0).all()
    assert gradient[2].eq(0).all()


def mean_of_a_masked_rank() -> float:
    """This rank's sum and count, reduced over ranks of which one has nothing but ignored targets."""
    rank = torch.distributed.get_rank()
    logits, target, _ = whole()
    if rank == 1:
        target = torch.full_like(target, -100)
    loss = vocab_parallel_cross_entropy(logits, target, 0, VOCABULARY, reduction="sum")
    total = torch.stack((loss, (target != -100).sum().to(loss.dtype)))
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


def test_a_rank_without_valid_targets_leaves_the_mean_finite(pool: WorkerPool) -> None:
    logits, target, _ = whole()
    expected = float(torch.nn.functional.cross_entropy(logits[:, :VOCABULARY], target))
    assert pool.run(2, mean_of_a_masked_rank) == pytest.approx([expected, expected], rel=1e-13)
