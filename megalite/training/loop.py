"""The training run, from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megalite.accelerator import clock_of, free_memory_bytes, peak_flops
from megalite.config import Config, parameter_count, zero_stage
from megalite.data.batch import Batch
from megalite.data.build import Splits
from megalite.optim.memory import bytes_per_parameter
from megalite.optim.schedule import LearningRateSchedule, learning_rate
from megalite.parallel.topology import Topology, with_traffic
from megalite.parallel.traffic import TimedTraffic
from megalite.training.drawn import Drawn, drawn_lines
from megalite.training.errors import TrainingError
from megalite.training.evaluation import evaluate_at_the_end, validate
from megalite.training.memory.account import buffer_bytes
from megalite.training.memory.plan import plan_memory
from megalite.training.memory.report import measured_step, plan_lines
from megalite.training.memory.table import shown
from megalite.training.metrics import Reporter
from megalite.training.progress import (
    Progress,
    goes_on_in_its_folder,
    how_to_resume,
    load_progress,
    overwriting,
    save_progress,
    saved_order,
)
from megalite.training.replicas import check_replicas
from megalite.training.samples import (
    batch_sizes,
    check_samples_left,
    end_of_run,
    is_complete,
    open_datasets,
    open_loader,
)
from megalite.training.save_folder import only_writer
from megalite.training.step import StepOutcome, Trainer
from megalite.training.stopping import StopRequest, due
from megalite.training.window import Window


def run(config: Config, topology: Topology, started: float | None = None) -> None:
    """Train, evaluate and save as configured. A collective: every rank calls it.

    `started`: when the process did, by the monotonic clock; None: now. Raises TrainingError and
    CheckpointError, the same on all ranks, for what the user must mend.
    """
    started = time.monotonic() if started is None else started
    if config.logging.timing_log_level:
        topology = with_traffic(topology, TimedTraffic(clock_of(topology.device)))
    reporting = topology.rank == topology.world_size - 1  # the last rank: it has the loss
    save = None if config.batch.skip_train else config.checkpoint.save
    with (
        only_writer(save, topology.rank == 0) as check_folder,
        Reporter(config.logging.metrics_file, config.logging.tensorboard_dir, reporting) as reporter,
    ):
        expected = saved_order(config)
        datasets = open_datasets(config, expected)
        trainer = Trainer(config, topology)
        progress, lines, drawn, order = load_progress(trainer)
        if order != expected:  # a damaged checkpoint was passed over
            datasets = open_datasets(config, order)
        if datasets.train is not None and datasets.train.order is not None and not config.batch.skip_train:
            lines += datasets.train.order.lines
        lines += overwriting(config, progress, save)
        if datasets.warning is not None:
            lines.append(f"warning: {datasets.warning}")
        for line in [*_description(trainer), *lines]:
            reporter.say(line)
        with StopRequest(config, topology, started) as stop:
            if not config.batch.skip_train:
                progress = train(trainer, datasets, progress, drawn, reporter, stop, check_folder)
            if (config.batch.skip_train or is_complete(trainer, progress)) and not stop.leaves():
                evaluate_at_the_end(trainer, datasets, progress, reporter, stop.leaves)
        if save is not None:
            reporter.say(
                f"to resume this run, {how_to_resume(config)}; to extend it, raise {_length(config)}"
            )


def _length(config: Config) -> str:
    """The flag that says how long the run is."""
    return "--train-iters" if config.batch.train_iters is not None else "--train-samples"


def train(
    trainer: Trainer,
    datasets: Splits,
    progress: Progress,
    drawn_before: Mapping[str, int] | None,
    reporter: Reporter,
    stop: StopRequest,
    check_folder: Callable[[], None],
) -> Progress:
    """Optimizer steps until the run is complete or asked to stop; returns how far it came.

    `drawn_before`: samples of each dataset until `progress`, None when that is not known. `check_folder`: of
    `only_writer`.
    """
    config, topology = trainer.config, trainer.topology
    sizes = batch_sizes(trainer)
    end = end_of_run(config, progress, sizes)
    if progress.iteration >= end.iteration:
        reporter.say(
            f"already trained for {progress.iteration} of {end.iteration} iterations; a larger "
            f"{_length(config)} goes on"
        )
        return progress
    if datasets.train is None:
        raise TrainingError(f"--split {config.data.split} leaves nothing to train on")
    check_samples_left(config, progress, end, len(datasets.train))
    schedule = LearningRateSchedule.from_config(config.optimizer, config.batch)
    window = Window(config, topology, peak_flops(topology.device), end)
    drawn = Drawn(datasets.train, progress.consumed_samples, drawn_before)
    first = not goes_on_in_its_folder(config, progress)
    step = _first_step(trainer, reporter)
    with open_loader(
        trainer, datasets.train, progress.consumed_samples, sizes, config.data.num_workers
    ) as loader:
        while progress.iteration < end.iteration:
            rate = learning_rate(schedule, progress.consumed_samples)
            outcome = step(next(loader), rate)
            step = trainer.train_step
            samples = sizes.size_after(progress.consumed_samples)
            progress = progress.after_step(samples)
            iteration = progress.iteration
            window.add(outcome, samples, loader.wait_seconds)
            if due(iteration, config.run.check_weight_hash_across_dp_replicas_interval):
                check_replicas(trainer, iteration)
            if due(iteration, config.logging.log_interval) or iteration in (1, end.iteration):
                progress = _report(trainer, progress, window, rate, reporter)
            if iteration < end.iteration and due(iteration, config.evaluation.eval_interval):
                with window.paused(progress) as progress:
                    progress = validate(trainer, datasets, progress, reporter, stop.leaves)
            if _saves_after(iteration, config):
                with window.paused(progress) as progress:
                    reporter.say(save_progress(trainer, progress, drawn, first, check_folder))
                first = False
            if reason := stop.asked(iteration):
                reporter.say(f"stopping after iteration {iteration}: {reason}")
                break
    progress = window.settle(progress)
    for line in drawn_lines(drawn.after(progress.consumed_samples)):
        reporter.say(line)
    if config.checkpoint.save is not None and not _saves_after(progress.iteration, config):
        reporter.say(save_progress(trainer, progress, drawn, first, check_folder))
    return progress


def _first_step(trainer: Trainer, reporter: Reporter) -> Callable[[list[Batch], float], StepOutcome]:
    """The training step, but for one whose memory is to be measured: the plan of it is told here."""
    config, topology = trainer.config, trainer.topology
    if not config.logging.memory_report:
        return trainer.train_step
    on_host = topology.device.type == "cpu"
    plan = plan_memory(config, topology.world_size, on_host) if reporter.enabled else None
    for line in plan_lines(plan, free_memory_bytes(topology.device)) if plan is not None else ():
        reporter.say(line)
    return lambda microbatches, rate: measured_step(trainer, microbatches, rate, plan, reporter.say)


def _report(
    trainer: Trainer, progress: Progress, window: Window, rate: float, reporter: Reporter
) -> Progress:
    """Wait for the steps since the last report and tell of them."""
    progress = window.settle(progress)
    lines = window.timing(trainer.buckets.lengths)
    reporter.step(window.close(progress, rate))
    for line in lines:
        reporter.say(line)
    return progress


def _saves_after(iteration: int, config: Config) -> bool:
    return config.checkpoint.save is not None and due(iteration, config.checkpoint.save_interval)


def _description(trainer: Trainer) -> list[str]:
    """What was built, checked against what was configured."""
    config, topology = trainer.config, trainer.topology
    built, expected = trainer.parameter_count(), parameter_count(config.model)
    if built != expected:
        raise TrainingError(
            f"the model has {built:,} parameters, but its configuration says {expected:,}: this is a bug"
        )
    cost = bytes_per_parameter(config.precision)
    held = buffer_bytes(trainer)
    on_device = held["parameters"] + held["gradients"] + held["optimizer"] - held["offloaded"]
    place = f"tp {topology.tp.size} x pp {topology.pp.size} x dp {topology.dp.size}, {topology.device.type}"
    formula = cost.formula(topology.dp.size, zero_stage(config))
    optimizer, hosted = config.optimizer, []
    if optimizer.optimizer_cpu_offload:
        share = optimizer.optimizer_offload_fraction
        size = shown(held["offloaded"])
        hosted = [f"in host memory: {size}, the optimizer state of {share:.0%} of the parameters"]
    return [
        f"model: {built:,} parameters, {config.precision.params_dtype}",
        f"layout: {place}",
        f"weights, gradients, optimizer: {formula} bytes a parameter, {shown(on_device)} on this rank",
        *hosted,
    ]
