"""Temporary names, of each thread its own, so that several may write one file at once."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path


def temporary_name(path: Path) -> Path:
    """Where this thread writes what will be `path`."""
    writer = f"{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}"
    return path.with_name(f"{path.name}.{writer}.partial")


def left_behind(path: Path) -> list[Path]:
    """What processes of this node left of `path` when they were killed; what other nodes write is theirs."""
    name = re.compile(rf"{re.escape(path.name)}\.{re.escape(os.uname().nodename)}\.(\d+)\.\d+\.partial")
    found = [(partial, name.fullmatch(partial.name)) for partial in path.parent.iterdir()]
    return [partial for partial, match in found if match and not _is_running(int(match[1]))]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
