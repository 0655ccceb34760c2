"""The weight gradient of a linear layer, added to a main gradient that is wider than the factors.

`total += left @ right`. bf16 and fp16 products are accumulated in fp32 inside a matrix product, so a library
that adds there to an fp32 total rounds nothing on the way; otherwise the product is rounded to the factors'
type first, once a micro-batch. On a CPU that is still the fast way: for (32000, 2048) @ (2048, 512) in bf16
327 ms and 41 ms for the sum, against 839 ms with both factors converted to fp32 (torch 2.13, one core).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Accumulate = Callable[[Tensor, Tensor, Tensor], None]


class WeightGradientQueue(Protocol):
    """When weight gradients are computed, and how they are added up."""

    @property
    def accumulate(self) -> Accumulate: ...

    def compute(self, work: Callable[[], None]) -> None:
        """Do `work`, which adds one weight's gradient, now or when the schedule asks for it."""


class GradientSink(Protocol):
    """Where an operation that computes its own weight gradient puts it.

    It adds to `main_grad` (shape of the weight; asked for anew in every backward pass), then calls `ready()`;
    work that can wait goes through `weight_gradients`.
    """

    @property
    def main_grad(self) -> Tensor: ...
    @property
    def weight_gradients(self) -> WeightGradientQueue: ...
    def ready(self) -> None: ...


# Bytes of a product on the way to its total on a CPU: small enough to still be in the cache when it is added.
CPU_PIECE = 2**22


def accumulate_fused(total: Tensor, left: Tensor, right: Tensor) -> None:
    """In one call of the library where it has one for these types and this device, else unfused.

    total: (n, k), fp32 or the factors' type; left: (n, tokens); right: (tokens, k).
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.hip is None:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # device only
    else:
        accumulate_unfused(total, left, right)


def accumulate_unfused(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The product in the factors' type, then the sum; shapes as for `accumulate_fused`."""
    rows = left.shape[0]
    if left.device.type == "cpu":
        rows = max(1, CPU_PIECE // (right.shape[1] * right.element_size()))
    for piece, part in zip(total.split(rows), left.split(rows), strict=True):
        piece += part @ right


def accumulate_with_apex(total: Tensor, left: Tensor, right: Tensor) -> None:
    """By NVIDIA apex's kernel where the total is fp32; shapes as for `accumulate_fused`.

    Raises ImportError where apex was not built with it.
    """
    if total.dtype != torch.float32:
        accumulate_fused(total, left, right)
        return
    import fused_weight_gradient_mlp_cuda  # device only

    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(right, left.t(), total)


IMPLEMENTATIONS: dict[str, Accumulate] = {
    "native": accumulate_fused,
    "apex": accumulate_with_apex,
    "none": accumulate_unfused,
}


def _allocate_nothing(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Libraries add the product where they make it."""


def _allocate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """As `accumulate_unfused` does where the product is made in one piece."""
    torch.mm(left, right)


# The memory that each implementation takes on a GPU, for plans on tensors that have neither memory nor a GPU.
ALLOCATIONS_ON_GPU: dict[str, Accumulate] = {
    "native": _allocate_nothing,
    "apex": _allocate_nothing,
    "none": _allocate_product,
}
