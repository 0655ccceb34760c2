"""AdamW and the squared norm: both backends by the formula, C++ exact and the same for any threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import megalite._C as _C
from megalite.kernels.adamw import SCALARS, FlatAdamW, adamw
from megalite.kernels.remainder import join, round_to, split
from megalite.kernels.squared_norm import squared_norm

CHUNK = 32768  # of csrc/adamw.cpp: lengths on both sides of its multiples
LENGTHS = (0, 1, 31, 32, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77)
FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Form:
    """Dtypes of what one step reads and writes; `weights` None where they are the master."""

    master: torch.dtype
    weights: torch.dtype | None = None
    grads: torch.dtype | None = None
    exp_avg: torch.dtype | None = None
    exp_avg_sq: torch.dtype | None = None
    remainder: bool = False

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("torch.") for value in vars(self).values())


FORMS = (
    Form(FP32),
    Form(FP64),
    Form(FP32, BF16),
    Form(FP32, FP16),
    Form(FP32, BF16, remainder=True),
    Form(FP32, BF16, grads=BF16),
    Form(FP32, BF16, exp_avg=BF16),
    Form(FP32, FP16, exp_avg_sq=BF16),
    Form(FP32, exp_avg=BF16, exp_avg_sq=BF16),
    Form(FP32, BF16, BF16, BF16, BF16, remainder=True),
)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the thread count that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Flat:
    """Everything one AdamW call reads and writes."""

    memory: FlatAdamW
    scalars: torch.Tensor

    @classmethod
    def random(cls, length: int, form: Form, skip: float = 0.0) -> Flat:
        generator = torch.Generator().manual_seed(length)
        w, g, m, v = torch.randn(4, length, generator=generator, dtype=torch.float64).to(form.master)
        scalars = torch.tensor([1e-3, 0.37, 1 / (1 - 0.9**3), 1 / (1 - 0.95**3), skip], dtype=FP64)
        grads, exp_avg, exp_avg_sq = (
            values.to(dtype or form.master, copy=True)
            for values, dtype in ((g, form.grads), (m, form.exp_avg), (v.square(), form.exp_avg_sq))
        )
        master = None if form.weights is None or form.remainder else w.clone()
        weights, remainder = split(w) if form.remainder else (w.clone(), None)
        if master is not None and form.weights is not None:
            weights = round_to(w, form.weights)
        memory = FlatAdamW(weights, grads, exp_avg, exp_avg_sq, master, remainder)
        return cls(memory, scalars.to(form.master))

    @property
    def master(self) -> torch.Tensor:
        """Its values; the memory itself where there is one."""
        flat = self.memory
        if flat.remainder is not None:
            return join(flat.weights, flat.remainder)
        return flat.weights if flat.master is None else flat.master

    def step(self, backend: str, decay_ranges: Sequence[tuple[int, int]]) -> None:
        adamw(
            self.memory,
            self.scalars,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            decay_ranges=decay_ranges,
            backend=backend,
        )

    def replaced(self, **tensors: Any) -> Flat:
        return Flat(replace(self.memory, **tensors), self.scalars)


def _ranges(length: int) -> list[tuple[int, int]]:
    """Decayed ranges with an empty one, some within a chunk and, where there is room, one across chunks."""
    ends = sorted({min(length, end) for end in (3, 7, 900, 1000, CHUNK - 5, 2 * CHUNK + 9)})
    return [*zip(ends[0::2], ends[1::2], strict=False), (length, length)]


def _same(left: Flat, right: Flat) -> bool:
    ours, theirs = left.memory.tensors(), right.memory.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _ieee_step(flat: Flat, decay_ranges: Sequence[tuple[int, int]]) -> None:
    """adamw_reference in NumPy, whose square root, unlike torch's, is rounded correctly."""
    memory, master = flat.memory, flat.master
    wide = [x.to(master.dtype) for x in (memory.grads, memory.exp_avg, memory.exp_avg_sq)]
    w, g, m, v, scalars = (x.numpy() for x in (master, *wide, flat.scalars))
    number = w.dtype.type
    decay = np.zeros_like(w)
    for start, stop in decay_ranges:
        decay[start:stop] = 0.1
    lr, grad_scale, inverse_bias1, inverse_bias2, _ = scalars
    grad = g * grad_scale
    m = m * number(0.9) + grad * number(1 - 0.9)
    v = v * number(0.95) + grad * grad * number(1 - 0.95)
    w[:] = w - (m * inverse_bias1 / (np.sqrt(v * inverse_bias2) + number(1e-8)) + w * decay) * lr
    memory.exp_avg.copy_(torch.from_numpy(m))
    memory.exp_avg_sq.copy_(torch.from_numpy(v))
    if memory.remainder is not None:
        memory.remainder.copy_(split(master)[1])
    memory.weights.copy_(round_to(master, memory.weights.dtype))


@pytest.mark.parametrize("length", LENGTHS)
@every_form
def test_cpp_rounds_each_operation_once(form: Form, length: int) -> None:
    ours, expected = (Flat.random(length, form) for _ in range(2))
    for _ in range(3):
        ours.step("cpu", _ranges(length))
        _ieee_step(expected, _ranges(length))
    assert _same(ours, expected)


