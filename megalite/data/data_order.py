"""The training samples of a run that may be resumed with another blend or length, and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass

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
    Stretch,
    furthest,
    normal,
    take_up,
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

    def record(self, consumed_samples: int) -> OrderRecord:
        """What a checkpoint keeps after `consumed_samples` of the run."""
        now = self.source.places(consumed_samples)
        last = self.before.stretches[-1]
        if isinstance(self.source, ContinuedBlend):
            last = self.source.stretch
        return OrderRecord(
            self.before.key,
            self.before.samples,
            consumed_samples,
            (*self.before.stretches[:-1], last),
            furthest(self.before.read, now),
        )


def order_samples(
    builder: SourceBuilder,
    name: str,
    blend: Blend,
    share: Share,
    samples: int,
    saved: OrderRecord | None,
) -> DataOrder:
    """At least `samples` samples: Megatron-LM's order, or what follows on `saved`.

    Where sequence length, seed or split are others than the saved ones, no place can be taken over and the
    order is that of a new run. Raises DataError.
    """
    key = OrderKey(builder.seq_length, builder.seed, share)
    if saved is None or saved.key != key:
        return _from_the_beginning(builder, key, name, blend, samples)
    last = saved.stretches[-1]
    if _is_still(builder, share, last, blend):
        if len(saved.stretches) == 1 and _is_one_round(builder, share, last, samples):
            return _from_the_beginning(builder, key, name, blend, samples)
        return _go_on(builder, name, saved, last, saved.stretches[:-1], samples, ())
    stretch, lines = _next_stretch(builder, name, share, blend, saved)
    return _go_on(builder, name, saved, stretch, saved.stretches, samples, lines)


def _from_the_beginning(
    builder: SourceBuilder, key: OrderKey, name: str, blend: Blend, samples: int
) -> DataOrder:
    source = builder.build(name, blend, key.share, samples)
    places = tuple(source.places(0))
    by_size = blend.weights is None and isinstance(source, BlendedDataset)
    left = tuple(len(dataset) for dataset in source.datasets) if isinstance(source, BlendedDataset) else None
    stretch = Stretch(0, blend.weights, left if by_size else None, places)
    return DataOrder(source, OrderRecord(key, samples, 0, (stretch,), ()))


def _is_still(builder: SourceBuilder, share: Share, last: Stretch, blend: Blend) -> bool:
    """Whether the last stretch has the blend that is asked for, over the same data."""
    if not (last.has_blend(blend) or last.has_blend(without_repeats(blend))):
        return False
    return all(builder.identity(place.prefix, share) == place.identity for place in last.datasets)


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
    places, notes = [], []
    for prefix in blend.prefixes:
        identity = builder.identity(prefix, share)
        found = take_up(saved.read, prefix, identity, blend)
        if found is not None:
            notes.append(f"{prefix} goes on at its sample {found.place:,}")
        elif any(normal(place.prefix) == normal(prefix) for place in saved.read):
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
                f"is read once; give each a weight (--data-path 1 A 1 B), so that they repeat, or add others"
            )
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
    before = OrderRecord(saved.key, samples, saved.consumed_samples, (*earlier, source.stretch), saved.read)
    return DataOrder(source, before, lines)


class RunHistory:
    """Where each sample of a run came from or will come from, over all its stretches."""

    def __init__(self, builder: SourceBuilder, order: DataOrder) -> None:
        self._builder = builder
        self._order = order
        self._earlier: dict[int, ContinuedBlend] = {}

    def __len__(self) -> int:
        return len(self._order.source)

    def pieces(self, sample: int) -> list[Piece]:
        """Where the tokens of `sample` of the run come from."""
        stretches = self._order.before.stretches
        number = max(n for n, stretch in enumerate(stretches) if stretch.first_sample <= sample)
        if number == len(stretches) - 1:
            return self._order.source.pieces(sample)
        if number not in self._earlier:
            until = stretches[number + 1].first_sample
            self._earlier[number] = self._builder.go_on(
                stretches[number], self._order.before.key.share, until
            )
        return self._earlier[number].pieces(sample)
