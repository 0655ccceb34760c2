"""The samples that a run reads: its datasets, the loaders over them, and how many steps they make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from megalite.config import (
    BatchSchedule,
    Config,
    running_batch_schedule,
    split_sample_counts,
    train_iterations,
)
from megalite.data.build import Dataset, Splits, build_datasets
from megalite.data.errors import DataError
from megalite.data.loader import StepLoader
from megalite.data.stretches import OrderRecord
from megalite.data.tokenizer import build_tokenizer
from megalite.listing import listing
from megalite.parallel.everywhere import gather_objects, on_every_rank
from megalite.training.errors import TrainingError
from megalite.training.meeting import meet, signs_of_life
from megalite.training.progress import Progress
from megalite.training.step import Trainer

INDEX_PATIENCE = timedelta(hours=2)  # a node may build alone what others have, each array at its disk's pace
INDEX_ADVICE = (
    "make them before the run, on its node, with tools/inspect_data.py --build-cache, or raise "
    "--distributed-timeout-minutes beyond that time"
)


def open_datasets(config: Config, order: Mapping[str, Any] | None) -> Splits:
    """The three splits, as long as the run needs them; `order`: of the training samples in the checkpoint
    that it goes on from.

    A collective. Raises TrainingError on every rank for what cannot be read on any, and for ranks that find
    different data or tokenizers, as on nodes with copies of their own.
    """
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    patience = max(INDEX_PATIENCE, timeout)
    with signs_of_life():
        datasets, found = on_every_rank(
            lambda: _open_datasets(config, order),
            DataError,
            TrainingError,
            meet=lambda: meet("its datasets and their index arrays", patience, timeout, INDEX_ADVICE),
        )
    identities = [each.identity for each in found]
    mine = hashlib.sha256(" ".join(identities).encode()).hexdigest()
    digests, warnings = zip(*gather_objects((mine, datasets.warning)), strict=True)
    if len(set(digests)) > 1:
        everyones = zip(*gather_objects(identities), strict=False)
        differing = [one for one, each in zip(found, everyones, strict=False) if len(set(each)) > 1]
        what = differing[0].differs if differing else "the data: is another"
        others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        raise TrainingError(
            f"{what} on rank {listing(others)} than on rank 0; every node must have the same files"
        )
    return datasets._replace(warning=_first(warnings))


def _first(warnings: Sequence[str | None]) -> str | None:
    """That of the lowest rank that has one, and whose it is."""
    warned = [(rank, warning) for rank, warning in enumerate(warnings) if warning is not None]
    if not warned:
        return None
    rank, warning = warned[0]
    return warning if len(warnings) == 1 else f"rank {rank}, {len(warned)} of {len(warnings)}: {warning}"


class _Found(NamedTuple):
    """What must be the same on every rank, and what is said where it is not."""

    identity: str
    differs: str


def _open_datasets(config: Config, order: Mapping[str, Any] | None) -> tuple[Splits, list[_Found]]:
    """The splits, and what they were made from: the tokenizer and each dataset."""
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    saved = None if order is None else OrderRecord.from_json(order)
    counts = split_sample_counts(config)
    splits = build_datasets(config.data, tokenizer, config.model.seq_length, config.run.seed, counts, saved)
    datasets = [each for each in splits[:3] if each is not None]
    text = f"{tokenizer.identity}, documents end with {datasets[0].rules.eod if datasets else None}"
    places = [place for each in datasets for place in each.samples.places(0)]
    found = [_Found(place.identity, f"{place.prefix}: holds other documents") for place in places]
    files = "--tokenizer-model" if config.data.tokenizer_model is not None else "--vocab-file, --merge-file"
    if splits.train is not None and splits.train.order is not None:
        last = splits.train.order.before.stretches[-1]
        found.append(_Found(last.identity(), "the order of the training samples: is another"))
    return splits, [_Found(text, f"{files}: make another tokenizer"), *found]


def batch_sizes(trainer: Trainer) -> BatchSchedule:
    """The global batch of each step, by the samples that were consumed before."""
    return running_batch_schedule(trainer.config, trainer.topology.dp.size)


def open_loader(
    trainer: Trainer,
    dataset: Dataset,
    consumed_samples: int,
    sizes: BatchSchedule | int,
    workers: int = 0,
) -> StepLoader:
    """This rank's micro-batches of every global batch after `consumed_samples`, read by `workers` processes,
    or for 0 by a thread.
    """
    dp = trainer.topology.dp
    return StepLoader(
        dataset,
        trainer.config.batch.micro_batch_size,
        sizes,
        dp.rank,
        dp.size,
        consumed_samples,
        trainer.topology.device,
        trainer.config.model.vocab_size,
        workers,
    )


@dataclass(frozen=True)
class End:
    """Where the run is complete: the iteration, and the samples consumed by then."""

    iteration: int
    samples: int


def end_of_run(config: Config, progress: Progress, sizes: BatchSchedule) -> End:
    """The end as seen from `progress`; a run measured in samples may have changed its batch."""
    if config.batch.train_samples is None:
        left = max(0, train_iterations(config) - progress.iteration)
        return End(train_iterations(config), progress.consumed_samples + left * sizes.sizes[-1])
    steps, samples = sizes.advance(progress.consumed_samples, config.batch.train_samples)
    return End(progress.iteration + steps, samples)


def is_complete(trainer: Trainer, progress: Progress) -> bool:
    """Whether no step is left."""
    return progress.iteration >= end_of_run(trainer.config, progress, batch_sizes(trainer)).iteration


def check_samples_left(config: Config, progress: Progress, end: End, samples: int) -> None:
    """A resumed run with a smaller global batch can have consumed more than its iterations now amount to."""
    if end.samples > samples:
        batch = config.batch.global_batch_size
        raise TrainingError(
            f"{progress.iteration} iterations consumed {progress.consumed_samples} samples, and the other "
            f"{end.iteration - progress.iteration} of {batch} need {end.samples} in all, but with "
            f"--train-iters {end.iteration} and --global-batch-size {batch} there are {samples}: the run to "
            f"be resumed had a larger global batch. Give its length as --train-samples {end.samples}, or the "
            "old --global-batch-size, or --finetune"
        )
