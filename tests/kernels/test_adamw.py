"""AdamW and the squared norm: both backends by the formula, C++ exact and the same for any threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import megalite._C as _C
from megalite.kernels.adamw import SCALARS, adamw
from megalite.kernels.squared_norm import squared_norm

CHUNK = 32768  # of csrc/adamw.cpp: lengths on both sides of its multiples
LENGTHS = (0, 1, 31, 32, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77)
# master dtype, weights dtype (None: the weights are the master)
FORMATS = (
    (torch.float32, None),
    (torch.float64, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the thread count that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class Flat:
    """Everything one AdamW call reads and writes."""

    weights: torch.Tensor
    grads: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scalars: torch.Tensor
    master: torch.Tensor | None

    @classmethod
    def random(cls, length: int, dtype: torch.dtype, cast: torch.dtype | None, skip: float = 0.0) -> Flat:
        generator = torch.Generator().manual_seed(length)
        values = torch.randn(4, length, generator=generator, dtype=torch.float64).to(dtype)
        scalars = torch.tensor(
            [1e-3, 0.37, 1 / (1 - 0.9**3), 1 / (1 - 0.95**3), skip], dtype=torch.float64
        ).to(dtype)
        weights = values[0].clone() if cast is None else values[0].to(cast)
        master = None if cast is None else values[0].clone()
        return cls(weights, values[1].clone(), values[2].clone(), values[3].square(), scalars, master)

    def step(self, backend: str, decay_ranges: Sequence[tuple[int, int]]) -> None:
        adamw(
            self.weights,
            self.grads,
            self.exp_avg,
            self.exp_avg_sq,
            self.scalars,
            master=self.master,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            decay_ranges=decay_ranges,
            backend=backend,
        )

    def written(self) -> list[torch.Tensor]:
        tensors = [self.weights, self.exp_avg, self.exp_avg_sq]
        return tensors if self.master is None else [*tensors, self.master]


def _ranges(length: int) -> list[tuple[int, int]]:
    """Decayed ranges with an empty one, some within a chunk and, where there is room, one across chunks."""
    ends = sorted({min(length, end) for end in (3, 7, 900, 1000, CHUNK - 5, 2 * CHUNK + 9)})
    return [*zip(ends[0::2], ends[1::2], strict=False), (length, length)]


def _same(left: Flat, right: Flat) -> bool:
    return all(map(torch.equal, left.written(), right.written()))


def _ieee_step(flat: Flat, decay_ranges: Sequence[tuple[int, int]]) -> None:
    """adamw_reference in NumPy, whose square root, unlike torch's, is rounded correctly."""
    master = flat.weights if flat.master is None else flat.master
    w, g, m, v, scalars = (
        x.numpy() for x in (master, flat.grads, flat.exp_avg, flat.exp_avg_sq, flat.scalars)
    )
    number = w.dtype.type
    decay = np.zeros_like(w)
    for start, stop in decay_ranges:
        decay[start:stop] = 0.1
    lr, grad_scale, inverse_bias1, inverse_bias2, _ = scalars
    grad = g * grad_scale
    m[:] = m * number(0.9) + grad * number(1 - 0.9)
    v[:] = v * number(0.95) + grad * grad * number(1 - 0.95)
    w[:] = w - (m * inverse_bias1 / (np.sqrt(v * inverse_bias2) + number(1e-8)) + w * decay) * lr
    flat.weights.copy_(master)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("dtype", "cast"), FORMATS)
def test_cpp_rounds_each_operation_once(dtype: torch.dtype, cast: torch.dtype | None, length: int) -> None:
    ours, expected = (Flat.random(length, dtype, cast) for _ in range(2))
    for _ in range(3):
        ours.step("cpu", _ranges(length))
        _ieee_step(expected, _ranges(length))
    assert _same(ours, expected)


@pytest.mark.parametrize(("dtype", "cast"), FORMATS)
def test_bits_do_not_depend_on_the_thread_count(
    dtype: torch.dtype, cast: torch.dtype | None, threads: None
) -> None:
    results = []
    for count in (1, 2, 3, 7, 2):
        torch.set_num_threads(count)
        flat = Flat.random(5 * CHUNK + 13, dtype, cast)
        flat.step("cpu", _ranges(5 * CHUNK + 13))
        norm = squared_norm(flat.grads, _ranges(5 * CHUNK + 13), "cpu")
        results.append((flat, norm))
    first, first_norm = results[0]
    assert all(_same(flat, first) and torch.equal(norm, first_norm) for flat, norm in results[1:])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("dtype", "cast"), FORMATS)
