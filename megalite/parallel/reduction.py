"""One bucket's gradients: where they are added up, and their sum over the data-parallel ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from megalite.parallel.flat import Slot
from megalite.parallel.half_reduction import HalfReduction
from megalite.parallel.mappings import free, my_part, start_reduce_to_parts
from megalite.parallel.params import record_of
from megalite.parallel.topology import Axis


class Queue:
    """The buckets that are being reduced from memory of their own: at most one while another is filled."""

    def __init__(self) -> None:
        self._buckets: deque[BucketGradients] = deque()

    def add(self, bucket: BucketGradients) -> None:
        """`bucket` has begun to reduce."""
        self._buckets.append(bucket)

    def make_room(self) -> None:
        """Before memory for one more is taken."""
        while len(self._buckets) > 1:
            self._buckets[0].wait()

    def remove(self, bucket: BucketGradients) -> None:
        """`bucket` has freed its memory."""
        self._buckets.remove(bucket)


class BucketGradients:
    """Adds up the gradients of one bucket and sums them over dp into `part`, which this rank updates.

    Without `queue`, `whole` holds the gradients of all micro-batches and is reduced once a step; `part` is
    `whole` (the sum on every rank) or this rank's slice of it. With a queue the gradients of each micro-batch
    get memory when the first comes, are reduced and added to `part`, and the memory is freed. With `overlap`
    a reduction begins as soon as the last gradient is in; `in_bf16`: see `HalfReduction`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        part: torch.Tensor,
        dp: Axis,
        index: int,
        *,
        whole: torch.Tensor | None,
        queue: Queue | None,
        overlap: bool,
        in_bf16: bool,
    ):
        self.part, self.dp, self.index, self.queue, self.overlap = part, dp, index, queue, overlap
        self._in_bf16 = in_bf16
        self._whole = whole
        self._scattered = whole is None or whole.numel() > part.numel()
        self._length = part.numel() * (dp.size if self._scattered else 1)
        self._uses = sum(record_of(slot.param).uses for slot in slots)
        self._expected = self._missing = 0  # contributions to a reduction: all, and still to come
        self._begun = False
        self.work: dist.Work | HalfReduction | None = None
        self._reducing: torch.Tensor | None = None

    def view(self, slot: Slot) -> torch.Tensor:
        """Where gradients of a parameter are to be added, shaped as it."""
        if self._whole is None:
            assert self.queue is not None
            self.queue.make_room()
            self._whole = self.part.new_zeros(self._length)
        return self._whole[slot.start : slot.stop].view(slot.param.shape)

    def start_step(self, microbatches: int) -> None:
        """Clear the gradients; so many backward passes will now add to each."""
        if self.queue is None:
            assert self._whole is not None
            self._whole.zero_()
            self._expected = self._uses * microbatches
        else:
            self.part.zero_()
            self._expected = self._uses
        self._missing, self._begun = self._expected, False

    def count(self) -> None:
        """One contribution has been added."""
        self._missing -= 1
        if self._missing:
            return
        if self.queue is not None:
            self._missing = self._expected
            self._start()
            if not self.overlap:
                self.wait()
        elif self.overlap:
            self._start()

    def _start(self) -> None:
        if self._whole is None or self.dp.group is None or (self.queue is None and self._begun):
            return
        self.wait()  # for the micro-batch before
        self._begun = True
        self.work = self._reduction_of(self._whole)
        if self.queue is not None:
            self._reducing, self._whole = self._whole, None
            self.queue.add(self)

    def _reduction_of(self, whole: torch.Tensor) -> dist.Work | HalfReduction:
        if self._in_bf16:
            return HalfReduction(whole, self.dp, self.index, everywhere=not self._scattered)
        if self._scattered:
            reduce = partial(start_reduce_to_parts, whole, self.dp)
        else:
            reduce = partial(dist.all_reduce, whole, group=self.dp.group, async_op=True)
        return self.dp.traffic.start("reduction", self.index, reduce)

    def wait(self) -> None:
        """Wait for the reduction under way, if there is one."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.queue is not None:
            assert self._reducing is not None
            self.part.add_(my_part(self._reducing, self.dp))
            free(self._reducing)
            self._reducing = None
            self.queue.remove(self)

    def start_rest(self) -> None:
        """Begin to reduce what has not been: without overlap, or when a gradient did not come."""
        self._start()
