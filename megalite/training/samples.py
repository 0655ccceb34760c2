"""The samples that a run reads: its datasets, the loaders over them, and how many steps they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import Config, split_sample_counts, train_iterations
from megalite.data.build import Dataset, Splits, build_datasets
from megalite.data.loader import StepLoader
from megalite.data.stretches import OrderRecord
from megalite.data.tokenizer import build_tokenizer
from megalite.training.errors import TrainingError
from megalite.training.progress import Progress
from megalite.training.step import Trainer


def open_datasets(config: Config, order: Mapping[str, Any] | None) -> Splits:
    """The three splits, as long as the run needs them; `order`: of the training samples in the checkpoint
    that it goes on from. Raises DataError.
    """
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    saved = None if order is None else OrderRecord.from_json(order)
    counts = split_sample_counts(config)
    return build_datasets(config.data, tokenizer, config.model.seq_length, config.run.seed, counts, saved)


def open_loader(trainer: Trainer, dataset: Dataset, consumed_samples: int, workers: int = 0) -> StepLoader:
    """This rank's micro-batches of every global batch after `consumed_samples`, read by `workers` processes,
    or for 0 by a thread.
    """
    batch, dp = trainer.config.batch, trainer.topology.dp
    return StepLoader(
        dataset,
        batch.micro_batch_size,
        batch.global_batch_size,
        dp.rank,
        dp.size,
        consumed_samples,
        trainer.topology.device,
        trainer.config.model.vocab_size,
        workers,
    )


def last_iteration(config: Config, progress: Progress) -> int:
    """The iteration at which the run is complete; one measured in samples may have changed its batch."""
    if config.batch.train_samples is None:
        return train_iterations(config)
    left = max(0, config.batch.train_samples - progress.consumed_samples)
    return progress.iteration + left // config.batch.global_batch_size


def check_samples_left(config: Config, progress: Progress, last: int, samples: int) -> None:
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
