"""Dropout by counter: its rate, its independence, its gradient."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels.dropout import dropout, keep, site_key

SAMPLES, SEQ, HIDDEN = 5, 32, 64


def _ones(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(SEQ, SAMPLES, HIDDEN, dtype=dtype)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    count = 1_000_000
    kept = keep(torch.arange(count), site_key(1234, 1), rate).double().mean().item()
    assert kept == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / count) ** 0.5)  # 5 standard errors


def test_masks_of_sites_seeds_and_neighbours_are_unrelated() -> None:
    counters = torch.arange(200_000)
    one = keep(counters, site_key(1234, 1), 0.5).double()
    for other in (
        keep(counters, site_key(1234, 2), 0.5),
        keep(counters, site_key(1235, 1), 0.5),
        keep(counters + 1, site_key(1234, 1), 0.5),
        keep(counters + HIDDEN, site_key(1234, 1), 0.5),
    ):
        agreement = (one == other.double()).double().mean().item()
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / 200_000**0.5)


def test_a_shard_and_a_smaller_batch_have_the_same_mask() -> None:
    key, samples = site_key(7, 3), torch.tensor([3, 9, 4, 1000, 2**40])
    whole = dropout(_ones(), samples, key, 0.3, 0, SEQ)
    shard = dropout(_ones()[8:16, 2:4], samples[2:4], key, 0.3, 8, SEQ)
    assert torch.equal(shard, whole[8:16, 2:4])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.7}


def test_the_gradient_has_the_mask_of_the_forward() -> None:
    x = _ones().requires_grad_()
    y = dropout(x, torch.arange(SAMPLES), 11, 0.25, 0, SEQ)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_half_precision_keeps_its_dtype() -> None:
    assert dropout(_ones(torch.bfloat16), torch.arange(SAMPLES), 11, 0.25, 0, SEQ).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_residual_is_added_in_the_same_pass(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (
        torch.randn(SEQ, SAMPLES, HIDDEN, generator=generator).to(dtype).requires_grad_() for _ in range(2)
    )
    place = (torch.arange(SAMPLES), 11, 0.25, 0, SEQ)
    added = dropout(x, *place, residual=residual)
    exact = residual.double() + dropout(x.double(), *place)
    assert torch.equal(added, exact.to(dtype))
    grad = torch.randn(SEQ, SAMPLES, HIDDEN, generator=generator).to(dtype)
    grad_x, grad_residual = torch.autograd.grad(added, (x, residual), grad)
    assert torch.equal(grad_residual, grad)
    assert torch.equal(grad_x, dropout(grad, *place))
    assert torch.equal(dropout(x, torch.arange(SAMPLES), 11, 0.0, 0, SEQ, residual=residual), x + residual)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of samples \(4,\)"):
        dropout(_ones(), torch.arange(4), 11, 0.25, 0, SEQ)
    with pytest.raises(ValueError, match="must agree"):
        dropout(_ones(), torch.arange(SAMPLES), 11, 0.25, 0, SEQ, residual=_ones(torch.float32))


def test_rate_0_is_the_input_itself_and_1_is_refused() -> None:
    x = _ones()
    assert dropout(x, torch.arange(SAMPLES), 11, 0.0, 0, SEQ) is x
    with pytest.raises(ValueError, match=r"dropout rate 1\.0 is not in \[0, 1\)"):
        dropout(x, torch.arange(SAMPLES), 11, 1.0, 0, SEQ)