def test_formula_in_fp64(dtype: torch.dtype, cast: torch.dtype | None, backend: str) -> None:
    flat = Flat.random(200, dtype, cast)
    actual = flat.weights if flat.master is None else flat.master
    w = actual.to(torch.float64, copy=True)
    g, m, v = flat.grads.double() * 0.37, flat.exp_avg.double(), flat.exp_avg_sq.double()
    decay = torch.zeros(200, dtype=torch.float64)
    decay[50:120] = 0.1
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    step = 1e-3 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8) + 1e-3 * decay * w
    flat.step(backend, [(50, 120)])
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(actual.double(), w - step, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(flat.exp_avg_sq.double(), v, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("dtype", "cast"), FORMATS)
def test_skip_changes_no_bit(dtype: torch.dtype, cast: torch.dtype | None, backend: str) -> None:
    flat, before = (Flat.random(1000, dtype, cast, skip=1.0) for _ in range(2))
    flat.grads.fill_(math.nan)
    flat.scalars[SCALARS.index("grad_scale")] = math.nan
    flat.step(backend, [(0, 1000)])
    assert _same(flat, before)


def _cast_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` through the C++ cast alone: a step with learning rate 0."""
    weights, zeros = torch.zeros(len(values), dtype=dtype), torch.zeros_like(values)
    flat = Flat(weights, zeros, zeros.clone(), zeros.clone(), torch.tensor([0.0, 1, 1, 1, 0]), values.clone())
    flat.step("cpu", [])
    return weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_rounds_every_pattern_as_torch(dtype: torch.dtype) -> None:
    """Every sign and exponent with mantissas on, just below and just above the ties of both formats."""
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
    values = torch.tensor([p - (1 << 32) if p >> 31 else p for p in patterns], dtype=torch.int32).view(
        torch.float32
    )
    expected = values.to(dtype)
    actual = _cast_of(values, dtype)
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_keeps_nan(dtype: torch.dtype) -> None:
    assert _cast_of(torch.full((33,), math.nan), dtype).isnan().all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_norm_counts_the_ranges_only(dtype: torch.dtype, backend: str, length: int) -> None:
    values = Flat.random(length, dtype, None).grads
    expected = math.fsum(
        float(x) ** 2 for start, stop in _ranges(length) for x in values[start:stop].tolist()
    )
    actual = squared_norm(values, _ranges(length), backend)
    assert actual.dtype == torch.float64
    assert actual.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 17, 31, 32, 999])
def test_squared_norm_sees_every_bad_number(place: int, bad: float, backend: str) -> None:
    values = torch.full((1000,), torch.finfo(torch.float32).max)
    assert squared_norm(values, [(0, 1000)], backend).isfinite()
    values[place] = bad
    assert not squared_norm(values, [(0, 1000)], backend).isfinite()
    assert squared_norm(values, [(0, place), (place + 1, 1000)], backend).isfinite()


def test_wrong_memory_is_refused() -> None:
    flat = Flat.random(10, torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="grads of shape"):
        Flat(**{**vars(flat), "grads": flat.grads[:9]}).step("cpu", [])
    with pytest.raises(ValueError, match=r"exp_avg is torch\.float64"):
        Flat(**{**vars(flat), "exp_avg": flat.exp_avg.double()}).step("cpu", [])
    with pytest.raises(ValueError, match="master must be float32 or float64"):
        Flat(**{**vars(flat), "master": flat.weights}).step("cpu", [])
    with pytest.raises(ValueError, match="weights without a master"):
        Flat(**{**vars(flat), "master": None}).step("cpu", [])
    with pytest.raises(ValueError, match="scalars has shape"):
        Flat(**{**vars(flat), "scalars": flat.scalars[:4]}).step("cpu", [])
    for ranges in ([(0, 11)], [(4, 2)], [(0, 5), (4, 8)]):
        with pytest.raises(ValueError, match="decay_ranges"):
            flat.step("cpu", ranges)
    with pytest.raises(ValueError, match="flat, contiguous"):
        squared_norm(flat.grads[::2], [])


def test_the_extension_checks_what_it_is_handed() -> None:
    values = torch.zeros(4)
    good = (values.data_ptr(), 4, "float32")
    settings = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "threads": 1}
    with pytest.raises(ValueError, match="grads: holds 3 elements, must hold 4"):
        _C.adamw(good, None, (good[0], 3, "float32"), good, good, good, decay_ranges=[], **settings)
    with pytest.raises(ValueError, match="exp_avg: dtype is float64, must be float32"):
        _C.adamw(good, None, good, (good[0], 4, "float64"), good, good, decay_ranges=[], **settings)
    with pytest.raises(ValueError, match=r"range \[0, 5\) must be"):
        _C.squared_norm(good, [(0, 5)], threads=1)
