"""Validation while training goes on, and the test at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megalite.data.build import Dataset, Splits
from megalite.training.metrics import Reporter
from megalite.training.progress import Progress
from megalite.training.samples import batch_sizes, open_loader
from megalite.training.step import Trainer


def _evaluate(
    trainer: Trainer, dataset: Dataset, consumed_samples: int, leave: Callable[[], bool]
) -> float | None:
    with open_loader(trainer, dataset, consumed_samples, _batch_size(trainer)) as loader:
        loss = trainer.evaluate(loader, trainer.config.evaluation.eval_iters, leave)
    return None if loss is None else float(loss)


def _batch_size(trainer: Trainer) -> int:
    """An evaluation has the run's final batch from the beginning."""
    return batch_sizes(trainer).sizes[-1]


def validate(
    trainer: Trainer,
    datasets: Splits,
    progress: Progress,
    reporter: Reporter,
    leave: Callable[[], bool],
) -> Progress:
    """Evaluate on the next validation samples; each evaluation reads others while there are any.

    `leave`: asked between its batches whether to give it up, the same on every rank.
    """
    config = trainer.config
    if datasets.valid is None or config.evaluation.eval_iters == 0:
        return progress
    read = config.evaluation.eval_iters * _batch_size(trainer)
    start = progress.consumed_valid_samples
    if start + read > len(datasets.valid):  # resumed with evaluations that are larger, or were more frequent
        start = 0
    loss = _evaluate(trainer, datasets.valid, start, leave)
    reporter.validation(progress.iteration, "valid_loss", f"iteration {progress.iteration}", loss)
    return replace(progress, consumed_valid_samples=start + read)


def evaluate_at_the_end(
    trainer: Trainer, datasets: Splits, progress: Progress, reporter: Reporter, leave: Callable[[], bool]
) -> None:
    """A last validation, and the test split from its beginning; `leave` as of `validate`."""
    validate(trainer, datasets, progress, reporter, leave)
    if datasets.test is not None and trainer.config.evaluation.eval_iters:
        loss = _evaluate(trainer, datasets.test, 0, leave)
        reporter.validation(
            progress.iteration, "test_loss", f"iteration {progress.iteration} on test set", loss
        )
