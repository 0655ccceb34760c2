"""Index arrays kept on disk, named by everything that they depend on.

An entry is a folder that is written under a temporary name and renamed when complete, so that a reader never
sees half of one, whoever else writes. A lock file lets one process build while the others of the same disk
wait: once per node on node-local disks, once in all on a shared one. Where locks do not work each process
builds for itself, which is only slower.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from megalite.data.errors import DataError

FORMAT = 1
LOCK_PATIENCE_SECONDS = 1800.0


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
) -> list[np.ndarray]:
    """The arrays of `description`, mapped read-only from `folder`; `build` fills them when they are
    not there yet.

    Built in memory when the folder cannot be written.
    """
    entry = folder / cache_key(description)
    found = _open(entry, specs)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.name}.lock"):
            found = _open(entry, specs)
            if found is not None:
                return found
            _write(entry, description, specs, build)
    except OSError:
        arrays = [np.empty(spec.shape, dtype=spec.dtype) for spec in specs]
        build(arrays)
        return arrays
    found = _open(entry, specs)
    if found is None:
        raise DataError(
            f"{entry}: just written, but its arrays cannot be read back; is the disk full or failing?"
        )
    return found


def _open(entry: Path, specs: list[ArraySpec]) -> list[np.ndarray] | None:
    """The arrays of a complete entry, or None when it is missing or is not what it should be."""
    arrays = []
    for spec in specs:
        path = entry / f"{spec.name}.npy"
        try:
            # An array of no elements cannot be mapped.
            array = np.load(path, mmap_mode="r" if 0 not in spec.shape else None, allow_pickle=False)
        except (OSError, ValueError):
            return None
        if array.dtype != spec.dtype or array.shape != spec.shape:
            return None
        arrays.append(array)
    return arrays


def _write(
    entry: Path,
    description: dict[str, object],
    specs: list[ArraySpec],
    build: Callable[[list[np.ndarray]], None],
) -> None:
    temporary = entry.with_name(f"{entry.name}.{os.uname().nodename}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        arrays: list[np.ndarray] = []
        for spec in specs:
            path = temporary / f"{spec.name}.npy"
            if 0 in spec.shape:
                np.save(path, np.empty(spec.shape, dtype=spec.dtype))
                arrays.append(np.empty(spec.shape, dtype=spec.dtype))
            else:
                arrays.append(np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape))
                _reserve(path)
        build(arrays)
        for array in arrays:
            if isinstance(array, np.memmap):
                array.flush()
        (temporary / "description.json").write_bytes(
            orjson.dumps(description, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        )
        if _open(temporary, specs) is None:
            raise OSError(f"{temporary}: incomplete")
        shutil.rmtree(entry, ignore_errors=True)  # a damaged entry; nobody can be reading it as one
        with contextlib.suppress(OSError):  # another process, without locks, was first: its entry is the same
            temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _reserve(path: Path) -> None:
    """Take the file's blocks now: on a full disk this is an OSError, where a write into the mapping would
    be a SIGBUS.
    """
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock `path`, waiting for its holder at most LOCK_PATIENCE_SECONDS; the kernel frees a dead
    holder's lock.
    """
    with path.open("a") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
