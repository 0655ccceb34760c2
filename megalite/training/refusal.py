"""Leaving for errors that a rank has found by itself, before there are groups: its node's disks may lack what
those of the others have.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import NoReturn

from megalite.config import ConfigErrors, exit_with_errors
from megalite.config.errors import EXIT_CODE, numbered
from megalite.leave import last_words, tell_torchrun
from megalite.training.launcher import Place

PATIENCE = timedelta(seconds=30)  # with ranks that start later than this one
TORCHRUN_SECONDS = 5.0  # within which it has ended all ranks of a node after the first that leaves


def leave_with_errors(errors: ConfigErrors, place: Place) -> NoReturn:
    """Leave with exit code 2, together with all other ranks; the first of them tells its own errors, and
    where it has none those of the others.

    Those without errors learn of it in `check_errors`. A rank that does not meet the first tells its own.
    """
    if place.world_size == 1:
        exit_with_errors(errors, place.rank)
    torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
    its_all = torchrun and os.environ.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    text = "\n".join(numbered(errors.errors))
    if place.rank == 0:
        last_words(text)
        if its_all:
            raise SystemExit(EXIT_CODE)
    elif place.local_rank == 0:
        tell_torchrun(text)  # of this node, which knows nothing of the first's
    if its_all:
        time.sleep(TORCHRUN_SECONDS)  # the first rank most likely has the same errors, and this one is ended
    if _is_reachable(place, once=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        from torch.distributed import DistError

        from megalite.training.agreement import check_errors
        from megalite.training.process_group import open_store

        try:
            check_errors(open_store(place, PATIENCE), place, errors)
        except ConfigErrors as everyones:
            if place.rank == 0:
                raise SystemExit(EXIT_CODE) from None
            exit_with_errors(everyones, place.rank)
        except DistError:
            pass  # some rank has not come
    if place.rank != 0:
        if torchrun and place.local_rank != 0:
            time.sleep(TORCHRUN_SECONDS)  # one rank of a node is enough
        last_words(f"rank {place.rank}: {text}")
    raise SystemExit(EXIT_CODE)


def _is_reachable(place: Place, *, once: bool) -> bool:
    """Whether the store where the ranks meet is there, which the first rank opens, or with `once` torchrun
    has opened.
    """
    if place.rank == 0 and not once:
        return True
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + (0 if once else PATIENCE.total_seconds())
    while True:
        try:
            socket.create_connection(address, timeout=PATIENCE.total_seconds()).close()
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
