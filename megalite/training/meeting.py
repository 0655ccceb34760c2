"""Waiting for each other after work that may take one rank far longer than a collective waits."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.listing import listing
from megalite.training.errors import RendezvousError, TrainingError

SPEAKS_SECONDS = 60.0  # of waiting, and again after as many
LOOKS_SECONDS = 1.0  # at the most between two looks
ALL_CAME = "all"

logger = logging.getLogger(__name__)


def meet(after: str, patience: timedelta, advice: str) -> None:
    """Return when every rank has called this: those that come first look into the store again and again, for
    which there is no timeout, and one of them tells every minute for whom it waits. A collective.

    `after`: the work, as in "rank 3 is still at its index arrays". Raises TrainingError on every rank when
    one has not come within `patience`; `advice`: what the user should do then. Raises RendezvousError where
    the first rank, which would tell it, is gone.
    """
    if not dist.is_initialized():
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("meetings", distributed_c10d._get_default_store())
    try:
        number = store.add(f"of rank {rank}", 1)
        place = store.add("of all", 1) - ranks * (number - 1)  # 1 is the first to come
        outcome = f"outcome of {number}"
        if place == ranks:
            store.compare_set(outcome, "", ALL_CAME)
        began, told, pause = time.monotonic(), 0.0, 0.001
        while not store.check([outcome]):
            time.sleep(pause)
            pause = min(2 * pause, LOOKS_SECONDS)
            waited = time.monotonic() - began
            # The first to come, and where that has died all others.
            speaks = place == 1 or waited > patience.total_seconds() + 2 * SPEAKS_SECONDS
            if not speaks or waited - told < min(SPEAKS_SECONDS, patience.total_seconds()):
                continue
            told = waited
            late = [str(each) for each in range(ranks) if store.add(f"of rank {each}", 0) < number]
            if not late:
                continue
            text = f"rank {listing(late)} is still at {after}; the others have waited {_shown(waited)}"
            if waited >= patience.total_seconds():
                text = f"{text}: {advice}"
                store.compare_set(outcome, "", text)
            if waited < patience.total_seconds() or "0" in late:  # which would have told the error
                logger.warning("%s", text)
        found = store.get(outcome).decode()
    except dist.DistNetworkError as error:
        raise RendezvousError(f"the run has ended while this rank was at {after}, or waited there") from error
    if found != ALL_CAME:
        raise TrainingError(found)


def _shown(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
