"""The training run, from top to bottom."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

import torch
import torch.distributed as dist

from megalite.accelerator import peak_flops
from megalite.config import Config, parameter_count, split_sample_counts, train_iterations
from megalite.data.build import Dataset, Splits, build_datasets
from megalite.data.errors import DataError
from megalite.data.loader import StepLoader
from megalite.data.tokenizer import build_tokenizer
from megalite.optim.memory import bytes_per_parameter
from megalite.optim.schedule import LearningRateSchedule, learning_rate
from megalite.parallel.topology import Topology
from megalite.training.drawn import Drawn, drawn_lines
from megalite.training.errors import TrainingError, on_every_rank
from megalite.training.metrics import Reporter
from megalite.training.progress import Progress, load_progress, save_progress
from megalite.training.save_folder import only_writer
from megalite.training.step import Trainer
from megalite.training.window import Window


def run(config: Config, topology: Topology) -> None:
    """Train, evaluate and save as configured. A collective: every rank calls it.

    Raises TrainingError and CheckpointError, the same on all ranks, for what the user must mend.
    """
    started = time.monotonic()
    reporting = topology.rank == topology.world_size - 1  # the last rank: it has the loss
    save = None if config.batch.skip_train else config.checkpoint.save
    with (
        only_writer(save, topology.rank == 0),
        Reporter(config.logging.metrics_file, config.logging.tensorboard_dir, reporting) as reporter,
    ):
        datasets = on_every_rank(lambda: _open_datasets(config), DataError)
        trainer = Trainer(config, topology)
        progress, lines, drawn = load_progress(trainer)
        for line in [*_description(trainer), *lines]:
            reporter.say(line)
        if not config.batch.skip_train:
            progress = train(trainer, datasets, progress, drawn, reporter, started)
        if config.batch.skip_train or progress.iteration >= _last_iteration(config, progress):
            _final_evaluation(trainer, datasets, progress, reporter)
        if save is not None:
            also = "" if config.checkpoint.load == save else f" with --load {save}"
            reporter.say(f"to resume or extend this run, give the same command again{also}")


def train(
    trainer: Trainer,
    datasets: Splits,
    progress: Progress,
    drawn_before: Mapping[str, int] | None,
    reporter: Reporter,
    started: float,
) -> Progress:
    """Optimizer steps until the run is complete or asked to stop; returns how far it came.

    ``drawn_before``: samples of each dataset until ``progress``, None when that is not known.
    """
    config, topology = trainer.config, trainer.topology
    last = _last_iteration(config, progress)
    if progress.iteration >= last:
        reporter.say(
            f"already trained for {progress.iteration} of {last} iterations; a larger --train-iters goes on"
        )
        return progress
    schedule = LearningRateSchedule.from_config(config.optimizer, config.batch)
    stop = StopRequest(config, topology, started)
    window = Window(config, topology, peak_flops(topology.device), last)
    if datasets.train is None:
        raise TrainingError(f"--split {config.data.split} leaves nothing to train on")
    _check_samples_left(config, progress, last, len(datasets.train))
    loader = _loader(trainer, datasets.train, progress.consumed_samples)
    drawn = Drawn(datasets.train, progress.consumed_samples, drawn_before)
    every, may_save = config.logging.log_interval, config.checkpoint.save is not None
    saved_at = -1
    while progress.iteration < last:
        rate = learning_rate(schedule, progress.consumed_samples)
        microbatches = next(loader)
        outcome = trainer.train_step(microbatches, rate)
        progress = progress.after_step(config.batch.global_batch_size)
        window.add(outcome, loader.wait_seconds)
        if progress.iteration % every == 0 or progress.iteration in (1, last):
            progress = window.settle(progress)
            reporter.step(window.close(progress, rate))
        validating = progress.iteration < last and _due(progress.iteration, config.evaluation.eval_interval)
        saving = may_save and _due(progress.iteration, config.checkpoint.save_interval)
        if validating or saving:
            progress = window.settle(progress)  # also, so that the pause holds none of the steps' own time
            paused = time.perf_counter()
            if validating:
                progress = _validate(trainer, datasets, progress, reporter)
            if saving:
                reporter.say(save_progress(trainer, progress, drawn.after(progress.consumed_samples)))
                saved_at = progress.iteration
            window.leave_out(time.perf_counter() - paused)
        if reason := stop.asked(progress.iteration):
            reporter.say(f"stopping after iteration {progress.iteration}: {reason}")
            break
    loader.close()
    progress = window.settle(progress)
    counts = drawn.after(progress.consumed_samples)
    for line in drawn_lines(counts):
        reporter.say(line)
    if may_save and saved_at != progress.iteration:
        reporter.say(save_progress(trainer, progress, counts))
    return progress


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
        if _due(iteration, batch.exit_interval):
            return f"--exit-interval {batch.exit_interval}"
        return None

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Which of the flags are set on any rank."""
        tensor = torch.tensor(flags, dtype=torch.int32, device=self.topology.device)
        if self.topology.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _last_iteration(config: Config, progress: Progress) -> int:
    """The iteration at which the run is complete; one measured in samples may have changed its batch."""
    if config.batch.train_samples is None:
        return train_iterations(config)
    left = max(0, config.batch.train_samples - progress.consumed_samples)
    return progress.iteration + left // config.batch.global_batch_size


