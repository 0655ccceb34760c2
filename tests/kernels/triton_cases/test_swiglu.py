"""SwiGLU in Triton, stacked and on two tensors, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels import swiglu, swiglu_pair
from tests.kernels.triton_cases.exactness import DTYPES, check, random, run
from tests.kernels.triton_cases.layouts import GRADIENTS, STRIDED, far_apart

Layout = Callable[[Tensor], Tensor]


def ours(x: Tensor) -> Tensor:
    return swiglu(x, backend="triton")


def torchs(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x[..., 0, :]) * x[..., 1, :]


def ours_pair(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_pair(gate, up, backend="triton")


def torchs_pair(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1), (3, 5, 2, 123), (2, 2, 2048), (3, 2, 4100)])
def test_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype, scale=3.0)
    check(ours, torchs, (x,), (random(*shape[:-2], shape[-1], dtype=dtype, seed=1),))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_tensors(dtype: torch.dtype) -> None:
    gate, up = random(3, 5, 123, dtype=dtype), random(3, 5, 123, dtype=dtype, seed=1)
    check(ours_pair, torchs_pair, (gate, up), (random(3, 5, 123, dtype=dtype, seed=2),))


@STRIDED
def test_strided_inputs(layout: Layout) -> None:
    check(ours, torchs, (layout(random(3, 4, 2, 48)),), (random(3, 4, 48, seed=1),))
    gate, up = layout(random(3, 4, 48)), random(3, 4, 48, seed=1)
    check(ours_pair, torchs_pair, (gate, up), (random(3, 4, 48, seed=2),))


@GRADIENTS
def test_strided_gradients(grad_layout: Layout) -> None:
    check(ours, torchs, (random(3, 4, 2, 48),), (grad_layout(random(3, 4, 48, seed=1)),))


def test_large_gates_stay_finite() -> None:
    x = torch.stack((torch.tensor([-200.0, -90.0, 90.0, 200.0]), torch.ones(4))).to(random(1).device)
    check(ours, torchs, (x,), (random(4),))


def test_rows_beyond_two_to_the_31() -> None:
    x, grad = (
        far_apart(random(3, 2, 128, dtype=torch.bfloat16)),
        far_apart(random(3, 128, dtype=torch.bfloat16, seed=1)),
    )
    for got, expected in zip(run(ours, (x,), (grad,)), run(ours, (x.clone(),), (grad.clone(),)), strict=True):
        assert torch.equal(got, expected)


def test_a_second_backward_gives_the_same() -> None:
    """Liger overwrites its saved inputs, so that a second backward is silently wrong."""
    x = random(3, 2, 48).requires_grad_()
    y = ours(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_no_rows() -> None:
    x = random(0, 2, 32)
    y, grad = run(ours, (x,), (random(0, 32),))
    assert y.shape == (0, 32)
    assert grad.shape == (0, 2, 32)
