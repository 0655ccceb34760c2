"""The memory of a run beside its plan: told before training, measured in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megalite.accelerator import free_memory_bytes, peak_memory_bytes
from megalite.training.memory.account import buffer_bytes
from megalite.training.memory.plan import MemoryPlan, plan_memory
from megalite.training.memory.table import as_text, shown
from megalite.training.memory.tracker import LiveBytes
from megalite.training.step import Trainer


class MemoryReport:
    """Lines for the reporting rank. On a GPU its allocator measures; on a CPU every tensor of a step is counted."""

    def __init__(self, trainer: Trainer, free: int | None):
        """`free`: bytes that there were for tensors before the trainer was built."""
        self._trainer, self._free = trainer, free
        self._plan: MemoryPlan = plan_memory(trainer.config, trainer.topology.world_size)
        self._beside = 0
'''
'''
