"""Index arrays kept on disk, named by everything that they depend on: of samples that is the lengths of the
documents, not what they hold, so that datasets of equal lengths share an entry.

An entry is a folder that is written under a temporary name and renamed when complete, so that a reader never
sees half of one, whoever else writes. It keeps a hash of each array, so that one that was damaged since is
built again. A lock file lets one process build, or hold the arrays against their hashes, while the others of
the same disk wait: once per node on node-local disks, once in all on a shared one. Where locks do not work
each process does so for itself, which is only slower.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from megalite import _C
from megalite.data.errors import DataError, ShortageError
from megalite.data.ordinary_memory import spare_arrays
from megalite.data.temporary_names import left_behind, temporary_name

FORMAT = 2
LOCK_PATIENCE_SECONDS = 7200.0  # as long as the ranks that have their arrays wait
SILENT_SECONDS = 10.0  # of waiting for a lock
DESCRIPTION = "description.json"
CHECKED = "checked"
CHECK_HOLDS_SECONDS = 600.0  # longer than the processes of a job take to start
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

logger = logging.getLogger(__name__)

Tell = Callable[[Path, str], None]


class ArraySpec(NamedTuple):
    """Name, dtype and shape of one array of an entry."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


def cache_key(description: dict[str, object]) -> str:
    """Hex name of the entry that `description` determines."""
    text = orjson.dumps({"format": FORMAT, **description}, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def cached_arrays(
    folder: Path,
    description: dict[str, object],
    specs: list[ArraySpec],
    build: Callable[[list[np.ndarray]], None],
    tell: Tell = lambda folder, reason: None,
) -> list[np.ndarray]:
    """The arrays of `description`, mapped read-only from `folder`; `build` fills them when they are
    not there yet.

    Built in memory when the folder cannot be written, which `tell` is told with the reason. Raises DataError
    when they do not fit there either, and ShortageError where they are there and the system lacks something
    to open them with.
    """
    entry = folder / cache_key(description)
    if _is_checked(entry, specs) and (found := _open(entry, specs, check=False)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.name}.lock") as inherited:
            checked = _is_checked(entry, specs)
            files = None if checked else _found(entry, specs)  # before the check, of these and no others
            found = _open(entry, specs, check=not checked)
            if found is None:
                return _write(entry, description, specs, build, inherited)
            if files is not None:
                _note_checked(entry, files)
            return found
    except OSError as error:  # not kept, as its frames hold arrays
        why, told = str(error), error.strerror or str(error)
    found = _open(entry, specs, check=True)  # of a folder that can only be read
    if found is not None:
        return found
    try:
        arrays = [np.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    except MemoryError:
        size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs)
        raise DataError(
            f"{folder}: an index of {size / 1e9:.1f} GB cannot be kept there ({why}), nor in memory; give "
            "--data-cache-path a folder with more room, or ask for fewer samples"
        ) from None
    tell(folder, told)
    build(arrays)
    return arrays


def watched(arrays: Iterable[np.ndarray]) -> list[_C.MappedFile]:
    """The files that `arrays` are mapped from; `check_size()` raises DataError for one that was cut since."""
    return [array.base for array in arrays if isinstance(array.base, _C.MappedFile)]


@contextlib.contextmanager
def intact(files: Sequence[_C.MappedFile]) -> Iterator[None]:
    """Around a look at arrays that `files` are mapped to: raises DataError for one that was cut before it or
    meanwhile.
    """
    for file in files:
        file.check_size()
    yield
    for file in files:
        file.check_read()


def _is_checked(entry: Path, specs: list[ArraySpec]) -> bool:
    """Whether some process has just held the arrays against their hashes, and no file was touched since."""
    try:
        files, note = _files(entry, specs), entry / CHECKED
        noted = note.stat()
        return (
            abs(time.time() - noted.st_mtime) < CHECK_HOLDS_SECONDS
            and all(file.st_ctime_ns < noted.st_mtime_ns for file in files)
            and orjson.loads(note.read_bytes()) == _stamps(files)  # or it is a copy's
        )
    except (OSError, ValueError):
        return False


def _note_checked(entry: Path, files: list[os.stat_result]) -> None:
    with contextlib.suppress(OSError):
        (entry / CHECKED).write_bytes(orjson.dumps(_stamps(files)))


def _stamps(files: list[os.stat_result]) -> list[list[int]]:
    """What tells files apart: the number of one that is gone may be another's."""
    return [[file.st_ino, file.st_ctime_ns] for file in files]


def _found(entry: Path, specs: list[ArraySpec]) -> list[os.stat_result] | None:
    try:
        return _files(entry, specs)
    except OSError:
        return None


def _files(entry: Path, specs: list[ArraySpec]) -> list[os.stat_result]:
    return [(entry / name).stat() for name in (DESCRIPTION, *(f"{spec.name}.npy" for spec in specs))]


def _open(entry: Path, specs: list[ArraySpec], *, check: bool) -> list[np.ndarray] | None:
    """The arrays of a complete entry, or None when it is missing or is not what it should be; `check`: hold
    them against their hashes, which reads them whole. Raises ShortageError, which says neither.
    """
    arrays = []
    try:
        hashes = orjson.loads((entry / DESCRIPTION).read_bytes())["hashes"]
        for spec in specs:
            file, header = _C.MappedFile(str(entry / f"{spec.name}.npy")), _header(spec)
            if file.array(np.dtype(np.uint8), (len(header),), 0).tobytes() != header:
                return None
            array = file.array(spec.dtype, spec.shape, len(header))
            if check and hashes[spec.name] != _C.content_hash(array):
                return None
            arrays.append(array)
    except ShortageError:
        raise
    except OSError as error:
        if error.errno in SHORTAGES:
            raise ShortageError(f"{entry}: cannot be opened: {error.strerror}") from None
        return None
    except (ValueError, KeyError, TypeError):
        return None
    return arrays


def _header(spec: ArraySpec) -> bytes:
    """What its `.npy` begins with. It is compared, not read: NumPy reads it with Python's parser, which fails
    now and then where several threads use it (CPython issue 106905).
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": np.lib.format.dtype_to_descr(spec.dtype), "fortran_order": False, "shape": spec.shape},
    )
    return header.getvalue()


def _write(
    entry: Path,
    description: dict[str, object],
    specs: list[ArraySpec],
    build: Callable[[list[np.ndarray]], None],
    inherited: bool,
) -> list[np.ndarray]:
    """Build the entry and return its arrays; `inherited`: others may have begun to, but none does now."""
    if inherited:  # left behind on this node, as the lock may be of it
        for partial in (*left_behind(entry), *left_behind(_set_aside(entry))):
            _remove(partial)
    temporary = temporary_name(entry)
    _remove(temporary)
    temporary.mkdir()
    try:
        paths = [temporary / f"{spec.name}.npy" for spec in specs]
        hashes = _make_files(paths, specs, build)
        (temporary / DESCRIPTION).write_bytes(
            orjson.dumps({**description, "hashes": hashes}, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        )
        written = _open(temporary, specs, check=False)
        if written is None:
            raise OSError(f"{temporary}: just written, but cannot be read back")
        _note_checked(temporary, _files(temporary, specs))
        # Without locks another process may have been first: its entry is the same, and in use.
        if _open(entry, specs, check=True) is None:
            _take_away(entry, specs)
        try:
            temporary.rename(entry)
        except OSError:
            if (found := _open(entry, specs, check=True)) is None:
                raise OSError(f"{entry.name} is damaged and cannot be replaced") from None
            return found
        return _open(entry, specs, check=False) or written
    finally:
        _remove(temporary)


def _take_away(entry: Path, specs: list[ArraySpec]) -> None:
    """Remove what has the place of an entry and is none, if it still is none: another node, whose locks these
    may not be, has put its own there just now or read this one where this node could not, and uses it.
    """
    aside = temporary_name(_set_aside(entry))
    with contextlib.suppress(OSError):
        entry.rename(aside)
        if _open(aside, specs, check=True) is None:
            _remove(aside)
        else:
            aside.rename(entry)


def _set_aside(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.replaced")


def _make_files(
    paths: Sequence[Path], specs: Sequence[ArraySpec], build: Callable[[list[np.ndarray]], None]
) -> dict[str, int]:
    """Write the arrays that `build` makes, which jumps about in them, and return their hashes.

    They are made in memory of their own and written front to back, where that can be spared: the kernel lets
    only a part of the memory be filled with what is still to be written, over a network a small one, and
    beyond it each jump waits for the disk.
    """
    _check_room(paths[0].parent, sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in specs))
    arrays = spare_arrays([(spec.shape, spec.dtype) for spec in specs])
    if arrays is None:
        arrays = [_mapped(path, spec) for path, spec in zip(paths, specs, strict=True)]
    build(arrays)
    hashes = {}
    for path, spec in zip(paths, specs, strict=True):
        array = arrays.pop(0)
        hashes[spec.name] = _C.content_hash(array)
        mapped = isinstance(array, np.memmap)
        with path.open("r+b" if mapped else "wb") as file:
            if not mapped:
                file.write(_header(spec))
                file.write(array.data)
                file.flush()
            os.fsync(file.fileno())  # also of what is mapped, whose own `flush` stops all threads meanwhile
    return hashes


def _remove(path: Path) -> None:
    """Whatever is there, as far as it can be removed."""
    with contextlib.suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _mapped(path: Path, spec: ArraySpec) -> np.ndarray:
    """An array in the file `path`, whose blocks are taken now: on a full disk this is an OSError, where a
    write into the mapping would be a SIGBUS.
    """
    if 0 in spec.shape:
        return np.empty(spec.shape, dtype=spec.dtype)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape)
    if hasattr(os, "posix_fallocate"):  # macOS has none, and is left with the look at the disk
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return array


def _check_room(folder: Path, size: int) -> None:
    """Raises OSError where the disk has less: none is taken, as others would find it full for that while.
    A file system that knows no number of its blocks, as some of FUSE, is not asked.
    """
    disk = os.statvfs(folder)
    if disk.f_blocks and size > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock `path`, waiting for its holder at most LOCK_PATIENCE_SECONDS; the kernel frees a dead
    holder's lock. Gives whether it is held and was there before: a new one had no holder who could have left
    something, and to look for that in a folder of thousands of entries takes longer than to build one.
    """
    try:
        file, new = path.open("x"), True
    except FileExistsError:
        try:
            file, new = path.open("a"), False
        except PermissionError:  # another user's; a local file system locks it nevertheless
            file, new = path.open(), False
    with file:
        start = time.monotonic()
        held = told = False
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                waited = time.monotonic() - start
                if waited > LOCK_PATIENCE_SECONDS:
                    break
                if not told and waited > SILENT_SECONDS:
                    told = True
                    _say_who_is_waited_for(path)
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        if held:
            with contextlib.suppress(OSError):
                file.truncate(0)
                os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield held and not new


def _say_who_is_waited_for(path: Path) -> None:
    """By one of those that wait for the lock `path`: it takes the name out."""
    with contextlib.suppress(OSError):
        if holder := path.read_text():
            path.write_text("")
            logger.warning("%s: waiting for %s, which builds or checks these index arrays", path, holder)
