"""Waiting for each other after work that may take one rank far longer than a collective waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.data.shortage import starting_threads
from megalite.listing import listing
from megalite.training.errors import RendezvousError, TrainingError

SPEAKS_SECONDS = 60.0  # of waiting, and again after as many
LOOKS_SECONDS = 1.0  # at the most between two looks
SIGN_SECONDS = 15.0  # between two signs of life
ALL_CAME = "all"

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def signs_of_life() -> Iterator[None]:
    """Inside, around work and the `meet` behind it, a thread tells the others that this process lives. Raises
    DataError where the system gives no thread.
    """
    if not dist.is_initialized():
        yield
        return
    store, name, ended = _store(), f"signs of rank {dist.get_rank()}", threading.Event()

    def tell() -> None:
        with contextlib.suppress(dist.DistNetworkError):  # that the store has gone is told by who asks it
            while not ended.wait(SIGN_SECONDS):
                store.add(name, 1)

    teller = threading.Thread(target=tell, name="megalite-signs-of-life", daemon=True)
    with starting_threads():
        teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join(timeout=LOOKS_SECONDS)  # longer where the store does not answer


def meet(after: str, patience: timedelta, silence: timedelta, advice: str) -> None:
    """Return when every rank has called this: those that come first look into the store again and again, for
    which there is no timeout, and one of them tells every minute for whom it waits. A collective.

    `after`: the work, as in "rank 3 is still at its index arrays". Raises TrainingError on every rank when
    one has not come within `patience`; `advice`: what the user should do then. So it does when one has given
    none of its `signs_of_life` for `silence`. Raises RendezvousError where the first rank, which would tell
    it, is gone.
    """
    if not dist.is_initialized():
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = _store()
    try:
        number = store.add(f"of rank {rank}", 1)
        first = int(store.compare_set(f"first of {number}", "", str(rank)))
        outcome = f"outcome of {number}"
        if store.add("of all", 1) == ranks * number:
            store.compare_set(outcome, "", ALL_CAME)
        began, told, pause = time.monotonic(), 0.0, 0.001
        signs = _Signs(store)
        while not store.check([outcome]):
            time.sleep(pause)
            pause = min(2 * pause, LOOKS_SECONDS)
            waited = time.monotonic() - began
            if waited - told < min(SPEAKS_SECONDS, patience.total_seconds()):
                continue
            told = waited
            # The first to come looks and speaks, and where that has died all others.
            if first != rank and not signs.missing([first], silence.total_seconds()):
                continue
            late = [each for each in range(ranks) if store.add(f"of rank {each}", 0) < number]
            if not late:
                continue
            text = f"rank {_listed(late)} is still at {after}; the others have waited {_shown(waited)}"
            ends = waited >= patience.total_seconds()
            if ends:
                text = f"{text}: {advice}"
            elif dead := signs.missing(late, silence.total_seconds()):
                ends = True
                text = f"rank {_listed(dead)} has ended at {after}, or its node has: no sign of life for "
                text += _shown(silence.total_seconds())
            if ends:
                store.compare_set(outcome, "", text)
            if not ends or 0 in late:  # which would have told the error
                logger.warning("%s", text)
        found = store.get(outcome).decode()
    except dist.DistNetworkError as error:
        raise RendezvousError(f"the run has ended while this rank was at {after}, or waited there") from error
    if found != ALL_CAME:
        if rank == 0:
            time.sleep(2 * LOOKS_SECONDS)  # it may hold the store, into which all must have looked
        raise TrainingError(found)


class _Signs:
    """Those of other ranks, as they are seen from one look to the next."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._last: dict[int, tuple[int, float]] = {}  # how many, and when the last was new

    def missing(self, ranks: list[int], seconds: float) -> list[int]:
        """Those of `ranks` that have given none for so long."""
        now = time.monotonic()
        for rank in ranks:
            given = self._store.add(f"signs of rank {rank}", 0)
            if rank not in self._last or self._last[rank][0] != given:
                self._last[rank] = given, now
        return [rank for rank in ranks if now - self._last[rank][1] >= seconds]


def _store() -> dist.Store:
    return dist.PrefixStore("meetings", distributed_c10d._get_default_store())


def _listed(ranks: list[int]) -> str:
    return listing([str(rank) for rank in ranks])


def _shown(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
