"""AdamW and the squared norm in Triton, over flat buffers of any length, against fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megalite.kernels.adamw import FlatAdamW, adamw, adamw_reference
from megalite.kernels.remainder import join, round_to, split
from megalite.kernels.squared_norm import squared_norm
from tests.kernels.triton_cases.exactness import DEVICE, random

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
FIRST_STEP = (1e-2, 0.5, 1 / (1 - 0.9), 1 / (1 - 0.95), 0.0)


def step(
    master: Tensor,
    weights: Tensor | None,
    grad: Tensor,
    state: tuple[Tensor, Tensor],
    values: Tensor,
    decay: float = 0.0,
    ranges: Sequence[tuple[int, int]] = (),
) -> None:
    """One AdamW step in Triton; `weights` None where they are the master."""
    flat = FlatAdamW(master, grad, *state) if weights is None else FlatAdamW(weights, grad, *state, master)
    update(flat, values, decay, ranges)


def update(
    flat: FlatAdamW, values: Tensor, decay: float = 0.0, ranges: Sequence[tuple[int, int]] = ()
) -> None:
    adamw(
        flat,
        values,
        beta1=BETA1,
        beta2=BETA2,
        eps=EPS,
        weight_decay=decay,
        decay_ranges=ranges,
        backend="triton",
    )


def scalars(values: tuple[float, ...] = FIRST_STEP) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 1000, 2048, 5003])
@pytest.mark.parametrize("ranges", [[], [(0, 1)], [(0, 700), (701, 702), (900, 1000)], [(100, 5000)]])
def test_three_steps(dtype: torch.dtype, length: int, ranges: list[tuple[int, int]]) -> None:
    ranges = [(start, min(stop, length)) for start, stop in ranges if start < length]
    master, m, v = random(length), torch.zeros(length, device=DEVICE), torch.zeros(length, device=DEVICE)
    weights = None if dtype == torch.float32 else master.to(dtype)
    exact = [tensor.double() for tensor in (master, m, v)]
    decay = torch.zeros(length, dtype=torch.float64, device=DEVICE)
    for start, stop in ranges:
        decay[start:stop] = 0.1
    for number in range(1, 4):
        grad = random(length, seed=number)
        values = (1e-2, 0.5, 1 / (1 - BETA1**number), 1 / (1 - BETA2**number), 0.0)
        step(master, weights, grad, (m, v), scalars(values), 0.1, ranges)
        plain, decayed = (
            adamw_reference(
                exact[0],
                exact[1],
                exact[2],
                grad.double(),
                scalars(values).double(),
                BETA1,
                BETA2,
                EPS,
                weight_decay,
            )
            for weight_decay in (0.0, 0.1)
        )
        exact = [torch.where(decay > 0, b, a) for a, b in zip(plain, decayed, strict=True)]
    for got, expected in zip((master, m, v), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=1e-6)
    if weights is not None:
        assert torch.equal(weights, round_to(master, dtype))


@pytest.mark.parametrize("exp_avg", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exp_avg_sq", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
def test_narrow_moments_are_those_of_the_formula_rounded_to_nearest_even(
    exp_avg: torch.dtype, exp_avg_sq: torch.dtype, grads: torch.dtype
) -> None:
    """Rounding the master's own fp32 results could differ by one unit where fp32 lies close to a tie."""
    master, grad = random(3000), random(3000, seed=1).to(grads)
    m, v = random(3000, seed=2).to(exp_avg), random(3000, seed=3).square().to(exp_avg_sq)
    settings = (scalars().double(), BETA1, BETA2, EPS, 0.0)
    exact = adamw_reference(master.double(), m.double(), v.double(), grad.double(), *settings)
    step(master, None, grad, (m, v), scalars())
    for got, expected in zip((master, m, v), exact, strict=True):
        if got.dtype == torch.bfloat16:
            assert got.sub(expected.bfloat16()).ne(0).float().mean() < 1e-2
        tolerance = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_remainder_and_master_forms_are_the_same_bits(moments: torch.dtype) -> None:
    master = random(4001)
    master[:2000] = (master[:2000].view(torch.int32) & -0x10000 | 0x8000).view(torch.float32)  # ties
    parts = split(master)
    state = [(random(4001, seed=1).to(moments), random(4001, seed=2).square().to(moments)) for _ in range(2)]
    grad = random(4001, seed=3)
    separate = FlatAdamW(round_to(master, torch.bfloat16), grad, *state[0], master)
    joined = FlatAdamW(parts[0], grad, *state[1], remainder=parts[1])
    assert joined.remainder is not None
    for lr in (0.0, 1e-3, 1e-2):
        for flat in (separate, joined):
            update(flat, scalars((lr, *FIRST_STEP[1:])), 0.1, [(0, 1000)])
        both = join(joined.weights, joined.remainder)
        assert torch.equal(both.view(torch.int32), master.view(torch.int32))
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(separate, name), getattr(joined, name))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, which the interpreter runs on
@pytest.mark.parametrize("remainder", [False, True])
def test_a_master_that_is_no_number_gives_a_weight_that_is_none(remainder: bool) -> None:
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32, device=DEVICE)
    master = nans.view(torch.float32).repeat(7)
    zeros = [torch.zeros_like(master) for _ in range(3)]
    weights, rest = split(master)
    kinds = {"remainder": rest} if remainder else {"master": master}
    flat = FlatAdamW(weights.zero_() if not remainder else weights, *zeros, **kinds)
    update(flat, scalars())
    assert flat.weights.isnan().all()


def test_a_skipped_step_changes_nothing() -> None:
    weights, master = random(3000).bfloat16(), random(3000)
    state = (random(3000, seed=1), random(3000, seed=2).abs())
    before = [tensor.clone() for tensor in (weights, master, *state)]
    grad = torch.full((3000,), torch.inf, device=DEVICE)
    skip = scalars((*FIRST_STEP[:4], 1.0))
    step(master, weights, grad, state, skip, 0.1, [(0, 3000)])
    for tensor, old in zip((weights, master, *state), before, strict=True):
        assert torch.equal(tensor, old)


def test_updates_below_the_weights_precision_add_up_in_the_master() -> None:
    """apex#1728: the master of bf16 weights was silently unused."""
    weights, master = torch.ones(256, device=DEVICE).bfloat16(), torch.ones(256, device=DEVICE)
    m, v = torch.zeros(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    for _ in range(20):
        step(master, weights, torch.ones(256, device=DEVICE), (m, v), scalars((1e-3, 1.0, 1.0, 1.0, 0.0)))
    assert weights.lt(0.99).all()


@pytest.mark.parametrize("length", [1, 8192, 20001])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norm(dtype: torch.dtype, length: int, whole: bool) -> None:
    values = random(length).to(dtype)
    ranges = [(0, length)] if whole else [(length // 3, length // 2), (length // 2, length - 1)]
    expected = sum(float(values[a:b].double().square().sum()) for a, b in ranges if b > a)
    got = squared_norm(values, [pair for pair in ranges if pair[1] > pair[0]], "triton")
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_squared_norm_tells_what_is_not_finite(value: float) -> None:
    values = random(9000)
    values[:] = 3e38  # their squares overflow fp32
    assert squared_norm(values, [(0, 9000)], "triton").isfinite()
    values[8500] = value
    assert not squared_norm(values, [(0, 9000)], "triton").isfinite()
    assert squared_norm(values, [(0, 8500), (8501, 9000)], "triton").isfinite()


def test_empty_buffers() -> None:
    empty = torch.empty(0, device=DEVICE)
    step(empty, None, empty, (empty, empty), scalars())
    assert float(squared_norm(empty, [], "triton")) == 0.0
