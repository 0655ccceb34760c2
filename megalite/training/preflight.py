"""What can be refused before any rank exists: in one cheap process, and again by each rank."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config import Config, ConfigError, ConfigErrors, exit_with_errors, parse_command
from megalite.pipeline.configured import ConfiguredSchedule
from megalite.pipeline.simulation import ScheduleError


def configured(argv: Sequence[str], world_size: int, rank: int, *, run_follows: bool = False) -> Config:
    """The configuration of a run whose pipeline table, if it has one, can be run; see `parse_command`.

    Raises ConfigErrors. Needs no torch.
    """
    config = parse_command(argv, world_size, rank, run_follows=run_follows)
    try:
        ConfiguredSchedule(config)
    except ScheduleError as error:
        table = ConfigError("--pipeline-schedule-csv", config.parallel.pipeline_schedule_csv, str(error))
        raise ConfigErrors([table]) from None
    return config


def check_before_run(argv: Sequence[str], world_size: int) -> None:
    """Leave with exit code 2 and the errors where `world_size` ranks could not start.

    Warnings are left to the run. torch is imported where --recompute-budget must be measured, and not else.
    """
    try:
        config = configured(argv, world_size, rank=0, run_follows=True)
        if config.activations.recompute_budget is not None:
            from megalite.model.recompute_budget import within_budget

            within_budget(config)
    except ConfigErrors as errors:
        exit_with_errors(errors, rank=0)
