"""A process that is bound by what a user is bound by, also where root runs the tests, as in a container."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits and privileges of Linux")
DROP_FROM_BOUNDING_SET = 24  # PR_CAPBSET_DROP


def drop(*capabilities: int) -> None:
    """Before the process that is made now executes another program: root's privileges of these numbers."""
    if os.getuid() != 0:
        return
    libc = ctypes.CDLL(None)
    for capability in capabilities:
        if libc.prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0):
            raise OSError("this root may not give up its rights: run the tests as another user")
