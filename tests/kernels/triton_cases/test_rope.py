"""RoPE in Triton, forward and inverse, against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.kernels import rope, rope_reference, rotary_table
from tests.kernels.triton_cases.exactness import DEVICE, DTYPES, check, random, run
from tests.kernels.triton_cases.layouts import GRADIENTS, far_apart

Layout = Callable[[Tensor], Tensor]
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def forms(
    seq: int, rotary_dim: int, interleaved: bool = False, by_sample: int = 0
) -> tuple[Rotation, Rotation]:
    """Ours, and the reference, with one table (its rows differing by sample if asked)."""
    positions = torch.arange(seq, device=DEVICE)
    if by_sample:
        positions = (positions[:, None] * 3 + 100 * torch.arange(by_sample, device=DEVICE)) % 41
    cos, sin = rotary_table(positions, rotary_dim)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, interleaved, backend="triton")

    def reference(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope_reference(q, k, cos.to(torch.promote_types(q.dtype, cos.dtype)), sin, interleaved)

    return ours, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (40, 24), (128, 128), (6, 2)])
def test_dims(dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int) -> None:
    q, k = random(5, 2, 6, head_dim, dtype=dtype), random(5, 2, 2, head_dim, dtype=dtype, seed=1)
    grads = random(5, 2, 6, head_dim, dtype=dtype, seed=2), random(5, 2, 2, head_dim, dtype=dtype, seed=3)
    check(*forms(5, rotary_dim, interleaved), (q, k), grads)


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_that_differ_between_samples(interleaved: bool) -> None:
    q, k = random(5, 3, 4, 32), random(5, 3, 1, 32, seed=1)
    check(*forms(5, 32, interleaved, by_sample=3), (q, k), (random(5, 3, 4, 32), random(5, 3, 1, 32)))


def test_heads_within_groups_of_a_fused_projection() -> None:
    """q and k as attention cuts them out of (seq, batch, groups, queries + 2, head_dim)."""
    qkv = random(4, 2, 3, 5 + 2, 32, dtype=torch.bfloat16)
    q, k = qkv[..., :-2, :], qkv[..., -2:-1, :]
    check(*forms(4, 32), (q, k), (random(*q.shape), random(*k.shape, seed=1)))


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (1, 3, 2, 16), (4, 1, 1, 16)])
def test_single_heads_tokens_and_samples(shape: tuple[int, ...]) -> None:
    """Liger#342: with one head the strides of size-1 dims lie, and the rotation was lost."""
    q, k = random(*shape), random(*shape, seed=1)
    check(*forms(shape[0], 16), (q.transpose(1, 2).contiguous().transpose(1, 2), k), (q, k))


@GRADIENTS
def test_strided_gradients(grad_layout: Layout) -> None:
    q, k = random(4, 2, 3, 16), random(4, 2, 3, 16, seed=1)
    check(*forms(4, 16), (q, k), (grad_layout(q + 1), grad_layout(k + 1)))


def test_many_heads_take_several_programs() -> None:
    q, k = random(2, 1, 40, 128, dtype=torch.bfloat16), random(2, 1, 20, 128, dtype=torch.bfloat16, seed=1)
    check(*forms(2, 128), (q, k), (q, k))


def test_tokens_beyond_two_to_the_31() -> None:
    ours, _ = forms(3, 32)
    q, k = (
        far_apart(random(3, 2, 4, 32, dtype=torch.bfloat16)),
        random(3, 2, 1, 32, dtype=torch.bfloat16, seed=1),
    )
    for got, expected in zip(
        run(ours, (q, k), (q, k)), run(ours, (q.clone(), k), (q.clone(), k)), strict=True
    ):
        assert torch.equal(got, expected)


def test_recompute_under_checkpointing() -> None:
    """unsloth#5001: a rotation in place turned q twice when checkpointing ran the forward again."""
    ours, _ = forms(4, 16)
    q, k = random(4, 2, 3, 16).requires_grad_(), random(4, 2, 3, 16, seed=1)
    plain = torch.autograd.grad(ours(q * 2, k)[0].square().sum(), q)[0]
    again = torch.autograd.grad(
        checkpoint(lambda q: ours(q * 2, k)[0], q, use_reentrant=False).square().sum(), q
    )[0]
    assert torch.equal(plain, again)
