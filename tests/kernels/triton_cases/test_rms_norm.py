"""RMSNorm in Triton, alone and after a residual, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels import add_rms_norm, rms_norm
from tests.kernels.triton_cases.exactness import DEVICE, DTYPES, check, random, run
from tests.kernels.triton_cases.layouts import GRADIENTS, STRIDED, far_apart

EPS = 1e-5
Layout = Callable[[Tensor], Tensor]


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS, backend="triton")


def torchs(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def ours_added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, weight, EPS, backend="triton")


def torchs_added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torchs(total, weight.to(total.dtype)).to(x.dtype), total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (1, 64), (3, 5, 123), (37, 128), (2, 4096), (3, 20000)])
def test_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    check(ours, torchs, (x, weight), (random(*shape, dtype=dtype, seed=2),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 123), (37, 128), (2, 20000)])
def test_shapes_with_residual(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    grads = (random(*shape, dtype=dtype, seed=3), random(*shape, dtype=dtype, seed=4))
    check(ours_added, torchs_added, (x, residual, weight.flatten()[: shape[-1]]), grads)


@pytest.mark.parametrize(("hidden", "rows"), [(123, 5), (20000, 2)])
def test_wide_residual_under_a_narrow_branch(hidden: int, rows: int) -> None:
    x, weight = random(rows, hidden, dtype=torch.bfloat16), random(hidden, dtype=torch.bfloat16, seed=1)
    residual = random(rows, hidden, seed=2)
    grads = (random(rows, hidden, dtype=torch.bfloat16, seed=3), random(rows, hidden, seed=4))
    check(ours_added, torchs_added, (x, residual, weight), grads)


@STRIDED
def test_strided_inputs(layout: Layout) -> None:
    x, weight = layout(random(3, 4, 48, dtype=torch.bfloat16)), random(48, dtype=torch.bfloat16, seed=1)
    check(ours, torchs, (x, weight), (random(3, 4, 48, dtype=torch.bfloat16, seed=2),))
    check(ours_added, torchs_added, (x, layout(x * 2), weight), (random(3, 4, 48), random(3, 4, 48, seed=1)))


@GRADIENTS
def test_strided_gradients(grad_layout: Layout) -> None:
    x, weight = random(3, 4, 48), random(48, seed=1)
    check(ours, torchs, (x, weight), (grad_layout(random(3, 4, 48, seed=2)),))
    grads = (grad_layout(random(3, 4, 48, seed=2)), grad_layout(random(3, 4, 48, seed=3)))
    check(ours_added, torchs_added, (x, x * 2, weight), grads)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_mixed_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = random(5, 96, dtype=x_dtype), random(96, dtype=weight_dtype, seed=1)

    def composed(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return torchs(x.to(wide), weight.to(wide)).to(x.dtype)

    check(ours, composed, (x, weight), (random(5, 96, dtype=x_dtype, seed=2),))


def test_weight_offset() -> None:
    x, weight = random(5, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16, seed=1, scale=0.01)

    def with_offset(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS, weight_offset=1.0, backend="triton")

    def composed(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return torchs(x.to(wide), 1.0 + weight.to(wide)).to(x.dtype)

    check(with_offset, composed, (x, weight), (random(5, 96, dtype=torch.bfloat16, seed=2),))


def test_rows_beyond_two_to_the_31() -> None:
    x, weight = far_apart(random(3, 128, dtype=torch.bfloat16)), random(128, dtype=torch.bfloat16, seed=1)
    grad = far_apart(random(3, 128, dtype=torch.bfloat16, seed=2))
    for got, expected in zip(
        run(ours, (x, weight), (grad,)), run(ours, (x.clone(), weight), (grad.clone(),)), strict=True
    ):
        assert torch.equal(got, expected)


def test_the_residuals_gradient_survives_its_other_uses() -> None:
    """Liger#370: the norm's gradient, written over the incoming one, spoiled the residual's."""
    x, weight = random(4, 32), random(32, seed=1)
    grad = random(4, 32, seed=2)

    def both(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: operation(x, weight) + x

    check(both(ours), both(torchs), (x, weight), (grad,))


def test_no_rows() -> None:
    x, weight = random(0, 32), random(32)
    y, grad_x, grad_weight = run(ours, (x, weight), (x,))
    assert y.shape == grad_x.shape == (0, 32)
    assert torch.equal(grad_weight, torch.zeros(32, device=DEVICE))


def test_weight_gradient_is_reproducible() -> None:
    x, weight, grad = random(64, 256), random(256, seed=1), random(64, 256, seed=2)
    first, second = (run(ours, (x, weight), (grad,))[2] for _ in range(2))
    assert torch.equal(first, second)
