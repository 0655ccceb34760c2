"""Each collective of the tensor-parallel axis beside its conjugate, which is its backward.

Along tp a tensor is either whole on every rank, a shard of the sequence (dim 0), or a partial sum. f and g
are the names of Shoeybi et al. 2019 (arXiv 1909.08053), g-bar of Korthikanti et al. 2022 (arXiv 2205.05198).
Over an axis of one rank all are the identity.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from megalite.kernels.collectives import all_gather_into, reduce_scatter_into
from megalite.parallel.topology import Axis


def all_reduce(
    tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """`tensor` reduced over `axis`, in place."""
    if axis.group is not None:
        with axis.traffic.waiting(axis.name):
            dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


class Pending(Protocol):
    """An operation that was started."""

    def wait(self) -> object:
        """Until its tensors may be used (on an accelerator: by what is started from now on)."""


def start_all_gather(shard: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to collect the shards of dim 0, `(n, ...)` -> `(n * size, ...)`; see `finish`."""
    if axis.group is None:
        return shard, None
    whole = shard.new_empty((shard.shape[0] * axis.size, *shard.shape[1:]))
    work = all_gather_into(whole, shard.contiguous(), group=axis.group, async_op=True)
    return whole, axis.traffic.watched(axis.name, work)


def start_reduce_scatter(whole: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum over the axis and keep this rank's shard of dim 0: `(n * size, ...)` -> `(n, ...)`."""
    if axis.group is None:
        return whole, None
    shard = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    work = reduce_scatter_into(shard, whole.contiguous(), group=axis.group, async_op=True)
    return shard, axis.traffic.watched(axis.name, work)


def my_part(whole: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part of a flat tensor that the ranks of `axis` share equally."""
    return whole.chunk(axis.size)[axis.rank]


def start_reduce_to_parts(whole: torch.Tensor, axis: Axis) -> dist.Work:
    """Begin to sum flat `whole` over the axis into this rank's part of it; the rest becomes undefined."""
    if whole.device.type == "cpu":  # Gloo's reduce-scatter is an all-reduce of a copy
        return dist.all_reduce(whole, group=axis.group, async_op=True)
    return reduce_scatter_into(my_part(whole, axis), whole, group=axis.group, async_op=True)  # device only


def free(message: torch.Tensor) -> None:
    """Give back the memory of a message that has been waited for, whoever still refers to it.

    The thread that ran a collective drops its reference a little after it has told of the end.
    """
    message.untyped_storage().resize_(0)


def start_all_gather_into(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> dist.Work:
    """Begin to collect the ranks' flat parts into `whole`, of which `part` may be this rank's own slice."""
    return all_gather_into(whole, part, group=axis.group, async_op=True)


def start_all_reduce(tensor: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum `tensor` over the axis, in place."""
    if axis.group is None:
        return tensor, None
    work = dist.all_reduce(tensor, group=axis.group, async_op=True)
    return tensor, axis.traffic.watched(axis.name, work)


def finish(result: tuple[torch.Tensor, Pending | None]) -> torch.Tensor:
    """The tensor of a collective that was started, once it is there."""
    tensor, work = result
    if work is not None:
        work.wait()
    return tensor


class _SumPartials(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(partial.clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumPartialsToShards(torch.autograd.Function):
    """g-bar: reduce-scatter along the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return finish(start_reduce_scatter(partial, axis))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return finish(start_all_gather(grad, ctx.axis)), None


def sum_partials(partial: torch.Tensor, axis: Axis, sequence_parallel: bool) -> torch.Tensor:
    """Partial sums `(seq, ...)` to the whole on every rank, or its sequence shard `(seq / tp, ...)`."""
    if axis.size == 1:
        return partial
    function = _SumPartialsToShards if sequence_parallel else _SumPartials
    return function.apply(partial, axis)
