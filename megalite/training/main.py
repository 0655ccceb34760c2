"""The process that a launcher starts for each rank: configuration, process group, run, exit code."""

from __future__ import annotations

import errno
import gc
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from megalite.config import Config, ConfigErrors, exit_with_errors, kv_replicas
from megalite.config.rules.apex import check_device
from megalite.interruption import EXIT_CODE, end_on_interrupt, raise_on_interrupt
from megalite.leave import last_words, leave
from megalite.standard_streams import occupy_closed, take_everything
from megalite.training.launcher import Place, place_of
from megalite.training.orphan import end_with_torchrun
from megalite.training.preflight import configured
from megalite.training.process_group import process_group
from megalite.training.refusal import TORCHRUN_SECONDS, leave_with_errors

OUT_OF_MEMORY = errno.ENOMEM  # the exit code of a rank whose allocation failed: 12


def main(argv: Sequence[str]) -> int:
    """Train as the command line says, as the rank that the launcher's variables say; returns the exit code.

    A configuration error, also a pipeline table that would deadlock, leaves with code 2 before torch is even
    imported; a rank whose allocation fails leaves with OUT_OF_MEMORY, one that gets Ctrl-C with EXIT_CODE.
    """
    started = time.monotonic()
    occupy_closed()
    output = take_everything()
    end_on_interrupt("interrupted")
    end_with_torchrun()
    try:
        place = place_of(os.environ)
    except ConfigErrors as errors:
        exit_with_errors(errors, rank=0)  # no rank can be trusted to be the one that speaks
    try:
        config = configured(argv, place.world_size, place.rank)
    except ConfigErrors as errors:
        leave_with_errors(errors, place)
    if output is not None:
        output.on_error = _tell_of_output
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(_run)(config, place, started) or 0


def _tell_of_output(error: OSError) -> None:
    if sys.stderr is not None:  # or it would be printed to standard output
        print(f"warning: standard output takes nothing: {error.strerror}; the run goes on", file=sys.stderr)


def _run(config: Config, place: Place, started: float | None = None) -> int:
    from megalite.accelerator import (
        DeviceError,
        backend_for,
        free_memory_bytes,
        is_lost_peer,
        is_out_of_memory,
        local_device,
    )
    from megalite.checkpoint import CheckpointError
    from megalite.data.errors import DataError
    from megalite.model.recompute_budget import within_budget
    from megalite.parallel.topology import build_topology
    from megalite.training.agreement import settings_to_compare
    from megalite.training.errors import RendezvousError, TrainingError
    from megalite.training.loop import run
    from megalite.training.progress import after_interrupt

    try:
        device = local_device(place.local_rank)
    except DeviceError as error:  # of this rank alone: the others have a device and would wait for it
        last_words(f"error: {error}")
        return 1
    try:
        check_device(config, device.type)
        chosen, choice = within_budget(config)
    except ConfigErrors as errors:
        leave_with_errors(errors, place)
    if choice is not None and place.rank == 0:
        print(choice, flush=True)
    free = free_memory_bytes(device)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    parallel = config.parallel
    try:
        raise_on_interrupt()  # what the run has measured is still written
        backend = backend_for(device, parallel.distributed_backend)
        # A node whose devices cannot be used would take its CPU cores.
        settings = settings_to_compare(config) | {"distributed_backend": f"{backend} ({device.type})"}
        with process_group(backend, place, timeout, settings):
            tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
            replicas = kv_replicas(config.model, tensor)
            run(chosen, build_topology(tensor, pipeline, device, timeout, replicas), started)
    except ConfigErrors as errors:
        exit_with_errors(errors, place.rank)
    except RendezvousError as error:
        last_words(f"error: rank {place.rank}: {error}")
        return 1
    except (TrainingError, CheckpointError) as error:  # the same on every rank
        leave(f"error: {error}", place.rank, code=1)
    except KeyboardInterrupt:  # torchrun sends it to every rank
        if place.rank == 0:
            print(after_interrupt(config), file=sys.stderr, flush=True)
        return EXIT_CODE
    except DataError as error:  # in the samples of this rank; the others wait for it until torchrun ends them
        last_words(f"error: rank {place.rank}: {error}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if is_lost_peer(error):
            # Not for torchrun, whose report begins with the rank that ended first, once it has seen that.
            print(
                f"rank {place.rank}: lost another rank; what that printed, or its launcher, tells why",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(TORCHRUN_SECONDS)
            return 1
        if not is_out_of_memory(error):
            raise
        what = str(error).strip().splitlines()[0] if str(error).strip() else "an allocation failed"
    else:
        return 0
    gc.collect()  # what the run held is free now: the frames of the error have gone with it
    from megalite.training.memory.out_of_memory import tell

    tell(config, place.rank, place.world_size, device, free, what)
    return OUT_OF_MEMORY
