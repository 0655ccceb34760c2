"""Nothing in a checkpoint can run code or reach outside its folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from megalite.checkpoint import Block, CheckpointCorruptError, load, save


class Command:
    """Unpickles to the result of a shell command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one tensor `x`."""
    return save(tmp_path, 1, [Block("x", (4,), (0,), torch.ones(4))], {})


def read(folder: Path) -> torch.Tensor:
    tensor = torch.zeros(4)
    load(folder.parent, [Block("x", (4,), (0,), tensor)], 1)
    return tensor


def metadata_of(folder: Path) -> Metadata:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def forge(folder: Path, metadata: object) -> None:
    """Replace the metadata and make the manifest agree with all files, as someone with intent would."""
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    manifest["hashes"][".metadata"] = hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def test_unforged_metadata_is_read(folder: Path) -> None:
    forge(folder, metadata_of(folder))
    assert torch.equal(read(folder), torch.ones(4))


class Attribute:
    """Unpickles to an attribute of `owner`."""

    def __init__(self, owner: object, name: object) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, object]]:
        return getattr, (self.owner, self.name)


def test_metadata_that_python_3_11_2_wrote_is_read(folder: Path) -> None:
    """Which pickles a member of an enumeration as an attribute of it."""
    state_of = TensorProperties.__getstate__

    def state(properties: TensorProperties) -> tuple[object, ...]:
        dtype, layout, grad, _, pinned = state_of(properties)
        return dtype, layout, grad, Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), pinned

    with patch.object(TensorProperties, "__getstate__", state):
        forge(folder, metadata_of(folder))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert torch.equal(read(folder), torch.ones(4))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, 5), (torch.Size, "numel")],
)
def test_another_attribute_in_the_metadata_is_refused(folder: Path, owner: object, name: object) -> None:
    metadata = metadata_of(folder)
    metadata.planner_data = Attribute(owner, name)
    forge(folder, metadata)
    with pytest.raises(CheckpointCorruptError, match="it asks for an attribute"):
        read(folder)


def test_a_command_in_the_metadata_is_refused(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    forge(folder, Command(marker))
    with pytest.raises(CheckpointCorruptError, match=r"it refers to posix\.system"):
        read(folder)
    assert not marker.exists()


def test_a_command_inside_honest_metadata_is_refused(folder: Path, tmp_path: Path) -> None:
    marker, metadata = tmp_path / "executed", metadata_of(folder)
    metadata.planner_data = Command(marker)
    forge(folder, metadata)
    with pytest.raises(CheckpointCorruptError, match=r"it refers to posix\.system"):
        read(folder)
    assert not marker.exists()


@pytest.mark.parametrize("function", [eval, setattr, __import__, torch.load, io.open])
def test_functions_are_refused(folder: Path, function: Callable[..., object]) -> None:
    forge(folder, function)
    with pytest.raises(CheckpointCorruptError, match="which checkpoint metadata has no use for"):
        read(folder)


def test_a_command_among_the_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    marker, metadata = tmp_path / "executed", metadata_of(folder)
    stream = io.BytesIO()
    torch.save(Command(marker), stream)
    (info,) = metadata.storage_data.values()
    (folder / info.relative_path).write_bytes(stream.getvalue())
    info.offset, info.length = 0, len(stream.getvalue())
    forge(folder, metadata)
    with pytest.raises(CheckpointCorruptError, match=r"the block of x at .* is damaged: it is no tensor"):
        read(folder)
    assert not marker.exists()


def bytes_item(metadata: Metadata) -> None:
    metadata.state_dict_metadata["y"] = BytesStorageMetadata()


def other_folder(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("x", (0,))].relative_path = "../secret.distcp"


def absolute_path(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("x", (0,))].relative_path = "/etc/hostname"


def past_the_end(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("x", (0,))].length += 1


def before_the_start(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("x", (0,))].offset = -1


def stored_nowhere(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def no_chunk_list(metadata: Metadata) -> None:
    vars(metadata.state_dict_metadata["x"])["chunks"] = 3


def wrong_type(metadata: Metadata) -> None:
    vars(metadata)["state_dict_metadata"] = {"x": TensorProperties()}


def smaller_chunk(metadata: Metadata) -> None:
    vars(metadata.state_dict_metadata["x"])["chunks"][0].sizes = torch.Size((3,))


def other_size(metadata: Metadata) -> None:
    vars(metadata.state_dict_metadata["x"])["size"] = torch.Size((5,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bytes_item, "BytesStorageMetadata"),
        (other_folder, "'../secret.distcp', which is not a file of this checkpoint"),
        (absolute_path, "'/etc/hostname', which is not a file of this checkpoint"),
        (past_the_end, "which has"),
        (before_the_start, "at bytes -1 to"),
        (stored_nowhere, "is stored nowhere"),
        (no_chunk_list, "malformed"),
        (wrong_type, "'x' is not a tensor"),
        (smaller_chunk, "only 3 of 4 elements"),
        (other_size, "disagree about ['x']"),
    ],
)
def test_metadata_that_lies_is_refused(
    folder: Path, change: Callable[[Metadata], None], message: str
) -> None:
    metadata = metadata_of(folder)
    change(metadata)
    forge(folder, metadata)
    with pytest.raises(CheckpointCorruptError) as raised:
        read(folder)
    assert message in str(raised.value)


def test_a_manifest_cannot_name_files_outside_the_folder(folder: Path) -> None:
    secret = folder.parent / "secret.distcp"
    secret.write_bytes(b"secret")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../secret.distcp"] = 6
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointCorruptError, match=r"\.\./secret\.distcp"):
        read(folder)
