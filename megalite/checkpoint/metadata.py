"""Reads DCP's `.metadata`, a pickle, without giving it any power to execute."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megalite.checkpoint.errors import CheckpointCorruptError, describe

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
# Plain records, enumerations and value types: building any of them runs no code of the file's choosing.
ALLOWED = {
    (f"{DCP}.metadata", "Metadata"),
    (f"{DCP}.metadata", "TensorStorageMetadata"),
    (f"{DCP}.metadata", "ChunkStorageMetadata"),
    (f"{DCP}.metadata", "TensorProperties"),
    (f"{DCP}.metadata", "MetadataIndex"),
    (f"{DCP}.metadata", "StorageMeta"),
    (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
DTYPES = {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of the metadata and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        """The named class if it is allowed; raises UnpicklingError otherwise."""
        if (module, name) in ALLOWED or (module, name) in DTYPES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which checkpoint metadata has no use for"
        )


def _member(kind: object, name: object) -> object:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute of it; of nothing else
    is an attribute looked up.
    """
    if kind is not _MEM_FORMAT_ENCODING or not isinstance(name, str) or name not in kind.__members__:
        raise pickle.UnpicklingError("it asks for an attribute, which checkpoint metadata has no use for")
    return kind.__members__[name]


def read_metadata(folder: Path, files: Mapping[str, int]) -> Metadata:
    """The checked metadata of a checkpoint whose `files` have these sizes in bytes.

    Raises CheckpointCorruptError when it refers to anything but tensors inside these files.
    """
    path = folder / METADATA
    try:
        metadata = MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointCorruptError(f"{path} is refused: {describe(error)}") from error
    try:
        problem = _problem(metadata, files)
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"it is malformed ({describe(error)})"
    if problem is not None:
        raise CheckpointCorruptError(f"{path} is refused: {problem}")
    checked: Metadata = metadata
    return checked


def _problem(metadata: Any, files: Mapping[str, int]) -> str | None:
    """What is wrong with unpickled metadata, which may be any mixture of the allowed types."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        return "it is not checkpoint metadata"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            return f"{name!r} is not a tensor"
        if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
            return f"{name} has no dtype and size"
        for chunk in entry.chunks:
            if not isinstance(chunk, ChunkStorageMetadata):
                return f"{name} has a block that is none"
            if not isinstance(chunk.offsets, torch.Size) or not isinstance(chunk.sizes, torch.Size):
                return f"{name} has a block without offsets and sizes"
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            where = f"the block of {name} at {tuple(chunk.offsets)}"
            if info is None:
                return f"{where} is stored nowhere"
            # A name that the manifest lists is a plain file of this folder, so no path leads outside.
            if info.relative_path not in files:
                return f"{where} is in {info.relative_path!r}, which is not a file of this checkpoint"
            size = files[info.relative_path]
            if info.offset < 0 or info.length <= 0 or info.offset + info.length > size:
                return (
                    f"{where} is at bytes {info.offset} to {info.offset + info.length} "
                    f"of {info.relative_path}, which has {size}"
                )
    return None
