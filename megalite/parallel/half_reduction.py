"""Gradients that travel in bf16 and are added up in fp32."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.parallel.mappings import free, my_part, start_all_gather_into
from megalite.parallel.topology import Axis


class HalfReduction:
    """The sum over dp of a flat fp32 tensor, in place: half the bytes of an fp32 reduction.

    Every rank is sent the others' bf16 values of its part, (d-1)/d 2 n bytes, and adds them to its own fp32
    ones: each addend is rounded once, the sum not at all, whatever the number of ranks. With `everywhere` the
    sums are gathered in bf16, too, which begins with `wait`; otherwise only this rank's part is defined.
    """

    def __init__(self, whole: torch.Tensor, dp: Axis, bucket: int, everywhere: bool):
        self._whole, self._dp, self._bucket, self._everywhere = whole, dp, bucket, everywhere
        self._sent = whole.to(torch.bfloat16, copy=True)  # freed in `wait`
        self._received = torch.empty_like(self._sent)
        self._work = dp.traffic.start("reduction", bucket, self._exchange)

    def wait(self) -> None:
        """Until the sum is there."""
        self._work.wait()
        mine = my_part(self._whole, self._dp)
        for rank, part in enumerate(self._received.chunk(self._dp.size)):
            if rank != self._dp.rank:
                mine.add_(part)
        if self._everywhere:
            self._dp.traffic.start("reduction", self._bucket, self._gather).wait()
            self._whole.copy_(self._received)
        free(self._sent)
        free(self._received)

    def _exchange(self) -> dist.Work:
        return dist.all_to_all_single(self._received, self._sent, group=self._dp.group, async_op=True)

    def _gather(self) -> dist.Work:
        sums = my_part(self._whole, self._dp).to(torch.bfloat16)
        return start_all_gather_into(self._received, sums, self._dp)
