"""Tensors between neighbouring stages: asynchronous sends and receives, in order on each directed link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalite.pipeline.links import Link, LocalLink


@dataclass(frozen=True)
class Send:
    """A tensor on its way; keep this until `wait` has returned, it keeps the memory alive."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> None:
        """Until the tensor may be freed (on an accelerator: for what is submitted from now on)."""
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True)
class Receive:
    """A tensor about to arrive."""

    tensor: torch.Tensor | None
    work: dist.Work | None
    link: Link
    microbatch: int

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""
        if isinstance(self.link, LocalLink):
            return self.link.waiting.pop(self.microbatch)
        assert self.work is not None
        assert self.tensor is not None
        self.work.wait()
        return self.tensor


def send(tensor: torch.Tensor, link: Link, microbatch: int) -> Send:
    """Start sending `tensor`; the receiver must know its shape and dtype."""
    if isinstance(link, LocalLink):
        link.waiting[microbatch] = tensor
        return Send(tensor, None)
    tensor = tensor.contiguous()
    return Send(tensor, dist.isend(tensor, link.peer, group=link.group))


def receive(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, link: Link, microbatch: int
) -> Receive:
    """Post a receive: between ranks the k-th of a link gets the k-th tensor sent on it."""
    if isinstance(link, LocalLink):
        return Receive(None, None, link, microbatch)
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    return Receive(tensor, dist.irecv(tensor, link.peer, group=link.group), link, microbatch)
