"""The forms in which the optimizer's state is kept, and where: same numbers, same checkpoints, as many bytes
as promised.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megalite.config import PrecisionConfig
from megalite.optim import Optimizer, bytes_per_parameter
from megalite.optim.offload import HostState, OffloadedState
from megalite.optim.state import FlatState, State, StateOptions
from megalite.parallel.buckets import GradientBuckets
from tests.optim.flat import draw_gradients, make_buckets, make_optimizer

BF16 = torch.bfloat16
MASTER: dict[str, Any] = {}
REMAINDER = {"use_precision_aware_optimizer": True}
SHORT_MOMENTS = {**REMAINDER, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OFFLOADED = {"optimizer_cpu_offload": True}
HALF_OFFLOADED = {**OFFLOADED, "optimizer_offload_fraction": 0.4}
EXACT = (REMAINDER, OFFLOADED, HALF_OFFLOADED, {**REMAINDER, **HALF_OFFLOADED}, {"optimizer_impl": "torch"})


def _train(buckets: GradientBuckets, optimizer: Optimizer, seeds: range = range(4)) -> None:
    for seed in seeds:
        draw_gradients(buckets, seed)
        optimizer.step(1e-2)


def _values(buckets: GradientBuckets, optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of weights and logical state."""
    states = [block.values for block in optimizer.state_blocks()]
    return [tensor.clone() for tensor in [*(bucket.weights for bucket in buckets.buckets), *states]]


@pytest.mark.parametrize("form", EXACT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
def test_the_same_numbers_as_a_master_on_the_device(dtype: torch.dtype, form: dict[str, Any]) -> None:
    results = []
    for settings in (MASTER, form):
        buckets = make_buckets(dtype)
        optimizer = make_optimizer(buckets, clip_grad=1.0, loss_scale=1.0, **settings)
        _train(buckets, optimizer)
        results.append(_values(buckets, optimizer))
    if form == {"optimizer_impl": "torch"}:  # torch's square root is not rounded correctly
        for ours, theirs in zip(*results, strict=True):
            tolerance = {torch.float64: 1e-13, BF16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 1e-6)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)
    else:
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("target", [MASTER, REMAINDER, SHORT_MOMENTS, HALF_OFFLOADED], ids=str)
@pytest.mark.parametrize("source", [MASTER, REMAINDER, SHORT_MOMENTS, HALF_OFFLOADED], ids=str)
def test_any_form_goes_on_from_any_others_checkpoint(source: dict[str, Any], target: dict[str, Any]) -> None:
    """What is loaded is what was saved, but for moments that the new form keeps in bf16."""
    saved_buckets, buckets = make_buckets(BF16), make_buckets(BF16)
    saved, loaded = make_optimizer(saved_buckets, **source), make_optimizer(buckets, **target)
    _train(saved_buckets, saved)
    for bucket, other in zip(buckets.buckets, saved_buckets.buckets, strict=True):
        bucket.weights.copy_(other.weights)
    with loaded.loading() as blocks:
        for empty, full in zip(blocks, saved.state_blocks(), strict=True):
            assert (empty.kind, empty.values.shape) == (full.kind, full.values.shape)
            assert full.values.dtype == torch.float32
            empty.values.copy_(full.values)
    loaded.load_scalars(saved.scalars())
    for empty, full in zip(loaded.state_blocks(), saved.state_blocks(), strict=True):
        rounded = target is SHORT_MOMENTS and full.kind != "master"
        assert torch.equal(empty.values, full.values.bfloat16().float() if rounded else full.values)
    if SHORT_MOMENTS not in (source, target):
        _train(saved_buckets, saved, range(4, 6))
        _train(buckets, loaded, range(4, 6))
        assert all(map(torch.equal, _values(saved_buckets, saved), _values(buckets, loaded)))


@pytest.mark.parametrize("form", [MASTER, REMAINDER, HALF_OFFLOADED], ids=str)
def test_weights_loaded_from_elsewhere_become_the_master(form: dict[str, Any]) -> None:
    buckets = make_buckets(BF16)
    optimizer = make_optimizer(buckets, **form)
    _train(buckets, optimizer)
    for bucket in buckets.buckets:
        bucket.weights.mul_(3)
    loaded = [bucket.weights.clone() for bucket in buckets.buckets]
    optimizer.copy_weights_to_master()
    for block in optimizer.state_blocks():
        if block.kind == "master":
            assert torch.equal(block.values, block.param.detach().flatten().float())
    optimizer.step(0.0)
    assert all(map(torch.equal, [bucket.weights for bucket in buckets.buckets], loaded))


