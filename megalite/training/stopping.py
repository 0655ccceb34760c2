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
    """Reasons to leave before the end that every rank must agree on: an iteration, a duration, a signal.

    Inside the `with` block SIGTERM is noted; behind it its earlier handler is back.
    """

    def __init__(self, config: Config, topology: Topology, started: float):
        self.config, self.topology, self.started = config, topology, started
        self._signalled = False

    def __enter__(self) -> StopRequest:
        if self.config.batch.exit_signal_handler:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.config.batch.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def leaves(self) -> bool:
        """Whether the run should stop wherever it is. Collective as `asked_at_once`."""
        return self.asked_at_once() is not None

    def asked(self, iteration: int) -> str | None:
        """Why the run should stop after this iteration, or None. Collective as `asked_at_once`."""
        if reason := self.asked_at_once():
            return reason
        interval = self.config.batch.exit_interval
        return f"--exit-interval {interval}" if due(iteration, interval) else None

    def asked_at_once(self) -> str | None:
        """Why the run should stop wherever it is, or None. A collective with a duration or the signal
        handler.
        """
        minutes = self.config.batch.exit_duration_in_mins
        if minutes is None and not self.config.batch.exit_signal_handler:
            return None
        late = minutes is not None and time.monotonic() - self.started > 60 * minutes
        signalled, late = self._anywhere(self._signalled, late)
        if signalled:
            return "SIGTERM received (--exit-signal-handler)"
        return f"the run has lasted {minutes} minutes (--exit-duration-in-mins)" if late else None

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Which of the flags are set on any rank."""
        tensor = torch.tensor(flags, dtype=torch.int32, device=self.topology.device)
        if self.topology.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]
