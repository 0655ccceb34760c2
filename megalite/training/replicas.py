"""The check, now and then, that no replica has drifted from the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.parallel.everywhere import gather_objects
from megalite.parallel.replicas import differing_replicas
from megalite.training.errors import TrainingError
from megalite.training.step import Trainer

MOST_LINES = 20


def check_replicas(trainer: Trainer, iteration: int) -> None:
    """Compare the weights of all replicas: over dp, and where tp ranks or the pipeline's ends share some.

    A collective. Raises TrainingError on every rank when bits differ anywhere, naming parameters and ranks.
    """
    topology = trainer.topology
    if topology.world_size == 1:
        return
    trainer.buckets.wait_for_weights()
    mine = differing_replicas(trainer.buckets.held, topology, shared_out=trainer.buckets.stage == 3)
    anywhere = torch.tensor(len(mine), device=topology.device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere:
        return
    lines = sorted({line for one in gather_objects(mine) for line in one})
    rest = f"\n  and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    raise TrainingError(
        f"iteration {iteration}: replicas of weights differ, which should be equal to the bit:\n  "
        + "\n  ".join(lines[:MOST_LINES])
        + f"{rest}\nFirst suspects: faulty memory or a faulty device on those ranks, or different software "
        "there. Resume from a checkpoint before this iteration."
    )
