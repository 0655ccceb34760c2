"""What every Triton launch shares: the device guard, rows of a strided tensor, processors, alignment."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

# Where there is no GPU, in the interpreter: few, as each program costs a millisecond.
_INTERPRETED_PROCESSORS = 4


def run(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], device: torch.device, **options: Any
) -> None:
    """Launch `kernel` over `grid` on `device`, whichever device is current. An empty grid launches nothing.

    Contraction of a * b + c is asked for by name: its default differs between Triton versions.
    """
    if 0 in grid:
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments, enable_fp_fusion=True, **options)
    else:
        kernel[grid](**arguments, enable_fp_fusion=True, **options)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def as_rows(x: Tensor) -> Tensor:
    """x as (rows, last dim) with unit stride in the last; a view where the strides allow, else a copy."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def warn_unaligned(name: str, length: int, itemsize: int) -> None:
    """Say once that rows of `length` elements cannot be read 16 bytes at a time."""
    multiple = 16 if itemsize < 8 else 2
    if length % multiple:
        warnings.warn(
            f"{name} has length {length}, no multiple of {multiple}: memory is accessed element by element, "
            f"several times slower; pad it to {-(-length // multiple) * multiple}",
            stacklevel=2,
        )
