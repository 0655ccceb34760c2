"""Files of tensors, on top of the file system classes of torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megalite.checkpoint.block import checksums
from megalite.checkpoint.errors import CheckpointCorruptError, CheckpointError, describe


class BlockWriter(FileSystemWriter):
    """One file a rank, synced to disk; a rank with nothing to write makes none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.folder = folder

    def storage_meta(self) -> StorageMeta:
        """Without the path: the folder is renamed later, and a pickled Path ties it to a Python version."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks. Raises CheckpointError naming the folder when that fails."""
        if not plan.items:
            done: Future[list[WriteResult]] = Future()
            done.set_result([])
            return done
        try:
            return super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise CheckpointError(f"cannot write to {self.folder}: {describe(cause)}") from error


class BlockReader(FileSystemReader):
    """Reads each saved block once, verifies it and copies its parts to where they belong.

    `metadata` has been read and checked before, see metadata.py; `expected[name]` has one checksum a chunk.
    """

    def __init__(self, folder: Path, metadata: Metadata, expected: Mapping[str, Sequence[int]]) -> None:
        super().__init__(folder)
        self.folder = folder
        self.metadata = metadata
        self.expected = expected

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata given at construction; the base class would unpickle the file without restriction."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors. Raises CheckpointCorruptError naming the file and the tensor."""
        wanted: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            wanted.setdefault(file, {}).setdefault(item.storage_index, []).append(item)
        for file, blocks in wanted.items():
            try:
                with (self.folder / file).open("rb") as stream:
                    for index in sorted(blocks, key=lambda i: self.storage_data[i].offset):
                        saved = self._read_block(stream, index)
                        for item in blocks[index]:
                            _copy(saved, item, planner)
            except OSError as error:
                raise CheckpointCorruptError(f"cannot read a checkpoint file: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_block(self, stream: io.BufferedReader, index: MetadataIndex) -> torch.Tensor:
        """One saved block, on the CPU, as it was when it was saved."""
        info = self.storage_data[index]
        where = f"{self.folder / info.relative_path}: the block of {index.fqn} at {tuple(index.offset or ())}"
        entry = self.metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointCorruptError(f"{where} is not a tensor")
        stream.seek(info.offset)
        raw = stream.read(info.length)
        try:
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except UnpicklingError as error:  # torch says at length how to run what it may hold
            raise CheckpointCorruptError(f"{where} is damaged: it is no tensor") from error
        except Exception as error:  # damaged bytes can raise anything
            raise CheckpointCorruptError(f"{where} cannot be read ({describe(error)})") from error
        chunk = entry.chunks[index.index or 0]
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.shape != chunk.sizes
            or tensor.dtype != entry.properties.dtype
        ):
            raise CheckpointCorruptError(f"{where} is not {entry.properties.dtype} of {tuple(chunk.sizes)}")
        if checksums([tensor])[0] != self.expected[index.fqn][index.index or 0]:
            raise CheckpointCorruptError(f"{where} is damaged: its checksum differs from the saved one")
        return tensor


def _copy(saved: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """The part of a saved block that a read item asks for, into its destination."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, start, length)
    target = planner.resolve_tensor(item)
    target.copy_(saved)
    planner.commit_tensor(item, target)
