"""Flat parameter and gradient memory, cut into buckets that are reduced over dp while backward goes on.

Parameters are laid out in the reverse of the order in which forward uses them, which is roughly the order in
which backward fills their gradients. A bucket is reduced as soon as the last gradient of the last micro-batch
is in it. Gradients are summed, not averaged: the loss is already divided by the token count of the global
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from megalite.kernels.weight_gradient import Accumulate, accumulate_fused
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import attach_sink, record_of
from megalite.parallel.topology import Axis, Topology
from megalite.parallel.weight_gradients import WeightGradients

ALIGNMENT = 128  # elements: 128-bit accesses of any dtype, and whole cache lines


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in a bucket: elements `start` to `stop`."""

    param: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class FlatBucket:
    """One contiguous piece of a stage's parameters.

    `weights` (numel,) in the parameters' dtype and `grads` (numel,) in the main gradient's: each
    parameter is a view of the first, its main gradient of the second. Elements between slots are padding and
    stay zero.
    """

    weights: torch.Tensor
    grads: torch.Tensor
    slots: tuple[Slot, ...]


def main_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """The gradients' and the optimizer's own dtype: fp64 for fp64 parameters, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_bucket_size(dp_size: int) -> int:
    """Elements in a bucket: enough to keep the ring busy on any number of ranks (Megatron-LM's rule)."""
    return max(40_000_000, 1_000_000 * dp_size)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def plan_buckets(sizes: Sequence[int], alone: Sequence[bool], bucket_size: int) -> list[list[int]]:
    """Group parameters, given by size in buffer order, into buckets of at least `bucket_size` elements.

    The last may be smaller; a parameter with `alone` set gets a bucket of its own. Returns the indices in
    each bucket.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if alone[index]:
            buckets += [current] if current else []
            buckets.append([index])
            current, filled = [], 0
            continue
        current.append(index)
        filled += size
        if filled >= bucket_size:
            buckets.append(current)
            current, filled = [], 0
    return buckets + ([current] if current else [])


class _Sink:
    """Receives the gradient of one parameter and tells its bucket."""

    def __init__(self, main_grad: torch.Tensor, weight_gradients: WeightGradients, ready: Callable[[], None]):
        self.main_grad = main_grad
        self.weight_gradients = weight_gradients
        self.ready = ready


class _Reduction:
    """State of one bucket's reduction within a step."""

    def __init__(self, bucket: FlatBucket, dp: Axis):
        self.bucket = bucket
        self.dp = dp
        self.uses = sum(record_of(slot.param).uses for slot in bucket.slots)
        self.missing = 0  # contributions still to come
        self.started = False
        self.work: dist.Work | None = None

    def expect(self, backwards: int) -> None:
        self.missing = self.uses * backwards
        self.started = False

    def count(self, overlap: bool) -> None:
        self.missing -= 1
        if self.missing == 0 and overlap:
            self.start()

    def start(self) -> None:
        if not self.started and self.dp.group is not None:
            self.work = dist.all_reduce(self.bucket.grads, group=self.dp.group, async_op=True)
        self.started = True

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class GradientBuckets:
    """Moves the parameters of a process into flat memory and reduces their gradients.

    A step is: `start_step`; the backward passes of all micro-batches, in any order, during which a
    bucket is reduced when its last gradient has come in, if `overlap` is set; `finish`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        topology: Topology,
        bucket_size: int | None,
        overlap: bool,
        accumulate: Accumulate = accumulate_fused,
    ):
        self.topology = topology
        self.weight_gradients = WeightGradients(accumulate)
        ordered = list(reversed(list(dict.fromkeys(parameters))))
        if not ordered:
            raise ValueError("a stage needs at least one parameter")
        size = default_bucket_size(topology.dp.size) if bucket_size is None else bucket_size
        alone = ["embedding" in record_of(param).sum_grad_over for param in ordered]
        groups = plan_buckets([param.numel() for param in ordered], alone, size)
        self.buckets = _lay_out([[ordered[index] for index in group] for group in groups])
        self._reductions = [_Reduction(bucket, topology.dp) for bucket in self.buckets]
        for bucket, reduction in zip(self.buckets, self._reductions, strict=True):
            for slot in bucket.slots:
                _connect(slot, bucket, self.weight_gradients, partial(reduction.count, overlap))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in buffer order."""
        return [slot.param for bucket in self.buckets for slot in bucket.slots]

    def start_step(self, microbatches: int) -> None:
        """Clear all gradients; as many backward passes will now add to each."""
        for bucket, reduction in zip(self.buckets, self._reductions, strict=True):
            bucket.grads.zero_()
            reduction.expect(microbatches)

    def finish(self) -> None:
        """Reduce what is left and wait: afterwards every `main_grad` is that of the global batch."""
        for reduction in self._reductions:
            reduction.start()
        for reduction in self._reductions:
            reduction.wait()
        for name in ("tp", "kv", "embedding"):
            self._sum_partial_gradients(self.topology.axis(name))

    def _sum_partial_gradients(self, axis: Axis) -> None:
        """Sum, in one message, the gradients of which each rank of `axis` has only a part."""
        if axis.size == 1:
            return
        grads = [main_grad(param) for param in self.parameters if axis.name in record_of(param).sum_grad_over]
        if not grads:
            return
        message = all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), axis)
        for grad, total in zip(grads, message.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def main_grad(param: nn.Parameter) -> torch.Tensor:
    """The accumulated gradient of a parameter that lives in a bucket; same shape as the parameter."""
    return param.main_grad  # type: ignore[attr-defined]


def _lay_out(groups: list[list[nn.Parameter]]) -> list[FlatBucket]:
    """Allocate one weight and one gradient buffer and cut them into buckets, one a group."""
    first = groups[0][0]
    extents = [sum(_align(param.numel()) for param in group) for group in groups]
    weights = torch.zeros(sum(extents), dtype=first.dtype, device=first.device)
    grads = torch.zeros(sum(extents), dtype=main_grad_dtype(first.dtype), device=first.device)
    buckets = []
    for group, flat_weights, flat_grads in zip(
        groups, weights.split(extents), grads.split(extents), strict=True
    ):
        slots, start = [], 0
        for param in group:
            slots.append(Slot(param, start, start + param.numel()))
            start += _align(param.numel())
        buckets.append(FlatBucket(flat_weights, flat_grads, tuple(slots)))
    return buckets


def _connect(
    slot: Slot, bucket: FlatBucket, weight_gradients: WeightGradients, ready: Callable[[], None]
) -> None:
    """Make the parameter and its main gradient views of the bucket, and send every gradient there."""
    param = slot.param
    flat = bucket.weights[slot.start : slot.stop]
    with torch.no_grad():
        flat.copy_(param.reshape(-1))
    param.data = flat.view(param.shape)
    grad = bucket.grads[slot.start : slot.stop].view(param.shape)
    param.main_grad = grad  # type: ignore[attr-defined]
    attach_sink(param, _Sink(grad, weight_gradients, ready))

    def move_gradient(leaf: torch.Tensor) -> None:
        """For norms and biases; linear layers and embeddings bring their gradients themselves."""
        if leaf.grad is not None:
            grad.add_(leaf.grad)
            leaf.grad = None
            ready()

    param.register_post_accumulate_grad_hook(move_gradient)
