"""The training samples of a run that may be resumed with another blend or length, and how it goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megalite.config.blend import Blend
from megalite.data.blended_dataset import BlendedDataset
from megalite.data.continued_blend import ContinuedBlend
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import GPTDataset, Piece
from megalite.data.source_builder import SourceBuilder
from megalite.data.splits import Share
from megalite.data.stretches import (
    DatasetPlace,
    OrderKey,
    OrderRecord,
    ReadBefore,
    Stretch,
    furthest,
    last_name,
    moved,
    normal,
    without_repeats,
)

SHOWN = 20


@dataclass(frozen=True)
class DataOrder:
    """The samples still to come, with the history that a checkpoint must keep."""

    source: GPTDataset | BlendedDataset | ContinuedBlend
    before: OrderRecord
    """As it would be saved at the beginning of the last stretch."""
    lines: tuple[str, ...] = ()
    """What a reader of the log should know."""
    _names: Mapping[str, str] = field(init=False)
    """Absolute prefixes by those given: the working folder may have another name later, or none."""

    def __post_init__(self) -> None:
        names = {place.prefix: normal(place.prefix) for place in self.source.places(0)}
        object.__setattr__(self, "_names", names)

    def record(self, consumed_samples: int) -> OrderRecord:
        """What a checkpoint keeps after `consumed_samples` of the run."""
        last = self.before.stretches[-1]
        if isinstance(self.source, ContinuedBlend):
            last = self.source.stretch
        last = last.moved_to([self._names[place.prefix] for place in last.datasets])
        left = self.moved(consumed_samples)
        return replace(
            self.before,
            consumed_samples=consumed_samples,
            stretches=(*self.before.stretches[:-1], last),
            read=furthest(
                (place for place in self.before.read if normal(place.prefix) not in left),
                self._places(consumed_samples),
            ),
        )

    def moved(self, consumed_samples: int) -> dict[str, str]:
        """The new places of datasets that lay elsewhere when they were read, by the old ones, as absolute
        prefixes, after that many samples of the run.
        """
        return moved(self.before.read, self._places(consumed_samples))

    def _places(self, consumed_samples: int) -> list[DatasetPlace]:
        places = self.source.places(consumed_samples)
        return [replace(place, prefix=self._names[place.prefix]) for place in places]


def order_samples(
    builder: SourceBuilder,
    name: str,
    blend: Blend,
    share: Share,
    samples: int,
    saved: OrderRecord | None,
) -> DataOrder:
    """At least `samples` samples: Megatron-LM's order, or what follows on `saved`.

    Where sequence length, seed or share are others than the saved ones, no place can be taken over and the
    order is that of a new run. Raises DataError.
    """
    key = OrderKey(builder.seq_length, builder.seed, share)
    if saved is None:
        return _from_the_beginning(builder, key, name, blend, samples)
    if (changes := saved.key.changes(key)) and saved.consumed_samples:
        told = (
            f"warning: {', '.join(changes)}: that makes another order, of which the run goes on at sample "
            f"{saved.consumed_samples:,}; samples may repeat or be left out"
        )
        return _from_the_beginning(builder, key, name, blend, samples, saved, (told,))
    if changes:
        return _from_the_beginning(builder, key, name, blend, samples)
    share = saved.key.share
    last = _still(builder, share, saved.stretches[-1], blend)
    if last is not None:
        if len(saved.stretches) == 1 and _is_one_round(builder, share, last, samples):
            once = Blend(tuple(place.prefix for place in last.datasets), last.weights)
            order = _from_the_beginning(builder, saved.key, name, once, samples, saved.earlier)
            return replace(order, before=replace(order.before, read=saved.read))
        return _go_on(builder, name, saved, last, saved.stretches[:-1], samples, ())
    stretch, lines = _next_stretch(builder, name, share, blend, saved)
    return _go_on(builder, name, saved, stretch, saved.stretches, samples, lines)


def _from_the_beginning(
    builder: SourceBuilder,
    key: OrderKey,
    name: str,
    blend: Blend,
    samples: int,
    earlier: OrderRecord | None = None,
    lines: tuple[str, ...] = (),
) -> DataOrder:
    source = builder.build(name, blend, key.share, samples)
    places = tuple(source.places(0))
    by_size = blend.weights is None and isinstance(source, BlendedDataset)
    left = tuple(len(dataset) for dataset in source.datasets) if isinstance(source, BlendedDataset) else None
    stretch = Stretch(0, blend.weights, left if by_size else None, places)
    return DataOrder(source, OrderRecord(key, samples, 0, (stretch,), (), earlier), lines)


def _still(builder: SourceBuilder, share: Share, last: Stretch, blend: Blend) -> Stretch | None:
    """The last stretch, its datasets where they are now, if `blend` asks for it over the same data."""
    for asked in (blend, without_repeats(blend)):
        if last.has_blend(asked) and all(
            builder.identity(prefix, share) == place.identity
            for place, prefix in zip(last.datasets, asked.prefixes, strict=True)
        ):
            return last.moved_to(asked.prefixes)
    return None


def _is_one_round(builder: SourceBuilder, share: Share, only: Stretch, samples: int) -> bool:
    """Whether this is a single dataset in the order of a new run, which needs no mixture."""
    if len(only.datasets) > 1 or only.weights is not None:
        return False
    (place,) = only.datasets
    return [builder.first_round(place.prefix, share, samples)] == builder.plans(place, share)


def _next_stretch(
    builder: SourceBuilder, name: str, share: Share, blend: Blend, saved: OrderRecord
) -> tuple[Stretch, tuple[str, ...]]:
    """The stretch that begins at `saved` with another blend."""
    blend = without_repeats(blend)
    identities = {prefix: builder.identity(prefix, share) for prefix in blend.prefixes}
    before = ReadBefore(saved.read, identities)
    places, notes = [], []
    for prefix, identity in identities.items():
        found = before.take_up(prefix, identity)
        if found is not None:
            notes.append(f"{prefix} goes on at its sample {found.place:,}")
        elif before.has_name(prefix):
            notes.append(f"warning: {prefix} holds other documents than it did: read from the beginning")
        else:
            notes.append(f"{prefix} is new")
        places.append(found or DatasetPlace(prefix, identity, (), 0))
    left = None
    if blend.weights is None and len(places) > 1:
        left = tuple(_left(builder, share, place) for place in places)
        if sum(left) == 0:
            raise DataError(
                f"{name} split: all of its {len(places)} datasets have been read, and without weights each "
                f"is read once; give each a weight (1 A 1 B), so that they repeat, or add others"
            )
    if len(notes) > SHOWN:
        notes.sort(key=lambda note: (not note.startswith("warning: "), not note.endswith(" is new")))
    first = f"from sample {saved.consumed_samples:,} on the blend is another one"
    rest = [f"{len(notes) - SHOWN} more datasets"] if len(notes) > SHOWN else []
    stretch = Stretch(saved.consumed_samples, blend.weights, left, tuple(places))
    return stretch, (first, *notes[:SHOWN], *rest)


def _left(builder: SourceBuilder, share: Share, place: DatasetPlace) -> int:
    """Samples of the present rounds that were not drawn, the first round if there is none."""
    rounds = builder.plans(place, share) or [builder.first_round(place.prefix, share, None)]
    return sum(plan.samples for plan in rounds) - place.place


def _go_on(
    builder: SourceBuilder,
    name: str,
    saved: OrderRecord,
    stretch: Stretch,
    earlier: tuple[Stretch, ...],
    samples: int,
    lines: tuple[str, ...],
) -> DataOrder:
    source = builder.go_on(stretch, saved.key.share, samples)
    before = replace(saved, samples=samples, stretches=(*earlier, source.stretch))
    return DataOrder(source, before, lines)


class RunHistory:
    """Where each sample of a run came from or will come from, over all its orders and stretches."""

    def __init__(self, builder: SourceBuilder, order: DataOrder) -> None:
        self._builder = builder
        self._order = order
        self._earlier: dict[tuple[OrderKey, Stretch, int], ContinuedBlend] = {}
        self._now: dict[str, list[str]] = {}
        for place in order.before.stretches[-1].datasets:
            self._now.setdefault(last_name(place.prefix), []).append(place.prefix)

    def __len__(self) -> int:
        return len(self._order.source)

    def pieces(self, sample: int) -> list[Piece]:
        """Where the tokens of `sample` of the run come from. Raises DataError where other documents are there
        now than those it was drawn from.
        """
        record, until = self._order.before, len(self)
        while (earlier := record.earlier) is not None and sample < earlier.consumed_samples:
            record, until = earlier, earlier.consumed_samples
        number = max(n for n, stretch in enumerate(record.stretches) if stretch.first_sample <= sample)
        stretch, later = record.stretches[number], record.stretches[number + 1 :]
        if record is self._order.before and not later:
            return self._order.source.pieces(sample)
        part = record.key, stretch, later[0].first_sample if later else until
        if part not in self._earlier:
            self._earlier[part] = self._draw(*part)
        return self._earlier[part].pieces(sample)

    def _draw(self, key: OrderKey, stretch: Stretch, until: int) -> ContinuedBlend:
        """`stretch` as it was drawn, up to sample `until`."""
        builder = self._builder
        if (key.seq_length, key.seed) != (builder.seq_length, builder.seed):
            builder = SourceBuilder(key.seq_length, key.seed, builder.cache)
        drawn = f"samples {stretch.first_sample:,} to {until - 1:,}"
        places = tuple(self._find(builder, key.share, place, drawn) for place in stretch.datasets)
        return builder.go_on(replace(stretch, datasets=places), key.share, until)

    def _find(self, builder: SourceBuilder, share: Share, place: DatasetPlace, drawn: str) -> DatasetPlace:
        """`place` itself, or where the run has a dataset of its name and content now. Raises DataError."""
        for prefix in (place.prefix, *self._now.get(last_name(place.prefix), ())):
            if os.path.isfile(f"{prefix}.idx") and builder.identity(prefix, share) == place.identity:
                return replace(place, prefix=prefix)
        raise DataError(
            f"{place.prefix}: holds other documents than those from which {drawn} were drawn, or none; where "
            "they were moved, name their place in --data-path too"
        )