def _check_samples_left(config: Config, progress: Progress, last: int, samples: int) -> None:
    """A resumed run with a smaller global batch can have consumed more than its iterations now amount to."""
    batch = config.batch.global_batch_size
    needed = progress.consumed_samples + (last - progress.iteration) * batch
    if needed > samples:
        raise TrainingError(
            f"{progress.iteration} iterations consumed {progress.consumed_samples} samples, and the other "
            f"{last - progress.iteration} of {batch} need {needed} in all, but --train-iters {last} x "
            f"--global-batch-size {batch} makes {samples}: the run to be resumed had a larger global batch. "
            f"Give its length as --train-samples {needed}, or the old --global-batch-size, or --finetune"
        )


def _open_datasets(config: Config) -> Splits:
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    counts = split_sample_counts(config)
    return build_datasets(config.data, tokenizer, config.model.seq_length, config.run.seed, counts)


def _loader(trainer: Trainer, dataset: Dataset, consumed_samples: int) -> StepLoader:
    batch, dp = trainer.config.batch, trainer.topology.dp
    return StepLoader(
        dataset,
        batch.micro_batch_size,
        batch.global_batch_size,
        dp.rank,
        dp.size,
        consumed_samples,
        trainer.topology.device,
        vocab_size=trainer.config.model.vocab_size,
    )


def _evaluate(trainer: Trainer, dataset: Dataset, consumed_samples: int) -> float:
    with _loader(trainer, dataset, consumed_samples) as loader:
        return float(trainer.evaluate(loader, trainer.config.evaluation.eval_iters))


def _validate(trainer: Trainer, datasets: Splits, progress: Progress, reporter: Reporter) -> Progress:
    """Evaluate on the next validation samples; each evaluation reads others while there are any."""
    config = trainer.config
    if datasets.valid is None or config.evaluation.eval_iters == 0:
        return progress
    read = config.evaluation.eval_iters * config.batch.global_batch_size
    start = progress.consumed_valid_samples
    if start + read > len(datasets.valid):  # resumed with evaluations that are larger, or were more frequent
        start = 0
    loss = _evaluate(trainer, datasets.valid, start)
    reporter.validation(progress.iteration, "valid_loss", f"iteration {progress.iteration}", loss)
    return replace(progress, consumed_valid_samples=start + read)


def _final_evaluation(trainer: Trainer, datasets: Splits, progress: Progress, reporter: Reporter) -> None:
    _validate(trainer, datasets, progress, reporter)
    if datasets.test is not None and trainer.config.evaluation.eval_iters:
        loss = _evaluate(trainer, datasets.test, 0)
        reporter.validation(
            progress.iteration, "test_loss", f"iteration {progress.iteration} on test set", loss
        )


def _description(trainer: Trainer) -> list[str]:
    """What was built, checked against what was configured."""
    config, topology = trainer.config, trainer.topology
    built, expected = trainer.parameter_count(), parameter_count(config.model)
    if built != expected:
        raise TrainingError(
            f"the model has {built:,} parameters, but its configuration says {expected:,}: this is a bug"
        )
    cost = bytes_per_parameter(trainer.dtype)
    held = sum(bucket.weights.numel() for bucket in trainer.buckets.buckets)
    place = f"tp {topology.tp.size} x pp {topology.pp.size} x dp {topology.dp.size}, {topology.device.type}"
    parts = f"{cost.weights} + {cost.main_grads} + {cost.optimizer}"
    return [
        f"model: {built:,} parameters, {config.precision.params_dtype}",
        f"layout: {place}",
        f"weights, gradients, optimizer: {parts} = {cost.total} bytes a parameter, "
        f"{held * cost.total / 2**20:.1f} MiB on this rank",
    ]
