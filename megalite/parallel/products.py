"""Matrix products with the communication of their tensor-parallel inputs and outputs.

Between two linear layers an activation is whole on every rank, or with sequence parallelism a shard of the
sequence. With `overlap` its communication is cut by shards: while one is multiplied, the next arrives
(gather), or the one before is summed (scatter). The idea is that of the GEMM decompositions of Wang et al.
2023 (https://doi.org/10.1145/3567955.3567959), made of broadcasts and reductions to one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.parallel.mappings import (
    Pending,
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megalite.parallel.topology import Axis


@dataclass(frozen=True)
class TensorParallel:
    """How activations lie between linear layers that are cut over `axis`.

    `sequence_parallel`: in shards of the sequence (dim 0) instead of whole on every rank. `overlap`: their
    communication is cut by shards and runs beside the products.
    """

    axis: Axis
    sequence_parallel: bool = False
    overlap: bool = False

    @property
    def by_shards(self) -> bool:
        """Whether products and communication take turns."""
        return self.sequence_parallel and self.overlap and self.axis.group is not None


class _All:
    """Operations to be waited for together; holds their tensors until then."""

    def __init__(self, works: Sequence[Pending], tensors: Sequence[torch.Tensor]):
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.tensors = ()


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """(seq, batch, n) as a matrix (seq * batch, n)."""
    return tensor.reshape(-1, tensor.shape[-1])


def gathered_products(
    x: torch.Tensor,
    rights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    tp: TensorParallel,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole input, and its product with each of `rights` plus its bias.

    x: (seq, batch, k), or its shard (seq / tp, batch, k); rights: (k, n) each; biases: (n,) each, or none.
    Returns (seq, batch, k) and (seq, batch, n) each.
    """
    if tp.by_shards:
        whole, arriving = _start_gather_by_shards(x, tp.axis)
    else:
        whole, arriving = (finish(start_all_gather(x, tp.axis)) if tp.sequence_parallel else x), [None]
    outputs = [x.new_empty((*whole.shape[:-1], right.shape[1])) for right in rights]
    parts = len(arriving)
    for part in sorted(range(parts), key=lambda part: arriving[part] is not None):  # its own first
        finish((whole, arriving[part]))
        left = rows(whole.chunk(parts)[part])
        for place, (right, output) in enumerate(zip(rights, outputs, strict=True)):
            out = output.chunk(parts)[part].view(-1, right.shape[1])
            if biases:
                torch.addmm(biases[place], left, right, out=out)
            else:
                torch.mm(left, right, out=out)
    return whole, outputs


def start_reduced_product(
    lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor], tp: TensorParallel
) -> tuple[torch.Tensor, Pending | None]:
    """Begin to sum over the axis the product of `lefts` and `rights`, itself the sum over their pairs.

    lefts: (seq, batch, k) each; rights: (k, n) each. To be ended by `finish`, which returns (seq, batch, n),
    or its shard (seq / tp, batch, n).
    """
    if not tp.by_shards:
        start = start_reduce_scatter if tp.sequence_parallel else start_all_reduce
        return start(_product(lefts, rights), tp.axis)
    shards, works = [], []
    for rank in range(tp.axis.size):
        shard = _product([left.chunk(tp.axis.size)[rank] for left in lefts], rights)
        work = dist.reduce(shard, dst=tp.axis.ranks[rank], group=tp.axis.group, async_op=True)
        assert work is not None  # this rank is in the group
        shards.append(shard)
        works.append(work)
    return shards[tp.axis.rank], _All(works, shards)


def _product(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> torch.Tensor:
    total = rows(lefts[0]) @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total.addmm_(rows(left), right)
    return total.view(*lefts[0].shape[:-1], -1)


def _start_gather_by_shards(shard: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, list[Pending | None]]:
    """The whole, and for each of its shards what to wait for: None for this rank's own, which is there."""
    whole = shard.new_empty((shard.shape[0] * axis.size, *shard.shape[1:]))
    parts = whole.chunk(axis.size)
    parts[axis.rank].copy_(shard)
    works: list[Pending | None] = [
        dist.broadcast(part, src=source, group=axis.group, async_op=True)
        for part, source in zip(parts, axis.ranks, strict=True)
    ]
    sending, works[axis.rank] = works[axis.rank], None
    last = max(place for place in range(axis.size) if place != axis.rank)
    works[last] = _All([work for work in (works[last], sending) if work is not None], [whole])
    return whole, works
