"""Which backend computes an operation, and how the operations are registered with torch.

Three backends give the same numbers and save the same tensors: `triton` on an accelerator, `cpu` (fused C++
of megalite._C) and `torch` (plain operators, any device, fp64 included). Nothing here imports Triton or
touches a driver until an operation runs on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("torch", "cpu", "triton")
FUSED_CPU_DTYPES = (torch.bfloat16, torch.float32)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module that was put into sys.modules without a spec, or taken out of them
        return False


HAS_TRITON = _installed("triton")  # says nothing of a driver
_LIBRARY = torch.library.Library("megalite", "FRAGMENT")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `megalite::<schema>`; `fake` computes shapes alone, so that torch.compile can trace over it."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megalite::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.megalite, name).default
    return operator


def choose(tensor: torch.Tensor, requested: str | None = None) -> str:
    """The backend for an operation on `tensor`: `requested` if given, else the fastest that supports it."""
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f"backend {requested!r} is unknown; choose one of {', '.join(BACKENDS)}")
        return requested
    if tensor.is_cuda and tensor.dtype != torch.float64 and HAS_TRITON:
        return "triton"
    if tensor.device.type == "cpu" and tensor.dtype in FUSED_CPU_DTYPES:
        return "cpu"
    return "torch"


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and statistics are kept in fp32 for fp32 and narrower inputs, in fp64 for fp64."""
    if not dtype.is_floating_point:
        raise TypeError(f"expected a floating-point tensor, got {dtype}")
    return torch.float64 if dtype == torch.float64 else torch.float32
