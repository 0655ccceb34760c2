"""The process that a launcher starts for each rank: configuration, process group, run, exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from megalite.config import Config, parse_or_exit


def main(argv: Sequence[str]) -> int:
    """Train as the command line says; torchrun's environment variables say which rank this is. Returns the
    exit code.

    A configuration error leaves with code 2 before torch is even imported.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = parse_or_exit(argv, world_size, rank)
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_run)(config, rank, world_size) or 0


def _run(config: Config, rank: int, world_size: int) -> int:
    from megalite.accelerator import local_device
    from megalite.checkpoint import CheckpointError
    from megalite.parallel.topology import build_topology
    from megalite.training.errors import TrainingError
    from megalite.training.loop import run

    device = local_device()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    parallel = config.parallel
    try:
        with _process_group(config, world_size, timeout):
            tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
            run(config, build_topology(tensor, pipeline, device, timeout))
    except (TrainingError, CheckpointError) as error:  # the same on every rank
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(5)  # torchrun ends all ranks with the first that leaves: rank 0 must have spoken
        return 1
    return 0


@contextmanager
def _process_group(config: Config, world_size: int, timeout: timedelta) -> Iterator[None]:
    """The default process group while the run lasts; none for a single process.

    After an error it is not taken down: that would wait for ranks that may be waiting for this one.
    """
    import torch.distributed as dist

    from megalite.accelerator import backend_for, local_device

    if world_size == 1:
        yield
        return
    dist.init_process_group(backend_for(local_device(), config.parallel.distributed_backend), timeout=timeout)
    yield
    dist.destroy_process_group()
