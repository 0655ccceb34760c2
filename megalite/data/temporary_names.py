"""Temporary names, of each process its own, so that several may write one file at once."""

from __future__ import annotations

import glob
import os
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """Where this process writes what will be `path`."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.partial")


def left_behind(path: Path) -> list[Path]:
    """What processes of this node left of `path` when they were killed; what other nodes write is theirs."""
    partials = path.parent.glob(f"{glob.escape(path.name)}.{os.uname().nodename}.*.partial")
    return [partial for partial in partials if not _is_running(partial.name.split(".")[-2])]


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # of another user
        pass
    return True