@every_form
def test_bits_do_not_depend_on_the_thread_count(form: Form, threads: None) -> None:
    results = []
    for count in (1, 2, 3, 7, 2):
        torch.set_num_threads(count)
        flat = Flat.random(5 * CHUNK + 13, form)
        flat.step("cpu", _ranges(5 * CHUNK + 13))
        norm = squared_norm(flat.memory.grads, _ranges(5 * CHUNK + 13), "cpu")
        results.append((flat, norm))
    first, first_norm = results[0]
    assert all(_same(flat, first) and torch.equal(norm, first_norm) for flat, norm in results[1:])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@every_form
def test_formula_in_fp64(form: Form, backend: str) -> None:
    flat = Flat.random(200, form)
    memory = flat.memory
    w = flat.master.to(torch.float64, copy=True)
    g, m, v = memory.grads.double() * 0.37, memory.exp_avg.double(), memory.exp_avg_sq.double()
    decay = torch.zeros(200, dtype=torch.float64)
    decay[50:120] = 0.1
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    step = 1e-3 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8) + 1e-3 * decay * w
    flat.step(backend, [(50, 120)])
    tolerance = 1e-13 if form.master == FP64 else 1e-6
    torch.testing.assert_close(flat.master.double(), w - step, rtol=tolerance, atol=tolerance)
    for moment, exact in ((memory.exp_avg, m), (memory.exp_avg_sq, v)):
        rounding = 2.0**-8 if moment.dtype == BF16 else tolerance  # half a unit in the last of 8 bits
        torch.testing.assert_close(moment.double(), exact, rtol=rounding, atol=tolerance)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@every_form
def test_skip_changes_no_bit(form: Form, backend: str) -> None:
    flat, before = (Flat.random(1000, form, skip=1.0) for _ in range(2))
    flat.memory.grads.fill_(math.nan)
    before.memory.grads.fill_(0)
    flat.scalars[SCALARS.index("grad_scale")] = math.nan
    flat.step(backend, [(0, 1000)])
    assert _same(flat.replaced(grads=before.memory.grads), before)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("moments", [FP32, BF16])
def test_remainder_and_master_forms_are_the_same_bits(moments: torch.dtype, backend: str) -> None:
    """Also where the master lies half-way between two bf16 numbers, which 20,000 random ones would miss."""
    forms = (Form(FP32, BF16, BF16, moments, moments, remainder) for remainder in (False, True))
    separate, joined = (Flat.random(20_000, form) for form in forms)
    ties = torch.arange(20_000, dtype=torch.int32) * 97 << 16 & 0x7FFF0000 | 0x8000
    ties = ties.view(FP32).where(ties.view(FP32).abs() < 1e30, 1.0)
    assert separate.memory.master is not None
    separate.memory.master[:10_000] = ties[:10_000]
    separate.memory.weights.copy_(round_to(separate.memory.master, BF16))
    joined = joined.replaced(
        **dict(zip(("weights", "remainder"), split(separate.memory.master), strict=True))
    )
    for lr in (0.0, 1e-3, 1e-4, 1e-2):
        for flat in (separate, joined):
            flat.scalars[SCALARS.index("lr")] = lr
            flat.step(backend, [(0, 5000)])
        assert torch.equal(separate.master.view(torch.int32), joined.master.view(torch.int32))
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(separate.memory, name), getattr(joined.memory, name))


