"""Sharded checkpoints in PyTorch's distributed format, loadable on any layout."""

from megalite.checkpoint.block import Block
from megalite.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from megalite.checkpoint.load import complete_iterations, latest_iteration, load, read_state
from megalite.checkpoint.manifest import foreign_checkpoints
from megalite.checkpoint.parameters import parameter_blocks
from megalite.checkpoint.save import save

__all__ = [
    "Block",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "complete_iterations",
    "foreign_checkpoints",
    "latest_iteration",
    "load",
    "parameter_blocks",
    "read_state",
    "save",
]
