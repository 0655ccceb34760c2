"""A rule between settings: what it reads, and the errors it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megalite.config.batch_schedule import BatchSchedule, batch_schedule
from megalite.config.schema import Config

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
BATCH_SCHEDULES = ("rampup_batch_size", "step_batch_size_schedule")


@dataclass(frozen=True)
class Candidate:
    """A configuration that is being judged.

    typed: names given on the command line. given: names given anywhere, in files too.
    """

    config: Config
    world_size: int
    given: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    def batch_schedule(self) -> BatchSchedule | None:
        """The batch sizes as they were given; None when they cannot be read, which a rule of its own says."""
        try:
            return batch_schedule(self.config.batch, self.config.model.seq_length)
        except ValueError:
            return None


Finding = tuple[str, object, str, str]  # name of the setting, its value, what is wrong, what would be right


@dataclass(frozen=True)
class Rule:
    """`check` yields findings. It runs only when every setting in `reads` has a usable value of its own."""

    reads: tuple[str, ...]
    check: Callable[[Candidate], Iterable[Finding]]


def reads(*names: str) -> Callable[[Callable[[Candidate], Iterable[Finding]]], Rule]:
    """Make a function a `Rule` over the named settings (`world_size` is the number of processes)."""
    return lambda check: Rule(names, check)


def divisors(number: int) -> list[int]:
    """12 -> [1, 2, 3, 4, 6, 12]."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def listed(numbers: Iterable[int]) -> str:
    """[1, 2, 3] -> "1,2,3"."""
    return ",".join(str(number) for number in numbers)


def multiples_around(number: int, factor: int) -> str:
    """The nearest multiples of `factor`: (30, 4) -> "28 or 32"; (3, 4) -> "4"."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
