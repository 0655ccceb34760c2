"""Opens datasets and lays out their samples: for a run from its beginning, or from a place in its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.config.blend import Blend
from megalite.data.blend_counts import BlendCounts
from megalite.data.blended_dataset import (
    BlendedDataset,
    cached_blend_index,
    cached_exhaustive_index,
    normalize,
    samples_per_dataset,
    with_surplus,
)
from megalite.data.continued_blend import ContinuedBlend
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset, default_cache, identity_of
from megalite.data.indexed_dataset import IndexedDataset, check_token_ids, open_dataset
from megalite.data.sample_plan import SamplePlan, plan_samples
from megalite.data.shortage import started_pool
from megalite.data.splits import Share, document_range
from megalite.data.stretches import DatasetPlace, Round, Stretch

BUILDER_THREADS = 8
MOST_ADDED_ROUNDS = 16  # each is an index of its own


class SourceBuilder:
    """Builds splits, opening each dataset once."""

    def __init__(self, seq_length: int, seed: int, cache: Path | None) -> None:
        """`cache`: folder of the index arrays; None puts those of each dataset beside it."""
        self.seq_length = seq_length
        self.seed = seed
        self.cache = cache
        self._opened: dict[str, IndexedDataset] = {}
        self._not_kept: dict[Path, str] = {}

    def not_kept(self) -> str | None:
        """What a user should know of index arrays that could not be written; None where all could."""
        if not self._not_kept:
            return None
        folder, reason = next(iter(self._not_kept.items()))
        more = f" and {len(self._not_kept) - 1} other folders" if len(self._not_kept) > 1 else ""
        return (
            f"index arrays cannot be kept in {folder} ({reason}){more}: every process builds and holds them "
            "by itself; give --data-cache-path a folder that can be written"
        )

    def _tell(self, folder: Path, reason: str) -> None:
        self._not_kept[folder] = reason

    def build(self, name: str, blend: Blend, share: Share, size: int | None) -> GPTDataset | BlendedDataset:
        """The samples of a run from its beginning, in Megatron-LM's order: at least `size`, or one epoch for
        None.
        """
        if len(blend.prefixes) == 1 and (blend.weights is None or size is None):
            return self._dataset(blend.prefixes[0], share, size)
        if blend.weights is None:
            datasets = self._datasets(blend.prefixes, share, [None] * len(blend.prefixes))
            lengths = [len(dataset) for dataset in datasets]
            if sum(lengths) == 0:
                raise DataError(
                    f"{name} split: none of the {len(datasets)} datasets holds one whole sample of "
                    f"{self.seq_length} tokens"
                )
            return BlendedDataset(datasets, *cached_exhaustive_index(self.cache, lengths, size, self._tell))
        if size is None:
            raise DataError(
                f"{name} split: a blend with weights has no end of its own; give --{name}-samples, 0 for none"
            )
        weights = normalize(blend.weights)
        targets = samples_per_dataset(weights, size)
        datasets_of, samples_of = cached_blend_index(self.cache, normalize(weights), sum(targets), self._tell)
        drawn = BlendCounts(datasets_of, len(targets)).first(len(datasets_of))
        needed = [
            self._needed(prefix, share, with_surplus(target), int(count))
            for prefix, target, count in zip(blend.prefixes, targets, drawn, strict=True)
        ]
        return BlendedDataset(self._datasets(blend.prefixes, share, needed), datasets_of, samples_of)

    def _needed(self, prefix: str, share: Share, asked: int, drawn: int) -> int:
        """How many samples of a dataset of a blend are built: those that Megatron-LM has `asked` for, whose
        order depends on their number. Rounding may draw more: these are built where whole epochs of those
        have not as many, so that there is no order of Megatron-LM's.
        """
        if drawn <= asked or self._plan(prefix, share, asked, 0).samples >= drawn:
            return asked
        return drawn

    def go_on(self, stretch: Stretch, share: Share, samples: int) -> ContinuedBlend:
        """The samples of `stretch` up to number `samples` of the run; rounds are added to datasets that it
        reads to their end.
        """
        count = max(0, samples - stretch.first_sample)
        if stretch.left is not None:
            datasets_of, samples_of = cached_exhaustive_index(self.cache, stretch.left, count, self._tell)
        else:
            weights = normalize(stretch.weights or [1.0])
            count = sum(samples_per_dataset(weights, count))
            datasets_of, samples_of = cached_blend_index(self.cache, normalize(weights), count, self._tell)
        drawn = BlendCounts(datasets_of, len(stretch.datasets)).first(len(datasets_of))
        self._open(place.prefix for place in stretch.datasets)
        grown: list[DatasetPlace] = []
        rounds: list[list[SamplePlan]] = []
        for place, more in zip(stretch.datasets, drawn, strict=True):
            plans = self.plans(place, share)
            missing = place.place + int(more) - sum(plan.samples for plan in plans)
            while missing > 0 or not plans:
                plans.append(self._added_round(place.prefix, share, missing, len(plans)))
                missing -= plans[-1].samples
            made = tuple(Round(plan.epochs, plan.separate_final_epoch) for plan in plans)
            grown.append(replace(place, rounds=made))
            rounds.append(plans)
        skipped = []
        for place, plans in zip(grown, rounds, strict=True):
            over = 0
            while len(plans) > 1 and over + plans[0].samples <= place.place:
                over += plans.pop(0).samples
            skipped.append(over)
        with started_pool(BUILDER_THREADS) as pool:
            pairs = [
                (place.prefix, plan) for place, plans in zip(grown, rounds, strict=True) for plan in plans
            ]
            built = iter(list(pool.map(lambda pair: self._index(*pair), pairs)))
        open_rounds = [[next(built) for _ in plans] for plans in rounds]
        return ContinuedBlend(
            replace(stretch, datasets=tuple(grown)), open_rounds, skipped, datasets_of, samples_of
        )

    def identity(self, prefix: str, share: Share) -> str:
        """`identity_of` the documents of a dataset's share."""
        dataset = self.open(prefix)
        return identity_of(dataset, *document_range(share, dataset.sequences))

    def plans(self, place: DatasetPlace, share: Share) -> list[SamplePlan]:
        """The rounds of a dataset."""
        one_epoch = [self._plan(place.prefix, share, None, number) for number in range(len(place.rounds))]
        return [replace(plan, **each._asdict()) for plan, each in zip(one_epoch, place.rounds, strict=True)]

    def first_round(self, prefix: str, share: Share, size: int | None) -> SamplePlan:
        """The epochs that hold `size` samples of a dataset, or one epoch for None."""
        return self._plan(prefix, share, size, 0)

    def _added_round(self, prefix: str, share: Share, missing: int, number: int) -> SamplePlan:
        """One epoch, so that nothing is read twice before everything was; where `missing` samples would take
        too many of those, one round with all of them.
        """
        epoch = self._plan(prefix, share, None, number)
        few = missing <= MOST_ADDED_ROUNDS * epoch.samples
        return epoch if few else self._plan(prefix, share, missing, number)

    def _plan(self, prefix: str, share: Share, size: int | None, number: int) -> SamplePlan:
        """Round `number` of a dataset, which has a seed of its own."""
        dataset = self.open(prefix)
        documents = document_range(share, dataset.sequences)
        seed = (self.seed + number) % (1 << 32) if number else self.seed
        return plan_samples(dataset, documents, self.seq_length, seed, size)

    def _index(self, prefix: str, plan: SamplePlan) -> GPTDataset:
        return GPTDataset(self.open(prefix), plan, self.cache or default_cache(prefix), self._tell)

    def _dataset(self, prefix: str, share: Share, size: int | None) -> GPTDataset:
        return self._index(prefix, self._plan(prefix, share, size, 0))

    def _datasets(
        self, prefixes: Sequence[str], share: Share, sizes: Sequence[int | None]
    ) -> list[GPTDataset]:
        self._open(prefixes)
        with started_pool(BUILDER_THREADS) as pool:
            return list(
                pool.map(
                    lambda pair: self._dataset(pair[0], share, pair[1]), zip(prefixes, sizes, strict=True)
                )
            )

    def _open(self, prefixes: Iterable[str]) -> None:
        for prefix in prefixes:
            self.open(prefix)

    def open(self, prefix: str) -> IndexedDataset:
        """The dataset `prefix`. Raises DataError as `open_dataset` does, and for one that holds no ids."""
        if prefix not in self._opened:
            dataset = open_dataset(prefix)
            check_token_ids(dataset)
            self._opened[prefix] = dataset
        return self._opened[prefix]
