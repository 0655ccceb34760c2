"""The fused C++ backend against fp64, by torch's own error; the same bits for any thread count."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megalite.kernels import (
    add_rms_norm,
    rms_norm,
    rope,
    rope_reference,
    rotary_table,
    swiglu,
    swiglu_pair,
    vocab_parallel_cross_entropy,
)
from tests.kernels.triton_cases.exactness import Operation, check, run
from tests.kernels.triton_cases.layouts import contiguous, every_second, expanded, row_strided, transposed

BF16, FP32 = torch.bfloat16, torch.float32
Layout = Callable[[Tensor], Tensor]


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total, weight.to(total.dtype)).to(x.dtype), total


def rotation(interleaved: bool, rotary_dim: int) -> tuple[Operation, Operation]:
    cos, sin = rotary_table(torch.arange(6)[:, None] + torch.tensor([0, 9]), rotary_dim)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope_reference(q, k, cos.to(torch.promote_types(q.dtype, FP32)), sin, interleaved)

    return lambda q, k: rope(q, k, cos, sin, interleaved, backend="cpu"), plain


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits[..., :5003].to(torch.promote_types(logits.dtype, FP32))
    loss = torch.nn.functional.cross_entropy(wide, target, label_smoothing=0.1, reduction="none")
    return loss + 1e-3 * wide.logsumexp(-1).square().masked_fill(target == -100, 0.0)


def cases() -> Iterator[tuple[str, Operation, Operation, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    for dtype in (BF16, FP32):
        x, weight, grad = (random(6, 1027, dtype=dtype, seed=seed) for seed in range(3))
        yield "rms_norm", lambda x, w: rms_norm(x, w, 1e-5, backend="cpu"), norm, (x, weight[0]), (grad,)
        for residual in {dtype, FP32}:
            inputs = (x, random(6, 1027, dtype=residual, seed=3), weight[0])
            grads = (grad, random(6, 1027, dtype=residual, seed=4))
            yield (
                "add_rms_norm",
                lambda x, r, w: add_rms_norm(x, r, w, 1e-5, backend="cpu"),
                added,
                inputs,
                grads,
            )
        yield (
            "swiglu",
            lambda x: swiglu(x, backend="cpu"),
            lambda x: torch.nn.functional.silu(x[:, 0]) * x[:, 1],
            (4 * random(6, 2, 1027, dtype=dtype),),
            (grad,),
        )
        yield (
            "swiglu_pair",
            lambda gate, up: swiglu_pair(gate, up, backend="cpu"),
            lambda gate, up: torch.nn.functional.silu(gate) * up,
            (x, grad),
            (grad,),
        )
        for interleaved, rotary_dim in ((False, 24), (True, 24), (False, 40)):
            qkv = random(6, 2, 3, 4, 40, dtype=dtype)
            q, k = qkv[..., :3, :], qkv[..., 3:, :]
            yield "rope", *rotation(interleaved, rotary_dim), (q, k), (q.clone(), k.clone())
        target = torch.tensor([0, 5002, -100, 17, 2500, 4999])
        yield (
            "cross_entropy",
            lambda logits, target: vocab_parallel_cross_entropy(
                logits, target, 0, 5003, label_smoothing=0.1, z_loss=1e-3, backend="cpu"
            ),
            entropy,
            (3 * random(6, 5120, dtype=dtype), target),
            (random(6),),
        )


@pytest.mark.parametrize("layout", [contiguous, every_second, transposed, row_strided])
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case[0]}-{case[3][0].dtype}")
def test_error_and_strides(
    case: tuple[str, Operation, Operation, tuple[Tensor, ...], tuple[Tensor, ...]], layout: Layout
) -> None:
    _, ours, torchs, inputs, grads = case
    check(
        ours, torchs, tuple(layout(x) if x.dim() > 1 else x for x in inputs), tuple(layout(g) for g in grads)
    )
    check(ours, torchs, inputs, tuple(expanded(g) for g in grads))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case[0]}-{case[3][0].dtype}")
def test_bits_do_not_depend_on_the_thread_count(
    case: tuple[str, Operation, Operation, tuple[Tensor, ...], tuple[Tensor, ...]],
) -> None:
    _, ours, _, inputs, grads = case
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(ours, inputs, grads))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_not_a_number_is_not_hidden(dtype: torch.dtype) -> None:
    x = torch.full((2, 2, 48), torch.nan, dtype=dtype)
    assert swiglu(x, backend="cpu").isnan().all()
    assert rms_norm(x, torch.ones(48, dtype=dtype), backend="cpu").isnan().all()
    target = torch.zeros(2, 2, dtype=torch.int64)
    assert vocab_parallel_cross_entropy(x, target, 0, 48, backend="cpu").isnan().all()


def test_large_gates_stay_finite() -> None:
    x = torch.stack((torch.tensor([-200.0, -90.0, 90.0, 200.0]), torch.ones(4)))
    torch.testing.assert_close(
        swiglu(x, backend="cpu"), torch.tensor([0.0, 0.0, 90.0, 200.0]), rtol=1e-6, atol=1e-30
    )


def test_empty_tensors() -> None:
    assert swiglu(torch.empty(0, 2, 8), backend="cpu").shape == (0, 8)
    x, weight = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, backend="cpu").sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(0).all()