@pytest.mark.parametrize(
    ("dtype", "form", "optimizer_bytes", "total"),
    [
        (torch.float32, MASTER, 8, 16),
        (torch.float64, MASTER, 16, 32),
        (BF16, MASTER, 12, 18),
        (torch.float16, MASTER, 12, 18),
        (BF16, REMAINDER, 10, 16),
        (torch.float16, REMAINDER, 12, 18),
        (BF16, {**REMAINDER, "store_param_remainders": False}, 12, 18),
        (BF16, {**REMAINDER, "exp_avg_dtype": "bf16"}, 8, 14),
        (BF16, SHORT_MOMENTS, 6, 12),
        (torch.float32, SHORT_MOMENTS, 4, 12),
        (BF16, {**SHORT_MOMENTS, "main_grads_dtype": "bf16"}, 6, 10),
        (BF16, {**SHORT_MOMENTS, **HALF_OFFLOADED}, 6, 12),
    ],
    ids=str,
)
def test_bytes_per_parameter_are_those_held(
    dtype: torch.dtype, form: dict[str, Any], optimizer_bytes: int, total: int
) -> None:
    name = str(dtype).removeprefix("torch.")
    formats = {key: value for key, value in form.items() if key in PrecisionConfig.__dataclass_fields__}
    precision = PrecisionConfig(params_dtype=name, **formats)
    grads = BF16 if form.get("main_grads_dtype") else None
    buckets = make_buckets(dtype, shapes=((128, 3),), main_grads=grads)
    held = sum(tensor.nbytes for tensor in make_optimizer(buckets, **form).held())
    (bucket,) = buckets.buckets
    size = bytes_per_parameter(precision)
    assert (held, size.optimizer) == (384 * optimizer_bytes, optimizer_bytes)
    assert (bucket.weights.nbytes + bucket.grads.nbytes + held, size.total) == (384 * total, total)


def test_a_share_of_the_state_goes_to_the_host() -> None:
    """On whole blocks of 128 elements, whatever the fraction."""
    buckets = make_buckets(BF16)
    optimizer = make_optimizer(buckets, **HALF_OFFLOADED)
    kept = [bucket.weights.numel() for bucket in buckets.buckets]
    hosted = [round(0.4 * length / 128) * 128 for length in kept]
    assert 0 < sum(hosted) < sum(kept)
    kinds = 3  # the master and both moments
    assert sum(tensor.numel() for tensor in optimizer.held()) == kinds * sum(kept)
    assert sum(tensor.numel() for tensor in optimizer.offloaded()) == kinds * sum(hosted)


@pytest.mark.parametrize("piece", [1, 77, 128, 10_000])
def test_pieces_of_the_host_do_not_change_a_bit(piece: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weights, grads = (torch.randn(500, generator=generator) for _ in range(2))
    options = StateOptions(0.9, 0.95, 1e-8, 0.1)
    scalars = torch.tensor([1e-2, 1.0, 10.0, 20.0, 0.0], dtype=torch.float64)
    whole, cut = weights.clone(), weights.clone()
    FlatState(whole, grads, ((3, 100), (130, 480)), options).update(scalars, torch.tensor(1))
    HostState(cut, grads, ((3, 100), (130, 480)), options, piece).update(scalars)
    assert torch.equal(whole, cut)
    assert not torch.equal(whole, weights)


@pytest.mark.parametrize("fraction", [None, 0.4])
@pytest.mark.parametrize("remainder", [False, True])
def test_an_update_of_tensors_without_data(remainder: bool, fraction: float | None) -> None:
    """As a memory plan makes one, that has no memory."""
    options = StateOptions(0.9, 0.95, 1e-8, 0.1, store_param_remainders=remainder)
    with FakeTensorMode():
        flats = (torch.empty(500, dtype=BF16), torch.empty(500), ((3, 100),), options)
        state: State = FlatState(*flats) if fraction is None else OffloadedState(*flats, fraction)
        state.update(torch.zeros(5, dtype=torch.float64), torch.tensor(1))
        held = list(state.held())
    assert all(isinstance(tensor, FakeTensor) for tensor in held)
    assert sum(tensor.nbytes for tensor in held if tensor.dtype == torch.float32) >= 8 * 500


def test_bf16_gradients_reach_the_update() -> None:
    """Their sum is rounded to bf16, hence another number than with fp32 ones, by no more than that."""
    results = []
    for grads in (None, BF16):
        buckets = make_buckets(BF16, main_grads=grads)
        optimizer = make_optimizer(buckets, clip_grad=1.0, **REMAINDER)
        norm = optimizer.step(1e-2).grad_norm.item()
        moments = [block.values for block in optimizer.state_blocks() if block.kind == "exp_avg"]
        results.append((norm, torch.cat([moment.reshape(-1) for moment in moments])))
    (norm, moment), (short_norm, short_moment) = results
    assert short_norm == pytest.approx(norm, rel=2.0**-8)
    torch.testing.assert_close(short_moment, moment, rtol=2.0**-7, atol=1e-7)
    assert not torch.equal(short_moment, moment)
