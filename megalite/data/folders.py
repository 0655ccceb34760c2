"""What lies in folders and what patterns match. What cannot be looked at, as on storage that fails for a
moment, is an error; Python's `glob`, `os.walk` and `os.path` would take it for missing.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterator

from megalite.data.errors import DataError

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
SALVAGED = "lost+found"  # at the root of a file system; only root may read it


def mode_of(path: str, follow: bool = True) -> int:
    """The `st_mode` of what is at `path`, or where a link there leads if it is to `follow`; 0 for nothing.
    Raises DataError.
    """
    try:
        return os.stat(path or os.curdir, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in NOT_THERE:
            return 0
        raise _unread(path, error) from None


def is_folder(path: str) -> bool:
    """Raises DataError."""
    return stat.S_ISDIR(mode_of(path))


def below(top: str, shown: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Path and `st_mode` of all that is in the folder `top`, at any depth and behind links, but for what is
    not `shown` and what is in it. Raises DataError, also for a link that leads back, so that there would be
    no end.
    """
    folders: list[tuple[str, tuple[str, ...]]] = [(top, ())]  # each with the real paths of those it lies in
    while folders:
        folder, way = folders.pop()
        try:
            real = os.path.join(os.path.realpath(folder, strict=True), "")
        except OSError as error:
            raise _unread(folder, error) from None
        if any(each.startswith(real) for each in way):
            raise DataError(f"--input {folder}: a link to a folder that it lies in")
        for path in (os.path.join(folder, name) for name in _names(folder)):
            if shown(path):
                mode = mode_of(path)
                yield path, mode
                if stat.S_ISDIR(mode):
                    folders.append((path, (*way, real)))


def matches(pattern: str) -> list[str]:
    """What `glob.glob(pattern, recursive=True)` finds, sorted, but for `lost+found` where it cannot be read.
    Raises DataError.
    """
    folder, name = os.path.split(pattern)
    folders = [folder]
    if glob.has_magic(folder):
        folders = [each for each in matches(folder) if not _unreadable_salvage(each)]
    return sorted(path for each in folders if is_folder(each) for path in _matches_in(each, name))


def _matches_in(folder: str, name: str) -> list[str]:
    if name == "**":
        return [os.path.join(folder, ""), *(path for path, _ in below(folder, _matched_by_stars))]
    path = os.path.join(folder, name)
    if not glob.has_magic(name):
        return [path] if not name or mode_of(path, follow=False) else []
    names = [each for each in _names(folder) if name.startswith(".") or not each.startswith(".")]
    return [os.path.join(folder, each) for each in fnmatch.filter(names, name)]


def _matched_by_stars(path: str) -> bool:
    return not os.path.basename(path).startswith(".") and not _unreadable_salvage(path)


def _unreadable_salvage(path: str) -> bool:
    salvage = os.path.basename(path.rstrip(os.sep)) == SALVAGED
    return salvage and is_folder(path) and not os.access(path, os.R_OK | os.X_OK)


def _names(folder: str) -> list[str]:
    try:
        with os.scandir(folder or os.curdir) as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        raise _unread(folder, error) from None


def _unread(path: str, error: OSError) -> DataError:
    return DataError(f"--input {path or os.curdir}: cannot be read: {error.strerror or error}")
