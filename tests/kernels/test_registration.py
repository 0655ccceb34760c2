"""Operators as torch sees them, and whole functions under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.kernels import add_rms_norm, rms_norm, rope, rotary_table, swiglu, vocab_parallel_cross_entropy
from tests.kernels.registered import CASES, check_operator


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator(case: Any) -> None:
    check_operator(case, "torch")


def _block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Every operation once."""
    y, total = add_rms_norm(x, residual, weight)
    gated = swiglu(torch.stack((y, total), -2))
    heads = rms_norm(gated, weight).view(4, 2, 2, 16)
    cos, sin = rotary_table(torch.arange(4), 16)
    q, k = rope(heads, heads[:, :, :1], cos, sin)
    logits = torch.cat((q, k), 2).flatten(2)
    return vocab_parallel_cross_entropy(logits, torch.zeros(4, 2, dtype=torch.int64), 0, 40, z_loss=1e-3)


def test_compiles_into_one_graph() -> None:
    inputs = [
        torch.randn(4, 2, 32, requires_grad=True),
        torch.randn(4, 2, 32, requires_grad=True),
        torch.ones(32),
    ]
    inputs[2].requires_grad_()
    compiled: Callable[..., Tensor] = torch.compile(_block, fullgraph=True, backend="aot_eager")
    eager = _block(*inputs)
    torch.testing.assert_close(compiled(*inputs), eager)
    expected = torch.autograd.grad(eager.sum(), inputs)
    for got, wanted in zip(torch.autograd.grad(compiled(*inputs).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_shapes_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 2, 32, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(32, dtype=torch.bfloat16, requires_grad=True)
        loss = _block(x, x, weight)
        loss.sum().backward()
        assert loss.shape == (4, 2)
        assert loss.dtype == torch.float32
        assert x.grad is not None
        assert x.grad.shape == x.shape
