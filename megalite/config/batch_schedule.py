"""The global batch size as a function of the samples consumed so far: constant, a ramp, or steps.

Megatron-LM's rules (core/num_microbatches_calculator.py). A ramp START INCREMENT SAMPLES goes up by INCREMENT
each time that an equal share of SAMPLES has been consumed, so that it ends at --global-batch-size. A step
schedule `0:768 250B:1536` has its thresholds in tokens. A size that micro-batch x data parallel does not
divide is rounded down with --decrease-batch-size-if-needed, and refused without.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from megalite.config.schema.batch import MOST_SAMPLES_A_STEP, BatchConfig
from megalite.config.schema.config import Config
from megalite.limits import INT64_LARGEST

STEP = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?):(\d{1,18})", re.IGNORECASE)
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MOST_SIZES = 2**16


@dataclass(frozen=True)
class BatchSchedule:
    """`sizes[i]`, in samples, holds from `starts[i]` consumed samples on; `starts` ascends from 0."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def size_after(self, consumed_samples: int) -> int:
        """Samples of the step that follows `consumed_samples`."""
        return self.sizes[bisect_right(self.starts, consumed_samples) - 1]

    def batches(self, consumed_samples: int, samples: int) -> list[tuple[range, int]]:
        """The first sample of each step, size after size, while a whole batch is left of `samples`."""
        found, consumed = [], consumed_samples
        while samples - consumed >= (size := self.size_after(consumed)):
            place = bisect_right(self.starts, consumed)
            until = samples if place == len(self.starts) else self.starts[place]
            steps = min(-(-(until - consumed) // size), (samples - consumed) // size)
            found.append((range(consumed, consumed + steps * size, size), size))
            consumed += steps * size
        return found

    def advance(self, consumed_samples: int, samples: int) -> tuple[int, int]:
        """(steps, consumed samples) when no whole batch is left of `samples`."""
        batches = self.batches(consumed_samples, samples)
        return sum(len(firsts) for firsts, _ in batches), batches[-1][0].stop if batches else consumed_samples

    def samples_of(self, iteration: int, samples: int, before: int = 0, consumed_samples: int = 0) -> range:
        """What step `iteration`, counted from 1 as in the log, takes of `samples`, if the `before` steps took
        `consumed_samples`.

        Raises ValueError when they do not make so many steps.
        """
        for firsts, size in self.batches(consumed_samples, samples):
            if 1 <= iteration - before <= len(firsts):
                first = firsts[iteration - before - 1]
                return range(first, first + size)
            before += len(firsts)
        raise ValueError(f"the {samples} samples make steps 1 to {before}")


def batch_schedule(batch: BatchConfig, seq_length: int, multiple: int = 1) -> BatchSchedule:
    """The schedule of a run, each size rounded down to a multiple of `multiple`: micro-batch x data parallel.

    `seq_length`: tokens a sample. Raises ValueError for a step schedule or a ramp that cannot be read, or
    has a batch above MOST_SAMPLES_A_STEP.
    """
    if batch.step_batch_size_schedule is not None:
        pairs = _steps(batch.step_batch_size_schedule, seq_length)
    elif batch.rampup_batch_size:
        pairs = _ramp(batch.rampup_batch_size, batch.global_batch_size)
    else:
        pairs = [(0, batch.global_batch_size)]
    if max(size for _, size in pairs) > MOST_SAMPLES_A_STEP:
        raise ValueError(f"has a batch above {MOST_SAMPLES_A_STEP} samples")
    return BatchSchedule(
        tuple(start for start, _ in pairs), tuple(size // multiple * multiple for _, size in pairs)
    )


def running_batch_schedule(config: Config, data_parallel: int) -> BatchSchedule:
    """The sizes that the steps of a valid configuration really have on `data_parallel` ranks."""
    multiple = config.batch.micro_batch_size * data_parallel
    return batch_schedule(config.batch, config.model.seq_length, multiple)


def last_size(steps: str) -> int | None:
    """The size that a step schedule ends with; None when it cannot be read."""
    try:
        return _steps(steps, seq_length=1)[-1][1]
    except ValueError:
        return None


def _ramp(ramp: tuple[int, ...], final: int) -> list[tuple[int, int]]:
    if len(ramp) != 3 or min(ramp) < 1:
        raise ValueError("it takes three numbers >= 1: START, INCREMENT and SAMPLES")
    start, increment, samples = ramp
    if start > final:
        raise ValueError(f"it starts above --global-batch-size {final}")
    if (final - start) % increment:
        raise ValueError(f"increments of {increment} do not lead from {start} to --global-batch-size {final}")
    increments = (final - start) // increment
    if increments >= MOST_SIZES:
        raise ValueError(f"{increments} increments are more than {MOST_SIZES - 1}")
    pairs: dict[int, int] = {0: start}
    for number in range(1, increments + 1):
        pairs[-(-number * samples // increments)] = start + number * increment  # the last of equal ones holds
    return sorted(pairs.items())


def _steps(text: str, seq_length: int) -> list[tuple[int, int]]:
    pairs = []
    for entry in text.replace(",", " ").split():
        match = STEP.fullmatch(entry)
        if match is None or int(match[3]) < 1:
            raise ValueError(f"{entry[:40]!r} is not TOKENS:SIZE, such as 250B:1536")
        tokens = float(match[1]) * SUFFIXES[match[2].upper()]
        if tokens > INT64_LARGEST:
            raise ValueError(f"{entry[:40]!r}: so many tokens cannot be counted in 64 bits")
        pairs.append((int(tokens) // seq_length, int(match[3])))
    if not pairs or pairs[0][0] != 0:
        raise ValueError("the first size must hold from 0 tokens on")
    if len(pairs) > MOST_SIZES:
        raise ValueError(f"{len(pairs)} sizes are more than {MOST_SIZES}")
    for (before, _), (after, _) in pairwise(pairs):
        if after <= before:
            raise ValueError(f"thresholds must rise by at least a sample, {seq_length} tokens")
    return pairs
