"""Leaving with a message that its reader finds, also where torchrun has the last word."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import NoReturn


def last_words(text: str) -> None:
    """Print `text` on stderr, and hand it to torchrun, which ends its report on a failed rank with it.

    What torchrun prints by itself, a traceback of its own and where to read about tracebacks, comes after
    whatever a rank has printed; the file that it names in the environment is how a rank gets into it.
    """
    print(text, file=sys.stderr, flush=True)
    tell_torchrun(text)


def leave(text: str, rank: int, code: int) -> NoReturn:
    """Exit with `code` on every rank for a reason that all of them know; the first rank tells it.

    The first rank of another node hands it to its torchrun, which knows nothing of this node's.
    """
    if rank == 0:
        last_words(text)
    else:
        if os.environ.get("LOCAL_RANK") == "0":
            tell_torchrun(text)
        time.sleep(5)  # torchrun ends all ranks with the first that leaves: rank 0 must have spoken
    sys.exit(code)


def tell_torchrun(text: str) -> None:
    """Hand `text` to this node's torchrun, if there is one, without printing it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # the form of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, without importing torch
        about = {"py_callstack": text, "timestamp": str(int(time.time()))}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "extraInfo": about}}, file)
        except OSError:  # it is printed anyway; half a file torchrun could not read
            with suppress(OSError):
                os.unlink(path)
