"""Head and cross-entropy in chunks equal the two apart, for any number of chunks, ranks and accumulators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megalite.kernels import linear_cross_entropy, linear_cross_entropy_reference
from megalite.kernels.linear_cross_entropy import chunk_rows
from tests.pool import WorkerPool

VOCABULARY, WIDTH, HIDDEN = 13, 16, 5
TARGET = torch.tensor([0, 12, -100, 3, 7, 7, 2])


def leaves(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_any_number_of_chunks(rows: int) -> None:
    hidden, weight, bias = leaves()
    budget = rows * WIDTH * 8

    def operation(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, TARGET, 0, VOCABULARY, bias=bias, label_smoothing=0.1, z_loss=1e-2, budget=budget
        )

    expected = linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY, -100, 0.1, 1e-2, bias)
    torch.testing.assert_close(operation(hidden, weight, bias), expected, rtol=1e-13, atol=1e-13)
    assert gradcheck(operation, (hidden, weight, bias))


def test_without_bias_and_a_second_backward() -> None:
    hidden, weight, _ = leaves()
    expected = torch.autograd.grad(
        linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY).sum(), (hidden, weight)
    )
    loss = linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, budget=3 * WIDTH * 8)
    for _ in range(2):
        got = torch.autograd.grad(loss.sum(), (hidden, weight), retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_gradient_into_a_main_gradient() -> None:
    class Sink:
        def __init__(self) -> None:
            self.main_grad = torch.ones(WIDTH, HIDDEN, dtype=torch.float64)
            self.calls = 0

        def ready(self) -> None:
            self.calls += 1

    hidden, weight, _ = leaves()
    (expected,) = torch.autograd.grad(
        linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY).sum(), weight
    )
    sink = Sink()
    linear_cross_entropy(
        hidden, weight, TARGET, 0, VOCABULARY, sink=sink, budget=2 * WIDTH * 8
    ).sum().backward()
    torch.testing.assert_close(sink.main_grad, expected + 1, rtol=1e-13, atol=1e-13)
    assert sink.calls == 1
    assert weight.grad is None


def test_many_chunks_in_bf16_accumulate_in_fp32() -> None:
    """Liger#512 and others: a bf16 accumulator drifts with the number of chunks."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 8, generator=generator).bfloat16()
    weight = torch.randn(16, 8, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 16, (512,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    linear_cross_entropy_reference(hidden.double(), exact, target, 16).sum().backward()
    assert exact.grad is not None
    errors = []
    for rows in (512, 4):
        loss = linear_cross_entropy(hidden, weight, target, 0, 16, budget=rows * 16 * 2)
        (grad,) = torch.autograd.grad(loss.sum(), weight)
        errors.append(float((grad.double() - exact.grad).abs().max()))
    assert errors[1] <= 1.5 * errors[0]


def test_all_targets_ignored() -> None:
    """torch's own chunked form gives NaN weight gradients here."""
    hidden, weight, _ = leaves()
    loss = linear_cross_entropy(hidden, weight, torch.full((7,), -100), 0, VOCABULARY, budget=256)
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert loss.eq(0).all()
    assert all(grad.eq(0).all() for grad in grads)


def test_frozen_weight_and_no_gradient_at_all() -> None:
    hidden, weight, _ = leaves()
    expected = linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY), expected)
    loss = linear_cross_entropy(hidden, weight.detach(), TARGET, 0, VOCABULARY)
    (grad,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), hidden)[0], grad)


def shard() -> tuple[Tensor, Tensor, Tensor]:
    """Loss, this rank's part of the hidden gradient, and the gradient of its rows of the weight."""
    hidden, weight, _ = leaves()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    width = WIDTH // ranks
    mine = weight.detach()[rank * width : (rank + 1) * width].requires_grad_()
    group = torch.distributed.group.WORLD
    loss = linear_cross_entropy(hidden, mine, TARGET, rank * width, VOCABULARY, group, budget=2 * width * 8)
    grad_hidden, grad_weight = torch.autograd.grad(loss.sum(), (hidden, mine))
    return loss.detach(), grad_hidden, grad_weight


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_cut_of_the_vocabulary(pool: WorkerPool, ranks: int) -> None:
    hidden, weight, _ = leaves()
    expected = linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY)
    grad_hidden, grad_weight = torch.autograd.grad(expected.sum(), (hidden, weight))
    parts = pool.run(ranks, shard)
    for loss, _, _ in parts:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.stack([part[1] for part in parts]).sum(0), grad_hidden, rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad_weight, rtol=1e-12, atol=1e-13)


def test_chunks_follow_the_budget() -> None:
    assert chunk_rows(8192, 131072, 2, 512 * 2**20) == 2048
    assert chunk_rows(8193, 131072, 2, 512 * 2**20) == 1639  # five even chunks, not four and a rest of one
    assert chunk_rows(8, 1000, 2, 1) == 1
    assert chunk_rows(0, 1000, 2, 1) == 1
