"""Temporary names, of each thread its own, so that several may write one file at once."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path

LONGEST_STEM = 130  # bytes; of the 255 of a name who writes takes up to 120
KEPT = 25  # characters of a longer one
SHORTENED = re.compile(rf".{{{KEPT}}}~[0-9a-f]{{16}}\.[^/]+\.partial", re.DOTALL)


def temporary_name(path: Path) -> Path:
    """Where this thread writes what will be `path`."""
    writer = f"{process_space()}.{os.getpid()}.{threading.get_ident()}"
    return path.with_name(f"{_stem(path)}.{writer}.partial")


def left_behind(path: Path) -> list[Path]:
    """What processes of this node left of `path` when they were killed; what other nodes write, and other
    containers of this one, is theirs.
    """
    name = re.compile(rf"{re.escape(_stem(path))}\.{re.escape(process_space())}\.(\d+)\.\d+\.partial")
    found = [(partial, name.fullmatch(partial.name)) for partial in path.parent.iterdir()]
    return [partial for partial, match in found if match and not _is_running(int(match[1]))]


def is_shortened(name: str, beginning: str) -> bool:
    """Whether `name` is a temporary one of a longer name that begins with `beginning`."""
    return SHORTENED.fullmatch(name) is not None and name.startswith(beginning[:KEPT])


def _stem(path: Path) -> str:
    """The name, or where it leaves no room for who writes, what tells it from others."""
    name = os.fsencode(path.name)
    if len(name) <= LONGEST_STEM:
        return path.name
    return f"{path.name[:KEPT]}~{hashlib.blake2b(name, digest_size=8).hexdigest()}"


def process_space() -> str:
    """Those whose numbers this process knows: of the node, and where it has containers, of this one."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux
        space = 0
    return f"{os.uname().nodename}.{space}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
