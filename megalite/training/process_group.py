"""The default process group of a command that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from megalite.training.agreement import check_agreement, check_errors
from megalite.training.errors import RendezvousError, TrainingError
from megalite.training.launcher import Place

if TYPE_CHECKING:
    from torch.distributed import Store


@contextmanager
def process_group(
    backend: str, place: Place, timeout: timedelta, settings: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The default process group while the block lasts; none for a single process.

    Raises ConfigErrors on every rank, before there is a group, where one has found errors that this one has
    not, or where `settings` are not the same on all: see `check_errors`, `check_agreement`. Raises
    RendezvousError where not all ranks have come within `timeout`, TrainingError where one that had come does
    not go on. After an error it is not taken down: that would wait for ranks that may wait for this one.
    """
    import torch.distributed as dist

    if place.world_size == 1:
        yield
        return
    rank, world_size = place.rank, place.world_size
    raised: type[TrainingError] = RendezvousError
    try:
        store = open_store(place, timeout)
        raised = TrainingError  # the first rank is there, and tells it
        check_errors(store, place, None)
        if settings is not None:
            check_agreement(store, place, settings)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistError as error:
        raise raised(
            f"the {world_size} ranks have not met: {str(error).splitlines()[0]}; look for those that have "
            f"not started within {timeout.total_seconds() / 60:g} minutes, or have ended"
        ) from None
    yield
    dist.destroy_process_group()


def open_store(place: Place, timeout: timedelta) -> Store:
    """Where the ranks of this attempt meet, when all have come. Raises DistError after `timeout`."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(place.world_size):
        # torchrun keeps the store of a single node when it starts the ranks anew, with the addresses of those
        # that died. Of several the nodes count for themselves; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has
        # its dynamic rendezvous make a new one.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store
