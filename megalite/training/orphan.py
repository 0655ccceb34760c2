"""A rank does not outlive the torchrun that is its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

LOOK_SECONDS = 1.0
GRACE_SECONDS = 30.0  # as torchrun gives


def end_with_torchrun() -> None:
    """From now on this process gets the SIGTERM that torchrun sends when it is ended, also when torchrun dies
    without a word, of SIGKILL or for lack of memory, and SIGKILL if that has not ended it. Nothing happens
    without torchrun, nor, with a program between the two, until that has died.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="megalite-orphan", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    with contextlib.suppress(OSError):  # who reads it may have gone with torchrun
        os.write(2, f"error: torchrun (process {parent}) has died: its ranks end\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)  # a rank that ends on that signal in good order may wait for another for ever
    os.kill(os.getpid(), signal.SIGKILL)
