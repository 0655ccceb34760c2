"""The schedule that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from megalite.config import Config, pipeline_schedule, virtual_stages
from megalite.pipeline.schedule import Schedule, make_schedule
from megalite.pipeline.simulation import ScheduleError
from megalite.pipeline.table import read_csv


class ConfiguredSchedule:
    """A run's schedule, for the number of micro-batches of each of its steps.

    Raises ScheduleError, with rank and action, for a table (--pipeline-schedule-csv) that cannot be run.
    """

    def __init__(self, config: Config) -> None:
        self._parallel = config.parallel
        self._name = pipeline_schedule(config)
        self._chunks = virtual_stages(config)
        path = config.parallel.pipeline_schedule_csv
        self._table = None if path is None else read_csv(Path(path))
        ranks = config.parallel.pipeline_model_parallel_size
        if self._table is not None and len(self._table) != ranks:
            raise ScheduleError(f"{path} is for {len(self._table)} ranks, and there are {ranks}")

    @property
    def placement(self) -> Schedule:
        """Any schedule of the run: they all have the same stages on the same ranks."""
        return self._table or self.of(1)

    def of(self, microbatches: int) -> Schedule:
        """The schedule of a step. Raises ScheduleError when the table is for another number."""
        if self._table is None:
            parallel = self._parallel
            return make_schedule(
                self._name,
                parallel.pipeline_model_parallel_size,
                microbatches,
                self._chunks,
                parallel.microbatch_group_size_per_virtual_pipeline_stage,
            )
        if microbatches != self._table.microbatches:
            made_for = f"{self._table.name} is for {self._table.microbatches} micro-batches a step"
            raise ScheduleError(f"{made_for}, not {microbatches}")
        return self._table
