"""The default process group of a command that a launcher started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megalite.training.launcher import Place


@contextmanager
def process_group(backend: str, place: Place, timeout: timedelta) -> Iterator[None]:
    """The default process group while the block lasts; none for a single process.

    After an error it is not taken down: that would wait for ranks that may be waiting for this one.
    """
    import torch.distributed as dist

    if place.world_size == 1:
        yield
        return
    dist.init_process_group(backend, timeout=timeout)
    yield
    dist.destroy_process_group()
