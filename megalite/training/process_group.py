"""The default process group of a command that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from megalite.training.agreement import check_agreement
from megalite.training.launcher import Place


@contextmanager
def process_group(
    backend: str, place: Place, timeout: timedelta, settings: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The default process group while the block lasts; none for a single process.

    Raises ConfigErrors on every rank, before there is a group, where `settings` are not the same on all: see
    `check_agreement`.
    After an error it is not taken down: that would wait for ranks that may be waiting for this one.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if place.world_size == 1:
        yield
        return
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(place.world_size):
        # torchrun keeps the store of a single node when it starts the ranks anew, with the addresses of those
        # that died. For several its dynamic rendezvous has a new one, and nodes count for themselves.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if settings is not None:
        check_agreement(store, place, settings)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield
    dist.destroy_process_group()
