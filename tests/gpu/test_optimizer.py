"""The optimizer where its state lies on a GPU, on the host, on both; apex's fused Adam beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.config.rules.apex import has_fused_adam
from megalite.optim import Optimizer
from megalite.optim.offload import HostState
from megalite.optim.state import FlatState, StateOptions
from megalite.parallel.buckets import GradientBuckets
from tests.optim.flat import draw_gradients, make_buckets, make_optimizer

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
AWARE = {"use_precision_aware_optimizer": True}
OFFLOADED = {"optimizer_cpu_offload": True}


def trained(dtype: torch.dtype, **settings: Any) -> tuple[GradientBuckets, Optimizer]:
    """After four steps."""
    buckets = make_buckets(dtype, device=CUDA)
    optimizer = make_optimizer(buckets, clip_grad=1.0, **settings)
    for seed in range(4):
        draw_gradients(buckets, seed)
        optimizer.step(1e-2)
    return buckets, optimizer


def values(buckets: GradientBuckets, optimizer: Optimizer) -> list[torch.Tensor]:
    """Weights and logical state, on the host."""
    states = [block.values for block in optimizer.state_blocks()]
    return [tensor.cpu() for tensor in [*(bucket.weights for bucket in buckets.buckets), *states]]


def test_remainders_give_the_bits_of_a_master() -> None:
    assert all(map(torch.equal, values(*trained(BF16)), values(*trained(BF16, **AWARE))))


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_the_host_gives_the_numbers_of_the_device(dtype: torch.dtype, fraction: float) -> None:
    """To rounding: the GPU contracts a * b + c. A bf16 weight may then lie one unit away."""
    expected = values(*trained(dtype))
    found = values(*trained(dtype, **OFFLOADED, optimizer_offload_fraction=fraction))
    for got, wanted in zip(found, expected, strict=True):
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, BF16: 2.0**-7}[got.dtype]
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("remainder", [False, True])
def test_many_pieces_are_copied_in_order_while_the_host_computes(remainder: bool) -> None:
    """Equal to one update of everything on the host, over steps whose gradients change at once."""
    options = StateOptions(0.9, 0.95, 1e-8, 0.1, store_param_remainders=remainder)
    scalars = torch.tensor([1e-2, 1.0, 10.0, 20.0, 0.0]).double()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3_000_017, generator=generator).to(BF16)
    on_device, grads = weights.to(CUDA), torch.zeros(weights.shape, device=CUDA)
    offloaded = HostState(on_device, grads, ((5, 2_000_000),), options, piece=100_000)
    host_grads = torch.zeros_like(weights, dtype=torch.float32)
    plain = FlatState(weights, host_grads, ((5, 2_000_000),), options)
    for step in range(1, 4):
        host_grads.copy_(torch.randn(weights.shape, generator=generator))
        grads.copy_(host_grads)
        offloaded.start_copies()
        offloaded.update(scalars.to(CUDA))
        grads.zero_()
        plain.update(scalars, torch.tensor(step))
        assert torch.equal(on_device.cpu(), weights)


def test_offloaded_state_is_not_on_the_gpu() -> None:
    _, optimizer = trained(BF16, **OFFLOADED)
    assert all(tensor.device.type == "cpu" for tensor in optimizer.held() if tensor.numel())


def test_loaded_weights_reach_the_host() -> None:
    buckets, optimizer = trained(torch.float32, **OFFLOADED)
    for bucket in buckets.buckets:
        bucket.weights.mul_(3)
    loaded = [bucket.weights.clone() for bucket in buckets.buckets]
    optimizer.copy_weights_to_master()
    optimizer.step(0.0)
    assert all(map(torch.equal, [bucket.weights for bucket in buckets.buckets], loaded))


@pytest.mark.skipif(not has_fused_adam(), reason="NVIDIA's apex is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_apex_gives_the_same_numbers(dtype: torch.dtype) -> None:
    """To rounding, where an element of the update is a quotient of small numbers: 1e-5 of a step of 1e-2."""
    expected, found = values(*trained(dtype)), values(*trained(dtype, optimizer_impl="apex"))
    for got, wanted in zip(found, expected, strict=True):
        tolerance = 2.0**-7 if got.dtype == BF16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=1e-6)


@pytest.mark.skipif(not has_fused_adam(), reason="NVIDIA's apex is not installed")
def test_apex_skips_a_step_that_is_not_finite() -> None:
    buckets, optimizer = trained(BF16, optimizer_impl="apex")
    before = values(buckets, optimizer)
    buckets.buckets[0].grads[3] = torch.inf
    assert bool(optimizer.step(1e-2).skipped)
    assert all(map(torch.equal, values(buckets, optimizer), before))
