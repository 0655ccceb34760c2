"""Each operation equals its equation in fp64, value and gradient, and leaves its inputs alone."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from megalite.kernels import (
    add_rms_norm,
    add_rms_norm_reference,
    cross_entropy_reference,
    rms_norm,
    rms_norm_reference,
    rope,
    rope_reference,
    rotary_table,
    swiglu,
    swiglu_reference,
    vocab_parallel_cross_entropy,
)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_has_the_gradient_of_its_equation(weight_offset: float) -> None:
    x, weight = random(3, 2, 7), random(7, seed=1)

    def operation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, 1e-5, weight_offset=weight_offset)

    assert gradcheck(operation, (x, weight))
    torch.testing.assert_close(
        operation(x, weight), rms_norm_reference(x, weight, 1e-5, weight_offset), rtol=1e-13, atol=1e-13
    )


def test_add_rms_norm_has_the_gradient_of_its_equation() -> None:
    x, residual, weight = random(3, 2, 7), random(3, 2, 7, seed=1), random(7, seed=2)

    def operation(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return add_rms_norm(x, residual, weight, 1e-5)

    assert gradcheck(operation, (x, residual, weight))
    expected = add_rms_norm_reference(x, residual, weight, 1e-5)
    for got, reference in zip(operation(x, residual, weight), expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-13, atol=1e-13)


def test_swiglu_has_the_gradient_of_its_equation() -> None:
    x = random(3, 2, 5)
    assert gradcheck(swiglu, (x,))
    torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(x[:, 0]) * x[:, 1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(swiglu(x), swiglu_reference(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 8])
@pytest.mark.parametrize("by_sample", [False, True])
def test_rope_has_the_gradient_of_its_equation(interleaved: bool, rotary_dim: int, by_sample: bool) -> None:
    q, k = random(3, 2, 4, 8), random(3, 2, 1, 8, seed=1)
    positions = torch.tensor([[0, 5], [1, 0], [2, 1]]) if by_sample else torch.arange(3)
    cos, sin = rotary_table(positions, rotary_dim, dtype=torch.float64)

    def operation(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, cos, sin, interleaved)

    assert gradcheck(operation, (q, k))
    for got, expected in zip(operation(q, k), rope_reference(q, k, cos, sin, interleaved), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_rope_turns_each_pair_as_a_complex_number() -> None:
    q, k = random(3, 2, 4, 8), random(3, 2, 1, 8, seed=1)
    cos, sin = rotary_table(torch.arange(3), 8, dtype=torch.float64)
    turn = torch.complex(cos, sin)[:, None, None]
    pairs = torch.view_as_complex(q.detach().unflatten(-1, (4, 2))) * turn
    interleaved, _ = rope(q, k, cos, sin, interleaved=True)
    torch.testing.assert_close(interleaved, torch.view_as_real(pairs).flatten(-2))
    split, _ = rope(q.detach().unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2), k, cos, sin)
    torch.testing.assert_close(split, torch.cat((pairs.real, pairs.imag), -1))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_has_the_gradient_of_its_equation(label_smoothing: float, z_loss: float) -> None:
    logits = random(3, 2, 9)
    target = torch.tensor([[0, 6], [-100, 3], [1, 1]])

    def operation(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(
            logits, target, 0, 7, label_smoothing=label_smoothing, z_loss=z_loss
        )

    assert gradcheck(operation, (logits,))
    expected = cross_entropy_reference(logits, target, 7, -100, label_smoothing, z_loss)
    torch.testing.assert_close(operation(logits), expected, rtol=1e-13, atol=1e-13)


def test_cross_entropy_is_torchs_own_on_the_true_vocabulary() -> None:
    logits = random(5, 9)
    target = torch.tensor([0, 6, -100, 3, 1])
    got = vocab_parallel_cross_entropy(logits, target, 0, 7, label_smoothing=0.1)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :7], target, ignore_index=-100, label_smoothing=0.1, reduction="none"
    )
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    (got * torch.arange(1.0, 6.0)).sum().backward()
    assert logits.grad is not None
    assert logits.grad[:, 7:].eq(0).all()
    assert logits.grad[2].eq(0).all()


def test_cross_entropy_of_a_foreign_id_is_nan() -> None:
    loss = vocab_parallel_cross_entropy(random(3, 9), torch.tensor([7, -1, 2]), 0, 7)
    assert loss.isnan().tolist() == [True, True, False]
