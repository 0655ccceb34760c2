"""Leaving a run before its end."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from megalite.config import Config
from megalite.parallel.topology import Topology


def due(iteration: int, interval: int | None) -> bool:
    """Whether something done every `interval` iterations is to be done after this one; None is never."""
    return interval is not None and iteration % interval == 0


class StopRequest:
    """Reasons to leave before the end that every rank must agree on: an iteration, a duration, a signal."""

    def __init__(self, config: Config, topology: Topology, started: float):
        self.config, self.topology, self.started = config, topology, started
        self._signalled = False
        if config.batch.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def asked(self, iteration: int) -> str | None:
        """Why the run should stop now, or None. A collective with a duration or the signal handler."""
        batch = self.config.batch
        minutes = batch.exit_duration_in_mins
        if minutes is not None or batch.exit_signal_handler:
            late = minutes is not None and time.monotonic() - self.started > 60 * minutes
            signalled, late = self._anywhere(self._signalled, late)
            if signalled:
                return "SIGTERM received (--exit-signal-handler)"
            if late:
                return f"the run has lasted {minutes} minutes (--exit-duration-in-mins)"
        if due(iteration, batch.exit_interval):
            return f"--exit-interval {batch.exit_interval}"
        return None

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Which of the flags are set on any rank."""
        tensor = torch.tensor(flags, dtype=torch.int32, device=self.topology.device)
        if self.topology.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]
