"""What a complete checkpoint folder contains: a missing or cut file is found before anything is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megalite.checkpoint.errors import CheckpointCorruptError, describe
from megalite.checkpoint.folder import folder_of, published_iterations
from megalite.checkpoint.metadata import METADATA
from megalite.durable import write_durably

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "megalite checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor: its shape, its dtype by torch's name, a checksum for each of its saved blocks."""

    shape: list[int]
    dtype: str
    checksums: list[int]


@dataclass(frozen=True)
class Manifest:
    """`files` are sizes in bytes, `hashes` SHA-256 of the files that are not tensors; `earlier` the
    checkpoints of the same folder that this one comes after, None where a version that did not tell wrote it.
    """

    iteration: int
    earlier: list[int] | None
    files: dict[str, int]
    hashes: dict[str, str]
    tensors: dict[str, TensorEntry]


def encode_state(state: Mapping[str, Any]) -> str:
    """The state as JSON that reads back equal, tuples as lists. Raises TypeError or ValueError otherwise."""
    _check_keys(state, "state")
    return json.dumps(state, indent=2, allow_nan=False)


def write_manifest(
    folder: Path, iteration: int, earlier: list[int], metadata: Metadata, sums: Mapping[str, list[int]]
) -> None:
    """Describe a folder whose other files are all written. Raises OSError when this rank cannot see one."""
    names = {METADATA, STATE} | {info.relative_path for info in metadata.storage_data.values()}
    tensors = {
        name: TensorEntry(list(entry.size), _name(entry.properties.dtype), list(sums[name]))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    manifest = Manifest(
        iteration,
        earlier,
        {name: (folder / name).stat().st_size for name in sorted(names)},
        {name: _sha256(folder / name) for name in (METADATA, STATE)},
        tensors,
    )
    document = {"format": FORMAT, "format_version": FORMAT_VERSION, "torch": torch.__version__}
    write_durably(folder / MANIFEST, json.dumps(document | asdict(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder: every file is there, with its size.

    Raises CheckpointCorruptError naming what is missing, cut, changed, or not a checkpoint of this program.
    """
    manifest = _parsed(folder)
    _check_files(folder, manifest)
    return manifest


def earlier_checkpoints(folder: Path) -> list[int] | None:
    """The `earlier` of a checkpoint, also of one with damaged tensors; None where it cannot be read."""
    try:
        return _parsed(folder).earlier
    except CheckpointCorruptError:
        return None


def foreign_checkpoints(directory: Path) -> list[Path]:
    """The folders with the name of a checkpoint that hold something, and nothing that tells of this program;
    ours tell of it also when they are damaged. Raises OSError for one that cannot be read.
    """
    named = (folder_of(directory, number) for number in published_iterations(directory))
    return [
        folder
        for folder in named
        if folder.is_dir() and (held := _held(folder)) and not {MANIFEST, STATE} & held
    ]


def _held(folder: Path) -> set[str]:
    """The names in a folder, but for files that NFS keeps while a process has them open."""
    return {name for name in os.listdir(folder) if not name.startswith(".nfs")}


def _parsed(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointCorruptError(f"{folder} does not exist")
    if not path.is_file():
        raise CheckpointCorruptError(f"{folder} is not a checkpoint of this program: it has no {MANIFEST}")
    try:
        document = json.loads(path.read_text())
        if document.get("format") != FORMAT:
            raise CheckpointCorruptError(f"{path} does not say that its format is {FORMAT!r}")
        if document["format_version"] != FORMAT_VERSION:
            raise CheckpointCorruptError(
                f"{path} has format version {document['format_version']}, this program reads {FORMAT_VERSION}"
            )
        tensors = {name: TensorEntry(**entry) for name, entry in document["tensors"].items()}
        earlier = None if (listed := document.get("earlier")) is None else [int(number) for number in listed]
        files, hashes = dict(document["files"]), dict(document["hashes"])
        return Manifest(document["iteration"], earlier, files, hashes, tensors)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {describe(error)}") from error


def check_tensors(manifest: Manifest, metadata: Metadata, folder: Path) -> None:
    """Raise CheckpointCorruptError unless `.metadata` and the manifest speak of the same tensors."""
    described = {
        name: (list(entry.size), _name(entry.properties.dtype), len(entry.chunks))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    listed = {name: (e.shape, e.dtype, len(e.checksums)) for name, e in manifest.tensors.items()}
    if described != listed:
        names = sorted(name for name in described | listed if described.get(name) != listed.get(name))
        raise CheckpointCorruptError(f"{folder}: {METADATA} and {MANIFEST} disagree about {names[:10]}")


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointCorruptError(f"{folder} is incomplete: {name} is missing")
        actual = path.stat().st_size
        if actual != size:
            raise CheckpointCorruptError(f"{path} has {actual} bytes instead of {size}")
    for name, expected in manifest.hashes.items():
        if _sha256(folder / name) != expected:
            raise CheckpointCorruptError(f"{folder / name} was changed after it was saved")


def _check_keys(value: Any, where: str) -> None:
    # JSON would turn a key 1 into "1" without a word.
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings to be stored as JSON")
            _check_keys(inner, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner, where)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
