"""The directory of checkpoints: which folders it has, and how a new one appears in a single step.

iter_0000100/                          a published checkpoint
latest_checkpointed_iteration.txt      100; written last, as Megatron does
.iter_0000200.tmp-<hex>/               one being written, or left by a run that was killed
.iter_0000100.replaced-<hex>/          an old one of the same iteration, for the moment of its replacement
.lock                                  held by the run that saves here (`training/save_folder.py`)
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from megalite.durable import sync_folder, write_durably

TRACKER = "latest_checkpointed_iteration.txt"
PUBLISHED = re.compile(r"iter_(\d{7,})")
REPLACED = re.compile(r"\.(iter_\d{7,})\.replaced-[0-9a-f]+")
LEFTOVERS = (".iter_*.tmp-*", ".iter_*.replaced-*", f".{TRACKER}.tmp-*")

logger = logging.getLogger(__name__)


def folder_of(directory: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is, whether it exists or not."""
    return directory / f"iter_{iteration:07d}"


def published_iterations(directory: Path) -> list[int]:
    """The iterations that have a folder, complete or not, in ascending order."""
    if not directory.is_dir():
        return []
    matches = (PUBLISHED.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None)


def create_temporary(directory: Path, iteration: int) -> Path:
    """A new hidden folder to write into; what killed runs left behind is removed first, or warned of where it
    cannot be: another user's, or a file that NFS keeps while a process has it open.
    """
    directory.mkdir(parents=True, exist_ok=True)
    restore_replaced(directory)
    for pattern in LEFTOVERS:
        for path in directory.glob(pattern):
            if _to_restore(path) is None:
                _remove(path)
    temporary = directory / f".{folder_of(directory, iteration).name}.tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    return temporary


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # another has removed it
        pass
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # the rest of it
        logger.warning("%s, which a run has left or replaced, cannot be removed: %s", path, error.strerror)


def publish(temporary: Path, iteration: int) -> Path:
    """Give a complete temporary folder its name and record it as the latest; returns the new path.

    Whenever the process is killed, either the old or the new checkpoint of this iteration is found again.
    What takes long comes before both names: a checkpoint without its record would be passed over.
    """
    directory = temporary.parent
    final = folder_of(directory, iteration)
    sync_folder(temporary)
    record = directory / f".{TRACKER}.tmp-{uuid.uuid4().hex}"
    write_durably(record, f"{iteration}\n")
    replaced = _set_aside(final)
    try:
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
            if temporary.exists():  # a reader has just restored what was set aside
                replaced = _set_aside(final)
                temporary.rename(final)  # else it is done, and NFS has asked for it again
        record.replace(directory / TRACKER)  # a reader sees the old number or the new one, never a part
    finally:
        record.unlink(missing_ok=True)
    sync_folder(directory)
    if replaced is not None:
        _remove(replaced)
    return final


def _set_aside(final: Path) -> Path | None:
    """Another name for a checkpoint that will be replaced, or a link to one; None where there is none."""
    if not os.path.lexists(final):
        return None
    replaced = final.with_name(f".{final.name}.replaced-{uuid.uuid4().hex}")
    final.rename(replaced)
    return replaced


def restore_replaced(directory: Path) -> None:
    """Undo replacements that were cut off between their two renames, or warn that one cannot be undone."""
    try:
        found = list(directory.glob(".iter_*.replaced-*"))
    except OSError as error:
        logger.warning("whether replacements in %s were interrupted cannot be seen: %s", directory, error)
        return
    for path in found:
        try:
            if (published := _to_restore(path)) is not None:
                path.rename(published)
        except OSError as error:
            logger.warning("the interrupted replacement %s cannot be undone: %s", path, error)


def _to_restore(path: Path) -> Path | None:
    """The name that `path` had before its replacement, if that was cut off and nothing has the name now."""
    match = REPLACED.fullmatch(path.name)
    return None if match is None or (path.parent / match[1]).exists() else path.parent / match[1]


def read_tracker(directory: Path) -> int | None:
    """The recorded latest iteration; None if there is no record or it is not a number."""
    try:
        text = (directory / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None
