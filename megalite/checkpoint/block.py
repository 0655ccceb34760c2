"""A rectangle of a global tensor, held by this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

# Bits are summed as integers of the same width.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Block:
    """The elements `offsets ... offsets + tensor.shape` of the tensor `name` of shape `global_shape`.

    `tensor` may be any strided view on any device: a saved block is read from it, a loaded one is written
    into it in place. A rank that holds nothing of a tensor may pass an empty block or none.
    """

    name: str
    global_shape: Sequence[int]
    offsets: Sequence[int]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rectangle in the terms of torch.distributed.checkpoint."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)

    def problem(self) -> str | None:
        """Why this is not a block, or None."""
        shape, sizes = tuple(self.global_shape), tuple(self.tensor.shape)
        offsets = tuple(self.offsets)
        if not len(shape) == len(offsets) == len(sizes):
            return f"{self.name}: offsets {offsets} and local shape {sizes} do not fit global shape {shape}"
        if 0 in shape:
            return f"{self.name}: global shape {shape} has no elements"
        inside = all(o >= 0 and o + n <= s for o, n, s in zip(offsets, sizes, shape, strict=True))
        if not inside:
            return f"{self.name}: local shape {sizes} at offsets {offsets} exceeds global shape {shape}"
        if self.tensor.layout != torch.strided or self.tensor.itemsize not in INTEGERS:
            return f"{self.name}: a {self.tensor.layout} tensor of {self.tensor.dtype} cannot be stored"
        return None


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the sum of its elements' bits, read as signed integers, modulo 2^64.

    Exact and independent of strides and device, so that replicas can be compared and data verified; any
    single changed element changes it. One pass over the memory, one host synchronisation a device.
    """
    sums = [t.detach().view(INTEGERS[t.itemsize]).sum(dtype=torch.int64) for t in tensors]
    result = [0] * len(sums)
    for device in {s.device for s in sums}:
        indices = [i for i, s in enumerate(sums) if s.device == device]
        for i, value in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            result[i] = value
    return result
