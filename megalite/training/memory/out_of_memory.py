"""What a run says when an allocation has failed: where the bytes are and what would make it fit."""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite.accelerator import is_out_of_memory
from megalite.config import Config
from megalite.model.recompute_budget import Measured, within_budget
from megalite.training.memory.advice import advise
from megalite.training.memory.plan import plan_memory
from megalite.training.memory.table import as_text, shown

# Of what is free: the rest goes to fragments, to scratch memory and libraries. glibc's malloc took 290 to 355
# MiB for a planned 243 MiB (8 runs); no GPU's allocator has been measured.
USABLE, USABLE_ON_HOST = 0.9, 0.6
_CLAIM, _TOLD = "megalite/out of memory", "megalite/out of memory is told"


def explain(config: Config, world_size: int, device: torch.device, free: int | None) -> str:
    """The planned bytes of every rank, and with `free` (bytes there were for tensors) the levers."""
    host_is_device, measured = device.type == "cpu", Measured()
    chosen, _ = within_budget(config, measured)
    text = as_text(plan_memory(chosen, world_size, host_is_device))
    if free is None:
        return text
    share = USABLE_ON_HOST if host_is_device else USABLE
    available = int(share * free)
    advised = advise(config, world_size, available, host_is_device, measured)
    lines = [advice.line(available) for advice in advised]
    title = f"what would help, the cheapest first ({shown(free)} were free, {share:.0%} of them usable):"
    numbered = [f"  {number}. {line}" for number, line in enumerate(lines, 1)]
    return "\n".join([text, title, *(numbered or ["  more ranks, or a smaller model"])])


def tell(
    config: Config, rank: int, world_size: int, device: torch.device, free: int | None, what: str
) -> None:
    """Print on stderr that this rank ran out of memory; `what`: the allocator's words.

    Of several ranks that fail, the first explains. The others wait until it has spoken, for as long as they
    would for any message: the launcher ends all ranks with the first that leaves.
    """
    print(f"error: rank {rank}: out of memory: {what}", file=sys.stderr, flush=True)
    store = distributed_c10d._get_default_store() if dist.is_initialized() else None
    if store is not None and store.add(_CLAIM, 1) > 1:
        with suppress(dist.DistStoreError):
            store.wait([_TOLD], timedelta(minutes=config.parallel.distributed_timeout_minutes))
        return
    try:
        explanation = explain(config, world_size, device, free)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        explanation = "(no memory is left to plan with: see tools/plan.py memory)"
    print(explanation, file=sys.stderr, flush=True)
    if store is not None:
        store.set(_TOLD, "yes")
