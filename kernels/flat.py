"""What the operations over flat buffers share: ranges, the choice of backend, their memory for C++."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalite.kernels.dispatch import choose

Range = tuple[int, int]  # [start, stop)


def flat_backend(tensor: Tensor, requested: str | None) -> str:
    """The backend `requested`, else C++ in host memory, whatever the dtype, else the usual choice."""
    return choose(tensor, requested or ("cpu" if tensor.device.type == "cpu" else None))


def flat_memory(tensor: Tensor) -> tuple[int, int, str]:
    """Address, elements and dtype of contiguous memory, as megalite._C takes them."""
    return tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch.")


def check_ranges(name: str, ranges: Sequence[Range], length: int) -> None:
    """Raise ValueError unless `ranges` are ordered, disjoint and within [0, length]."""
    borders = [0, *(place for pair in ranges for place in pair), length]
    if borders != sorted(borders):
        raise ValueError(f"{name} {list(ranges)} must be ordered, disjoint and within {length} elements")
