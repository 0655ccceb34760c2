"""The interpreter rounds and multiplies bf16 as the hardware does; without the correction these fail."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.kernels.triton_cases.exactness import DEVICE


@triton.jit
def round_kernel(X, Y, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(X + place, mask=place < n, other=0.0)
    tl.store(Y + place, x.to(tl.bfloat16), mask=place < n)


@triton.jit
def widen_kernel(X, Y, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(X + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(Y + place, x * x, mask=place < n)


@triton.jit
def dot_kernel(A, B, C, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(C + at, tl.dot(tl.load(A + at), tl.load(B + at)))


def test_rounds_to_nearest_ties_to_even() -> None:
    ties = (torch.arange(256, dtype=torch.int32) << 15 | 0x3F800000).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.3e38, 1e-40])
    x = torch.cat((ties, ties.nextafter(torch.tensor(9.0)), special, torch.randn(505))).to(DEVICE)
    y = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
    round_kernel[(1,)](x, y, 1024, BLOCK=1024)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_widens_exactly() -> None:
    x = torch.randn(256, device=DEVICE).bfloat16()
    y = torch.empty(256, device=DEVICE)
    widen_kernel[(1,)](x, y, 256, BLOCK=256)
    torch.testing.assert_close(y, x.float() * x.float(), rtol=0, atol=0)


def test_multiplies_matrices() -> None:
    a, b = torch.randn(32, 32, device=DEVICE).bfloat16(), torch.randn(32, 32, device=DEVICE).bfloat16()
    c = torch.empty(32, 32, device=DEVICE)
    dot_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
