"""Dropout by counter in Triton: the bits of the mask are those of plain torch, values and gradients too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels.dropout import dropout, site_key
from tests.kernels.triton_cases.exactness import DEVICE, DTYPES, random
from tests.kernels.triton_cases.layouts import GRADIENTS, STRIDED, far_apart

SEED, SITE, RATE = 1234, 5, 0.3


def both(
    x: Tensor, samples: Tensor, grad: Tensor, first: int, total: int, residual: Tensor | None = None
) -> list[tuple[Tensor, ...]]:
    """Output and gradient of x in Triton and in torch."""
    results = []
    for backend in ("triton", "torch"):
        leaf = x.detach().requires_grad_()
        y = dropout(
            leaf, samples, site_key(SEED, SITE), RATE, first, total, residual=residual, backend=backend
        )
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad)))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 123), (2, 3, 64), (2, 1, 4100)])
def test_bits_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, grad = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    samples = torch.arange(shape[1], device=DEVICE) * 2**33 + 17  # numbers of elements beyond 2^32
    ours, theirs = both(x, samples, grad, 5, 1000)
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected)
    if x.numel() > 100:
        assert float((ours[0] == 0).double().mean()) == pytest.approx(RATE, abs=0.15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_residual(dtype: torch.dtype) -> None:
    """Where the product and the sum become one instruction the last digit may differ, in fp32 alone."""
    x, residual, grad = (random(3, 2, 123, dtype=dtype, seed=seed) for seed in range(3))
    ours, theirs = both(x, torch.arange(2, device=DEVICE), grad, 0, 3, residual)
    assert torch.equal(ours[1], theirs[1])
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=tolerance)


@STRIDED
def test_strided_inputs(layout: Callable[[Tensor], Tensor]) -> None:
    x, residual = layout(random(3, 4, 48)), layout(random(3, 4, 48, seed=2))
    ours, theirs = both(x, torch.arange(4, device=DEVICE), random(3, 4, 48, seed=1), 0, 3, residual)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


@GRADIENTS
def test_strided_gradients(grad_layout: Callable[[Tensor], Tensor]) -> None:
    grad = grad_layout(random(3, 4, 48, seed=1))
    ours, theirs = both(random(3, 4, 48), torch.arange(4, device=DEVICE), grad, 0, 3)
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected)


def test_rows_beyond_two_to_the_31() -> None:
    x, grad = random(3, 1, 128, dtype=torch.bfloat16), random(3, 1, 128, dtype=torch.bfloat16, seed=1)
    samples = torch.arange(1, device=DEVICE)
    far, near = both(far_apart(x), samples, far_apart(grad), 0, 3)[0], both(x, samples, grad, 0, 3)[0]
    for got, expected in zip(far, near, strict=True):
        assert torch.equal(got, expected)