def _patterns() -> torch.Tensor:
    """Every sign and exponent with mantissas on, just below and just above the ties of bf16 and fp16."""
    ties = [
        (bit | odd) + near
        for bit in (0, 1 << 12, 1 << 15, 0x7FF000, 0x7F8000)
        for odd in (0, 1 << 13, 1 << 16)
        for near in (-1, 0, 1)
    ]
    mantissas = sorted({tie & 0x7FFFFF for tie in ties} | {0, 1, 0x7FFFFF, 0x2AAAAA})
    patterns = [
        sign << 31 | exponent << 23 | mantissa
        for sign, exponent, mantissa in itertools.product((0, 1), range(255), mantissas)
    ]
    patterns += range(0x33000000 - 40, 0x33000000 + 40)  # 2^-25, where fp16 begins to be more than zero
    signed = [p - (1 << 32) if p >> 31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def _cast_of(values: torch.Tensor, dtype: torch.dtype, remainder: bool = False) -> Flat:
    """`values` through the C++ cast alone: a step with learning rate 0."""
    flat = Flat.random(len(values), Form(FP32, dtype, remainder=remainder))
    if remainder:
        flat = flat.replaced(**dict(zip(("weights", "remainder"), split(values), strict=True)))
    else:
        flat = flat.replaced(master=values.clone())
    flat.scalars.copy_(torch.tensor([0.0, 1, 1, 1, 0]))
    flat.step("cpu", [])
    return flat


def test_fp16_weights_are_rounded_as_by_torch() -> None:
    values = _patterns()
    weights = _cast_of(values, FP16).memory.weights
    assert torch.equal(weights.view(torch.int16), values.half().view(torch.int16))


def test_bf16_weights_are_the_nearest_and_ties_go_away_from_zero() -> None:
    values = _patterns()
    weights = _cast_of(values, BF16).memory.weights
    tie = values.view(torch.int32) & 0xFFFF == 0x8000
    assert tie.any()
    nearest = values.bfloat16().view(torch.int16)
    away = (values.view(torch.int32) + 0x8000 >> 16).to(torch.int16)
    assert torch.equal(weights.view(torch.int16), torch.where(tie, away, nearest))
    assert torch.equal(round_to(values, BF16).view(torch.int16), weights.view(torch.int16))


def test_a_remainder_gives_back_every_bit_of_the_master() -> None:
    """apex#1842: packing that was off by the rounding of one in a million."""
    values = torch.cat([_patterns(), torch.tensor([math.inf, -math.inf, 0.0, -0.0])])
    assert torch.equal(join(*split(values)).view(torch.int32), values.view(torch.int32))
    finite = values[values.isfinite()]
    through = _cast_of(finite, BF16, remainder=True)
    assert torch.equal(through.master.view(torch.int32), finite.view(torch.int32))


@pytest.mark.parametrize(("dtype", "remainder"), [(FP16, False), (BF16, False), (BF16, True)])
def test_cast_keeps_nan(dtype: torch.dtype, remainder: bool) -> None:
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000]).int().view(FP32).repeat(7)
    assert nans.isnan().all()
    flat = _cast_of(nans, dtype, remainder)
    assert flat.memory.weights.isnan().all()
    assert flat.master.isnan().all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
def test_squared_norm_counts_the_ranges_only(dtype: torch.dtype, backend: str, length: int) -> None:
    values = Flat.random(length, Form(FP64)).memory.grads.to(dtype)
    expected = math.fsum(
        float(x) ** 2 for start, stop in _ranges(length) for x in values[start:stop].tolist()
    )
    actual = squared_norm(values, _ranges(length), backend)
    assert actual.dtype == torch.float64
    assert actual.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 17, 31, 32, 999])
def test_squared_norm_sees_every_bad_number(place: int, bad: float, dtype: torch.dtype, backend: str) -> None:
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert squared_norm(values, [(0, 1000)], backend).isfinite()
    values[place] = bad
    assert not squared_norm(values, [(0, 1000)], backend).isfinite()
    assert squared_norm(values, [(0, place), (place + 1, 1000)], backend).isfinite()


def test_wrong_memory_is_refused() -> None:
    flat = Flat.random(10, Form(FP32, BF16))
    memory = flat.memory
    with pytest.raises(ValueError, match="grads of shape"):
        flat.replaced(grads=memory.grads[:9]).step("cpu", [])
    with pytest.raises(ValueError, match=r"exp_avg is torch\.float64"):
        flat.replaced(exp_avg=memory.exp_avg.double()).step("cpu", [])
    with pytest.raises(ValueError, match="master must be float32 or float64"):
        flat.replaced(master=memory.weights).step("cpu", [])
    with pytest.raises(ValueError, match="weights without a master"):
        flat.replaced(master=None).step("cpu", [])
    with pytest.raises(ValueError, match="no other master"):
        flat.replaced(remainder=torch.zeros(10, dtype=torch.int16)).step("cpu", [])
    fp16 = Flat.random(10, Form(FP32, FP16)).replaced(master=None, remainder=torch.zeros(10).short())
    with pytest.raises(ValueError, match="goes with bfloat16"):
        fp16.step("cpu", [])
    with pytest.raises(ValueError, match=r"grads is torch\.bfloat16, must be torch\.float64"):
        Flat.random(10, Form(FP64, grads=BF16)).step("cpu", [])
    with pytest.raises(ValueError, match="scalars has shape"):
        Flat(memory, flat.scalars[:4]).step("cpu", [])
    for ranges in ([(0, 11)], [(4, 2)], [(0, 5), (4, 8)]):
        with pytest.raises(ValueError, match="decay_ranges"):
            flat.step("cpu", ranges)
    with pytest.raises(ValueError, match="flat, contiguous"):
        squared_norm(memory.grads[::2], [])


def test_the_extension_checks_what_it_is_handed() -> None:
    values = torch.zeros(4)
    good = (values.data_ptr(), 4, "float32")
    settings = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "threads": 1}
    scalars = (values.data_ptr(), 5, "float32")
    short, wide = (good[0], 3, "float32"), (good[0], 4, "float64")
    with pytest.raises(ValueError, match="grads: holds 3 elements, must hold 4"):
        _C.adamw(good, None, None, short, good, good, scalars, decay_ranges=[], **settings)
    with pytest.raises(ValueError, match="exp_avg: dtype is float64, must be float32"):
        _C.adamw(good, None, None, good, wide, good, scalars, decay_ranges=[], **settings)
    with pytest.raises(ValueError, match=r"range \[0, 5\) must be"):
        _C.squared_norm(good, [(0, 5)], threads=1)
