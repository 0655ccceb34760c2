"""The exceptions of this room; the C++ readers and writers raise the same classes.

A WriteError is the DataError of output that could not be written, as on a full disk; a ShortageError that of
a system which lacks descriptors, memory or mappings, and says nothing of the file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megalite._C import DataError, ShortageError, WriteError
from megalite.data.temporary_names import left_behind, temporary_name

__all__ = [
    "DataError",
    "ShortageError",
    "WriteError",
    "check_prefix",
    "check_replaceable",
    "is_file",
    "lacks_package",
    "reading",
    "replacing",
    "writing",
]


def check_prefix(prefix: str) -> None:
    """Raises DataError for a path that names a folder, whose files would be hidden ones, and for one that is
    no UTF-8: the C++ side takes no other.
    """
    if not os.path.basename(prefix):
        raise DataError(f"{prefix or 'an empty path'}: a dataset's path must end in its name")
    try:
        prefix.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(prefix).decode("utf-8", errors="backslashreplace")
        raise DataError(
            f"{shown}: a dataset's path must be UTF-8 (LC_ALL=C.UTF-8 where the system's locale is not)"
        ) from None


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises DataError where something else than a file has the name of one that will be written, or a file
    that is another user's where users replace their own only, or none can have it, as one that is too long.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: is no file that could be replaced; give another name")
    if os.path.lexists(path):
        folder = os.stat(os.path.dirname(path) or os.curdir)
        may_replace = (0, folder.st_uid, os.lstat(path).st_uid)
        if folder.st_mode & stat.S_ISVTX and os.geteuid() not in may_replace:
            raise DataError(f"{path}: is another user's, who alone may replace it there; give another name")
    try:
        os.stat(f"{path}.partial")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(f"{path}.partial: cannot be written: {error.strerror}") from None


def lacks_package(what: str, package: str, error: ImportError) -> DataError:
    """What to raise where `package` cannot be imported, which `what` needs: is it not there, or something of
    it, as where another package is too old for it?
    """
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return DataError(f"{what} needs the package {package}: pip install {package}")
    return DataError(f"{what} needs the package {package}, which cannot be imported: {error}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name for what will be `path`, which it becomes at the end; after an error it is gone, after
    a kill with the next of this node that writes `path`. Raises DataError.
    """
    check_replaceable(path)
    with contextlib.suppress(OSError):
        for left in left_behind(path):
            left.unlink()
    temporary = temporary_name(path)
    try:
        with writing(path):
            yield temporary
            temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what looks at the file `path` or reads it: an OSError becomes a DataError that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is there. Raises DataError where that cannot be told, as on a disk that fails."""
    with reading(path):
        try:
            return stat.S_ISREG(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except ValueError as error:  # a NUL in it
            raise DataError(f"{path!r}: cannot be read: {error}") from None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes the file `path`: an error names it, which Python's own of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from None
