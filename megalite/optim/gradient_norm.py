"""The norm of the whole model's gradient, each parameter counted once, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megalite.kernels.squared_norm import squared_norm
from megalite.parallel.flat import FlatBucket
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import ParamRecord, record_of
from megalite.parallel.topology import Axis


def merged_ranges(bucket: FlatBucket, selected: Callable[[ParamRecord], bool]) -> tuple[tuple[int, int], ...]:
    """[start, stop) of the slots whose record is `selected`, merged with neighbours over zero padding."""
    ranges: list[tuple[int, int]] = []
    extends = False
    for slot in bucket.slots:
        chosen = selected(record_of(slot.param))
        if chosen and extends:
            ranges[-1] = (ranges[-1][0], slot.stop)
        elif chosen:
            ranges.append((slot.start, slot.stop))
        extends = chosen
    return tuple(ranges)


def gradient_norm(buckets: Sequence[FlatBucket], axis: Axis, device: torch.device) -> torch.Tensor:
    """L2 norm of the gradients that the ranks of `axis` hold together: an fp64 scalar, the same bits on all.

    A rank whose gradients another one counts passes no buckets. Not finite exactly when an fp32 gradient that
    is counted is not. One all-reduce of one number; no host synchronisation.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        total += squared_norm(bucket.grads, merged_ranges(bucket, lambda record: record.counted))
    return all_reduce(total, axis).sqrt()


def clip_coefficient(norm: torch.Tensor, clip: float) -> torch.Tensor:
    """min(1, clip / (norm + 1e-6)), as Megatron-LM; 1 when `clip` is 0, which turns clipping off."""
    if clip == 0:
        return torch.ones_like(norm)
    return (clip / (norm + 1.0e-6)).clamp(max=1.0)
