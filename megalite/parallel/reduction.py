"""One bucket's gradients: where they are added up, and their sum over the data-parallel ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from megalite.parallel.flat import Slot
from megalite.parallel.half_reduction import HalfReduction
from megalite.parallel.mappings import my_part, start_reduce_to_parts
from megalite.parallel.params import record_of
from megalite.parallel.topology import Axis


class GradientPool:
    """Whole-bucket buffers that are lent to the buckets which are being filled or reduced.

    Each is of the largest bucket's `length`. A bucket that finds none free waits for the oldest reduction
    under way. Only where more buckets than there are buffers are open at one time is another made.
    """

    def __init__(self, elements: int, length: int, like: torch.Tensor):
        """`elements` in all, a multiple of `length`; dtype and device of `like`."""
        self.buffers = list(like.new_empty(elements).split(length))
        self._free = list(self.buffers)
        self._like, self._length = like, length
        self._reducing: deque[BucketGradients] = deque()

    def take(self) -> torch.Tensor:
        """A buffer of undefined content."""
        if not self._free and self._reducing:
            self._reducing[0].wait()
        if not self._free:
            self.buffers.append(self._like.new_empty(self._length))
            return self.buffers[-1]
        return self._free.pop()

    def lent_until_reduced(self, bucket: BucketGradients) -> None:
        """`bucket` has begun to reduce the buffer that it took."""
        self._reducing.append(bucket)

    def give_back(self, bucket: BucketGradients, buffer: torch.Tensor) -> None:
        """The sum has been taken out of the buffer."""
        self._reducing.remove(bucket)
        self._free.append(buffer)


class BucketGradients:
    """Adds up the gradients of one bucket and sums them over dp into `part`, which this rank updates.

    Without `pool`, `whole` holds the gradients of all micro-batches and is reduced once a step; `part` is
    `whole` (the sum on every rank) or this rank's slice of it. With a pool the gradients of each micro-batch
    are reduced and added to `part`, of its own memory. With `overlap` a reduction begins as soon as the last
    gradient is in; `in_bf16`: see `HalfReduction`.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        part: torch.Tensor,
        dp: Axis,
        index: int,
        *,
        whole: torch.Tensor | None,
        pool: GradientPool | None,
        overlap: bool,
        in_bf16: bool,
    ):
        self.part, self.dp, self.index, self.pool, self.overlap = part, dp, index, pool, overlap
        self._in_bf16 = in_bf16
        self._whole = whole
        self._scattered = whole is None or whole.numel() > part.numel()
        self._length = part.numel() * (dp.size if self._scattered else 1)
        self._uses = sum(record_of(slot.param).uses for slot in slots)
        self._expected = self._missing = 0  # contributions to a reduction: all, and still to come
        self._begun = False
        self.work: dist.Work | HalfReduction | None = None
        self._buffer: torch.Tensor | None = None  # of the pool, of which `_whole` is the beginning
        self._reducing: torch.Tensor | None = None

    def view(self, slot: Slot) -> torch.Tensor:
        """Where gradients of a parameter are to be added, shaped as it."""
        if self._whole is None:
            assert self.pool is not None
            self._buffer = self.pool.take()
            self._whole = self._buffer[: self._length].zero_()
        return self._whole[slot.start : slot.stop].view(slot.param.shape)

    def start_step(self, microbatches: int) -> None:
        """Clear the gradients; so many backward passes will now add to each."""
        if self.pool is None:
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
        if self.pool is not None:
            self._missing = self._expected
            self._start()
            if not self.overlap:
                self.wait()
        elif self.overlap:
            self._start()

    def _start(self) -> None:
        if self._whole is None or self.dp.group is None or (self.pool is None and self._begun):
            return
        self.wait()  # for the micro-batch before
        self._begun = True
        self.work = self._reduction_of(self._whole)
        if self.pool is not None:
            self._reducing, self._whole = self._buffer, None
            self.pool.lent_until_reduced(self)

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
        if self.pool is not None:
            assert self._reducing is not None
            self.part.add_(my_part(self._reducing[: self._length], self.dp))
            self.pool.give_back(self, self._reducing)
            self._reducing = None

    def start_rest(self) -> None:
        """Begin to reduce what has not been: without overlap, or when a gradient did not come."""
        self._start()
