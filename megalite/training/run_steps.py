"""Which samples a step of a run took: its checkpoints tell where it was, batch sizes count between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megalite.checkpoint import CheckpointError, complete_iterations, read_state
from megalite.config.batch_schedule import BatchSchedule
from megalite.data.errors import DataError

BATCH_SIZES = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule")


class Mark(NamedTuple):
    """A place of a run."""

    iteration: int
    consumed_samples: int
    flags: str
    """Of the batch sizes that led there."""


START = Mark(0, 0, "")


def marks_around(folder: str, iteration: int) -> tuple[Mark, Mark | None]:
    """The last checkpoint below `folder` that step `iteration` came after, else the start of the run; and the
    first that the step is in, if there is one. Raises DataError.
    """
    after = None
    try:
        for number in complete_iterations(folder):
            state = read_state(folder, number)
            mark = Mark(number, state["progress"]["consumed_samples"], _batch_flags(state["config"]))
            if number < iteration:
                return mark, after
            after = mark
    except CheckpointError as error:
        raise DataError(f"--load {folder}: {error}") from None
    return START, after


def _batch_flags(config: Mapping[str, Any]) -> str:
    flags = []
    for name in BATCH_SIZES:
        if value := config.get(name):
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            flags.append(f"--{name.replace('_', '-')} {words}")
    return " ".join(flags)


def samples_of_step(
    schedule: BatchSchedule, iteration: int, samples: int, before: Mark, after: Mark | None
) -> range:
    """What step `iteration` takes of the `samples` of a run, counted by `schedule` from `before` on.

    Raises DataError when there are not so many steps, or they do not lead to `after`.
    """
    if after is None:
        try:
            return schedule.samples_of(iteration, samples, before.iteration, before.consumed_samples)
        except ValueError as error:
            raise DataError(f"--iteration {iteration}: {error}") from None
    steps, end = schedule.advance(before.consumed_samples, after.consumed_samples)
    if (before.iteration + steps, end) != (after.iteration, after.consumed_samples):
        raise DataError(
            f"--iteration {iteration}: by the checkpoints, steps {before.iteration + 1} to "
            f"{after.iteration} took samples {before.consumed_samples} to {after.consumed_samples - 1}, "
            f"not what the given batch sizes make; the checkpoint of iteration {after.iteration} was saved "
            f"with {after.flags}. If the run changed its batch size between those, only the other steps are "
            f"known"
        )
    return schedule.samples_of(iteration, end, before.iteration, before.consumed_samples)
