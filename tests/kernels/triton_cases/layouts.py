"""Tensors of equal values in memory layouts that a kernel must read by their strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def contiguous(x: Tensor) -> Tensor:
    """As it is."""
    return x.contiguous()


def every_second(x: Tensor) -> Tensor:
    """Stride 2 in the last dim."""
    return torch.stack((x, x + 1), -1).flatten(-2)[..., ::2]


def transposed(x: Tensor) -> Tensor:
    """First and last dim swapped in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def row_strided(x: Tensor) -> Tensor:
    """Unit stride in the last dim, rows further apart than they are long."""
    return torch.nn.functional.pad(x, (3, 5))[..., 3:-5]


def expanded(x: Tensor) -> Tensor:
    """One number everywhere, stride 0: the gradient of a sum."""
    return x.flatten()[:1].expand(x.shape)


STRIDED = pytest.mark.parametrize("layout", [every_second, transposed, row_strided])
GRADIENTS = pytest.mark.parametrize("grad_layout", [expanded, every_second, transposed, row_strided])


def far_apart(x: Tensor) -> Tensor:
    """x with its first dim's stride so large that the last row lies beyond 2^31 elements.

    The memory in between is reserved but never touched.
    """
    rows = x.shape[0]
    stride = -(-(2**31) // (rows - 1)) // 16 * 16 + 16
    inner = x[0].contiguous().stride()
    memory = torch.empty((rows - 1) * stride + x[0].numel(), dtype=x.dtype, device=x.device)
    far = memory.as_strided(x.shape, (stride, *inner))
    far.copy_(x)
    return far
